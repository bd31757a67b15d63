"""Operators with data-dependent shapes: masks and ``nonzero`` give sharded results, and indexing with sharded indices exchanges
only the rows that are asked for. Values, local tensors and gradients equal those of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_tables import make_floats, make_integers
from torch import Tensor

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.dispatch.dispatcher import clear_plans
from dtensor.propagation import strategy_cost
from dtensor.testing import check, strategies

R, S0, S1 = Replicate(), Shard(0), Shard(1)


# --- any masks and indices, under any sharding ------------------------------------------------------------------------------
def select_by_mask(x: Tensor, mask: Tensor) -> Any:
    return x[mask] * 2


def find_nonzero_indices(x: Tensor, mask: Tensor) -> Any:
    return mask.nonzero(), torch.where(mask), torch.argwhere(x > 0), torch.where(x > 1)


def masked_select_twice(x: Tensor, mask: Tensor) -> Any:
    return x.masked_select(x > 0), x.masked_select(mask[:, None])


def index_by_where(x: Tensor, mask: Tensor) -> Any:
    rows, columns = torch.where(x > 0)
    return x[rows], x.index_select(0, rows), x[rows, columns], x[:, columns], x[rows, 0]


def fill_by_mask(x: Tensor, mask: Tensor) -> Any:
    x = x * 1
    x[mask] = 7.0
    return x


def replace_by_mask(x: Tensor, mask: Tensor) -> Any:
    x = x * 1
    x[mask] = x[mask] * 3
    return x


def add_by_mask(x: Tensor, mask: Tensor) -> Any:
    x = x * 1
    x[mask] += x[mask] * 3
    return x


def index_add_by_where(x: Tensor, mask: Tensor) -> Any:
    rows, columns = torch.where(x > 0)
    out = torch.zeros_like(x).index_add_(0, rows, x[rows], alpha=2)
    return out.index_put((rows, columns), x[rows, columns], accumulate=True)


def masked_scatter_twice(x: Tensor, mask: Tensor) -> Any:
    return (x * 1).masked_scatter(mask[:, None], x), (x * 1).masked_scatter(x > 0, x.flatten())


def cross_entropy_of_masked_rows(x: Tensor, mask: Tensor) -> Any:
    return torch.nn.functional.cross_entropy(x[mask], mask.long()[mask], reduction="sum")


MASK_PROGRAMS = [
    select_by_mask,
    find_nonzero_indices,
    masked_select_twice,
    index_by_where,
    fill_by_mask,
    replace_by_mask,
    add_by_mask,
    index_add_by_where,
    masked_scatter_twice,
    cross_entropy_of_masked_rows,
]


def index_rows(x: Tensor, i: Tensor, v: Tensor) -> Any:
    return x[i], x.index_select(0, i), x[:, i % x.shape[1]], x[i, i % x.shape[1]]


def index_by_matrix(x: Tensor, i: Tensor, v: Tensor) -> Any:
    pairs = torch.stack([i, i.flip(0)], 1)
    return x[pairs], x[pairs, i[:, None] % x.shape[1]], x.index_put((pairs,), torch.stack([v, v * 2], 1), accumulate=True)


def overwrite_rows(x: Tensor, i: Tensor, v: Tensor) -> Any:
    return x.index_put((i,), v), x.index_copy(0, i, v)


def accumulate_rows(x: Tensor, i: Tensor, v: Tensor) -> Any:
    return (
        x.index_put((i,), v, accumulate=True),
        x.index_add(0, i, v, alpha=3),
        x.index_put((i, i % x.shape[1]), v[:, 0], accumulate=True),
    )


def reduce_rows_by_max(x: Tensor, i: Tensor, v: Tensor) -> Any:
    return x.detach().index_reduce(0, i, v.detach(), "amax")


def gather_and_scatter_add(x: Tensor, i: Tensor, v: Tensor) -> Any:
    each = (i[:, None] + v.detach().sign().long()).clamp(0, x.shape[0] - 1)
    return x.gather(0, each), x.scatter_add(0, each, v), x.mT.scatter_add(1, each.mT, v.mT), x.mT.gather(1, each.mT)


def scatter_reduce_by_all_reductions(x: Tensor, i: Tensor, v: Tensor) -> Any:
    each, x, v = i[:, None].repeat(1, x.shape[1]), x.detach(), v.detach()
    return [x.scatter_reduce(0, each, v, how, include_self=keep) for how in ("sum", "mean", "amax") for keep in (True, False)]


INDEX_PROGRAMS = [
    index_rows,
    index_by_matrix,
    overwrite_rows,
    accumulate_rows,
    reduce_rows_by_max,
    gather_and_scatter_add,
    scatter_reduce_by_all_reductions,
]


@pytest.fixture(params=["free kernels", pytest.param("priced kernels", marks=pytest.mark.slow)])
def prices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clear the plans, and make kernels free in one case: for tensors this small the cost model would not choose an exchange of
    rows."""
    clear_plans()
    if request.param != "priced kernels":
        monkeypatch.setattr(strategy_cost, "kernel_seconds", lambda *_: -1e-4)
    yield
    clear_plans()


