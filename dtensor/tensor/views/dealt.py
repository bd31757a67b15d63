"""A dim of few equal parts, one behind the other, and the same as a stack of these parts, each of which all ranks share: from one
to the other in one exchange.

Of the rows of a fused projection's matrix, those of queries, keys and values, a rank has some that lie together; what meets a
gradient whose heads are cut needs the rows of its heads in each part. As a view that would be gathered: no block shows it.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ...base.caches import remembered
from ...comm import communicator_of
from ...dispatch.dispatcher import install_joining
from ...dispatch.steps import Runner
from ...layout.layout import Layout
from ...layout.splits import Split, chunk_sizes
from ...propagation.propagate import Plan as Planned
from ...propagation.schema import Operator, operator_of
from ...redistribute import Plan, execute_many, plan
from ...rules.rule import stands
from ...rules.windows import windowed
from ..dtensor import DTensor, wrap
from .folded_layouts import Cuts, merged_layout
from .remote_view import Origin, RemoteView, plan_of, seen_as

_FEW = 8  # each part is a move of its own, though all go in one collective


class Dealt(NamedTuple):
    """Dim ``dim`` of ``layout``, and by part how it is dealt out to the ranks of a stack, and brought back."""

    layout: Layout
    whole: Layout  # of the stack, with none of its parts' dims cut
    dim: int
    out: tuple[Plan, ...]
    back: tuple[Plan, ...]

    def stack(self, local: Any, stack: Layout) -> Any:
        """What ranks have of a stack of the parts that lies so."""
        comm = communicator_of(stack.mesh)
        parts = [comm.map(partial(self._piece, k), local) for k in range(len(self.out))]
        return comm.map(
            lambda member, *found: torch.stack(found, self.dim).reshape(stack.local_shape(stack.mesh.coordinate_of(member))),
            *execute_many(self.out, parts).wait(),
        )

    def flat(self, local: Any, stack: Layout) -> Any:
        """What ranks have of the dim, of a stack of its parts that lies so."""
        comm, dim, end = communicator_of(stack.mesh), self.dim, self.dim + 1 + stack.ndim - self.layout.ndim
        parts = [comm.map(lambda _, block, k=k: block.select(dim, k).flatten(dim, end - 2), local) for k in range(len(self.back))]
        return comm.map(lambda _, *found: torch.cat(found, dim), *execute_many(self.back, parts).wait())

    def _piece(self, k: int, member: int | None, block: torch.Tensor) -> torch.Tensor:
        """What a member's block has of a part."""
        size, coordinate = self.out[k].src.shape[self.dim], self.layout.mesh.coordinate_of(member)
        begin = 0 if coordinate is None else self.layout.local_offset(coordinate)[self.dim]
        first, last = (min(max(bound - begin, 0), block.shape[self.dim]) for bound in (k * size, (k + 1) * size))
        return block.narrow(self.dim, first, last - first)


@remembered(4096)
def dealt(layout: Layout, dim: int, sizes: tuple[int, ...], cuts: Cuts) -> Dealt | None:
    """How ``dim`` is dealt out as a stack of few parts that is cut along the next dim alone; None where that is no such case."""
    own, (first, *inner) = layout.splits[dim], cuts
    if own is None or first is not None or not inner or inner[0] is None or any(inner[1:]) or not 1 < sizes[0] <= _FEW:
        return None
    if own.mesh_dims != inner[0].mesh_dims or any(layout.partials[m] is not None for m in own.mesh_dims) or 0 in layout.shape:
        return None
    size = layout.shape[dim] // sizes[0]
    rest = size // sizes[1]
    spread = _part(layout, dim, size, Split(own.mesh_dims, tuple([each * rest for each in inner[0].sizes])))
    lying = [
        _part(layout, dim, size, Split(own.mesh_dims, windowed(own.sizes, range(k * size, (k + 1) * size))))
        for k in range(sizes[0])
    ]
    splits = [*layout.splits[:dim], *[None] * len(sizes), *layout.splits[dim + 1 :]]
    shape = [*layout.shape[:dim], *sizes, *layout.shape[dim + 1 :]]
    whole = Layout.from_splits(layout.mesh, splits, layout.partials, shape, None, layout.dtype)
    return Dealt(layout, whole, dim, tuple([plan(part, spread) for part in lying]), tuple([plan(spread, part) for part in lying]))


