"""Flex attention (``torch.nn.attention.flex_attention``) of DTensors: each rank computes its batch entries, heads and queries.

[Note: Flex attention of DTensors]
``flex_attention`` ends in a higher-order operator, which calls ``score_mod`` and ``mask_mod`` with indices.
:func:`compute_flex_attention` runs above autograd, in place of that operator. It chooses layouts by the rule of scaled
dot-product attention, but keys are never sharded along their sequence. Then each rank calls the operator on its local tensors:

- ``score_mod`` and ``mask_mod`` get global indices: the local index plus the offset of the rank's shard.
- The tensors of a ``BlockMask`` are narrowed to the batch entries, heads and rows of blocks of the rank. Queries are sharded
  along their sequence only if each shard begins at the beginning of a block, or is a part of one block.
- Tensors that a function captures are replicated. Their gradients are sums over the mesh dims that shard the queries.

``torch.compile`` makes captured tensors arguments of the operator. Without a compiler :func:`lift_captured` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

from ...base.memory_order import dense_stride, dims_outermost_first
from ...base.modes import EXPLICIT
from ...base.recorder_hooks import untracked
from ...base.tensor_tree import map_tensors, tensor_leaves
from ...base.torch_internals import keys_of_arguments
from ...comm import PerRank, shards_of
from ...comm.map_ranks import communicator_of
from ...dispatch import counts_as_replicated, describe_plan, make_mesh_error, meshes_of
from ...errors import ImplicitCommunicationError, MixedTensorError
from ...layout.layout import Layout
from ...mesh.device_mesh import DeviceMesh
from ...placement import Partial, Placement, Replicate
from ...propagation.op_schema import operator_schema_of
from ...propagation.propagate import CallPlan, propagate_sharding
from ...propagation.select_strategy import select_strategies
from ...propagation.strategy_table import StrategySelection
from ...redistribute import plan as plan_redistribution
from ...rules.aten.attention.operators import HEAD_DIMS, attention_dims_by_argument, attention_operand_dims, attention_sizes
from ...rules.call import Call
from ...rules.rule import Factors, Rule
from ..autograd import from_local_recorded, grad_layout, is_recorded, redistribute_if_needed, to_local_tensor
from ..dtensor import DTensor, wrap
from .register import KEYS_BELOW

_RULE_OPERATOR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
Function = Callable[..., Tensor]


def compute_flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Function,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> Any:
    """Return outputs, log-sums and largest scores; see [Note: Flex attention of DTensors]. Takes the arguments of the operator.

    Without DTensors the next implementation of the operator runs.
    """
    meshes = tuple(meshes_of((query, key, value, score_buffers, mask_buffers)))
    if not meshes:
        args = (query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers)
        operator = torch.ops.higher_order.flex_attention
        keys = keys_of_arguments(args, {}, operator.non_fallthrough_keys) & KEYS_BELOW
        return operator.dispatch(keys.highestPriorityTypeId(), *args)
    if len(meshes) > 1:
        raise make_mesh_error("flex_attention", meshes)
    *blocks, mask_mod = block_mask
    if not isinstance(score_mod, GraphModule):
        score_mod, score_buffers = lift_captured(score_mod, query, num_scores=1)
        mask_mod, mask_buffers = lift_captured(mask_mod, query, num_scores=0)
    if key.shape[0] == 1:  # keys that all batch entries share
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    operands = [_as_dtensor(x, meshes[0]) for x in (query, key, value)]
    layouts = _choose_layouts(operands, blocks[-2])
    operands = [redistribute_if_needed(x, layout.placements) for x, layout in zip(operands, layouts, strict=True)]
    q_layout = layouts[0]
    keys_grad = [_shared_grad(q, k) for q, k in zip(q_layout.placements, layouts[1].placements, strict=True)]
    captured_grad = [_shared_grad(q, Replicate()) for q in q_layout.placements]
    comm = communicator_of(q_layout.mesh)
    results = comm.map_outside_too(
        partial(_attend_on_rank, q_layout, score_mod, mask_mod, scale, kernel_options),
        to_local_tensor(operands[0]),
        *(to_local_tensor(x, keys_grad) for x in operands[1:]),
        map_tensors(partial(_replicate_captured, q_layout.mesh, None), blocks),
        map_tensors(partial(_replicate_captured, q_layout.mesh, captured_grad), score_buffers),
        map_tensors(partial(_replicate_captured, q_layout.mesh, captured_grad), mask_buffers),
    )
    rows = tuple(q_layout.shape[:3])
    order = [d for d in dims_outermost_first(q_layout.stride) if d != 3]
    shapes = ((*rows, value.shape[3]), (*order, 3)), (rows, ()), (rows, ())
    return tuple(_wrap_result(local, q_layout, *shape) for local, shape in zip(results, shapes, strict=True))


# --- layouts --------------------------------------------------------------------------------------------------------
def _as_dtensor(x: Any, mesh: DeviceMesh) -> Any:
    """Return an operand of attention as a DTensor; a plain tensor that counts as equal on all ranks is replicated."""
    if isinstance(x, DTensor):
        return x
    if not counts_as_replicated(x):
        raise MixedTensorError(
            f"flex_attention mixes DTensors with plain queries, keys or values of shape {tuple(x.shape)}. If every rank holds "
            "the same value, use `with dtensor.implicit_replication():`, or distribute_tensor(t, mesh, placements)"
        )
    return DTensor.from_local(x, mesh)


def _choose_layouts(operands: list[Any], rows_per_block: int) -> list[Layout]:
    """Return the layouts of queries, keys and values with which ranks compute.

    Raises:
        ImplicitCommunicationError: an operand must be redistributed under ``explicit()``.
    """
    plan = _plan_layouts(operands, frozenset("s"))
    if not _divides_blocks(plan.operands[0], rows_per_block):
        plan = _plan_layouts(operands, frozenset("ls"))
    if EXPLICIT and plan.communicates:
        raise ImplicitCommunicationError(f"flex_attention would communicate under explicit():\n{describe_plan(plan)}")
    return list(plan.operands)


def _plan_layouts(operands: list[Any], unsharded: frozenset[str]) -> CallPlan:
    """Plan attention of these operands with some factors unsharded; return the call plan, and run nothing."""

    def select_attention_strategies(
        rule: Rule, _: Factors, call: Call, inplace_results: Mapping[int, int]
    ) -> StrategySelection | None:
        """Select strategies by the factors of attention, with ``unsharded`` ones and without kernels."""
        table, sizes = attention_dims_by_argument(call), attention_sizes(call)
        assert sizes is not None, "flex_attention has checked the shapes"
        results = (table["out"], table["logsumexp"])
        factors = Factors(attention_operand_dims(call, table, sizes), results, sizes, HEAD_DIMS | unsharded)
        return select_strategies(replace(rule, partials=()), factors, call, inplace_results)

    operator = operator_schema_of(_RULE_OPERATOR)
    bound = operator.bind(tuple(x._layout for x in operands), {})
    return propagate_sharding(operator, operands[0]._layout.mesh, bound, frozenset(), select_attention_strategies)


def _divides_blocks(layout: Layout, rows_per_block: int) -> bool:
    """Return True if each shard of the queries begins with a block of rows, or is a part of one block."""
    split = layout.splits[2]
    shards = zip(split.offsets, split.sizes, strict=True) if split is not None else ()
    return all(
        start % rows_per_block == 0 or start // rows_per_block == (start + size - 1) // rows_per_block for start, size in shards
    )


def _shared_grad(query: Placement, other: Placement) -> Placement:
    """Return the placement of local gradients of ``other``: Partial where ranks use one copy for different queries."""
    return Partial() if query != Replicate() and other == Replicate() else other


def _replicate_captured(mesh: DeviceMesh, grad_placements: list[Placement] | None, x: Tensor) -> Any:
    """Return the local value of a captured tensor, or of a tensor of a ``BlockMask``, replicated.

    Raises:
        ImplicitCommunicationError: it must be redistributed under ``explicit()``.
    """
    if not isinstance(x, DTensor):
        if isinstance(x, PerRank) or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        x = DTensor.from_local(x, mesh)
    target = x._layout.replace(placements=[Replicate()] * mesh.ndim)
    if x._layout.mesh != mesh:
        raise make_mesh_error("flex_attention", (mesh, x._layout.mesh))
    if EXPLICIT and plan_redistribution(x._layout, target).communicates:
        raise ImplicitCommunicationError(
            f"flex_attention would gather a captured tensor of shape {tuple(x.shape)} under explicit(); replicate it first"
        )
    return to_local_tensor(redistribute_if_needed(x, target.placements), grad_placements)


def _wrap_result(local: Any, q_layout: Layout, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    """Return local attention results, which are sharded like the queries, as a DTensor of ``shape``."""
    layout = Layout.of(q_layout.mesh, q_layout.placements, shape, dense_stride(shape, order), local.dtype)
    if is_recorded(local):
        return from_local_recorded(layout, grad_layout(layout, None), False, *shards_of(local))
    return wrap(local, layout)


# --- one rank -------------------------------------------------------------------------------------------------------
def _attend_on_rank(
    q_layout: Layout,
    score_mod: Function,
    mask_mod: Function,
    scale: float,
    kernel_options: dict[str, Any],
    member: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: list[Any],
    score_buffers: tuple[Any, ...],
    mask_buffers: tuple[Any, ...],
) -> tuple[Tensor, ...]:
    """Call the operator on the local tensors of a rank.

    A rank without queries computes one row of zeros, and returns no element of it: so its gradients are zeros, and it takes part
    in their reductions. A rank outside the mesh has no elements, also of captured tensors.
    """
    if member is None:
        captured = [x for x in score_buffers if isinstance(x, Tensor) and x.requires_grad]
        total = sum(x.sum() for x in (query, key, value, *captured))  # a gradient is recorded, as on other ranks
        return tuple(total * query.new_zeros([0] * ndim) for ndim in (4, 3, 3))
    sizes = query.shape[:3]
    offsets: tuple[int, ...] = (0, 0, 0)
    if 0 in sizes:
        query, key, value = map(_pad_empty_dims, (query, key, value))
    else:
        offsets = q_layout.local_offset(q_layout.mesh.coordinates[member])[:3]
    results = torch.ops.higher_order.flex_attention(
        query,
        key,
        value,
        partial(_call_with_global_indices, score_mod, offsets, 1),
        (*_narrow_blocks(blocks, offsets, query.shape[:3]), partial(_call_with_global_indices, mask_mod, offsets, 0)),
        scale,
        kernel_options,
        tuple(score_buffers),
        tuple(mask_buffers),
    )
    return tuple(x[: sizes[0], : sizes[1], : sizes[2]] for x in results) if 0 in sizes else tuple(results)


def _pad_empty_dims(x: Tensor) -> Tensor:
    padding = [count for size in reversed(x.shape) for count in (0, int(size == 0))]
    return F.pad(x, padding)


def _call_with_global_indices(function: Function, offsets: tuple[int, ...], num_scores: int, *args: Tensor) -> Tensor:
    """Call ``score_mod`` or ``mask_mod`` with the indices of batch entry, head and query plus ``offsets``."""
    indices = [index + offset for index, offset in zip(args[num_scores:], offsets, strict=False)]
    return function(*args[:num_scores], *indices, *args[num_scores + 3 :])


def _narrow_blocks(blocks: list[Any], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the tuple of a ``BlockMask``, without its function, for the batch entries, heads and queries of a rank."""
    num_rows, num_keys, *tensors, rows_per_block, keys_per_block = blocks
    tensors = [_narrow_batch_and_heads(x, offsets, sizes) for x in tensors]
    first, last = offsets[2] // rows_per_block, (offsets[2] + sizes[2] - 1) // rows_per_block
    num_rows = min(num_rows, sizes[2])
    if last + 1 - first == tensors[0].shape[-1]:
        return num_rows, num_keys, *tensors, rows_per_block, keys_per_block
    key_blocks: list[Any] = [
        x if x is None else x.narrow(x.ndim - num_dims, first, last + 1 - first)
        for x, num_dims in zip(tensors, (1, 2, 1, 2), strict=False)
    ]
    lengths, block_size = (num_rows, num_keys), (rows_per_block, keys_per_block)
    counts, indices, full_counts, full_indices = key_blocks
    narrowed = BlockMask.from_kv_blocks(counts, indices, full_counts, full_indices, block_size, seq_lengths=lengths)
    return narrowed.as_tuple()[:-1]