def meshes() -> st.SearchStrategy[Any]:
    return st.sampled_from([(2,), (3,), (2, 2)]).map(lambda shape: dt.init_device_mesh("cpu", shape))


MANY = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.filterwarnings("ignore:.*in beta.*:UserWarning")
@pytest.mark.parametrize("fn", MASK_PROGRAMS, ids=lambda fn: fn.__name__)
@given(st.data(), st.integers(0, 1000))
@MANY
def test_masks_and_nonzero_of_sharded_tensors_equal_plain_torch(
    prices: None, fn: Callable[..., Any], data: st.DataObject, seed: int
) -> None:
    mesh = data.draw(meshes())
    rows = data.draw(st.integers(0, 6))
    x = make_floats(rows, data.draw(st.integers(2, 3)), seed=seed)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool)
    placements = [data.draw(strategies.placements(mesh, t.shape, partials=())) for t in (x, mask)]
    check(fn, x, mask, mesh=mesh, placements=placements)


@pytest.mark.filterwarnings("ignore:.*in beta.*:UserWarning")
@pytest.mark.parametrize("fn", INDEX_PROGRAMS, ids=lambda fn: fn.__name__)
@given(st.data(), st.integers(0, 1000))
@MANY
def test_indexing_with_sharded_indices_equals_plain_torch(
    prices: None, fn: Callable[..., Any], data: st.DataObject, seed: int
) -> None:
    mesh = data.draw(meshes())
    rows = data.draw(st.integers(1, 6))
    x, count = make_floats(rows, data.draw(st.integers(2, 3)), seed=seed), data.draw(st.integers(0, 7))
    i, v = make_integers(count, seed=seed, low=0, high=rows), make_floats(count, x.shape[1], seed=seed + 1)
    placements = [data.draw(strategies.placements(mesh, t.shape, partials=())) for t in (x, i, v)]
    check(fn, x, i, v, mesh=mesh, placements=placements)


SWAPPED_NESTED, NESTED = [Shard(0, level=1), Shard(0, level=0)], [S0, S0]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (SWAPPED_NESTED, NESTED),
        (NESTED, [S0, R]),
        *(
            pytest.param(*where, marks=pytest.mark.slow)
            for where in ((NESTED, SWAPPED_NESTED), ([S0, R], NESTED), (NESTED, [R, S0]), ([S0, S1], NESTED))
        ),
        ([Shard(0, sizes=(0, 3, 0, 4))], [Shard(0, sizes=(4, 0, 4, 1))]),
    ],
    ids=str,
)
def test_indexing_with_differently_sharded_indices_equals_plain_torch(prices: None, rows: list[Any], named: list[Any]) -> None:
    x, i, v = make_floats(7, 3), make_integers(9, low=0, high=7), make_floats(9, 3, seed=1)
    for fn in INDEX_PROGRAMS:
        check(fn, x, i, v, mesh=dt.init_device_mesh("cpu", (2, 2) if rows[1:] else (4,)), placements=[rows, named, named])


# --- placements of the results ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "mesh_shape", "where", "kept"),
    [
        ((5,), (2,), [S0], [S0]),
        ((5, 3), (2,), [S0], [S0]),
        ((5, 3), (2,), [S1], [R]),
        ((1, 5), (2,), [S1], [S0]),
        ((2, 5), (2, 2), [S0, S1], [S0, S0]),
        ((5, 4), (2, 2), [S0, S1], [S0, R]),
        ((5, 4), (2, 2), [S1, S0], [R, S0]),
        ((7, 2), (2, 2), [S0, S0], [S0, S0]),
        ((7, 2), (2, 2), [Shard(0, level=1), Shard(0, level=0)], [Shard(0, level=1), Shard(0, level=0)]),
        ((5, 3), (2, 2), [R, S0], [R, S0]),
    ],
    ids=str,
)
def test_nonzero_of_sharded_tensor_keeps_the_sharding_that_preserves_row_order(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], where: list[Any], kept: list[Any]
) -> None:
    mesh = dt.init_device_mesh("cpu", mesh_shape)
    x = make_integers(*shape, low=0, high=2)
    x.view(-1)[-1] = x.view(-1)[0] = 1
    check(lambda x: x.nonzero(), x, mesh=mesh, placements=[where])
    found = dt.distribute_tensor(x, mesh, where).nonzero()
    assert [(type(p), getattr(p, "dim", None), getattr(p, "level", None)) for p in found.placements] == [
        (type(p), getattr(p, "dim", None), getattr(p, "level", None)) for p in kept
    ]


