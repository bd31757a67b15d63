"""Flattened sharded dims (``x.view(-1, k)`` with an inner dim sharded): operators that do not depend on the order along the dim.

``linear``, ``matmul`` and many models flatten all dims but the last ones, into rows or into a batch of matrices. If a dim other
than the first of them is sharded (a sequence, heads), shards of the stack are no shards of the flattened dim. So the view is
lazy, and a read of it moves every element. But some operators do the same to every slice along a dim, or reduce over it. Their
result does not depend on the order of slices, as long as all operands have one order. So each rank's shard is flattened locally,
which is the flattened tensor in the order of ranks. The operator runs on that. Its results are unflattened to stacks, of which
views are returned. The operator's rule decides whether this is allowed: the flattened dim is one factor, sharded without a kernel
(except an order-invariant one), and the rule does not use the offset of a shard.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from ...base.caches import BoundedDict, nested_key
from ...comm.map_ranks import communicator_of
from ...dispatch import counts_as_replicated, dispatch, layouts_of_arguments, make_constants_runner, meshes_of, replicate_plain
from ...layout.layout import Layout
from ...propagation.make_call import make_call
from ...propagation.op_schema import OperatorSchema, operator_schema_of
from ...propagation.propagate import CallPlan
from ...propagation.shape_inference import ShapeInferenceError, infer_results
from ...redistribute import redistribute_local
from ...rules import lookup
from ...rules.call import Meta
from ...rules.rule import find_exact_dim, is_order_invariant
from ..dtensor import DTensor, wrap
from .flattened_layouts import DimSplits, find_kept_dim, find_merged_dim, merged_layout, stack_layout
from .lazy_view import LazyView, Origin, apply_views, is_local, plan_of

_aten = torch.ops.aten


class _Flattened(NamedTuple):
    """A tensor as views of a stack, of which consecutive dims from ``at`` on are flattened to its dim ``dim``.

    Attributes:
        stack: the tensor before it was flattened.
        at: the first of the dims of the stack that are flattened.
        sizes: the sizes of these dims.
        after: the view operations after the flattening.
        dim: the flattened dim of the tensor.
    """

    stack: DTensor
    at: int
    sizes: tuple[int, ...]
    after: tuple[tuple[Origin, int], ...]
    dim: int

    @property
    def dim_splits(self) -> DimSplits:
        return self.stack._layout.splits[self.at : self.at + len(self.sizes)]


def run_on_stack(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``operator`` on the stacks of flattened operands, if it does not depend on the order along the flattened dim.

    Returns NotImplemented for all other calls.
    """
    if operator.traits.view_kind == "all":
        return _view_stack(operator, args, kwargs)
    if operator.is_view:
        return _permute_stack(operator, args, kwargs)
    if operator.mutated or operator.seeded or operator.fills_lists or not operator.gives_tensors:
        return NotImplemented
    key = None if kwargs else _call_key(operator, args)
    cached = None if key is None else _CACHED_CALLS.get(key)
    if cached is not None:
        return _run_cached_call(cached, operator, args)
    tensors: list[Any] = []

    def mark(x: torch.Tensor) -> _TensorMark:
        tensors.append(x)
        return _TensorMark(len(tensors) - 1)

    marked = _map_arguments(args, kwargs, mark)
    flattened_by_tensor = [_find_flattened(x) if type(x) is LazyView else None for x in tensors]
    leader = max((x for x in flattened_by_tensor if x is not None), key=lambda x: math.prod(x.stack._layout.shape), default=None)
    if leader is None:
        return NotImplemented
    constants = (
        None if all(isinstance(x, DTensor) for x in tensors) else make_constants_runner(operator, operator.bind(args, kwargs))
    )
    if constants is not None:
        return constants(args, kwargs, [], {})
    dims = _get_or_find_dims(operator, marked, tensors, flattened_by_tensor)
    if dims is None or any(
        _is_cheaper_to_read(*each, leader) for each in zip(tensors, flattened_by_tensor, dims[0], strict=True)
    ):
        return NotImplemented
    operands = []
    for x, flattened, dim in zip(tensors, flattened_by_tensor, dims[0], strict=True):
        if dim is not None and not isinstance(x, DTensor):
            if not counts_as_replicated(x):
                return NotImplemented
            x = replicate_plain(x, leader.stack._layout.mesh)
        operands.append(x if dim is None else _flatten_operand(x, flattened, dim, leader))
    if key is not None:
        _cache_call(key, dims, flattened_by_tensor, leader)
    result = dispatch(DTensor, operator.func, (), *_map_arguments(*marked, lambda mark: operands[mark.place], _TensorMark))
    if not isinstance(result, (list, tuple)):
        return result if dims[1][0] is None else _unflatten_result(result, dims[1][0], leader.sizes, leader.dim_splits)
    result_dims = iter(dims[1])
    each = [
        x if x is None or (dim := next(result_dims)) is None else _unflatten_result(x, dim, leader.sizes, leader.dim_splits)
        for x in result
    ]
    return type(result)(each)


