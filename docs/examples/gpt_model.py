"""A small GPT in plain torch. Nothing in this file knows that tensors can be distributed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Config:
    """The sizes of a model."""

    vocabulary: int
    context: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2

    @property
    def hidden(self) -> int:
        return 4 * self.width


class Attention(nn.Module):
    """Causal attention of several heads, positions given by rotation."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.heads(self.query(x)), cos, sin)
        key = rotate(self.heads(self.key(x)), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, self.heads(self.value(x)), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, head, time, head_dim)"""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Tokens (batch, time) -> logits (batch, time, vocabulary)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        angles = rotary_angles(config.context, config.width // config.heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        cos, sin = self.cos[:time], self.sin[:time]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of the next token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotary_angles(context: int, head_dim: int) -> Tensor:
    """(context, head_dim): position times frequency, the frequencies given twice."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(context)[:, None] * frequencies
    return torch.cat([angles, angles], dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x[i], x[i + head_dim / 2]) turned by its position's angle."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin
