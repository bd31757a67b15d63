"""Bucketing: a captured program that combines collectives equals the eager program bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch.nn import functional as F

import dtensor as dt
from dtensor import Partial, Placement, Replicate, Shard
from dtensor.debug import CommDebugMode


def kinds(run: Callable[[], Any]) -> tuple[Any, Counter[str], int]:
    with CommDebugMode() as seen:
        made = run()
    return made, Counter(event.kind for event in seen.events), sum(event.bytes for event in seen.events)


def training(mesh: dt.DeviceMesh, placement: Placement, count: int = 4, captured: bool = False) -> tuple[Any, list[Any]]:
    """Return a training step with its optimizer, and its parameters, of uneven sizes."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(7, 7, generator=generator, dtype=torch.float64) for _ in range(count)]
    params = [dt.distribute_tensor(w, mesh, [placement]).requires_grad_() for w in weights]
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)

    def step(x: Any) -> Any:
        for p in params:
            x = torch.tanh(F.linear(x, p))
        loss = x.square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return (dt.capture(step) if captured else step), params


@pytest.mark.parametrize(
    ("placement", "expected"), [(Replicate(), {"all_reduce": 1}), (Shard(0), {"all_gather": 1, "reduce_scatter": 1})]
)
def test_replayed_step_uses_one_collective_for_all_parameters_or_gradients(
    placement: Placement, expected: dict[str, int]
) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    (plain, params), (step, same) = training(mesh, placement), training(mesh, placement, captured=True)
    for k in range(5):
        x = dt.distribute_tensor(torch.randn(61, 7, dtype=torch.float64) + k, mesh, [Shard(0)])
        (loss, before, nbytes), (found, after, moved) = kinds(partial(plain, x)), kinds(partial(step, x))
        assert torch.equal(loss.full_tensor(), found.full_tensor())
        assert all(torch.equal(p.full_tensor(), q.full_tensor()) for p, q in zip(params, same, strict=True))
    assert step.cache_info().replayed >= 3
    assert {kind: after[kind] for kind in expected} == expected
    assert all(before[kind] >= (3 if kind == "all_gather" else 1) for kind in expected)  # gradients are together without it
    assert moved <= nbytes


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_backward_of_a_replay_reduces_all_gradients_in_one_collective(placement: Placement) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    weights = [dt.randn(7, 7, device_mesh=mesh, placements=[placement]).requires_grad_() for _ in range(4)]
    seen: list[Any] = []
    weights[1].register_hook(lambda grad: seen.append(grad.placements))

    def forward(x: Any) -> Any:
        for w in weights:
            x = torch.tanh(F.linear(x, w)).t().contiguous().t()
        return x.square().mean()

    f, x = dt.capture(forward), dt.randn(61, 7, device_mesh=mesh, placements=[Shard(0)])
    grads = []
    for run in (forward, f, f, f):
        for w in weights:
            w.grad = None
        loss = run(x)
        _, kind, nbytes = kinds(loss.backward)
        grads.append(([w.grad for w in weights], kind["all_reduce"] + kind["reduce_scatter"], nbytes))
    assert f.cache_info().replayed == 2
    assert [count for _, count, _ in grads][:1] + [count for _, count, _ in grads][2:] == [1, 1, 1]
    assert grads[3][2] <= grads[0][2]
    assert seen == [(placement,)] * 4
    for got, _, _ in grads[1:]:
        for one, other in zip(got, grads[0][0], strict=True):
            assert one.placements == other.placements
            assert torch.equal(one.full_tensor(), other.full_tensor())


def replayed(run: Callable[..., Any], *args: Any) -> tuple[Any, Counter[str]]:
    """Compare replays with the function, and return the last results and collectives."""
    f = dt.capture(run)
    with torch.no_grad():
        for _ in range(3):
            given = [x.clone() for x in args]
            plain = run(*[x.clone() for x in args])
            made, seen, _ = kinds(lambda given=given: f(*given))
            for one, other in zip(made, plain, strict=True):
                assert torch.equal(one.full_tensor(), other.full_tensor())
    assert f.cache_info().replayed
    return made, seen


def cut(*placements: Placement) -> list[Any]:
    mesh = dt.init_device_mesh("cpu", (2,))
    return [dt.distribute_tensor(torch.arange(20.0).view(5, 4) + k, mesh, [p]) for k, p in enumerate(placements)]


WHOLE = [Replicate()]


def whole(x: Any) -> Any:
    return x.redistribute(placements=WHOLE)


def test_gathers_before_and_after_a_write_are_not_combined() -> None:
    def write_between(x: Any, y: Any) -> Any:
        first = whole(x)
        x.add_(1)
        y.mul_(2)
        return first, whole(x), whole(y)

    _, seen = replayed(write_between, *cut(Shard(0), Shard(0)))
    assert seen["all_gather"] == 2