def _is_cheaper_to_read(x: Any, flattened: _Flattened | None, dim: int | None, leader: _Flattened) -> bool:
    """Return True if the lazy view should be gathered, because the other operand ``x`` is larger than the stack ``leader``.

    It is the smaller one of both, or as large and in larger blocks.
    """
    if flattened is not None or dim is None or not isinstance(x, DTensor) or not any(x._layout.splits):
        return False
    return (x._layout.numel, -x._layout.max_local_nbytes) > (leader.stack._layout.numel, -leader.stack._layout.max_local_nbytes)


# --- cached calls: flatten shards, run the operator, unflatten its result ----------------------------------------------------
class _CachedCall(NamedTuple):
    """Cached steps that run an operator on flattened local tensors and unflatten its result.

    Attributes:
        blocks: for each flattened argument the first and the last dim to flatten, and the layout of the flattened shards.
        dim: the flattened dim of the result; None if it has none.
        sizes, dim_splits: the sizes and the splits of the dims that were flattened.
    """

    blocks: tuple[tuple[int, int, Layout] | None, ...]
    dim: int | None
    sizes: tuple[int, ...]
    dim_splits: DimSplits


_CACHED_CALLS: BoundedDict[Any, _CachedCall] = BoundedDict(4096, "flattened_dims.calls")
_VIEW_SHAPES: BoundedDict[Any, list[list[int]]] = BoundedDict(4096, "flattened_dims.view_shapes")


def _call_key(operator: OperatorSchema, args: tuple[Any, ...]) -> Any:
    """Return the cache key of a call with tensors only; None for other calls."""
    key: list[Any] = [id(operator.func)]
    for x in args:
        if type(x) is LazyView and x._origin.view_kind == "all" and not x._origin.pinned:
            key += LazyView, x._origin.base._layout, x._layout
        elif type(x) is DTensor:
            key.append(x._layout)
        else:
            return None
    return tuple(key)


def _cache_call(key: Any, dims: FlattenedDims, flattened_by_tensor: Sequence[_Flattened | None], leader: _Flattened) -> None:
    """Cache a call with one result, if the shards of all flattened tensors have equal splits."""
    blocks: list[tuple[int, int, Layout] | None] = []
    for flattened, dim in zip(flattened_by_tensor, dims[0], strict=True):
        if dim is None:
            blocks.append(None)
            continue
        if flattened is None or flattened.after or flattened.dim != dim or flattened.sizes != leader.sizes:
            return
        split_layout, merged = merged_layout(flattened.stack._layout, dim, leader.sizes, leader.dim_splits)
        if split_layout is not flattened.stack._layout:
            return
        blocks.append((dim, dim + len(leader.sizes) - 1, merged))
    if len(dims[1]) == 1:
        _CACHED_CALLS.keep(key, _CachedCall(tuple(blocks), dims[1][0], leader.sizes, leader.dim_splits))


