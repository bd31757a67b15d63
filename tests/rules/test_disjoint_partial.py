"""Disjoint partials: each row is non-zero on exactly one rank. Operators compute on the owner's rows without communication."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch_version_marks import mark_undecomposed_linear

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.dispatch.programs.facts import find_disjoint_rows
from dtensor.ranks.per_rank import shards_of

R, SUM = Replicate(), Partial()
MESHES = {shape: dt.init_device_mesh("cpu", shape) for shape in ((2,), (3,), (2, 2))}
# one group is empty; on three ranks each rank has one group, on two ranks one rank has two
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class CheckForeignRowsAreZero(TorchDispatchMode):
    """Mode that asserts, for each result that is marked as a disjoint partial, that rows of other ranks are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:  # torch increments the version counter after this returns
            return made
        for x in made if isinstance(made, (list, tuple)) else (made,):
            fact = find_disjoint_rows(x) if isinstance(x, dt.DTensor) else None
            if fact is not None:
                self.count += 1
                hidden = shards_of(fact.ownership.foreign_rows())
                for local, others in zip(shards_of(x._local), hidden, strict=True):
                    assert not local.movedim(fact.dim, 0)[others].any(), func
        return made


def grouped_products(
    mesh: Any, ends: torch.Tensor = ENDS, placements: Any = None, seed: int = 0
) -> tuple[torch.Tensor, dt.DTensor]:
    """Return a plain and a distributed grouped matmul of three groups, with the groups sharded along the last mesh dim."""
    x, w = random_tensor(7, 8, seed=seed), random_tensor(3, 8, 12, seed=seed + 1)
    whole = [R] * mesh.ndim
    cut = placements or [*whole[1:], Shard(0)]
    a, b, offs = dt.distribute_tensor(x, mesh, whole), dt.distribute_tensor(w, mesh, cut), dt.distribute_tensor(ends, mesh, whole)
    return F.grouped_mm(x, w, offs=ends), F.grouped_mm(a, b, offs=offs)


def assert_equals(got: dt.DTensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.full_tensor(), expected, equal_nan=True, atol=1e-5, rtol=1e-5)


ELEMENTWISE: list[Callable[[Any], Any]] = [
    F.silu, F.gelu, torch.sigmoid, torch.exp, torch.log, torch.rsqrt, torch.reciprocal, torch.cos, torch.abs, torch.tanh,
    lambda x: x.pow(2), lambda x: x.clamp(min=1), lambda x: x + 1, lambda x: 1 / x, lambda x: torch.where(x > 0, x, -1.0),
    F.softplus, lambda x: x * float("inf"), lambda x: F.leaky_relu(x, 0.1), lambda x: x.pow(0), lambda x: x.nan_to_num(3.0),
]  # fmt: skip
LEAKY = 17  # the place of leaky_relu


@pytest.mark.parametrize("number", mark_undecomposed_linear(range(len(ELEMENTWISE)), {LEAKY}))
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_elementwise_operators_keep_disjoint_partial_without_communication(shape: tuple[int, ...], number: int) -> None:
    one, many = grouped_products(MESHES[shape])
    with CheckForeignRowsAreZero(), CommDebugMode() as comm:
        got = ELEMENTWISE[number](many)
    assert comm.get_total_counts() == 0
    assert got.placements[-1] == SUM
    assert_equals(got, ELEMENTWISE[number](one))


def test_infinite_factor_times_disjoint_partial_equals_plain_torch() -> None:
    one, many = grouped_products(MESHES[3,])
    beside = torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 0.0, 1.0, torch.inf]).unsqueeze(1)
    with CommDebugMode() as comm:
        got = many * dt.distribute_tensor(beside, MESHES[3,], [R])
    assert comm.get_total_counts() == 0
    assert_equals(got, one * beside)


