"""Check a sharding rule against the operator itself: every row that it declares must give what plain torch gives.

Two nets. Every row of the rule is *forced*, with operands that lie as it wants them, whatever dispatch would choose. And operands
are placed in many ways and dispatch chooses, which tries moves and combinations. A *wrong* entry is a fault of one row, with the
smallest case found and a program to paste. A *missing* one is a placement under which the operator on local blocks would be right
by itself, yet the rule communicated; those that are meant so stand in ``accepted_gaps.txt`` with their reason.
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

from ..base.tensor_tree import mapped, tensors
from ..errors import RuleError
from ..placement import REDUCE_OPS, Partial
from ..propagation.op_schema import operator_of
from ..propagation.propagate import composite
from ..rules import rules
from ..rules.registry import lookup
from .locate_fault import Trial, Wrong, undeclared
from .minimize import wrong_of
from .missing_strategies import Gap, gaps_of, is_accepted
from .placements import combinations, partial_ops
from .rule_selection import rule_name
from .samples import Sample, samples_of
from .samples import full_name as full_name
from .samples.of_schema import refusal
from .strategy_cases import Case, Coverage, row_cases
from .variants import exists, operator_named, variants

MESHES = ((2,), (3,), (4,), (2, 2))
_MOST_RANKS = 8


@dataclass(slots=True)
class Report:
    """What the verification of one rule found.

    Attributes:
        cases: tried in all, ``raised`` of them such that plain torch raises, and so does the distributed run.
        rows: which rows are declared, and which were forced.
        wrong: one entry for each fault.
        missing: what the rule could take without communication.
        nothing_forced: the operator has a rule of rows, or none, and no sample gave a row to force: nothing was verified.

    A record, true where something was verified and nothing is wrong or missing. It communicates and raises nothing.

    >>> report = verify_rule("exp", meshes=[(2,)], budget=6)
    >>> bool(report), report.wrong
    (True, [])
    """

    name: str
    cases: int = 0
    raised: int = 0
    rows: Coverage = field(default_factory=Coverage)
    wrong: list[Wrong] = field(default_factory=list)
    missing: list[Gap] = field(default_factory=list)
    nothing_forced: bool = False

    def __bool__(self) -> bool:
        return not self.wrong and not self.missing and self.cases > 0 and not self.nothing_forced

    def __str__(self) -> str:
        head = (
            f"{self.name}: {self.cases} cases, {len(self.rows.forced)} of {len(self.rows.declared)} strategies run, "
            f"{len(self.wrong)} wrong, {len(self.missing)} missing"
        )
        unverified = (
            ["  nothing was verified: the rule declares no row for these samples; give operands, dims and arguments that fit it"]
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
    """What running an operator under every row of its rule, and under many placements, shows; on in-process meshes.

    Args:
        op: a name as rules are registered by (``"mm"``, ``"aten::add.Tensor"``, ``"mylib::op"``), or an operator.
        samples: arguments to try; default the shipped ones.
        meshes: shapes of the meshes.
        limit: cases of either net per sample, variant (in place, ``out=``, foreach) and mesh; all where there are fewer.
        budget: cases in all, a random part of them that ``seed`` determines, one half by either net.
        look_for_missing: also report placements that the rule could take without communication, terms of these reductions
            among them (True: of all).
        stop_after: faults after which to stop.
        rows_only: force the rows, and leave out what dispatch chooses.
        plant: special values (``0.0``, ``inf``, ``nan``) to put into some places of floating operands.
        device: where to run, a device type.

    Raises:
        RuleError: there is nothing to try: no samples, no such operator, or plain torch refuses every sample; or
            ``look_for_missing`` on another device than the CPU: what is looked for runs in a fork.

    >>> report = verify_rule("mm", [Sample((torch.ones(5, 6), torch.ones(6, 7)))], meshes=[(3,)], limit=20)
    >>> report.cases >= 20, report.wrong, sorted(report.rows.forced)[:2]
    (True, [], ['R,R -> R', 'R,S(1) -> S(1)'])
    """
    name = rule_name(op)
    if look_for_missing and device != "cpu":
        raise RuleError(f"verify_rule({name!r}): look_for_missing works on the CPU only; leave out device={device!r}")
    given = [_own(sample, plant, device) for sample in _samples(name, samples, device)]
    report, rng = Report(name), random.Random(zlib.crc32(name.encode()) + seed)
    part = budget if budget is None or rows_only else max(1, budget // 2)
    chosen = () if rows_only else placed(name, given, meshes, limit, part, rng)
    even = _even(name, given, report.rows, rng) if part is None else ()
    for case in chain(_forced(name, given, meshes, report.rows, limit, part, rng), even, chosen):
        _try(report, case, seed)
        if len(report.wrong) >= stop_after:
            break
    report.nothing_forced = not report.rows.forced and not report.wrong and _should_have_rows(name)
    if look_for_missing:
        ops = REDUCE_OPS if look_for_missing is True else look_for_missing
        report.missing = sorted((gap for gap in gaps_of(name, given, limit, rng, ops) if not is_accepted(gap)), key=str)
    return report


def _should_have_rows(name: str) -> bool:
    """Whether the operator is served by rows: not by an answer, by other operators, or by torch's own decomposition."""
    found: Any = operator_named(name.replace("::", "."))
    overload = found if hasattr(found, "_schema") else getattr(found, found.overloads()[0])
    rule = rules().get(name) or lookup(overload)
    return not composite(operator_of(overload)) if rule is None else rule.decompose is None and rule.answer is None


