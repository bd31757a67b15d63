"""Random programs: distributed tensors give the values, strides, errors and gradients of plain tensors."""

from __future__ import annotations

import doctest
import os
from typing import Any

import pytest
import random_programs_runner
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs_runner import (
    Program,
    find_failures,
    make_random_program,
    make_random_read_program,
    make_random_view_program,
    minimize_failure,
    run_lines,
)
from slow_case_marks import keep_every_nth_fast

from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Replicate, Shard
from dtensor.testing import check, strategies

START = int(os.environ.get("DTENSOR_SEED", "0"))
BLOCK = 20


def assert_programs_equal_plain_torch(first: int, **options: Any) -> None:
    """Run the programs of one block of seeds, and fail with the first one that differs from plain torch."""
    for failure in find_failures(range(first + START, first + START + BLOCK), **options):
        pytest.fail(str(failure))


@pytest.mark.parametrize("block", keep_every_nth_fast(range(6), 3))
def test_random_programs_equal_plain_torch(block: int) -> None:
    assert_programs_equal_plain_torch(block * BLOCK)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(50))
def test_longer_random_programs_equal_plain_torch(block: int) -> None:
    assert_programs_equal_plain_torch(100_000 + block * BLOCK, length=10)


@pytest.mark.parametrize("block", keep_every_nth_fast(range(5), 3))
def test_random_programs_of_views_and_writes_equal_plain_torch(block: int) -> None:
    assert_programs_equal_plain_torch(block * BLOCK, length=8, make=make_random_view_program)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_longer_random_programs_of_views_and_writes_equal_plain_torch(block: int) -> None:
    assert_programs_equal_plain_torch(100_000 + block * BLOCK, length=12, make=make_random_view_program)


@pytest.mark.parametrize("block", keep_every_nth_fast(range(4), 4))
def test_random_programs_that_read_before_writing_equal_plain_torch(block: int) -> None:
    assert_programs_equal_plain_torch(50_000 + block * BLOCK, length=8, make=make_random_read_program)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_longer_random_programs_that_read_before_writing_equal_plain_torch(block: int) -> None:
    assert_programs_equal_plain_torch(200_000 + block * BLOCK, length=12, make=make_random_read_program)


def test_random_program_is_a_function_of_its_seed() -> None:
    assert make_random_program(7) == make_random_program(7)
    assert len({make_random_program(seed).lines for seed in range(20)}) == 20


def test_random_programs_use_many_operators() -> None:
    lines = [line for seed in range(60) for line in make_random_program(seed).lines]
    for part in ("@", ".sum(", "reshape", "[", "softmax", "cat", "add_(", ".to(", "where"):
        assert any(part in line for line in lines), part


def test_random_view_programs_write_through_all_kinds_of_views() -> None:
    lines = [line for seed in range(90) for line in make_random_view_program(seed).lines]
    for part in (
        ".t_()",
        "resize",
        "data = ",
        "diagonal(",
        "unfold(",
        ".view(torch.",
        ".imag",
        "out=",
        "] +=",
        "cumsum_",
        "_foreach",
    ):
        assert any(part in line for line in lines), part


def test_minimize_failure_removes_unneeded_lines_and_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda x, y: x * 1.5 if type(x) is torch.Tensor else x  # noqa: E731  a bug to find
    monkeypatch.setattr(torch.Tensor, "hypot", wrong)
    program = Program(("a", "e"), ("v0 = a + 1", "v1 = torch.relu(a)", "v2 = v1.hypot(v1)", "v3 = e * 2"))
    failure = minimize_failure(program, (2,), [(Shard(0),), (Shard(0),)])
    assert failure.program.lines == ("v1 = torch.relu(a)", "v2 = v1.hypot(v1)")
    assert failure.placements == ((Replicate(),), (Replicate(),))
    assert "Program(('a', 'e')" in failure.reproduction
    exec(failure.reproduction, {})


def test_docstring_examples_of_random_programs_runner_run() -> None:
    failed, tried = doctest.testmod(random_programs_runner)
    assert tried
    assert not failed


def test_run_executes_lines_in_order() -> None:
    assert run_lines(["y = x + 1", "y.mul_(2)"], {"x": torch.tensor(1)})["y"] == 4


# --- properties over shipped strategies -----------------------------------------------------------------------------
FUNCTIONS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "where": lambda x, y: torch.where(x > y, x, y),
    "cat": lambda x, y: torch.cat([x, y], -1),
    "matmul": lambda x, y: x @ y.mT,
    "softmax": lambda x, y: torch.softmax(x * y, -1),
    "mean": lambda x, y: (x - y).mean(0),
    "views": lambda x, y: (x.flatten() + y.reshape(-1)).unflatten(0, x.shape),
}


@settings(max_examples=60)
@given(data=st.data(), name=st.sampled_from(sorted(FUNCTIONS)), mesh=strategies.meshes(max_ndim=2, max_ranks=6))
def test_functions_of_two_tensors_under_random_layouts_equal_plain_torch(
    data: st.DataObject, name: str, mesh: DeviceMesh
) -> None:
    shape = data.draw(strategies.shapes(min_ndim=2, max_ndim=3, min_size=1, max_size=6))
    where = [data.draw(strategies.placements(mesh, shape, partials=("sum", "avg", "max"))) for _ in range(2)]
    values = [data.draw(strategies.plain_tensors(shape)) for _ in range(2)]
    check(FUNCTIONS[name], *values, mesh=mesh, placements=where)


@settings(max_examples=60)
@given(pair=strategies.dtensors())
def test_full_tensor_equals_the_distributed_value_under_random_layouts(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    distributed, value = pair
    assert torch.allclose(distributed.full_tensor(), value)
