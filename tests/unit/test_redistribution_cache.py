"""A value that operators need in another layout is moved once; its placements, pieces and memory stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.dispatch.redistribution_cache import _RecentByMesh
from dtensor.errors import ArgumentError

X = torch.arange(24, dtype=torch.float64).reshape(6, 4) / 20 - 0.5


def mesh() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (3,))


def in_terms() -> dt.DTensor:
    left, right = (dt.distribute_tensor(x, mesh(), [p]) for x, p in ((X, Shard(1)), (X.t().contiguous(), Shard(0))))
    return left @ right


def collectives(run: Callable[[], Any]) -> int:
    with CommDebugMode() as seen:
        run()
    return seen.get_total_counts()


def test_terms_are_added_up_once_for_all_who_need_them() -> None:
    y = in_terms()
    assert y.placements == (Partial(),)
    assert collectives(lambda: (y.exp(), y.sin(), y.abs(), y.t().cos())) == 1
    assert y.placements == (Partial(),)
    torch.testing.assert_close(y.exp().full_tensor(), (X @ X.t()).exp())


def test_sums_that_lie_cut_are_not_had_whole_for_nothing() -> None:
    y, z = in_terms(), dt.distribute_tensor(torch.ones(6, 6, dtype=X.dtype), mesh(), [Shard(1)])
    assert collectives(lambda: y * z) == 1
    assert collectives(lambda: y * y) == 0
    assert (y * y).placements == (Shard(1),)
    assert (y.t() * y.t()).placements == (Shard(0),)
    torch.testing.assert_close((y * y).full_tensor(), (X @ X.t()) ** 2)


def test_a_value_needed_whole_and_cut_is_moved_once() -> None:
    y, z = in_terms(), dt.distribute_tensor(torch.ones(6, 6, dtype=X.dtype), mesh(), [Shard(1)])
    assert collectives(lambda: (y.exp(), y * z)) == 1
    torch.testing.assert_close((y * z).full_tensor(), X @ X.t())


def test_backward_uses_what_forward_moved() -> None:
    w = dt.distribute_tensor(X, mesh(), [Shard(1)]).requires_grad_()
    y = w @ dt.distribute_tensor(X.t().contiguous(), mesh(), [Shard(0)])
    loss = y.square().sum()
    whole = X.clone().requires_grad_()
    (whole @ X.t()).square().sum().backward()
    assert collectives(loss.backward) == 0
    torch.testing.assert_close(w.grad.full_tensor(), whole.grad)


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
def test_what_is_written_is_seen(write: Callable[[Any], Any], before: Callable[[Any], Any]) -> None:
    y, plain = in_terms(), X @ X.t()
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
    shown = [plain.t(), plain.detach(), plain[2:], plain.view(36)]
    for mine, other in zip((y, *views), (plain, *shown), strict=False):
        torch.testing.assert_close(mine.exp().detach().full_tensor(), other.exp().detach())


def test_a_result_that_shares_memory_with_what_was_moved_is_the_users() -> None:
    y = in_terms()
    flat = torch.ops.aten._unsafe_view(y.exp(), [36])
    y.exp()
    flat.zero_()
    torch.testing.assert_close(y.exp().full_tensor(), (X @ X.t()).exp())


def test_pieces_that_the_user_has_are_moved_each_time() -> None:
    y = dt.DTensor.from_local(dt.per_rank([X, X, X]), mesh(), [Partial()])
    assert collectives(lambda: (y.exp(), y.exp())) == 2
    z = in_terms()
    z.to_local()
    assert collectives(lambda: (z.exp(), z.t().exp())) == 2


def test_a_parameter_is_not_kept_whole() -> None:
    w = torch.nn.Parameter(dt.distribute_tensor(X, mesh(), [Shard(0)]))
    x = dt.distribute_tensor(X, mesh(), [Shard(0)])
    assert collectives(lambda: (x @ w.t(), x @ w.t())) == 2


def test_a_cut_activation_is_gathered_once_for_several_products() -> None:
    w = [dt.distribute_tensor(torch.randn(4, 300, dtype=X.dtype), mesh(), [Shard(1)]).requires_grad_() for _ in range(3)]
    x = dt.distribute_tensor(X, mesh(), [Shard(0)]).requires_grad_() * 1
    assert collectives(lambda: [x @ each for each in w]) == 1


def test_forms_of_long_lived_tensors_are_few() -> None:
    xs = [dt.distribute_tensor(X, mesh(), [Shard(0)]) for _ in range(9)]
    w = dt.distribute_tensor(torch.randn(4, 300, dtype=X.dtype), mesh(), [Shard(1)])
    for x in xs:
        x @ w
    assert collectives(lambda: xs[-1] @ w) == 0
    assert collectives(lambda: xs[0] @ w) == 1
    held = [x for x in xs if any(forms for forms in x.__dict__["_cached_copies"].copies.values())]
    assert len(held) == 4


def with_budget(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Set the budget of cached copies for a new mesh; return a function that returns the bytes that are held."""
    monkeypatch.setenv("DTENSOR_CACHED_COPIES_BYTES", str(nbytes))
    monkeypatch.setattr("dtensor.dispatch.redistribution_cache._RECENT", _RecentByMesh())
    before = dt.cache_info()["dispatch.cached_copies_bytes"]
    assert before.limit == nbytes
    return lambda: dt.cache_info()["dispatch.cached_copies_bytes"].kept - before.kept


def test_the_least_recently_used_copies_are_dropped_beyond_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 6 * 6 * 8  # bytes of a reduced copy
    held = with_budget(2 * size, monkeypatch)
    a, b, c = in_terms(), in_terms(), in_terms()
    a.exp(), b.exp()
    assert held() == 2 * size
    assert collectives(lambda: a.exp()) == 0  # b is the least recently used one now
    assert collectives(lambda: c.exp()) == 1
    assert held() == 2 * size
    assert collectives(lambda: (a.exp(), c.exp())) == 0
    assert collectives(lambda: b.exp()) == 1
    torch.testing.assert_close(b.exp().full_tensor(), (X @ X.t()).exp())


def test_a_freed_copy_counts_until_others_push_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank may keep a tensor longer than another one: what is dropped must not depend on it."""
    size = 6 * 6 * 8
    held = with_budget(2 * size, monkeypatch)
    a, b = in_terms(), in_terms()
    a.exp(), b.exp()
    del b
    assert held() == size
    in_terms().exp()
    assert collectives(lambda: a.exp()) == 1


def test_no_copy_is_held_with_a_budget_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    held = with_budget(0, monkeypatch)
    y = in_terms()
    assert collectives(lambda: (y.exp(), y.exp())) == 2
    assert held() == 0


def test_a_budget_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTENSOR_CACHED_COPIES_BYTES", "8GB")
    with pytest.raises(ArgumentError, match="'8GB' is no whole number of bytes"):
        dt.cache_info()


def test_a_recording_uses_what_is_in_it() -> None:
    y = in_terms()
    y.exp()
    f = dt.capture(lambda v: v.exp() + v.sin())
    with torch.no_grad():
        for scale in (1, 2, 3):
            v = in_terms().mul_(scale)
            v.exp()
            torch.testing.assert_close(f(v).full_tensor(), (X @ X.t() * scale).exp() + (X @ X.t() * scale).sin())
    assert f.cache_info().replayed >= 1


def test_what_data_gave_sees_what_is_written_to_the_tensor() -> None:
    y, plain = in_terms(), X @ X.t()
    same, other = y.data, plain.data
    row, other_row = same.chunk(2, 0)[-1], other.chunk(2, 0)[-1]
    for write in (lambda x: x.t().add_(1), lambda x: x.view(36).mul_(2), lambda x: x[1:].sub_(1)):
        assert same.sin() is not row.sin()
        write(y)
        write(plain)
        torch.testing.assert_close(same.sin().full_tensor(), other.sin())
        torch.testing.assert_close(row.sin().full_tensor(), other_row.sin())


def test_a_tensor_that_became_other_memory_is_no_view_of_what_it_was() -> None:
    y, z = in_terms(), in_terms() + 1
    y.sin()
    view = y.view(36)
    view.sin()
    view.data = z
    torch.testing.assert_close(view.sin().full_tensor(), (X @ X.t() + 1).sin())
    z.zero_()
    torch.testing.assert_close(view.sin().full_tensor(), torch.zeros(6, 6, dtype=X.dtype))


def gathers(run: Callable[[], Any]) -> int:
    with CommDebugMode() as seen:
        run()
    return sum(event.kind == "all_gather" for event in seen.events)


def fully_sharded() -> tuple[Any, Callable[[], Any]]:
    w = torch.nn.Parameter(dt.distribute_tensor(torch.randn(30, 30, dtype=X.dtype), mesh(), [Shard(0)]))
    x = dt.distribute_tensor(torch.randn(1000, 30, dtype=X.dtype), mesh(), [Shard(0)]).requires_grad_()
    return w, lambda: (x @ w).square().sum()


def test_a_parameter_may_be_remembered_until_its_gradient_arrives() -> None:
    w, run = fully_sharded()
    run().backward()
    expected, w.grad = w.grad, None
    assert gathers(lambda: run().backward()) == 2
    w.grad = None
    with dt.remember("parameters"):
        loss = run()
        assert gathers(run) == 0
    assert any(w.__dict__["_cached_copies"].copies.values())
    assert gathers(loss.backward) == 0
    assert not any(w.__dict__["_cached_copies"].copies.values())
    assert torch.equal(w.grad.full_tensor(), expected.full_tensor())
    with dt.remember("parameters"):
        assert gathers(run) == 1
        with torch.no_grad():
            w.mul_(2)
        before = run()
    assert torch.allclose(before.full_tensor(), 4 * loss.full_tensor())
    with dt.remember("parameters"), torch.no_grad():
        w.mul_(0.5)
        assert gathers(lambda: (run(), run())) == 2, "no backward pass will come"


def test_nothing_need_be_remembered() -> None:
    y = in_terms()
    with dt.remember("nothing"):
        assert collectives(lambda: (y.exp(), y.sin())) == 2
    assert collectives(lambda: (y.exp(), y.sin())) == 1
    with pytest.raises(dt.errors.ArgumentError, match="nothing"), dt.remember("all"):
        pass


# --- operands of one call ---------------------------------------------------------------------------------------------------
def cut(*shape: int, dim: int = 0) -> dt.DTensor:
    return dt.distribute_tensor(torch.randn(shape, dtype=X.dtype), mesh(), [Shard(dim)])


def test_what_a_call_needs_of_several_operands_goes_in_one_collective() -> None:
    x, weight, bias = cut(60, 4), cut(5, 4), cut(5)
    with CommDebugMode() as seen:
        y = torch.nn.functional.linear(x, weight, bias)
    assert seen.get_comm_counts() == {"all_gather": 1}
    assert sum(seen.get_comm_bytes().values()) == (4 + 1) * 4 * 8  # of rows (2, 2, 1) the last rank gets four
    assert y.placements == (Shard(0),)
    expected = torch.nn.functional.linear(x.full_tensor(), weight.full_tensor(), bias.full_tensor())
    assert torch.equal(y.full_tensor(), expected)


def test_terms_of_a_call_are_added_up_together_and_each_is_remembered() -> None:
    y, z = in_terms(), in_terms()
    assert collectives(lambda: torch.maximum(y, z)) == 1
    assert collectives(lambda: (y.exp(), z.exp())) == 0
    torch.testing.assert_close(torch.maximum(y, z).full_tensor(), X @ X.t())


def test_one_memory_that_a_call_needs_twice_is_moved_once() -> None:
    y = in_terms()
    assert collectives(lambda: torch.maximum(y, y)) == 1
    z = in_terms()
    assert collectives(lambda: torch.maximum(z, z.t())) == 1
    torch.testing.assert_close(torch.maximum(z, z.t()).full_tensor(), X @ X.t())


def test_what_is_there_does_not_travel_with_what_is_not() -> None:
    y, z = in_terms(), in_terms()
    y.exp()
    with CommDebugMode() as seen:
        found = torch.maximum(y, z)
    assert sum(seen.get_comm_bytes().values()) == 2 * 2 * z.numel() * 8 // 3
    torch.testing.assert_close(found.full_tensor(), X @ X.t())


def test_large_operands_are_under_way_at_once_and_unpacked() -> None:
    x, weight, bias = cut(6000, 400), cut(600, 400), cut(600)
    with CommDebugMode() as seen:
        y = torch.nn.functional.linear(x, weight, bias)
    assert seen.get_comm_counts() == {"all_gather": 2}
    expected = torch.nn.functional.linear(x.full_tensor(), weight.full_tensor(), bias.full_tensor())
    torch.testing.assert_close(y.full_tensor(), expected)


def test_no_gradient_is_brought_from_an_even_cut_to_one_that_is_less_even() -> None:
    """Of halves that two ranks each have, gradients stay dealt out until the halves' are put together: in one exchange."""
    x = dt.distribute_tensor(torch.randn(400, 512), dt.init_device_mesh("cpu", (4,)), [Shard(1)]).requires_grad_() * 1
    gate, up = x.chunk(2, -1)
    y = up * torch.nn.functional.silu(gate)
    with CommDebugMode() as moved:
        y.backward(torch.ones_like(y))
    columns = (
        64 + 128
    )  # the gate once more, as even as the gradient of what it became; then both gradients to where the halves lie
    assert dict(moved.get_comm_bytes()) == {"all_to_all": columns * 400 * 4}
    assert dict(moved.get_comm_counts()) == {"all_to_all": 2}