def _samples(name: str, samples: Sequence[Sample] | None, device: str) -> list[Sample]:
    """Those to try: on an accelerator those that the CPU takes, since there assertions about data end the process."""
    if not exists(name.replace("::", ".")):
        raise RuleError(f"verify_rule: torch has no operator {name!r}; register it first, or name it as in 'mylib::op'")
    if samples is None and (known := samples_of(name)):
        op = operator_named(name.replace("::", "."))
        return known if device == "cpu" else [sample for sample in known if refusal(op, sample) is None]
    given = list(samples or ())
    if not given:
        raise RuleError(
            f"verify_rule({name!r}) has no samples to run; give arguments of the operator: "
            f"verify_rule({name!r}, [Sample((torch.randn(5, 7),))])"
        )
    errors = [refusal(operator_named(name.replace("::", ".")), sample) for sample in given]
    if all(errors):
        raise RuleError(f"verify_rule({name!r}): plain torch raises for every sample: {errors[0]!r}") from errors[0]
    return given


def _own(sample: Sample, plant: Sequence[float], device: str) -> Sample:
    """The sample on the device, without autograd's history, special values in it."""
    generator = torch.Generator().manual_seed(len(plant))

    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().to(device)
        if not plant or not x.dtype.is_floating_point or not x.numel():
            return x
        planted = x.clone()
        for value in plant:
            place = torch.randint(0, x.numel(), (), generator=generator, device="cpu")
            planted[torch.unravel_index(place, x.shape)] = value
        return planted

    return sample.of(mapped(changed, sample.given))


def _forced(
    name: str,
    samples: Sequence[Sample],
    meshes: Sequence[tuple[int, ...]],
    coverage: Coverage,
    limit: int,
    budget: int | None,
    rng: random.Random,
) -> Iterator[Case]:
    """Rows one by one before rows in pairs: what a pair shows that neither row does by itself is another fault."""
    settings = [(sample, shape) for sample in samples for shape in sorted(meshes, key=len)]
    if budget is not None:
        rng.shuffle(settings)
    left = budget
    for sample, shape in settings:
        for variant in variants(name, sample):
            cases = row_cases(variant, shape, coverage, rng)
            if left is None:
                yield from islice(cases, limit)
                continue
            few = list(islice(cases, max(1, left // 2)))
            yield from few
            left -= len(few)
            if left <= 0:
                return


def _even(name: str, samples: Sequence[Sample], coverage: Coverage, rng: random.Random) -> Iterator[Case]:
    """Rows that were never allowed, or came too late, on as many ranks as a dim has elements: its blocks are alike then."""
    for sample in samples:
        for ranks in sorted({n for x in tensors(sample.given) for n in x.shape if 1 < n <= _MOST_RANKS}):
            for variant in islice(variants(name, sample), 1 if coverage.refused else 0):
                yield from (
                    case for case in row_cases(variant, (ranks,), coverage, rng) if coverage.refused.issuperset(case.rows)
                )


def placed(
    name: str, samples: Sequence[Sample], meshes: Sequence[tuple[int, ...]], limit: int, budget: int | None, rng: random.Random
) -> Iterator[Case]:
    """Operands placed in many ways; dispatch chooses."""
    ops = partial_ops(rules().get(name))
    settings = [(sample, shape) for sample in samples for shape in meshes]
    if budget is not None:
        rng.shuffle(settings)
        limit = min(limit, max(2, budget // max(1, 3 * len(settings))))
    left = budget
    for sample, shape in settings:
        for variant in variants(name, sample):
            xs = tensors(variant.sample.given)
            for placements in combinations(xs, shape, ops, limit, rng):
                if left is not None:
                    if left == 0:
                        return
                    left -= 1
                yield Case(variant, shape, placements)


def _try(report: Report, case: Case, seed: int) -> None:
    drawn = seed + report.cases + 1
    menu = (*case.placements, *((Partial(op),) * len(case.mesh_shape) for op in REDUCE_OPS))
    trial = Trial(case, drawn, menu[drawn % len(menu)])
    outcome = trial.run()
    if case.rows and undeclared(outcome):
        return
    report.cases += 1
    report.raised += outcome.same_error
    report.rows.forced.update(case.rows)
    if outcome.problems and not _known(report, case):
        _add(report, wrong_of(trial, outcome))


def _known(report: Report, case: Case) -> bool:
    """Whether it follows a row that is known to be wrong: then it is counted there."""
    return any(_counted(report, i, case.rows) for i, wrong in enumerate(report.wrong) if wrong.direction == "forward")


def _add(report: Report, found: Wrong) -> None:
    """Counted with a fault that is known, or a new one."""
    for i, wrong in enumerate(report.wrong):
        if wrong.operator == found.operator and _counted(report, i, found.rows):
            return
    report.wrong.append(found)


def _counted(report: Report, i: int, rows: Sequence[str]) -> bool:
    """Rows that are wrong on one mesh dim are so beside any others, and in any order."""
    wrong = report.wrong[i]
    if not rows or Counter(wrong.rows) - Counter(rows):
        return False
    report.wrong[i] = replace(wrong, cases=wrong.cases + 1)
    return True


def verify_all(pattern: str = "*", **options: Any) -> Iterator[Report]:
    """The reports of all registered rules whose name (without ``aten::``) matches ``pattern`` and that have samples.

    All in this process: no communication. Raises what ``verify_rule`` does.

    >>> [report.name for report in verify_all("tanh", meshes=[(2,)], budget=4)]
    ['aten::tanh']
    """
    for name in sorted(rules()):
        if (fnmatch(name, pattern) or fnmatch(name.removeprefix("aten::"), pattern)) and samples_of(name):
            yield verify_rule(name, **options)