def test_nonzero_shard_sizes_are_the_counts_of_true_elements_per_rank() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    mask = dt.distribute_tensor(torch.tensor([1, 1, 0, 0, 1, 0, 0], dtype=torch.bool), mesh, [Shard(0)])
    assert mask.nonzero().placements == (Shard(0, sizes=(2, 1, 0)),)
    assert mask.logical_and(mask.logical_not()).nonzero().shape == (0, 1)


# --- bytes received ---------------------------------------------------------------------------------------------------
MESH = dt.init_device_mesh("cpu", (4,))


def run_and_count_bytes(fn: Callable[[], Any]) -> tuple[Any, int, int]:
    """Return the result of ``fn``, the bytes that a rank receives in it (without gradients of parameters), and its FLOPs."""
    told = dt.explain(fn)
    moves = [m for m in told.movements if "AccumulateGrad" not in str(m.operator)]
    return told.result, sum(m.bytes for m in moves), sum(o.flops for o in told.operations)


def experts_by_where(x: Tensor, chosen: Tensor, w: Tensor, experts: Any) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, expert(x[rows]) * w[rows, slot, None])
    return out


def experts_by_masks(x: Tensor, chosen: Tensor, w: Tensor, experts: Any) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        hit = chosen == e
        tokens = hit.any(-1)
        out[tokens] += expert(x[tokens]) * (w * hit).sum(-1)[tokens, None]
    return out


