"""PyTorch defect cases: defects, surprises and requests that PEER.md lists, each as a program for one process and for four."""

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
    assert_raises,
    check_under_layouts,
    get_line_mesh,
    get_square_mesh,
    local_tensors_by_rank,
    make_per_rank,
    make_values,
)
from torch import nn
from torch.nn import functional as F

import dtensor as dt
from dtensor import DTensor, Partial, Shard
from dtensor.debug import CommDebugMode
from dtensor.errors import ImplicitCommunicationError, LayoutError, MixedTensorError
from dtensor.placement import REDUCE_OPS
from dtensor.testing import check, scatter

RAGGED = Shard(0, sizes=(1, 0, 3, 1))
CASES = CaseList()
case = CASES.case


# --- wrong or surprising results -------------------------------------------------------------------------------------
@case
def integer_sums_keep_their_dtype() -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        x, y = make_values(5, 6).abs().to(dtype), make_values(5, 6, seed=1).abs().to(dtype)
        made = scatter(x, get_line_mesh(), [Partial()]) + dt.distribute_tensor(y, get_line_mesh(), [R])
        assert made.dtype == dtype
        assert_full_value(made, x + y)


@case
def replicated_integers_become_partial_without_division() -> None:
    x = dt.distribute_tensor(torch.tensor([1, 2, 3]), get_line_mesh(), [R]).redistribute(placements=[Partial()])
    assert x.dtype == torch.int64
    assert_full_value(x, torch.tensor([1, 2, 3]))


@case
def threshold_of_partials_equals_one_device() -> None:
    for op in ("max", "min", "sum"):
        check(lambda x: F.threshold(x, 1.0, -20.0), make_values(5, 6), mesh=get_line_mesh(), placements=[[Partial(op)]])


@case
def extrema_where_the_last_shard_is_empty() -> None:
    for fn in (torch.amax, torch.amin, torch.argmax, torch.argmin):
        for dim in (0, 1):
            check(lambda x, fn=fn, dim=dim: fn(x, dim), make_values(5, 3), mesh=get_line_mesh(), placements=[[S0]])
    check(lambda x: x.max(0), make_values(5, 3), mesh=get_line_mesh(), placements=[[RAGGED]])


@case
def gathering_nested_uneven_shards_of_a_flattened_mesh() -> None:
    x = make_values(5, 3)
    assert_full_value(dt.distribute_tensor(x, get_square_mesh(), [S0, S0]), x)
    assert_full_value(dt.distribute_tensor(x, get_square_mesh().flatten(), [S0]), x)
    moved = dt.distribute_tensor(x, get_square_mesh(), [S0, S0]).redistribute(get_square_mesh().flatten(), [S1])
    assert_full_value(moved, x)


@case
def dropout_masks_differ_between_shards() -> None:
    torch.manual_seed(0)
    kept = F.dropout(dt.ones(4, 64, device_mesh=get_line_mesh(), placements=[S0])).full_tensor()
    rows = [row.tolist() for row in (kept.shards[0] if isinstance(kept, dt.PerRank) else kept)]
    assert all(rows[i] != rows[j] for i in range(4) for j in range(i))


@case
def randn_on_a_cpu_mesh() -> None:
    torch.manual_seed(0)
    expected = torch.randn(5, 6)
    torch.manual_seed(0)
    assert_full_value(dt.randn(5, 6, device_mesh=get_line_mesh(), placements=[S0]), expected)


@case
def uneven_local_tensors_give_the_global_shape() -> None:
    whole, sizes = make_values(7, 2), (1, 0, 4, 2)
    made = DTensor.from_local(make_per_rank(lambda rank: whole.split(sizes)[rank]), get_line_mesh(), [S0])
    assert made.shape == (7, 2)
    assert_full_value(made, whole)


@case
def local_tensors_that_do_not_match_a_given_shape_raise() -> None:
    odd = make_per_rank(lambda rank: torch.ones((3, 1, 4, 2)[rank], 2))
    assert_raises(
        LayoutError, "rank", lambda: DTensor.from_local(odd, get_line_mesh(), [S0], shape=(10, 2), stride=(2, 1), run_check=True)
    )


