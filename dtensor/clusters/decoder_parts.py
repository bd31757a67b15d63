"""The parts of a decoder as modules, and how tensor, sequence, context and expert parallelism cut them.

Programs of one rank over local tensors, as Megatron's and torchtitan's are: between parts a rank holds its part of the sequence,
inside of attention its heads, of a feed-forward network its columns, of a mixture its experts.
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
from ..parallel.tensor.context_parallel import AroundTheRing
from ..parallel.tensor.cp_sequence_order import Order
from ..placement import Replicate, Shard
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from .model_sizes import Transformer

AGAIN = ("nothing", "elementwise", "everything")  # that backward computes anew, so that less is kept for it


class Attention(nn.Module):
    """Causal attention, positions given by rotation; the sequence is cut over ``cp``, where keys go around."""

    plan: ClassVar[dict[str, ParallelStyle]] = {
        "": PrepareModuleInput(input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)),
        **{name: ColwiseParallel() for name in ("query", "key", "value")},
        "out": RowwiseParallel(output_layouts=Shard(1)),
    }

    def __init__(self, model: Transformer, cp: DeviceMesh, sequence: int) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.ring = AroundTheRing(cp, Order(sequence, cp.size(), True)) if cp.size() > 1 else None
        kv = model.kv_heads * model.head_dim
        self.query = nn.Linear(model.hidden, model.hidden, bias=False)
        self.key = nn.Linear(model.hidden, kv, bias=False)
        self.value = nn.Linear(model.hidden, kv, bias=False)
        self.out = nn.Linear(model.hidden, model.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (self.heads(each(x)) for each in (self.query, self.key, self.value))
        mixed = self.attended(_rotated(query, cos, sin), _rotated(key, cos, sin), value)
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made

    def heads(self, x: Tensor) -> Tensor:
        """(batch, time, features) -> (batch, head, time, features of a head)"""
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.ring is not None:
            return self.ring.attention(query, key, value, is_causal=True, enable_gqa=True)
        if query.is_meta:  # torch chooses a fused kernel by device, and for this one none
            made: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]
            return made
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class FeedForward(nn.Module):
    """SwiGLU, or GELU between two matrices."""

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
        inner = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        made: Tensor = self.down(inner)
        return made


class Mixture(nn.Module):
    """SwiGLU of experts, each with as many of the tokens as any other: those that score best (Zhou et al. 2022,
    "Mixture-of-Experts with Expert Choice Routing", arXiv:2202.09368). Tokens go to where their experts are, and back.
    """

    plan: ClassVar[dict[str, ParallelStyle]] = {"router": SequenceParallel()}

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        super().__init__()
        self.chosen, self.mesh = model.chosen, mesh
        self.router = nn.Linear(model.hidden, model.experts, bias=False)
        self.experts = Experts(model, mesh)

    def forward(self, x: Tensor) -> Tensor:
        tokens = local(x).flatten(0, 1)
        scores = local(self.router(x)).flatten(0, 1).softmax(-1)
        count = scores.shape[1]
        weights, numbers = scores.t().topk(max(1, len(tokens) * self.chosen // count))
        here, there = [Shard(1), Shard(1)], [Replicate(), Shard(0)]
        shape = (count, weights.shape[1] * self.mesh.size(), tokens.shape[1])
        given = DTensor.from_local(tokens[numbers], self.mesh, here, shape=shape)
        made = self.experts(given.redistribute(placements=there)).redistribute(placements=here).to_local()
        rows = (made * weights.unsqueeze(-1)).flatten(0, 1)
        return torch.zeros_like(tokens).index_add(0, numbers.flatten(), rows).view(local(x).shape)


class Experts(nn.Module):
    """The matrices of all experts: columns cut over the first mesh dim, experts over the second."""

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        super().__init__()
        columns, rows = [Shard(2), Shard(0)], [Shard(1), Shard(0)]
        wide, tall = (model.experts, model.hidden, model.ffn), (model.experts, model.ffn, model.hidden)
        for name, shape, cut in (("gate", wide, columns), ("up", wide, columns), ("down", tall, rows)):
            self.register_parameter(name, nn.Parameter(distribute_tensor(torch.ones(shape), mesh, cut)))

    def forward(self, x: Any) -> Any:
        return (F.silu(x @ self.gate) * (x @ self.up)) @ self.down


class Block(nn.Module):
    """A layer; ``again``: what backward computes anew, one of :data:`AGAIN`."""

    def __init__(self, model: Transformer, mesh: DeviceMesh, sequence: int, again: str = "nothing") -> None:
        super().__init__()
        self.again, self.last = again, _Last()
        self.attention_norm = nn.RMSNorm(model.hidden)
        self.attention = Attention(model, mesh["cp"], sequence)
        self.mixing_norm = nn.RMSNorm(model.hidden)
        self.mixing = Mixture(model, mesh["tp", "ep"]) if model.experts > 1 else FeedForward(model)
        plan: dict[str, ParallelStyle] = {"attention_norm": SequenceParallel(), "mixing_norm": SequenceParallel()}
        for name, part in (("attention", self.attention), ("mixing", self.mixing)):
            own = {of: style for of, style in part.plan.items() if getattr(part, of, part) is not None}
            plan |= {f"{name}.{of}".rstrip("."): style for of, style in own.items()}
        parallelize_module(self, mesh["tp"], plan)
        self.last.follow(self.attention.out, getattr(self.mixing, "down", None))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.again == "everything":
            made: Tensor = checkpoint(self.both, x, cos, sin, use_reentrant=False)
            return made
        return self.both(x, cos, sin)

    def both(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.part(lambda x: local(self.attention(self.attention_norm(x), cos, sin)), x)
        return x + self.part(lambda x: local(self.mixing(self.mixing_norm(x))), x)

    def part(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.again != "elementwise":
            return fn(x)
        made: Tensor = checkpoint(
            fn, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, self.last.kept)
        )
        return made


class _Last:
    """What is kept of a half of a layer of which the elementwise work is done again: its products, but the last, on which nothing
    in it depends.
    """

    def __init__(self) -> None:
        self.running = False

    def follow(self, *modules: nn.Module | None) -> None:
        for module in modules:
            if module is not None:
                module.register_forward_pre_hook(lambda *_: setattr(self, "running", True))
                module.register_forward_hook(lambda *_: setattr(self, "running", False), always_call=True)

    def kept(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = func._overloadpacket in PRODUCTS and not self.running
        return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


class Start(nn.Module):
    """The embedding."""

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.hidden)
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
        parallelize_module(self, mesh["tp"], plan)

    def forward(self, tokens: Tensor) -> Tensor:
        return local(self.embedding(tokens))


class End(nn.Module):
    """The head, and the loss of its logits as they lie, in float32."""

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


def angles(sequence: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (sequence, head_dim): position times frequency, the frequencies given twice."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    once = torch.arange(sequence)[:, None] * frequencies
    found = torch.cat([once, once], dim=1)
    return found.cos().to(dtype), found.sin().to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x
