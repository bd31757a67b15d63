"""Rules of views, slices and splits: shards stay on their ranks, and a slice of a sharded dim has uneven shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rule_tables import MESHES, RuleCase, check_many_placements, check_placement, get_collective_kinds, make_floats, make_integers
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.errors import UnsupportedOperationError
from dtensor.rules.dim_windows import cover_window_sizes, window_block_sizes
from dtensor.testing import check

X, Y, Z = make_floats(5, 6, 7), make_floats(5, 6), make_integers(5, 6)
PAIRS = torch.view_as_complex(make_floats(5, 6, 2))

CASES = {
    "flatten": RuleCase(lambda x: x.flatten(0, 1), (X,)),
    "unflatten": RuleCase(lambda x: x.unflatten(1, (2, 3)), (X,)),
    "reshape": RuleCase(lambda x: x.reshape(15, -1), (X,)),
    "reshape of a transpose": RuleCase(lambda x: x.transpose(0, 2).reshape(42, 5), (X,)),
    "view and back": RuleCase(lambda x: x.view(30, 7).view(5, 6, 7) * 2, (X,)),
    "interleaved boundaries": RuleCase(lambda x: x.view(6, 5), (Y,)),
    "movedim": RuleCase(lambda x: x.movedim((0, 1), (2, 0)), (X,)),
    "swapaxes": RuleCase(lambda x: x.swapaxes(-1, 0), (X,)),
    "matrix transposes": RuleCase(lambda x: (x.mT, x.mH, x.adjoint()), (X,)),
    "squeeze": RuleCase(lambda x: x.unsqueeze(1).squeeze(), (Y,)),
    "squeeze of dims of size 1": RuleCase(lambda x: (x.squeeze(), x.squeeze(0), x.squeeze((0, 2))), (make_floats(1, 6, 1),)),
    "views of dims of size 1 and others": RuleCase(
        lambda x: (x.view(5, 6), x.view(30), x.view(1, 1, 30, 1), x.view(2, 15)), (make_floats(1, 5, 1, 6),), ("sum",)
    ),
    "views of one element": RuleCase(lambda x: (x.view(1), x.view(()), x.view(1, 1, 1)), (make_floats(1, 1),)),
    "expand": RuleCase(lambda x: x.unsqueeze(1).expand(-1, 3, -1), (Y,)),
    "expand_as": RuleCase(lambda x: x[:1].expand_as(x) + x, (Y,)),
    "view_as": RuleCase(lambda x: x.view_as(x.view(6, 5)), (Y,)),
    "real and imag": RuleCase(lambda x: (x.real * 2, x.imag + 1, torch.view_as_real(x)), (PAIRS,), ("sum",)),
    "conjugate": RuleCase(lambda x: (x.conj() * x, x.conj().t()[2]), (PAIRS,), ("sum",)),
    "other dtype": RuleCase(lambda x: (x.view(torch.int32), x.view(torch.int8)[:, ::8]), (Z,), ("sum",)),
    "slices": RuleCase(lambda x: (x[1:4], x[:, ::2], x[-2:, 1:-1], x[3:3]), (Y,)),
    "slice with step of a slice": RuleCase(lambda x: x[1:][::2][1:], (Y,)),
    "rows": RuleCase(lambda x: (x[2], x[:, -1], x[1, 2], x[..., 0, None]), (X,)),
    "rows of integers": RuleCase(lambda x: (x[0], x[-1, 3]), (Z,)),
    "split": RuleCase(lambda x: [part * 2 for part in x.split(2)], (Y,)),
    "split with sizes": RuleCase(lambda x: x.split([1, 0, 5], 1)[2], (Y,)),
    "chunk": RuleCase(lambda x: [part.sum() for part in x.chunk(4, 1)], (Y,)),
    "tensor_split": RuleCase(lambda x: x.tensor_split((1, 4)), (Y,)),
    "hsplit and vsplit": RuleCase(lambda x: (*x.hsplit(2), *x.vsplit([2])), (Y,)),
    "unbind": RuleCase(lambda x: x.unbind(1)[3], (X,)),
    "iteration": RuleCase(lambda x: [row * 2 for row in x], (Y,)),
    "narrow": RuleCase(lambda x: x.narrow(0, 1, 3), (Y,)),
    "diagonal": RuleCase(lambda x: (x.diagonal(1), x.diagonal(-2, 1, 0)), (Y,)),
    "unfold": RuleCase(lambda x: x.unfold(1, 3, 2), (X,)),
    "as_strided": RuleCase(lambda x: x.as_strided((2, 3), (7, 2), 1), (Y,)),
    "scatter into": RuleCase(
        lambda x, y: (torch.slice_scatter(x, y, 1, 2, 4), torch.select_scatter(x, y[:, 0], 1, 5)), (Y, make_floats(5, 2, seed=1))
    ),
    "empty tensors": RuleCase(lambda x: (x.view(4, 0), x[:, 1:], x.flatten(), x.t()), (make_floats(0, 4),), ("sum",)),
    "0-d": RuleCase(lambda x: (x.view(1, 1), x.expand(3), x[None]), (make_floats(),)),
}


@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(CASES, MESHES, every=3), ids=str)
def test_view_values_and_gradients_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(CASES[name], mesh_shape, 7)


R, S0, S1 = Replicate(), Shard(0), Shard(1)
LOCAL_CASES: list[tuple[str, Callable[[torch.Tensor], Any], list[Any], list[Any]]] = [
    ("flatten of uneven shards", lambda x: x.flatten(), [S0], [Shard(0, sizes=(18, 12))]),
    ("unflatten of uneven shards", lambda x: x.flatten().view(5, 6), [S0], [S0]),
    ("split of the inner dim", lambda x: x.view(5, 2, 3), [S1], [S1]),
    ("a slice along shards", lambda x: x[1:5], [S0], [Shard(0, sizes=(2, 2))]),
    ("a slice with an empty shard", lambda x: x[:2], [S0], [Shard(0, sizes=(2, 0))]),
    ("a slice with a step", lambda x: x[::2], [S0], [Shard(0, sizes=(2, 1))]),
    ("a slice of the unsharded dim", lambda x: x[:, 1:], [S0], [S0]),
    ("a row of the sharded dim", lambda x: x[3], [S0], [Shard(0, sizes=(0, 6))]),
    ("a column", lambda x: x[:, 3], [S0], [S0]),
    ("the first part of a split", lambda x: x.split(4)[0], [S0], [Shard(0, sizes=(3, 1))]),
    ("the last chunk", lambda x: x.chunk(2)[1], [S0], [Shard(0, sizes=(0, 2))]),
    ("diagonal", lambda x: x.diagonal(1), [S0], [Shard(0, sizes=(3, 2))]),
    ("transpose", lambda x: x.t(), [S0], [S1]),
    ("nested shards, flattened", lambda x: x.flatten(), [S0, S0], [S0, Shard(0, sizes=(12, 6, 6, 6))]),
    ("nested shards, sliced", lambda x: x[1:], [S0, S0], [S0, Shard(0, sizes=(1, 1, 1, 1))]),
    ("flatten of two sharded dims", lambda x: x[:2].flatten(), [Shard(0, sizes=(1, 4)), S1], [S0, S0]),
    ("flatten and view of two sharded dims", lambda x: x[:2].flatten().view(2, 6), [Shard(0, sizes=(1, 4)), S1], [S0, S1]),
    ("partial terms", lambda x: x.view(30)[3:], [Partial("max")], [Partial("max")]),
]


@pytest.mark.parametrize(("fn", "given", "expected"), [row[1:] for row in LOCAL_CASES], ids=[row[0] for row in LOCAL_CASES])
def test_views_keep_shards_without_communication(
    fn: Callable[[torch.Tensor], Any], given: list[Any], expected: list[Any]
) -> None:
    shape = (2,) * len(given)
    outcome = check_placement(lambda x: fn(x).clone(), (Y,), shape, [given])  # a view is computed when it is read
    assert get_collective_kinds(outcome) == []
    assert outcome.layouts[0].placements == dt.Layout.of(outcome.layouts[0].mesh, expected, outcome.layouts[0].shape).placements


@pytest.mark.parametrize(
    ("new", "dim", "expected"),
    [
        ((1, 5, 6), 0, Shard(0)),
        ((30,), 0, Shard(0, sizes=(30, 0))),
        ((5, 6), 2, Shard(1, sizes=(6, 0))),
        ((5, 1, 2, 3), 2, Shard(1)),
    ],
)
def test_view_of_sharded_dim_of_size_1_keeps_all_elements_on_one_rank(new: tuple[int, ...], dim: int, expected: Shard) -> None:
    """Check views of a tensor with a sharded dim of size 1: one rank has all elements and keeps them."""
    outcome = check_placement(lambda x: x.view(new).clone(), (make_floats(1, 5, 1, 6),), (2,), [[Shard(dim)]])
    assert get_collective_kinds(outcome) == []
    assert outcome.layouts[0].placements == (expected,)


@pytest.mark.parametrize(
    "fn", [lambda x: x[1:4] * 2, lambda x: x.flatten()[7:] * 2, lambda x: x.chunk(2)[1] * 3], ids=["slice", "flat slice", "chunk"]
)
def test_gradient_of_a_slice_of_a_sharded_dim_does_not_communicate(fn: Callable[[torch.Tensor], Any]) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(Y.clone().requires_grad_(), mesh, [Shard(0)])
    made = fn(x)
    with dt.explicit():
        made.backward(torch.ones_like(made))
    assert x.grad.placements == x.placements


def test_slice_of_sharded_dim_shares_memory_with_the_local_tensor() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(Y.clone(), mesh, [Shard(0)])
    part = x[1:4]
    for local, base in zip(part._local.shards, x._local.shards, strict=True):
        assert local.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    part.zero_()
    assert x.full_tensor()[1:4].abs().sum() == 0


def test_as_strided_of_elements_between_strides_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(Y.clone(), mesh, [Shard(0)])[:, ::2]
    # the base has the skipped elements
    assert torch.equal(x.as_strided((3, 2), (2, 1)).full_tensor(), Y[:, ::2].as_strided((3, 2), (2, 1)))
    alone = dt.DTensor.from_local(Y, mesh, shape=Y.shape, stride=(16, 2))
    with pytest.raises(UnsupportedOperationError, match="clone"):
        alone.as_strided((3, 2), (2, 1))


@pytest.mark.parametrize(
    ("sizes", "window", "expected"),
    [((3, 2), range(1, 5), (2, 2)), ((2, 0, 2, 1), range(0, 5, 2), (1, 0, 1, 1)), ((4, 3), range(9, 9), (0, 0))],
)
def test_window_block_sizes_counts_the_window_positions_in_each_block(
    sizes: tuple[int, ...], window: range, expected: tuple[int, ...]
) -> None:
    assert window_block_sizes(sizes, window) == expected


def test_cover_window_sizes_gives_the_requested_block_sizes_or_the_default() -> None:
    for total in range(1, 9):
        for start in range(total):
            for end in range(start, total + 1):
                for cut in range(end - start + 1):
                    window, wanted = range(start, end), (cut, end - start - cut)
                    default = (-(-total // 2), total // 2)
                    found = cover_window_sizes(default, [(wanted, window)])
                    assert sum(found) == total
                    assert found == default or window_block_sizes(found, window) == wanted


def test_composite_views_in_inference_mode_equal_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with torch.inference_mode():
        check(lambda x: (x.flatten(1), x.chunk(2, 1)[0], x.mT), X, mesh=mesh, placements=[[Shard(1)]], gradients=False)


@given(st.data())
def test_as_strided_windows_and_gradients_equal_plain_torch(data: st.DataObject) -> None:
    """Check ``as_strided`` and its gradient with some dims unchanged and windows over the others."""
    order = data.draw(st.permutations(range(data.draw(st.integers(1, 4)))))
    shape = [data.draw(st.integers(1, 5)) for _ in order]
    plain = torch.randn(shape, dtype=torch.float64).permute(order)
    kept = data.draw(st.integers(0, plain.ndim - 1))
    room = plain.shape[kept:].numel() if order == sorted(order) else plain.shape[-1]
    dims = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=3))
    dims = [(n, step) for n, step in dims if 1 + sum((n - 1) * step for n, step in dims) <= room]
    size = (*plain.shape[:kept], *(n for n, _ in dims))
    stride = (*plain.stride()[:kept], *(step * plain.stride(-1) for _, step in dims))
    x = dt.distribute_tensor(plain, dt.init_device_mesh("cpu", (3,)), [Shard(data.draw(st.integers(0, plain.ndim - 1)))])
    expected, found = plain.requires_grad_().as_strided(size, stride), x.requires_grad_().as_strided(size, stride)
    grad = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, plain, grad)
    (got,) = torch.autograd.grad(found, x, dt.distribute_tensor(grad, x.device_mesh, [Replicate()]))
    assert torch.equal(found.full_tensor(), expected)
    assert all(n == 1 or step == own for n, step, own in zip(size, found.stride(), expected.stride(), strict=True))
    torch.testing.assert_close(got.full_tensor(), wanted)
