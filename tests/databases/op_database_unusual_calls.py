"""Unusual calls made from the samples of the operator database: odd memory orders, sizes 0 and 1, shared and plain arguments.
:func:`change_sample` changes one sample by a seeded draw. Calls that plain torch refuses are no cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise
from typing import Any

import op_database as db
import torch
from op_database_wrong_calls import OUT_OF_BOUNDS

from dtensor.base.tensor_tree import fill_tensors, map_tensors, tensor_leaves
from dtensor.placement import Placement, Shard
from dtensor.testing.compare import is_close

Change = Callable[[torch.Tensor], torch.Tensor]


def cases_of(entry: Any, setting: db.Setting) -> Iterator[db.Case]:
    """Yield the cases of an entry."""
    return db.cases_of(entry, setting, run_case)


def run_case(name: str, setting: db.Setting, position: int, sample: db.Sample) -> db.Case | None:
    """Run the sample changed by :func:`change_sample`; return None for arguments without a memory order."""
    if any(x.layout is not torch.strided or x.is_quantized for x in tensor_leaves(sample.given)):
        return None
    try:
        changed = change_sample(sample, db.rng_of(name, setting, position, "odd"))
        if any(fnmatch(name, pattern) for pattern in OUT_OF_BOUNDS) and shapes_of(changed) != shapes_of(sample):
            return None
        with db.quiet():
            run_plain(changed)
            if "out" in changed.kwargs and changed.values and not consistent(changed, setting):
                return None
    except Exception as error:  # plain torch refuses it too
        return db.Case(name, setting, position, "void", str(error)[:100])
    return db.run_case(name, setting, position, changed, all_distributed if changed.writes else draw_placements)


def run_plain(sample: db.Sample) -> Any:
    """Return the result of plain torch for clones of the arguments."""
    args, kwargs = map_tensors(torch.clone, sample.given)
    return sample.fn(*args, **kwargs)


def shapes_of(sample: db.Sample) -> list[torch.Size]:
    return [x.shape for x in tensor_leaves(sample.given)]


def consistent(changed: db.Sample, setting: db.Setting) -> bool:
    """Return True if plain torch gives equal results with and without ``out=``, which kernels that assume row-major order do
    not."""
    torch.default_generator.manual_seed(setting.seed)
    made = run_plain(changed)
    torch.default_generator.manual_seed(setting.seed)
    expected = changed.fn(*changed.args, **{name: value for name, value in changed.kwargs.items() if name != "out"})
    return all(
        map(
            is_close,
            tensor_leaves(made),
            [x.to(y.dtype) for x, y in zip(tensor_leaves(expected), tensor_leaves(made), strict=True)],
        )
    )


def change_sample(sample: db.Sample, rng: random.Random) -> db.Sample:
    """Return the sample with a few changed properties; most draws keep its shapes."""
    args, kwargs = sample.given
    for probability, change in ((0.25, resized(rng)), (0.15, one_element(rng)), (0.8, reordered(rng))):
        if rng.random() < probability:
            args, kwargs = map_tensors(change, (args, kwargs))
    if "out" in kwargs:  # many kernels of torch assume that out= is row-major, and write outside of it
        kwargs = kwargs | {"out": map_tensors(torch.Tensor.contiguous, kwargs["out"])}
    changed = sample.of((args, kwargs))
    if rng.random() < 0.3:
        changed = shared(changed)
    if changed.gradients and rng.random() < 0.3:
        changed = partly_detached(changed, rng)
    return changed


def reordered(rng: random.Random) -> Change:
    """Return a function that gives each tensor a random memory order."""

    def change(x: torch.Tensor) -> torch.Tensor:
        order = list(range(x.ndim))
        rng.shuffle(order)
        back = sorted(range(x.ndim), key=order.__getitem__)
        return x.detach().permute(order).contiguous().permute(back)

    return change


def resized(rng: random.Random) -> Change:
    """Return a function that changes all dims of one size, mostly to 0 or 1."""
    chosen: list[int] = []
    target = rng.choice((0, 1, 1, 3))

    def change(x: torch.Tensor) -> torch.Tensor:
        if not chosen and x.ndim:
            chosen.append(rng.choice(x.shape))
        for dim, size in enumerate(x.shape):
            if chosen and size == chosen[0] and size:
                x = x.index_select(dim, torch.arange(target) % size)
        return x

    return change


def one_element(rng: random.Random) -> Change:
    """Return a function that makes one tensor 0-d, or reduces some of its dims to size 1."""
    skipped = rng.randrange(3)

    def change(x: torch.Tensor) -> torch.Tensor:
        nonlocal skipped
        skipped -= 1
        if skipped != -1 or not x.numel():
            return x
        if rng.random() < 0.4:
            return x.reshape(-1)[0].clone()
        for dim in range(x.ndim):
            if rng.random() < 0.5:
                x = x.narrow(dim, 0, 1)
        return x.clone()

    return change


def shared(sample: db.Sample) -> db.Sample:
    """Return a sample in which arguments of equal shape and dtype are one tensor."""
    given = tensor_leaves(sample.given)
    first = [next(i for i, y in enumerate(given) if y.shape == x.shape and y.dtype == x.dtype) for x in given]
    if sample.writes or first == list(range(len(given))):
        return sample

    def fn(*args: Any, **kwargs: Any) -> Any:
        own = tensor_leaves((args, kwargs))
        args, kwargs = fill_tensors((args, kwargs), [own[i] for i in first])
        return sample.fn(*args, **kwargs)

    return replace(sample, fn=fn)


def partly_detached(sample: db.Sample, rng: random.Random) -> db.Sample:
    """Return a sample in which some arguments require no gradient."""
    detached = [rng.random() < 0.5 for _ in tensor_leaves(sample.given)]

    def fn(*args: Any, **kwargs: Any) -> Any:
        own = tensor_leaves((args, kwargs))
        args, kwargs = fill_tensors((args, kwargs), [x.detach() if off else x for x, off in zip(own, detached, strict=True)])
        return sample.fn(*args, **kwargs)

    return replace(sample, fn=fn)


def draw_placements(x: torch.Tensor, setting: db.Setting, rng: random.Random) -> tuple[Placement, ...] | None:
    """Draw placements by :func:`all_distributed`, or None (a plain tensor) for some tensors of one element."""
    return None if x.numel() == 1 and rng.random() < 0.4 else all_distributed(x, setting, rng)


def all_distributed(x: torch.Tensor, setting: db.Setting, rng: random.Random) -> tuple[Placement, ...]:
    """Draw placements, mostly with nested and uneven shards."""
    mesh = setting.mesh
    drawn = list(db.draw_placements(x, setting, rng))
    if x.ndim and len(mesh) > 1 and rng.random() < 0.4:
        dim = rng.randrange(x.ndim)
        drawn = [Shard(dim) for _ in mesh]
    for dim in {p.dim for p in drawn if isinstance(p, Shard)}:
        cutting = [i for i, p in enumerate(drawn) if isinstance(p, Shard) and p.dim == dim]
        if rng.random() < 0.5 and all(p.level is None for p in drawn if isinstance(p, Shard)):
            blocks = 1
            for i in cutting:
                blocks *= mesh[i]
            drawn = [p if i not in cutting else Shard(dim) for i, p in enumerate(drawn)]
            drawn[cutting[-1]] = Shard(dim, sizes=uneven_sizes(x.shape[dim], blocks, rng))
    return tuple(drawn)


def uneven_sizes(size: int, blocks: int, rng: random.Random) -> tuple[int, ...]:
    """Return random shard sizes, some of them zero."""
    cuts = sorted(rng.randint(0, size) for _ in range(blocks - 1))
    edges = [0, *cuts, size]
    return tuple(high - low for low, high in pairwise(edges))
