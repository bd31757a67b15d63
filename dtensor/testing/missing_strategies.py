"""Placements that a rule could take without communication: found by running the operator on local blocks as they are."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..base.tensor_tree import filled, mapped, tensors
from ..comm import shards_of
from ..mesh.device_mesh import DeviceMesh
from ..placement import REDUCE_OPS, Partial, Placement, Replicate, Shard
from .compare import close
from .oracle import compare
from .placements import Combination, combinations
from .reproduction import placement_text
from .samples import Sample
from .scatter import can_be_partial, scatter
from .variants import Variant

T = TypeVar("T")
_SECONDS = 30  # of a search
_RANKS = (3, 2, 4)
_SEEDS = (0, 1, 2)
_COMBINE: dict[str, Any] = {
    "sum": lambda xs: torch.stack(xs).sum(0).to(xs[0].dtype),
    "avg": lambda xs: torch.stack(xs).mean(0),
    "max": lambda xs: torch.stack(xs).amax(0),
    "min": lambda xs: torch.stack(xs).amin(0),
    "product": lambda xs: torch.stack(xs).prod(0).to(xs[0].dtype),
}


@dataclass(frozen=True, slots=True)
class Gap:
    """``name`` under ``operands`` communicates, but the operator on local blocks gives ``results`` by itself."""

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} | {', '.join(self.operands)} -> {', '.join(self.results)}"


def gaps_of(name: str, samples: Sequence[Sample], limit: int, rng: random.Random, ops: Sequence[str] = REDUCE_OPS) -> list[Gap]:
    """The gaps that all samples show alike, on meshes of 2, 3 and 4 ranks: what holds for one sample only is chance.

    ``ops``: the reductions whose terms are tried as operands.
    """
    if is_accepted(Gap(name, ("*",), ("*",))):
        return []  # whatever would be found is accepted
    return _sheltered(lambda: _search(name, samples, limit, rng, ops), [])


def _search(name: str, samples: Sequence[Sample], limit: int, rng: random.Random, ops: Sequence[str]) -> list[Gap]:
    found: dict[tuple[str, ...], set[tuple[Placement, ...]]] = {}
    for sample in samples:
        for operands, results in _shown(Variant(name.replace("::", "."), sample, False), limit, rng, ops):
            found[operands] = found[operands] & results if operands in found else results
    return [Gap(name, operands, _best(results)) for operands, results in found.items() if results]


def _best(results: set[tuple[Placement, ...]]) -> tuple[str, ...]:
    return tuple(map(str, min(results, key=lambda row: [not isinstance(p, Shard) for p in row])))


def _shown(
    variant: Variant, limit: int, rng: random.Random, ops: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], set[tuple[Placement, ...]]]]:
    """Operands whose rule communicates, and all results that local blocks give by themselves."""
    xs = tensors(variant.sample.given)
    if not variant.sample.values or not any(x.numel() > 1 for x in xs):
        return
    meshes = [variant.mesh((ranks,)) for ranks in _RANKS]
    for placements in combinations(xs, (2,), ops, limit, rng, ragged=False):
        if _has_partial_indices(xs, placements):
            continue
        found: set[tuple[Placement, ...]] | None = None
        in_terms = any(isinstance(p, Partial) for where in placements for p in where)
        for mesh, seed, hostile in itertools.product(meshes, _SEEDS, (False, True) if in_terms else (False,)):
            tried = replace(variant, sample=_with_special_values(variant.sample, placements, seed)) if hostile else variant
            right = _right_results(tried, mesh, placements, seed)
            found = right if found is None else found & right
            if not found:
                break
        if found is not None and (not found or _communicates(variant, meshes[0], placements)):
            yield tuple(map(placement_text, placements)), found


def _with_special_values(sample: Sample, placements: Combination, seed: int) -> Sample:
    """A zero and an infinite element beside terms, in each floating tensor: what holds for finite factors only is no row."""
    each = iter(enumerate(placements, seed))

    def special(x: torch.Tensor) -> torch.Tensor:
        at, where = next(each)
        in_terms = any(isinstance(p, Partial) for p in where)
        if in_terms or not x.numel() or not (x.is_floating_point() or x.is_complex()) or x.itemsize < 2:
            return x
        made = x.clone().flatten()
        made[at % made.numel()], made[(at + 1) % made.numel()] = 0.0, (-1) ** seed * float("inf")
        return torch.empty_like(x).copy_(made.view(x.shape))

    return sample.of(mapped(special, sample.given))


def _has_partial_indices(xs: Sequence[torch.Tensor], placements: Combination) -> bool:
    """Terms of indices are no indices: some operators read memory out of bounds with them."""
    beside_floats = any(x.dtype.is_floating_point or x.dtype.is_complex for x in xs)
    pairs = zip(xs, placements, strict=True)
    return beside_floats and any(x.dtype is torch.int64 and any(isinstance(p, Partial) for p in where) for x, where in pairs)


def _communicates(variant: Variant, mesh: DeviceMesh, placements: Combination) -> bool:
    sample = variant.sample
    outcome = compare(variant.call, sample.args, mesh, placements, kwargs=sample.kwargs, gradients=False, values=False)
    return bool(outcome.events) and outcome.error is None


def _right_results(variant: Variant, mesh: DeviceMesh, placements: Combination, seed: int) -> set[tuple[Placement, ...]]:
    """The placements under which the results of the operator on local blocks make up the plain results."""
    given = variant.sample.given
    args, kwargs = mapped(torch.clone, given)
    scattered = [scatter(x, mesh, at, seed=seed + i) for i, (x, at) in enumerate(zip(tensors(given), placements, strict=True))]
    held = [shards_of(x._local) for x in scattered]
    try:
        torch.manual_seed(seed)
        expected = tensors(variant.call(*args, **kwargs))
        per_rank = [_called(variant, [shards[member] for shards in held]) for member in mesh.members]
    except Exception:  # whatever it is: local blocks alone do not do
        return set()
    choices: list[list[Placement]] = []
    for k, whole in enumerate(expected):
        pieces = [results[k] for results in per_rank if len(results) == len(expected)]
        if len(pieces) != len(mesh.members):
            return set()
        choices.append(list(_placements_of(pieces, whole)))
    return set(itertools.product(*choices)) if expected else set()


def _called(variant: Variant, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of the operator on one rank's blocks."""
    args, kwargs = filled(variant.sample.given, map(torch.clone, pieces))
    return tensors(variant.call(*args, **kwargs))


