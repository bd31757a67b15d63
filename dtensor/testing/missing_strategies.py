"""Missing strategies: placements that a rule could take without communication, found by running the operator on local shards."""

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

from ..base.tensor_tree import fill_tensors, map_tensors, tensor_leaves
from ..comm import shards_of
from ..mesh.device_mesh import DeviceMesh
from ..placement import REDUCE_OPS, Partial, Placement, Replicate, Shard
from .call_variants import Variant
from .compare import is_close
from .oracle import compare
from .placements import Combination, placement_combinations
from .reproduction import placement_text
from .samples import Sample
from .scatter import can_be_partial, scatter

T = TypeVar("T")
_SEARCH_SECONDS = 30  # time limit of a search
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
class MissingStrategy:
    """Missing strategy: the operator communicates under ``operands``, but on local shards it computes ``results`` without."""

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} | {', '.join(self.operands)} -> {', '.join(self.results)}"


def find_missing_strategies(
    name: str, samples: Sequence[Sample], limit: int, rng: random.Random, ops: Sequence[str] = REDUCE_OPS
) -> list[MissingStrategy]:
    """Return strategies without communication that the rule lacks, if all samples show them on 2, 3 and 4 ranks.

    A single sample may show one by chance.

    Args:
        ops: the reductions of partial operands to try.
    """
    if is_accepted(MissingStrategy(name, ("*",), ("*",))):
        return []  # every strategy that could be found is accepted
    return _run_in_fork(lambda: _search_samples(name, samples, limit, rng, ops), [])


def _search_samples(
    name: str, samples: Sequence[Sample], limit: int, rng: random.Random, ops: Sequence[str]
) -> list[MissingStrategy]:
    """Return the strategies without communication that hold for all samples and that the rule lacks."""
    by_operands: dict[tuple[str, ...], set[tuple[Placement, ...]]] = {}
    for sample in samples:
        for operands, results in _missing_for_sample(Variant(name.replace("::", "."), sample, False), limit, rng, ops):
            by_operands[operands] = by_operands[operands] & results if operands in by_operands else results
    missing = []
    for operands, results in by_operands.items():
        if results:
            preferred = min(results, key=lambda placements: [not isinstance(p, Shard) for p in placements])
            missing.append(MissingStrategy(name, operands, tuple(map(str, preferred))))
    return missing


def _missing_for_sample(
    variant: Variant, limit: int, rng: random.Random, ops: Sequence[str]
) -> Iterator[tuple[tuple[str, ...], set[tuple[Placement, ...]]]]:
    """Yield operand placements for which dispatch communicates, with the result placements that local runs give."""
    xs = tensor_leaves(variant.sample.arguments)
    if not variant.sample.values or not any(x.numel() > 1 for x in xs):
        return
    meshes = [variant.mesh((ranks,)) for ranks in _RANKS]
    for placements in placement_combinations(xs, (2,), ops, limit, rng, ragged=False):
        if _has_partial_indices(xs, placements):
            continue
        results: set[tuple[Placement, ...]] | None = None
        has_partial = any(isinstance(p, Partial) for of_tensor in placements for p in of_tensor)
        for mesh, seed, with_special_values in itertools.product(meshes, _SEEDS, (False, True) if has_partial else (False,)):
            variant_tried = (
                replace(variant, sample=_with_special_values(variant.sample, placements, seed))
                if with_special_values
                else variant
            )
            valid = _right_results(variant_tried, mesh, placements, seed)
            results = valid if results is None else results & valid
            if not results:
                break
        if results is not None and (not results or _has_collectives(variant, meshes[0], placements)):
            yield tuple(map(placement_text, placements)), results


