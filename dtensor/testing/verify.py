"""Verify a sharding rule against the operator: every strategy that it declares must give the results of plain torch.

Cases come from two sources. First, every strategy of the rule is *forced*, with operands in the placements that it needs. Second,
operands get many placements and dispatch chooses, which tests redistributions and combinations. A *wrong* entry is a fault of one
strategy, with the smallest case found and a program that reproduces it. A *missing* entry is a placement under which the operator
on local shards would be right, but the rule communicated. Intended ones are listed in ``accepted_gaps.txt`` with their reason.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import chain, islice
from typing import Any

import torch

from ..base.tensor_tree import map_tensors, tensor_leaves
from ..errors import RuleError
from ..placement import REDUCE_OPS, Partial
from ..propagation.op_schema import operator_schema_of
from ..propagation.propagate import is_composite
from ..rules import rules
from ..rules.registry import lookup
from .call_variants import get_operator, make_variants, operator_exists
from .forced_cases import Case, Coverage, make_forced_cases
from .locate_fault import Fault, Trial, is_undeclared
from .minimize import minimize_fault
from .missing_strategies import MissingStrategy, find_missing_strategies, is_accepted
from .placements import placement_combinations, reductions_to_try
from .rule_selection import rule_name
from .samples import Sample, samples_of
from .samples import full_name as full_name
from .samples.schema_samples import error_in_plain_torch

MESHES = ((2,), (3,), (4,), (2, 2))
_MOST_RANKS = 8


@dataclass(slots=True)
class Report:
    """Report of the verification of one rule. It is true if something was verified and nothing is wrong or missing.

    Attributes:
        cases: number of cases.
        raised: number of cases in which plain torch and the distributed run both raise.
        rows: the strategies that are declared, and those that were forced.
        wrong: one entry for each fault.
        missing: placements that the rule could take without communication.
        nothing_forced: True if the operator should have strategies, but no sample gave one to force: nothing was verified.

    A record: reading it communicates nothing and raises nothing.

    >>> report = verify_rule("exp", meshes=[(2,)], budget=6)
    >>> bool(report), report.wrong
    (True, [])
    """

    name: str
    cases: int = 0
    raised: int = 0
    rows: Coverage = field(default_factory=Coverage)
    wrong: list[Fault] = field(default_factory=list)
    missing: list[MissingStrategy] = field(default_factory=list)
    nothing_forced: bool = False

    def __bool__(self) -> bool:
        return not self.wrong and not self.missing and self.cases > 0 and not self.nothing_forced

    def __str__(self) -> str:
        head = (
            f"{self.name}: {self.cases} cases, {len(self.rows.forced)} of {len(self.rows.declared)} strategies run, "
            f"{len(self.wrong)} wrong, {len(self.missing)} missing"
        )
        unverified = (
            ["  nothing was verified: the rule has no strategy for these samples; give operands, dims and arguments that fit it"]
            if self.nothing_forced
            else []
        )
        return "\n".join([head, *unverified, *map(str, self.wrong), *(f"  missing {gap}" for gap in self.missing)])


def verify_rule(
    op: Any,
    samples: Sequence[Sample] | None = None,
    *,
    meshes: Sequence[tuple[int, ...]] = MESHES,
    limit: int = 200,
    budget: int | None = None,
    seed: int = 0,
    look_for_missing: bool | Sequence[str] = False,
    stop_after: int = 5,
    plant: Sequence[float] = (),
    rows_only: bool = False,
    device: str = "cpu",
) -> Report:
    """Run an operator under every strategy of its rule and under many placements, and return a report. Uses in-process meshes.

    Args:
        op: a name as rules are registered by (``"mm"``, ``"aten::add.Tensor"``, ``"mylib::op"``), or an operator.
        samples: arguments to try; default: the built-in ones.
        meshes: shapes of the meshes.
        limit: most cases of each source per sample, variant (in place, ``out=``, foreach) and mesh.
        budget: most cases in total, chosen randomly with ``seed``, half of them from each source.
        look_for_missing: also report placements that the rule could take without communication. A list names the reductions of
            partial operands to try; True tries all.
        stop_after: number of faults after which to stop.
        rows_only: only force strategies; leave out the cases in which dispatch chooses.
        plant: special values (``0.0``, ``inf``, ``nan``) to put into random elements of floating operands.
        device: the device type to run on.

    Raises:
        RuleError: there is nothing to try: no samples, no such operator, or plain torch rejects every sample. Or
            ``look_for_missing`` is used on another device than the CPU: the search runs in a fork.

    >>> report = verify_rule("mm", [Sample((torch.ones(5, 6), torch.ones(6, 7)))], meshes=[(3,)], limit=20)
    >>> report.cases >= 20, report.wrong, sorted(report.rows.forced)[:2]
    (True, [], ['R,R -> R', 'R,S(1) -> S(1)'])
    """
    name = rule_name(op)
    if look_for_missing and device != "cpu":
        raise RuleError(f"verify_rule({name!r}): look_for_missing works on the CPU only; leave out device={device!r}")
    prepared = [_prepare_sample(sample, plant, device) for sample in _samples_to_try(name, samples, device)]
    report, rng = Report(name), random.Random(zlib.crc32(name.encode()) + seed)
    part_budget = budget if budget is None or rows_only else max(1, budget // 2)
    placement_cases = () if rows_only else placed_cases(name, prepared, meshes, limit, part_budget, rng)
    even_cases = _even_cases(name, prepared, report.rows, rng) if part_budget is None else ()
    for case in chain(_forced_cases(name, prepared, meshes, report.rows, limit, part_budget, rng), even_cases, placement_cases):
        _run_case(report, case, seed)
        if len(report.wrong) >= stop_after:
            break
    report.nothing_forced = not report.rows.forced and not report.wrong and _has_own_strategies(name)
    if look_for_missing:
        ops = REDUCE_OPS if look_for_missing is True else look_for_missing
        report.missing = sorted(
            (gap for gap in find_missing_strategies(name, prepared, limit, rng, ops) if not is_accepted(gap)), key=str
        )
    return report


def _has_own_strategies(name: str) -> bool:
    """Return True if the operator has strategies to verify: its rule neither decomposes it nor answers without tensors."""
    operator: Any = get_operator(name.replace("::", "."))
    overload = operator if hasattr(operator, "_schema") else getattr(operator, operator.overloads()[0])
    rule = rules().get(name) or lookup(overload)
    return not is_composite(operator_schema_of(overload)) if rule is None else rule.decompose is None and rule.answer is None


def _samples_to_try(name: str, samples: Sequence[Sample] | None, device: str) -> list[Sample]:
    """Return the given samples or the built-in ones, without those that plain torch rejects on the CPU.

    On an accelerator these are only samples that the CPU accepts, because a device-side assertion ends the process.
    """
    if not operator_exists(name.replace("::", ".")):
        raise RuleError(f"verify_rule: torch has no operator {name!r}; register it first, or name it as in 'mylib::op'")
    if samples is None and (built_in := samples_of(name)):
        op = get_operator(name.replace("::", "."))
        return built_in if device == "cpu" else [sample for sample in built_in if error_in_plain_torch(op, sample) is None]
    user_samples = list(samples or ())
    if not user_samples:
        raise RuleError(
            f"verify_rule({name!r}) has no samples to run; give arguments of the operator: "
            f"verify_rule({name!r}, [Sample((torch.randn(5, 7),))])"
        )
    errors = [error_in_plain_torch(get_operator(name.replace("::", ".")), sample) for sample in user_samples]
    if all(errors):
        raise RuleError(f"verify_rule({name!r}): plain torch raises for every sample: {errors[0]!r}") from errors[0]
    return user_samples


def _prepare_sample(sample: Sample, plant: Sequence[float], device: str) -> Sample:
    """Return the sample with tensors detached, on the device, and with the values ``plant`` at random places."""
    generator = torch.Generator().manual_seed(len(plant))

    def prepare_tensor(x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` on the device, with the values ``plant`` at random places if it is floating."""
        x = x.detach().to(device)
        if not plant or not x.dtype.is_floating_point or not x.numel():
            return x
        planted = x.clone()
        for value in plant:
            place = torch.randint(0, x.numel(), (), generator=generator, device="cpu")
            planted[torch.unravel_index(place, x.shape)] = value
        return planted

    return sample.with_arguments(map_tensors(prepare_tensor, sample.arguments))


