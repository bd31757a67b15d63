"""Dims folded into one, ``x.view(-1, k)``, where an inner one of them is cut: operators that do not care for the order of the
folded dim run on the blocks as they lie.

``linear``, ``matmul`` and many a model fold all dims but the last ones: into rows, or into a batch of matrices. Where a dim other
than the first of them is sharded (a sequence, heads), blocks of the stack are no blocks of the folded dim: the view is a remote
one, and to read it moves every element. But an operator that does the same to every slice along a dim, or adds up over it, gives
the same whatever the order of the slices, as long as that is one order for all operands. So each rank's block is folded where it
is, which is the folded tensor in the order of ranks; the operator runs on that; and its results, unfolded, are stacks again, of
which they are views. Whether an operator is of that kind its rule says: the folded dim is one factor, cut without a kernel (but
an orderless one) and without a word about where a block begins.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from ...base.caches import Bounded, nested_key
from ...comm import communicator_of
from ...dispatch.cross_mesh import meshes_of
from ...dispatch.dispatcher import dispatch
from ...dispatch.operand_layouts import laid_out
from ...dispatch.plain_tensor_args import replicated, taken_as_replicated
from ...dispatch.torch_constants import with_constants
from ...layout.layout import Layout
from ...propagation.make_call import make_call
from ...propagation.op_schema import Operator, operator_of
from ...propagation.propagate import Plan
from ...propagation.shape_inference import NotInferable, results_of
from ...redistribute import redistribute_local
from ...rules import lookup
from ...rules.call import Meta
from ...rules.order_invariance import orderless
from ...rules.rule import alone
from ..dtensor import DTensor, wrap
from .flattened_layouts import DimSplits, find_kept_dim, find_merged_dim, merged_layout, stack_layout
from .lazy_view import Origin, RemoteView, is_local, plan_of

_aten = torch.ops.aten


class _Flattened(NamedTuple):
    """A tensor as views of a stack of which dims ``at``, ... (as many as ``sizes``) are one: its dim ``dim``."""

    stack: DTensor
    at: int
    sizes: tuple[int, ...]
    after: tuple[tuple[Origin, int], ...]
    dim: int

    @property
    def cuts(self) -> DimSplits:
        return self.stack._layout.splits[self.at : self.at + len(self.sizes)]


def run_on_stack(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``operator`` gives where it need not read the folded dim in its order; NotImplemented elsewhere."""
    if operator.facts.shows == "all":
        return _view_stack(operator, args, kwargs)
    if operator.is_view:
        return _permute_stack(operator, args, kwargs)
    if operator.mutated or operator.seeded or operator.fills_lists or not operator.gives_tensors:
        return NotImplemented
    key = None if kwargs else _call_key(operator, args)
    known = None if key is None else _CACHED_CALLS.get(key)
    if known is not None:
        return _run_cached_call(known, operator, args)
    tensors: list[Any] = []

    def mark(x: torch.Tensor) -> _TensorMark:
        tensors.append(x)
        return _TensorMark(len(tensors) - 1)

    marked = _map_arguments(args, kwargs, mark)
    found = [_find_flattened(x) if type(x) is RemoteView else None for x in tensors]
    leader = max((x for x in found if x is not None), key=lambda x: math.prod(x.stack._layout.shape), default=None)
    if leader is None:
        return NotImplemented
    constants = None if all(isinstance(x, DTensor) for x in tensors) else with_constants(operator, operator.bind(args, kwargs))
    if constants is not None:
        return constants(args, kwargs)
    where = _get_or_find_dims(operator, marked, tensors, found)
    if where is None or any(_is_cheaper_to_read(*each, leader) for each in zip(tensors, found, where[0], strict=True)):
        return NotImplemented
    given = []
    for x, folded, dim in zip(tensors, found, where[0], strict=True):
        if dim is not None and not isinstance(x, DTensor):
            if not taken_as_replicated(x):
                return NotImplemented
            x = replicated(x, leader.stack._layout.mesh)
        given.append(x if dim is None else _flatten_operand(x, folded, dim, leader))
    if key is not None:
        _cache_call(key, where, found, leader)
    made = dispatch(DTensor, operator.func, (), *_map_arguments(*marked, lambda mark: given[mark.place], _TensorMark))
    if not isinstance(made, (list, tuple)):
        return made if where[1][0] is None else _unflatten_result(made, where[1][0], leader.sizes, leader.cuts)
    dims = iter(where[1])
    each = [x if x is None or (dim := next(dims)) is None else _unflatten_result(x, dim, leader.sizes, leader.cuts) for x in made]
    return type(made)(each)