def _with_special_values(sample: Sample, placements: Combination, seed: int) -> Sample:
    """Return the sample with a zero and an infinite element in each floating tensor that is not partial.

    A strategy that is right only for finite factors is thereby excluded.
    """
    each = iter(enumerate(placements, seed))

    def put_special_values(x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with a zero and an infinite element, unless it is partial or not floating."""
        at, placement_of_tensor = next(each)
        is_partial = any(isinstance(p, Partial) for p in placement_of_tensor)
        if is_partial or not x.numel() or not (x.is_floating_point() or x.is_complex()) or x.itemsize < 2:
            return x
        flat = x.clone().flatten()
        flat[at % flat.numel()], flat[(at + 1) % flat.numel()] = 0.0, (-1) ** seed * float("inf")
        return torch.empty_like(x).copy_(flat.view(x.shape))

    return sample.with_arguments(map_tensors(put_special_values, sample.arguments))


def _has_partial_indices(xs: Sequence[torch.Tensor], placements: Combination) -> bool:
    """Return True if an int64 (index) tensor is partial, in a call that also has floating tensors.

    Their addends are not valid indices, and some operators would read memory out of bounds.
    """
    has_floats = any(x.dtype.is_floating_point or x.dtype.is_complex for x in xs)
    pairs = zip(xs, placements, strict=True)
    return has_floats and any(x.dtype is torch.int64 and any(isinstance(p, Partial) for p in of_tensor) for x, of_tensor in pairs)


def _has_collectives(variant: Variant, mesh: DeviceMesh, placements: Combination) -> bool:
    """Return True if the operator on DTensors with these placements runs, and communicates."""
    sample = variant.sample
    outcome = compare(variant.call, sample.args, mesh, placements, kwargs=sample.kwargs, gradients=False, values=False)
    return bool(outcome.events) and outcome.error is None


def _right_results(variant: Variant, mesh: DeviceMesh, placements: Combination, seed: int) -> set[tuple[Placement, ...]]:
    """Return the placements of results under which the operator on local shards alone computes the plain results."""
    given = variant.sample.arguments
    args, kwargs = map_tensors(torch.clone, given)
    scattered = [
        scatter(x, mesh, at, seed=seed + i) for i, (x, at) in enumerate(zip(tensor_leaves(given), placements, strict=True))
    ]
    local_tensors = [shards_of(x._local) for x in scattered]
    try:
        torch.manual_seed(seed)
        expected = tensor_leaves(variant.call(*args, **kwargs))
        per_rank = [_run_on_shards(variant, [shards[member] for shards in local_tensors]) for member in mesh.members]
    except Exception:  # any error: the operator does not run on local shards alone
        return set()
    choices: list[list[Placement]] = []
    for k, full in enumerate(expected):
        pieces = [results[k] for results in per_rank if len(results) == len(expected)]
        if len(pieces) != len(mesh.members):
            return set()
        choices.append(list(_placements_of(pieces, full)))
    return set(itertools.product(*choices)) if expected else set()


def _run_on_shards(variant: Variant, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of the operator on the shards of one rank, without communication."""
    args, kwargs = fill_tensors(variant.sample.arguments, map(torch.clone, shards))
    return tensor_leaves(variant.call(*args, **kwargs))


def _placements_of(shards: list[torch.Tensor], full: torch.Tensor) -> Iterator[Placement]:
    """Yield the placements under which one shard per rank gives the global tensor ``full``."""
    if all(is_close(shard, full) for shard in shards):
        yield Replicate()
        return
    for dim in range(full.ndim):
        others = [size for d, size in enumerate(full.shape) if d != dim]
        fits = all(p.ndim == full.ndim and [s for d, s in enumerate(p.shape) if d != dim] == others for p in shards)
        if fits and is_close(torch.cat(shards, dim), full):
            yield Shard(dim)
    if all(shard.shape == full.shape and shard.dtype == full.dtype for shard in shards):
        for op, combine in _COMBINE.items():
            if can_be_partial(full.dtype, op) and full.dtype is not torch.bool and is_close(combine(shards), full):
                yield Partial(op)


def _run_in_fork(fn: Callable[[], T], otherwise: T) -> T:
    """Return ``fn()``, computed in a forked process; ``otherwise`` if the fork crashes, raises or takes too long.

    Operators may read and write out of bounds if the shards of their operands do not match: torch checks less than needed.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_SEARCH_SECONDS)
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


# --- accepted missing strategies --------------------------------------------------------------------------------------
@cache
def accepted_patterns() -> tuple[tuple[str, str], ...]:
    """Return the (operator, strategy) patterns of ``accepted_gaps.txt``.

    Its lines are ``operator | operands -> results | reason``.
    """
    lines = (Path(__file__).parent / "accepted_gaps.txt").read_text().splitlines()
    parts = [[part.strip() for part in line.split("|")] for line in lines if line.strip() and not line.startswith("#")]
    return tuple((name, strategy) for name, strategy, _ in parts)


def is_accepted(gap: MissingStrategy) -> bool:
    strategy = str(gap).partition("|")[2].strip()
    return any(fnmatch(gap.name, name) and fnmatch(strategy, pattern) for name, pattern in accepted_patterns())
