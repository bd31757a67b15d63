"""Results whose size the data decide stay cut, and rows that cut positions name travel from who has them to who asks, or to who
owns them: the values, pieces and gradients are those of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_tables import floats, integers
from torch import Tensor

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.dispatch.dispatcher import clear_plans
from dtensor.propagation import cost_model
from dtensor.testing import check, strategies

R, S0, S1 = Replicate(), Shard(0), Shard(1)


# --- any masks and positions, cut anyhow ------------------------------------------------------------------------------
def picked(x: Tensor, mask: Tensor) -> Any:
    return x[mask] * 2


def places_of(x: Tensor, mask: Tensor) -> Any:
    return mask.nonzero(), torch.where(mask), torch.argwhere(x > 0), torch.where(x > 1)


def selected(x: Tensor, mask: Tensor) -> Any:
    return x.masked_select(x > 0), x.masked_select(mask[:, None])


def read_by_places(x: Tensor, mask: Tensor) -> Any:
    rows, columns = torch.where(x > 0)
    return x[rows], x.index_select(0, rows), x[rows, columns], x[:, columns], x[rows, 0]


def filled(x: Tensor, mask: Tensor) -> Any:
    x = x * 1
    x[mask] = 7.0
    return x


def replaced(x: Tensor, mask: Tensor) -> Any:
    x = x * 1
    x[mask] = x[mask] * 3
    return x


def added(x: Tensor, mask: Tensor) -> Any:
    x = x * 1
    x[mask] += x[mask] * 3
    return x


def added_by_rows(x: Tensor, mask: Tensor) -> Any:
    rows, columns = torch.where(x > 0)
    out = torch.zeros_like(x).index_add_(0, rows, x[rows], alpha=2)
    return out.index_put((rows, columns), x[rows, columns], accumulate=True)


def scattered(x: Tensor, mask: Tensor) -> Any:
    return (x * 1).masked_scatter(mask[:, None], x), (x * 1).masked_scatter(x > 0, x.flatten())


def of_one_loss(x: Tensor, mask: Tensor) -> Any:
    return torch.nn.functional.cross_entropy(x[mask], mask.long()[mask], reduction="sum")


OF_MASKS = [picked, places_of, selected, read_by_places, filled, replaced, added, added_by_rows, scattered, of_one_loss]


def asked(x: Tensor, i: Tensor, v: Tensor) -> Any:
    return x[i], x.index_select(0, i), x[:, i % x.shape[1]], x[i, i % x.shape[1]]


def asked_in_a_table(x: Tensor, i: Tensor, v: Tensor) -> Any:
    pairs = torch.stack([i, i.flip(0)], 1)
    return x[pairs], x[pairs, i[:, None] % x.shape[1]], x.index_put((pairs,), torch.stack([v, v * 2], 1), accumulate=True)


def last_wins(x: Tensor, i: Tensor, v: Tensor) -> Any:
    return x.index_put((i,), v), x.index_copy(0, i, v)


def all_add(x: Tensor, i: Tensor, v: Tensor) -> Any:
    return (
        x.index_put((i,), v, accumulate=True),
        x.index_add(0, i, v, alpha=3),
        x.index_put((i, i % x.shape[1]), v[:, 0], accumulate=True),
    )


def largest(x: Tensor, i: Tensor, v: Tensor) -> Any:
    return x.detach().index_reduce(0, i, v.detach(), "amax")


def by_elements(x: Tensor, i: Tensor, v: Tensor) -> Any:
    each = (i[:, None] + v.detach().sign().long()).clamp(0, x.shape[0] - 1)
    return x.gather(0, each), x.scatter_add(0, each, v), x.mT.scatter_add(1, each.mT, v.mT), x.mT.gather(1, each.mT)


def by_elements_reduced(x: Tensor, i: Tensor, v: Tensor) -> Any:
    each, x, v = i[:, None].repeat(1, x.shape[1]), x.detach(), v.detach()
    return [x.scatter_reduce(0, each, v, how, include_self=keep) for how in ("sum", "mean", "amax") for keep in (True, False)]


OF_PLACES = [asked, asked_in_a_table, last_wins, all_add, largest, by_elements, by_elements_reduced]


@pytest.fixture(params=["free to travel", pytest.param("as priced", marks=pytest.mark.slow)])
def prices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under both, since what travels does not pay for tensors of this size."""
    clear_plans()
    if request.param != "as priced":
        monkeypatch.setattr(cost_model, "kernel_seconds", lambda *_: -1e-4)
    yield
    clear_plans()


def meshes() -> st.SearchStrategy[Any]:
    return st.sampled_from([(2,), (3,), (2, 2)]).map(lambda shape: dt.init_device_mesh("cpu", shape))


