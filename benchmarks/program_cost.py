"""What a whole unchanged model moves and computes, beside the program written by hand: bytes, matrix FLOPs, collectives.

    python benchmarks/program_cost.py [--families llama,gpt2] [--layouts tp,fsdp,dp,tp_dp] [--layers 2] [--width 256]

Parameters are placed as ``FAMILIES`` says and nothing else is; then one forward and backward runs with all ranks in this process.
*Bytes* are what one rank receives, over what the hand-written program receives (the formulas below); *FLOPs* are those of
the matrix products of all ranks together, over those of one device; *collectives* beside those by hand.

Needs the extra ``hf``.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import dtensor as dt

BATCH, LENGTH, VOCABULARY = 8, 128, 1024
COLUMN, ROW = dt.Shard(0), dt.Shard(1)


@dataclass(frozen=True)
class Family:
    """An unchanged model: its class and configuration, and how Megatron would cut its parameters (first pattern that fits)."""

    kind: str
    sizes: Callable[[int, int], dict[str, Any]]
    places: tuple[tuple[str, dt.placement.Placement], ...]


def _llama_like(layers: int, width: int) -> dict[str, Any]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": width, "intermediate_size": 4 * width}
    return heads | {"num_hidden_layers": layers, "vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH}


_LLAMA = ((r"(q|k|v|gate|up)_proj\.weight|embed_tokens|lm_head", COLUMN), (r"(o|down)_proj\.weight", ROW))
FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama_like, _LLAMA),
    "qwen3": Family("Qwen3ForCausalLM", lambda layers, width: _llama_like(layers, width) | {"head_dim": width // 8}, _LLAMA),
    "mistral": Family("MistralForCausalLM", _llama_like, _LLAMA),
    "gpt2": Family(
        "GPT2LMHeadModel",
        lambda layers, width: {"n_layer": layers, "n_embd": width, "n_head": 8, "vocab_size": VOCABULARY, "n_positions": LENGTH},
        (  # weights are transposed
            (r"(c_attn|c_fc)\.weight", ROW),
            (r"(c_attn|c_fc)\.bias|wte|lm_head", COLUMN),
            (r"c_proj\.weight", COLUMN),
        ),
    ),
    "bert": Family(
        "BertForMaskedLM",
        lambda layers, width: _llama_like(layers, width),
        (
            (r"attention\.self\.(query|key|value)|intermediate\.dense|word_embeddings|decoder", COLUMN),
            (r"attention\.output\.dense\.weight|layer\.\d+\.output\.dense\.weight", ROW),
        ),
    ),
    "opt": Family(
        "OPTForCausalLM",
        lambda layers, width: _llama_like(layers, width) | {"ffn_dim": 4 * width, "word_embed_proj_dim": width},
        ((r"(q|k|v)_proj|fc1|embed_tokens|lm_head", COLUMN), (r"(out_proj|fc2)\.weight", ROW)),
    ),
}


def model_of(family: Family, layers: int, width: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, family.kind)
    config = kind.config_class(**family.sizes(layers, width))
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    config.use_cache = False
    return kind(config)


# --- counting --------------------------------------------------------------------------------------------------------------
class Flops(TorchDispatchMode):
    """Counts matrix FLOPs of plain tensors: of distributed ones, those of the local operations."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.by: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dt.DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            found = count(*args, **(kwargs or {}), out_val=out)
            self.total += found
            self.by[str(func)] += found
        return out


@dataclass
class Cost:
    """One step: bytes that a rank receives, FLOPs of all ranks, collectives by kind, and the loss."""

    nbytes: int
    flops: int
    collectives: Counter[str]
    loss: float

    @property
    def count(self) -> int:
        return sum(self.collectives.values())


def measure(model: nn.Module, inputs: dict[str, Any]) -> Cost:
    with dt.implicit_replication(), dt.debug.CommDebugMode() as comm, Flops() as flops:
        loss = model(**inputs).loss
        loss.backward()
        for parameter in model.parameters():
            grad = parameter.grad
            if isinstance(grad, dt.DTensor):  # an optimizer wants gradients that lie like their parameters
                grad.redistribute(placements=parameter.placements)
        value = loss.full_tensor() if isinstance(loss, dt.DTensor) else loss
    kinds: Counter[str] = Counter()
    for event in comm.events:
        kinds[event.kind] += 1
    return Cost(sum(event.bytes for event in comm.events), flops.total, kinds, float(value))


