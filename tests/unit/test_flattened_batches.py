"""Flattened batches: matmuls that torch flattens into 2-d keep the sharding of inner batch dims, without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_case_marks import keep_diagonals_fast
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import check, scatter

MESH = dt.init_device_mesh("cpu", (2, 2))
R = Replicate()
BATCH_PLACEMENTS = [
    [R, Shard(1)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(1), R],
    [Shard(2), Shard(1)],
]
WEIGHTS = [[R, R], [R, Shard(0)], [Shard(1), R], [Shard(0), Shard(1)], [Partial(), R]]


def write_flattened(x: Any, w: Any) -> Any:
    rows = x.reshape(-1, x.shape[-1]) @ w.t()
    rows.add_(1)
    rows[2].mul_(3)
    return rows.view(*x.shape[:-1], -1), rows.relu(), rows.sum(0)


def conv1d(x: Any, w: Any, b: Any) -> Any:
    """``Conv1D`` of GPT-2 in Hugging Face transformers."""
    return torch.addmm(b, x.view(-1, x.size(-1)), w.t()).view(*x.shape[:-1], w.shape[0])


PROGRAMS: list[tuple[Callable[..., Any], bool]] = [
    (F.linear, True),
    (F.linear, False),
    (lambda x, w: x @ w.t(), False),
    (conv1d, True),
    (write_flattened, False),
    (lambda x, w: (x.reshape(-1, 7).sum(0, keepdim=True), x.reshape(-1, 7).sum([-2]), F.linear(x, w)), False),
    (lambda x, w: (x.reshape(-1, 7).t() @ x.reshape(-1, 7), w @ x.reshape(-1, 7).t(), x.reshape(-1, 7).mm(w.t())), False),
    (lambda x, w: F.linear(F.linear(x, w).relu(), w.t()), False),
    (lambda x, w: F.linear(x.unsqueeze(1), w), False),
    (lambda x, b: torch.addmm(b[:, None], x.reshape(-1, 7), x.reshape(-1, 7).t()[:, :4], beta=2), True),
]


@pytest.mark.parametrize(("case", "batch"), keep_diagonals_fast(PROGRAMS, BATCH_PLACEMENTS))
def test_matmul_of_a_sharded_batch_equals_plain_torch(case: tuple[Callable[..., Any], bool], batch: Any) -> None:
    program, biased = case
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 5, 7), (6, 7), (6,)))
    weight = WEIGHTS[(BATCH_PLACEMENTS.index(batch) + 2 * [p for p, _ in PROGRAMS].index(program)) % len(WEIGHTS)]
    if biased and program is PROGRAMS[-1][0]:
        check(program, x, x[0, 0, :1].expand(15).contiguous(), mesh=MESH, placements=[batch, [R, R]])
    elif biased:
        check(program, x, w, b, mesh=MESH, placements=[batch, weight, [Shard(0), R]])
    else:
        check(program, x, w, mesh=MESH, placements=[batch, weight], cotangents=[Shard(1), Partial()])


@pytest.mark.parametrize("batch", BATCH_PLACEMENTS[:4], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_a_sharded_batch_only_all_reduces_parameter_gradients(batch: Any, bias: bool) -> None:
    x = dt.distribute_tensor(torch.randn(3, 5, 7), MESH, batch).requires_grad_()
    layer = dt.distribute_module(torch.nn.Linear(7, 6, bias=bias), MESH)
    with dt.explicit():
        y = layer(x)
        assert y.placements == x.placements
        with dt.debug.CommDebugMode() as comm:
            y.backward(torch.ones_like(y))
    assert x.grad.placements == x.placements
    assert dict(comm.get_comm_counts()) == {"all_reduce": 1}
    nbytes = sum(p.numel() * p.element_size() for p in layer.parameters())
    ranks = 2 if Replicate() in batch else 4
    assert dict(comm.get_comm_bytes()) == {"all_reduce": 2 * nbytes * (ranks - 1) // ranks}


HEAD_PLACEMENTS = [
    [R, Shard(1)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(2), Shard(1)],
    [R, Partial()],
]
ATTENTIONS: list[Callable[..., Any]] = [
    lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) * 0.4, dim=-1) @ v,
    lambda q, k, v: torch.bmm(q.reshape(-1, 4, 7), k.reshape(-1, 5, 7).transpose(1, 2)).view(3, 5, 4, 5).tanh() @ v,
    lambda q, k, v: q.flatten(0, 1) @ v.flatten(0, 1).mT + k.flatten(0, 1)[:, :4, :5],  # products of flattened batches
    lambda q, k, v: (q.flatten(0, 1) @ k.flatten(0, 1).mT, torch.bmm(q.flatten(0, 1), v.flatten(0, 1)[:, :1].mT)),
]


@pytest.mark.parametrize(("attention", "heads"), keep_diagonals_fast(ATTENTIONS, HEAD_PLACEMENTS))
def test_batched_matmuls_of_attention_equal_plain_torch(attention: Callable[..., Any], heads: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 5, n, 7, dtype=torch.float64, generator=generator) for n in (4, 5, 5))
    others = [
        HEAD_PLACEMENTS[(HEAD_PLACEMENTS.index(heads) + n * ATTENTIONS.index(attention)) % len(HEAD_PLACEMENTS)] for n in (1, 2)
    ]
    check(attention, q, k, v, mesh=MESH, placements=[heads, heads, heads])
    check(attention, q, k, v, mesh=MESH, placements=[heads, *others])


FLATTENED_PROGRAMS: list[Callable[..., Any]] = [
    lambda x, w: F.layer_norm(x, (7,), w[0], w[1]).relu() * x + w[2],
    lambda x, w: torch.cat([x, x * 2], 1).softmax(-1).topk(3, 1),
    lambda x, w: (x.t() @ x, x.t().tanh().t(), (x.t() * w[:, :1].T).sum(1), x.sum(0), x.prod(1)),
    lambda x, w: (x[:, 2:5].exp(), x[3:9].exp(), x[4] * x, x.unsqueeze(1).expand(-1, 2, 7).sum((0, 1)), x.flip(0), x.cumsum(0)),
    lambda x, w: (x.max(0), x.argmax(1), x.sort(0), x.mean(0), x.var(0), x.amax(0), x.std(1), torch.where(x > 0, x, x[:1])),
    lambda x, w: (x.gather(1, x.argsort(1)), x.tril(), F.pad(x, (1, 1)), x.masked_fill(x < 0, 1).log_softmax(1), x[x > 0].sum()),
    lambda x, w: (
        F.cross_entropy(x, x.argmax(1)),
        F.embedding(x.argmax(1), w),
        F.mse_loss(x, x.roll(1, 0)),
        x.reshape(5, 3, 7).sin(),
    ),
    lambda x, w: (
        torch.addcmul(x, x, x[0]),
        torch.baddbmm(x[:, None], x[:, :, None], x[:, None]),
        x.view(3, 5, 7, 1) * 2,
        x.norm(),
    ),
]


@pytest.mark.parametrize(("program", "batch"), keep_diagonals_fast(FLATTENED_PROGRAMS, BATCH_PLACEMENTS, every=3))
def test_operators_on_a_flattened_batch_equal_plain_torch(program: Callable[..., Any], batch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 5, 7), (7, 7)))
    check(lambda x, w: program(x.view(-1, 7), w), x, w, mesh=MESH, placements=[batch, [R, Shard(0)]])
    check(lambda x, w: program(x.view(-1, 7), w), x.transpose(0, 1).contiguous(), w, mesh=MESH, placements=[batch, [R, R]])


REGROUPING_PROGRAMS: list[Callable[..., Any]] = [
    lambda x, w: F.linear(x.view(-1, 8), w).view(3, 5, -1),
    lambda x, w: F.linear(x.view(-1, 8), w).view(3, 5, 3, 2).tanh(),
    lambda x, w: F.linear(x.reshape(15, 8).t().relu().t(), w) @ x.view(15, 8).sum(0)[:6],
    lambda x, w: (x.view(-1, 2, 4).sum(-1), x.view(3, 10, 4) * 2, x.view(30, 4).cumsum(0), x.view(-1), x.view(5, 24).exp()),
]


def write_regrouped(x: Any, w: Any) -> Any:
    y = x * 1
    rows = y.view(15, 8)
    before = rows[4] * 1
    y[1].add_(1)
    rows[2:9].mul_(2)
    rows.view(15, 2, 4)[:, 1].sub_(w[0, :4])
    return before, rows * 1, y


@pytest.mark.parametrize(
    ("program", "batch"), keep_diagonals_fast([*REGROUPING_PROGRAMS, write_regrouped], [*BATCH_PLACEMENTS, [Shard(2), Shard(1)]])
)
def test_view_that_flattens_batch_and_last_dims_equals_plain_torch(program: Callable[..., Any], batch: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 5, 2, 4), (6, 8)))
    check(program, x, w, mesh=MESH, placements=[batch, [R, R]])
    check(program, x, w, mesh=MESH, placements=[batch, [R, Shard(0)]])


@pytest.mark.parametrize("batch", [*BATCH_PLACEMENTS, [Shard(2), Shard(1)]], ids=str)
@pytest.mark.parametrize("shape", [(1, 15, 4, 2), (1, 15, 8)])
def test_batch_norm_of_flattened_channels_updates_running_statistics(shape: tuple[int, ...], batch: Any) -> None:
    def program(x: Any, mean: Any, variance: Any) -> Any:
        out = F.batch_norm(x.view(shape), mean, variance, training=True)
        return out, mean, variance

    generator = torch.Generator().manual_seed(0)
    x, mean, variance = (torch.rand(*sizes, dtype=torch.float64, generator=generator) for sizes in ((3, 5, 4, 2), (15,), (15,)))
    placed = [batch, [R, R], [Shard(0), Shard(0)]]
    check(program, x, mean, variance, mesh=MESH, placements=placed, cloned=True, gradients=False)


@pytest.mark.parametrize("batch", BATCH_PLACEMENTS[:4], ids=str)
def test_linear_of_flattened_batch_and_last_dims_needs_no_communication(batch: Any) -> None:
    x = dt.distribute_tensor(torch.randn(3, 5, 2, 4), MESH, batch).requires_grad_()
    w = dt.distribute_tensor(torch.randn(6, 8), MESH, [R, R])
    with dt.budget(bytes=0):
        y = F.linear(x.view(-1, 8), w).view(3, 5, 6)
        y.backward(torch.ones_like(y))
    assert y.placements == x.grad.placements == tuple(batch)


@pytest.mark.parametrize("placement", [Shard(1), Partial(), R], ids=str)
def test_writes_through_flat_views_of_another_dtype_reach_the_base(placement: Any) -> None:
    def program(x: Any) -> Any:
        y = x * 1
        y.view(torch.int64).view(-1)[None].fill_(3)
        y.view(torch.int64).flatten()[4:6].unsqueeze(0).mul_(2)
        return y

    check(program, torch.randn(3, 4, dtype=torch.float64), mesh=MESH, placements=[[placement, R]], gradients=False)


@pytest.mark.parametrize("batch", [BATCH_PLACEMENTS[0], BATCH_PLACEMENTS[1], BATCH_PLACEMENTS[3]], ids=str)
def test_normalization_and_sort_of_a_flattened_batch_keep_its_placements(batch: Any) -> None:
    x = dt.distribute_tensor(torch.randn(4, 6, 7), MESH, batch)
    one = dt.distribute_tensor(torch.randn(24, 1), MESH, [R, R])
    with dt.explicit():
        rows = x.view(-1, 7)
        made = torch.cat([F.layer_norm(rows, (7,)) * one, rows.t().exp().t().softmax(1)], 1).sort(1).values
        assert made.view(4, 6, 14).placements == x.placements
        added = torch.baddbmm(one[:, None], rows[:, None], rows[:, :, None])
        assert added.view(4, 6, 1).placements == x.placements


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEAD_PLACEMENTS[:4], ids=str)
def test_math_attention_over_sharded_heads_needs_no_communication(heads: Any, causal: bool) -> None:
    q, k, v = (dt.distribute_tensor(torch.randn(3, 5, 4, 7), MESH, heads).requires_grad_() for _ in range(3))
    with dt.explicit(), sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert y.placements == tuple(heads)
        y.backward(torch.ones_like(y))
    assert all(x.grad.placements == x.placements for x in (q, k, v))


def test_linear_of_a_sharded_batch_passes_gradgradcheck() -> None:
    x = dt.distribute_tensor(torch.randn(2, 3, 2, dtype=torch.float64), MESH, [R, Shard(1)]).requires_grad_()
    w = dt.distribute_tensor(torch.randn(2, 2, dtype=torch.float64), MESH, [R, R]).requires_grad_()
    with dt.implicit_replication():  # gradgradcheck mixes in plain tensors
        assert torch.autograd.gradgradcheck(lambda x, w: F.linear(x, w).sin(), (x, w), fast_mode=True)


def test_linear_of_a_sharded_batch_in_each_dtype_and_autocast_equals_plain_torch() -> None:
    x, w, b = torch.randn(3, 5, 7), torch.randn(6, 7), torch.randn(6)
    placements = [[Shard(1), R], [R, R], [R, R]]
    check(F.linear, x.bfloat16(), w.bfloat16(), b.bfloat16(), mesh=MESH, placements=placements)
    with torch.autocast("cpu", torch.bfloat16):
        check(F.linear, x, w, b, mesh=MESH, placements=placements, tolerance=(5e-2, 5e-2))
    check(F.linear, x.long(), w.long(), mesh=MESH, placements=placements[:2], gradients=False)
    check(F.linear, x.cfloat(), w.cfloat(), mesh=MESH, placements=placements[:2])


def test_captured_linear_of_a_sharded_batch_equals_eager() -> None:
    w = dt.distribute_tensor(torch.randn(4, 7), MESH, [R, R]).requires_grad_()
    layer = dt.capture(lambda x: (F.linear(x, w), x.view(-1, 7) @ w.t()))
    for size in (5, 1):
        for _ in range(3):
            x = dt.distribute_tensor(torch.randn(3, size, 7), MESH, [R, Shard(1)]).requires_grad_()
            batch, rows = layer(x)
            assert torch.equal(batch.full_tensor(), F.linear(x, w).full_tensor())
            (found,) = torch.autograd.grad((batch * 2).sum() + rows.sum(), x)
            (expected,) = torch.autograd.grad((F.linear(x, w) * 2).sum() + (x.view(-1, 7) @ w.t()).sum(), x)
            torch.testing.assert_close(found.full_tensor(), expected.full_tensor())


@pytest.mark.parametrize("heads", [[R, Shard(1)], [Shard(0), Shard(1)]])
def test_repeated_batched_matmuls_of_new_values_equal_plain_torch(heads: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, y = (torch.randn(3, 4, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        a, b = (dt.distribute_tensor(value, MESH, heads).requires_grad_() for value in (x, y))
        x.requires_grad_(), y.requires_grad_()
        product, expected = a @ b.transpose(-2, -1), x @ y.transpose(-2, -1)
        torch.testing.assert_close(product.full_tensor(), expected)
        for own, other in zip(
            torch.autograd.grad(product.sum(), (a, b)), torch.autograd.grad(expected.sum(), (x, y)), strict=True
        ):
            torch.testing.assert_close(own.full_tensor(), other)


def test_bmm_of_a_flattened_view_uses_values_written_later() -> None:
    x, y = (torch.arange(24.0).view(2, 3, 2, 2) + k for k in range(2))
    a, b = (dt.distribute_tensor(value, MESH, [R, Shard(1)]) for value in (x, y))
    flattened, plain = (value.view(6, 2, 2) for value in (a, x))
    torch.testing.assert_close((flattened @ b.view(6, 2, 2)).full_tensor(), plain @ y.view(6, 2, 2))
    for view in (flattened, plain):
        view.mul_(3)
    torch.testing.assert_close((flattened @ b.view(6, 2, 2)).full_tensor(), plain @ y.view(6, 2, 2))
    torch.testing.assert_close(a.full_tensor(), x)


def with_flattened(s: Any) -> tuple[Any, ...]:
    return s, s.flatten(0, 1)


# Aliases of one batch. All are read before each of them is written to.
ALIASES: list[Callable[[Any], tuple[Any, ...]]] = [
    lambda s: (*with_flattened(s), s.flatten(0, 1).mT),
    lambda s: (s, s.flatten(0, 1).mT.view(4, 6), s.flatten(0, 1).mT[1:3]),
    lambda s: (s, s.flatten(0, 1).mT.detach(), s.flatten(0, 1).t_()),
    lambda s: (h := s.flatten(0, 1) * 2, h.mT),  # a result with sharded inner batch dims, and a view of it
    lambda s: (h := s.flatten(0, 1) * 2, h.view(2, 3, 4), h.mT.mT, h[2:4]),
]


@pytest.mark.parametrize("placement", [Shard(1), Shard(0), Partial()], ids=str)
@pytest.mark.parametrize("make_aliases", ALIASES)
def test_aliases_of_flattened_batches_have_the_values_of_later_writes(
    make_aliases: Callable[[Any], tuple[Any, ...]], placement: Any
) -> None:
    x = torch.arange(24.0, dtype=torch.float64).view(2, 3, 4)
    count = len(make_aliases(x))
    for written in range(count):
        expected, found = make_aliases(x.clone()), make_aliases(scatter(x, dt.init_device_mesh("cpu", (4,)), [placement]))
        for value in found:
            value.full_tensor()
        for values in (expected, found):
            values[written].mul_(3)
        for i, (value, plain) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(value.full_tensor(), plain), (written, i)