def experts_by_repeated_tokens(x: Tensor, chosen: Tensor, w: Tensor, experts: Any) -> Tensor:
    flat, copies = chosen.view(-1), x.repeat_interleave(chosen.shape[1], dim=0)
    y = torch.empty_like(copies)
    for e, expert in enumerate(experts):
        y[flat == e] = expert(copies[flat == e])
    return (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(1)


def experts_by_slots(x: Tensor, chosen: Tensor, w: Tensor, experts: Any) -> Tensor:
    out, masks = torch.zeros_like(x), torch.nn.functional.one_hot(chosen, len(experts)).permute(2, 1, 0)
    for e, expert in enumerate(experts):
        slot, rows = torch.where(masks[e])
        out.index_add_(0, rows, expert(x[rows]) * w[rows, slot, None])
    return out


@pytest.mark.parametrize(
    ("layer", "bytes_per_token", "flops"),
    [
        (experts_by_where, 100, 1.15),
        (experts_by_masks, 250, 1.15),
        pytest.param(experts_by_repeated_tokens, 150, 1.15, marks=pytest.mark.slow),
        # indices ordered by slot are not in blocks of rows: rows are sent there and back
        pytest.param(experts_by_slots, 16 * 128 * 8, 1.02),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mixture_of_experts_equals_plain_torch_within_byte_and_flop_limits(
    layer: Any, bytes_per_token: int, flops: float
) -> None:
    torch.manual_seed(0)
    width, tokens, picks, count = 128, 256, 2, 4
    experts = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(count)).double()
    gate = torch.nn.Linear(width, count, bias=False).double()
    x = torch.randn(tokens, width, dtype=torch.float64)

    def step(x: Tensor, gate: Any, experts: Any) -> Tensor:
        w, chosen = gate(x).softmax(-1).topk(picks, -1)
        out = layer(x, chosen, w, experts)
        out.square().sum().backward()
        return out

    alone = x.clone().requires_grad_()
    expected = step(alone, gate, experts)
    gradients = [p.grad.clone() for p in (*gate.parameters(), *experts.parameters())]
    gate.zero_grad()
    experts.zero_grad()
    cut = dt.distribute_tensor(x, MESH, [S0]).requires_grad_()
    dt.distribute_module(gate, MESH)
    dt.distribute_module(experts, MESH)
    found, nbytes, computed = run_and_count_bytes(lambda: step(cut, gate, experts))
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(cut.grad.full_tensor(), alone.grad)
    for p, gradient in zip((*gate.parameters(), *experts.parameters()), gradients, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), gradient)
    by_hand = 6 * width * (picks * width + count) * tokens // 4
    assert nbytes < bytes_per_token * tokens, nbytes / tokens
    assert computed < flops * by_hand, computed / by_hand


def test_cross_entropy_of_masked_rows_sends_no_rows() -> None:
    width, rows = 512, 64
    logits, labels, mask = (
        make_floats(rows, width),
        make_integers(rows, low=0, high=width),
        make_integers(rows, low=0, high=2).bool(),
    )
    given = [dt.distribute_tensor(x, MESH, [S0]) for x in (logits, labels, mask)]
    given[0].requires_grad_()

    def step() -> Tensor:
        loss = torch.nn.functional.cross_entropy(given[0][given[2]], given[1][given[2]])
        loss.backward()
        return loss

    loss, nbytes, _ = run_and_count_bytes(step)
    torch.testing.assert_close(loss.full_tensor(), torch.nn.functional.cross_entropy(logits[mask], labels[mask]))
    assert nbytes < rows * 8 * 4, nbytes


def test_indexing_with_sharded_permutation_sends_only_rows_that_change_rank() -> None:
    x, places = make_floats(16, 8192), torch.tensor([3, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 15, 14, 13, 0])
    given = [dt.distribute_tensor(t, MESH, [S0]) for t in (x, places)]
    found, nbytes, _ = run_and_count_bytes(lambda: given[0][given[1]])
    assert torch.equal(found.full_tensor(), x[places])
    assert found.placements == (S0,)
    assert nbytes == 12 * 8 + 8192 * 8, nbytes  # the indices of the other ranks, and one row for the last rank


@pytest.mark.parametrize("fn", [index_rows, accumulate_rows], ids=lambda fn: fn.__name__)
def test_sharded_index_out_of_range_raises_on_all_ranks(prices: None, fn: Callable[..., Any]) -> None:
    x, i, v = make_floats(5, 3), torch.tensor([0, 1, 4, 5]), make_floats(4, 3)
    outcome = check(fn, x, i, v, mesh=dt.init_device_mesh("cpu", (2,)), placements=[[S0], [S0], [S0]])
    assert outcome.same_error


def test_indexing_after_in_place_write_to_where_indices_equals_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))

    def turned(x: Tensor) -> Any:
        rows = torch.where(x[:, 0] > 0)[0]
        before = x[rows]
        rows.mul_(-1).add_(x.shape[0] - 1)
        return before, x[rows], torch.zeros_like(x).index_add_(0, rows, before)

    check(turned, make_floats(7, 3, low=-1.0), mesh=mesh, placements=[[S0]])


def test_where_indices_of_one_tensor_index_another_as_in_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))

    def both(x: Tensor, y: Tensor) -> Any:
        rows = torch.where(x[:, 0] > 0)[0]
        return y[rows], y[rows[1:]], torch.zeros_like(y).index_add_(0, rows, x[rows]), y[rows.flip(0)], y[rows.view(-1, 1)]

    for where in ([Shard(0, sizes=(1, 6))], [R], [S1], [S0]):
        check(both, make_floats(7, 3), make_floats(7, 3, seed=1), mesh=mesh, placements=[[S0], where])


def test_indexing_with_2d_indices_sharded_on_a_2d_mesh_equals_plain_torch(prices: None) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    x, i, v = make_floats(7, 3), make_integers(4, 5, low=0, high=7), make_floats(4, 5, 3, seed=1)
    for rows in ([S0, R], [R, S0], [S0, S1], [S0, S0]):
        for where in ([S0, S1], [S1, S0], [S0, R], [S0, S0]):
            check(lambda x, i, v: x[i], x, i, v, mesh=mesh, placements=[rows, where, where])
            check(lambda x, i, v: x.index_put((i,), v, True), x, i, v, mesh=mesh, placements=[rows, where, where])
            each, w = make_integers(4, 3, low=0, high=7), make_floats(4, 3, seed=1)
            check(lambda x, i, v: x.gather(0, i), x, each, w, mesh=mesh, placements=[rows, where, where])
            check(lambda x, i, v: x.scatter_add(0, i, v), x, each, w, mesh=mesh, placements=[rows, where, where])