def test_gated_expert_on_disjoint_partial_reduces_only_the_input_gradient() -> None:
    for shape, mesh in MESHES.items():
        whole = [R] * len(shape)
        x, ends = dt.distribute_tensor(random_tensor(7, 8), mesh, whole).requires_grad_(), dt.distribute_tensor(ENDS, mesh, whole)
        up, down = (
            dt.distribute_tensor(random_tensor(3, *size, seed=1), mesh, [*whole[1:], Shard(0)]).requires_grad_()
            for size in ((8, 16), (8, 8))
        )

        def expert(x: Any, up: Any, down: Any, ends: Any) -> Any:
            gate, h = F.grouped_mm(x, up, offs=ends).chunk(2, dim=-1)
            return F.grouped_mm(F.silu(gate) * h, down, offs=ends)

        with CommDebugMode() as comm, CheckForeignRowsAreZero() as checked:
            made = expert(x, up, down, ends)
            before = comm.get_total_counts()
            (made * made).sum().backward()
        assert before == 0
        assert comm.get_total_counts() == 1  # the gradient of x, which is replicated
        assert checked.count > 8
        plain = [t.detach().full_tensor().requires_grad_() for t in (x, up, down)]
        expected = expert(*plain, ENDS)
        (expected * expected).sum().backward()
        assert_equals(made.detach(), expected.detach())
        for own, other in zip((x, up, down), plain, strict=True):
            assert_equals(own.grad, other.grad)


def test_product_of_disjoint_partials_with_different_owners_equals_plain_torch() -> None:
    one, many = grouped_products(MESHES[2,])
    other, others = grouped_products(MESHES[2,], torch.tensor([4, 6, 7], dtype=torch.int32), seed=5)
    assert_equals(many * others, one * other)
    assert_equals(many * many, one * one)  # operands of the same plan, but with another row ownership
    assert_equals(others * many, one * other)


def test_write_of_partial_values_clears_row_ownership() -> None:
    one, many = grouped_products(MESHES[2,])
    term = dt.DTensor.from_local(dt.per_rank([torch.ones(7, 12), torch.ones(7, 12)]), MESHES[2,], [SUM], shape=(7, 12))
    many.add_(term)
    assert find_disjoint_rows(many) is None
    assert_equals(torch.exp(many), torch.exp(one + 2))
    many.add_(1).add_(term)
    assert_equals(torch.exp(many), torch.exp(one + 5))
    one, many = grouped_products(MESHES[2,])
    view = many[1:3]
    many.add_(term)
    assert_equals(torch.exp(view), torch.exp(one[1:3] + 2))
    one, many = grouped_products(MESHES[2,])
    for shard in many.to_local().shards:  # no version counter sees this write
        shard.add_(1)
    assert_equals(torch.exp(many), torch.exp(one + 2))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_in_place_operators_on_disjoint_partial_do_not_communicate(shape: tuple[int, ...]) -> None:
    """Check in-place operators such as the addition of an expert's bias."""
    mesh = MESHES[shape]
    one, many = grouped_products(mesh)
    bias = random_tensor(7, 12, seed=4)
    own = dt.distribute_tensor(bias, mesh, [R] * mesh.ndim)
    with CommDebugMode() as comm:
        got = many.add_(own).clamp_(max=1).exp() * own
        assert find_disjoint_rows(many) is not None
        many[:, ::2].exp_()
    assert comm.get_total_counts() == 0
    one.add_(bias).clamp_(max=1)
    assert_equals(got, one.exp() * bias)
    one[:, ::2].exp_()
    assert_equals(many, one)
    assert_equals(torch.exp(many), torch.exp(one))
    own.add_(many)  # ``own`` is replicated, and stays replicated
    assert own.placements == (R,) * mesh.ndim
    assert_equals(own, bias + one)


def test_gradients_of_in_place_writes_to_disjoint_partial_equal_plain_torch() -> None:
    mesh = MESHES[2,]
    leaves = [random_tensor(7, 8), random_tensor(3, 8, 12), random_tensor(7, 12, seed=4)]
    ours = [dt.distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(leaves, (R, Shard(0), R), strict=True)]
    plain = [t.clone().requires_grad_() for t in leaves]
    for (x, w, b), ends in ((ours, dt.distribute_tensor(ENDS, mesh, [R])), (plain, ENDS)):
        F.grouped_mm(x, w, offs=ends).add_(b).clamp(max=1).exp().sum().backward()
    for a, c in zip(ours, plain, strict=True):
        assert_equals(a.grad, c.grad)


def test_write_to_group_offsets_clears_row_ownership() -> None:
    mesh = MESHES[2,]
    x, w, ends = (
        dt.distribute_tensor(t, mesh, [p]) for t, p in ((random_tensor(7, 8), R), (random_tensor(3, 8, 12), Shard(0)), (ENDS, R))
    )
    many, one = F.grouped_mm(x, w, offs=ends), F.grouped_mm(random_tensor(7, 8), random_tensor(3, 8, 12), offs=ENDS)
    ends.add_(0)
    assert find_disjoint_rows(many) is None
    assert_equals(torch.exp(many), torch.exp(one))


