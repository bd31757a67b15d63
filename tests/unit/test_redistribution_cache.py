"""Redistribution cache: operators redistribute an operand once per layout, and no write makes a cached copy stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.dispatch.programs.redistribution_cache import _RecentByMesh
from dtensor.errors import ArgumentError

X = torch.arange(24, dtype=torch.float64).reshape(6, 4) / 20 - 0.5


def mesh() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (3,))


def make_partial() -> dt.DTensor:
    """Return ``X @ X.t()`` as a partial sum."""
    left, right = (dt.distribute_tensor(x, mesh(), [p]) for x, p in ((X, Shard(1)), (X.t().contiguous(), Shard(0))))
    return left @ right


def count_collectives(run: Callable[[], Any]) -> int:
    with CommDebugMode() as observed:
        run()
    return observed.get_total_counts()


def test_a_partial_operand_is_reduced_once_for_several_operators() -> None:
    y = make_partial()
    assert y.placements == (Partial(),)
    assert count_collectives(lambda: (y.exp(), y.sin(), y.abs(), y.t().cos())) == 1
    assert y.placements == (Partial(),)
    torch.testing.assert_close(y.exp().full_tensor(), (X @ X.t()).exp())


def test_a_reduce_scattered_copy_is_reused_without_an_all_gather() -> None:
    y, z = make_partial(), dt.distribute_tensor(torch.ones(6, 6, dtype=X.dtype), mesh(), [Shard(1)])
    assert count_collectives(lambda: y * z) == 1
    assert count_collectives(lambda: y * y) == 0
    assert (y * y).placements == (Shard(1),)
    assert (y.t() * y.t()).placements == (Shard(0),)
    torch.testing.assert_close((y * y).full_tensor(), (X @ X.t()) ** 2)


def test_a_partial_operand_needed_replicated_and_sharded_is_redistributed_once() -> None:
    y, z = make_partial(), dt.distribute_tensor(torch.ones(6, 6, dtype=X.dtype), mesh(), [Shard(1)])
    assert count_collectives(lambda: (y.exp(), y * z)) == 1
    torch.testing.assert_close((y * z).full_tensor(), X @ X.t())


def test_backward_reuses_the_cached_copies_of_forward() -> None:
    w = dt.distribute_tensor(X, mesh(), [Shard(1)]).requires_grad_()
    y = w @ dt.distribute_tensor(X.t().contiguous(), mesh(), [Shard(0)])
    loss = y.square().sum()
    plain = X.clone().requires_grad_()
    (plain @ X.t()).square().sum().backward()
    assert count_collectives(loss.backward) == 0
    torch.testing.assert_close(w.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1),
        lambda y: y.t().add_(1),
        lambda y: y[1:3].add_(1),
        lambda y: y.detach().add_(1),
        lambda y: y.data.add_(1),
        lambda y: y.view(36).mul_(2),
        lambda y: y.to_local().mul_(2),
        lambda y: y.zero_(),
        lambda y: y.copy_(y.exp()),
        lambda y: torch.add(y, 1, out=y),
        lambda y: torch._foreach_add_([y], 1),
        lambda y: y.requires_grad_().detach().view(6, 6).neg_(),
        lambda y: y.unsqueeze_(0).squeeze_(0),
        lambda y: y.set_(dt.distribute_tensor(X @ X.t() + 3, mesh(), [Replicate()])),
    ],
)
@pytest.mark.parametrize(
    "before", [lambda y: y.exp(), lambda y: y.t().exp(), lambda y: y.detach().exp(), lambda y: y.view(4, 9).exp()]
)
def test_writes_through_any_alias_invalidate_cached_copies(write: Callable[[Any], Any], before: Callable[[Any], Any]) -> None:
    y, plain = make_partial(), X @ X.t()
    views = [y.t(), y.detach(), y[2:], y.view(36)]
    for view in (y, *views):
        view.sin()
    before(y)
    if "to_local" in write.__code__.co_names:
        plain.mul_(2)
    elif "set_" in write.__code__.co_names:
        plain = X @ X.t() + 3
        views = []
    else:
        write(plain)
    write(y)
    plain_views = [plain.t(), plain.detach(), plain[2:], plain.view(36)]
    for result, other in zip((y, *views), (plain, *plain_views), strict=False):
        torch.testing.assert_close(result.exp().detach().full_tensor(), other.exp().detach())


def test_a_write_to_an_operator_result_does_not_change_the_cached_copy() -> None:
    y = make_partial()
    flat = torch.ops.aten._unsafe_view(y.exp(), [36])
    y.exp()
    flat.zero_()
    torch.testing.assert_close(y.exp().full_tensor(), (X @ X.t()).exp())


def test_dtensors_with_exposed_local_tensors_are_redistributed_at_each_use() -> None:
    y = dt.DTensor.from_local(dt.per_rank([X, X, X]), mesh(), [Partial()])
    assert count_collectives(lambda: (y.exp(), y.exp())) == 2
    z = make_partial()
    z.to_local()
    assert count_collectives(lambda: (z.exp(), z.t().exp())) == 2


def test_an_all_gathered_parameter_is_not_cached_by_default() -> None:
    w = torch.nn.Parameter(dt.distribute_tensor(X, mesh(), [Shard(0)]))
    x = dt.distribute_tensor(X, mesh(), [Shard(0)])
    assert count_collectives(lambda: (x @ w.t(), x @ w.t())) == 2


def test_a_sharded_activation_is_gathered_once_for_several_matmuls() -> None:
    w = [dt.distribute_tensor(torch.randn(4, 300, dtype=X.dtype), mesh(), [Shard(1)]).requires_grad_() for _ in range(3)]
    x = dt.distribute_tensor(X, mesh(), [Shard(0)]).requires_grad_() * 1
    assert count_collectives(lambda: [x @ each for each in w]) == 1


def test_only_the_most_recent_leaf_tensors_keep_cached_copies() -> None:
    xs = [dt.distribute_tensor(X, mesh(), [Shard(0)]) for _ in range(9)]
    w = dt.distribute_tensor(torch.randn(4, 300, dtype=X.dtype), mesh(), [Shard(1)])
    for x in xs:
        x @ w
    assert count_collectives(lambda: xs[-1] @ w) == 0
    assert count_collectives(lambda: xs[0] @ w) == 1
    cached = [x for x in xs if any(forms for forms in x.__dict__["_cached_copies"].copies.values())]
    assert len(cached) == 4


def with_budget(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Set the budget of cached copies for a new mesh; return a function that returns the bytes that are cached."""
    monkeypatch.setenv("DTENSOR_CACHED_COPIES_BYTES", str(nbytes))
    monkeypatch.setattr("dtensor.dispatch.programs.redistribution_cache._RECENT", _RecentByMesh())
    before = dt.cache_info()["dispatch.cached_copies_bytes"]
    assert before.limit == nbytes
    return lambda: dt.cache_info()["dispatch.cached_copies_bytes"].kept - before.kept


