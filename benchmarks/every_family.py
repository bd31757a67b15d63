"""Every family: bytes and FLOPs of each model family that ``tests/hf`` shrinks, with parameters sharded by name; the worst ones
first.

    python benchmarks/every_family.py [TYPES...] [--layouts tp,fsdp,dp,tp_dp] [--seconds 200] [--out families.jsonl]

Models have 2 layers of width 128 and 8 x 64 tokens (families whose inputs do not fit are left out). Bytes are relative to those
of a hand-written program, counted with hooks: tp reduces the output of each row-sharded layer or table, the gradient of each
input of column-sharded ones, and three numbers a token for sharded logits; fsdp gathers parameters twice and reduce-scatters
gradients; dp all-reduces gradients. FLOPs are relative to those of one device; for tp the replicated layers count once per rank.
Families already in ``--out`` are not run again, so a long list can be run in parts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hf"))
from costing.families import all_reduce_bytes
from model_inputs import parts
from model_sizes import Scale
from program_cost import distribute_inputs, distribute_model, measure_step
from shrink_model import CONFIG_MAPPING, Shrunk, classes_of, shrunk
from training_step import floating, loss_of

import dtensor as dt

WIDE = Scale(
    128, 8, 4, 16, 8, 512, vocabulary=512, batch=8, length=64,
    tried=((0, 32), (0, 64), (4, 64), (2, 64), (-1, 32), (-1, 64), (8, 64)), most_parameters=40_000_000,
)  # fmt: skip
R = dt.Replicate()
_COLUMNS = re.compile(
    r"(^|[._])(q|k|v|qkv|query|key|value|queries|keys|values|(q|k|v|qkv|query|key|value|gate|up|in|gate_up|x|z)_proj\w*|"
    r"(q|k|v)_lin|lin1|linear1|(linear|to|proj)_(q|k|v|query|key|value)|Wqkv|Wi|wi(_\d)?|w1|w3|fc1|fc_in|c_fc|c_attn|"
    r"query_key_value|dense_h_to_4h|lm_head|embed_out|decoder|(word_|tok_)?embeddings?|embed_tokens|wte|shared|embed_in|dt_proj)$|"
    r"(intermediate|ffn)\.(dense|lin1)$"
)
_ROWS = re.compile(
    r"(^|[._])(o|wo|Wo|w2|o_proj|out_proj|out_lin|lin2|down_proj|c_proj|fc2|fc_out|linear2|dense_4h_to_h|proj_out|to_out)$|"
    r"(attention|attn|output)(\.output)?\.(dense|proj)$|\d\.output\.dense$"
)
_HEADS = re.compile(r"(num_|n_)(attention_)?heads?")  # of a module whose parameters are (..., heads, width of one)
_REPLICATED = re.compile(r"embed_positions|position|token_type|norm|patch_embed")


class HandWrittenCost:
    """Placements of parameters in a hand-written tensor-parallel program, the bytes that one pass reduces, and the FLOPs of
    layers on every rank.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.places: dict[int, Any] = {}
        self.given: dict[Any, tuple[int, Tensor]] = {}  # inputs of column-cut layers, kept so that no other has their memory
        self.sent = self.whole = 0
        for name, module in model.named_modules():
            kind = self._kind(name, module)
            if kind:
                module.register_forward_hook(lambda *call, kind=kind: self._count(kind, *call), with_kwargs=True)

    def get_placements(self, names: Any) -> dict[str, Any]:
        return {name: self.places.get(id(p), R) for name, p in names}

    def _kind(self, name: str, module: nn.Module) -> str:
        """Choose the placements of a module's own parameters, and return how it is sharded: "rows", "columns", "table", "stacks",
        "whole" or "".
        """
        turned = type(module).__name__ == "Conv1D"
        stacked = [n for n, p in module.named_parameters(recurse=False) if p.ndim == 3 and not isinstance(module, nn.Conv1d)]
        if any("expert" in f"{name}{n}".lower() for n in stacked):
            self.places |= {id(p): dt.Shard(0) for p in module.parameters(recurse=False) if p.shape[0] % 4 == 0}
            return "stacks"
        heads = next((n for key, n in vars(module).items() if _HEADS.fullmatch(key) and isinstance(n, int)), 0)
        if stacked and heads % 4 == 0 and heads:
            own = [p for p in module.parameters(recurse=False) if p.ndim > 1 and p.shape[-2] == heads]
            self.places |= {id(p): dt.Shard(p.ndim - 2) for p in own}
            return "stacks"
        if not (turned or isinstance(module, (nn.Linear, nn.Embedding))):
            return ""
        if not _REPLICATED.search(name) and _ROWS.search(name):
            self.places[id(module.weight)] = dt.Shard(0 if turned else 1)
            return "rows"
        if not _REPLICATED.search(name) and _COLUMNS.search(name):
            self.places[id(module.weight)] = dt.Shard(1 if turned else 0)
            self.places |= {id(p): dt.Shard(0) for n, p in module.named_parameters(recurse=False) if n == "bias"}
            return "table" if isinstance(module, nn.Embedding) else "columns"
        return "" if isinstance(module, nn.Embedding) else "whole"

    def _count(self, kind: str, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the communication and replicated FLOPs of one call of a module (forward hook)."""
        made = result[0] if isinstance(result, tuple) else result
        given = args[0] if args else next(iter(kwargs.values()))
        if kind in ("rows", "table", "stacks"):
            self.sent += made.nbytes
        if kind in ("columns", "stacks") and given.requires_grad:
            self.given[given.data_ptr(), given.shape] = given.nbytes, given
        if kind == "columns" and module is self.model.get_output_embeddings():  # type: ignore[operator]  # of Hugging Face
            self.sent += 3 * 4 * made.numel() // made.shape[-1]
        if kind == "whole":
            self.whole += 6 * made.numel() * given.shape[-1]

    @property
    def bytes(self) -> int:
        return self.sent + sum(nbytes for nbytes, _ in self.given.values())


def make_step(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], Any]:
    """Return a step of forward and backward without dropout, with the same random numbers in each call."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def step() -> Any:
        torch.manual_seed(3)
        numpy.random.seed(3)  # masks of speech
        with dt.implicit_replication():
            loss = loss_of(dict(floating(model(**inputs))))
            loss.backward()
        return loss.detach()

    return step


def build_training_model(found: Shrunk) -> nn.Module:
    """Build the shrunk model in training mode without caches, which a hand-written program does not have."""
    model = found.build().train()
    for _, part in parts(model.config):  # type: ignore[arg-type]  # that of a model of Hugging Face
        part.use_cache = False
    return model


def measure_family(model_type: str, layouts: list[str]) -> Any:
    """Yield for each layout the ratios of bytes and FLOPs of one family, its collectives, and whether the loss is equal."""
    found = shrunk(model_type, WIDE)
    plain = build_training_model(found)
    hand, shares = HandWrittenCost(plain), [p.nbytes for p in plain.parameters()]
    places = hand.get_placements(plain.named_parameters(remove_duplicate=False))
    one = measure_step(make_step(plain, found.call()))
    for layout in layouts:
        mesh = dt.init_device_mesh("cpu", (2, 2) if layout == "tp_dp" else (4,))
        batch = [R] if layout == "tp" else [dt.Shard(0), R][: mesh.ndim]
        spots: dict[str, Callable[[str, Any], Any]] = {
            "tp": lambda name, p: [places[name]],
            "tp_dp": lambda name, p: [R, places[name]],
            "fsdp": lambda name, p: [dt.Shard(0) if p.ndim and p.shape[0] > 1 else R],
            "dp": lambda name, p: [R],
        }
        inputs = found.call()
        cut = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and x.ndim and x.shape[0] % 8 == 0}
        rest = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and name not in cut}
        inputs |= distribute_inputs(cut, mesh, batch) | distribute_inputs(rest, mesh, [R] * mesh.ndim)
        got = measure_step(make_step(distribute_model(build_training_model(found), mesh, spots[layout]), inputs))
        n = {"tp": 4, "tp_dp": 2}.get(layout, 1)
        owned = sum(
            size / (1 if places[name] == R else 2) for (name, _), size in zip(plain.named_parameters(), shares, strict=True)
        )
        nbytes = {
            "tp": all_reduce_bytes(hand.bytes, 4),
            "tp_dp": all_reduce_bytes(hand.bytes / 2, 2) + all_reduce_bytes(owned, 2),
            "fsdp": 9 / 4 * sum(shares),
            "dp": all_reduce_bytes(sum(shares), 4),
        }[layout]
        yield {
            "type": model_type,
            "layout": layout,
            "bytes": round(got.nbytes / max(nbytes, 1), 2),
            "flops": round(got.flops / max(1, one.flops + (n - 1) * min(hand.whole, one.flops)), 2),
            "collectives": got.count,
            "equal": abs(got.loss - one.loss) < 2e-3 * abs(one.loss) + 1e-5,
        }


def main() -> None:
    """Measure the families until the time limit, append their rows to ``--out``, and print all rows, worst first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--layouts", default="tp,fsdp")
    parser.add_argument("--seconds", type=float, default=200.0, help="no family is begun after that many")
    parser.add_argument("--out", type=Path, help="JSON lines, added to; families in it are not run again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out and options.out.exists() else []
    begun, seen = time.monotonic(), {row["type"] for row in known}
    for name in options.types or [name for name in CONFIG_MAPPING if classes_of(name)]:
        if name in seen or time.monotonic() - begun > options.seconds:
            continue
        try:
            found = list(measure_family(name, options.layouts.split(",")))
        except Exception as error:  # whatever a model, its inputs or a layout raises
            found = [{"type": name, "error": f"{type(error).__name__}: {error}"[:120]}]
        known += found
        if options.out:
            with options.out.open("a") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in found)
    for row in sorted(known, key=lambda row: -row.get("bytes", 0)):
        print(row)


if __name__ == "__main__":
    main()