def _placements_of(pieces: list[torch.Tensor], whole: torch.Tensor) -> Iterator[Placement]:
    if all(close(piece, whole) for piece in pieces):
        yield Replicate()
        return
    for dim in range(whole.ndim):
        others = [size for d, size in enumerate(whole.shape) if d != dim]
        fits = all(p.ndim == whole.ndim and [s for d, s in enumerate(p.shape) if d != dim] == others for p in pieces)
        if fits and close(torch.cat(pieces, dim), whole):
            yield Shard(dim)
    if all(piece.shape == whole.shape and piece.dtype == whole.dtype for piece in pieces):
        for op, combine in _COMBINE.items():
            if can_be_partial(whole.dtype, op) and whole.dtype is not torch.bool and close(combine(pieces), whole):
                yield Partial(op)


def _sheltered(fn: Callable[[], T], otherwise: T) -> T:
    """``fn()``, computed in a fork of this process; ``otherwise`` if that dies, raises or takes too long.

    Operators given blocks that do not belong together may read and write past the ends of memory: torch checks less than needed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SECONDS)
        status = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            with os.fdopen(writer, "wb") as pipe:
                pipe.write(pickle.dumps(fn()))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    return pickle.loads(data) if status == 0 and data else otherwise


# --- accepted ones
@cache
def accepted() -> tuple[tuple[str, str], ...]:
    """(operator, row) patterns of ``accepted_gaps.txt``: lines ``operator | operands -> results | reason``."""
    lines = (Path(__file__).parent / "accepted_gaps.txt").read_text().splitlines()
    parts = [[part.strip() for part in line.split("|")] for line in lines if line.strip() and not line.startswith("#")]
    return tuple((name, row) for name, row, _ in parts)


def is_accepted(gap: Gap) -> bool:
    row = str(gap).partition("|")[2].strip()
    return any(fnmatch(gap.name, name) and fnmatch(row, pattern) for name, pattern in accepted())
