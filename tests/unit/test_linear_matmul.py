"""``linear`` and ``matmul`` arrive whole: one operator and one node of autograd's, with what plain tensors give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fast_part import some
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch_versions import WHOLE

import dtensor as dt
from dtensor import Partial, Placement, Replicate, Shard

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
S, R, P = Shard, Replicate(), Partial()
Function = Callable[..., Tensor]

# shapes of the operands, whether they are served whole
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


def of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut(x: Tensor, placements: Sequence[Placement]) -> Any:
    return dt.distribute_tensor(x.detach(), MESH, placements).requires_grad_(x.requires_grad)


def ways(ndim: int) -> list[tuple[Placement, Placement]]:
    first, last, before = S(0), S(ndim - 1), S(max(0, ndim - 2))
    return [(R, R), (first, last), (last, R), (S(0), S(0)), (P, first), (R, before)]


def same(ours: Any, plain: Any) -> None:
    for got, expected in zip(ours, plain, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got.full_tensor(), expected)
            assert got.stride() == expected.stride()


def total(x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    return (x * y * grad).sum()


@pytest.mark.parametrize(("function", "first", "second", "whole"), some(CASES))
def test_values_strides_gradients_and_gradients_of_those_are_those_of_plain_tensors(
    function: Function, first: tuple[int, ...], second: tuple[int, ...], whole: bool
) -> None:
    for seed, (of_x, of_y) in enumerate(
        zip(ways(len(first)) * 3, [way for way in ways(len(second)) for _ in range(3)], strict=True)
    ):
        wanted = [(True, True), (True, False), (False, True)][seed % 3]
        x, y = (of(*shape, seed=seed).requires_grad_(needs) for shape, needs in zip((first, second), wanted, strict=True))
        ours, plain = [cut(x, of_x), cut(y, of_y)], [x, y]
        made, expected = function(*ours), function(*plain)
        same([made], [expected])
        name = type(made.grad_fn).__name__
        assert (name in ("LinearBackward0", "MatmulBackward0")) == (whole and WHOLE), name
        grad = of(*expected.shape, seed=9)
        of_ours, of_plain = ([t for t in operands if t.requires_grad] for operands in (ours, plain))
        given = cut(grad, (R, R))
        same(
            torch.autograd.grad(total(made, made.detach(), given), of_ours, retain_graph=True),
            torch.autograd.grad(total(expected, expected.detach(), grad), of_plain, retain_graph=True),
        )
        once = torch.autograd.grad(total(made, made, given), of_ours, create_graph=True)
        expected_once = torch.autograd.grad(total(expected, expected, grad), of_plain, create_graph=True)
        same(once, expected_once)
        twice = torch.autograd.grad(sum((t * t).sum() for t in once), of_ours)
        same(twice, torch.autograd.grad(sum((t * t).sum() for t in expected_once), of_plain))


@pytest.mark.parametrize("function", [F.linear, lambda x, y: x @ y.t(), lambda x, y: y @ x.t()])
@pytest.mark.parametrize("by_columns", [(True, False), (False, True), (True, True)])
def test_gradients_lie_in_memory_as_plain_ones_do(function: Function, by_columns: tuple[bool, bool]) -> None:
    plain = [
        (of(6, rows).t() if turned else of(rows, 6)).requires_grad_() for rows, turned in zip((4, 8), by_columns, strict=True)
    ]
    ours = [cut(plain[0], (S(0), R)), cut(plain[1], (R, S(0)))]
    function(*ours).square().sum().backward()
    function(*plain).square().sum().backward()
    same([t.grad for t in ours], [t.grad for t in plain])


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)])
def test_gradients_that_nobody_asks_for_are_not_computed(wanted: tuple[bool, bool, bool]) -> None:
    x, weight, bias = (t.requires_grad_(needs) for t, needs in zip((of(4, 3, 6), of(8, 6), of(8)), wanted, strict=True))
    ours = [cut(x, (S(0), R)), cut(weight, (R, S(0))), cut(bias, (R, S(0)))]
    made = F.linear(*ours)
    grads = torch.ops.aten.linear_backward(ours[0].detach(), made.detach(), ours[1].detach(), wanted)
    assert tuple(grad is not None for grad in grads) == wanted
    made.sum().backward()
    F.linear(x, weight, bias).sum().backward()
    same([t.grad for t in ours], [x.grad, weight.grad, bias.grad])


def test_complex_numbers_go_the_way_of_their_conjugates() -> None:
    x, weight = (torch.complex(of(4, 6, seed=s), of(4, 6, seed=s + 2)).requires_grad_() for s in (0, 1))
    ours = [cut(x, (S(0), R)), cut(weight, (R, S(0)))]
    F.linear(*ours).abs().sum().backward()
    F.linear(x, weight).abs().sum().backward()
    same([t.grad for t in ours], [x.grad, weight.grad])


@pytest.mark.parametrize("function", [F.linear, lambda x, w: x @ w.t()])
def test_who_takes_operators_down_sees_products(function: Function) -> None:
    x, weight = of(4, 3, 6).requires_grad_(), of(8, 6).requires_grad_()
    ours = [cut(x, (S(0), R)), cut(weight, (R, S(0)))]
    with FlopCounterMode(display=False) as plain:
        function(x, weight).sum().backward()
    with FlopCounterMode(display=False) as both:
        function(*ours).sum().backward()
    assert both.get_total_flops() == plain.get_total_flops()
    made = function(*ours)
    with FlopCounterMode(display=False) as backward:
        made.sum().backward()
    assert backward.get_total_flops() == plain.get_total_flops() * 2 // 3


class Seen(TorchDispatchMode):
    """What runs on plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dt.DTensor) for kind in types):
            return NotImplemented
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Onlooker(Seen):
    looks_on = True


