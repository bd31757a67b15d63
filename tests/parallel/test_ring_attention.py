"""Ring attention of sharded sequences: values and gradients equal those of plain tensors, without an all-gather."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_processes import run_gloo
from torch import Tensor

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.comm import events
from dtensor.debug import CommDebugMode

BATCH, HEADS, WIDTH = 2, 4, 8


def operands(length: int, key_heads: int = HEADS, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    heads = (HEADS, key_heads, key_heads)
    return [torch.randn(BATCH, h, length, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for h in heads]


def run_attention(given: Any, mesh: Any, placements: Any, mask: Tensor | None = None, **options: Any) -> list[Any]:
    """Return the output and the gradients of the three operands, for a non-constant output gradient."""
    leaves = [x if mesh is None else dt.distribute_tensor(x, mesh, placements) for x in given]
    leaves = [x.detach().requires_grad_() for x in leaves]
    if mask is not None:
        options["attn_mask"] = mask if mesh is None else dt.distribute_tensor(mask, mesh)
    out = F.scaled_dot_product_attention(*leaves, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * (weight if mesh is None else dt.distribute_tensor(weight, mesh))).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def check(length: int, size: Any, placements: Any, key_heads: int = HEADS, mask: Tensor | None = None, **options: Any) -> None:
    mesh = dt.init_device_mesh("cpu", size)
    given = operands(length, key_heads)
    with events_of("all_gather") as gathered:
        found = run_attention(given, mesh, placements, mask, **options)
    assert not gathered
    assert found[0].placements == tuple(placements)
    for ours, theirs in zip(found, run_attention(given, None, None, mask, **options), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


class events_of:  # noqa: N801  used like a function
    """Context manager that collects the collectives of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind, self.seen = kind, []

    def __enter__(self) -> list[Any]:
        self.listening = events.listening(self._see)
        self.listening.__enter__()
        return self.seen

    def _see(self, event: Any) -> None:
        if event.kind == self.kind:
            self.seen.append(event)

    def __exit__(self, *_: Any) -> None:
        self.listening.__exit__(*_)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "ranks"), [(8, 4), (7, 3), (9, 4), (5, 4), (3, 4)])
def test_ring_attention_of_every_shard_size_equals_plain_torch(length: int, ranks: int, causal: bool) -> None:
    check(length, (ranks,), [Shard(2)], is_causal=causal)


def test_ring_attention_with_other_dims_sharded_too_equals_plain_torch() -> None:
    check(7, (2, 2), [Shard(1), Shard(2)], is_causal=True)
    check(7, (2, 2), [Shard(2), Shard(0)], is_causal=False)


def test_ring_attention_over_two_mesh_dims_equals_plain_torch() -> None:
    check(11, (2, 3), [Shard(2), Shard(2)], is_causal=True)


def test_ring_attention_with_fewer_key_heads_equals_plain_torch() -> None:
    check(7, (2, 2), [Shard(1), Shard(2)], key_heads=2, is_causal=True, enable_gqa=True)


def test_ring_attention_with_masks_of_every_shape_equals_plain_torch() -> None:
    full = torch.randn(BATCH, HEADS, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for mask in (full, full[:1], full[:1, :1, :1], full[:, :1, :, :1], full[0, 0] > 0):
        check(7, (3,), [Shard(2)], mask=mask)


def test_ring_attention_with_fully_masked_rows_equals_plain_torch() -> None:
    mask = torch.zeros(7, 7, dtype=torch.float64)
    mask[2] = mask[:, 3] = -torch.inf
    check(7, (3,), [Shard(2)], mask=mask)


def test_ring_attention_bfloat16_error_is_at_most_twice_that_of_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    given = operands(64, dtype=torch.bfloat16)
    exact = run_attention([x.double() for x in given], None, None, is_causal=True)
    plain = run_attention(given, None, None, is_causal=True)
    found = run_attention(given, mesh, [Shard(2)], is_causal=True)
    for ours, theirs, truth in zip(found, plain, exact, strict=True):
        assert ours.dtype is torch.bfloat16
        error = (ours.full_tensor().double() - truth).abs().max()
        assert error <= 2 * (theirs.double() - truth).abs().max()


def test_ring_attention_sends_one_block_per_exchange() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    given = [dt.distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in operands(16)]
    block = 2 * given[0].layout.max_local_nbytes  # keys and values
    with CommDebugMode() as forward:
        out = F.scaled_dot_product_attention(*given, is_causal=True)
    assert forward.get_total_counts() == 3
    assert sum(forward.get_comm_bytes().values()) == 3 * block
    with CommDebugMode() as backward:
        out.sum().backward()
    assert backward.get_total_counts() == 6  # and gradients are sent back
    assert sum(backward.get_comm_bytes().values()) == 6 * block


def _check_on_processes() -> None:
    for length, size, placements in ((9, (4,), [Shard(2)]), (3, (4,), [Shard(2)]), (7, (2, 2), [Shard(1), Shard(2)])):
        for causal in (False, True):
            check(length, size, placements, is_causal=causal)


@pytest.mark.gloo
def test_ring_attention_equals_plain_torch_on_process_groups() -> None:
    run_gloo(_check_on_processes, 4)


def test_attention_of_sharded_queries_does_not_communicate() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    given = operands(7)
    q, k, v = (dt.distribute_tensor(x, mesh, [p]) for x, p in zip(given, (Shard(2), Replicate(), Replicate()), strict=True))
    with CommDebugMode() as comm:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert comm.get_total_counts() == 0
    torch.testing.assert_close(out.full_tensor(), F.scaled_dot_product_attention(*given, is_causal=True))
