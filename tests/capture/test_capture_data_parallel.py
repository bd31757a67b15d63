"""Data parallelism: captured steps are equal bit for bit and use no more memory or waiting. Steps that raise leave units
usable."""

from __future__ import annotations

from typing import Any

import capture_data_parallel_cases
import capture_microbatch_cases
import pytest
import torch
from capture_cases import assert_bitwise_equal, randn
from capture_data_parallel_cases import CASES, fully_shard_layers, make_line_mesh, make_network
from capture_microbatch_cases import CASES as UNITS
from capture_microbatch_cases import SYNCS, compare_microbatches
from capture_step_cases import compare_steps
from case_lists import run_cases_on_four_processes
from slow_case_marks import keep_chosen_fast, keep_every_nth_fast

from dtensor import Shard
from dtensor.capture import capture
from dtensor.errors import CaptureError
from dtensor.parallel import fully_shard, replicate

SOME = ("hybrid_in_bfloat16",)


@pytest.mark.parametrize("name", keep_chosen_fast(list(CASES), SOME))
def test_captured_data_parallel_steps_equal_eager(name: str) -> None:
    compare_steps(CASES[name])


@pytest.mark.gloo
@pytest.mark.slow
def test_captured_data_parallel_steps_equal_eager_on_four_processes() -> None:
    run_cases_on_four_processes(capture_data_parallel_cases)


def batch(*_: Any) -> Any:
    return randn(12, 6, on=make_line_mesh(), at=[Shard(0)])


def _lines(model: Any) -> list[str]:
    def step(x: Any) -> Any:
        loss = model(x.to_local()).square().mean()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        return grads

    step(batch())  # whose order is known from then on
    captured = capture(step)
    for _ in range(3):
        captured(batch())
    return captured.source().splitlines()


def test_tape_frees_gathered_parameters_and_gathers_them_for_backward() -> None:
    lines = _lines(fully_shard_layers(make_network(), make_line_mesh()))
    resized = [line.strip() for line in lines if "resize_storage(" in line]
    freed = {line for line in resized if line.endswith(", 0)")}
    assert len(resized) > len(freed) >= 3 * 4  # three layers, of four ranks
    again = [line for line in resized if line not in freed]
    assert {line.split(",")[0] for line in again} <= {line.split(",")[0] for line in freed}


def test_tape_issues_the_next_all_gather_before_a_unit_computes() -> None:
    lines = _lines(fully_shard_layers(make_network(), make_line_mesh()))
    issued = [k for k, line in enumerate(lines) if "= all_gather" in line]
    computed = [k for k, line in enumerate(lines) if "addmm(" in line]
    assert len(issued) >= 5
    assert issued[1] < computed[0]
    assert issued[2] < computed[4]


@pytest.mark.parametrize("unit", [fully_shard, replicate])
def test_units_equal_an_untouched_copy_after_a_step_that_raises_at_capture(unit: Any) -> None:
    layer, alone = (unit(make_network(), mesh=make_line_mesh()) for _ in range(2))

    def refused(x: Any) -> Any:
        loss = layer(x.to_local()).square().mean()
        loss.backward()
        return layer(x.to_local()).square().mean() if x.sum().item() > 0 else None

    def step(model: Any, x: Any) -> Any:
        model(x.to_local()).square().mean().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    x = batch()
    for _ in range(2):
        with pytest.raises(CaptureError, match="is used by gt"):
            capture(refused)(x)
        assert all(p.is_leaf and p.requires_grad and p.grad is None for p in layer.parameters())
        assert_bitwise_equal(step(layer, x), step(alone, x))


@pytest.mark.parametrize("unit", [fully_shard, replicate])
def test_captured_forward_without_backward_raises_unless_under_no_grad(unit: Any) -> None:
    layer = unit(make_network(), mesh=make_line_mesh())
    f = capture(lambda x: layer(x.to_local()).sum())
    with pytest.raises(CaptureError, match="Capture the whole step"):
        f(batch())
    with torch.no_grad():
        for _ in range(3):
            x = batch()
            assert_bitwise_equal(f(x), layer(x.to_local()).sum())
    assert f.cache_info().replayed == 2


def test_change_of_gradient_divide_factor_between_calls_takes_effect() -> None:
    model, alone = fully_shard_layers(make_network(), make_line_mesh()), fully_shard_layers(make_network(), make_line_mesh())

    def step(model: Any, x: Any) -> Any:
        model(x.to_local()).square().mean().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    f = capture(lambda x: step(model, x))
    for k in range(4):
        for one in (model, alone):
            one[0].set_gradient_divide_factor(1.0 + k // 2)
        x = batch()
        assert_bitwise_equal(f(x), step(alone, x))


@pytest.mark.parametrize("sync", keep_every_nth_fast(SYNCS, 3))
@pytest.mark.parametrize("name", keep_chosen_fast(list(UNITS), ("fully_shard",)))
def test_captured_calls_for_single_microbatches_equal_eager(name: str, sync: str) -> None:
    compare_microbatches(UNITS[name], sync)


@pytest.mark.gloo
@pytest.mark.slow
def test_captured_calls_for_single_microbatches_on_four_processes() -> None:
    run_cases_on_four_processes(capture_microbatch_cases)


def test_step_that_raises_at_capture_keeps_pending_gradients() -> None:
    model, alone = fully_shard_layers(make_network(), make_line_mesh()), fully_shard_layers(make_network(), make_line_mesh())

    def step(one: Any, x: Any) -> None:
        one(x.to_local()).square().mean().backward()

    f = capture(lambda x: step(model, x))
    refused = capture(lambda x: (step(model, x), x.sum().item() > 0))
    for k in range(4):
        for one in (model, alone):
            one.set_requires_gradient_sync(k == 3)
        x = batch()
        with pytest.raises(CaptureError):
            refused(x)
        f(x)
        step(alone, x)
    assert_bitwise_equal([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


def test_functional_collectives_of_torch_raise_at_capture() -> None:
    f = capture(lambda x: torch.ops._c10d_functional.all_reduce(x.to_local().shards[0], "sum", "0"))
    with pytest.raises(CaptureError, match="calls _c10d_functional"):
        f(batch())
