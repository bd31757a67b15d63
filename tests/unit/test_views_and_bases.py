"""Views and bases: a view keeps its elements when its base changes shape or memory, and writes reach both."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_case_marks import keep_diagonals_fast, keep_every_nth_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.errors import UnsupportedOperationError
from dtensor.testing import check, compare, scatter

X = torch.arange(30.0, dtype=torch.float64).reshape(5, 6) - 7
VIEWS: dict[str, Callable[[Any], Any]] = {
    "row": lambda x: x[2],
    "column": lambda x: x[:, 3],
    "rows": lambda x: x[1:4],
    "flat": lambda x: x.view(-1),
    "diagonal": lambda x: x.diagonal(1),
    "row of rows": lambda x: x.view(3, 2, 5)[1, 0],
    "windows": lambda x: x.unfold(1, 3, 3)[:, 1],
    "strided": lambda x: x.as_strided((3, 2), (7, 3), 2),
}
IN_PLACE_CHANGES: dict[str, Callable[[Any], Any]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, -1),
    "swapdims_": lambda x: x.swapdims_(-1, 0),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "unsqueeze_ and squeeze_": lambda x: x.unsqueeze_(1).squeeze_(1).squeeze_(),
    "as_strided_": lambda x: x.as_strided_((6, 4), (4, 1)),
    "resize_": lambda x: x.resize_(6, 5),
    "resize_ to fewer": lambda x: x.resize_(2, 7),
    "resize_as_": lambda x: x.resize_as_(x.new_zeros(10, 3)),
    "a view in place": lambda x: x.t().unsqueeze_(0).squeeze_(0),
}
PLACEMENTS_1D = [[Replicate()], [Shard(0)], [Shard(1)], [Shard(1, sizes=(6, 0))], [Partial()]]
PLACEMENTS_2D = [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Partial("avg"), Shard(0)]]


def check_on_all_meshes(program: Callable[..., Any], x: torch.Tensor = X, **options: Any) -> None:
    for shape, choices in (((2,), PLACEMENTS_1D), ((2, 2), PLACEMENTS_2D)):
        for placements in choices:
            mesh = dt.init_device_mesh("cpu", shape)
            check(program, x, mesh=mesh, placements=[placements], cloned=True, gradients=False, **options)


@pytest.mark.parametrize(("view", "change"), keep_every_nth_fast(list(itertools.product(VIEWS, IN_PLACE_CHANGES)), every=5))
def test_a_view_keeps_its_elements_after_its_base_changes_shape_in_place(view: str, change: str) -> None:
    def program(x: Any) -> Any:
        before, read = VIEWS[view](x), VIEWS[view](x)
        first = read * 1
        IN_PLACE_CHANGES[change](x)
        after = before * 1
        x.mul_(2)
        read_again = read * 1
        before.add_(1)
        return first, after, read_again, before, read, x

    check_on_all_meshes(program)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_view_keeps_its_elements_after_the_inner_view_changes_shape_in_place(view: str) -> None:
    def program(x: Any) -> Any:
        between = x[1:].t()[:, :4].t()
        row = between[2]
        second = between.unsqueeze(0)[0, 1]
        between.t_().unsqueeze_(0)
        VIEWS[view](x).mul_(3)
        row.sub_(2)
        return row, second, between, x

    check_on_all_meshes(program)


def test_assigned_data_does_not_change_earlier_views() -> None:
    def program(x: Any) -> Any:
        row, flat, other = x[2], x.view(-1), x * 2
        x.data = other
        x.add_(100)
        row.zero_()
        flat[:3] = 1
        return row, flat, other, x

    check_on_all_meshes(program)


@pytest.mark.parametrize("take", ["data", "set_"])
def test_a_tensor_that_takes_the_memory_of_a_view_writes_to_the_base(take: str) -> None:
    def program(x: Any) -> Any:
        own, row = x[0] * 5, x[2]
        before = (x.view(-1) * 1, x[:, 1] * 1)
        if take == "data":
            own.data = row
        else:
            own.set_(row)
        flat, column = x.view(-1), x[:, 1]
        read = flat * 1, column * 1
        own.add_(1)
        again = flat * 1, column * 1
        del own
        x[2].mul_(2)
        return before, read, again, flat, column, row, x

    check_on_all_meshes(program)


def test_writes_through_a_deleted_alias_reach_earlier_views() -> None:
    def program(x: Any) -> Any:
        row, column = x[2], x[:, 1]
        first = row * 1, column * 1
        other = x * 1
        other.data = x
        other.add_(1)
        del other
        x[1:].data.mul_(2)
        return first, row, column

    check_on_all_meshes(program)


@pytest.mark.parametrize("view", ["row", "column", "flat", "diagonal"])
def test_writes_through_data_of_a_view_reach_its_base_and_keep_plain_gradients(view: str) -> None:
    def program(x: Any) -> Any:
        y = x * 1
        part, square = VIEWS[view](y), (y * y).sum()
        before = part * 1
        part.data.add_(1)
        return before, part * 1, square, y[2] * 1

    for shape, choices in (((2,), PLACEMENTS_1D), ((2, 2), PLACEMENTS_2D)):
        for placements in choices:
            check(program, X, mesh=dt.init_device_mesh("cpu", shape), placements=[placements])


def test_copy_copy_of_a_dtensor_or_view_shares_its_memory() -> None:
    for view in (lambda x: x, *VIEWS.values()):
        for placements in PLACEMENTS_1D:
            x = scatter(X, dt.init_device_mesh("cpu", (2,)), placements)
            original = view(x)
            copied = copy.copy(original)
            copied.zero_()
            assert not original.full_tensor().any()
            assert torch.equal(x.full_tensor(), X.clone().index_put_((X == X,), torch.where(element_mask(view), 0, X).flatten()))


def element_mask(view: Callable[[Any], Any]) -> torch.Tensor:
    mask = torch.zeros(5, 6, dtype=torch.bool)
    view(mask).fill_(True)
    return mask


def test_in_place_metadata_changes_keep_the_shapes_of_the_local_tensors_of_the_user() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    local_tensors = [torch.zeros(3, 4), torch.ones(2, 4)]
    x = dt.DTensor.from_local(dt.per_rank(local_tensors), mesh, [Shard(0)])
    x.t_()
    assert [tuple(x.shape) for x in local_tensors] == [(3, 4), (2, 4)]
    x.add_(1)
    assert float(local_tensors[0].sum()) == 12


def test_views_of_a_parameter_keep_their_elements_after_data_is_transposed_under_no_grad() -> None:
    for placements in PLACEMENTS_1D:
        weight = torch.nn.Parameter(dt.distribute_tensor(X.clone(), dt.init_device_mesh("cpu", (2,)), placements))
        plain = torch.nn.Parameter(X.clone())
        for w in (weight, plain):
            with torch.no_grad():
                row = w[2]
                w.data = w.data.t()  # w.t_() is refused: views with gradients would get wrong gradients
                w[0] = 9
                row.mul_(2)
        assert torch.equal(weight.full_tensor(), plain)
        assert isinstance(weight, torch.nn.Parameter)


def test_gradients_through_in_place_metadata_changes_equal_plain_torch() -> None:
    def program(x: Any) -> Any:
        y = x * 2
        y.t_().unsqueeze_(0)
        row, turned = y[0, 2], y[0].t()
        turned.unsqueeze_(0)
        return row * 3, turned[0, 1:] * 2, y

    for placements in PLACEMENTS_1D:
        check(program, X, mesh=dt.init_device_mesh("cpu", (2,)), placements=[placements])


@pytest.mark.parametrize("placements", PLACEMENTS_1D, ids=str)
def test_views_keep_their_elements_after_in_place_transpose_in_inference_mode(placements: Any) -> None:
    x, plain = scatter(X, dt.init_device_mesh("cpu", (2,)), placements), X.clone()
    with torch.inference_mode():
        results = []
        for t in (x + 0, plain + 0):
            row, column = t[2], t[:, 1]
            t.t_().mul_(2)
            row.add_(1)
            results.append([row * 1, column * 1, t * 1])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got.full_tensor(), expected)


# --- gradients of views taken before an in-place metadata change of their base --------------------------------------
BASE_KINDS: dict[str, Callable[[Any], Any]] = {
    "base": lambda x: x * 1,
    "rows": lambda x: (x * 1)[1:],
    "transposed": lambda x: (x * 1).t(),
}
VIEWS_BEFORE: dict[str, Callable[[Any], Any]] = {
    "row": lambda y: y[1],
    "column": lambda y: y[:, 0],
    "rows": lambda y: y[1:],
    "flat": lambda y: y.reshape(-1) if y.is_contiguous() else y.t().view(-1),
    "element": lambda y: y[1, 2],
    "diagonal": lambda y: y.diagonal(1),
    "itself": lambda y: y.view_as(y),
}
METADATA_CHANGES: dict[str, Callable[[Any], Any]] = {
    "t_": lambda y: y.t_(),
    "transpose_": lambda y: y.transpose_(0, 1),
    "swapaxes_": lambda y: y.swapaxes_(0, -1),
    "swapdims_": lambda y: y.swapdims_(-1, 0),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "unsqueeze_, squeeze_ and t_": lambda y: y.unsqueeze_(1).squeeze_(1).t_(),
    "as_strided_": lambda y: y.as_strided_(y.shape[::-1], y.stride()[::-1]),
}
WRITES_AFTER: dict[str, Callable[[Any, Any], Any]] = {
    "no write": lambda y, v: None,
    "a write to the base": lambda y, v: y.mul_(2),
    "a write to a row": lambda y, v: y[0].mul_(3),
    "a write through the view": lambda y, v: v.mul_(3),
    "a write through both": lambda y, v: (v.mul_(3), y[..., 0].mul_(2)),
    "another transpose of the base": lambda y, v: y.transpose_(0, -1).mul_(2),
    "unsqueeze_ of the view": lambda y, v: v.unsqueeze_(0).mul_(2),
}


@pytest.mark.parametrize(
    ("base", "change", "write", "shape"),
    keep_every_nth_fast(list(itertools.product(BASE_KINDS, METADATA_CHANGES, WRITES_AFTER, [(4, 4), (3, 5)])), every=13),
)
def test_gradients_of_views_before_in_place_metadata_changes_equal_plain_torch(
    base: str, change: str, write: str, shape: tuple[int, int]
) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = torch.arange(1.0, shape[0] * shape[1] + 1, dtype=torch.float64).reshape(shape)
    for k, (name, take) in enumerate(VIEWS_BEFORE.items()):

        def program(x: Any) -> Any:
            y = BASE_KINDS[base](x)
            v = take(y)  # noqa: B023
            METADATA_CHANGES[change](y)
            after = y[0] * 3
            WRITES_AFTER[write](y, v)
            return y * 1, v * 2, after

        placements = PLACEMENTS_1D[(k + shape[0]) % len(PLACEMENTS_1D)]
        outcome = compare(program, (x,), mesh, [fit_sizes(placements, shape)])
        assert not outcome.problems, (shape, name, outcome.problems)


def test_in_place_transpose_of_a_tensor_saved_for_backward_raises_the_error_of_plain_torch() -> None:
    def program(x: Any) -> Any:
        y = x * 1
        square = y * y
        y.t_()
        return square

    mesh = dt.init_device_mesh("cpu", (2,))
    outcome = compare(program, (X,), mesh, [[Shard(0)]])
    assert outcome.same_error
    assert not outcome.problems


def test_in_place_transpose_keeps_user_attributes_and_retain_grad() -> None:
    x = scatter(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    y: Any = x * 1
    y.mark = "mine"
    assert y.t_() is y
    assert (y.mark, tuple(y.shape), y.is_leaf) == ("mine", (6, 5), False)
    y.retain_grad()
    (y * 2).sum().backward()
    assert torch.equal(y.grad.full_tensor(), torch.full((6, 5), 2.0, dtype=torch.float64))


def test_in_place_metadata_changes_of_leaves_and_retained_tensors_are_refused() -> None:
    x = scatter(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    y = x * 1
    y.retain_grad()
    with pytest.raises(UnsupportedOperationError, match=r"x = x.t\(\)"):
        y.t_()
    for t in (x, x * 1):
        with torch.no_grad(), pytest.raises(UnsupportedOperationError, match=r"x.data = x.data.unsqueeze\(0\)"):
            t.unsqueeze_(0)


def fit_sizes(placements: Any, shape: tuple[int, ...]) -> Any:
    return [Shard(1, sizes=(shape[1], 0)) if p == Shard(1, sizes=(6, 0)) else p for p in placements]


# --- storage offsets and strides ------------------------------------------------------------------------------------
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize(
    "part",
    [lambda x: x, lambda x: x[2:], lambda x: x[:, 1:3], lambda x: x[:, ::2], lambda x: x.t()[1:], lambda x: x.view(15, 2)[3:]],
)
def test_fill_diagonal_writes_where_plain_torch_does(part: Callable[[Any], Any], wrap: bool) -> None:
    check_on_all_meshes(lambda x: (part(x).fill_diagonal_(3, wrap), x))


def test_fill_diagonal_writes_views_of_3d_and_complex_tensors() -> None:
    cube = torch.arange(216.0).reshape(6, 6, 6)
    check_on_all_meshes(lambda x: (x[1:, :5, 1:].fill_diagonal_(-1), x), cube)
    for placements in ([Replicate()], [Shard(0)], [Shard(1)], [Partial()]):
        z = torch.complex(X, X + 1)
        check(
            lambda z: (z[1:].imag.fill_diagonal_(3), z),
            z,
            mesh=dt.init_device_mesh("cpu", (2,)),
            placements=[placements],
            gradients=False,
        )
    x = scatter(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)])
    for wrong in (x[0], x.unsqueeze(0)):
        with pytest.raises(RuntimeError):
            wrong.fill_diagonal_(1)


def test_storage_offset_of_views_equals_that_of_plain_torch() -> None:
    for placements in PLACEMENTS_1D:
        x = scatter(X, dt.init_device_mesh("cpu", (2,)), placements)
        for view in (lambda x: x, *VIEWS.values(), lambda x: x[2:].t()[1:]):
            assert view(x).storage_offset() == view(X).storage_offset()


def test_as_strided_of_views_counts_from_the_start_of_the_storage_with_gradients() -> None:
    def program(x: Any) -> Any:
        y = x * 1
        rows, row, column = y[2:], y[3], y[:, 3]
        return (
            rows.as_strided((3, 2), (1, 3), rows.storage_offset() + 1) * 2,
            rows.t().as_strided((3, 2), (2, 3), 14) * 3,
            column.as_strided((2, 2), (6, 12), 3) * 4,
            row.as_strided((3,), (1,), row.storage_offset() + 1) * 5,
        )

    for placements in PLACEMENTS_1D:
        check(program, X, mesh=dt.init_device_mesh("cpu", (2,)), placements=[placements])


def test_as_strided_of_a_conjugate_view_reads_and_writes_conjugates() -> None:
    def program(x: Any) -> Any:
        y = x.clone()
        row = y.conj().as_strided((6,), (1,), 12)
        before = row * 1
        row.as_strided((2,), (2,), 13).mul_(2j)
        return before, y

    for placements in ([Replicate()], [Shard(0)], [Shard(1)]):
        check(program, torch.complex(X, -X.flip(0)), mesh=dt.init_device_mesh("cpu", (2,)), placements=[placements])


def test_as_strided_of_inference_views_equals_plain_torch_or_raises_before_the_view() -> None:
    def program(x: Any, offset: int | None) -> Any:
        with torch.inference_mode():
            return x.clone()[2:].as_strided((3, 2), (1, 3), offset)

    for placements in PLACEMENTS_1D:
        x = scatter(X, dt.init_device_mesh("cpu", (2,)), placements)
        for offset in (12, 14, None):
            assert torch.equal(program(x, offset).full_tensor(), program(X, offset))
        with pytest.raises(dt.errors.LayoutError, match="a view that starts at offset 12"):
            program(x, 3)


# --- views of another dtype, real and imaginary parts ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("other", "write"),
    keep_diagonals_fast(
        [torch.int64, torch.int32, torch.float32, torch.complex128, torch.uint8], ["mask", "element", "add", "copy", "row"]
    ),
)
def test_writes_through_a_view_of_another_dtype_reach_the_base(other: torch.dtype, write: str) -> None:
    def program(x: Any) -> Any:
        y = x.view(other)
        if write == "mask":
            y.masked_fill_(y == y[0, 0], 3)
        elif write == "element":
            y[2, 1] = 5
        elif write == "add":
            y[1:].add_(1)
        elif write == "copy":
            y.copy_(y.flip(0))
        else:
            y[3] = y[0] * 2
        return y, x

    values = X.abs() + 0.25  # no zero, because 0.0 and -0.0 have different bytes
    for placements in [*PLACEMENTS_1D, [Shard(0, sizes=(1, 4))], [Partial("max")]]:
        mesh = dt.init_device_mesh("cpu", (2,))
        check(program, values, mesh=mesh, placements=[placements], cloned=True, gradients=False)


@pytest.mark.parametrize("part", ["real", "imag"])
@pytest.mark.parametrize("conjugated", [False, True])
def test_real_and_imag_are_views_of_the_complex_tensor(part: str, conjugated: bool) -> None:
    def program(z: Any) -> Any:
        source = z.conj() if conjugated else z
        component, row = getattr(source, part), getattr(source[1], part)
        first = component * 1
        component[2:].mul_(2).add_(1)
        row[:2] = 4
        z.mul_(3)
        return first, component, row, torch.view_as_real(z), z

    for placements in [*PLACEMENTS_1D, [Shard(0, sizes=(1, 4))]]:
        mesh = dt.init_device_mesh("cpu", (2,))
        check(program, torch.complex(X, X + 1), mesh=mesh, placements=[placements], cloned=True, gradients=False)


@pytest.mark.parametrize("view", [lambda z: z.conj().imag, lambda z: z[:, 0].conj().imag, lambda z: z.mH[1].real])
def test_gradients_of_writes_through_conjugated_views_equal_plain_torch(view: Callable[[Any], Any]) -> None:
    def program(z: Any) -> Any:
        y = z * 1
        part = view(y)
        part.mul_(2)
        return part, y

    for placements in ([Replicate()], [Shard(0)], [Shard(1)], [Partial()]):
        check(program, torch.complex(X, X + 1), mesh=dt.init_device_mesh("cpu", (2,)), placements=[placements])


# --- windows that share elements, and operands that share memory ----------------------------------------------------
def test_writes_to_single_overlapping_windows_reach_the_base() -> None:
    def program(x: Any) -> Any:
        windows = x.unfold(1, 3, 1)
        windows.swapaxes(-2, -1)[1, -1].mul_(2)
        windows[2][:, 0] = 7
        return windows, x

    check_on_all_meshes(program)


def test_writes_to_a_diagonal_of_overlapping_windows_reach_the_base() -> None:
    def program(x: Any) -> Any:
        windows = x.unfold(0, 2, 1)
        windows.diagonal(1).mul_(2)
        windows.flip(0).diagonal(1).zero_()
        part = windows.diagonal(-1)
        part.masked_fill_(part > 3, -1)
        return windows, x, part

    check_on_all_meshes(program)


def test_writes_through_a_resized_view_of_a_resized_base_reach_the_base() -> None:
    def program(x: Any) -> Any:
        row = x[2::2]
        x.resize_(6)
        row.resize_(2)
        row[0] *= 2
        return row, x

    check(program, X[:4], mesh=dt.init_device_mesh("cpu", (3,)), placements=[[Replicate()]], cloned=True, gradients=False)


def test_flat_views_of_overlapping_windows_equal_plain_torch_for_each_sharding() -> None:
    def program(x: Any) -> Any:
        windows = x.unfold(0, 2, 1)
        return windows.view(24, 2), windows.transpose(1, 2).transpose(0, 1).view(2, 24), windows.reshape(-1)

    for sizes in ((0, 5, 0), (5, 0, 0), (2, 2, 1)):
        mesh, placements = dt.init_device_mesh("cpu", (3,)), (Shard(0, sizes=sizes), Shard(1))
        for placement in placements:
            check(program, X, mesh=mesh, placements=[[placement]], cloned=True, gradients=False)


def test_masked_writes_reach_the_base_through_a_chain_of_views() -> None:
    def program(x: Any) -> Any:
        part = x[:, 1][1::2]
        part[part != 0] += 2
        x.view(-1)[3:20][::2].masked_scatter_(x.view(-1)[3:20][::2] > 0, x[4] * 10)
        return part, x

    check_on_all_meshes(program, (X - 2).round())


def test_index_copy_of_a_column_of_the_written_tensor_equals_plain_torch() -> None:
    def program(x: Any) -> Any:
        x.index_copy_(-1, x.new_zeros(1, dtype=torch.int64), x.narrow(-1, 3, 1))
        return x

    check_on_all_meshes(program)


def test_out_argument_accepts_lazy_views() -> None:
    def program(x: Any) -> Any:
        row, column, flat = x[2], x[:, 3], x.view(-1)
        torch.add(x[0], 1, out=row)
        torch.mul(x[:, 0], 2, out=column)
        torch.cumsum(flat[:7], 0, out=flat[7:14])
        row.swapaxes_(0, 0)
        column.unsqueeze_(0).swapaxes_(0, 1).resize_as_(x.new_zeros(1, 5))
        flat.resize_as_(x.new_zeros(3, 10))
        return row, column, flat, x

    check_on_all_meshes(program)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
@pytest.mark.parametrize("assigned", ["view", "base"])
@pytest.mark.parametrize(
    "strided", [lambda x: x.resize_(6), lambda x: x.as_strided((3,), (1,)), lambda x: x.as_strided_((3,), (2,))]
)
def test_resize_and_as_strided_after_assigned_data_do_not_touch_the_former_base(
    strided: Any, assigned: str, placement: Any
) -> None:
    def program(x: Any) -> list[Any]:
        base = x * 1
        view, other = base[:], x * x
        target, other_alias = (view, base) if assigned == "view" else (base, view)
        target.data = other
        strided_result = strided(view)
        return [strided_result, base, view, other, other_alias[1:]]

    x = torch.arange(12.0).view(3, 4)
    found = program(dt.distribute_tensor(x, dt.init_device_mesh("cpu", (2,)), [placement]))
    for mine, plain in zip(found, program(x), strict=True):
        torch.testing.assert_close(mine.full_tensor(), plain)


def test_a_view_of_a_partial_tensor_gathers_the_value_after_writes_to_its_base() -> None:
    x = torch.randn(3, 4, dtype=torch.complex128)
    for make in (lambda: x.clone(), lambda: dt.distribute_tensor(x, dt.init_device_mesh("cpu", (2,)), [dt.Partial("sum")])):
        base = make().requires_grad_() * 1
        view = base.flatten(0, 1)
        base.fill_diagonal_(7, True)
        view[view != 0] -= 2
        made = view.full_tensor() if isinstance(view, dt.DTensor) else view
        expected = x.clone().fill_diagonal_(7, True).flatten() - 2
        torch.testing.assert_close(made.detach(), expected)


def test_writes_to_the_transpose_of_a_kron_result_reach_the_result() -> None:
    x = dt.distribute_tensor(X, dt.init_device_mesh("cpu", (5,)), [Shard(1)])
    made = torch.kron(x.reshape(-1)[:3], x)
    expected = made.full_tensor()  # computes the lazy view
    made.mT.mul_(2)
    torch.testing.assert_close(made.full_tensor(), expected * 2)


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
def test_invalid_shapes_of_lazy_views_raise_the_error_of_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    target, column = dt.zeros(6, device_mesh=mesh), dt.distribute_tensor(X, mesh, [Shard(1)])[:, 1]
    with pytest.raises(RuntimeError, match="the number of sizes provided"):
        target[0] = column
    with pytest.raises(RuntimeError, match="the number of sizes provided"):
        column.expand([])