def test_two_grouped_matmuls_with_different_group_shards_equal_plain_torch() -> None:
    mesh, w = MESHES[2,], random_tensor(3, 12, 8, seed=4)
    x, ends = random_tensor(7, 8), dt.distribute_tensor(ENDS, mesh, [R])
    a, b = dt.distribute_tensor(x, mesh, [R]), dt.distribute_tensor(random_tensor(3, 8, 12, seed=1), mesh, [Shard(0)])
    for cut in (Shard(0), Shard(0, sizes=(1, 2)), Shard(0, sizes=(0, 3)), Shard(1)):
        many = F.grouped_mm(a, b, offs=ends)
        one = F.grouped_mm(x, random_tensor(3, 8, 12, seed=1), offs=ENDS)
        got = F.grouped_mm(many, dt.distribute_tensor(w, mesh, [cut]), offs=ends)
        assert_equals(torch.exp(got), torch.exp(F.grouped_mm(one, w, offs=ENDS)))


def test_deepcopy_and_saved_file_drop_row_ownership() -> None:
    one, many = grouped_products(MESHES[2,])
    assert find_disjoint_rows(many) is not None
    file = io.BytesIO()
    torch.save(many, file)
    file.seek(0)
    for other in (copy.deepcopy(many), torch.load(file, weights_only=False)):
        assert find_disjoint_rows(other) is None
        assert_equals(torch.exp(other), torch.exp(one))


def test_grouped_matmul_rows_after_the_last_group_are_zero() -> None:
    ends = torch.tensor([2, 3, 5], dtype=torch.int32)
    _, many = grouped_products(MESHES[3,], ends)
    assert torch.equal(torch.exp(many).full_tensor()[5:], torch.ones(2, 12))


def test_replayed_program_is_right_for_inputs_without_row_ownership() -> None:
    captured = dt.capture(lambda h, g: torch.exp(h) * g)
    for seed in (0, 3):
        one, many = grouped_products(MESHES[2,], seed=seed)
        assert_equals(captured(many, many), torch.exp(one) * one)
    term = dt.DTensor.from_local(dt.per_rank([torch.ones(7, 12), torch.ones(7, 12)]), MESHES[2,], [SUM], shape=(7, 12))
    assert_equals(captured(term, term), torch.full((7, 12), 2.0).exp() * 2)


STEPS: list[Callable[..., Any]] = [
    torch.mul, torch.add, torch.sub, torch.div, torch.maximum, torch.atan2,
    lambda a, b: torch.cat([a, b], -1)[:, ::2].contiguous(),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a.t().contiguous().t() * b,
    lambda a, b: (a.flip(1) - b).exp(),
    lambda a, b: a.softmax(-1) * b,
    lambda a, b: a * b.sum(-1, keepdim=True),
    lambda a, b: a * b.sum(0),
    lambda a, b: a.flip(0) * b,
    lambda a, b: torch.addcmul(a, a, b),
    lambda a, b: torch.stack([a, b]).exp()[1],
    lambda a, b: a.detach().mul_(2) + b,
    lambda a, b: a.clone().add_(b).tanh(),
    lambda a, b: torch.exp_(a.clone()).mul_(b).sub_(a),
    lambda a, b: a.clone().clamp_(max=0.5).copy_(b).add_(1),
    lambda a, b: F.layer_norm(a, (12,)) + b,
    lambda a, b: a.view(7, 3, 4).tanh().reshape(7, 12) * b,
    lambda a, b: a.to(torch.float64).to(a.dtype) * b,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_random_programs_on_disjoint_partials_equal_plain_torch(shape: tuple[int, ...], seed: int) -> None:
    rng, mesh = random.Random(seed), MESHES[shape]
    cut = [Shard(0)] * mesh.ndim if seed % 3 == 0 else None
    values = [grouped_products(mesh, placements=cut), grouped_products(mesh, torch.tensor([4, 6, 7], dtype=torch.int32), seed=5)]
    whole = random_tensor(7, 12, seed=9)
    values.append((whole, dt.distribute_tensor(whole, mesh, rng.choice([[R] * mesh.ndim, [Shard(0)] + [R] * (mesh.ndim - 1)]))))
    with CheckForeignRowsAreZero():
        for _ in range(8):
            step, (a, b) = rng.choice(STEPS), rng.choices(values, k=2)
            expected, got = step(a[0], b[0]), step(a[1], b[1])
            assert_equals(got, expected)
            values.append((expected, got))
