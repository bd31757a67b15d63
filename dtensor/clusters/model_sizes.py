"""Model sizes of decoder-only transformers, and the FLOPs of a token in them, for MFU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transformer:
    """Decoder with grouped-query attention, RMS norms, rotary positions and no biases.

    Attributes:
        ffn: hidden features of the feed-forward network; with ``experts``, of each expert.
        chosen: number of experts per token.
        gated: SwiGLU, with three matrices; else GELU between two.

    Numbers only: no communication.

    >>> Transformer(32, 4096, 32, 8, 14336, 128256).parameters
    8030261248
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    experts: int = 1
    chosen: int = 1
    gated: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def expert_parameters(self) -> int:
        """Return the number of parameters of one feed-forward network."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def attention_parameters(self) -> int:
        """Return the number of parameters of one layer without its feed-forward networks: attention, norms and router."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return 2 * self.hidden * (self.hidden + self.head_dim * self.kv_heads) + 2 * self.hidden + router

    @property
    def parameters(self) -> int:
        """Return the number of all parameters. The head does not share the weight of the embedding."""
        layer = self.attention_parameters + self.expert_parameters * self.experts
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    def flops(self, sequence: int) -> float:
        """Return the FLOPs of one token in a forward pass, with attention to all tokens, as published MFU counts them.

        See Chowdhery et al. 2022, "PaLM", arXiv:2204.02311, appendix B.
        """
        layer = self.attention_parameters + self.expert_parameters * self.chosen + 2 * sequence * self.hidden
        return 2.0 * (self.layers * layer + self.vocabulary * self.hidden)


# as published with the weights
MODELS = {
    "llama3-8b": Transformer(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": Transformer(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": Transformer(126, 16384, 128, 8, 53248, 128256),
    "mixtral-8x7b": Transformer(32, 4096, 32, 8, 14336, 32000, experts=8, chosen=2),
}
