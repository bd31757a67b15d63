"""Redistribution cases: layouts, addends and a reference for redistribution, in one process and on gloo. The reference has no
steps. A partial tensor is a nest of reductions in the order of its placements (the last mesh dim reduces first). A sharded tensor
is the value sliced by ``local_offset`` and ``local_shape``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dtensor.layout.layout import Layout
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Monoid, Partial, Placement, Replicate, Shard

SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (6, 1), (3,), (), (0, 4), (2, 3, 4))


def _last_nonzero(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(b != 0, b, a)


def _double(a: torch.Tensor) -> torch.Tensor:
    return a * 2


def _plus_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b + 1


def _minus_ones(like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, -1)


def _eye(like: torch.Tensor) -> torch.Tensor:
    return torch.eye(*like.shape, dtype=like.dtype)


COUNTED = Monoid("counted", _plus_one, _minus_ones)  # zeros do not reduce to zero
MATMUL = Monoid("matmul", torch.matmul, _eye)  # does not act elementwise
# Associative and not commutative: any change of order changes the result. The second one must be finalized only once.
LAST = Monoid("last", _last_nonzero, torch.zeros_like)
LAST_DOUBLED = Monoid("last_doubled", _last_nonzero, torch.zeros_like, _double)


def placement_choices(ndim: int, ops: Sequence[Any] = ("sum", "max")) -> list[Placement]:
    """Return the placements of one mesh dim, without levels and sizes."""
    return [Replicate(), *(Shard(dim) for dim in range(min(ndim, 2))), *(Partial(op) for op in ops)]


def all_layouts(
    mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, ops: Sequence[Any] = ("sum", "max")
) -> list[Layout]:
    """Return layouts of all combinations of placements, both nesting orders, and user-given uneven sizes."""
    found = [
        Layout.of(mesh, placements, shape, dtype=dtype)
        for placements in itertools.product(placement_choices(len(shape), ops), repeat=mesh.ndim)
    ]
    found += [variant for layout in list(found) for variant in _variants(layout)]
    return list(dict.fromkeys(found))


def _variants(layout: Layout) -> Iterator[Layout]:
    for dim in range(min(layout.ndim, 2)):
        shards = [i for i, placement in enumerate(layout.placements) if placement == Shard(dim)]
        if len(shards) >= 2:  # the reverse nesting
            placements = list(layout.placements)
            for level, i in enumerate(reversed(shards)):
                placements[i] = Shard(dim, level=level)
            yield layout.replace(placements=placements)
        if len(shards) == 1 and layout.mesh.shape[shards[0]] > 1:
            placements = list(layout.placements)
            placements[shards[0]] = Shard(dim, sizes=uneven_sizes(layout.shape[dim], layout.mesh.shape[shards[0]]))
            yield layout.replace(placements=placements)


def uneven_sizes(size: int, count: int) -> tuple[int, ...]:
    """Return shard sizes that no chunking gives: an empty first block, and the others as uneven as possible."""
    first = [0] + [1 if k < size - 1 else 0 for k in range(count - 2)]
    return (*first, size - sum(first))


def make_addends(layout: Layout, seed: int) -> torch.Tensor:
    """Return global addends of shape (sizes of the partial mesh dims..., *shape): small integers whose means are integers."""
    generator = torch.Generator().manual_seed(seed)
    lead = [layout.mesh.shape[i] for i, op in enumerate(layout.partials) if op is not None]
    high = 3 if "product" in layout.partials else 9
    terms = torch.randint(-high, high + 1, (*lead, *layout.shape), generator=generator)
    if any(isinstance(op, Monoid) for op in layout.partials):
        terms *= torch.randint(0, 2, terms.shape, generator=generator)  # LAST skips zeros
    for i, op in enumerate(layout.partials):
        if op == "avg":
            terms = terms * layout.mesh.shape[i]
    return terms.to(layout.dtype)


def reduce_addends(layout: Layout, terms: torch.Tensor) -> torch.Tensor:
    """Reduce the addends, innermost (last mesh dim) first; adjacent dims with equal monoids are reduced together."""
    runs: list[tuple[Any, int]] = []
    for op in layout.partials:
        if op is not None:
            if runs and isinstance(op, Monoid) and runs[-1][0] == op:
                runs[-1] = (op, runs[-1][1] + 1)
            else:
                runs.append((op, 1))
    for op, count in reversed(runs):
        lead = terms.ndim - layout.ndim
        terms = _fold(op, terms.flatten(lead - count, lead - 1).movedim(lead - count, 0))
    return terms


def _fold(op: Any, stacked: torch.Tensor) -> torch.Tensor:
    match op:
        case "sum":
            return stacked.sum(0)
        case "avg":
            return stacked.mean(0)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0)
    result = stacked[0]
    for term in stacked[1:]:
        result = op.combine(result, term)
    return result if op.finalize is None else op.finalize(result)


def slice_local(layout: Layout, terms: torch.Tensor, member: int) -> torch.Tensor:
    """Return the local tensor of ``member``: its addend, sliced to its block."""
    coordinate = layout.mesh.coordinates[member]
    for i, op in enumerate(layout.partials):
        if op is not None:
            terms = terms[coordinate[i]]
    for dim, (start, size) in enumerate(zip(layout.local_offset(coordinate), layout.local_shape(coordinate), strict=True)):
        terms = terms.narrow(dim, min(start, terms.shape[dim] - size), size)
    return terms.clone()


def wrong_members(layout: Layout, value: torch.Tensor, locals_: Sequence[torch.Tensor]) -> list[str]:
    """Return one line for each member whose local tensor differs from its block of ``value``; the reference reduces addends."""
    wrong = []
    for member, local in enumerate(locals_):
        coordinate = layout.mesh.coordinates[member]
        if local.dtype != layout.dtype or tuple(local.shape) != layout.local_shape(coordinate):
            wrong.append(
                f"member {member}: {local.dtype} {tuple(local.shape)}, not {layout.dtype} {layout.local_shape(coordinate)}"
            )
            continue
        partial_dims = tuple(i for i, op in enumerate(layout.partials) if op is not None)
        group = layout.mesh.members_of(partial_dims, member)
        lead = [layout.mesh.shape[i] for i in partial_dims]
        got = reduce_addends(layout, torch.stack([locals_[other] for other in group]).reshape((*lead, *local.shape)))
        plain = Layout.from_splits(layout.mesh, layout.splits, (None,) * layout.mesh.ndim, layout.shape, dtype=layout.dtype)
        want = slice_local(plain, value, member)
        if not torch.equal(got, want):
            wrong.append(f"member {member} at {coordinate}: {got.tolist()}, not {want.tolist()}")
    return wrong


def all_pairs(found: Iterable[Layout]) -> list[tuple[Layout, Layout]]:
    return list(itertools.product(found, repeat=2))
