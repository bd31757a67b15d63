"""Overrides of operators that torch decomposes above autograd with plain buffers or raw memory."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_version_marks import needs_undecomposed_linear

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing.oracle import check

X = torch.arange(10.0, dtype=torch.float64)
PLACEMENTS = [[Replicate()], [Shard(0)], [Partial()]]


@pytest.mark.parametrize("sections", [torch.tensor([2, 5]), torch.tensor(4), torch.tensor([-3])], ids=str)
def test_tensor_split_with_distributed_sections_equals_plain_torch(sections: torch.Tensor) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    for placement in PLACEMENTS:
        for section_placement in [[Replicate()], None, [Shard(0)]] if sections.ndim else [[Replicate()], None]:
            check(lambda x, s: x.tensor_split(s), X, sections, mesh=mesh, placements=[placement, section_placement])


def test_tensor_split_refuses_float_and_2d_sections() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(X, mesh, [Shard(0)])
    for wrong in (torch.tensor([1.0]), torch.zeros(1, 1, dtype=torch.int64)):
        with pytest.raises(RuntimeError):
            X.tensor_split(wrong)
        with pytest.raises(RuntimeError):
            x.tensor_split(dt.distribute_tensor(wrong, mesh, [Replicate()]))


def test_tensor_split_of_plain_tensors_is_unchanged() -> None:
    assert [part.tolist() for part in X.tensor_split(torch.tensor([7]))] == [X[:7].tolist(), X[7:].tolist()]


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="newer than this torch")
def test_chunked_linear_cross_entropy_without_reduction_equals_plain_torch() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    (entry,) = (e for e in op_db if e.formatted_name == "nn_functional_linear_cross_entropy_chunked_none")
    mesh = dt.init_device_mesh("cpu", (2, 2))
    for sample in list(entry.sample_inputs("cpu", torch.float64, requires_grad=False))[::7]:
        if sample.args[1].dtype is not torch.int64:
            continue  # torch uses the unchunked path, and warns
        operands = [x for x in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(x, torch.Tensor)]
        placements = [[Shard(0), Replicate()] if x.ndim else [Replicate(), Replicate()] for x in operands]
        check(entry.op, sample.input, *sample.args, mesh=mesh, placements=placements, kwargs=sample.kwargs)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # FakeTensor uses the operator of torch
            fake = entry.op(mode.from_tensor(sample.input), *sample.args, **sample.kwargs)
        assert fake.shape == entry.op(sample.input, *sample.args, **sample.kwargs).shape


@pytest.mark.parametrize(("left", "right"), [((5, 6, 4), (4,)), ((4,), (5, 4, 3)), ((2, 5, 4), (4, 3)), ((5, 4), (4, 3))])
def test_matmul_with_out_writes_the_out_argument(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    x, y = (torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape) for shape in (left, right))
    z = torch.zeros((x @ y).shape, dtype=torch.float64)
    mesh = dt.init_device_mesh("cpu", (2,))
    for placement in [[Replicate()], [Shard(0)], [Shard(-1)]]:
        check(
            lambda x, y, z: torch.matmul(x, y, out=z),
            x,
            y,
            z,
            mesh=mesh,
            placements=[placement, [Replicate()], placement],
            gradients=False,
        )
    out = dt.zeros(*z.shape, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64)
    operands = [dt.distribute_tensor(v, mesh, [Shard(0)]).requires_grad_() for v in (x, y)]
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.matmul(*operands, out=out)


def test_matrix_rank_with_a_partial_tolerance_equals_plain_torch() -> None:
    mesh, x = dt.init_device_mesh("cpu", (4,)), torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for tolerance in (
        torch.tensor(1.0, dtype=torch.float64),
        torch.ones(1, dtype=torch.float64),
    ):  # no singular value exceeds the largest
        check(lambda x, r: torch.linalg.matrix_rank(x, rtol=r), x, tolerance, mesh=mesh, placements=[[Shard(0)], [Partial()]])


@pytest.mark.parametrize("options", [{}, {"hermitian": True}, {"rtol": 0.1}, {"atol": 0.5, "hermitian": True}], ids=str)
def test_matrix_rank_with_out_writes_the_out_argument(options: dict[str, float]) -> None:
    mesh, x = dt.init_device_mesh("cpu", (2,)), torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(3))
    for operands in (x @ x.mT, (x @ x.mT)[0]):
        out = torch.zeros(operands.shape[:-2], dtype=torch.int64)
        for placement, out_placement in (([Replicate()], [Replicate()]), ([Shard(1)], [Partial()])):
            check(
                lambda x, out: torch.linalg.matrix_rank(x, **options, out=out),
                *(operands, out),
                mesh=mesh,
                placements=[placement, out_placement],
                cloned=True,
                gradients=False,
            )


SQUARE = torch.tensor([[4.0, 1, 0], [1, 5, 2], [0, 2, 6]], dtype=torch.float64)
WITH_OUT = {  # operators with ``out=`` kernels that also fill internal tensors
    "msort": torch.msort,
    "log_sigmoid": torch._C._nn.log_sigmoid,
    "det": torch.linalg.det,
    "cholesky": torch.linalg.cholesky,
    "eigvalsh": torch.linalg.eigvalsh,
    "ldl_factor": torch.linalg.ldl_factor,
    "lu_factor": torch.linalg.lu_factor,
    "inv": torch.linalg.inv,
    "inverse": torch.inverse,
    "matrix_power": lambda x, out: torch.linalg.matrix_power(x, -2, out=out),
    "slogdet": torch.linalg.slogdet,
    "svdvals": torch.linalg.svdvals,
}


@pytest.mark.parametrize("name", WITH_OUT)
@pytest.mark.parametrize("batch", [(), (2,), (0,)])
def test_operators_with_out_write_the_out_argument(name: str, batch: tuple[int, ...]) -> None:
    x = SQUARE.expand(*batch, 3, 3).contiguous()
    result = WITH_OUT[name](x, out=None) if name == "matrix_power" else WITH_OUT[name](x)
    outs = [result] if isinstance(result, torch.Tensor) else list(result)
    mesh = dt.init_device_mesh("cpu", (2,))

    def program(x: torch.Tensor, *out: torch.Tensor) -> object:
        return WITH_OUT[name](x, out=out if len(out) > 1 else out[0]), out

    for placement in ([Replicate()], [Shard(0)], [Partial()]):
        for operands in ([torch.zeros_like(o) for o in outs], [torch.empty_like(o).resize_(0) for o in outs]):
            out_placements = [placement if g.ndim and g.dtype.is_floating_point else [Replicate()] for g in operands]
            check(program, x, *operands, mesh=mesh, placements=[placement, *out_placements], cloned=True, gradients=False)


def test_matrix_rank_of_empty_matrices_writes_zeros_to_out() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    operands = torch.zeros(2, 0, 0), torch.ones(2, dtype=torch.int64)
    check(
        lambda x, out: torch.linalg.matrix_rank(x, out=out),
        *operands,
        mesh=mesh,
        placements=[[Shard(0)]] * 2,
        gradients=False,
        cloned=True,
    )


@needs_undecomposed_linear
def test_second_derivative_of_eigh_of_a_complex_matrix_equals_plain_torch() -> None:
    def second(x: Any) -> Any:
        x = x.detach().requires_grad_()
        values, vectors = torch.linalg.eigh(x)
        (first,) = torch.autograd.grad((values**2).sum() + (vectors.abs() ** 2)[0].sum(), x, create_graph=True)
        return torch.autograd.grad((first.abs() ** 2).sum(), x)[0]

    x = torch.complex(torch.arange(9.0).view(3, 3) % 4, torch.arange(9.0).view(3, 3) % 5).to(torch.complex128)
    x = x + x.mH
    for placement in ([Replicate()], [Shard(0)], [Shard(1)]):
        found = second(dt.distribute_tensor(x, dt.init_device_mesh("cpu", (2,)), placement))
        torch.testing.assert_close(found.full_tensor(), second(x))


def test_overridden_operators_run_on_fake_tensors() -> None:
    """On torch 2.11, with the compiler loaded, an override above autograd must not break operators of fake tensors."""
    importlib.import_module("torch._dynamo")
    with FakeTensorMode():
        x = torch.empty(2, 3, 5, 5)
        for fn in (F.hardshrink, F.softshrink, F.logsigmoid, lambda x: x.tensor_split(2)):
            fn(x)
        F.interpolate(x, scale_factor=2)
        F.multi_margin_loss(x[0, 0], torch.zeros(5, dtype=torch.long))