# --- layouts ---------------------------------------------------------------------------------------------------------------
def distribute(model: nn.Module, mesh: dt.DeviceMesh, placement_of: Callable[[str, nn.Parameter], Any]) -> nn.Module:
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(dt.distribute_tensor(parameter.detach(), mesh, placement_of(name, parameter)))
        setattr(model.get_submodule(owner), leaf, made[id(parameter)])
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, dt.distribute_tensor(buffer, mesh, [dt.Replicate()] * mesh.ndim))
    return model


def megatron(family: Family) -> Callable[[str, nn.Parameter], dt.placement.Placement]:
    def place(name: str, parameter: nn.Parameter) -> dt.placement.Placement:
        return next((spot for pattern, spot in family.places if re.search(pattern, name)), dt.Replicate())

    return place


def batch(mesh: dt.DeviceMesh, placements: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {name: dt.distribute_tensor(x, mesh, placements) for name, x in (("input_ids", ids), ("labels", labels))}


def plain_batch() -> dict[str, Any]:
    mesh = dt.init_device_mesh("cpu", (1,))
    return {name: x.full_tensor() for name, x in batch(mesh, [dt.Replicate()]).items()}


# --- by hand: what one rank receives, and how many collectives -------------------------------------------------------------
def parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def by_hand(layout: str, model: nn.Module, layers: int, width: int, ranks: tuple[int, ...]) -> tuple[float, int]:
    """Bytes and collectives of the hand-written program.

    - tp (Megatron): two all-reduces of the residual stream a layer and direction, one for the embedding, one for the gradient of
      the head's input; the loss is of cut logits: a maximum, a sum and the picked logit of every token
    - fsdp: parameters gathered twice, gradients reduce-scattered
    - dp: gradients all-reduced once
    """

    def reduce(nbytes: float, n: int) -> float:
        return 2 * (n - 1) / n * nbytes

    weights = parameter_bytes(model)
    if layout == "tp":
        (n,) = ranks
        stream, tokens = BATCH * LENGTH * width * 4, BATCH * LENGTH * 4
        return (4 * layers + 2) * reduce(stream, n) + 3 * reduce(tokens, n), 4 * layers + 2
    if layout == "fsdp":
        (n,) = ranks
        return 3 * (n - 1) / n * weights, 3 * layers
    if layout == "dp":
        (n,) = ranks
        return reduce(weights, n), 1
    dp, tp = ranks
    stream, tokens = BATCH // dp * LENGTH * width * 4, BATCH // dp * LENGTH * 4
    return (4 * layers + 2) * reduce(stream, tp) + 3 * reduce(tokens, tp) + reduce(weights / tp, dp), 4 * layers + 3


def prepared(layout: str, family: Family, layers: int, width: int) -> tuple[nn.Module, dict[str, Any], tuple[int, ...]]:
    model = model_of(family, layers, width)
    place = megatron(family)
    if layout == "tp_dp":
        mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = distribute(model, mesh, lambda name, p: [dt.Replicate(), place(name, p)])
        return model, batch(mesh, [dt.Shard(0), dt.Replicate()]), mesh.shape
    mesh = dt.init_device_mesh("cpu", (4,))
    placements: dict[str, Callable[[str, nn.Parameter], Any]] = {
        "tp": lambda name, p: [place(name, p)],
        "fsdp": lambda name, p: [dt.Shard(0)],
        "dp": lambda name, p: [dt.Replicate()],
    }
    cut = dt.Replicate() if layout == "tp" else dt.Shard(0)
    return distribute(model, mesh, placements[layout]), batch(mesh, [cut]), mesh.shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--layouts", default="tp,fsdp,dp,tp_dp")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--kinds", action="store_true", help="collectives by kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'model':10} {'layout':7} {'bytes':>12} {'over hand':>9} {'FLOPs over fair':>15} {'collectives (by hand)':>22}  loss")
    for name in options.families.split(","):
        family = FAMILIES[name]
        one = measure(model_of(family, options.layers, options.width), plain_batch())
        for layout in options.layouts.split(","):
            model, inputs, ranks = prepared(layout, family, options.layers, options.width)
            found = measure(model, inputs)
            hand, count = by_hand(layout, model, options.layers, options.width, ranks)
            wrong = "" if abs(found.loss - one.loss) < 1e-4 * abs(one.loss) else f"  WRONG: {one.loss}"
            kinds = str(dict(found.collectives)) if options.kinds else ""
            print(
                f"{name:10} {layout:7} {found.nbytes:12,} {found.nbytes / hand:9.2f} {found.flops / one.flops:15.2f} "
                f"{found.count:14} ({count:5})  {found.loss:.5f}{wrong} {kinds}",
                flush=True,
            )


if __name__ == "__main__":
    main()
