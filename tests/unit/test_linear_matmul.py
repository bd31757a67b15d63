"""linear and matmul: dispatched as one operator with one autograd node where torch allows it, and equal to plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from slow_case_marks import keep_every_nth_fast
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch_version_marks import LINEAR_REACHES_DTENSOR

import dtensor as dt
from dtensor import Partial, Placement, Replicate, Shard

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
S, R, P = Shard, Replicate(), Partial()
Function = Callable[..., Tensor]

# shapes of the operands, and whether linear or matmul is dispatched undecomposed
LINEAR = [
    ((5, 3, 6), (7, 6), True),
    ((4, 6), (7, 6), True),
    ((6,), (7, 6), True),
    ((2, 0, 6), (7, 6), True),
    ((3, 6), (6,), False),
]
MATMUL = [
    ((5, 6), (6, 7), True),
    ((5, 3, 6), (6, 7), True),
    ((2, 3, 5, 6), (2, 3, 6, 7), True),
    ((2, 1, 5, 6), (3, 6, 7), True),
    ((1, 3, 5, 6), (2, 1, 6, 7), True),
    ((2, 0, 6), (6, 7), True),
    ((5, 6), (3, 6, 7), False),
    ((6,), (6, 7), False),
    ((3, 5, 6), (6,), False),
]
CASES = [(F.linear, *case) for case in LINEAR] + [(torch.matmul, *case) for case in MATMUL]


def make_tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_dtensor(x: Tensor, placements: Sequence[Placement]) -> Any:
    return dt.distribute_tensor(x.detach(), MESH, placements).requires_grad_(x.requires_grad)


def placement_pairs(ndim: int) -> list[tuple[Placement, Placement]]:
    first, last, before = S(0), S(ndim - 1), S(max(0, ndim - 2))
    return [(R, R), (first, last), (last, R), (S(0), S(0)), (P, first), (R, before)]


def assert_same(distributed: Any, plain: Any) -> None:
    for got, expected in zip(distributed, plain, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got.full_tensor(), expected)
            assert got.stride() == expected.stride()


def total(x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    return (x * y * grad).sum()


@pytest.mark.parametrize(("function", "first", "second", "undecomposed"), keep_every_nth_fast(CASES, every=3))
def test_linear_and_matmul_values_strides_and_two_derivatives_equal_plain_torch(
    function: Function, first: tuple[int, ...], second: tuple[int, ...], undecomposed: bool
) -> None:
    for seed, (placements_of_x, placements_of_y) in enumerate(
        zip(placement_pairs(len(first)) * 3, [pair for pair in placement_pairs(len(second)) for _ in range(3)], strict=True)
    ):
        requires_grad = [(True, True), (True, False), (False, True)][seed % 3]
        x, y = (
            make_tensor(*shape, seed=seed).requires_grad_(needs)
            for shape, needs in zip((first, second), requires_grad, strict=True)
        )
        distributed, plain = [make_dtensor(x, placements_of_x), make_dtensor(y, placements_of_y)], [x, y]
        result, expected = function(*distributed), function(*plain)
        assert_same([result], [expected])
        name = type(result.grad_fn).__name__
        assert (name in ("LinearBackward0", "MatmulBackward0")) == (undecomposed and LINEAR_REACHES_DTENSOR), name
        grad = make_tensor(*expected.shape, seed=9)
        leaves, plain_leaves = ([t for t in operands if t.requires_grad] for operands in (distributed, plain))
        dgrad = make_dtensor(grad, (R, R))
        assert_same(
            torch.autograd.grad(total(result, result.detach(), dgrad), leaves, retain_graph=True),
            torch.autograd.grad(total(expected, expected.detach(), grad), plain_leaves, retain_graph=True),
        )
        once = torch.autograd.grad(total(result, result, dgrad), leaves, create_graph=True)
        expected_once = torch.autograd.grad(total(expected, expected, grad), plain_leaves, create_graph=True)
        assert_same(once, expected_once)
        twice = torch.autograd.grad(sum((t * t).sum() for t in once), leaves)
        assert_same(twice, torch.autograd.grad(sum((t * t).sum() for t in expected_once), plain_leaves))


@pytest.mark.parametrize("function", [F.linear, lambda x, y: x @ y.t(), lambda x, y: y @ x.t()])
@pytest.mark.parametrize("transposed", [(True, False), (False, True), (True, True)])
def test_gradients_of_transposed_operands_have_the_strides_of_plain_torch(
    function: Function, transposed: tuple[bool, bool]
) -> None:
    plain = [
        (make_tensor(6, rows).t() if is_transposed else make_tensor(rows, 6)).requires_grad_()
        for rows, is_transposed in zip((4, 8), transposed, strict=True)
    ]
    distributed = [make_dtensor(plain[0], (S(0), R)), make_dtensor(plain[1], (R, S(0)))]
    function(*distributed).square().sum().backward()
    function(*plain).square().sum().backward()
    assert_same([t.grad for t in distributed], [t.grad for t in plain])


@pytest.mark.parametrize("requires_grad", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)])
def test_linear_backward_computes_only_the_requested_gradients(requires_grad: tuple[bool, bool, bool]) -> None:
    x, weight, bias = (
        t.requires_grad_(needs)
        for t, needs in zip((make_tensor(4, 3, 6), make_tensor(8, 6), make_tensor(8)), requires_grad, strict=True)
    )
    distributed = [make_dtensor(x, (S(0), R)), make_dtensor(weight, (R, S(0))), make_dtensor(bias, (R, S(0)))]
    result = F.linear(*distributed)
    grads = torch.ops.aten.linear_backward(distributed[0].detach(), result.detach(), distributed[1].detach(), requires_grad)
    assert tuple(grad is not None for grad in grads) == requires_grad
    result.sum().backward()
    F.linear(x, weight, bias).sum().backward()
    assert_same([t.grad for t in distributed], [x.grad, weight.grad, bias.grad])


def test_linear_of_complex_tensors_has_the_gradients_of_plain_torch() -> None:
    x, weight = (torch.complex(make_tensor(4, 6, seed=s), make_tensor(4, 6, seed=s + 2)).requires_grad_() for s in (0, 1))
    distributed = [make_dtensor(x, (S(0), R)), make_dtensor(weight, (R, S(0)))]
    F.linear(*distributed).abs().sum().backward()
    F.linear(x, weight).abs().sum().backward()
    assert_same([t.grad for t in distributed], [x.grad, weight.grad])


@pytest.mark.parametrize("function", [F.linear, lambda x, w: x @ w.t()])
def test_flop_counter_counts_the_flops_of_plain_torch(function: Function) -> None:
    x, weight = make_tensor(4, 3, 6).requires_grad_(), make_tensor(8, 6).requires_grad_()
    distributed = [make_dtensor(x, (S(0), R)), make_dtensor(weight, (R, S(0)))]
    with FlopCounterMode(display=False) as plain:
        function(x, weight).sum().backward()
    with FlopCounterMode(display=False) as both:
        function(*distributed).sum().backward()
    assert both.get_total_flops() == plain.get_total_flops()
    result = function(*distributed)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    assert backward.get_total_flops() == plain.get_total_flops() * 2 // 3


class RecordingMode(TorchDispatchMode):
    """Mode that records the operators on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dt.DTensor) for kind in types):
            return NotImplemented
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class PassiveRecordingMode(RecordingMode):
    looks_on = True


