"""Issues of pytorch/pytorch about operators on DTensors, each as a small program of the expected behaviour; with issue
numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from case_lists import (
    S0,
    S1,
    CaseList,
    R,
    assert_full_value,
    check_under_layouts,
    distribute_values,
    get_line_mesh,
    make_per_rank,
    make_values,
)
from compare_with_one_device import full_value
from torch import nn
from torch.nn import functional as F

import dtensor as dt
from dtensor import DTensor, Partial, Shard
from dtensor.debug import CommDebugMode
from dtensor.testing import check

S3 = Shard(3)
CASES = CaseList()
report = CASES.report
X = make_values(5, 6) / 4


def program(thread: int, name: str, fn: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
    CASES[f"{thread}_{name}"] = lambda: check_under_layouts(fn, *tensors, **options)


# --- partial values ----------------------------------------------------------------------------------------------------
@report(153603)
def item_of_a_partial_mean_times_different_numbers() -> None:
    for k in (1, 2, 3):
        mean = distribute_values(torch.tensor([1.0, 2.0, 3.0]), S0).mean()
        assert (mean * k).item() == 2.0 * k


@report(163193)
def a_partial_sum_plus_a_number() -> None:
    total = distribute_values(torch.arange(10.0).reshape(10, 1), S0).sum()
    for added in (10, 10.0, torch.tensor(10)):
        assert (total + added).item() == 55
        assert (added + total).item() == 55
        assert (total - added).item() == 35


@report(147910)
def a_partial_norm_plus_a_number() -> None:
    assert abs((distribute_values(X, S0).norm() + 1e-6).item() - (X.norm() + 1e-6).item()) < 1e-12


@report(159856)
def norms_of_partial_sums() -> None:
    for ord in (1, 2, 3, float("inf"), -float("inf"), 0):
        check(lambda x, ord=ord: torch.linalg.vector_norm(x, ord), X, mesh=get_line_mesh(), placements=[[Partial()]])
        check(
            lambda x, ord=ord: torch._foreach_norm([x, x * 2], ord),
            X,
            mesh=get_line_mesh(),
            placements=[[Partial()]],
            gradients=False,
        )


@report(194033)
def lists_of_norms_in_another_dtype() -> None:
    fn = lambda x: torch._foreach_norm([x], 2, dtype=torch.float64)  # noqa: E731
    for where in ([S0], [Partial()], [R]):
        check(fn, X.float(), mesh=get_line_mesh(), placements=[where], gradients=False)


@report(144054)
def item_of_a_norm() -> None:
    assert abs(distribute_values(torch.ones(8, 8), S0).norm().item() - 8) < 1e-6


@report(167595)
def item_of_every_kind_of_partial() -> None:
    terms = make_per_rank(lambda rank: torch.tensor(float(rank + 1)))
    for op, total in (("sum", 10), ("avg", 2.5), ("max", 4), ("min", 1), ("product", 24)):
        assert DTensor.from_local(terms, get_line_mesh(), [Partial(op)]).item() == total


@report(162460)
def copies_between_partial_sums() -> None:
    for where in ([Partial()], [S0], [R]):
        for into in ([Partial()], [S1], [R]):
            check(lambda x, y: x.clone().copy_(y), X, make_values(5, 6, seed=1), mesh=get_line_mesh(), placements=[into, where])


@report(174799)
def absolute_values_of_partial_sums() -> None:
    for fn in (torch.abs, torch.relu, torch.square, torch.sign, torch.exp):
        check(fn, X, mesh=get_line_mesh(), placements=[[Partial()]])
        check(fn, X, mesh=get_line_mesh(), placements=[[Partial("avg")]])


@report(174800)
def extrema_of_partial_sums_and_maxima() -> None:
    for op in ("sum", "max", "min", "avg"):
        check(lambda x: (x.max(1), x.amin(0), x.clamp(-0.5, 0.5)), X, mesh=get_line_mesh(), placements=[[Partial(op)]])


# --- positions of extrema -----------------------------------------------------------------------------------------------
@report(173936)
def positions_of_extrema_are_global() -> None:
    x = distribute_values(torch.tensor([10.0, 5.0, 3.0, 8.0]), S0)
    assert x.argmax().item() == 0
    assert x.argmin().item() == 2


program(168940, "max_along_a_sharded_dim", lambda x: (x.max(1), x.max(0), x.min(0)), X)
program(167072, "argmax_and_argmin", lambda x: (x.argmax(-1), x.argmin(0, keepdim=True), x.argmax()), X)
program(178582, "gradient_of_topk", lambda x: (torch.topk(x, 2, -1).values, torch.topk(x, 3, 0, largest=False).values), X)
program(185362, "gradients_of_cumulative_products", lambda x: (x.cumprod(0), x.cummax(0)[0], x.cummin(1)[0]), X)


# --- views and writes ---------------------------------------------------------------------------------------------------
@report(139735)
def init_functions_on_a_slice_change_the_base() -> None:
    x = distribute_values(make_values(8, 8).double(), S0)
    with torch.no_grad():
        nn.init.zeros_(x[:2])
        nn.init.constant_(x[3], 5.0)
    wanted = make_values(8, 8).double()
    wanted[:2], wanted[3] = 0, 5
    assert_full_value(x, wanted)


@report(147570)
def a_view_written_in_place() -> None:
    def write(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.view(4, 2, 9).mul_(by.view(4, 1, 1))
        return y

    check_under_layouts(write, make_values(8, 9), torch.arange(4.0).double())


program(179502, "a_view_that_needs_redistribution", lambda x: x.view(-1, 6), make_values(12, 8))
program(143372, "a_view_of_a_tensor_with_an_empty_shard", lambda x: x.view(-1), make_values(6, 8))
program(165600, "linear_of_three_dims", F.linear, make_values(3, 5, 6), make_values(7, 6, seed=1), make_values(7, seed=2))
program(
    172102, "linear_with_a_sharded_sequence", F.linear, make_values(2, 8, 4), make_values(4, 4, seed=1), make_values(4, seed=2)
)
program(179632, "a_split_of_a_flattened_dim", lambda x: x.view(6, 5, 4).view(3, 2, 20), make_values(2, 3, 5, 4))
program(147724, "select", lambda x: (x[0], x[-1], x.select(1, 3), x[:, 2]), X)
program(162560, "unbind_along_any_dim", lambda x: [*x.unbind(0), *x.unbind(1)], X)
program(137649, "iteration", lambda x: [row.sum() for row in x], X)
program(175463, "roll_and_fft", lambda x: (x.roll(2, 0), x.roll((1, -1), (0, 1)), x.roll(3), torch.fft.fft(x, dim=1).abs()), X)
program(167074, "as_strided", lambda x: x.contiguous().as_strided((3, 4), (6, 1), 2), X)
program(124990, "diagonal_and_nonzero", lambda x: (x.diagonal(), x.diagonal(1), x.detach().nonzero()), X)
program(158112, "split_of_partial_and_sharded", lambda x: (*x.split(2, 0), *x.split([1, 3, 2], 1), *x.chunk(4)), X)


@report(167917)
def detach_in_place() -> None:
    x = distribute_values(X, S0).requires_grad_()
    y = x * 2
    y.detach_()
    assert not y.requires_grad
    assert_full_value(y, X * 2)


# --- indexing -----------------------------------------------------------------------------------------------------------
ROW, COLUMN = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 2, 3])


@report(172350)
def index_put_of_sharded_values_into_sharded_rows() -> None:
    fn = lambda x, i, j, v: x.clone().index_put_((i, j), v)  # noqa: E731
    for at_x in ([S0], [S1], [R]):
        for at_v in ([S0], [R], [Partial()]):
            check(
                fn,
                make_values(4, 4),
                ROW,
                COLUMN,
                make_values(4, seed=1),
                mesh=get_line_mesh(),
                placements=[at_x, [R], [R], at_v],
            )


@report(118461)
def gradient_of_index_put() -> None:
    fn = lambda x, i, v: x.index_put((i,), v) * 2  # noqa: E731
    for where in ([S0], [S1]):
        check(fn, X, torch.tensor([3, 0]), make_values(2, 6, seed=1), mesh=get_line_mesh(), placements=[where, [R], where])


program(177338, "index_copy", lambda x, i, s: x.index_copy(0, i, s), X, torch.tensor([4, 1]), make_values(2, 6, seed=1))
program(
    177414,
    "index_add_and_fill",
    lambda x, i, s: x.index_add(0, i, s).index_fill(1, i, 2.0),
    X,
    torch.tensor([4, 1]),
    make_values(2, 6),
)
program(177409, "take_and_put", lambda x, i: (x.take(i), x.put(i, x.flatten()[:3])), X, torch.tensor([29, 3, 7]))
program(177350, "select_scatter", lambda x, v: (x.select_scatter(v, 0, 3), x.diagonal_scatter(v[:5])), X, make_values(6, seed=1))
program(
    186149,
    "scatter_of_topk",
    lambda s, i: torch.zeros_like(s).scatter_(-1, i, 1.0),
    X,
    torch.tensor([[0, 2], [1, 5], [3, 4], [0, 5], [2, 1]]),
)
program(152249, "gradient_of_a_norm_along_a_dim", lambda x: torch.norm(x, p=2, dim=0), X + 0.1)
program(
    152717,
    "masks_choose_rows",
    lambda x, m: (x[m], x.masked_select(m.unsqueeze(-1))),
    make_values(4, 8, 6),
    make_values(4, 8, seed=1) > 0,
)


# --- contractions, convolutions, norms ----------------------------------------------------------------------------------
@report(166598)
def matmul_of_dims_sharded_in_different_orders() -> None:
    a, b = make_values(4, 4), make_values(4, 4, seed=1)
    for order in ([S0, S0], [Shard(0, level=1), Shard(0, level=0)]):
        assert_full_value(distribute_values(a, S1, S1) @ distribute_values(b, *order), a @ b)


program(117728, "addmm_of_no_elements", torch.addmm, make_values(4), torch.ones(12, 0).double(), torch.ones(0, 4).double())


@report(142190)
def matmul_in_inference_mode() -> None:
    x, a = distribute_values(make_values(5, 6), R), distribute_values(make_values(6, 7, seed=1), S0)
    with torch.inference_mode():
        assert_full_value(torch.ops.aten.matmul.default(x, a), make_values(5, 6) @ make_values(6, 7, seed=1))


@report(176446)
def a_batch_sharded_convolution_with_stride_and_padding() -> None:
    fn = lambda x, w: F.conv2d(x, w, stride=2, padding=3)  # noqa: E731
    with CommDebugMode() as comm:
        check(
            fn,
            make_values(8, 3, 9, 9),
            make_values(4, 3, 7, 7, seed=1) / 9,
            mesh=get_line_mesh(),
            placements=[[S0], [R]],
            gradients=False,
        )
    assert all(event.kind != "all_gather" or event.bytes < 4000 for event in comm.events)
    check(fn, make_values(8, 3, 9, 9), make_values(4, 3, 7, 7, seed=1) / 9, mesh=get_line_mesh(), placements=[[S0], [R]])


@report(191926)
def the_gradient_of_an_image_sharded_by_columns() -> None:
    fn = lambda x, w, b: F.conv2d(x, w, b, stride=4)  # noqa: E731
    check(
        fn,
        make_values(2, 3, 8, 16),
        make_values(8, 3, 4, 4, seed=1) / 9,
        make_values(8, seed=2),
        mesh=get_line_mesh(),
        placements=[[S3], [R], [R]],
    )


@report(142058)
def a_first_convolution_whose_input_needs_no_gradient() -> None:
    x = distribute_values(make_values(2, 3, 8, 8), R)
    conv = dt.distribute_module(nn.Conv2d(3, 4, 3).double(), get_line_mesh())
    conv(x).sum().backward()
    like = nn.Conv2d(3, 4, 3).double()
    for own, made in zip(like.parameters(), conv.parameters(), strict=True):
        own.data = full_value(made)
    like(make_values(2, 3, 8, 8)).sum().backward()
    assert like.weight.grad is not None
    assert_full_value(conv.weight.grad, like.weight.grad)


@report(159959)
def double_backward_through_a_convolution() -> None:
    x, w = (
        distribute_values(make_values(4, 2, 6, 6), S0).requires_grad_(),
        distribute_values(make_values(3, 2, 3, 3, seed=1) / 9, R).requires_grad_(),
    )
    p, q = make_values(4, 2, 6, 6).requires_grad_(), (make_values(3, 2, 3, 3, seed=1) / 9).requires_grad_()
    for image, weight in ((x, w), (p, q)):
        out = F.conv2d(image, weight).square().sum()
        (slope,) = torch.autograd.grad(out, image, create_graph=True)
        slope.square().sum().backward()
    assert q.grad is not None
    assert_full_value(w.grad, q.grad)


program(
    167090,
    "convolution_without_bias",
    lambda x, w: F.conv2d(x, w, None),
    make_values(4, 2, 6, 6),
    make_values(3, 2, 3, 3, seed=1) / 9,
)
program(
    115250, "layer_norm_of_other_shapes", lambda x: (F.layer_norm(x, (3,)), F.layer_norm(x, (4, 3))), make_values(5, 4, 3) / 4
)


@report(133499)
def layer_norm_backward_without_some_gradients() -> None:
    for wanted in ((True, False, False), (False, True, False), (False, True, True), (True, False, True)):
        tensors = [
            distribute_values(t, where).requires_grad_(w)
            for t, where, w in zip((X, make_values(6), make_values(6, seed=1)), (S0, R, R), wanted, strict=True)
        ]
        plain = [t.clone().requires_grad_(w) for t, w in zip((X, make_values(6), make_values(6, seed=1)), wanted, strict=True)]
        for x, g, b in (tensors, plain):
            F.layer_norm(x, (6,), g, b).square().sum().backward()
        for own, like in zip(tensors, plain, strict=True):
            assert (own.grad is None) == (like.grad is None)
            if like.grad is not None:
                assert_full_value(own.grad, like.grad)


@report(174276)
def layer_norm_over_a_sharded_dim_communicates_less_than_half_of_the_input() -> None:
    x = distribute_values(make_values(8, 64), S1)
    g = distribute_values(torch.ones(64).double(), S0)
    with CommDebugMode() as comm:
        out = F.layer_norm(x, (64,), g)
    assert sum(comm.get_comm_bytes().values()) < 8 * 64 * 8 / 2
    assert_full_value(out, F.layer_norm(make_values(8, 64), (64,)))


program(158716, "rms_norm", lambda x, g: F.rms_norm(x, (6,), g), X, make_values(6, seed=1))
program(163879, "logsumexp", lambda x: (x.logsumexp(0), x.logsumexp((0, 1)), x.logsumexp(1, keepdim=True)), X)
program(162692, "mean_of_uneven_shards", lambda x: (x.mean(), x.mean(0), x.mean(1)), X)
program(
    176821,
    "pooling",
    lambda x: (F.avg_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 3)),
    make_values(5, 2, 6, 7),
)


# --- embeddings and losses ----------------------------------------------------------------------------------------------
@report(130725)
def two_embeddings_of_different_sizes() -> None:
    def look(ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, a).sum(-1) + F.embedding(ids, b).sum(-1)

    check(look, torch.tensor([1, 2, 3]), make_values(8, 3), make_values(9, 4), mesh=get_line_mesh(), placements=[[R], [S0], [S0]])


@report(131264)
def two_embeddings_of_one_size_reduced_later() -> None:
    ids, a, b = torch.tensor([1, 7, 3]), make_values(9, 3), make_values(9, 3, seed=1)
    first, second = (F.embedding(distribute_values(ids, R), distribute_values(table, S0)) for table in (a, b))
    assert_full_value(first, a[ids])
    assert_full_value(second, b[ids])