def _is_cheaper_to_read(x: Any, folded: _Flattened | None, dim: int | None, leader: _Flattened) -> bool:
    """Whether the folded tensor is read, rather than ``x`` cut as that is: it is smaller, or as large and in larger blocks."""
    if folded is not None or dim is None or not isinstance(x, DTensor) or not any(x._layout.splits):
        return False
    return (x._layout.numel, -x._layout.max_local_nbytes) > (leader.stack._layout.numel, -leader.stack._layout.max_local_nbytes)


# --- calls like one before: the blocks, the operator on them, the stack that it gives -------------------------------------------
class _CachedCall(NamedTuple):
    """Of each argument that is folded the first and last dim and the layout of its blocks; the folded dim of the result."""

    blocks: tuple[tuple[int, int, Layout] | None, ...]
    dim: int | None
    sizes: tuple[int, ...]
    cuts: DimSplits


_CACHED_CALLS: Bounded[Any, _CachedCall] = Bounded(4096, "folded.placed")
_VIEW_SHAPES: Bounded[Any, list[list[int]]] = Bounded(4096, "folded.shapes")


def _call_key(operator: Operator, args: tuple[Any, ...]) -> Any:
    """All that tells how a call of tensors alone is placed."""
    key: list[Any] = [id(operator.func)]
    for x in args:
        if type(x) is RemoteView and x._origin.shows == "all" and not x._origin.pinned:
            key += RemoteView, x._origin.base._layout, x._layout
        elif type(x) is DTensor:
            key.append(x._layout)
        else:
            return None
    return tuple(key)


def _cache_call(key: Any, where: FlattenedDims, found: Sequence[_Flattened | None], leader: _Flattened) -> None:
    """A call whose folded tensors are all cut alike, with one result, is known from now on."""
    blocks: list[tuple[int, int, Layout] | None] = []
    for folded, dim in zip(found, where[0], strict=True):
        if dim is None:
            blocks.append(None)
            continue
        if folded is None or folded.after or folded.dim != dim or folded.sizes != leader.sizes:
            return
        cut, merged = merged_layout(folded.stack._layout, dim, leader.sizes, leader.cuts)
        if cut is not folded.stack._layout:
            return
        blocks.append((dim, dim + len(leader.sizes) - 1, merged))
    if len(where[1]) == 1:
        _CACHED_CALLS.keep(key, _CachedCall(tuple(blocks), where[1][0], leader.sizes, leader.cuts))


def _run_cached_call(known: _CachedCall, operator: Operator, args: tuple[Any, ...]) -> Any:
    given = [x if block is None else _flatten_shards(x._origin.base, *block) for x, block in zip(args, known.blocks, strict=True)]
    made = dispatch(DTensor, operator.func, (), tuple(given), {})
    return made if known.dim is None else _unflatten_result(made, known.dim, known.sizes, known.cuts)


def _flatten_shards(stack: DTensor, first: int, last: int, merged: Layout) -> DTensor:
    return wrap(communicator_of(merged.mesh).map(lambda _, block: block.flatten(first, last), stack._local), merged)


