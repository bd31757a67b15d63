"""Context parallelism: models on local tensors, with the sequence sharded over ranks and ring attention.

Inside the context a buffer holds this rank's shard of itself, under its own name. With a causal mask and contiguous shards,
ranks with late positions would do most of the work. Therefore the sequence has 2 n blocks, and a rank gets the i-th from the
front and the i-th from the back. Then each rank's queries attend to n + 1/2 blocks of keys on average.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from ...base.torch_internals import tree_leaves
from ...comm import PerRank, shards_of
from ...comm.compared_operations import compare_text
from ...comm.map_ranks import communicator_of
from ...errors import LayoutError, MeshError, UnsupportedOperationError
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...placement import Shard
from ...rules.aten.attention.ring import Ring, attend_on_ring, attend_on_ring_backward
from ...tensor.dtensor import DTensor
from .cp_sequence_order import SequenceOrder

__all__ = ["context_parallel", "context_parallel_unshard"]


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    load_balance: bool = True,
) -> Iterator[None]:
    """Compute ``F.scaled_dot_product_attention`` of local tensors over the full sequence, of which each rank has a shard.

    Inside, ``buffers`` hold this rank's shards; on exit they hold their previous values. Parameters and computed values stay
    local. Gradients of parameters must therefore be summed over the ranks of ``mesh``: ``fully_shard`` over the flattened dp
    and cp dims does this. Backward may run inside the context. It may run after it only if autograd saved none of the buffers
    themselves, and nothing is recomputed (``torch.utils.checkpoint``).

    Cost: per attention n - 1 exchanges of a rank's keys and values, in backward as many of their gradients. Everything else
    is local.

    Args:
        mesh: the ranks that share the sequence, for example ``mesh["cp"]``.
        buffers: tensors with a sequence dim, equal on these ranks: tokens, labels, position tables. Buffers of a module under
            ``fully_shard`` or ``replicate`` are allowed, parameters are not. With all ranks in one process a buffer becomes a
            ``PerRank`` in place.
        buffer_seq_dims: the sequence dim of each buffer. All buffers have the same length along it, which may be any number.
        no_restore_buffers: buffers that stay sharded on exit.
        load_balance: give each rank an early and a late block, which makes the work equal under a causal mask. ``False``: one
            contiguous block.

    Raises:
        LayoutError: buffers have several lengths, or attention gets tensors that are not this rank's shard of the sequence.
        UnsupportedOperationError: attention with a mask or dropout, or inside a fused torch function that hides it.

    >>> import torch.nn.functional as F
    >>> from dtensor import DeviceMesh
    >>> mesh, x = DeviceMesh("cpu", 2), torch.randn(1, 2, 8, 4)
    >>> whole = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
    ...     part = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> tuple(part.shape), torch.allclose(context_parallel_unshard(mesh, [part], [2])[0], whole, atol=1e-6)
    ((1, 2, 4, 4), True)
    """
    mesh, buffers, dims = _as_flat_mesh(mesh), list(buffers or ()), list(buffer_seq_dims or ())
    not_restored = [id(buffer) for buffer in no_restore_buffers or ()]
    order = SequenceOrder(_sequence_length(buffers, dims, not_restored), mesh.size(), load_balance)
    if mesh.size() == 1:
        yield
        return
    with ExitStack() as stack:
        for buffer, dim in zip(buffers, dims, strict=True):
            full = buffer._local if isinstance(buffer, DTensor) else buffer.detach()
            undo = _swap_buffer(buffer, order.shard_of(mesh, full, dim))
            if id(buffer) not in not_restored:
                stack.callback(undo)
        stack.enter_context(RingAttentionMode(mesh, order))
        yield


def context_parallel_unshard(
    mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int], *, load_balance: bool = True
) -> list[Tensor]:
    """Return the full tensors of which each rank has the shard that :func:`context_parallel` gives it; differentiable.

    Cost: for each tensor one all-gather, and a small one of the sizes. With all ranks in one process, a tensor that is equal
    on all ranks is returned once.

    Args:
        mesh: the ranks that share the sequence.
        buffers: local tensors, such as an output.
        seq_dims: the sequence dim of each tensor.
        load_balance: the value that was passed to :func:`context_parallel`.

    Raises:
        LayoutError: the shards do not have the sizes of a sharded sequence.

    >>> from dtensor import DeviceMesh
    >>> mesh, x = DeviceMesh("cpu", 2), torch.arange(8.0)
    >>> with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
    ...     doubled = x * 2
    >>> context_parallel_unshard(mesh, [doubled], [0])[0]
    tensor([ 0.,  2.,  4.,  6.,  8., 10., 12., 14.])
    """
    mesh = _as_flat_mesh(mesh)
    found = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        dim %= buffer.ndim
        whole = DTensor.from_local(buffer, mesh, [Shard(dim)])
        order = SequenceOrder(whole.shape[dim], mesh.size(), load_balance)
        split = whole.layout.splits[dim]
        if mesh.size() > 1 and (split is None or split.sizes != order.shard_sizes):
            raise LayoutError(
                f"shards of {split and split.sizes} positions do not fit a sequence of {order.length} over "
                f"{order.ranks} ranks; pass the shards that context_parallel makes, of {order.shard_sizes} positions"
            )
        gathered = whole.full_tensor()
        found.append(gathered.index_select(dim, order.inverse_permutation.to(gathered.device)))
    return found


def _as_flat_mesh(mesh: Any) -> DeviceMesh:
    mesh = as_mesh(mesh)
    return mesh if mesh.ndim == 1 else mesh.flatten()


def _sequence_length(buffers: list[Tensor], dims: list[int], not_restored: list[int]) -> int:
    """Return the common sequence length of the buffers, after checks of ``context_parallel``'s arguments.

    Raises:
        LayoutError: the buffers, their dims or ``not_restored`` do not fit together.
    """
    if not buffers or len(buffers) != len(dims):
        raise LayoutError(
            f"context_parallel got {len(buffers)} buffers and {len(dims)} buffer_seq_dims; pass the tensors "
            "with a sequence dim, and that dim for each: context_parallel(mesh, buffers=[tokens, labels], "
            "buffer_seq_dims=[1, 1])"
        )
    if len({id(buffer) for buffer in buffers}) < len(buffers):
        raise LayoutError("a tensor appears twice in the buffers of context_parallel; pass each once")
    if not set(not_restored) <= {id(buffer) for buffer in buffers}:
        raise LayoutError("no_restore_buffers must be some of the buffers of context_parallel")
    if any(isinstance(buffer, DTensor) and not hasattr(buffer, "_data_parallel") for buffer in buffers):
        raise LayoutError(
            "buffers of context_parallel are plain tensors. Shard the sequence of a DTensor with placements: "
            "x.redistribute(placements=[Shard(1)]); attention then exchanges keys and values without "
            "context_parallel"
        )
    lengths = [buffer.size(dim) for buffer, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1:
        raise LayoutError(
            f"the buffers of context_parallel have {lengths} positions along buffer_seq_dims {dims}; these must be equal"
        )
    return lengths[0]


def _swap_buffer(buffer: Tensor, part: Any) -> Callable[[], None]:
    """Replace the value of ``buffer`` by this rank's shard ``part`` in place; return the function that undoes it."""
    for kind, inner in ((DTensor, "_local"), (PerRank, "shards")):  # a buffer of an FSDP unit: the module has its local value
        if isinstance(buffer, kind):
            whole = getattr(buffer, inner)
            setattr(buffer, inner, part if kind is DTensor else part.shards)
            return functools.partial(setattr, buffer, inner, whole)
    if isinstance(part, PerRank):
        swap_tensors(buffer, part)
        return lambda: swap_tensors(buffer, part)
    before = buffer.detach()
    _set_storage(buffer, part)
    return lambda: _set_storage(buffer, before)


