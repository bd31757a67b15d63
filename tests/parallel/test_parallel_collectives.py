"""Collectives of tensor-parallel plans: those of Megatron-LM (arXiv:1909.08053, arXiv:2205.05198) and no more."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
from gpt_model import GPT, Config, loss_of

RANKS, BATCH, LENGTH, WIDTH = 4, 3, 8, 16


class Gated(nn.Module):
    """The MLP of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, 2)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class BlockStack(nn.Module):
    """Blocks that run one after the other."""

    def __init__(self, *blocks: nn.Module, save: bool = False) -> None:
        super().__init__()
        self.blocks, self.save = nn.ModuleList(blocks), save

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.save else block(x))
        return x


def plan(prefix: str, columns: str, rows: str, local: bool, given: Any = None, left: Any = None) -> dict[str, Any]:
    column = ColwiseParallel(use_local_output=local, input_layouts=given)
    row = RowwiseParallel(use_local_output=local, output_layouts=left)
    return {f"{prefix}{columns}": column, f"{prefix}{rows}": row}


CUTS = {"mlp": (Gated, "[gu]*", "down"), "attention": (Attention, "[qkv]", "o")}


def run_and_count(model: nn.Module, x: Any) -> tuple[Counter[str], Counter[str], int, torch.Tensor]:
    """Return the collectives of forward and backward, their bytes, and the input's gradient."""
    with CommDebugMode() as comm:
        out = model(x)
        forward = Counter(event.kind for event in comm.events)
        out.square().sum().backward()
    kinds = Counter(event.kind for event in comm.events)
    return forward, kinds - forward, sum(event.bytes for event in comm.events), x.grad


@pytest.mark.parametrize("local", [True, False], ids=["local between modules", "distributed between modules"])
@pytest.mark.parametrize("name", CUTS)
def test_colwise_then_rowwise_issues_one_all_reduce_per_pass(name: str, local: bool) -> None:
    kind, columns, rows = CUTS[name]
    torch.manual_seed(0)
    model = kind().double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    alone = x.clone().requires_grad_()
    model(alone).square().sum().backward()
    mesh = dt.init_device_mesh("cpu", (RANKS,))
    parallelize_module(model, mesh, plan("", columns, rows, local))
    forward, backward, nbytes, grad = run_and_count(model, x.clone().requires_grad_())
    assert (forward, backward) == ({"all_reduce": 1}, {"all_reduce": 1})
    assert nbytes == 2 * (2 * (RANKS - 1) * x.nbytes // RANKS)
    torch.testing.assert_close(grad, alone.grad)


@pytest.mark.parametrize("name", CUTS)
def test_sharded_sequence_is_gathered_once_for_all_colwise_layers(name: str) -> None:
    """Check a sharded sequence without ``PrepareModuleInput``: each column-wise layer declares its sharded input."""
    kind, columns, rows = CUTS[name]
    mesh = dt.init_device_mesh("cpu", (RANKS,))
    model = parallelize_module(kind(), mesh, plan("", columns, rows, True, Shard(1), Shard(1)))
    x = dt.distribute_tensor(torch.randn(BATCH, LENGTH, WIDTH), mesh, [Shard(1)]).requires_grad_()
    once = {"all_gather": 1, "reduce_scatter": 1}
    forward, backward, nbytes, _ = run_and_count(model, x)
    assert (forward, backward) == (once, once)
    assert nbytes == 4 * ((RANKS - 1) * BATCH * LENGTH * WIDTH * 4 // RANKS)


@pytest.mark.parametrize("save", [False, True], ids=["saved activations", "recomputed activations"])
def test_four_blocks_issue_four_all_reduces_per_pass_also_if_checkpointed(save: bool) -> None:
    """Check that activation checkpointing recomputes no reduction, because it stops before the output."""
    mesh = dt.init_device_mesh("cpu", (RANKS,))
    model = BlockStack(Attention(), Gated(), Attention(), Gated(), save=save)
    cut = plan("blocks.*.", "[qkv]", "o", True) | plan("blocks.*.", "[gu]*", "down", True)
    parallelize_module(model, mesh, cut)
    forward, backward, _, _ = run_and_count(model, torch.randn(BATCH, LENGTH, WIDTH).requires_grad_())
    assert forward == {"all_reduce": 4}
    assert backward == {"all_reduce": 4}


CONFIG = Config(vocabulary=32, context=LENGTH, width=WIDTH, heads=8, layers=2)


def model_plan(sequence: bool) -> dict[str, Any]:
    cut: dict[str, Any] = {"input_layouts": Shard(1)} if sequence else {}
    left: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
    found: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **left),
        "blocks.*.attention.query": ColwiseParallel(use_local_output=not sequence),
        "blocks.*.attention.key": ColwiseParallel(use_local_output=not sequence),
        "blocks.*.attention.value": ColwiseParallel(use_local_output=not sequence),
        "blocks.*.attention.out": RowwiseParallel(**left),
        "blocks.*.feed_forward.gate": ColwiseParallel(),
        "blocks.*.feed_forward.up": ColwiseParallel(),
        "blocks.*.feed_forward.down": RowwiseParallel(**left),
        "head": ColwiseParallel(use_local_output=False, **cut),
    }
    if sequence:
        found |= {name: SequenceParallel() for name in ("norm", "blocks.*.attention_norm", "blocks.*.feed_forward_norm")}
        found["blocks.*.attention"] = PrepareModuleInput(
            input_layouts=(Shard(1), Replicate(), Replicate()), desired_input_layouts=(Replicate(),) * 3
        )
        found["blocks.*.feed_forward"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return found


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "tensor and sequence"])
def test_two_layer_gpt_issues_the_collectives_of_megatron(sequence: bool) -> None:
    """Check two reductions of the residual stream per layer and direction, one for the embedding and one for the gradient of the
    head's input. With sequence parallelism each is a reduce-scatter and an all-gather. The rest are three numbers per token for
    the loss of sharded logits, and the gradients of the norm weights.
    """
    torch.manual_seed(0)
    mesh = dt.init_device_mesh("cpu", (RANKS,))
    model = parallelize_module(GPT(CONFIG), mesh, model_plan(sequence))
    tokens = torch.randint(32, (BATCH, LENGTH))
    with CommDebugMode() as comm, loss_parallel():
        loss_of(model(tokens), dt.distribute_tensor(tokens, mesh, [Replicate()])).backward()
    stream = BATCH * LENGTH * WIDTH * 4
    large = [event for event in comm.events if event.bytes >= stream // 2]
    layers, both = CONFIG.layers, Counter(event.kind for event in large)
    count = 4 * layers + 2
    assert both == ({"all_gather": count, "reduce_scatter": count} if sequence else {"all_reduce": count})
    by_hand = count * 2 * (RANKS - 1) * stream / RANKS + 3 * 2 * (RANKS - 1) * BATCH * LENGTH * 4 / RANKS
    norms = (2 * layers + 1) * 2 * (RANKS - 1) * WIDTH * 4 / RANKS if sequence else 0
    assert sum(event.bytes for event in comm.events) <= 1.05 * (by_hand + norms)


# --- the gathered input is shared between modules until it is written ---------------------------------------------------
class Pair(nn.Module):
    """Two column-wise layers of one input, with an optional function between them."""

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 8, bias=False).double(), nn.Linear(WIDTH, 8, bias=False).double()
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        y = self.first(x)
        if self.between is not None:
            self.between(x)
        return y + self.second(x)


