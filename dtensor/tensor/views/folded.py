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
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch

from ...base.caches import Bounded, nested_key, remembered
from ...comm import communicator_of
from ...dispatch.dispatcher import dispatch
from ...dispatch.plain_operands import replicated, taken_as_replicated
from ...layout.layout import Layout
from ...layout.splits import Split
from ...propagation.propagate import Plan
from ...propagation.schema import Operator, operator_of
from ...redistribute import redistribute_local
from ...rules.rule import alone
from ..dtensor import DTensor, wrap
from .dealt import Joined, dealt, evenly_dealt, joined
from .folded_layouts import Cuts, cut_otherwise, merged_layout, stack_layout
from .orderless import Mark, Places, replaced, where_folded
from .remote_view import Origin, RemoteView, is_local, plan_of

_aten = torch.ops.aten


class _Folded(NamedTuple):
    """A tensor as views of a stack of which dims ``at``, ... (as many as ``sizes``) are one: its dim ``dim``."""

    stack: DTensor
    at: int
    sizes: tuple[int, ...]
    after: tuple[tuple[Origin, int], ...]
    dim: int

    @property
    def cuts(self) -> Cuts:
        return self.stack._layout.splits[self.at : self.at + len(self.sizes)]


def on_the_stack(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``operator`` gives where it need not read the folded dim in its order; NotImplemented elsewhere."""
    if operator.facts.shows == "all":
        return _seen_again(operator, args, kwargs)
    if operator.is_view:
        return _turned(operator, args, kwargs)
    if operator.mutated or operator.seeded or operator.fills_lists or not operator.gives_tensors:
        return NotImplemented
    key = None if kwargs else _key(operator, args)
    known = None if key is None else _PLACED.get(key)
    if known is not None:
        return _placed_again(known, operator, args)
    tensors: list[Any] = []

    def mark(x: torch.Tensor) -> Mark:
        tensors.append(x)
        return Mark(len(tensors) - 1)

    marked = replaced(args, kwargs, mark)
    found = [_folded(x) if type(x) is RemoteView else None for x in tensors]
    leader = max((x for x in found if x is not None), key=lambda x: math.prod(x.stack._layout.shape), default=None)
    if leader is None:
        return NotImplemented
    where = where_folded(operator, marked, tensors, tuple([x and x.dim for x in found]))
    if where is None or any(_outweighs(*each, leader) for each in zip(tensors, found, where[0], strict=True)):
        return NotImplemented
    given = []
    for x, folded, dim in zip(tensors, found, where[0], strict=True):
        if dim is not None and not isinstance(x, DTensor):
            if not taken_as_replicated(x):
                return NotImplemented
            x = replicated(x, leader.stack._layout.mesh)
        given.append(x if dim is None else _in_blocks(x, folded, dim, leader))
    if key is not None:
        _note_placed(key, where, found, leader)
    made = dispatch(DTensor, operator.func, (), *replaced(*marked, lambda mark: given[mark.place], Mark))
    beside = None if torch.Tag.pointwise in operator.func.tags else _smaller(tensors, found, where[0], leader)
    parts = any(type(x) is RemoteView and type(x._origin) is Joined for x in tensors)

    def unfolded(x: DTensor, dim: int | None) -> Any:
        if dim is None:
            return x
        brought = None if beside is None else _brought(x, dim, leader, *beside)
        return _unfolded(x, dim, leader.sizes, leader.cuts, parts) if brought is None else brought

    if not isinstance(made, (list, tuple)):
        return unfolded(made, where[1][0])
    dims = iter(where[1])
    return type(made)([x if x is None else unfolded(x, next(dims)) for x in made])


def _smaller(
    tensors: Sequence[Any], found: Sequence[_Folded | None], dims: Sequence[int | None], leader: _Folded
) -> tuple[int, Split] | None:
    """How many elements the largest operand has that is no stack, is cut along the dim by itself and no larger than the stack,
    and how it is cut: results as small as it are brought to where it lies."""
    cut = [
        (x._layout.numel, split)
        for x, folded, dim in zip(tensors, found, dims, strict=True)
        if folded is None and dim is not None and isinstance(x, DTensor) and (split := x._layout.splits[dim]) is not None
    ]
    return max((each for each in cut if each[0] <= leader.stack._layout.numel), default=None, key=lambda each: each[0])


def _outweighs(x: Any, folded: _Folded | None, dim: int | None, leader: _Folded) -> bool:
    """Whether the folded tensor is read, rather than ``x`` cut as that is: it is smaller, or as large and in larger blocks."""
    if folded is not None or dim is None or not isinstance(x, DTensor) or not any(x._layout.splits):
        return False
    return (x._layout.numel, -x._layout.max_local_nbytes) > (leader.stack._layout.numel, -leader.stack._layout.max_local_nbytes)


# --- calls like one before: the blocks, the operator on them, the stack that it gives -------------------------------------------
class _Placed(NamedTuple):
    """Of each argument that is folded the first and last dim and the layout of its blocks; the folded dim of the result, and
    whether it is of few parts."""

    blocks: tuple[tuple[int, int, Layout] | None, ...]
    dim: int | None
    sizes: tuple[int, ...]
    cuts: Cuts
    parts: bool


_PLACED: Bounded[Any, _Placed] = Bounded(4096, "folded.placed")
_SHAPES: Bounded[Any, list[int]] = Bounded(4096, "folded.shapes")


def _key(operator: Operator, args: tuple[Any, ...]) -> Any:
    """All that tells how a call of tensors alone is placed."""
    key: list[Any] = [id(operator.func)]
    for x in args:
        if type(x) is RemoteView and x._origin.shows == "all" and not x._origin.pinned:
            key += type(x._origin), x._origin.base._layout, x._layout
        elif type(x) is DTensor:
            key.append(x._layout)
        else:
            return None
    return tuple(key)


def _note_placed(key: Any, where: Places, found: Sequence[_Folded | None], leader: _Folded) -> None:
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
        _PLACED.keep(key, _Placed(tuple(blocks), where[1][0], leader.sizes, leader.cuts, Joined in key))


def _placed_again(known: _Placed, operator: Operator, args: tuple[Any, ...]) -> Any:
    given = [x if block is None else _block(x._origin.base, *block) for x, block in zip(args, known.blocks, strict=True)]
    made = dispatch(DTensor, operator.func, (), tuple(given), {})
    return made if known.dim is None else _unfolded(made, known.dim, known.sizes, known.cuts, known.parts)


def _block(stack: DTensor, first: int, last: int, merged: Layout) -> DTensor:
    return wrap(communicator_of(merged.mesh).map(lambda _, block: block.flatten(first, last), stack._local), merged)


def _seen_again(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of the folded dim in another shape is one of the stack."""
    one = None if kwargs or len(args) != 2 else _key(operator, args[:1])
    key = None if one is None else (*one, nested_key(args[1]))
    shape = None if key is None else _SHAPES.get(key)
    if shape is not None:
        return _view(args[0]._origin.base, shape)
    folded = _folded(args[0])
    if folded is None or folded.after:
        return NotImplemented
    shape = list(plan_of(operator, args, kwargs).results[0].shape)
    if not is_local(plan_of(operator_of(_aten.view.default), (folded.stack, shape), {})):
        return NotImplemented
    if key is not None:
        _SHAPES.keep(key, shape)
    return _view(folded.stack, shape)


def _view(stack: DTensor, shape: list[int]) -> Any:
    """The stack may be a remote view itself, which what is written must reach."""
    view = _aten.view.default
    return dispatch(DTensor, view, (), (stack, shape)) if type(stack) is DTensor else view(stack, shape)


def _turned(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With its dims in another order the folded tensor is the same of the stack with its dims in that order."""
    folded = _folded(args[0])
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
    if type(args[0]._origin) is Joined and type(stack) is DTensor:
        dim = order.index(folded.dim)
        cuts = stack._layout.splits[dim : dim + len(folded.sizes)]
        if (how := evenly_dealt(stack._layout, dim, tuple(folded.sizes), cuts)) is not None:
            return joined(stack, how)
    stack.__dict__.setdefault("_counted", folded.stack.__dict__.get("_counted", folded.stack))
    return _aten.view.default(stack, [args[0].shape[d] for d in order])


# --- what is folded --------------------------------------------------------------------------------------------------------
def _folded(x: Any) -> _Folded | None:
    if not isinstance(x, RemoteView) or x._origin.pinned or x._layout.dtype.is_complex or 0 in x._layout.shape:
        return None
    origin = x._origin
    base, shape = origin.base, x._layout.shape
    before = base._layout.shape
    if origin.shows == "all" and (at := _merged(before, shape)) is not None:
        return _Folded(base, at, before[at : at + 1 + len(before) - len(shape)], (), at)
    inner = _folded(base)
    dim = None if inner is None else _carried(origin.plan, inner.dim, x._place)
    if inner is None or dim is None or shape[dim] != before[inner.dim]:  # a part of it
        return None
    return _Folded(inner.stack, inner.at, inner.sizes, (*inner.after, (origin, x._place)), dim)


@remembered(4096)
def _merged(before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """Where several dims become one, all others as they were.

    >>> _merged((2, 3, 4), (6, 4)), _merged((2, 3, 4), (2, 12)), _merged((2, 3, 4), (4, 6))
    (0, 1, None)
    """
    count = 1 + len(before) - len(after)
    if count < 2:
        return None
    at = next((d for d, (one, other) in enumerate(zip_longest(before, after)) if one != other), 0)
    return at if (*before[:at], math.prod(before[at : at + count]), *before[at + count :]) == after else None


def _carried(plan: Plan, dim: int, place: int) -> int | None:
    """The dim of a view's result that shows ``dim`` of its base."""
    factors = None if plan.chosen is None else plan.chosen.choice.factors
    if factors is None or not factors.operands[0][dim] or place >= len(factors.results):
        return None
    return alone(factors.results[place], factors.operands[0][dim])


# --- blocks as they lie, and back ------------------------------------------------------------------------------------------
def _in_blocks(x: DTensor, folded: _Folded | None, dim: int, leader: _Folded) -> DTensor:
    """``x`` with the slices of ``dim`` in the order of ranks."""
    if folded is None and type(x) is DTensor and (how := dealt(x._layout, dim, tuple(leader.sizes), leader.cuts)) is not None:
        cut, merged = merged_layout(how.whole, dim, leader.sizes, leader.cuts)
        return wrap(_merged_blocks(how.stack(x._local, cut), cut, dim, len(leader.sizes)), merged)
    if folded is None or folded.dim != dim or folded.sizes != leader.sizes:
        shape = [*x.shape[:dim], *leader.sizes, *x.shape[dim + 1 :]]
        folded = _Folded(_aten.reshape.default(x, shape), dim, leader.sizes, (), dim)
    at, count = folded.at, len(folded.sizes)
    cut, merged = merged_layout(folded.stack._layout, at, leader.sizes, leader.cuts)
    local = _moved(folded.stack, cut)
    made = wrap(_merged_blocks(local, cut, at, count), merged)
    for origin, place in folded.after:
        each = dispatch(DTensor, origin.operator.func, (), (made, *origin.args[1:]), origin.kwargs)
        made = each[place] if isinstance(each, (list, tuple)) else each
    return made


def _merged_blocks(local: Any, cut: Layout, at: int, count: int) -> Any:
    return communicator_of(cut.mesh).map(lambda _, block: block.flatten(at, at + count - 1), local)


def _brought(x: DTensor, dim: int, leader: _Folded, numel: int, split: Split) -> DTensor | None:
    """``x`` with ``dim`` cut so, the slices in their own order, where it has no more elements than ``numel``."""
    flat = cut_otherwise(x._layout, dim, split)
    how = dealt(flat, dim, leader.sizes, leader.cuts) if flat.numel <= numel else None
    if how is None:
        return None
    stack = _stack_of(x, dim, leader.sizes, leader.cuts)
    return wrap(how.flat(stack._local, stack._layout), flat)


def _stack_of(x: DTensor, dim: int, sizes: tuple[int, ...], cuts: Cuts) -> DTensor:
    cut, stack = stack_layout(x._layout, dim, sizes, cuts)

    def of_block(member: int | None, block: torch.Tensor) -> torch.Tensor:
        shape = stack.local_shape(cut.mesh.coordinate_of(member))
        return block.unflatten(dim, shape[dim : dim + len(sizes)])

    return wrap(communicator_of(cut.mesh).map(of_block, _moved(x, cut)), stack)


def _unfolded(x: DTensor, dim: int, sizes: tuple[int, ...], cuts: Cuts, parts: bool = False) -> DTensor:
    """The view of a stack that ``x`` is, the slices of ``dim`` in their own order again; ``parts``: these are few."""
    made = _stack_of(x, dim, sizes, cuts)
    if parts and (how := evenly_dealt(made._layout, dim, sizes, cuts)) is not None:
        return joined(made, how)
    result = cast(DTensor, dispatch(DTensor, _aten.view.default, (), (made, list(x.shape))))
    made.__dict__["_counted"] = weakref.ref(result)  # which user code has, as views of it; weakly, since it has the stack
    return result


def _moved(x: DTensor, layout: Layout) -> Any:
    return x._local if x._layout is layout else redistribute_local(x._local, x._layout, layout)