MANY = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.filterwarnings("ignore:.*in beta.*:UserWarning")
@pytest.mark.parametrize("fn", OF_MASKS, ids=lambda fn: fn.__name__)
@given(st.data(), st.integers(0, 1000))
@MANY
def test_what_masks_pick(prices: None, fn: Callable[..., Any], data: st.DataObject, seed: int) -> None:
    mesh = data.draw(meshes())
    rows = data.draw(st.integers(0, 6))
    x = floats(rows, data.draw(st.integers(2, 3)), seed=seed)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=torch.bool)
    placements = [data.draw(strategies.placements(mesh, t.shape, partials=())) for t in (x, mask)]
    check(fn, x, mask, mesh=mesh, placements=placements)


@pytest.mark.filterwarnings("ignore:.*in beta.*:UserWarning")
@pytest.mark.parametrize("fn", OF_PLACES, ids=lambda fn: fn.__name__)
@given(st.data(), st.integers(0, 1000))
@MANY
def test_what_cut_positions_name(prices: None, fn: Callable[..., Any], data: st.DataObject, seed: int) -> None:
    mesh = data.draw(meshes())
    rows = data.draw(st.integers(1, 6))
    x, count = floats(rows, data.draw(st.integers(2, 3)), seed=seed), data.draw(st.integers(0, 7))
    i, v = integers(count, seed=seed, low=0, high=rows), floats(count, x.shape[1], seed=seed + 1)
    placements = [data.draw(strategies.placements(mesh, t.shape, partials=())) for t in (x, i, v)]
    check(fn, x, i, v, mesh=mesh, placements=placements)


TURNED, NESTED = [Shard(0, level=1), Shard(0, level=0)], [S0, S0]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (TURNED, NESTED),
        (NESTED, [S0, R]),
        *(
            pytest.param(*where, marks=pytest.mark.slow)
            for where in ((NESTED, TURNED), ([S0, R], NESTED), (NESTED, [R, S0]), ([S0, S1], NESTED))
        ),
        ([Shard(0, sizes=(0, 3, 0, 4))], [Shard(0, sizes=(4, 0, 4, 1))]),
    ],
    ids=str,
)
def test_rows_that_are_cut_otherwise_than_the_positions(prices: None, rows: list[Any], named: list[Any]) -> None:
    x, i, v = floats(7, 3), integers(9, low=0, high=7), floats(9, 3, seed=1)
    for fn in OF_PLACES:
        check(fn, x, i, v, mesh=dt.init_device_mesh("cpu", (2, 2) if rows[1:] else (4,)), placements=[rows, named, named])


# --- what stays cut ---------------------------------------------------------------------------------------------------
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
def test_places_are_cut_as_blocks_that_follow_each_other_are(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], where: list[Any], kept: list[Any]
) -> None:
    mesh = dt.init_device_mesh("cpu", mesh_shape)
    x = integers(*shape, low=0, high=2)
    x.view(-1)[-1] = x.view(-1)[0] = 1
    check(lambda x: x.nonzero(), x, mesh=mesh, placements=[where])
    found = dt.distribute_tensor(x, mesh, where).nonzero()
    assert [(type(p), getattr(p, "dim", None), getattr(p, "level", None)) for p in found.placements] == [
        (type(p), getattr(p, "dim", None), getattr(p, "level", None)) for p in kept
    ]


def test_a_block_has_as_many_places_as_it_has_elements_that_count() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    mask = dt.distribute_tensor(torch.tensor([1, 1, 0, 0, 1, 0, 0], dtype=torch.bool), mesh, [Shard(0)])
    assert mask.nonzero().placements == (Shard(0, sizes=(2, 1, 0)),)
    assert mask.logical_and(mask.logical_not()).nonzero().shape == (0, 1)


# --- what travels -----------------------------------------------------------------------------------------------------
MESH = dt.init_device_mesh("cpu", (4,))


def moved(fn: Callable[[], Any]) -> tuple[Any, int, int]:
    """What a program gives, the bytes that a rank receives meanwhile but for gradients of parameters, and its FLOPs."""
    told = dt.explain(fn)
    moves = [m for m in told.movements if "AccumulateGrad" not in str(m.operator)]
    return told.result, sum(m.bytes for m in moves), sum(o.flops for o in told.operations)


def by_places(x: Tensor, chosen: Tensor, w: Tensor, experts: Any) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        rows, slot = torch.where(chosen == e)
        out.index_add_(0, rows, expert(x[rows]) * w[rows, slot, None])
    return out


def by_masks(x: Tensor, chosen: Tensor, w: Tensor, experts: Any) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        hit = chosen == e
        tokens = hit.any(-1)
        out[tokens] += expert(x[tokens]) * (w * hit).sum(-1)[tokens, None]
    return out


def by_copies(x: Tensor, chosen: Tensor, w: Tensor, experts: Any) -> Tensor:
    flat, copies = chosen.view(-1), x.repeat_interleave(chosen.shape[1], dim=0)
    y = torch.empty_like(copies)
    for e, expert in enumerate(experts):
        y[flat == e] = expert(copies[flat == e])
    return (y.view(*w.shape, -1) * w.unsqueeze(-1)).sum(1)


