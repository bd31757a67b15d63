"""Check a sharding rule against the operator itself: every placement tried must give what plain torch gives.

A *wrong* case is a bug, with a reproduction to paste. A *missing* one is a placement under which the operator on local blocks
would be right by itself, yet the rule communicated; those that are meant so stand in ``accepted_gaps.txt`` with their reason.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..nested import tensors
from ..placement import Placement
from ..rules import rules
from .cases import Combination, combinations, mesh_of, partial_ops
from .gaps import Gap, gaps_of, is_accepted
from .oracle import compare
from .samples import Sample, samples_of
from .samples import full_name as full_name
from .source import oracle_call
from .variants import Variant, variants

MESHES = ((2,), (3,), (4,), (2, 2))


@dataclass(frozen=True, slots=True)
class Wrong:
    """One case that does not give what plain torch gives."""

    variant: Variant
    mesh_shape: tuple[int, ...]
    placements: Combination
    problems: tuple[str, ...]
    seed: int
    cotangents: tuple[Placement, ...] | None = None

    def __str__(self) -> str:
        return f"{self.variant.name} {self.variant.sample.note}\n  " + "\n  ".join(self.problems[:4]) + f"\n{self.reproduction}"

    @property
    def reproduction(self) -> str:
        """A program that raises the mismatch."""
        sample = self.variant.sample
        options: dict[str, Any] = {"kwargs": sample.kwargs} if sample.kwargs else {}
        options |= {"cloned": True} if self.variant.writes else {}
        options |= {"cotangents": self.cotangents} if sample.gradients else {"gradients": False}
        return oracle_call(
            f"torch.ops.{self.variant.name}", sample.args, self.mesh_shape, self.placements, {**options, "seed": self.seed}
        )


@dataclass(slots=True)
class Report:
    """What the verification of one rule found."""

    name: str
    cases: int = 0
    raised: int = 0  # cases in which plain torch raises, and so does the distributed run
    wrong: list[Wrong] = field(default_factory=list)
    missing: list[Gap] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.wrong and not self.missing and self.cases > 0

    def __str__(self) -> str:
        head = f"{self.name}: {self.cases} cases, {len(self.wrong)} wrong, {len(self.missing)} missing"
        shown = [str(wrong) for wrong in self.wrong[:3]] + [f"  missing {gap}" for gap in self.missing]
        return "\n".join([head, *shown])


def verify_rule(
    op: Any,
    samples: Sequence[Sample] | None = None,
    *,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    limit: int = 200,
    budget: int | None = None,
    seed: int = 0,
    look_for_missing: bool = False,
    stop_after: int = 5,
) -> Report:
    """What running an operator under many placements shows about its rule, on in-process meshes.

    Args:
        op: a name as rules are registered by (``"mm"``, ``"aten::add.Tensor"``, ``"mylib::op"``), or an operator.
        samples: arguments to try; default the shipped ones.
        meshes: shapes of the meshes.
        limit: placements per sample, variant (in place, ``out=``, foreach) and mesh; all where there are fewer.
        budget: cases in all, a random part of them that ``seed`` determines.
        look_for_missing: also report placements that the rule could take without communication.
        stop_after: wrong cases after which to stop.

    >>> report = verify_rule("mm", [Sample((torch.ones(5, 6), torch.ones(6, 7)))], meshes=[(3,)], limit=20)
    >>> report.cases >= 20, report.wrong
    (True, [])
    """
    name = full_name(op if isinstance(op, str) else _name_of(op))
    report = Report(name)
    given = samples_of(name) if samples is None else list(samples)
    rng = random.Random(zlib.crc32(name.encode()) + seed)
    rule = rules().get(name)
    for variant, mesh_shape, placements in _cases(name, given, meshes, partial_ops(rule), limit, budget, rng):
        _try(report, variant, mesh_shape, placements, seed)
        if len(report.wrong) >= stop_after:
            break
    if look_for_missing:
        report.missing = sorted((gap for gap in gaps_of(name, given, limit, rng) if not is_accepted(gap)), key=str)
    return report


def _cases(
    name: str,
    samples: Sequence[Sample],
    meshes: Sequence[tuple[int, ...]],
    ops: Sequence[str],
    limit: int,
    budget: int | None,
    rng: random.Random,
) -> Iterator[tuple[Variant, tuple[int, ...], Combination]]:
    settings = [(sample, shape) for sample in samples for shape in meshes]
    if budget is not None:
        rng.shuffle(settings)
        limit = min(limit, max(2, budget // max(1, 3 * len(settings))))
    left = budget
    for sample, shape in settings:
        for variant in variants(name, sample):
            xs = tensors((variant.sample.args, variant.sample.kwargs))
            for placements in combinations(xs, shape, ops, limit, rng):
                if left is not None:
                    if left == 0:
                        return
                    left -= 1
                yield variant, shape, placements


def _name_of(op: Any) -> str:
    if hasattr(op, "_schema"):
        return str(op._schema.name) + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    return str(op._qualified_op_name)


def _try(report: Report, variant: Variant, mesh_shape: tuple[int, ...], placements: Combination, seed: int) -> None:
    sample = variant.sample
    report.cases += 1
    cotangents = placements[report.cases % len(placements)] if placements else None
    outcome = compare(
        variant.call,
        sample.args,
        mesh_of(mesh_shape),
        placements,
        kwargs=sample.kwargs,
        gradients=sample.gradients,
        cloned=variant.writes,
        values=sample.values,
        cotangents=cotangents,
        seed=seed + report.cases,
    )
    report.raised += outcome.same_error
    if outcome.problems:
        report.wrong.append(Wrong(variant, mesh_shape, placements, tuple(outcome.problems), seed + report.cases, cotangents))


def verify_all(pattern: str = "*", **options: Any) -> Iterator[Report]:
    """The reports of all registered rules whose name (without ``aten::``) matches ``pattern``."""
    from fnmatch import fnmatch

    for name in sorted(rules()):
        if fnmatch(name, pattern) or fnmatch(name.removeprefix("aten::"), pattern):
            yield verify_rule(name, **options)