def test_no_gradient_is_brought_to_who_has_more_of_it() -> None:
    """Of a part that one rank has, the gradient stays cut along the batch until it is put together with the other parts'."""
    mesh = dt.init_device_mesh("cpu", (4,))
    fused, batch = torch.randn(16, 256, 4 * 64), torch.ones(16, 256, 64)
    part = dt.distribute_tensor(fused, mesh, [Shard(-1)]).requires_grad_().chunk(4, -1)[1]
    found: list[dt.DTensor] = []
    part.register_hook(found.append)
    (dt.distribute_tensor(batch, mesh, [Shard(0)]) * (part * 1)).backward(batch)
    assert [grad.placements for grad in found] == [(Shard(0),)]


def test_a_small_gradient_goes_back_to_where_all_before_it_lies() -> None:
    """A step on rows that one rank has: a few numbers of them, dealt out to grow, do not bring what they were made of along."""
    mesh = dt.init_device_mesh("cpu", (4,))
    weight = dt.distribute_tensor(torch.randn(4, 300), mesh, [dt.Replicate()]).requires_grad_()
    rows = dt.distribute_tensor(torch.randn(32, 300), mesh, [Shard(0)]).chunk(4)[3]
    grown = torch.diag_embed(torch.nn.functional.linear(rows.exp().sin(), weight))
    assert grown.placements == (Shard(0),)
    with CommDebugMode() as seen:
        grown.sum().backward()
    assert seen.get_comm_bytes()["all_to_all"] <= 8 * 4 * 4
    assert "all_gather" not in seen.get_comm_bytes()


