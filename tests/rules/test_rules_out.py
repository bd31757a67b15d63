"""Rules of ``out=`` tensors with another size, dtype or memory order than the result: resized, cast or refused as in torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.errors import UnsupportedOperationError
from dtensor.testing import check

Call = Callable[[torch.Tensor, torch.Tensor], object]
X = torch.tensor([[4.0, 1, 0, -2], [1, 5, 2, 3], [0, 2, 6, 1]], dtype=torch.float64)
PLACES = torch.tensor([[2, 0, 1, 1], [0, 0, 3, 2]])
BATCHES = torch.arange(30.0, dtype=torch.float64).reshape(2, 3, 5)

OUT_CALLS: dict[str, Call] = {
    "add": lambda x, out: torch.add(x, 1, out=out),
    "sum": lambda x, out: torch.sum(x, 0, out=out),
    "amax": lambda x, out: torch.amax(x, 1, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "mm": lambda x, out: torch.mm(x, x.t(), out=out),
    "matmul": lambda x, out: torch.matmul(x, x.new_ones(4), out=out),
    "masked_select": lambda x, out: torch.masked_select(x, x > 1, out=out),
    "nonzero": lambda x, out: torch.nonzero(x, out=out),
    "index_select": lambda x, out: torch.index_select(x, 1, PLACES[0], out=out),
    "gather": lambda x, out: torch.gather(x, 0, x.new_zeros(2, 4, dtype=torch.int64), out=out),
    "cat": lambda x, out: torch.cat([x, x], out=out),
    "stack": lambda x, out: torch.stack([x, x], out=out),
    "histc": lambda x, out: torch.histc(x, 4, 0, 8, out=out),
    "fft": lambda x, out: torch.fft.fft(x, dim=0, out=out),
    "bernoulli": lambda x, out: torch.bernoulli(x.abs() / 10, out=out),
    "index_add": lambda x, out: torch.index_add(x, 1, PLACES[0], x, out=out),
    "take": lambda x, out: torch.take(x, PLACES, out=out),
}
RESULT_DTYPES = {"nonzero": torch.int64, "fft": torch.complex128}  # dtypes of results
SIZES = [(0,), (2,), (5, 5, 2), (4, 3), (3, 4)]
DTYPES = [torch.float32, torch.complex128, torch.int64, torch.bool]
WHERE = [[Shard(0)], [Replicate()]]


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", OUT_CALLS)
def test_out_of_another_size_is_resized_as_in_torch(name: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with dt.implicit_replication():
        for size in SIZES:
            given = X, torch.zeros(size, dtype=RESULT_DTYPES.get(name, X.dtype))
            check(OUT_CALLS[name], *given, mesh=mesh, placements=[[Shard(1)], [Shard(0)]], cloned=True, gradients=False)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("name", OUT_CALLS)
def test_out_of_another_dtype_is_cast_or_refused_as_in_torch(name: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with dt.implicit_replication():
        OUT_CALLS[name](X, fitting := X.new_empty(0, dtype=RESULT_DTYPES.get(name, X.dtype)))
        for dtype in DTYPES:
            for where in WHERE:
                given = X, torch.zeros(fitting.shape, dtype=dtype)
                check(OUT_CALLS[name], *given, mesh=mesh, placements=[[Shard(1)], where], cloned=True, gradients=False)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("size", [(0,), (7,), (4, 3), (2, 3), (3, 2)], ids=str)
def test_matmul_of_batch_writes_into_out_of_any_size(size: tuple[int, ...]) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    for where in ([Shard(0)], [Shard(1)], [Shard(2)], [Partial()]):
        check(
            lambda x, y, out: torch.matmul(x, y, out=out),
            *(BATCHES, torch.arange(5.0, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)),
            mesh=mesh,
            placements=[where, [Replicate()], [Shard(0)]],
            cloned=True,
            gradients=False,
        )


FACTORIES: dict[str, Callable[[torch.Tensor], object]] = {
    "zeros": lambda out: torch.zeros(5, 2, out=out),
    "full": lambda out: torch.full((5, 2), 3.0, out=out),
    "eye": lambda out: torch.eye(5, 2, out=out),
    "arange": lambda out: torch.arange(5, out=out),
    "linspace": lambda out: torch.linspace(0, 1, 5, out=out),
    "logspace": lambda out: torch.logspace(0, 1, 5, out=out),
    "rand": lambda out: torch.rand((5, 2), out=out),
    "add": lambda out: torch.add(out.new_ones(5, 2), 1, out=out),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_resize_out_with_the_warnings_of_torch(name: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    told = []
    for out in (torch.zeros(7), dt.distribute_tensor(torch.zeros(7), mesh, [Shard(0)])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(3)
            FACTORIES[name](out)
        told.append((out.shape, out.stride(), [str(warning.message) for warning in caught]))
    assert told[0] == told[1]


def test_shape_inference_of_rand_out_does_not_advance_the_generator() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    drawn = []
    for out in (torch.zeros(0), dt.distribute_tensor(torch.zeros(0), mesh, [Shard(0)])):
        torch.manual_seed(3)
        torch.rand((5, 2), out=out)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("name", ["bernoulli", "normal", "normal_of_numbers", "rand", "randint", "normal_of_size"])
def test_random_values_of_out_follow_its_memory_order(name: str, dtype: torch.dtype) -> None:
    draws: dict[str, Call] = {
        "bernoulli": lambda x, out: torch.bernoulli(x.abs() / 10, out=out),
        "normal": lambda x, out: torch.normal(x, x.abs(), out=out),
        "normal_of_numbers": lambda x, out: torch.normal(x, 2.0, out=out),
        "normal_of_size": lambda x, out: torch.normal(1.0, 2.0, (3, 4), out=out),
        "rand": lambda x, out: torch.rand((3, 4), out=out),
        "randint": lambda x, out: torch.randint(0, 9, (3, 4), out=out),
    }
    if name in ("bernoulli", "randint") and dtype.is_complex:
        return
    mesh = dt.init_device_mesh("cpu", (2,))
    for where in WHERE:
        check(
            lambda x, out: draws[name](x, out.t()),
            *(X, torch.zeros(4, 3, dtype=dtype)),
            mesh=mesh,
            placements=[[Shard(1)], where],
            cloned=True,
            gradients=False,
            seed=5,
        )


def test_shape_inference_of_large_out_does_not_allocate() -> None:
    out = dt.zeros(0, device_mesh=dt.init_device_mesh("meta", (64,)), placements=[Replicate()])
    torch.zeros(1 << 44, out=out)
    assert out.shape == (1 << 44,)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("where", WHERE, ids=str)
def test_out_and_resize_of_a_view_to_another_size_raise(where: list[dt.Placement]) -> None:
    """Check that ``out=`` views raise: torch would write past the view into the base, whose elements are on other ranks."""
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.zeros(4, 3, device_mesh=mesh, placements=where)
    ones = dt.ones(5, 3, device_mesh=mesh, placements=where)
    for view in (x[1:3], x.view(3, 4), x[:, 1]):
        with pytest.raises(UnsupportedOperationError, match="view"):
            torch.add(ones, 1, out=view)
    for view in (x[1:3], x.view(3, 4)):
        with pytest.raises(UnsupportedOperationError, match="view"):
            view.resize_(7, 8)
    torch.add(ones, 1, out=x[4:])  # an empty view may be resized
    assert not x.full_tensor().any()