@pytest.mark.parametrize("mode", [Seen, Onlooker])
def test_blocks_of_plain_tensors_are_seen_in_parts(mode: type[Seen]) -> None:
    x, weight = cut(of(4, 3, 6).requires_grad_(), (S(0), R)), cut(of(8, 6).requires_grad_(), (R, S(0)))
    with mode() as seen:
        made = F.linear(x, weight)
        made.sum().backward()
        torch.matmul(x.detach(), weight.detach().t())
    assert "mm" in seen.names
    assert not {"linear", "matmul", "linear_backward", "matmul_backward"} & seen.names
    assert ("Linear" in type(made.grad_fn).__name__) == (mode is Onlooker and WHOLE)


def test_autocast_and_forward_derivatives_and_transforms() -> None:
    x, weight = of(4, 3, 6), of(8, 6)
    ours, theirs = cut(x, (S(0), R)), cut(weight, (R, S(0)))
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(ours.float(), theirs.float()).dtype is torch.bfloat16
        assert torch.matmul(ours.float(), theirs.float().t()).dtype is torch.bfloat16
    tangent = of(4, 3, 6, seed=1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(ours, cut(tangent, (R, S(0))))
        for made in (F.linear(dual, theirs), dual @ theirs.t()):
            torch.testing.assert_close(forward_ad.unpack_dual(made).tangent.full_tensor(), tangent @ weight.t())

    def check(function: Function) -> None:
        same(
            [torch.func.grad(lambda a: function(a, theirs).square().sum())(ours)],
            [torch.func.grad(lambda a: function(a, weight).square().sum())(x)],
        )
        same([torch.func.vmap(lambda a: function(a, theirs))(ours)], [torch.func.vmap(lambda a: function(a, weight))(x)])
        same([torch.func.jvp(lambda a: function(a, theirs), (ours,), (cut(tangent, (S(0), R)),))[1]], [tangent @ weight.t()])

    check(F.linear)
    check(lambda a, b: a @ b.t())


@pytest.mark.parametrize("function", [F.linear, torch.matmul, lambda x, w: torch.matmul(w, x)])
def test_an_activation_that_goes_into_a_frozen_weight_is_not_kept(function: Function) -> None:
    kept: list[Any] = []
    x, weight = cut(of(6, 6).requires_grad_(), [S(0), R]), cut(of(6, 6, seed=1), [R, S(0)])
    activation = x * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        made = function(activation, weight)
    activation.relu_()  # nor does backward miss what it was
    made.sum().backward()
    assert not any(t.untyped_storage() is activation.untyped_storage() or t is activation for t in kept)
    plain = of(6, 6).requires_grad_()
    function(plain * 2, of(6, 6, seed=1)).sum().backward()
    assert x.grad is not None
    same([x.grad], [plain.grad])
