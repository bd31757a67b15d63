"""Overlap: collectives are issued early and waited for late, and results are equal whenever the sent memory is read."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from dtensor.capture.replay.passes import overlap_collectives
from dtensor.capture.tracing.tape import LocalMetadata, Step, Var
from dtensor.comm import Pending


def issue(x: torch.Tensor) -> torch.Tensor:
    return x


def issue_taking(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Issue a collective that writes its result into the memory of ``x``, which holds NaN until the wait."""
    brought = 2 * x
    x.fill_(float("nan"))
    return x, brought


issue.at_once = issue_taking.at_once = True


def fact(*shape: int) -> LocalMetadata:
    return LocalMetadata(0, torch.Size(shape), (1,), torch.float64, False, False)


def make_random_tape(seed: int) -> tuple[list[Step], dict[Var, Any], list[Var]]:
    """Return a random tape of steps on tensors of four numbers, the facts of its variables, and all variables."""
    draw, steps, facts = random.Random(seed), [], {}
    known = [Var(k, k) for k in range(1, 4)]
    facts.update(dict.fromkeys(known, fact(4)))
    pending: list[Var] = []

    def new(storage: int | None = None) -> Var:
        index = len(known) + len(steps) + 10 * seed + 100
        while any(var.index == index for var in [*known, *pending]):
            index += 1
        return Var(index, index if storage is None else storage)

    for _ in range(40):
        x, y = draw.choice(known), draw.choice(known)
        match draw.choice(("add", "view", "write", "send", "send", "take", "wait", "wait")):
            case "add":
                steps.append(Step(torch.add, (x, y), {}, made := new()))
            case "view":
                steps.append(Step(torch.Tensor.view, (x, [4]), {}, made := new(x.storage)))
            case "write":
                steps.append(Step(torch.Tensor.add_, (x, y), {}, x, writes=frozenset((x.storage,))))
                continue
            case "send":
                steps.append(Step(issue, (x,), {}, sent := new(), required=True, is_library_op=True))
                pending.append(sent)
                continue
            case "take" if x.storage > 3:
                steps.append(
                    Step(issue_taking, (x,), {}, sent := new(), frozenset((x.storage,)), required=True, is_library_op=True)
                )
                steps.append(Step(Pending.wait, (sent,), {}, x, required=True, is_library_op=True))
                continue
            case "wait" if pending:
                taken = pending.pop(0)
                steps.append(Step(Pending.wait, (taken,), {}, made := new(), required=True, is_library_op=True))
            case _:
                continue
        known.append(made)
        facts[made] = fact(4)
    for taken in pending:
        steps.append(Step(Pending.wait, (taken,), {}, made := new(), required=True, is_library_op=True))
        known.append(made)
        facts[made] = fact(4)
    return steps, facts, known


def run(steps: list[Step], known: list[Var], late: bool) -> list[torch.Tensor]:
    """Return the values of all variables; sent memory is read at the issue, or with ``late`` at the wait."""
    held: dict[Var, Any] = {var: torch.arange(4.0, dtype=torch.float64) + var.index for var in known[:3]}
    for step in steps:
        args = [held[x] if isinstance(x, Var) else x for x in step.args]
        if step.fn is issue:
            held[step.out] = args[0] if late else args[0].clone()
        elif step.fn is Pending.wait and isinstance(args[0], tuple):
            args[0][0].copy_(args[0][1])
        elif step.fn is Pending.wait:
            held[step.out] = 2 * args[0]
        else:
            held[step.out] = step.fn(*args)
    return [held[var] for var in known]


def count_steps_in_flight(steps: list[Step]) -> int:
    """Return the total number of steps between the issue of a collective and its wait."""
    waits = {step.args[0]: place for place, step in enumerate(steps) if step.fn is Pending.wait}
    return sum(waits[step.out] - place for place, step in enumerate(steps) if step.fn is issue)


@pytest.mark.parametrize("most", [0, 64, 200, 1 << 20])
def test_overlap_keeps_values_and_the_issue_order_of_random_tapes(most: int) -> None:
    longer = 0
    for seed in range(60):
        steps, facts, known = make_random_tape(seed)
        found = overlap_collectives(steps, facts, frozenset((1, 2, 3)), most)
        assert sorted(map(id, found)) == sorted(map(id, steps))
        issued, were = ([x for x in one if x.is_library_op and x.fn is not Pending.wait] for one in (found, steps))
        assert issued == were
        expected = run(steps, known, False)
        for late in (False, True):
            torch.testing.assert_close(run(found, known, late), expected, rtol=0, atol=0)
        longer += count_steps_in_flight(found) - count_steps_in_flight(steps)
    assert longer > 0 or most < 1000


def test_overlap_issues_a_collective_of_an_input_first_and_waits_at_first_use() -> None:
    x, w, made, sent, whole, used = (Var(k, k) for k in range(1, 7))
    facts = dict.fromkeys((x, w, made, whole, used), fact(4))
    local, after = Step(torch.add, (x, x), {}, made), Step(torch.add, (made, whole), {}, used)
    send = Step(issue, (w,), {}, sent, required=True, is_library_op=True)
    wait = Step(Pending.wait, (sent,), {}, whole, required=True, is_library_op=True)
    between = [Step(torch.add, (made, made), {}, Var(10 + k, 10 + k)) for k in range(2)]
    steps = [local, *between, send, wait, *between, after]
    assert overlap_collectives(steps[:5] + [after], facts, frozenset((1, 2)), 1000) == [send, local, *between, wait, after]
    assert overlap_collectives(steps[:5] + [after], facts, frozenset((1, 2)), 10) == steps[:5] + [after]