def _part(layout: Layout, dim: int, size: int, split: Split) -> Layout:
    splits, shape = [*layout.splits], [*layout.shape]
    splits[dim], shape[dim] = split, size
    return Layout.from_splits(layout.mesh, splits, layout.partials, shape, None, layout.dtype)


def evenly_dealt(stack: Layout, dim: int, sizes: tuple[int, ...], cuts: Cuts) -> Dealt | None:
    """How the parts of a stack are dealt out where they are one behind the other, as evenly as can be; None as of ``dealt``."""
    (_, inner), size = cuts[:2], math.prod(sizes)
    if inner is None:
        return None
    splits = [
        *stack.splits[:dim],
        Split(inner.mesh_dims, chunk_sizes(size, tuple([stack.mesh.shape[m] for m in inner.mesh_dims]))),
        *stack.splits[dim + len(sizes) :],
    ]
    shape = [*stack.shape[:dim], size, *stack.shape[dim + len(sizes) :]]
    return dealt(Layout.from_splits(stack.mesh, splits, stack.partials, shape, None, stack.dtype), dim, sizes, cuts)


# --- parts that are joined ----------------------------------------------------------------------------------------------
@dataclass(slots=True, eq=False)
class Joined(Origin):
    """Of parts one behind the other, which are kept as a stack; who reads them in that order has them dealt out."""

    how: Dealt | None = None

    def computed(self, base: DTensor) -> list[DTensor]:
        assert self.how is not None
        return [wrap(self.how.flat(base._local, base._layout), self.how.layout)]


def joined(stack: DTensor, how: Dealt) -> RemoteView:
    """The view of a stack that has its parts one behind the other."""
    view, args = operator_of(torch.ops.aten.view.default), (stack, list(how.layout.shape))
    made = seen_as(Joined(stack, view, args, {}, plan_of(view, args, {}), how=how), how.layout, 0)
    stack.__dict__["_counted"] = weakref.ref(made)  # which user code has, as views of it; weakly, since it has the stack
    return made


def joining(plan: Planned, operator: Operator, found: Layout | Runner) -> Layout | Runner:
    """How to run a plan that joins few parts, of each of which all ranks have as much: a stack until somebody reads them."""
    how = None if plan.chosen is None or operator.mutated or not plan.moves else _joins(plan)
    if how is None:
        return found
    (name,) = operator.tensors
    sizes = (len(how.out), how.out[0].src.shape[how.dim])
    stack = merged_layout(how.whole, how.dim, sizes, (None, plan.call.operands[0].splits[how.dim]))[0]

    def run(args: Any, kwargs: Any, *_: Any) -> Any:
        locals_ = [x._local for x in operator.bind(args, kwargs)[name]]
        local = communicator_of(stack.mesh).map(lambda _, *blocks: torch.stack(blocks, how.dim), *locals_)
        return joined(wrap(local, stack), how)

    return run


def _joins(plan: Planned) -> Dealt | None:
    """How a plan's result is dealt out: each operand is a window of it, as large as the others and behind the one before, and all
    lie alike, cut along the dim that is joined."""
    assert plan.chosen is not None
    factors, (first, *others) = plan.chosen.choice.factors, plan.call.operands
    names = {key[2] for key in factors.windows}
    (result,) = plan.results if len(plan.results) == 1 else (None,)
    if len(names) != 1 or not others or any(x is not first for x in others) or first.sized or not isinstance(result, Layout):
        return None
    dim = stands(factors.results[0], name := names.pop())
    size = 0 if dim is None else first.shape[dim]
    windows = {("operand", i, name): range(i * size, (i + 1) * size) for i in range(len(plan.call.operands))}
    if dim is None or factors.windows != windows or any(dims != factors.results[0] for dims in factors.operands):
        return None
    return dealt(result, dim, (len(others) + 1, size), (None, first.splits[dim]))


install_joining(joining)
