"""Communication of unchanged modules on a sharded sequence: gradients of parameters are reduced once, keys and values are
gathered, and nothing else is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_with_one_device import assert_same_gradients
from torch import Tensor, nn
from torch.nn import functional as F

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode

N, BATCH, LENGTH, WIDTH = 4, 2, 16, 8
MESH = dt.init_device_mesh("cpu", (N,))
KEYS = 2 * (N - 1) * BATCH * LENGTH * WIDTH * 4 // N  # bytes of keys and values, gathered once


class Attention(nn.Module):
    """Hand-written attention with one fused projection, which ``how`` splits."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x)
        if self.how == "chunk":
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in fused.chunk(3, -1))
        else:
            q, k, v = fused.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "einsum":
            share = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
            mixed = torch.einsum("bhqk,bhkd->bhqd", share, v)
        else:
            mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    """Self-attention that also returns attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class WordsLoss(nn.Module):
    """Language model that returns a loss of the words of a sequence."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.norm, self.head, self.loss = nn.Embedding(12, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), loss

    def forward(self, words: Tensor) -> Tensor:
        return self.loss(self.head(self.norm(self.table(words))), words)


def cross_entropy_with_ignored_words(scores: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(scores.reshape(-1, 12), words.masked_fill(words == 3, -100).reshape(-1))


def sequence() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def words() -> Tensor:
    return torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 12


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "mlp": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)), sequence, 0),
    "gated": (lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GLU(), nn.Dropout(0.2)), sequence, 0),
    "cross_entropy": (lambda: WordsLoss(lambda x, y: F.cross_entropy(x.view(-1, 12), y.view(-1))), words, 12),
    "cross_entropy, some words ignored": (lambda: WordsLoss(cross_entropy_with_ignored_words), words, 12),
    "cross_entropy, label_smoothing": (lambda: WordsLoss(lambda x, y: F.cross_entropy(x.mT, y, label_smoothing=0.1)), words, 48),
    "cross_entropy, not reduced": (
        lambda: WordsLoss(lambda x, y: F.cross_entropy(x.view(-1, 12), y.view(-1), reduction="none").sum()),
        words,
        12,
    ),
    **{f"attention, {how}": (lambda how=how: Attention(how), sequence, 2 * KEYS) for how in ("chunk", "unbind", "einsum")},
    "attention with weights": (SelfAttention, sequence, 2 * KEYS),
    "encoder": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True), sequence, 2 * KEYS),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_on_sharded_sequence_communicate_only_keys_values_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    make, batch, beside = MODULES[name]
    one, x = make(), batch()
    model = dt.distribute_module(copy.deepcopy(one), MESH)
    given = dt.distribute_tensor(x, MESH, [Shard(1)])

    def step(model: Any, x: Any) -> Any:
        x = x.detach().requires_grad_(x.is_floating_point())
        torch.manual_seed(1)  # for equal dropout
        loss = model(x).square().mean()
        loss.backward()
        return loss, x.grad

    with CommDebugMode() as comm:
        loss, of_input = step(model, given)
    expected, of_plain = step(one, x)
    torch.testing.assert_close(loss.full_tensor(), expected)
    if of_plain is not None:
        assert of_input.placements == (Shard(1),)
        torch.testing.assert_close(of_input.full_tensor(), of_plain)
    assert_same_gradients(model, one, rtol=1e-4, atol=1e-6)
    gradients = sum(2 * (N - 1) * p.numel() * p.element_size() // N for p in one.parameters())
    assert sum(comm.get_comm_bytes().values()) <= gradients + beside


# --- gradients of gathered values ---------------------------------------------------------------------------------------
def test_gradient_of_gathered_value_is_reduce_scattered() -> None:
    torch.manual_seed(0)
    plain, query = torch.randn(3, 8, 4, requires_grad=True), torch.randn(8, 4)
    x, q = dt.distribute_tensor(plain.detach(), MESH, [Shard(1)]).requires_grad_(), dt.distribute_tensor(query, MESH, [Shard(0)])
    part, seen = x[1], []
    part.register_hook(lambda grad: seen.append(grad.placements))
    key = part.mul(2)
    with CommDebugMode() as comm:
        ((q @ key.t()).softmax(-1) @ key).square().sum().backward()
    block = 8 * 4 * 4 * (N - 1) // N
    assert comm.get_comm_bytes() == {"all_gather": block, "reduce_scatter": block}
    assert seen == [(Shard(0),)]
    ((query @ plain[1].mul(2).t()).softmax(-1) @ plain[1].mul(2)).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_transposes_of_one_slice_share_a_gathered_copy_until_it_is_written() -> None:
    both = dt.distribute_tensor(torch.randn(2, 8, 4), MESH, [Shard(1)]).requires_grad_().exp()
    q = dt.distribute_tensor(torch.randn(8, 4), MESH, [Shard(0)])
    with CommDebugMode() as comm:
        first = both[0].t()
        q @ first
        q @ both[0].t()
        q @ both[0].transpose(1, 0)
        assert comm.get_comm_counts() == {"all_gather": 1}
        q @ both[1].t()
        assert comm.get_comm_counts() == {"all_gather": 2}
        with torch.no_grad():
            both[0].mul_(2)
        torch.testing.assert_close((q @ first).full_tensor(), q.full_tensor() @ both.full_tensor()[0].t())


def test_second_derivatives_through_a_gathered_value_equal_plain_torch() -> None:
    plain, query = torch.randn(2, 8, 4, requires_grad=True, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    x, q = dt.distribute_tensor(plain.detach(), MESH, [Shard(1)]).requires_grad_(), dt.distribute_tensor(query, MESH, [Shard(0)])

    def penalty(x: Any, q: Any) -> Any:
        (grad,) = torch.autograd.grad(((q @ x[1].mul(2).t()) ** 3).sum(), x, create_graph=True)
        grad.square().sum().backward()
        return x.grad

    torch.testing.assert_close(penalty(x, q).full_tensor(), penalty(plain, query))


def test_gradients_of_fused_projection_use_one_exchange() -> None:
    """Check a fused projection sharded by rows: ranks have different heads of queries and keys, which one exchange per pass
    moves."""
    torch.manual_seed(0)
    fused, x = torch.randn(3 * 64, 64), torch.randn(BATCH, LENGTH, 64)

    def attended(x: Any, fused: Any) -> Any:
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(1, 2) for part in F.linear(x, fused).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    given, weight = (dt.distribute_tensor(t, MESH, [p]).requires_grad_() for t, p in ((x, Replicate()), (fused, Shard(0))))
    with CommDebugMode() as comm:
        loss = attended(given, weight).square().sum()
        loss.backward()
    assert comm.get_comm_counts()["all_to_all"] == 2
    assert comm.get_comm_bytes()["all_to_all"] == 2 * (BATCH * LENGTH * 4 * 8 * 4)  # four heads to the busiest rank, each way
    plain = [x.requires_grad_(), fused.requires_grad_()]
    attended(*plain).square().sum().backward()
    for got, one in zip((given, weight), plain, strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), one.grad, rtol=1e-4, atol=1e-4)


# --- windows over positions -------------------------------------------------------------------------------------------------
CONVOLUTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # positions that a rank receives in forward
    "same padding": (lambda x: F.conv1d(x, FILTER, padding=1), 2),
    "padded before": (lambda x: F.conv1d(F.pad(x, (2, 0)), FILTER), 2),
    "causal": (lambda x: F.conv1d(x, FILTER, padding=2)[..., :-2], 2),
    "depthwise": (lambda x: F.conv1d(x, FILTER[:, :1], padding=1, groups=32), 2),
    "stride 2": (lambda x: F.conv1d(x, FILTER, stride=2, padding=1), 2),
    "dilation 3": (lambda x: F.conv1d(x, FILTER, padding=3, dilation=3), 6),
    "disjoint windows": (lambda x: F.conv1d(x, FILTER[..., :2], stride=2), 0),
}
FILTER = torch.randn(32, 32, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("length", [512, 509])
def test_conv1d_on_sharded_positions_exchanges_only_halos(name: str, length: int) -> None:
    slide, halo = CONVOLUTIONS[name]
    plain = torch.randn(2, 32, length, requires_grad=True)
    x = dt.distribute_tensor(plain.detach(), MESH, [Shard(2)]).requires_grad_()
    expected = slide(plain)
    with dt.implicit_replication(), CommDebugMode() as comm:
        found = slide(x)
        forward = sum(comm.get_comm_bytes().values())
        found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-3)
    assert isinstance(found.placements[0], Shard)
    if length == 512:
        assert forward <= halo * 2 * 32 * 4
        assert sum(comm.get_comm_bytes().values()) <= 3 * halo * 2 * 32 * 4


def test_conv2d_on_images_sharded_by_rows_and_batch_equals_one_device() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1))
    one = copy.deepcopy(net)
    plain = torch.randn(2, 3, 8, 12)
    expected = one(plain)
    expected.square().sum().backward()
    model = dt.distribute_module(net, mesh)
    found = model(dt.distribute_tensor(plain, mesh, [Shard(2), Shard(0)]))
    assert found.placements == (Shard(2), Shard(0))
    found.square().sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected)
    assert_same_gradients(model, one, rtol=1e-4, atol=1e-5)


# --- operands with different shardings ----------------------------------------------------------------------------------
def test_cross_entropy_redistributes_labels_instead_of_logits() -> None:
    scores, words = torch.randn(4, 8, 12), torch.randint(0, 12, (4, 8))
    x = dt.distribute_tensor(scores, MESH, [Shard(0)]).requires_grad_()
    y = dt.distribute_tensor(words, MESH, [Shard(1)])
    with CommDebugMode() as comm:
        loss = F.cross_entropy(x.view(-1, 12), F.pad(y, (0, 1), value=-100)[:, 1:].reshape(-1))
        loss.backward()
    assert sum(comm.get_comm_bytes().values()) <= 4 * 8 * 8
    plain = scores.clone().requires_grad_()
    expected = F.cross_entropy(plain.view(-1, 12), F.pad(words, (0, 1), value=-100)[:, 1:].reshape(-1))
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


def test_backward_redistributes_only_the_operand_of_forward() -> None:
    torch.manual_seed(0)
    plain, other = torch.randn(8, 16, 32), torch.randn(8, 16, 32)
    x, y = (dt.distribute_tensor(t, MESH, [Shard(d)]).requires_grad_() for d, t in ((1, plain), (0, other)))
    with CommDebugMode() as comm:
        early = x.exp().tanh()
        late = y.exp().tanh()
        (early + late).sin().square().sum().backward()
    once = 8 * 16 * 32 * 4 // N * (N - 1) // N  # one operand of the sum, in forward and in backward
    assert comm.get_comm_bytes() == {"all_to_all": 2 * once}
    a, b = plain.requires_grad_(), other.requires_grad_()
    (a.exp().tanh() + b.exp().tanh()).sin().square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), a.grad)
    torch.testing.assert_close(y.grad.full_tensor(), b.grad)