def test_the_least_recently_used_copies_are_dropped_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 6 * 6 * 8  # bytes of a reduced copy
    cached = with_budget(2 * size, monkeypatch)
    a, b, c = make_partial(), make_partial(), make_partial()
    a.exp(), b.exp()
    assert cached() == 2 * size
    assert count_collectives(lambda: a.exp()) == 0  # b is the least recently used one now
    assert count_collectives(lambda: c.exp()) == 1
    assert cached() == 2 * size
    assert count_collectives(lambda: (a.exp(), c.exp())) == 0
    assert count_collectives(lambda: b.exp()) == 1
    torch.testing.assert_close(b.exp().full_tensor(), (X @ X.t()).exp())


def test_a_freed_copy_counts_against_the_budget_until_it_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank may keep a tensor longer than another one. Eviction must not depend on this."""
    size = 6 * 6 * 8
    cached = with_budget(2 * size, monkeypatch)
    a, b = make_partial(), make_partial()
    a.exp(), b.exp()
    del b
    assert cached() == size
    make_partial().exp()
    assert count_collectives(lambda: a.exp()) == 1


def test_no_copy_is_cached_with_a_budget_of_zero_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = with_budget(0, monkeypatch)
    y = make_partial()
    assert count_collectives(lambda: (y.exp(), y.exp())) == 2
    assert cached() == 0


def test_a_copy_budget_that_is_not_an_integer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTENSOR_CACHED_COPIES_BYTES", "8GB")
    with pytest.raises(ArgumentError, match="'8GB' is no whole number of bytes"):
        dt.cache_info()


def test_a_capture_replays_correctly_on_inputs_with_cached_copies() -> None:
    y = make_partial()
    y.exp()
    f = dt.capture(lambda v: v.exp() + v.sin())
    with torch.no_grad():
        for scale in (1, 2, 3):
            v = make_partial().mul_(scale)
            v.exp()
            torch.testing.assert_close(f(v).full_tensor(), (X @ X.t() * scale).exp() + (X @ X.t() * scale).sin())
    assert f.cache_info().replayed >= 1


def test_cached_copies_of_data_follow_writes_to_its_tensor() -> None:
    y, plain = make_partial(), X @ X.t()
    same, other = y.data, plain.data
    row, other_row = same.chunk(2, 0)[-1], other.chunk(2, 0)[-1]
    for write in (lambda x: x.t().add_(1), lambda x: x.view(36).mul_(2), lambda x: x[1:].sub_(1)):
        assert same.sin() is not row.sin()
        write(y)
        write(plain)
        torch.testing.assert_close(same.sin().full_tensor(), other.sin())
        torch.testing.assert_close(row.sin().full_tensor(), other_row.sin())


def test_assigned_data_replaces_the_cached_copies_of_a_view() -> None:
    y, z = make_partial(), make_partial() + 1
    y.sin()
    view = y.view(36)
    view.sin()
    view.data = z
    torch.testing.assert_close(view.sin().full_tensor(), (X @ X.t() + 1).sin())
    z.zero_()
    torch.testing.assert_close(view.sin().full_tensor(), torch.zeros(6, 6, dtype=X.dtype))


def count_all_gathers(run: Callable[[], Any]) -> int:
    with CommDebugMode() as observed:
        run()
    return sum(event.kind == "all_gather" for event in observed.events)


def make_sharded_step() -> tuple[Any, Callable[[], Any]]:
    w = torch.nn.Parameter(dt.distribute_tensor(torch.randn(30, 30, dtype=X.dtype), mesh(), [Shard(0)]))
    x = dt.distribute_tensor(torch.randn(1000, 30, dtype=X.dtype), mesh(), [Shard(0)]).requires_grad_()
    return w, lambda: (x @ w).square().sum()


def test_remember_parameters_caches_a_gathered_parameter_until_its_gradient_arrives() -> None:
    w, run = make_sharded_step()
    run().backward()
    expected, w.grad = w.grad, None
    assert count_all_gathers(lambda: run().backward()) == 2
    w.grad = None
    with dt.remember("parameters"):
        loss = run()
        assert count_all_gathers(run) == 0
    assert any(w.__dict__["_cached_copies"].copies.values())
    assert count_all_gathers(loss.backward) == 0
    assert not any(w.__dict__["_cached_copies"].copies.values())
    assert torch.equal(w.grad.full_tensor(), expected.full_tensor())
    with dt.remember("parameters"):
        assert count_all_gathers(run) == 1
        with torch.no_grad():
            w.mul_(2)
        before = run()
    assert torch.allclose(before.full_tensor(), 4 * loss.full_tensor())
    with dt.remember("parameters"), torch.no_grad():
        w.mul_(0.5)
        assert count_all_gathers(lambda: (run(), run())) == 2, "no backward pass will come"


def test_remember_nothing_disables_the_cache() -> None:
    y = make_partial()
    with dt.remember("nothing"):
        assert count_collectives(lambda: (y.exp(), y.sin())) == 2
    assert count_collectives(lambda: (y.exp(), y.sin())) == 1
    with pytest.raises(dt.errors.ArgumentError, match="nothing"), dt.remember("all"):
        pass


# --- operands of one call -------------------------------------------------------------------------------------------
def make_sharded(*shape: int, dim: int = 0) -> dt.DTensor:
    return dt.distribute_tensor(torch.randn(shape, dtype=X.dtype), mesh(), [Shard(dim)])


def test_operands_of_one_call_are_redistributed_in_one_collective() -> None:
    x, weight, bias = make_sharded(60, 4), make_sharded(5, 4), make_sharded(5)
    with CommDebugMode() as observed:
        y = torch.nn.functional.linear(x, weight, bias)
    assert observed.get_comm_counts() == {"all_gather": 1}
    assert sum(observed.get_comm_bytes().values()) == (4 + 1) * 4 * 8  # rows are (2, 2, 1), so the last rank receives four
    assert y.placements == (Shard(0),)
    expected = torch.nn.functional.linear(x.full_tensor(), weight.full_tensor(), bias.full_tensor())
    assert torch.equal(y.full_tensor(), expected)


def test_partial_operands_of_one_call_are_reduced_together_and_cached_separately() -> None:
    y, z = make_partial(), make_partial()
    assert count_collectives(lambda: torch.maximum(y, z)) == 1
    assert count_collectives(lambda: (y.exp(), z.exp())) == 0
    torch.testing.assert_close(torch.maximum(y, z).full_tensor(), X @ X.t())


def test_an_operand_used_twice_in_one_call_is_redistributed_once() -> None:
    y = make_partial()
    assert count_collectives(lambda: torch.maximum(y, y)) == 1
    z = make_partial()
    assert count_collectives(lambda: torch.maximum(z, z.t())) == 1
    torch.testing.assert_close(torch.maximum(z, z.t()).full_tensor(), X @ X.t())


def test_a_cached_operand_is_not_sent_with_an_uncached_operand() -> None:
    y, z = make_partial(), make_partial()
    y.exp()
    with CommDebugMode() as observed:
        found = torch.maximum(y, z)
    assert sum(observed.get_comm_bytes().values()) == 2 * 2 * z.numel() * 8 // 3
    torch.testing.assert_close(found.full_tensor(), X @ X.t())


def test_large_operands_of_one_call_are_gathered_by_separate_collectives() -> None:
    x, weight, bias = make_sharded(6000, 400), make_sharded(600, 400), make_sharded(600)
    with CommDebugMode() as observed:
        y = torch.nn.functional.linear(x, weight, bias)
    assert observed.get_comm_counts() == {"all_gather": 2}
    expected = torch.nn.functional.linear(x.full_tensor(), weight.full_tensor(), bias.full_tensor())
    torch.testing.assert_close(y.full_tensor(), expected)


def test_gradients_of_uneven_halves_stay_evenly_sharded_until_one_exchange() -> None:
    """Each half is on two of four ranks. Its gradient stays on four ranks until one exchange concatenates both."""
    x = dt.distribute_tensor(torch.randn(400, 512), dt.init_device_mesh("cpu", (4,)), [Shard(1)]).requires_grad_() * 1
    gate, up = x.chunk(2, -1)
    y = up * torch.nn.functional.silu(gate)
    with CommDebugMode() as comm:
        y.backward(torch.ones_like(y))
    # 64: the gate once more, sharded as the gradient of silu; 128: both gradients, to the ranks of the halves
    columns = 64 + 128
    assert dict(comm.get_comm_bytes()) == {"all_to_all": columns * 400 * 4}
    assert dict(comm.get_comm_counts()) == {"all_to_all": 2}


def test_gradient_of_a_chunk_of_one_rank_stays_sharded_along_the_batch() -> None:
    """The gradient of a chunk on one rank stays sharded along the batch until the chunks are concatenated."""
    mesh = dt.init_device_mesh("cpu", (4,))
    fused, batch = torch.randn(16, 256, 4 * 64), torch.ones(16, 256, 64)
    part = dt.distribute_tensor(fused, mesh, [Shard(-1)]).requires_grad_().chunk(4, -1)[1]
    found: list[dt.DTensor] = []
    part.register_hook(found.append)
    (dt.distribute_tensor(batch, mesh, [Shard(0)]) * (part * 1)).backward(batch)
    assert [grad.placements for grad in found] == [(Shard(0),)]


def test_a_small_gradient_is_redistributed_to_the_rank_of_the_forward_rows() -> None:
    """``diag_embed`` shards rows of one rank over all ranks. Backward sends only the small gradient back to that rank."""
    mesh = dt.init_device_mesh("cpu", (4,))
    weight = dt.distribute_tensor(torch.randn(4, 300), mesh, [dt.Replicate()]).requires_grad_()
    rows = dt.distribute_tensor(torch.randn(32, 300), mesh, [Shard(0)]).chunk(4)[3]
    grown = torch.diag_embed(torch.nn.functional.linear(rows.exp().sin(), weight))
    assert grown.placements == (Shard(0),)
    with CommDebugMode() as observed:
        grown.sum().backward()
    assert observed.get_comm_bytes()["all_to_all"] <= 8 * 4 * 4
    assert "all_gather" not in observed.get_comm_bytes()


def test_remember_parameters_keeps_all_parameters_of_a_model() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(torch.randn(300, 16), mesh, [Shard(0)])
    weights = [torch.nn.Parameter(dt.distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])) for _ in range(9)]
    with dt.remember("parameters"):
        y = x
        for weight in weights:
            y = torch.tanh(y @ weight)
        assert count_all_gathers(y.sum().backward) == 0


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("use", [lambda v: v.sort(0)[0], lambda v: v.cumsum(0), lambda v: v.t() @ v, lambda v: v.t().sort(1)[0]])
def test_the_lifetime_of_a_view_does_not_change_the_collectives(use: Callable[[Any], Any], requires_grad: bool) -> None:
    """One rank may keep the view longer than another one."""

    def run(references: list[Any]) -> None:
        base = dt.distribute_tensor(X, mesh(), [Shard(0)]).requires_grad_(requires_grad) * 1
        view = base[:, :2]
        made = use(view)
        references.append(view)
        if len(references) == 1:
            references.clear()
        del view
        loss = (made * use(base[:, :2])).sum() + use(base[:, 1:3]).sum()
        if requires_grad:
            loss.backward()

    first: list[Any] = []
    assert count_collectives(lambda: run(first)) == count_collectives(lambda: run([None])) > 0


@pytest.mark.parametrize("writes", [False, True])
def test_the_lifetime_of_an_alias_does_not_change_the_collectives(writes: bool) -> None:
    def run(keeps: bool) -> list[Any]:
        x = dt.distribute_tensor(X, mesh(), [Shard(1)]) * 1
        view, other = x.view(-1)[3:20], x * 0  # some ranks have no elements of the view
        other.data = x
        found = [view.sin()]
        if writes:
            other.add_(1)
        alias = other if keeps else None
        del other
        found += [view.sin(), view.cos()]
        return [*found, x, alias]

    counts = [count_collectives(lambda keeps=keeps: run(keeps)) for keeps in (True, False)]
    assert counts[0] == counts[1] > 0
    for got, expected in zip(run(False)[:-1], run(True)[:-1], strict=True):
        torch.testing.assert_close(got.full_tensor(), expected.full_tensor())
    torch.testing.assert_close(run(False)[1].full_tensor(), (X + writes).view(-1)[3:20].sin())


def test_a_plan_that_relies_on_a_cached_copy_is_not_used_for_other_tensors() -> None:
    """A view of a tensor with a cached copy gets a plan that uses the copy. Another tensor of this layout has no copy."""
    there = dt.distribute_tensor(torch.ones(120, 250), mesh(), [Shard(0)])
    few = dt.distribute_tensor(torch.ones(120, 1), mesh(), [Replicate()])

    def make_sum() -> torch.Tensor:
        left, right = torch.ones(120, 63), torch.ones(63, 250)
        return dt.distribute_tensor(left, mesh(), [Shard(1)]) @ dt.distribute_tensor(right, mesh(), [Shard(0)])

    def placements_of_product(x: torch.Tensor) -> Any:
        return (x * few).placements  # type: ignore[attr-defined]  # a DTensor

    one, other = make_sum(), make_sum()
    one * there, other * there
    assert placements_of_product(one) == (Shard(0),)
    placements_of_product(other.t().t())
    assert placements_of_product(make_sum()) == (Replicate(),)
