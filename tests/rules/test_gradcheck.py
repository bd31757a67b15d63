"""``torch.autograd.gradcheck`` and ``gradgradcheck`` of DTensor functions, and the features that they need: writes through
``x.data``, forward-mode derivatives through redistributions, and plain gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard

MESH = dt.init_device_mesh("cpu", (2, 2))
PAIR = dt.init_device_mesh("cpu", (2,))


def leaf(*shape: int, where: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> DTensor:
    value = torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return dt.distribute_tensor(value, MESH, where).requires_grad_()


def redistribute_and_combine(x: DTensor, y: DTensor) -> torch.Tensor:
    moved, own = dt.redistribute_many([x.redistribute(placements=[Shard(1), Replicate()]), y], [[Shard(1), Shard(0)]] * 2)
    return (moved * 2).sin().sum(0) + own.exp().sum(0)


FUNCTIONS: list[tuple[Callable[..., Any], tuple[DTensor, ...]]] = [
    (
        lambda x, w: (x @ w).tanh(),
        (leaf(3, 4, where=[Shard(0), Shard(1)]), leaf(4, 2, where=[Shard(0), Replicate()], seed=1)),
    ),
    (lambda x: x.softmax(0), (leaf(3, 3, where=[Shard(0), Shard(0)]),)),
    (lambda x: x[1:] * x[0], (leaf(3, 2, where=[Shard(0), Replicate()]),)),
    (lambda x: x.prod(1), (leaf(3, 2, where=[Replicate(), Shard(1)]),)),
    (redistribute_and_combine, (leaf(2, 3, where=[Shard(0), Shard(1)]), leaf(2, 3, where=[Replicate(), Shard(0)], seed=1))),
    (lambda x: x.full_tensor().cos(), (leaf(3, where=[Shard(0), Shard(0)]),)),
    (lambda x: x * x.conj(), (leaf(3, where=[Shard(0), Replicate()], dtype=torch.complex128),)),
]


@pytest.fixture(autouse=True)
def _allow_plain_operands() -> Iterator[None]:
    """Allow plain operands, because ``gradcheck`` creates plain tensors."""
    with dt.implicit_replication():
        yield


@pytest.mark.parametrize(("function", "inputs"), FUNCTIONS)
def test_gradcheck_and_gradgradcheck_pass_for_dtensor_functions(
    function: Callable[..., Any], inputs: tuple[DTensor, ...]
) -> None:
    assert gradcheck(function, inputs, fast_mode=True, check_forward_ad=True)
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs, fast_mode=True)


def test_forward_over_reverse_gradgradcheck_and_batched_gradcheck_pass() -> None:
    function, inputs = FUNCTIONS[0]
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)
    assert gradcheck(function, inputs, check_batched_grad=True)


@pytest.mark.parametrize("zeros", [(), (1,), (0, 2), (0, 1, 3)], ids=str)
def test_first_and_second_derivatives_of_prod_with_zeros_equal_plain_torch(zeros: tuple[int, ...]) -> None:
    value = torch.tensor([2.0, 3, 5, 7], dtype=torch.float64)
    value[list(zeros)] = 0
    found = []
    for x in (value, dt.distribute_tensor(value, MESH, [Shard(0), Replicate()])):
        x.requires_grad_()
        (grad,) = torch.autograd.grad(x.prod(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        found.append((grad.detach(), second))
    for mine, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine.full_tensor(), right)


def test_gradcheck_finds_wrong_gradient() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 3

    with pytest.raises(GradcheckError):
        gradcheck(Wrong.apply, (leaf(3, 2, where=[Shard(0), Replicate()]),))


def test_writes_through_data_keep_the_version_counter_and_change_views() -> None:
    x = dt.distribute_tensor(torch.arange(6.0).reshape(3, 2), PAIR, [Shard(0)])
    row = x[2]
    assert (row + 1).full_tensor().tolist() == [5, 6]
    x.data.mul_(2)
    assert x._version == 0
    assert (row + 1).full_tensor().tolist() == [9, 11]
    row.data.add_(1)
    assert x.full_tensor().tolist() == [[0, 2], [4, 6], [9, 11]]
    x.data = x.data * 0
    x.data.add_(1)
    assert x.full_tensor().tolist() == [[1, 1]] * 3
    before = x._version
    x.detach().add_(1)  # detached tensors share the version
    assert x._version == before + 1
    with torch.inference_mode():
        assert x.data.full_tensor().tolist() == [[2, 2]] * 3


def test_backward_uses_the_value_written_through_data_after_forward() -> None:
    x = leaf(3, 2, where=[Shard(0), Replicate()])
    y = x * x
    x.data.fill_(1)
    y.sum().backward()
    assert isinstance(x.grad, DTensor)
    assert x.grad.full_tensor().tolist() == [[2, 2]] * 3


@pytest.mark.parametrize("where", [[Replicate()], [Shard(0)], [Partial()]])
def test_backward_of_redistributed_tensor_accepts_a_plain_gradient(where: Any) -> None:
    """Check ``y.backward(plain)``, where ``y`` is the result of a redistribution."""
    ones = torch.ones(3)
    x = dt.distribute_tensor(torch.arange(3.0), PAIR, [Shard(0)]).requires_grad_()
    x.redistribute(placements=where).backward(ones)
    x.redistribute(placements=where).backward(ones)
    dt.redistribute_many([x], [where])[0].backward(ones)
    assert isinstance(x.grad, DTensor)
    assert (x.grad.full_tensor().tolist(), ones.tolist()) == ([3] * 3, [1] * 3)


def test_forward_mode_tangents_pass_redistribute_to_local_and_from_local() -> None:
    x, t = torch.arange(4.0), torch.tensor([1.0, -2, 3, 5])
    primal, tangent = (dt.distribute_tensor(v, PAIR, [where]) for v, where in ((x, Shard(0)), (t, Replicate())))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(primal, tangent)
        moved = dual.redistribute(placements=[Replicate()]) * 2
        local = dual.to_local()
        back = DTensor.from_local(local, PAIR, [Shard(0)], shape=(4,)) * 3
        assert forward_ad.unpack_dual(moved).tangent.full_tensor().tolist() == (t * 2).tolist()
        assert forward_ad.unpack_dual(back).tangent.full_tensor().tolist() == (t * 3).tolist()
        assert forward_ad.unpack_dual(dual.full_tensor()).tangent.tolist() == t.tolist()


@pytest.mark.parametrize("where", [[Replicate(), Replicate()], [Shard(0), Replicate()], [Partial("avg"), Partial()]])
def test_gradcheck_of_from_local_of_a_plain_tensor_passes(where: Any) -> None:
    plain = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(x, MESH, where).sin().full_tensor()
        return whole * whole

    assert gradcheck(function, (plain,), check_forward_ad=True)
    assert gradgradcheck(function, (plain,))