def _forced_cases(
    name: str,
    samples: Sequence[Sample],
    meshes: Sequence[tuple[int, ...]],
    coverage: Coverage,
    limit: int,
    budget: int | None,
    rng: random.Random,
) -> Iterator[Case]:
    """Yield cases that force each strategy, those of one mesh dim first, up to ``limit`` per sample and ``budget`` in all."""
    settings = [(sample, shape) for sample in samples for shape in sorted(meshes, key=len)]
    if budget is not None:
        rng.shuffle(settings)
    remaining = budget
    for sample, shape in settings:
        for variant in make_variants(name, sample):
            cases = make_forced_cases(variant, shape, coverage, rng)
            if remaining is None:
                yield from islice(cases, limit)
                continue
            batch = list(islice(cases, max(1, remaining // 2)))
            yield from batch
            remaining -= len(batch)
            if remaining <= 0:
                return


def _even_cases(name: str, samples: Sequence[Sample], coverage: Coverage, rng: random.Random) -> Iterator[Case]:
    """Yield cases with one element per rank, for strategies that were not allowed or not reached with other shards."""
    for sample in samples:
        for ranks in sorted({n for x in tensor_leaves(sample.arguments) for n in x.shape if 1 < n <= _MOST_RANKS}):
            for variant in islice(make_variants(name, sample), 1 if coverage.refused else 0):
                cases = make_forced_cases(variant, (ranks,), coverage, rng)
                yield from (case for case in cases if coverage.refused.issuperset(case.strategies))


def placed_cases(
    name: str, samples: Sequence[Sample], meshes: Sequence[tuple[int, ...]], limit: int, budget: int | None, rng: random.Random
) -> Iterator[Case]:
    """Yield cases with many combinations of operand placements, for which dispatch chooses the strategies."""
    ops = reductions_to_try(rules().get(name))
    settings = [(sample, shape) for sample in samples for shape in meshes]
    if budget is not None:
        rng.shuffle(settings)
        limit = min(limit, max(2, budget // max(1, 3 * len(settings))))
    remaining = budget
    for sample, shape in settings:
        for variant in make_variants(name, sample):
            xs = tensor_leaves(variant.sample.arguments)
            for placements in placement_combinations(xs, shape, ops, limit, rng):
                if remaining is not None:
                    if remaining == 0:
                        return
                    remaining -= 1
                yield Case(variant, shape, placements)


def _run_case(report: Report, case: Case, seed: int) -> None:
    """Run one case and count it in the report; a new fault is minimized and added."""
    seed_of_case = seed + report.cases + 1
    menu = (*case.placements, *((Partial(op),) * len(case.mesh_shape) for op in REDUCE_OPS))
    trial = Trial(case, seed_of_case, menu[seed_of_case % len(menu)])
    outcome = trial.run()
    if case.strategies and is_undeclared(outcome):
        return
    report.cases += 1
    report.raised += outcome.same_error
    report.rows.forced.update(case.strategies)
    forward_faults = [i for i, fault in enumerate(report.wrong) if fault.direction == "forward"]
    if outcome.problems and not any(_count_if_known(report, i, case.strategies) for i in forward_faults):
        _add_fault(report, minimize_fault(trial, outcome))


def _add_fault(report: Report, fault: Fault) -> None:
    """Add a fault to the report, or count one more case of a fault that the report has."""
    for i, known in enumerate(report.wrong):
        if known.operator == fault.operator and _count_if_known(report, i, fault.rows):
            return
    report.wrong.append(fault)


def _count_if_known(report: Report, i: int, strategies: Sequence[str]) -> bool:
    """Return True if the case has the strategies of fault ``i`` of the report, and count it there."""
    wrong = report.wrong[i]
    if not strategies or Counter(wrong.rows) - Counter(strategies):
        return False
    report.wrong[i] = replace(wrong, cases=wrong.cases + 1)
    return True


def verify_all(pattern: str = "*", **options: Any) -> Iterator[Report]:
    """Yield the reports of all registered rules with samples and a name (without ``aten::``) that matches ``pattern``.

    Runs in this process, without communication between processes. Raises the errors of ``verify_rule``.

    >>> [report.name for report in verify_all("tanh", meshes=[(2,)], budget=4)]
    ['aten::tanh']
    """
    for name in sorted(rules()):
        if (fnmatch(name, pattern) or fnmatch(name.removeprefix("aten::"), pattern)) and samples_of(name):
            yield verify_rule(name, **options)
