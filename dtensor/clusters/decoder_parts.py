"""Decoder parts as modules, and how tensor, sequence, context and expert parallelism shard them.

These are programs of one rank over local tensors, like those of Megatron and torchtitan. Between parts a rank has its part of
the sequence, inside of attention its heads, of a feed-forward network its columns, of a mixture its experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry as PRODUCTS

from ..mesh.device_mesh import DeviceMesh
from ..parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from ..parallel.tensor.context_parallel import RingAttentionMode
from ..parallel.tensor.cp_sequence_order import SequenceOrder
from ..placement import Replicate, Shard
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from .model_sizes import Transformer

# operations that backward recomputes, so that less memory is saved for it
RECOMPUTATIONS = (
    "nothing",
    "elementwise",
    "everything",
)


class Attention(nn.Module):
    """Causal attention with rotary positions. ``cp`` shards the sequence, and keys and values are passed around the ring."""

    plan: ClassVar[dict[str, ParallelStyle]] = {
        "": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
        **{name: ColwiseParallel() for name in ("query", "key", "value")},
        "out": RowwiseParallel(output_layouts=Shard(1)),
    }

    def __init__(self, model: Transformer, cp: DeviceMesh, sequence: int) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.ring = RingAttentionMode(cp, SequenceOrder(sequence, cp.size(), True)) if cp.size() > 1 else None
        kv = model.kv_heads * model.head_dim
        self.query = nn.Linear(model.hidden, model.hidden, bias=False)
        self.key = nn.Linear(model.hidden, kv, bias=False)
        self.value = nn.Linear(model.hidden, kv, bias=False)
        self.out = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return causal attention of this rank's heads, with rotary positions, for the activations ``x``."""
        query, key, value = (self.split_heads(each(x)) for each in (self.query, self.key, self.value))
        mixed = self.attend(_apply_rotary(query, cos, sin), _apply_rotary(key, cos, sin), value)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output

    def split_heads(self, x: Tensor) -> Tensor:
        """Return (batch, time, features) reshaped to (batch, head, time, features of a head)."""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention over the ring of context-parallel ranks, or local attention if there is none."""
        if self.ring is not None:
            return self.ring.attention(query, key, value, is_causal=True, enable_gqa=True)
        if query.is_meta:  # on meta tensors torch does not choose a fused kernel
            output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
            return output
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class FeedForward(nn.Module):
    """Feed-forward network: SwiGLU, or GELU between two matrices."""

    plan: ClassVar[dict[str, ParallelStyle]] = {
        "": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.gate = nn.Linear(model.hidden, model.ffn, bias=False) if model.gated else None
        self.up = nn.Linear(model.hidden, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the feed-forward network for the activations ``x``."""
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        output: Tensor = self.down(inner)
        return output