@case
def an_item_is_the_global_value() -> None:
    x = make_values(5, 6)
    total = dt.distribute_tensor(x, get_line_mesh(), [S0]).sum()
    assert total.placements == (Partial(),)
    assert total.item() == float(total) == x.sum().item()
    assert bool(total > 1e6) is False
    assert int(total) == int(x.sum())


@case
def convolutions_along_batch_width_and_channels() -> None:
    x, w, b = make_values(3, 4, 9, 8), make_values(6, 4, 3, 3, seed=1) / 9, make_values(6, seed=2)
    fns = (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        lambda x, w, b: F.conv2d(x, w, b, padding="same", dilation=2),
        lambda x, w, b: F.conv2d(x, w.expand(6, 4, 3, 3)[:, :2], b, groups=2),
    )
    for fn in fns:
        for at_x, at_w in (([S0], [R]), ([Shard(3)], [R]), ([S1], [R]), ([R], [S0]), ([S1], [S1]), ([Shard(2)], [S0])):
            check(fn, x, w, b, mesh=get_line_mesh(), placements=[at_x, at_w, [R]])


@case
def means_of_losses_over_uneven_batches() -> None:
    x, y = make_values(5, 6) / 9, make_values(5, 6, seed=1) / 9
    classes, weight = torch.tensor([0, 5, 2, 2, 4]), make_values(6, seed=3).abs() + 1
    for where in (S0, RAGGED):
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
            check(loss, x, y, mesh=get_line_mesh(), placements=[[where], [where]])
        check(F.binary_cross_entropy, x.sigmoid(), y.sigmoid(), mesh=get_line_mesh(), placements=[[where], [where]])
        check(F.binary_cross_entropy_with_logits, x, y.sigmoid(), mesh=get_line_mesh(), placements=[[where], [where]])
        check(
            lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=2),
            x,
            classes,
            weight,
            mesh=get_line_mesh(),
            placements=[[where], [where], [R]],
        )


@case
def adafactor_takes_the_same_step_on_all_ranks() -> None:
    def train(make: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(make(make_values(5, 6).float())), nn.Parameter(make(make_values(7, seed=1).float()))]
        optimizer = torch.optim.Adafactor(parameters, lr=0.1)
        for seed in range(3):
            for p in parameters:
                p.grad = make(make_values(*p.shape, seed=seed + 2).float())
            optimizer.step()
        return [p.detach() for p in parameters]

    plain = train(lambda x: x.clone())
    for own, like in zip(train(lambda x: dt.distribute_tensor(x, get_line_mesh(), [S0])), plain, strict=True):
        assert_full_value(own, like)


@case
def attention_on_cpu() -> None:
    q, k, v = (make_values(2, 4, 5, 8, seed=seed) / 9 for seed in range(3))
    for where in ([S0, S1], [S1, S1], [Shard(2), S1]):
        check(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            q,
            k,
            v,
            mesh=get_square_mesh(),
            placements=[where] * 3,
        )


@case
def writes_through_a_slice_change_the_base() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        part = y[1:4]
        part.zero_()
        y[0].fill_(7)
        y[:, 2:].mul_(3)
        return y

    check_under_layouts(write, make_values(5, 6))


