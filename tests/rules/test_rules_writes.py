"""Rules of in-place writes through views: the base changes, and views see writes to the base, under all placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.testing import check, scatter

Program = Callable[[torch.Tensor, torch.Tensor], Any]
X = torch.arange(30.0, dtype=torch.float64).reshape(5, 6) - 7
V = torch.tensor([1.0, -2, 3, 0.5, 2, -1], dtype=torch.float64)


def set_row(x: torch.Tensor, v: torch.Tensor) -> None:
    x[2] = v


def set_column(x: torch.Tensor, v: torch.Tensor) -> None:
    x[:, -1] = 5


def set_element(x: torch.Tensor, v: torch.Tensor) -> None:
    x[3, 1] = 7


def zero_slice(x: torch.Tensor, v: torch.Tensor) -> None:
    x[1:3].zero_()


def add_to_column(x: torch.Tensor, v: torch.Tensor) -> None:
    x[:, 1] += 1


def multiply_row(x: torch.Tensor, v: torch.Tensor) -> None:
    x[-2] *= v


def strided_rows(x: torch.Tensor, v: torch.Tensor) -> None:
    x[1::2] = x[::2][:2] + v


def flat_element(x: torch.Tensor, v: torch.Tensor) -> None:
    x.view(-1)[3] = 1


def reshaped(x: torch.Tensor, v: torch.Tensor) -> None:
    x.view(3, 2, 5)[1, 0].mul_(3)


def transposed_row(x: torch.Tensor, v: torch.Tensor) -> None:
    x.t()[0] = 2


def narrow_from_narrow(x: torch.Tensor, v: torch.Tensor) -> None:
    x.narrow(0, 1, 2).copy_(x.narrow(0, 3, 2))


def diagonal(x: torch.Tensor, v: torch.Tensor) -> None:
    x.diagonal(1).mul_(2)


def view_of_view_of_view(x: torch.Tensor, v: torch.Tensor) -> None:
    x[2][1:5].view(2, 2)[1].fill_(4)


def reduction_into_view(x: torch.Tensor, v: torch.Tensor) -> None:
    x[0].cumsum_(0)


def later_read(x: torch.Tensor, v: torch.Tensor) -> Any:
    row, flat = x[2], x.view(-1)
    x.mul_(2)
    before = row + 1
    row.add_(1)
    return before, row * 1, flat[12:15] * 1


def two_views(x: torch.Tensor, v: torch.Tensor) -> Any:
    column, row = x[:, 3], x[1]
    column += 1
    row *= 2
    return column * 1, row + column[0]


def copied_between_rows(x: torch.Tensor, v: torch.Tensor) -> None:
    x[0] = x[4]
    x[4] = x[1] + x[0]


def unfolded(x: torch.Tensor, v: torch.Tensor) -> None:
    x.unfold(1, 3, 3)[:, 1].mul_(2)


def expanded_source(x: torch.Tensor, v: torch.Tensor) -> None:
    x[:, 2:4] = v[:1]


def squeezed(x: torch.Tensor, v: torch.Tensor) -> None:
    x[3:4].squeeze(0).mul_(v)


def unsqueezed(x: torch.Tensor, v: torch.Tensor) -> None:
    x.unsqueeze(1)[2].add_(v)


def reshape_views_in_place(x: torch.Tensor, v: torch.Tensor) -> None:
    row, column = x[2], x[:, 1]
    row.unsqueeze_(0)
    row.add_(1)
    column.unsqueeze_(1).t_()
    column[0, 2] = -5


def where_masked(x: torch.Tensor, v: torch.Tensor) -> None:
    x[2].masked_fill_(v > 0, -1)


PROGRAMS: list[Program] = [
    set_row,
    set_column,
    set_element,
    zero_slice,
    add_to_column,
    multiply_row,
    strided_rows,
    flat_element,
    reshaped,
    transposed_row,
    narrow_from_narrow,
    diagonal,
    view_of_view_of_view,
    reduction_into_view,
    later_read,
    two_views,
    copied_between_rows,
    unfolded,
    expanded_source,
    squeezed,
    unsqueezed,
    where_masked,
]
SPLIT_PROGRAMS: list[Program] = []  # autograd does not allow writes to one of several views


def into_chunks(x: torch.Tensor, v: torch.Tensor) -> None:
    first, last = x.chunk(2)
    first.add_(1)
    last[0] = first[0]


def into_unbound(x: torch.Tensor, v: torch.Tensor) -> None:
    rows = x.unbind(0)
    rows[1].add_(2)
    rows[3].copy_(rows[1])
    x.split(4, 1)[1].zero_()


# (nor can it replay a view that was reshaped in place)
SPLIT_PROGRAMS += [into_chunks, into_unbound, reshape_views_in_place]
FLAT = [
    (Replicate(),),
    (Shard(0),),
    (Shard(1),),
    (Shard(0, sizes=(1, 4)),),
    (Shard(1, sizes=(6, 0)),),
    (Partial(),),
    (Partial("max"),),
]
GRID = [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(1, level=1), Shard(1, level=0)), (Partial("avg"), Shard(0))]


def run(program: Program) -> Callable[..., Any]:
    def whole(x: torch.Tensor, v: torch.Tensor) -> Any:
        return program(x, v), x

    return whole


@pytest.mark.parametrize(("program", "gradients"), keep_diagonals_fast(PROGRAMS, [False, True]))
def test_programs_that_write_through_views_equal_plain_torch(program: Program, gradients: bool) -> None:
    for shape, choices in (((2,), FLAT), ((2, 2), GRID)):
        mesh = dt.init_device_mesh("cpu", shape)
        for k, placements in enumerate(choices):
            other = [Shard(0)] * mesh.ndim if k % 2 else [Replicate()] * mesh.ndim
            check(run(program), X, V, mesh=mesh, placements=[placements, other], cloned=True, gradients=gradients, strides=False)


@pytest.mark.parametrize("program", [*PROGRAMS[:8], *SPLIT_PROGRAMS], ids=lambda program: program.__name__)
def test_view_writes_to_integers_and_to_splits_equal_plain_torch(program: Program) -> None:
    x, v = torch.arange(30).reshape(5, 6) - 7, torch.tensor([1, -2, 3, 5, 2, -1])
    mesh = dt.init_device_mesh("cpu", (3,))
    for placements in ((Shard(0),), (Shard(1),), (Shard(0, sizes=(0, 5, 0)),), (Partial(),)):
        check(run(program), x, v, mesh=mesh, placements=[placements, (Replicate(),)], cloned=True)


@pytest.mark.parametrize(
    ("program", "placement"),
    [
        (set_row, Shard(0)),
        (set_element, Shard(0)),
        (set_element, Shard(1)),
        (zero_slice, Shard(0)),
        (add_to_column, Shard(1)),
        (multiply_row, Shard(0)),
        (flat_element, Shard(0)),
        (transposed_row, Shard(1)),
        (expanded_source, Shard(1)),
        (set_row, Partial()),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_writes_to_elements_of_one_rank_do_not_communicate(program: Program, placement: Any) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = scatter(torch.arange(30.0).reshape(5, 6), mesh, [placement])
    v = scatter(torch.arange(6.0), mesh, [Replicate()])
    with CommDebugMode() as comm:
        program(x, v)
    assert comm.get_total_counts() == 0
    assert x.placements == (placement,)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_view_writes_to_parameters_under_no_grad_equal_plain_torch(placement: Any) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(dt.distribute_tensor(torch.arange(30.0).reshape(5, 6), mesh, [placement]))
    plain = torch.nn.Parameter(torch.arange(30.0).reshape(5, 6))
    for w in (weight, plain):
        with torch.no_grad():
            w[0] = 0
            w[:, 5].mul_(-1)
            w.data[1] += 3
            w.view(-1)[7:9].zero_()
    assert isinstance(weight, DTensor)
    assert torch.equal(weight.full_tensor(), plain)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_autograd_errors_of_in_place_writes_equal_plain_torch(placement: Any) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    leaf = dt.distribute_tensor(torch.ones(5, 6), mesh, [placement]).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        leaf[2].zero_()
    saved = leaf * 1
    row = saved[2]
    product = (row * row).sum()
    saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("made_inside", [False, True])
def test_view_and_base_writes_in_inference_mode_equal_plain_torch(placement: Any, made_inside: bool) -> None:
    def steps(t: torch.Tensor) -> list[torch.Tensor]:
        row, turned = t[2], t.t()
        t.mul_(2)
        row[1:3].zero_()
        t[4] = t[0]
        t.view(-1)[3] = 1
        return [turned + 1, row * 1, t]

    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(torch.arange(30.0).reshape(5, 6), mesh, [placement])
    with torch.inference_mode():
        expected = steps(torch.arange(30.0).reshape(5, 6))
        got = steps(x + 0 if made_inside else x)
        for g, e in zip(got, expected, strict=True):
            assert torch.equal(g.full_tensor(), e)


def test_view_writes_with_transposed_local_tensors_equal_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    # local strides that do not match the global ones
    pieces = dt.per_rank([torch.arange(6.0).reshape(3, 2).t(), torch.arange(6.0, 12).reshape(3, 2).t()])
    x = DTensor.from_local(pieces, mesh, [Shard(0)], shape=(4, 3), stride=(3, 1))
    plain = x.full_tensor()
    for t in (x, plain):
        flat = t.view(-1)
        flat[1:8] = -1
        t[3].add_(1)
        flat.mul_(2)
    assert torch.equal(x.full_tensor(), plain)


@pytest.mark.parametrize("size", [(5, 5), (3, 4), (30,), (), (0, 4), (1, 2, 3, 4), (6, 5)], ids=str)
def test_resize_keeps_elements_in_memory_order(size: tuple[int, ...]) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    for x in (X, X.t()):
        for where in ([Shard(0), Shard(1)], [Partial(), Shard(1)], [Shard(1), Shard(1)]):
            check(lambda x: x.resize_(size), x, mesh=mesh, placements=[where], gradients=False, cloned=True)
    larger = scatter(X, mesh, [Shard(0), Partial()]).resize_(8, 9)
    assert torch.equal(larger.full_tensor().reshape(-1)[:30], X.reshape(-1))


def test_resize_as_takes_shape_and_memory_format_as_in_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    like = torch.empty(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    for kept in (None, torch.preserve_format, torch.channels_last):
        check(
            lambda x, y: x.resize_as_(y, memory_format=kept),  # noqa: B023  called at once
            *(X, like),
            mesh=mesh,
            placements=[[Shard(0), Shard(1)], [Replicate(), Shard(2)]],
            gradients=False,
            cloned=True,
        )


@pytest.mark.parametrize(
    "operation",
    [
        lambda x, out: torch.renorm(x, 2, 0, 0.5, out=out),
        lambda x, out: torch.masked_select(x, x > 2, out=out),
        lambda x, out: torch._chunk_cat([x, x[:, :3]], 1, 2, out=out),
    ],
    ids=["renorm", "masked_select", "_chunk_cat"],
)
def test_out_of_another_shape_is_resized_by_decomposed_operators(operation: Any) -> None:
    x = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
    mesh = dt.init_device_mesh("cpu", (2,))
    for where in ([Replicate()], [Shard(0)], [Shard(1)]):
        for out in (torch.ones(4, 5, 6, dtype=torch.float64), torch.ones(0, dtype=torch.float64)):
            placements = [where, where if out.ndim > 1 else [Replicate()]]
            check(operation, x, out, mesh=mesh, placements=placements, cloned=True, gradients=False)


@pytest.mark.parametrize("name", ["add_", "gt_", "pow_", "logical_or_", "lerp_"])
def test_in_place_operators_with_own_view_as_operand_equal_plain_torch(name: str) -> None:
    """Check shards of one row: a view of a dim of size 1 has another stride, which a kernel mistakes for a partial overlap."""
    whole = torch.arange(60.0, dtype=torch.float64).view(6, 10)[::2]
    for sizes in ((1, 1, 1), (1, 2, 0)):
        x = dt.distribute_tensor(whole, dt.init_device_mesh("cpu", (3,)), [Shard(0, sizes=sizes)])
        for view in (lambda x: x.view(3, 10), lambda x: x, lambda x: x.view(-1).view(3, 10)):
            expected, found = whole.clone(), x.clone()
            more = (0.5,) if name == "lerp_" else ()
            getattr(expected, name)(view(expected), *more)
            getattr(found, name)(view(found), *more)
            assert torch.equal(found.full_tensor(), expected)


@pytest.mark.parametrize("where", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_cat_into_out_view_that_was_resized_to_zero_equals_plain_torch(where: Any) -> None:
    x, out = torch.arange(12.0).reshape(4, 3), torch.zeros(2, 3)
    given, base = (dt.distribute_tensor(t, dt.init_device_mesh("cpu", (2,)), [where]) for t in (x, out))
    part = base[:1]
    part.resize_(0)
    torch.cat([given, given], out=part)
    assert torch.equal(part.full_tensor(), torch.cat([x, x]))