def test_running_statistics_are_gathered_after_their_update() -> None:
    def running(x: Any, mean: Any, var: Any) -> Any:
        first = whole(x.t())
        y = F.batch_norm(x.t(), mean, var, training=True, momentum=0.5)
        return y, first, whole(mean), whole(var)

    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(torch.randn(5, 4), mesh, [Shard(0)])
    stats = [dt.distribute_tensor(torch.ones(5), mesh, [Shard(0)]) for _ in range(2)]
    _, seen = replayed(running, x, *stats)
    assert seen["all_gather"] == 2


def test_results_of_combined_collectives_do_not_share_memory() -> None:
    def write_after(x: Any, y: Any) -> Any:
        first, second = whole(x), whole(y)
        first.add_(1)
        second[1:].mul_(3)
        return first, second, whole(x + y)

    for placement in (Shard(0), Shard(1), Partial()):
        replayed(write_after, *cut(placement, placement))


def test_gather_that_depends_on_another_is_not_combined_with_it() -> None:
    def chained(x: Any, y: Any) -> Any:
        first = whole(x)
        second = whole(first.redistribute(placements=[Shard(0)]) * 2)
        return first, second, whole(y)

    _, seen = replayed(chained, *cut(Shard(0), Shard(0)))
    assert seen["all_gather"] == 2


def test_collectives_that_depend_on_each_other_are_not_reordered() -> None:
    def crossing(x: Any, y: Any, z: Any) -> Any:
        part = x.redistribute(placements=[Shard(0)])
        first = whole(y)
        other = (z @ first.t()).redistribute(placements=[Shard(0)])
        return part, other, whole(part), first

    _, seen = replayed(crossing, *cut(Partial(), Shard(0), Shard(1)))
    assert seen["all_gather"] + seen["reduce_scatter"] == 3


def test_gathers_of_views_are_combined() -> None:
    def through_views(x: Any, y: Any) -> Any:
        first = whole(x.t())
        a = first.sum(0)
        second = whole(y.t()[1:])
        third = y.redistribute(placements=[Shard(1)])
        return a, second, third, x.redistribute(placements=[Shard(1)])

    _, seen = replayed(through_views, *cut(Shard(0), Shard(0)))
    assert seen["all_gather"] == 1
    assert seen["all_to_all"] == 1


def test_collectives_of_one_kind_that_send_a_view_are_combined() -> None:
    def sent_twice(x: Any, y: Any) -> Any:
        first, other = whole(x), x.redistribute(placements=[Shard(1)])
        last = y[:, 1:]
        return first, other, whole(last), last.redistribute(placements=[Shard(1)])

    _, seen = replayed(sent_twice, *cut(Shard(0), Shard(0)))
    assert seen["all_gather"] == 1
    assert seen["all_to_all"] == 1


def test_reductions_of_other_dtypes_or_operations_are_not_combined() -> None:
    def several(x: Any, y: Any) -> Any:
        return whole(x), whole(y), whole(x.double()), whole(y * 2)

    _, seen = replayed(several, *cut(Partial("avg"), Partial("sum")))
    assert 2 <= seen["all_reduce"] <= 3


def _training_on_processes() -> list[tuple[bool, int, int]]:
    """Return for each placement: whether replays equal eager bitwise, and the collectives of an eager and a replayed step."""
    found = []
    mesh = dt.init_device_mesh("cpu", (4,))
    for placement in (Replicate(), Shard(0), Shard(0, sizes=(3, 0, 0, 4))):
        (plain, params), (step, same) = training(mesh, placement), training(mesh, placement, captured=True)
        equal = True
        for k in range(4):
            generator = torch.Generator().manual_seed(k)
            x = dt.distribute_tensor(torch.randn(61, 7, dtype=torch.float64, generator=generator), mesh, [Shard(0)])
            (loss, before, _), (again, after, _) = kinds(partial(plain, x)), kinds(partial(step, x))
            equal &= torch.equal(loss.full_tensor(), again.full_tensor())
            equal &= all(torch.equal(p.to_local(), q.to_local()) for p, q in zip(params, same, strict=True))
        assert step.cache_info().replayed >= 2
        found.append((equal, before.total(), after.total()))
    return found


@pytest.mark.gloo
def test_all_processes_combine_the_same_collectives() -> None:
    told = run_gloo(_training_on_processes, 4)
    assert all(ways == told[0] for ways in told)
    assert all(equal and after <= before for equal, before, after in told[0])
    assert all(after < before for _, before, after in told[0][1:])  # what is gathered; gradients are together without it