def _view_stack(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of the folded dim in another shape is one of the stack, or of the stack in another shape."""
    one = None if kwargs or len(args) != 2 else _call_key(operator, args[:1])
    key = None if one is None else (*one, nested_key(args[1]))
    shapes = None if key is None else _VIEW_SHAPES.get(key)
    if shapes is not None:
        return _view_in_steps(args[0]._origin.base, shapes)
    folded = _find_flattened(args[0])
    if folded is None or folded.after:
        return NotImplemented
    shape = list(plan_of(operator, args, kwargs).results[0].shape)
    between = shape
    if not _is_local_view(folded.stack, between):
        dim = find_kept_dim(tuple(args[0].shape), folded.dim, tuple(shape))
        between = shape if dim is None else [*shape[:dim], *folded.sizes, *shape[dim + 1 :]]
        if dim is None or not _is_local_view(folded.stack, between):
            return NotImplemented
    shapes = [between] if between is shape else [between, shape]
    if key is not None:
        _VIEW_SHAPES.keep(key, shapes)
    return _view_in_steps(folded.stack, shapes)


def _is_local_view(stack: DTensor, shape: list[int]) -> bool:
    """Whether blocks of the stack are blocks of it in that shape."""
    return is_local(plan_of(operator_of(_aten.view.default), (stack, shape), {}))


def _view_in_steps(stack: DTensor, shapes: list[list[int]]) -> Any:
    """The stack may be a remote view itself, which what is written must reach."""
    view, counted, seen = _aten.view.default, stack.__dict__.get("_counted", stack), stack
    for shape in shapes:
        if seen is not stack:
            seen.__dict__["_counted"] = counted
        seen = dispatch(DTensor, view, (), (seen, shape)) if type(seen) is DTensor else view(seen, shape)
    return seen


def _permute_stack(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With its dims in another order the folded tensor is the same of the stack with its dims in that order."""
    folded = _find_flattened(args[0])
    plan = None if folded is None or folded.after else plan_of(operator, args, kwargs)
    if folded is None or plan is None or plan.chosen is None or len(plan.chosen.results) != 1:
        return NotImplemented
    factors = plan.chosen.choice.factors
    (before,), (after,) = factors.operands, factors.results
    if len(set(before)) < len(before) or sorted(before) != sorted(after) or after == before:
        return NotImplemented
    at, extra = folded.at, len(folded.sizes) - 1
    spread = [range(d + extra * (d > at), d + extra * (d >= at) + 1) for d in range(len(before))]
    order = [before.index(name) for name in after]
    stack = _aten.permute.default(folded.stack, [own for d in order for own in spread[d]])
    stack.__dict__.setdefault("_counted", folded.stack.__dict__.get("_counted", folded.stack))
    return _aten.view.default(stack, [args[0].shape[d] for d in order])


# --- what is folded --------------------------------------------------------------------------------------------------------
def find_flattened_dim(x: Any) -> tuple[int, tuple[int, ...], DimSplits] | None:
    """The dim of a view that is folded, of which sizes, and how these are cut; None where it is no such view."""
    folded = _find_flattened(x)
    return None if folded is None or folded.after else (folded.dim, folded.sizes, folded.cuts)


def _find_flattened(x: Any) -> _Flattened | None:
    if not isinstance(x, RemoteView) or x._origin.pinned or x._layout.dtype.is_complex or 0 in x._layout.shape:
        return None
    origin = x._origin
    base, shape = origin.base, x._layout.shape
    before = base._layout.shape
    if origin.shows == "all" and (at := find_merged_dim(before, shape)) is not None:
        return _Flattened(base, at, before[at : at + 1 + len(before) - len(shape)], (), at)
    inner = _find_flattened(base)
    dim = None if inner is None else _map_dim(origin.plan, inner.dim, x._place)
    if inner is None or dim is None or shape[dim] != before[inner.dim]:  # a part of it
        return None
    return _Flattened(inner.stack, inner.at, inner.sizes, (*inner.after, (origin, x._place)), dim)


def _map_dim(plan: Plan, dim: int, place: int) -> int | None:
    """The dim of a view's result that shows ``dim`` of its base."""
    factors = None if plan.chosen is None else plan.chosen.choice.factors
    if factors is None or not factors.operands[0][dim] or place >= len(factors.results):
        return None
    return alone(factors.results[place], factors.operands[0][dim])


# --- whether the order matters ---------------------------------------------------------------------------------------------
FlattenedDims = tuple[tuple[int | None, ...], tuple[int | None, ...]]  # the folded dim of each operand, and of each result
_FLATTENED_DIMS: Bounded[Any, FlattenedDims | None] = Bounded(4096, "folded.places")


def _get_or_find_dims(
    operator: Operator, marked: tuple[Any, Any], tensors: Sequence[Any], found: Sequence[_Flattened | None]
) -> FlattenedDims | None:
    layouts = [(x._layout,) if isinstance(x, DTensor) else (tuple(x.shape), x.stride(), x.dtype) for x in tensors]
    key = (operator.func, nested_key(marked), *layouts, dims := tuple([x and x.dim for x in found]))
    if key not in _FLATTENED_DIMS:
        _FLATTENED_DIMS.keep(key, _find_dims(operator, marked, tensors, dims))
    return _FLATTENED_DIMS.get(key)


def _find_dims(
    operator: Operator, marked: tuple[Any, Any], tensors: Sequence[Any], dims: tuple[int | None, ...]
) -> FlattenedDims | None:
    """Where the folded dim of operands is in all of them and in the results; None where its order matters."""
    bound, rule = operator.bind(*_map_arguments(*marked, lambda mark: tensors[mark.place], _TensorMark)), lookup(operator.func)
    meshes = tuple(meshes_of(bound.values()))
    if len(meshes) > 1 or rule is None or operator.facts.per_element or rule.measured:
        return None
    if rule.answer or rule.decompose or rule.local_args:  # which may ask where a block begins
        return None
    call, slots = make_call(operator, meshes[0], laid_out(operator, bound, meshes[0]))
    if rule.writes is not None and rule.writes(call):  # to what others have, not to blocks made for this call
        return None
    try:
        metas = rule.metas(call) if rule.metas is not None else results_of(operator, rule, call)
    except NotInferable:
        return None
    call.results = metas
    factors = None if any(not isinstance(meta, Meta | None) for meta in metas) else rule.factors(call)
    if factors is None:
        return None
    own = operator.bind(*marked)
    places = {own[name] if k is None else own[name][k]: i for i, (name, k) in enumerate(slots) if name in operator.tensors}
    operands = [factors.operands[places[_TensorMark(place)]] for place in range(len(tensors))]
    names = {operand[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None}
    lengths = {x.shape[dim] for x, dim in zip(tensors, dims, strict=True) if dim is not None}
    if len(names) != 1 or len(lengths) != 1 or len(name := names.pop()) != 1 or not orderless(rule, factors, name[0]):
        return None
    for tensor in (*operands, *factors.results):
        if [each for each in tensor if name[0] in each] not in ([], [name]):  # a part of a dim, or of several
            return None
    return tuple(alone(operand, name) for operand in operands), tuple(alone(result, name) for result in factors.results)


# --- blocks as they lie, and back ------------------------------------------------------------------------------------------
def _flatten_operand(x: DTensor, folded: _Flattened | None, dim: int, leader: _Flattened) -> DTensor:
    """``x`` with the slices of ``dim`` in the order of ranks."""
    if folded is None or folded.dim != dim or folded.sizes != leader.sizes:
        shape = [*x.shape[:dim], *leader.sizes, *x.shape[dim + 1 :]]
        folded = _Flattened(_aten.reshape.default(x, shape), dim, leader.sizes, (), dim)
    at, count = folded.at, len(folded.sizes)
    cut, merged = merged_layout(folded.stack._layout, at, leader.sizes, leader.cuts)
    local = _redistribute_local(folded.stack, cut)
    made = wrap(communicator_of(cut.mesh).map(lambda _, block: block.flatten(at, at + count - 1), local), merged)
    for origin, place in folded.after:
        each = dispatch(DTensor, origin.operator.func, (), (made, *origin.args[1:]), origin.kwargs)
        made = each[place] if isinstance(each, (list, tuple)) else each
    return made


def _unflatten_result(x: DTensor, dim: int, sizes: tuple[int, ...], cuts: DimSplits) -> DTensor:
    """The view of a stack that ``x`` is, the slices of ``dim`` in their own order again."""
    cut, stack = stack_layout(x._layout, dim, sizes, cuts)

    def of_block(member: int | None, block: torch.Tensor) -> torch.Tensor:
        shape = stack.local_shape(cut.mesh.coordinate_of(member))
        return block.unflatten(dim, shape[dim : dim + len(sizes)])

    made = wrap(communicator_of(cut.mesh).map(of_block, _redistribute_local(x, cut)), stack)
    result = cast(DTensor, dispatch(DTensor, _aten.view.default, (), (made, list(x.shape))))
    made.__dict__["_counted"] = weakref.ref(result)  # which user code has, as views of it; weakly, since it has the stack
    return result


def _redistribute_local(x: DTensor, layout: Layout) -> Any:
    return x._local if x._layout is layout else redistribute_local(x._local, x._layout, layout)


# --- arguments -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _TensorMark:
    """The place of a tensor among those of a call."""

    place: int


def _map_arguments(args: Any, kwargs: Any, by: Callable[[Any], Any], kind: type = torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Arguments with something else in the place of each tensor, in their order."""

    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [by(item) if isinstance(item, kind) else item for item in value]
        return by(value) if isinstance(value, kind) else value

    return tuple([of(value) for value in args]), {name: of(value) for name, value in kwargs.items()}
