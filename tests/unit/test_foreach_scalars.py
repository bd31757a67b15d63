"""Foreach scalars: list operators with Python numbers give the bits of plain torch."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtensor as dt
from dtensor.dispatch.programs.local_op import local_function

NUMBERS = [0.9, -0.0, 0.0, 1e300, -1e-300, 1e-42, math.inf, math.nan, 1 / 3, 2.0**-149]
NAMES = ["_foreach_add", "_foreach_sub", "_foreach_mul", "_foreach_div"]


def values(dtype: torch.dtype) -> torch.Tensor:
    special = torch.tensor([0.0, -0.0, math.inf, math.nan, 1e-40, 1.0, -3.0])
    return torch.cat([special, torch.randn(9)]).to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def check_bits(name: str, numbers: object, dtypes: list[torch.dtype]) -> None:
    """Compare ``name`` and its in-place form with plain torch, on one tensor of each dtype and one or several numbers."""
    mesh = dt.DeviceMesh("cpu", 2)
    plain = [values(dtype) for dtype in dtypes]
    distributed = [dt.distribute_tensor(x, mesh, [dt.Shard(0)]) for x in plain]
    for form in (name, name + "_"):
        expected, got = getattr(torch, form)(plain, numbers), getattr(torch, form)(distributed, numbers)
        for x, y in zip(expected or plain, got or distributed, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(as_bytes(x), as_bytes(y.full_tensor()))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_foreach_operators_with_special_numbers_give_the_bits_of_torch(name: str, dtype: torch.dtype) -> None:
    for number in NUMBERS:
        check_bits(name, number, [dtype] * 3)
    check_bits(name, NUMBERS[:3], [dtype] * 3)
    check_bits(name, [0.9] * 3, [dtype] * 3)
    check_bits(name, [0.0, -0.0, 0.0], [dtype] * 3)


@pytest.mark.parametrize("name", NAMES)
@given(number=st.floats(allow_nan=True, allow_infinity=True))
def test_foreach_operators_with_any_float_give_the_bits_of_torch(name: str, number: float) -> None:
    check_bits(name, number, [torch.float32])


@pytest.mark.parametrize("name", NAMES)
def test_foreach_operators_with_mixed_dtypes_ints_and_bools_give_the_bits_of_torch(name: str) -> None:
    check_bits(name, 0.3, [torch.float32, torch.float64])
    check_bits(name, 3, [torch.float32, torch.float32])
    check_bits(name, [3, 0.5], [torch.float64, torch.float64])
    check_bits(name, True, [torch.float32]) if name != "_foreach_sub" else None


def test_foreach_operators_use_the_number_of_each_call() -> None:
    mesh = dt.DeviceMesh("cpu", 2)
    x = [dt.ones(4, device_mesh=mesh, placements=[dt.Shard(0)])]
    for number in (0.5, 0.25, 2.0):
        torch._foreach_mul_(x, number)
    assert x[0].full_tensor().tolist() == [0.25] * 4


def test_local_function_of_linalg_fft_and_special_operators_is_found_by_name() -> None:
    """Operators of ``torch.linalg``, ``torch.fft`` and ``torch.special`` have functions in other modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for func in (
            torch.ops.aten.linalg_vector_norm.default,
            torch.ops.aten.fft_fft.default,
            torch.ops.aten.special_zeta.default,
        ):
            assert local_function(func) is not func
            assert local_function(func).__name__ == func._schema.name.partition("::")[2]