@pytest.mark.parametrize("cut", [Replicate(), Shard(1)], ids=["replicated input", "sharded input"])
def test_input_write_between_two_colwise_layers_is_used_by_the_second(cut: Any) -> None:
    def between(x: torch.Tensor) -> None:
        x.mul_(3)

    given = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    alone = given.clone().requires_grad_()
    model = Pair(between)
    # `first` saved the tensor that is written; the gradient of its input does not need it
    model.first.requires_grad_(False)
    expected = model(alone)
    expected.sum().backward()
    mesh = dt.init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"*": ColwiseParallel(input_layouts=cut, use_local_output=False)})
    x = (given.clone() if cut == Replicate() else dt.distribute_tensor(given, mesh, [cut])).requires_grad_()
    out = model(x)
    torch.testing.assert_close(out.full_tensor(), expected)
    out.sum().backward()
    torch.testing.assert_close(x.grad.full_tensor() if isinstance(x.grad, dt.DTensor) else x.grad, alone.grad)


def test_shared_input_is_freed_after_return_or_error() -> None:
    seen: list[Any] = []

    def between(x: torch.Tensor) -> None:
        seen.append(weakref.ref(x))
        if len(seen) == 2:
            raise ValueError("in the middle")

    model = parallelize_module(Pair(between), dt.init_device_mesh("cpu", (2,)), {"*": ColwiseParallel()})
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        model(x)
        assert seen[0]() is None
        with pytest.raises(ValueError, match="in the middle"):
            model(x)
        gc.collect()  # frames of the error
        assert seen[1]() is None
        torch.testing.assert_close(torch.cat(model(x).shards, 1), Pair()(x))


def test_threads_do_not_share_gathered_inputs() -> None:
    model = parallelize_module(Pair(lambda x: time.sleep(0.02)), dt.init_device_mesh("cpu", (2,)), {"*": ColwiseParallel()})
    given = [torch.full((2, WIDTH), float(k + 1), dtype=torch.float64, requires_grad=True) for k in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda x: model(x).sum().backward(), given))
    expected = torch.stack([p.detach().sum(0) for p in Pair().parameters()]).sum(0)
    for x in given:
        torch.testing.assert_close(x.grad, expected.expand(2, -1))
