"""Rules of grouped matmul: values, strides and gradients equal those of plain torch under all placements."""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.capture import capture
from dtensor.debug import CommDebugMode
from dtensor.errors import CaptureError

R, SUM = Replicate(), Partial()
MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
ENDS = torch.tensor([3, 3, 7], dtype=torch.int32)  # an empty group


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distributed(x: torch.Tensor, *placements: dt.Placement) -> dt.DTensor:
    return dt.distribute_tensor(x, MESH, placements)


ROWS = [(R, R), (Shard(0), R), (Shard(0), Shard(0)), (Shard(0), Shard(1)), (SUM, R)]
MATRICES = [(R, R), (R, Shard(0)), (Shard(2), Shard(1)), (Shard(0), Shard(0)), (SUM, Shard(2))]


@pytest.mark.parametrize(("rows", "matrices"), list(itertools.product(ROWS, MATRICES)), ids=str)
def test_grouped_mm_values_and_gradients_equal_plain_torch(
    rows: tuple[dt.Placement, ...], matrices: tuple[dt.Placement, ...]
) -> None:
    x, w = numbers(7, 8).requires_grad_(), numbers(3, 8, 12, seed=1).requires_grad_()
    a, b = distributed(x.detach(), *rows).requires_grad_(), distributed(w.detach(), *matrices).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = F.grouped_mm(a, b, offs=distributed(ENDS, R, R))
    expected = F.grouped_mm(x, w, offs=ENDS)
    assert got.stride() == expected.stride()
    assert torch.allclose(got.full_tensor(), expected, atol=1e-5)
    (got * got).sum().backward()
    (expected * expected).sum().backward()
    assert torch.allclose(a.grad.full_tensor(), x.grad, atol=1e-4)
    assert torch.allclose(b.grad.full_tensor(), w.grad, atol=1e-4)


def test_captured_grouped_mm_uses_the_offsets_of_each_call() -> None:
    """Check replay with other offsets; with sharded groups capture raises, because the kernel reads the offsets."""
    replayed = capture(lambda x, w, offs: F.grouped_mm(x, w, offs=offs))
    x, w = distributed(numbers(7, 8), R, R), distributed(numbers(3, 8, 16, seed=1), R, Shard(2))
    for ends in ([3, 3, 7], [0, 5, 7], [7, 7, 7]):
        offs = distributed(torch.tensor(ends, dtype=torch.int32), R, R)
        expected = F.grouped_mm(x, w, offs=offs)
        assert expected.placements == (R, Shard(1))
        assert torch.equal(replayed(x, w, offs), expected)
    assert replayed.cache_info().replayed == 2
    with pytest.raises(CaptureError, match=r"_grouped_mm.*reads the values of a tensor"):
        capture(replayed.fn)(x, w.redistribute(placements=[R, Shard(0)]), offs)


@pytest.mark.parametrize("placements", [(R, Shard(0)), (Shard(1), Shard(2)), (Shard(1), R)], ids=str)
def test_grouped_mm_of_column_groups_equals_plain_torch(placements: tuple[dt.Placement, ...]) -> None:
    a, b, ends = numbers(3, 5, 8), numbers(8, 12, seed=1), torch.tensor([4, 4, 12], dtype=torch.int32)
    got = F.grouped_mm(distributed(a, *placements), distributed(b, Shard(1), R), offs=distributed(ends, R, R))
    assert torch.allclose(got.full_tensor(), F.grouped_mm(a, b, offs=ends), atol=1e-5)


def test_grouped_mm_of_a_transposed_empty_shard_equals_plain_torch() -> None:
    a, b, ends = numbers(8, 16), numbers(8, 12, seed=1), torch.tensor([3, 3, 8], dtype=torch.int32)
    columns = distributed(a, R, R).redistribute(placements=[Shard(1, sizes=(16, 0)), R])
    got = torch._grouped_mm(columns.t(), distributed(b, R, R), offs=distributed(ends, R, R))
    assert torch.allclose(got.full_tensor(), torch._grouped_mm(a.t(), b, offs=ends), atol=1e-5)


def test_expert_parallel_grouped_mm_does_not_communicate() -> None:
    x, w = distributed(numbers(7, 8), Shard(0), R), distributed(numbers(3, 8, 12), R, Shard(0))
    with CommDebugMode() as comm:
        got = F.grouped_mm(x, w, offs=distributed(ENDS, R, R))
    assert comm.get_total_counts() == 0
    assert got.placements == (Shard(0), SUM)


def test_grouped_mm_of_unaligned_strides_raises_as_in_torch() -> None:
    with pytest.raises(RuntimeError, match="16 bytes"):
        F.grouped_mm(distributed(numbers(7, 8), R, R), distributed(numbers(3, 8, 11), R, R), offs=distributed(ENDS, R, R))


INVALID_OPERANDS = {
    "1-d input": (numbers(8), numbers(3, 8, 8), ENDS),
    "no offsets": (numbers(8, 8), numbers(3, 8, 8), None),
    "offsets for two batches": (numbers(3, 8, 8), numbers(3, 8, 8), ENDS),
    "weights of another number of groups": (numbers(8, 8), numbers(2, 8, 8), ENDS),
    "int64 offsets": (numbers(8, 8), numbers(3, 8, 8), ENDS.long()),
}


@pytest.mark.parametrize("given", INVALID_OPERANDS.values(), ids=INVALID_OPERANDS)
@pytest.mark.parametrize("where", [R, Shard(0)], ids=str)
def test_invalid_grouped_mm_raises_the_error_of_torch(given: Any, where: Any) -> None:
    a, b, ends = given
    with pytest.raises(RuntimeError) as expected:
        torch._grouped_mm(a, b, offs=ends)
    with pytest.raises(RuntimeError, match=re.escape(str(expected.value).splitlines()[0])):
        torch._grouped_mm(
            distributed(a, where, R), distributed(b, where, R), offs=None if ends is None else distributed(ends, R, R)
        )
