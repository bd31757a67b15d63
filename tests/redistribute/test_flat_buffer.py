"""Flat rows of many tensors: with equal shards on all ranks, batched copies give the result of separate copies."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor.comm.pack import Box
from dtensor.redistribute.flat_buffer import FlatBuffer

TENSORS = [((6, 5), 0), ((4, 8), 1), ((7,), None), ((2, 3, 4), 2), ((2,), 0)]  # shapes, and the sharded dim


def rows_of(ranks: int, mine: int, dtypes: list[torch.dtype], uneven: bool = False) -> FlatBuffer:
    shapes, boxes = [], [[] for _ in range(ranks)]
    for shape, dim in TENSORS:
        shape = tuple(size * ranks // 2 if d == dim else size for d, size in enumerate(shape))
        shapes.append(shape)
        for k, own in enumerate(boxes):
            start, size = [0] * len(shape), list(shape)
            if dim is not None:
                each = shape[dim] // ranks + (1 if uneven else 0)
                start[dim] = min(k * each, shape[dim])
                size[dim] = min(each, shape[dim] - start[dim])
            own.append(Box(tuple(start), tuple(size)))
    return FlatBuffer.from_blocks(shapes, boxes, dtypes, [dim is not None for _, dim in TENSORS], mine, 16)


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


FLOATS = [torch.float64] * len(TENSORS)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("chosen", [range(len(TENSORS)), [3, 0, 2]])
def test_batched_packing_of_even_shards_equals_packing_one_by_one(ranks, chosen):
    rows = rows_of(ranks, 1, FLOATS)
    assert rows.even_dims == (0, 1, None, 2, 0)
    one_by_one = dataclasses.replace(rows, even_dims=None)
    wholes = [
        None if i == 3 else numbers(rows.shapes[i], i, torch.float32).mT.contiguous().mT if i < 2 else numbers(rows.shapes[i], i)
        for i in chosen
    ]
    behind = [torch.tensor([1.0, 2.0], dtype=torch.float64)]
    got = rows.pack_addends(chosen, wholes, torch.float64, torch.device("cpu"), behind)
    assert torch.equal(got, one_by_one.pack_addends(chosen, wholes, torch.float64, torch.device("cpu"), behind))
    memory = torch.empty_like(got)
    assert rows.pack_addends(chosen, wholes, torch.float64, torch.device("cpu"), behind, lambda numel: memory) is memory
    assert torch.equal(got, memory)


@pytest.mark.parametrize("ranks", [2, 4])
def test_batched_unpacking_of_even_shards_equals_unpacking_one_by_one(ranks):
    rows = rows_of(ranks, 0, FLOATS)
    one_by_one = dataclasses.replace(rows, even_dims=None)
    row, locals_ = numbers((sum(rows.lengths),), 5), [numbers(size, i) for i, size in enumerate(rows.sizes[0])]
    found = []
    for way in (rows, one_by_one):
        wholes = [torch.zeros(shape[::-1], dtype=torch.float64).permute(*range(len(shape))[::-1]) for shape in rows.shapes]
        way.copy_gathered(row, locals_, way.gathered_regions(wholes))
        found.append(wholes)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_uneven_shards_and_mixed_dtypes_are_not_batched():
    assert rows_of(4, 0, FLOATS, uneven=True).even_dims is None
    assert rows_of(2, 0, [torch.float64, *[torch.float32] * (len(TENSORS) - 1)]).even_dims is None


def test_number_of_pack_and_unpack_copies_does_not_grow_with_the_ranks():
    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    found = set()
    for ranks in (2, 8, 16):
        rows = rows_of(ranks, 0, FLOATS)
        wholes = [numbers(shape, i) for i, shape in enumerate(rows.shapes)]
        targets = rows.gathered_regions(wholes)
        row, locals_ = numbers((sum(rows.lengths),), 5), [numbers(size, i) for i, size in enumerate(rows.sizes[0])]
        with Count() as count:
            rows.pack_addends(range(len(TENSORS)), wholes, torch.float64, torch.device("cpu"))
            rows.copy_gathered(row, locals_, targets)
        found.add(count.calls)
    assert len(found) == 1