def _narrow_batch_and_heads(x: Any, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Return the rank's slice of dims 0 and 1 of ``x``; dims of size 1 and values that are no tensors stay."""
    for dim in (0, 1) if isinstance(x, Tensor) and x.ndim > 2 else ():
        if x.shape[dim] != 1:
            x = x.narrow(dim, offsets[dim], sizes[dim])
    return x


# --- captured tensors -----------------------------------------------------------------------------------------------
class _ReplaceMode(TorchFunctionMode):
    """Mode that replaces tensors among the arguments of torch functions."""

    def __init__(self, replace_tensor: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._replace_tensor = replace_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map_tensors(self._replace_tensor, args), **map_tensors(self._replace_tensor, kwargs or {}))


class _FindCapturedMode(_ReplaceMode):
    """Mode that finds the tensors which a function uses, but neither gets nor makes.

    Tensors of several ranks are replaced by a tensor of their shape.
    """

    def __init__(self, args: tuple[Tensor, ...]) -> None:
        super().__init__(self._find)
        self.own, self.captured = {id(x): x for x in args}, dict[int, Tensor]()

    def _find(self, x: Tensor) -> Tensor:
        """Note a tensor that the function captures, and return a plain tensor in its place."""
        if id(x) in self.own:
            return x
        self.captured[id(x)] = x
        if isinstance(x, PerRank):
            return x.shards[0]
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, DTensor) else x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        self.own |= {id(x): x for x in tensor_leaves([result])}
        return result


@untracked
def lift_captured(function: Function, query: Any, num_scores: int) -> tuple[Function, tuple[Tensor, ...]]:
    """Return ``function`` with the tensors that it captures as further arguments, and these tensors.

    It runs once, for the first element, to find them: also those of modules, containers and global variables.
    """
    args = tuple(
        torch.zeros((), dtype=query.dtype if i < num_scores else torch.int32, device=query.device) for i in range(num_scores + 4)
    )
    with torch.no_grad(), _FindCapturedMode(args) as mode:
        function(*args)
    captured = tuple(mode.captured.values())
    return partial(_call_with_captured, function, captured), captured


def _call_with_captured(function: Function, captured: tuple[Tensor, ...], *args: Any) -> Tensor:
    """Call ``function``, with the last arguments in place of the tensors ``captured`` that it uses."""
    num_args = len(args) - len(captured)
    replacements = {id(x): new for x, new in zip(captured, args[num_args:], strict=True)}
    with _ReplaceMode(lambda x: replacements.get(id(x), x)):
        return function(*args[:num_args])
