"""Programs: random captured programs give what they give uncaptured, bit for bit, or raise an error with the reason."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_cases import assert_bitwise_equal
from random_programs_runner import Program, make_random_case
from slow_case_marks import keep_every_nth_fast

import dtensor as dt
from dtensor import DTensor
from dtensor.capture import capture
from dtensor.errors import CaptureError
from dtensor.testing.placements import get_or_make_mesh

START = int(os.environ.get("DTENSOR_SEED", "0"))
BLOCK = 8


def trail(run: Any, program: Program, mesh: Any, placements: Any, call: int, roots: list[int], first: bool) -> Any:
    """Return results, gradients and inputs of one call; with ``first`` choose the results that are differentiated."""
    torch.manual_seed(call)
    given = [x * (1 + call) if x.dtype.is_floating_point else x for x in program.values()]
    inputs = [dt.distribute_tensor(x, mesh, list(at)) for x, at in zip(given, placements, strict=True)]
    for x in inputs:
        x.requires_grad_(x.dtype.is_floating_point)
    out = run(*inputs)
    # Inputs, or views, among the results have a history beside the captured function: the same gradients, added in another order.
    if first:
        own = {id(x) for x in inputs}
        roots += [
            k for k, x in enumerate(out) if isinstance(x, DTensor) and x.requires_grad and id(x) not in own and x._base is None
        ]
    results = [out[k] for k in roots]
    if results:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    return out, [x.grad for x in inputs], inputs


def differs(seed: int, length: int = 6) -> str | None:
    """Return the difference of replays of one program from eager; None if equal, ``"refused"`` if capture raises."""
    program, mesh_shape, placements = make_random_case(seed, length)
    mesh = get_or_make_mesh(mesh_shape)
    captured = capture(lambda *values: program(*values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(3):
            roots: list[int] = []
            try:
                expected = trail(program, program, mesh, placements, call, roots, True)
            except Exception as error:  # what the program cannot do, the captured one need not
                return f"refused: {type(error).__name__}"
            try:
                got = trail(captured, program, mesh, placements, call, roots, False)
            except CaptureError as error:
                return f"refused: {error}"
            except Exception as error:
                return f"{type(error).__name__} {error}\n{program}\n{mesh_shape} {placements}"
            try:
                assert_bitwise_equal(expected, got)
            except AssertionError as error:
                return f"call {call}: {error}\n{program}\n{mesh_shape} {placements}"
    assert captured.cache_info().replayed, captured.cache_info()
    return None


def stepping(program: Program, mesh: Any, placements: Any) -> tuple[Any, list[DTensor]]:
    """Return a training step of the program with backward from all results and an update, and its values."""
    given = [dt.distribute_tensor(x, mesh, list(at)) for x, at in zip(program.values(), placements, strict=True)]
    moving = [x.requires_grad_() for x in given if x.dtype.is_floating_point]

    def step(scale: DTensor) -> Any:
        inputs = [x * scale if x.requires_grad else x for x in given]
        out = program(*inputs)
        results = [x for x in out if isinstance(x, DTensor) and x.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(x) for x in results])
        norm = torch.nn.utils.clip_grad_norm_(moving, 1.0)
        with torch.no_grad():
            for x in moving:
                if x.grad is not None:
                    x.sub_(x.grad, alpha=0.1)
        left = [None if x.grad is None else x.grad.clone() for x in moving[::2]]
        for x in moving[1:]:
            x.grad = None
        shown = [x.detach() if type(x) is DTensor else x.detach().clone() if isinstance(x, torch.Tensor) else x for x in out]
        return shown, norm.detach(), left

    return step, given


def step_differs(seed: int, length: int = 6) -> str | None:
    """Return the difference of a captured training step from the eager step, as ``differs`` does."""
    program, mesh_shape, placements = make_random_case(seed, length)
    mesh = get_or_make_mesh(mesh_shape)
    (step, given), (same, same_given) = stepping(program, mesh, placements), stepping(program, mesh, placements)
    captured = capture(same)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(5):
            scale = dt.full((), 1.0 + call / 8, device_mesh=mesh, placements=[dt.Replicate()] * mesh.ndim)
            torch.manual_seed(call)
            try:
                expected = step(scale)
            except Exception as error:
                return f"refused: {type(error).__name__}"
            torch.manual_seed(call)
            try:
                got = captured(scale)
            except CaptureError as error:
                return f"refused: {error}"
            except Exception as error:
                return f"{type(error).__name__} {error}\n{program}\n{mesh_shape} {placements}"
            try:
                assert_bitwise_equal([expected, [x.detach() for x in given]], [got, [x.detach() for x in same_given]])
                assert_bitwise_equal([x.grad for x in given], [x.grad for x in same_given])
            except AssertionError as error:
                return f"call {call}: {error}\n{program}\n{mesh_shape} {placements}"
    assert captured.cache_info().replayed, captured.cache_info()
    return None


def check_block(differing: Callable[..., str | None], first: int, equal: int) -> None:
    """Check a block of seeds: no program differs, and at least ``equal`` programs are replayed."""
    problems = [differing(seed) for seed in range(first, first + BLOCK)]
    wrong = [problem for problem in problems if problem is not None and not problem.startswith("refused")]
    assert not wrong, wrong[0]
    assert sum(problem is None for problem in problems) >= equal


def check_longer(differing: Callable[..., str | None], first: int) -> None:
    for seed in range(first, first + BLOCK):
        problem = differing(seed, 10)
        assert problem is None or problem.startswith("refused"), problem


@pytest.mark.parametrize("block", keep_every_nth_fast(range(2)))
def test_captured_random_training_steps_equal_eager_or_raise(block: int) -> None:
    check_block(step_differs, 500 + START + block * BLOCK, BLOCK // 5)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(30))
def test_captured_longer_random_training_steps_equal_eager_or_raise(block: int) -> None:
    check_longer(step_differs, 200_000 + START + block * BLOCK)


@pytest.mark.parametrize("block", keep_every_nth_fast(range(3), 3))
def test_captured_random_programs_equal_eager_or_raise(block: int) -> None:
    check_block(differs, START + block * BLOCK, BLOCK // 2)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_captured_longer_random_programs_equal_eager_or_raise(block: int) -> None:
    check_longer(differs, 100_000 + START + block * BLOCK)


@pytest.mark.parametrize("seed", [100_191, 100_248])
def test_recorded_call_and_replays_of_two_programs_equal_eager(seed: int) -> None:
    assert differs(seed, 10) is None