def _run_cached_call(cached: _CachedCall, operator: OperatorSchema, args: tuple[Any, ...]) -> Any:
    """Run an operator by its cached call: on flattened shards of the stacks, with the result unflattened."""
    operands = [
        x if block is None else _flatten_shards(x._origin.base, *block) for x, block in zip(args, cached.blocks, strict=True)
    ]
    result = dispatch(DTensor, operator.func, (), tuple(operands), {})
    return result if cached.dim is None else _unflatten_result(result, cached.dim, cached.sizes, cached.dim_splits)


def _flatten_shards(stack: DTensor, first: int, last: int, merged: Layout) -> DTensor:
    """Return the stack with dims ``first`` to ``last`` of each local tensor flattened."""
    return wrap(communicator_of(merged.mesh).map(lambda _, shard: shard.flatten(first, last), stack._local), merged)


def _view_stack(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view of a flattened tensor in another shape as a view of the stack; NotImplemented if none is local."""
    tensor_key = None if kwargs or len(args) != 2 else _call_key(operator, args[:1])
    key = None if tensor_key is None else (*tensor_key, nested_key(args[1]))
    shapes = None if key is None else _VIEW_SHAPES.get(key)
    if shapes is not None:
        return apply_views(args[0]._origin.base, [(_aten.view.default, shape) for shape in shapes])
    flattened = _find_flattened(args[0])
    if flattened is None or flattened.after:
        return NotImplemented
    shape = list(plan_of(operator, args, kwargs).results[0].shape)
    stack_shape = shape
    if not _is_local_view(flattened.stack, stack_shape):
        dim = find_kept_dim(tuple(args[0].shape), flattened.dim, tuple(shape))
        stack_shape = shape if dim is None else [*shape[:dim], *flattened.sizes, *shape[dim + 1 :]]
        if dim is None or not _is_local_view(flattened.stack, stack_shape):
            return NotImplemented
    shapes = [stack_shape] if stack_shape is shape else [stack_shape, shape]
    if key is not None:
        _VIEW_SHAPES.keep(key, shapes)
    return apply_views(flattened.stack, [(_aten.view.default, shape) for shape in shapes])


def _is_local_view(stack: DTensor, shape: list[int]) -> bool:
    """Return True if shards of the stack, viewed in that shape, are shards of the result."""
    return is_local(plan_of(operator_schema_of(_aten.view.default), (stack, shape), {}))


def _permute_stack(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the permuted flattened tensor as a flattened permutation of the stack; NotImplemented for other view operators."""
    flattened = _find_flattened(args[0])
    plan = None if flattened is None or flattened.after else plan_of(operator, args, kwargs)
    if flattened is None or plan is None or plan.chosen is None or len(plan.chosen.results) != 1:
        return NotImplemented
    factors = plan.chosen.choice.factors
    (dims_before,), (dims_after,) = factors.operands, factors.results
    if len(set(dims_before)) < len(dims_before) or sorted(dims_before) != sorted(dims_after) or dims_after == dims_before:
        return NotImplemented
    at, extra = flattened.at, len(flattened.sizes) - 1
    stack_dims = [range(d + extra * (d > at), d + extra * (d >= at) + 1) for d in range(len(dims_before))]
    order = [dims_before.index(name) for name in dims_after]
    permutation = [stack_dim for d in order for stack_dim in stack_dims[d]]
    shape = [args[0].shape[d] for d in order]
    return apply_views(flattened.stack, ((_aten.permute.default, permutation), (_aten.view.default, shape)))


# --- flattened dims of views -----------------------------------------------------------------------------------------------
def find_flattened_dim(x: Any) -> tuple[int, tuple[int, ...], DimSplits] | None:
    """Return the flattened dim of a view, the sizes that were flattened and their splits; None if ``x`` is no such view."""
    flattened = _find_flattened(x)
    return None if flattened is None or flattened.after else (flattened.dim, flattened.sizes, flattened.dim_splits)


def _find_flattened(x: Any) -> _Flattened | None:
    """Return the stack of which the lazy view ``x`` is a flattened view; None if no dim of it is flattened."""
    if not isinstance(x, LazyView) or x._origin.pinned or x._layout.dtype.is_complex or 0 in x._layout.shape:
        return None
    origin = x._origin
    base, shape = origin.base, x._layout.shape
    base_shape = base._layout.shape
    if origin.view_kind == "all" and (at := find_merged_dim(base_shape, shape)) is not None:
        return _Flattened(base, at, base_shape[at : at + 1 + len(base_shape) - len(shape)], (), at)
    inner = _find_flattened(base)
    dim = None if inner is None else _map_dim(origin.plan, inner.dim, x._place)
    if inner is None or dim is None or shape[dim] != base_shape[inner.dim]:  # a part of the flattened dim
        return None
    return _Flattened(inner.stack, inner.at, inner.sizes, (*inner.after, (origin, x._place)), dim)


def _map_dim(plan: CallPlan, dim: int, place: int) -> int | None:
    """Return the dim of a view's result that shows dim ``dim`` of its base; None if there is none."""
    factors = None if plan.chosen is None else plan.chosen.choice.factors
    if factors is None or not factors.operands[0][dim] or place >= len(factors.results):
        return None
    return find_exact_dim(factors.results[place], factors.operands[0][dim])


# --- dependence on the order along the dim ---------------------------------------------------------------------------------
FlattenedDims = tuple[tuple[int | None, ...], tuple[int | None, ...]]  # the flattened dim of each operand, and of each result
_FLATTENED_DIMS: BoundedDict[Any, FlattenedDims | None] = BoundedDict(4096, "flattened_dims.positions")


def _get_or_find_dims(
    operator: OperatorSchema, marked: tuple[Any, Any], tensors: Sequence[Any], flattened_by_tensor: Sequence[_Flattened | None]
) -> FlattenedDims | None:
    """Return the flattened dims of operands and results, cached; see :func:`_find_dims`."""
    layouts = [(x._layout,) if isinstance(x, DTensor) else (tuple(x.shape), x.stride(), x.dtype) for x in tensors]
    key = (operator.func, nested_key(marked), *layouts, dims := tuple([x and x.dim for x in flattened_by_tensor]))
    if key not in _FLATTENED_DIMS:
        _FLATTENED_DIMS.keep(key, _find_dims(operator, marked, tensors, dims))
    return _FLATTENED_DIMS.get(key)


def _find_dims(
    operator: OperatorSchema, marked: tuple[Any, Any], tensors: Sequence[Any], dims: tuple[int | None, ...]
) -> FlattenedDims | None:
    """Return the index of the flattened dim in each operand and result; None if the operator depends on the order along it."""
    bound, rule = operator.bind(*_map_arguments(*marked, lambda mark: tensors[mark.place], _TensorMark)), lookup(operator.func)
    meshes = tuple(meshes_of(bound.values()))
    if len(meshes) > 1 or rule is None or operator.traits.per_element or rule.measured:
        return None
    if rule.answer or rule.decompose or rule.local_args:  # these may use the offset of a shard
        return None
    call, slots = make_call(operator, meshes[0], layouts_of_arguments(operator, bound, meshes[0]))
    if rule.writes is not None and rule.writes(call):  # writes must reach the operand, not a tensor that is made for this call
        return None
    try:
        metas = rule.metas(call) if rule.metas is not None else infer_results(operator, rule, call)
    except ShapeInferenceError:
        return None
    call.results = metas
    factors = None if any(not isinstance(meta, Meta | None) for meta in metas) else rule.factors(call)
    if factors is None:
        return None
    marked_arguments = operator.bind(*marked)
    operand_index = {
        marked_arguments[name] if k is None else marked_arguments[name][k]: i
        for i, (name, k) in enumerate(slots)
        if name in operator.tensors
    }
    operands = [factors.operands[operand_index[_TensorMark(place)]] for place in range(len(tensors))]
    factors_of_dim = {operand[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None}
    lengths = {x.shape[dim] for x, dim in zip(tensors, dims, strict=True) if dim is not None}
    if (
        len(factors_of_dim) != 1
        or len(lengths) != 1
        or len(name := factors_of_dim.pop()) != 1
        or not is_order_invariant(rule, factors, name[0])
    ):
        return None
    for tensor in (*operands, *factors.results):
        if [each for each in tensor if name[0] in each] not in ([], [name]):  # the factor is part of a dim, or of several dims
            return None
    return tuple(find_exact_dim(operand, name) for operand in operands), tuple(
        find_exact_dim(result, name) for result in factors.results
    )


# --- flatten and unflatten shards ------------------------------------------------------------------------------------------
def _flatten_operand(x: DTensor, flattened: _Flattened | None, dim: int, leader: _Flattened) -> DTensor:
    """Return the operand ``x`` with each rank's shards flattened: the slices of ``dim`` are in the order of ranks."""
    if flattened is None or flattened.dim != dim or flattened.sizes != leader.sizes:
        shape = [*x.shape[:dim], *leader.sizes, *x.shape[dim + 1 :]]
        flattened = _Flattened(_aten.reshape.default(x, shape), dim, leader.sizes, (), dim)
    at, count = flattened.at, len(flattened.sizes)
    split_layout, merged = merged_layout(flattened.stack._layout, at, leader.sizes, leader.dim_splits)
    local = _redistribute_local(flattened.stack, split_layout)
    result = wrap(communicator_of(split_layout.mesh).map(lambda _, block: block.flatten(at, at + count - 1), local), merged)
    for origin, place in flattened.after:
        results = dispatch(DTensor, origin.operator.func, (), (result, *origin.args[1:]), origin.kwargs)
        result = results[place] if isinstance(results, (list, tuple)) else results
    return result


def _unflatten_result(x: DTensor, dim: int, sizes: tuple[int, ...], dim_splits: DimSplits) -> DTensor:
    """Return the result ``x`` of flattened shards as a lazy view, with the global order along ``dim``, of a stack."""
    flat_layout, stack = stack_layout(x._layout, dim, sizes, dim_splits)

    def unflatten_shard(member: int | None, shard: torch.Tensor) -> torch.Tensor:
        shape = stack.local_shape(flat_layout.mesh.coordinate_of(member))
        return shard.unflatten(dim, shape[dim : dim + len(sizes)])

    stack_tensor = wrap(communicator_of(flat_layout.mesh).map(unflatten_shard, _redistribute_local(x, flat_layout)), stack)
    result = cast(DTensor, dispatch(DTensor, _aten.view.default, (), (stack_tensor, list(x.shape))))
    # user code holds the result or its views; the reference is weak because the result holds the stack
    stack_tensor.__dict__["_version_owner"] = weakref.ref(result)
    return result


def _redistribute_local(x: DTensor, layout: Layout) -> Any:
    return x._local if x._layout is layout else redistribute_local(x._local, x._layout, layout)


# --- tensors in arguments --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _TensorMark:
    """The index of a tensor among the tensors of a call; it replaces the tensor in the arguments."""

    place: int


def _map_arguments(
    args: Any, kwargs: Any, function: Callable[[Any], Any], kind: type = torch.Tensor
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call with ``function`` applied to each value of class ``kind``, in order."""

    def map_value(value: Any) -> Any:
        """Apply ``function`` to an argument, or to the items of a list argument, of class ``kind``."""
        if isinstance(value, (list, tuple)):
            return [function(item) if isinstance(item, kind) else item for item in value]
        return function(value) if isinstance(value, kind) else value

    return tuple([map_value(value) for value in args]), {name: map_value(value) for name, value in kwargs.items()}