class MixtureOfExperts(nn.Module):
    """Mixture of SwiGLU experts with expert choice routing (Zhou et al. 2022, arXiv:2202.09368).

    Each expert takes the same number of tokens: those with its best scores. Tokens are sent to the ranks of their experts, and
    back.
    """

    plan: ClassVar[dict[str, ParallelStyle]] = {"router": SequenceParallel()}

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        super().__init__()
        self.chosen, self.mesh = model.chosen, mesh
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.experts = Experts(model, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Send tokens to the ranks of the experts that chose them, and return the weighted sums of the outputs."""
        tokens = unwrap_dtensor(x).flatten(0, 1)
        scores = unwrap_dtensor(self.router(x)).flatten(0, 1).softmax(-1)
        count = scores.shape[1]
        weights, numbers = scores.t().topk(max(1, len(tokens) * self.chosen // count))
        here, there = [Shard(1), Shard(1)], [Replicate(), Shard(0)]
        shape = (count, weights.shape[1] * self.mesh.size(), tokens.shape[1])
        sharded_tokens = DTensor.from_local(tokens[numbers], self.mesh, here, shape=shape)
        outputs = self.experts(sharded_tokens.redistribute(placements=there)).redistribute(placements=here).to_local()
        rows = (outputs * weights.unsqueeze(-1)).flatten(0, 1)
        return torch.zeros_like(tokens).index_add(0, numbers.flatten(), rows).view(unwrap_dtensor(x).shape)


class Experts(nn.Module):
    """Weight matrices of all experts: columns sharded over the first mesh dim, experts over the second."""

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        super().__init__()
        columns, rows = [Shard(2), Shard(0)], [Shard(1), Shard(0)]
        wide, tall = (model.experts, model.hidden, model.ffn), (model.experts, model.ffn, model.hidden)
        for name, shape, placements in (("gate", wide, columns), ("up", wide, columns), ("down", tall, rows)):
            self.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(shape), mesh, placements)))

    def forward(self, x: Any) -> Any:
        return (F.silu(x @ self.gate) * (x @ self.up)) @ self.down


class DecoderLayer(nn.Module):
    """Decoder layer: attention and feed-forward halves. ``again`` is what backward recomputes (:data:`RECOMPUTATIONS`)."""

    def __init__(self, model: Transformer, mesh: DeviceMesh, sequence: int, again: str = "nothing") -> None:
        """Make the two halves of a layer, and shard their matrices over the mesh dim ``tp``."""
        super().__init__()
        self.again, self.last = again, _LastProduct()
        self.attention_norm = nn.RMSNorm(model.hidden)
        self.attention = Attention(model, mesh["cp"], sequence)
        self.mixing_norm = nn.RMSNorm(model.hidden)
        self.mixing = MixtureOfExperts(model, mesh["tp", "ep"]) if model.experts > 1 else FeedForward(model)
        plan: dict[str, ParallelStyle] = {"attention_norm": SequenceParallel(), "mixing_norm": SequenceParallel()}
        for name, part in (("attention", self.attention), ("mixing", self.mixing)):
            styles = {
                name_in_part: style for name_in_part, style in part.plan.items() if getattr(part, name_in_part, part) is not None
            }
            plan |= {f"{name}.{name_in_part}".rstrip("."): style for name_in_part, style in styles.items()}
        parallelize_module(self, mesh["tp"], plan)
        self.last.watch_modules(self.attention.out, getattr(self.mixing, "down", None))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the layer's output, computed inside of a checkpoint if backward recomputes all of it."""
        if self.again == "everything":
            output: Tensor = checkpoint(self.run_layer, x, cos, sin, use_reentrant=False)
            return output
        return self.run_layer(x, cos, sin)

    def run_layer(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``x`` with the outputs of the attention and feed-forward halves added."""
        x = x + self.run_half(lambda x: unwrap_dtensor(self.attention(self.attention_norm(x), cos, sin)), x)
        return x + self.run_half(lambda x: unwrap_dtensor(self.mixing(self.mixing_norm(x))), x)

    def run_half(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return half a layer's output; selective checkpointing runs it if backward recomputes elementwise operators."""
        if self.again != "elementwise":
            return fn(x)
        output: Tensor = checkpoint(
            fn, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, self.last.choose_policy)
        )
        return output


class _LastProduct:
    """Checkpoint policy for half a layer: save the results of all products but the last, which nothing in the half needs."""

    def __init__(self) -> None:
        self.running = False

    def watch_modules(self, *modules: nn.Module | None) -> None:
        """Register hooks that note while one of these modules, which compute the last product, is running."""
        for module in modules:
            if module is not None:
                module.register_forward_pre_hook(lambda *_: setattr(self, "running", True))
                module.register_forward_hook(lambda *_: setattr(self, "running", False), always_call=True)

    def choose_policy(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = func._overloadpacket in PRODUCTS and not self.running
        return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


class EmbeddingPart(nn.Module):
    """First part of a model: the token embedding."""

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.hidden)
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        parallelize_module(self, mesh["tp"], plan)

    def forward(self, tokens: Tensor) -> Tensor:
        return unwrap_dtensor(self.embedding(tokens))


class LossPart(nn.Module):
    """Last part of a model: the head, and the loss of its sharded logits in float32."""

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh["tp"]
        self.norm = nn.RMSNorm(model.hidden)
        self.head = nn.Linear(model.hidden, model.vocabulary, bias=False)
        plan = {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}
        parallelize_module(self, self.mesh, plan)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, DTensor.from_local(targets.flatten(), self.mesh, [Replicate()], shape=(targets.numel(),)))


def rotary_tables(sequence: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary positions, of shape (sequence, head_dim).

    The angle is position times frequency, with the frequencies repeated twice.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    half = torch.arange(sequence)[:, None] * frequencies
    angle = torch.cat([half, half], dim=1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def unwrap_dtensor(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x