@pytest.mark.parametrize("mode", [RecordingMode, PassiveRecordingMode])
def test_dispatch_modes_observe_local_operators_decomposed(mode: type[RecordingMode]) -> None:
    x, weight = (
        make_dtensor(make_tensor(4, 3, 6).requires_grad_(), (S(0), R)),
        make_dtensor(make_tensor(8, 6).requires_grad_(), (R, S(0))),
    )
    with mode() as recorder:
        result = F.linear(x, weight)
        result.sum().backward()
        torch.matmul(x.detach(), weight.detach().t())
    assert "mm" in recorder.names
    assert not {"linear", "matmul", "linear_backward", "matmul_backward"} & recorder.names
    assert ("Linear" in type(result.grad_fn).__name__) == (mode is PassiveRecordingMode and LINEAR_REACHES_DTENSOR)


def test_linear_and_matmul_under_autocast_forward_ad_and_torch_func_equal_torch() -> None:
    x, weight = make_tensor(4, 3, 6), make_tensor(8, 6)
    distributed, distributed_weight = make_dtensor(x, (S(0), R)), make_dtensor(weight, (R, S(0)))
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(distributed.float(), distributed_weight.float()).dtype is torch.bfloat16
        assert torch.matmul(distributed.float(), distributed_weight.float().t()).dtype is torch.bfloat16
    tangent = make_tensor(4, 3, 6, seed=1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(distributed, make_dtensor(tangent, (R, S(0))))
        for result in (F.linear(dual, distributed_weight), dual @ distributed_weight.t()):
            torch.testing.assert_close(forward_ad.unpack_dual(result).tangent.full_tensor(), tangent @ weight.t())

    def check(function: Function) -> None:
        assert_same(
            [torch.func.grad(lambda a: function(a, distributed_weight).square().sum())(distributed)],
            [torch.func.grad(lambda a: function(a, weight).square().sum())(x)],
        )
        assert_same(
            [torch.func.vmap(lambda a: function(a, distributed_weight))(distributed)],
            [torch.func.vmap(lambda a: function(a, weight))(x)],
        )
        assert_same(
            [torch.func.jvp(lambda a: function(a, distributed_weight), (distributed,), (make_dtensor(tangent, (S(0), R)),))[1]],
            [tangent @ weight.t()],
        )

    check(F.linear)
    check(lambda a, b: a @ b.t())


@pytest.mark.parametrize("function", [F.linear, torch.matmul, lambda x, w: torch.matmul(w, x)])
def test_an_activation_multiplied_by_a_frozen_weight_is_not_saved(function: Function) -> None:
    saved: list[Any] = []
    x, weight = make_dtensor(make_tensor(6, 6).requires_grad_(), [S(0), R]), make_dtensor(make_tensor(6, 6, seed=1), [R, S(0)])
    activation = x * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = function(activation, weight)
    activation.relu_()  # backward does not need the overwritten activation
    result.sum().backward()
    assert not any(t.untyped_storage() is activation.untyped_storage() or t is activation for t in saved)
    plain = make_tensor(6, 6).requires_grad_()
    function(plain * 2, make_tensor(6, 6, seed=1)).sum().backward()
    assert x.grad is not None
    assert_same([x.grad], [plain.grad])
