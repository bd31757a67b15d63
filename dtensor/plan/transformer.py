"""Sizes of decoder-only transformers, and what follows from them: parameters, products, what a layer keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder with grouped-query attention, SwiGLU, RMS norms, rotations and no biases.

    Attributes:
        ffn: hidden features of the feed-forward network, of each expert where there are ``experts``.
        chosen: experts that a token goes through.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    experts: int = 1
    chosen: int = 1

    @property
    def kv(self) -> int:
        """Features of the keys, as many as of the values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def attention_parameters(self) -> int:
        """Of one layer, its two norms included."""
        return 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv + 2 * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Of one layer's experts."""
        return 3 * self.hidden * self.ffn * self.experts

    @property
    def router_parameters(self) -> int:
        """Of one layer."""
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def parameters(self) -> int:
        """All of them; the head is not that of the embedding."""
        layer = self.attention_parameters + self.expert_parameters + self.router_parameters
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    def layer_flops(self, sequence: int) -> float:
        """Forward products of one layer for one token, the causal half of the attention counted."""
        used = self.attention_parameters + self.router_parameters + 3 * self.hidden * self.ffn * self.chosen
        return 2 * used + self.attention_flops(sequence)

    def attention_flops(self, sequence: int) -> float:
        """Those of scores and of what they weigh, the causal half."""
        return 2 * sequence * self.hidden

    @property
    def head_flops(self) -> float:
        """Forward products of the head for one token."""
        return 2 * self.vocabulary * self.hidden

    @property
    def kept(self) -> int:
        """Elements that a layer keeps for backward, for one token: inputs of norms and of products, queries, keys, values, what
        attention gives; the activation's result is made again.
        """
        return 6 * self.hidden + 2 * self.kv + 3 * self.ffn * self.chosen


# as published with the weights
MODELS = {
    "llama3-8b": Transformer(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": Transformer(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": Transformer(126, 16384, 128, 8, 53248, 128256),
    "mixtral-8x7b": Transformer(32, 4096, 32, 8, 14336, 32000, experts=8, chosen=2),
}
