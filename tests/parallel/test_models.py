"""Unmodified models with distributed parameters: outputs, losses and all gradients equal those of plain torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_case_marks import keep_diagonals_fast
from torch import Tensor, nn

import dtensor as dt
from dtensor import Placement, Replicate, Shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


# --- models: plain modules without meshes ---------------------------------------------------------------------------
class LlamaBlock(nn.Module):
    """Pre-norm attention with rotary positions and fewer key heads, and a gated feed-forward network."""

    def __init__(self, dim: int = 16, heads: int = 4, key_heads: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, dim // heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq = nn.Linear(dim, heads * self.size, bias=False)
        self.wk = nn.Linear(dim, key_heads * self.size, bias=False)
        self.wv = nn.Linear(dim, key_heads * self.size, bias=False)
        self.wo = nn.Linear(heads * self.size, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        own = self.attention_norm(x)
        q = self.wq(own).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.wk(own).view(batch, length, self.key_heads, self.size).transpose(1, 2)
        v = self.wv(own).view(batch, length, self.key_heads, self.size).transpose(1, 2)
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(out.transpose(1, 2).reshape(batch, length, -1))
        own = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(own)) * self.w3(own))


class Llama(nn.Module):
    def __init__(self, vocabulary: int = 19, dim: int = 16, length: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length), 10.0 ** -torch.arange(2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class GPTBlock(nn.Module):
    """Pre-norm attention from one projection and matrix products, and a GELU network."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(dim, dim=2)
        q, k, v = (t.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / (dim // self.heads) ** 0.5
        weights = scores.masked_fill(~self.mask[:length, :length], float("-inf")).softmax(-1)
        x = x + self.c_proj((weights @ v).transpose(1, 2).contiguous().view(batch, length, dim))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocabulary: int = 19, dim: int = 8, length: int = 6) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(GPTBlock(dim, 2, length) for _ in range(2))
        self.ln_f = nn.LayerNorm(dim)
        self.register_buffer("positions", torch.arange(length))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(self.positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)  # tied to the embedding


class ConvNet(nn.Module):
    def __init__(self, classes: int = 7) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


# --- how parameters are placed --------------------------------------------------------------------------------------
Plan = Callable[[int, Tensor], list[Placement]]


def replicated(k: int, p: Tensor) -> list[Placement]:
    return [R, R]


def alternating(k: int, p: Tensor) -> list[Placement]:
    """Shard columns and rows in turn along tp."""
    return [R, Shard(k % 2 if p.ndim > 1 else 0) if p.ndim else R]


def everywhere(k: int, p: Tensor) -> list[Placement]:
    """Shard dim 0 along both mesh dims."""
    return [S0, S0] if p.ndim else [R, R]


def crossed(k: int, p: Tensor) -> list[Placement]:
    """Shard dim 0 along dp and the last dim along tp."""
    return [S0, Shard(p.ndim - 1)] if p.ndim else [R, R]


PLANS = [replicated, alternating, everywhere, crossed]


def tokens() -> Tensor:
    return torch.randint(0, 19, (5, 6), generator=torch.Generator().manual_seed(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def cross_entropy_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def squared_error_loss(out: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(out, targets)


# name -> model, its input, the loss and its target
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, Any, Tensor]] = {
    "llama": (Llama, tokens(), cross_entropy_loss, tokens().roll(-1, 1)),
    "gpt2": (GPT2, tokens(), cross_entropy_loss, tokens().roll(-1, 1)),
    "convnet": (ConvNet, numbers(5, 3, 7, 6), cross_entropy_loss, torch.tensor([0, 6, 3, 3, 1])),
    "encoder layer": (encoder_layer, numbers(5, 6, 8), squared_error_loss, numbers(5, 6, 8).flip(0)),
    "encoder layer, norm first": (
        lambda: encoder_layer(norm_first=True, activation="gelu"),
        numbers(5, 6, 8),
        squared_error_loss,
        numbers(5, 6, 8).flip(0),
    ),
}


def distribute_copy(module: nn.Module, plan: Plan) -> nn.Module:
    """Return a copy with parameters placed by ``plan`` and replicated buffers; tied parameters stay tied."""
    module, seen = copy.deepcopy(module), {}
    for own in module.modules():
        for name, p in own.named_parameters(recurse=False):
            made = seen.setdefault(p, nn.Parameter(dt.distribute_tensor(p.detach(), MESH, plan(len(seen), p))))
            setattr(own, name, made)
        for name, buffer in own.named_buffers(recurse=False):
            setattr(own, name, dt.distribute_tensor(buffer, MESH, [R, R]))
    return module


def build_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def is_close(got: Any, expected: Tensor) -> bool:
    return torch.allclose(got.full_tensor(), expected, rtol=1e-8, atol=1e-10)


@pytest.fixture
def no_gather_fallback() -> Iterator[None]:
    """Raise if an operator has no rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no sharding rule.*")
        yield


@pytest.mark.usefixtures("no_gather_fallback")
@pytest.mark.parametrize(("name", "plan", "inputs"), keep_diagonals_fast(MODELS, PLANS, [[S0, R], [R, R], [S0, S1]], every=3))
def test_training_step_of_models_equals_plain_torch(name: str, plan: Plan, inputs: list[Placement]) -> None:
    plain, (_, own, loss_of, target) = build_model(name), MODELS[name]
    model = distribute_copy(plain, plan)
    expected = plain(own)
    got = model(dt.distribute_tensor(own, MESH, inputs))
    assert is_close(got, expected)
    target_placements = [S0, R] if inputs[0] == S0 else [R, R]
    loss, wanted = loss_of(got, dt.distribute_tensor(target, MESH, target_placements)), loss_of(expected, target)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-10)
    loss.backward()
    wanted.backward()
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and p.grad.placements == p.placements, key  # noqa: PT018
        assert is_close(p.grad, q.grad), key
    for (key, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert is_close(b, c), key


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", MODELS)
def test_evaluation_of_models_equals_plain_torch(name: str, mode: Any, plan: Plan) -> None:
    plain, own = build_model(name).eval(), MODELS[name][1]
    model = distribute_copy(plain, plan).eval()
    with mode():
        assert is_close(model(dt.distribute_tensor(own, MESH, [S0, R])), plain(own))


def test_three_adamw_steps_with_clipping_equal_plain_torch() -> None:
    plain, (_, own, loss_of, target) = build_model("gpt2"), MODELS["gpt2"]
    model = distribute_copy(plain, everywhere)
    for step in range(3):
        for m, given, wanted in ((plain, own, target), (model, *(dt.distribute_tensor(t, MESH, [S0, R]) for t in (own, target)))):
            optimizer = m.__dict__.setdefault("optimizer", torch.optim.AdamW(m.parameters(), lr=1e-2))
            optimizer.zero_grad()
            loss_of(m(given), wanted).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p.full_tensor(), q, rtol=1e-6, atol=1e-8), step
