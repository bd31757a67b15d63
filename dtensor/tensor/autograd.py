"""The autograd functions between local and global values, and the law of each.

A gradient of a DTensor is a global value too, so any layout of it is right; the functions only choose a cheap one.
Local values are different: what the gradient of *one rank's piece* is depends on how the piece makes up the whole.

======================= ==================================================================================
piece under             gradient of the piece, with G the gradient of the global value
======================= ==================================================================================
Shard(d)                the same block of G
Replicate               G (all ranks hold the same value and compute the same thing)
Partial(sum)            G, since the value is the sum of the pieces
Partial(avg)            G / ranks
Partial(max, min, ...)  refused: redistribute to Replicate() before using the pieces
======================= ==================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ..base.caches import remembered
from ..base.selective_checkpoint import policy_mode
from ..base.torch_internals import forward_ad, functorch_active
from ..base.tracing import not_in_graph
from ..comm import PerRank, communicator_of, shards_of
from ..dispatch.announced import move_under_policy
from ..dispatch.functorch import Transformed, alone, is_wrapped, layout_of, recorded, transformed
from ..dispatch.grad_redistribute import brought
from ..dispatch.output_aliasing import apart, memory_of, unwritten
from ..dispatch.wrap import wrap_local, wrap_pending
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..placement import Partial, Placement, Replicate
from ..ranks.functorch import as_one
from ..redistribute import execute, move_between, plan, start
from .observers import observed, tell_looked_at, tell_moved
from .replica_gradients import compare_replicas, use_of

OWN_USES = "_own_uses"  # of a data-parallel unit's parameter: by mesh dim along which ranks have batches, what their terms are


def grad_layout(layout: Layout, placements: Sequence[Placement] | None) -> Layout:
    """The layout in which a gradient crosses between local and global: as given, else ``layout`` with Partial replicated."""
    return _without_partials(layout) if placements is None else layout.replace(placements=placements)


def pieces_gradient(x: Any, layout: Layout, placements: Sequence[Placement] | None) -> Layout:
    """The layout in which the gradient of pieces of ``x``, under ``layout``, comes back: as given, else as :func:`grad_layout`,
    but as terms along the mesh dims along which ranks use what is alike for parts of their own (``OWN_USES``)."""
    own = x.__dict__.get(OWN_USES) if placements is None else None
    if own:
        whole = _without_partials(layout).placements
        placements = [own.get(i, p) if isinstance(p, Replicate) else p for i, p in enumerate(whole)]
    return grad_layout(layout, placements)


@remembered(4096)
def _without_partials(layout: Layout) -> Layout:
    return layout.reduced()


def move(x: Any, target: Layout) -> Any:
    """``x`` (a DTensor) under another layout of the same shape, no gradient recorded."""
    local = execute(plan(x._layout, x._layout.replace(placements=target.placements)), x._local)
    return wrap_local(local, x._layout.replace(placements=target.placements))


def nothing_of(piece: torch.Tensor, layout: Layout) -> torch.Tensor:
    """What a rank outside the mesh holds, whatever it gave."""
    return piece.detach().new_zeros(layout.local_shape(None))


class _Laid(Transformed):
    """What goes through transforms, and lays what they hide by :func:`laid`."""

    @staticmethod
    def lay(x: Any, placements: Sequence[Placement]) -> Any:
        return laid(x, placements)


class FromLocal(_Laid):
    """Pieces -> global. One piece per rank held in this process."""

    @staticmethod
    def forward(layout: Layout, backward: Layout, copied: bool, *pieces: torch.Tensor) -> Any:
        comm = communicator_of(layout.mesh)
        if not comm.held:
            return wrap_local(nothing_of(pieces[0], layout), layout)
        return wrap_local(comm.local([piece.detach().clone() if copied else piece.detach() for piece in pieces]), layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.layout, ctx.target, ctx.copied = inputs[:3]
        ctx.shapes, ctx.device = [piece.shape for piece in inputs[3:]], inputs[3].device
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _share(ctx.layout)
        some = next(tangent for tangent in tangents if tangent is not None)
        pieces = [some.new_zeros(shape) if t is None else t for t, shape in zip(tangents[3:], ctx.shapes, strict=True)]
        pieces = everywhere(pieces[0], ctx.layout) if ctx.copied else pieces
        return from_pieces(ctx.layout, ctx.target, ctx.copied, *pieces)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:  # of a global value, so on all ranks
            return None, None, None, *[None] * len(ctx.shapes)
        if not communicator_of(ctx.layout.mesh).held:
            return None, None, None, torch.zeros(ctx.shapes[0], dtype=ctx.layout.dtype, device=ctx.device)
        scale, grad = _share(ctx.layout), distributed(grad, ctx.layout)
        target = layout_of(grad).replace(placements=ctx.target.placements)
        moved = redistributed(grad, target, False, None)
        pieces = to_local(moved if scale == 1 else moved / scale, target, _differing(target, ctx.layout, ctx.copied))
        return None, None, None, *(pieces if type(pieces) is tuple else (pieces,))


class ToLocal(_Laid):
    """Global -> this rank's piece; a tuple with one per rank where all ranks are in this process."""

    @staticmethod
    def forward(x: Any, source: Layout, backward: Layout) -> Any:
        local = x._local
        return tuple(piece.view_as(piece) for piece in local.shards) if isinstance(local, PerRank) else local.view_as(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.source, ctx.target = inputs
        ctx.use = use_of(ctx.target)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        tangent = distributed(tangent, ctx.source)
        return to_local(laid(tangent, ctx.source.placements), ctx.source, ctx.target)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        layout, pieces = ctx.target, list(map(plain, grads))
        compare_replicas(layout, pieces, ctx.use)
        return from_pieces(layout, grad_layout(layout, None), False, *map(_apart, pieces)), None, None


def whole_piece(x: Any, shared: bool) -> torch.Tensor:
    """The value of a replicated DTensor; a copy if that is ``shared``."""
    first: torch.Tensor = shards_of(x._local)[0]
    return first.clone() if shared else first.detach()


class FullTensor(_Laid):
    """A replicated DTensor -> one plain tensor, also where all ranks live in this process; see :func:`whole_piece`."""

    @staticmethod
    def forward(x: Any, backward: Layout, shared: bool) -> Any:
        return whole_piece(x, shared)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.target, ctx.use = inputs[1], use_of(inputs[1])

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return to_whole(tangent, None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        layout, copied, grad = ctx.target, communicator_of(ctx.target.mesh).holds_all, plain(grad)
        compare_replicas(layout, [grad], ctx.use)
        return from_pieces(layout, grad_layout(layout, None), copied, *everywhere(_apart(grad), layout)), None, None


def move_apart(x: Any, target: Layout, async_op: bool = False) -> Any:
    """``x`` (a DTensor) under another layout, with memory of its own; no gradient recorded."""
    not_in_graph(x, "redistribute()")
    moves = None if x._layout.mesh != target.mesh else plan(x._layout, target)
    if policy_mode() is not None:
        made = move_under_policy(x, target, moves)
        return tell_moved(x, made) if observed else made
    if moves is not None and not (async_op and moves.communicates):
        local = execute(moves, x._local)
        made = wrap_local(local if moves.communicates else apart(local, memory_of(x._local)), target)
    else:
        arriving = move_between(x._local, x._layout, target) if moves is None else start(moves, x._local)
        made = wrap_pending(unwritten(arriving, [x]), target, x._local) if async_op else wrap_local(arriving.wait(), target)
    return tell_moved(x, made) if observed else made


class Redistribute(_Laid):
    """The same global value under another layout; the gradient comes back in the source's (Partial replicated)."""

    @staticmethod
    def forward(x: Any, target: Layout, async_op: bool, backward_dtype: torch.dtype | None) -> Any:
        return move_apart(x, target, async_op)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.source, ctx.target, ctx.backward_dtype = layout_of(inputs[0]), inputs[1], inputs[3]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return _on_mesh(distributed(tangent, ctx.source), grad_layout(ctx.target, None))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None, None
        grad = distributed(grad, ctx.target)
        if ctx.backward_dtype is not None:
            grad = grad.to(ctx.backward_dtype)
        back = partial(_on_mesh, grad, grad_layout(ctx.source, None))
        moved = brought(grad, back) if layout_of(grad).mesh is ctx.source.mesh else back()
        return (moved if moved.dtype == ctx.source.dtype else moved.to(ctx.source.dtype)), None, None, None


def laid(x: Any, placements: Sequence[Placement]) -> Any:
    """``x`` (a DTensor, also one that ``torch.func`` hides) under other placements; differentiable."""
    layout = layout_of(x)
    target = layout.replace(placements=placements)
    return x if target is layout else _moved(x, target)


def _moved(x: Any, target: Layout) -> Any:
    return redistributed(x, target, False, None) if is_recorded(x) else move_apart(x, target)


def _on_mesh(x: Any, like: Layout) -> Any:
    """``x`` where ``like`` is, as that is placed."""
    layout = layout_of(x)
    if layout.mesh is like.mesh:
        return laid(x, like.placements)
    return redistributed(x, Layout.of(like.mesh, like.placements, layout.shape, layout.stride, layout.dtype), False, None)


from_pieces, whole_of = recorded(FromLocal), recorded(FullTensor)
to_local, redistributed = recorded(ToLocal), recorded(Redistribute)


def is_recorded(x: torch.Tensor) -> bool:
    """Whether somebody differentiates here, backward or forward, or sees one of a batch; below transforms nobody does."""
    if functorch_active():
        return transformed()
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0 or is_wrapped(x)


def to_whole(x: Any, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
    """The global value of a DTensor as a plain tensor with memory of its own; see ``DTensor.full_tensor``."""
    layout = layout_of(x)
    if grad_placements is not None:
        grad_layout(layout, grad_placements)  # wrong ones raise before anything is moved
    mesh, target = layout.mesh, layout.replace(placements=[Replicate()] * layout.mesh.ndim)
    not_in_graph(x, "full_tensor()")
    is_whole = target is layout
    whole = x if is_whole else _moved(x, target)
    terms = grad_placements is not None and any(isinstance(p, Partial) for p in grad_placements) and is_recorded(whole)
    if communicator_of(mesh).holds_all and (terms or not mesh.spans_root):  # each rank has a gradient, or a value, of its own
        made = as_local(whole, pieces_gradient(x, target, grad_placements).placements)
        return made.clone() if is_whole else made
    if is_recorded(whole):
        return cast(torch.Tensor, whole_of(whole, pieces_gradient(x, target, grad_placements), is_whole))
    return whole_piece(whole, is_whole)


def as_local(x: Any, grad_placements: Sequence[Placement] | None = None, give: Callable[..., Any] = to_local) -> torch.Tensor:
    """The pieces of a DTensor, recorded by ``give``; see ``DTensor.to_local``."""
    if observed and hasattr(x, "_layout"):
        tell_looked_at(x)
    layout = layout_of(x)
    made = give(x, layout, pieces_gradient(x, layout, grad_placements))
    return as_one(made, PerRank) if type(made) is tuple else made


def plain(grad: Any) -> Any:
    """A gradient of a plain tensor, which a DTensor may have given (a number times a DTensor): all ranks hold the number."""
    return to_whole(grad, None) if layout_of(grad) is not None else grad


def _apart(grad: Any) -> Any:
    """A gradient that can be written to, as autograd does with those that it adds up: not one element seen many times."""
    return grad.contiguous() if grad is not None and 0 in grad.stride() and grad.numel() > 1 else grad


def distributed(grad: Any, like: Layout, placements: Sequence[Placement] | None = None) -> Any:
    """A gradient of a DTensor; a plain one (``y.backward(torch.ones(3))``), which all ranks hold, is cut as ``placements``."""
    if layout_of(grad) is not None:
        return grad
    layout = Layout.replicated(like.mesh, grad.shape, grad.stride(), grad.dtype)
    target = layout if placements is None else layout.replace(placements=placements)
    if communicator_of(like.mesh).holds_all or is_recorded(grad):
        return laid(from_pieces(layout, layout, True, *everywhere(grad, layout)), target.placements)
    part = execute(plan(layout, target), grad.detach())
    return wrap_local(part.clone(), target)  # the user may write to it, and some zeros have no memory


def _differing(grad: Layout, source: Layout, copied: bool) -> Layout:
    """How second derivatives come back to a whole gradient of pieces: each term was a variable of its own, each replica was not
    (where one tensor was copied to all, the first alone has a derivative)."""
    apart = (Partial, Replicate) if copied else (Partial,)
    again = (
        Partial() if isinstance(p, Replicate) and isinstance(own, apart) else Replicate() if isinstance(p, Partial) else p
        for p, own in zip(grad.placements, source.placements, strict=True)
    )
    return grad.replace(placements=tuple(again))


def everywhere(value: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """One plain tensor as the piece of every member held here. Where that are all, replicas are one value, as are the copies on a
    submesh: its gradient comes once, from the first."""
    mesh, firsts = layout.mesh, set()
    if not communicator_of(mesh).holds_all:
        return [value]
    again = [i for i, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    pieces = []
    for at in mesh.coordinates:
        pieces.append(alone(value) if at in firsts or any(at[i] for i in again) else value)
        firsts.add(at)
    return pieces


def _share(layout: Layout) -> int:
    """By what the gradient of a piece is smaller than that of the whole."""
    for op in layout.partials:
        if op not in (None, "sum", "avg"):
            raise UnsupportedOperationError(
                f"the gradient of the local tensors of {layout!r} is not defined by the local tensors alone; call "
                ".redistribute(placements=[Replicate()] * mesh.ndim) before you use the value"
            )
    return math.prod(layout.mesh.shape[i] for i, op in enumerate(layout.partials) if op == "avg")