def _set_storage(buffer: Tensor, other: Tensor) -> None:
    with torch.no_grad():  # in place: autograd raises if it saved the buffer for backward
        buffer.set_(other)  # type: ignore[call-overload]  # a tensor is a source


class _RingAttention(torch.autograd.Function):
    """Attention over queries, keys and values of which each rank has its shard of the sequence."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, ring: Ring) -> Any:
        """Return the attention output of this rank's queries, and save what the ring's backward needs."""
        out, sums = attend_on_ring(ring, query, key, value)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        return *attend_on_ring_backward(ctx.ring, grad, *ctx.saved_tensors), None


_BACKWARD_FUNCTIONS = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# fused functions that compute attention without calling scaled_dot_product_attention
_FUSED_ATTENTION = ("multi_head_attention_forward", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")


class RingAttentionMode(TorchFunctionMode):
    """Torch function mode that replaces attention of local tensors by ring attention over the full sequence."""

    def __init__(self, mesh: DeviceMesh, order: SequenceOrder) -> None:
        super().__init__()
        self.mesh, self.order = mesh, order

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **(kwargs or {}))
        if getattr(func, "__name__", None) in _FUSED_ATTENTION:
            raise UnsupportedOperationError(
                f"{func.__name__} contains its own attention, in which context_parallel cannot exchange keys and "
                "values; write the layer with torch.nn.functional.scaled_dot_product_attention"
            )
        if func in _BACKWARD_FUNCTIONS:
            return self._backward(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward pass with this mode active in each autograd node, where checkpoints recompute attention.

        Torch disables this mode for the pass, and each autograd node restores the thread state of the start of the pass.
        Therefore a pre-hook of every node enters the mode again.
        """
        roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        nodes = [x.node if isinstance(x, GradientEdge) else x.grad_fn for root in tree_leaves(roots) for x in shards_of(root)]
        handles: dict[Any, Any] = {}
        while nodes:
            node = nodes.pop()
            if node is not None and node not in handles:
                handles[node] = node.register_prehook(lambda grads: self.__enter__() and None)
                nodes += [following for following, _ in node.next_functions]
        try:
            return func(*args, **kwargs)
        finally:
            for handle in handles.values():
                handle.remove()

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute ring attention of local tensors; the parameters are those of ``F.scaled_dot_product_attention``."""
        if attn_mask is not None or dropout_p > 0:
            raise UnsupportedOperationError(
                "context_parallel supports is_causal=, but not attn_mask or dropout_p. For your own mask use "
                "DTensors with a sharded sequence (docs/parallel/context.md)"
            )
        operands = (query, key, value)
        if any(isinstance(x, DTensor) for x in operands):
            return self._attend_dtensors(operands, is_causal, scale, enable_gqa)
        self._check_local_inputs(operands, enable_gqa)
        if query.ndim != 4:
            query, key, value = (x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, x.ndim - 4) for x in operands)
        width, value_width = query.size(-1), value.size(-1)
        if width != value_width:  # the block operator has one width: zeros do not change a product
            scale = width**-0.5 if scale is None else scale
            query, key, value = (F.pad(x, (0, max(width, value_width) - x.size(-1))) for x in (query, key, value))
        compare_text(self.mesh, f"attention of parts of a sequence, is_causal={is_causal}, scale={scale}")
        ring = self.order.make_ring(self.mesh, key, value, is_causal, scale)
        out: Tensor = _RingAttention.apply(query, key, value, ring)[..., :value_width]
        match operands[0].ndim:
            case 3:
                return out.squeeze(0)
            case 4:
                return out
        return out.unflatten(0, [operands[0].size(dim) for dim in range(operands[0].ndim - 3)])

    def _attend_dtensors(self, operands: tuple[Any, ...], causal: bool, scale: float | None, grouped: bool) -> Tensor:
        """Run ring attention on the local tensors of DTensors that are sharded by batch or heads over other mesh dims."""
        first = operands[0]
        if any(not isinstance(x, DTensor) or x.layout.mesh is not first.layout.mesh for x in operands):
            raise LayoutError(
                "attention inside of context_parallel got DTensors and plain tensors, or DTensors on several "
                "meshes; make them all DTensors on one mesh, or all local tensors"
            )
        mesh, cuts = first.device_mesh, [first.ndim - 2, first.ndim - 1]
        if mesh._root.key != self.mesh._root.key or set(mesh.group_id(range(mesh.ndim))) & set(self.mesh.group_id((0,))):
            raise MeshError(
                f"inside of context_parallel over {self.mesh} attention got DTensors on {mesh}. Pass DTensors "
                "over other dims of the same mesh or local tensors, or leave context_parallel out and shard the "
                "sequence with placements"
            )
        for x in operands:
            if any(p.is_partial() or (isinstance(p, Shard) and p.dim in cuts) for p in x.placements):
                raise LayoutError(
                    f"attention inside of context_parallel takes DTensors that are sharded by batch or heads, got {x.layout}"
                )
        if any(x.placements != first.placements for x in operands):
            raise LayoutError(
                f"query, key and value have different layouts: {[x.layout for x in operands]}; redistribute them to "
                "the same placements"
            )
        query, key, value = (x.to_local() for x in operands)
        local = self.attention(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=grouped)
        shape = (*first.shape[:-1], operands[2].shape[-1])
        return DTensor.from_local(local, mesh, first.placements, shape=shape)

    def _check_local_inputs(self, operands: tuple[Tensor, ...], grouped: bool) -> None:
        """Raise if query, key and value differ in dtype or dims, or are not sharded along the sequence as announced."""
        query = operands[0]
        if len({x.dtype for x in operands}) > 1 or len({x.ndim for x in operands}) > 1 or query.ndim < 3:
            raise LayoutError("query, key and value must have the same dtype and the same number of dims, at least 3")
        heads = [x.size(-3) for x in operands]
        if heads[1] != heads[2] or heads[0] % max(1, heads[1]) or (heads[0] != heads[1] and not grouped):
            raise LayoutError(f"query, key and value have {heads} heads; fewer heads of key and value need enable_gqa=True")

        def check_shard_size(member: int, *operands_here: Tensor) -> None:
            """Raise if the sequence dims of a member's operands are not its shard size."""
            held = self.order.shard_sizes[self.mesh.coordinates[member][0]]
            found = [x.shape[-2] for x in operands_here]
            if found != [held] * 3:
                raise LayoutError(
                    f"inside of context_parallel rank {self.mesh.ranks[member]} has {held} of {self.order.length} "
                    f"positions, but attention got {found} (query, key, value); pass every tensor with a sequence dim "
                    "in buffers="
                )

        communicator_of(self.mesh).map(check_shard_size, *operands)