def by_slots(x: Tensor, chosen: Tensor, w: Tensor, experts: Any) -> Tensor:
    out, masks = torch.zeros_like(x), torch.nn.functional.one_hot(chosen, len(experts)).permute(2, 1, 0)
    for e, expert in enumerate(experts):
        slot, rows = torch.where(masks[e])
        out.index_add_(0, rows, expert(x[rows]) * w[rows, slot, None])
    return out


@pytest.mark.parametrize(
    ("layer", "bytes_per_token", "flops"),
    [
        (by_places, 100, 1.15),
        (by_masks, 250, 1.15),
        pytest.param(by_copies, 150, 1.15, marks=pytest.mark.slow),
        pytest.param(by_slots, 16 * 128 * 8, 1.02),  # a list by slots is no blocks: rows travel there and back
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_rank_computes_the_experts_of_its_own_tokens(layer: Any, bytes_per_token: int, flops: float) -> None:
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
    found, nbytes, computed = moved(lambda: step(cut, gate, experts))
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(cut.grad.full_tensor(), alone.grad)
    for p, gradient in zip((*gate.parameters(), *experts.parameters()), gradients, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), gradient)
    by_hand = 6 * width * (picks * width + count) * tokens // 4
    assert nbytes < bytes_per_token * tokens, nbytes / tokens
    assert computed < flops * by_hand, computed / by_hand


def test_a_loss_over_the_rows_that_a_mask_picks_moves_no_rows() -> None:
    width, rows = 512, 64
    logits, labels, mask = floats(rows, width), integers(rows, low=0, high=width), integers(rows, low=0, high=2).bool()
    given = [dt.distribute_tensor(x, MESH, [S0]) for x in (logits, labels, mask)]
    given[0].requires_grad_()

    def step() -> Tensor:
        loss = torch.nn.functional.cross_entropy(given[0][given[2]], given[1][given[2]])
        loss.backward()
        return loss

    loss, nbytes, _ = moved(step)
    torch.testing.assert_close(loss.full_tensor(), torch.nn.functional.cross_entropy(logits[mask], labels[mask]))
    assert nbytes < rows * 8 * 4, nbytes


def test_rows_that_change_places_travel_alone() -> None:
    x, places = floats(16, 8192), torch.tensor([3, 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 15, 14, 13, 0])
    given = [dt.distribute_tensor(t, MESH, [S0]) for t in (x, places)]
    found, nbytes, _ = moved(lambda: given[0][given[1]])
    assert torch.equal(found.full_tensor(), x[places])
    assert found.placements == (S0,)
    assert nbytes == 12 * 8 + 8192 * 8, nbytes  # of all positions those of the others, and one row to the last rank


@pytest.mark.parametrize("fn", [asked, all_add], ids=lambda fn: fn.__name__)
def test_a_position_that_is_out_of_range_is_an_error_on_every_rank(prices: None, fn: Callable[..., Any]) -> None:
    x, i, v = floats(5, 3), torch.tensor([0, 1, 4, 5]), floats(4, 3)
    outcome = check(fn, x, i, v, mesh=dt.init_device_mesh("cpu", (2,)), placements=[[S0], [S0], [S0]])
    assert outcome.same_error


def test_places_that_were_written_to_name_anything() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))

    def turned(x: Tensor) -> Any:
        rows = torch.where(x[:, 0] > 0)[0]
        before = x[rows]
        rows.mul_(-1).add_(x.shape[0] - 1)
        return before, x[rows], torch.zeros_like(x).index_add_(0, rows, before)

    check(turned, floats(7, 3, low=-1.0), mesh=mesh, placements=[[S0]])


def test_places_of_one_cut_name_rows_of_another() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))

    def both(x: Tensor, y: Tensor) -> Any:
        rows = torch.where(x[:, 0] > 0)[0]
        return y[rows], y[rows[1:]], torch.zeros_like(y).index_add_(0, rows, x[rows]), y[rows.flip(0)], y[rows.view(-1, 1)]

    for where in ([Shard(0, sizes=(1, 6))], [R], [S1], [S0]):
        check(both, floats(7, 3), floats(7, 3, seed=1), mesh=mesh, placements=[[S0], where])


def test_positions_of_two_dims_that_are_both_cut(prices: None) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    x, i, v = floats(7, 3), integers(4, 5, low=0, high=7), floats(4, 5, 3, seed=1)
    for rows in ([S0, R], [R, S0], [S0, S1], [S0, S0]):
        for where in ([S0, S1], [S1, S0], [S0, R], [S0, S0]):
            check(lambda x, i, v: x[i], x, i, v, mesh=mesh, placements=[rows, where, where])
            check(lambda x, i, v: x.index_put((i,), v, True), x, i, v, mesh=mesh, placements=[rows, where, where])
            each, w = integers(4, 3, low=0, high=7), floats(4, 3, seed=1)
            check(lambda x, i, v: x.gather(0, i), x, each, w, mesh=mesh, placements=[rows, where, where])
            check(lambda x, i, v: x.scatter_add(0, i, v), x, each, w, mesh=mesh, placements=[rows, where, where])