@case
def embeddings_sharded_over_the_vocabulary_used_twice() -> None:
    def use(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        looked = F.embedding(ids, table)
        return looked.tanh() + looked * 2 + F.embedding(ids + 1, table)

    for where in ([S0], [S1], [RAGGED]):
        table = make_values(5, 3) if where == [RAGGED] else make_values(9, 3)
        check(use, torch.tensor([[1, 3], [0, 2]]), table / 9, mesh=get_line_mesh(), placements=[[R], where])


@case
def views_of_uneven_and_nested_shards() -> None:
    check_under_layouts(lambda x: x.flatten(0, 1) * 2, make_values(5, 6, 3))
    check_under_layouts(lambda x: x.reshape(5, 2, 3, 3).sum(1), make_values(5, 6, 3))
    check_under_layouts(lambda x: x.view(-1).unflatten(0, (5, 6, 3)), make_values(5, 6, 3))
    check_under_layouts(lambda x: x.reshape(15, 6), make_values(5, 6, 3))


@case
def a_gradient_has_the_placements_of_its_parameter() -> None:
    for placements in ([S0, S0], [S0, S1], [R, S0], [R, R]):
        w = dt.distribute_tensor(make_values(5, 6) / 9, get_square_mesh(), placements).requires_grad_()
        x = dt.distribute_tensor(make_values(7, 6, seed=1), get_square_mesh(), [S0, R])
        (x @ w.t()).square().mean().backward()
        assert isinstance(w.grad, DTensor)
        assert w.grad.placements == w.placements


@case
def layer_norm_gradients_with_every_parameter_sharded_twice() -> None:
    def block(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(F.layer_norm(x, (6,), g, b) @ w)

    check(
        block,
        make_values(3, 5, 6) / 9,
        make_values(6, seed=1),
        make_values(6, seed=2),
        make_values(6, 6, seed=3) / 9,
        mesh=get_square_mesh(),
        placements=[[S0, R], [S0, S0], [S0, S0], [S0, S0]],
    )


@case
def clipping_many_parameters_takes_one_collective_for_each_kind() -> None:
    parameters = [nn.Parameter(dt.distribute_tensor(make_values(5, 6, seed=k), get_line_mesh(), [S0])) for k in range(12)]
    for k, p in enumerate(parameters):
        p.grad = dt.distribute_tensor(make_values(5, 6, seed=k + 1), get_line_mesh(), [S0])
    plain = torch.cat([make_values(5, 6, seed=k + 1).flatten() for k in range(12)]).norm()
    with CommDebugMode() as comm:
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        assert abs(norm.item() - plain.item()) < 1e-9
    assert comm.get_total_counts() <= 2
    assert_full_value(parameters[3].grad, make_values(5, 6, seed=4) / (plain + 1e-6))


# --- operators refused under Replicate ---------------------------------------------------------------------------------
def operator(name: str, fn: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
    CASES[f"operator_{name}"] = lambda: check_under_layouts(fn, *tensors, **options)


ROWS, IMAGE = make_values(5, 6) / 4, make_values(3, 2, 8, 6)
INDEX = torch.tensor([[0, 2, 1, 4, 3, 0]])
operator("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), IMAGE)
operator("scatter_reduce", lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), ROWS, INDEX, make_values(1, 6, seed=3))
operator("cdist", torch.cdist, ROWS, make_values(4, 6, seed=1) / 4, tolerance=(1e-5, 1e-6))
operator("searchsorted", lambda x, v: torch.searchsorted(x.sort(-1).values, v), ROWS, make_values(5, 3, seed=1), gradients=False)
operator("unfold", lambda x: F.unfold(x, (2, 3), padding=1, stride=2), IMAGE)
operator("tensor_unfold", lambda x: x.unfold(1, 3, 2), ROWS)
operator("embedding_bag", lambda i, w: F.embedding_bag(i, w, mode="mean"), torch.tensor([[0, 3], [2, 2], [4, 1]]), ROWS)
operator("masked_scatter", lambda x, m, s: x.masked_scatter(m, s), ROWS, ROWS > 0, make_values(30, seed=2))
operator("reflection_padding", lambda x: F.pad(x, (2, 1, 1, 2), "reflect"), IMAGE)
operator("replication_padding", lambda x: F.pad(x, (2, 1, 1, 2), "replicate"), IMAGE)
operator("circular_padding", lambda x: F.pad(x, (2, 1, 1, 2), "circular"), IMAGE)
operator("histogram", lambda x: torch.histogram(x, 4, range=(-2.0, 2.0)), ROWS, gradients=False)
operator("histc", lambda x: torch.histc(x, 5, -2, 2), ROWS, gradients=False)
operator("renorm", lambda x: torch.renorm(x, 2, 0, 1.5), ROWS)
operator("nonzero", torch.nonzero, make_values(5, 6).clamp(0), gradients=False)
operator("unique", lambda x: torch.unique(x, return_inverse=True, return_counts=True), make_values(5, 6), gradients=False)
operator("masked_select", lambda x: x.masked_select(x > 0), ROWS)
operator("boolean_index", lambda x: x[x > 0] * 2, ROWS)
operator("attention", lambda q: F.scaled_dot_product_attention(q, q, q), make_values(2, 3, 5, 4) / 9)


@case
def operator_jvp() -> None:
    for where in ([S0], [R], [S1]):
        x = dt.distribute_tensor(ROWS, get_line_mesh(), where)
        t = dt.distribute_tensor(make_values(5, 6, seed=1), get_line_mesh(), where)
        primal, tangent = torch.func.jvp(lambda x: (x.sin() * x).sum(0), (x,), (t,))
        wanted = torch.func.jvp(lambda x: (x.sin() * x).sum(0), (ROWS,), (make_values(5, 6, seed=1),))
        assert_full_value(primal, wanted[0])
        assert_full_value(tangent, wanted[1])


# --- what users ask for ------------------------------------------------------------------------------------------------
@case
def every_kind_of_partial_is_exact_for_integers_too() -> None:
    for op in REDUCE_OPS:
        for dtype in (torch.int64, torch.float64):
            if op == "avg" and dtype == torch.int64:
                continue
            x = make_values(5, 6).to(dtype)
            assert_full_value(scatter(x, get_square_mesh(), [Partial(op), Partial(op)]) * 2, x * 2)


@case
def shards_of_sizes_given_by_the_user() -> None:
    x = dt.distribute_tensor(make_values(5, 6), get_line_mesh(), [RAGGED])
    assert [tuple(piece.shape) for piece in local_tensors_by_rank(x).values()] == [
        ((1, 6), (0, 6), (3, 6), (1, 6))[rank] for rank in local_tensors_by_rank(x)
    ]
    assert (x * 2).placements == (RAGGED,)
    assert_full_value((x.t() @ x).relu(), (make_values(5, 6).t() @ make_values(5, 6)).relu())


@case
def explicit_raises_for_implicit_communication() -> None:
    x, y = (dt.distribute_tensor(make_values(5, 6), get_line_mesh(), [where]) for where in (S0, S1))
    with dt.explicit():
        assert_raises(ImplicitCommunicationError, "add", lambda: x + y)
        equal_after = x + y.redistribute(placements=[S0])
    assert_full_value(equal_after, make_values(5, 6) * 2)


@case
def explain_names_the_placements_of_each_collective() -> None:
    x, y = (dt.distribute_tensor(make_values(5, 6), get_line_mesh(), [where]) for where in (S0, S1))
    told = str(dt.explain(lambda x, y: x + y, x, y))
    assert "S(0)" in told
    assert "S(1)" in told
    assert "B" in str(x.explain_redistribute([S1]))


@case
def mixed_operands_raise_with_the_remedy() -> None:
    x = dt.distribute_tensor(make_values(5, 6), get_line_mesh(), [S0])
    assert_raises(MixedTensorError, "implicit_replication", lambda: x + make_values(5, 6))
    with dt.implicit_replication():
        assert_full_value(x + make_values(5, 6), make_values(5, 6) * 2)


@case
def shard_level_gives_the_inner_first_order() -> None:
    x = make_values(5, 6)
    inner_first = dt.distribute_tensor(x, get_square_mesh(), [Shard(0, level=1), Shard(0, level=0)])
    assert_full_value(inner_first, x)
    assert_full_value(inner_first @ inner_first.t(), x @ x.t())
    assert_full_value(inner_first.redistribute(placements=[S0, S0]), x)


@case
def tensors_move_between_meshes() -> None:
    x = dt.distribute_tensor(make_values(5, 6), get_line_mesh(), [S0])
    assert_full_value(x.redistribute(get_square_mesh(), [S1, S0]), make_values(5, 6))
    assert_full_value(x.redistribute(get_square_mesh(), [R, S1]).redistribute(get_line_mesh(), [RAGGED]), make_values(5, 6))


@case
def foreach_optimizer_steps_do_not_communicate() -> None:
    parameters = [nn.Parameter(dt.distribute_tensor(make_values(5, 6, seed=k), get_line_mesh(), [S0])) for k in range(4)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=True)
    for p in parameters:
        p.grad = dt.distribute_tensor(make_values(5, 6), get_line_mesh(), [S0])
    with CommDebugMode() as comm:
        optimizer.step()
    assert not comm.get_total_counts()