def test_all_parameters_of_a_model_are_remembered_where_that_is_asked() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(torch.randn(300, 16), mesh, [Shard(0)])
    weights = [torch.nn.Parameter(dt.distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)])) for _ in range(9)]
    with dt.remember("parameters"):
        y = x
        for weight in weights:
            y = torch.tanh(y @ weight)
        assert gathers(y.sum().backward) == 0


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("use", [lambda v: v.sort(0)[0], lambda v: v.cumsum(0), lambda v: v.t() @ v, lambda v: v.t().sort(1)[0]])
def test_how_long_a_view_lives_moves_nothing(use: Callable[[Any], Any], record: bool) -> None:
    """One rank may keep it to look at."""

    def run(kept: list[Any]) -> None:
        base = dt.distribute_tensor(X, mesh(), [Shard(0)]).requires_grad_(record) * 1
        view = base[:, :2]
        made = use(view)
        kept.append(view)
        if len(kept) == 1:
            kept.clear()
        del view
        loss = (made * use(base[:, :2])).sum() + use(base[:, 1:3]).sum()
        if record:
            loss.backward()

    first: list[Any] = []
    assert collectives(lambda: run(first)) == collectives(lambda: run([None])) > 0


@pytest.mark.parametrize("writes", [False, True])
def test_how_long_a_tensor_of_the_same_memory_lives_moves_nothing(writes: bool) -> None:
    def run(keeps: bool) -> list[Any]:
        x = dt.distribute_tensor(X, mesh(), [Shard(1)]) * 1
        view, other = x.view(-1)[3:20], x * 0  # of which ranks have no parts
        other.data = x
        found = [view.sin()]
        if writes:
            other.add_(1)
        kept = other if keeps else None
        del other
        found += [view.sin(), view.cos()]
        return [*found, x, kept]

    counts = [collectives(lambda keeps=keeps: run(keeps)) for keeps in (True, False)]
    assert counts[0] == counts[1] > 0
    for got, expected in zip(run(False)[:-1], run(True)[:-1], strict=True):
        torch.testing.assert_close(got.full_tensor(), expected.full_tensor())
    torch.testing.assert_close(run(False)[1].full_tensor(), (X + writes).view(-1)[3:20].sin())


def test_a_plan_that_counts_on_a_form_serves_nobody_else() -> None:
    """A view of what was moved knows more than it has in hand: what is planned with that is not for others."""
    there = dt.distribute_tensor(torch.ones(120, 250), mesh(), [Shard(0)])
    few = dt.distribute_tensor(torch.ones(120, 1), mesh(), [Replicate()])

    def terms() -> torch.Tensor:
        left, right = torch.ones(120, 63), torch.ones(63, 250)
        return dt.distribute_tensor(left, mesh(), [Shard(1)]) @ dt.distribute_tensor(right, mesh(), [Shard(0)])

    def placed(x: torch.Tensor) -> Any:
        return (x * few).placements  # type: ignore[attr-defined]  # a DTensor

    one, other = terms(), terms()
    one * there, other * there
    assert placed(one) == (Shard(0),)
    placed(other.t().t())
    assert placed(terms()) == (Replicate(),)
