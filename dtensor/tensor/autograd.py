"""Autograd functions between local tensors and global tensors, and the gradient of each.

The gradient of a DTensor is a global tensor, so every layout of it is right. The functions choose a cheap one. Local tensors are
different: the gradient of the local tensor of *one rank* depends on its placement.

======================= ================================================================================
placement               gradient of the local tensor, with G the gradient of the global tensor
======================= ================================================================================
Shard(d)                the same block of G
Replicate               G (all ranks hold the same value and compute the same)
Partial(sum)            G, because the value is the sum of the local tensors
Partial(avg)            G / number of ranks
Partial(max, min, ...)  an error: redistribute to Replicate() before you use the local tensors
======================= ================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from ..base.caches import memoize
from ..base.selective_checkpoint import selective_checkpoint_mode
from ..base.torch_internals import forward_ad, functorch_active
from ..base.tracing import check_not_in_graph
from ..comm import PerRank, shards_of
from ..comm.map_ranks import communicator_of
from ..dispatch import redistribute_grad_unless_planned, redistribute_under_policy
from ..errors import UnsupportedOperationError
from ..layout.expanded_storage import repeated_dims
from ..layout.layout import Layout
from ..placement import Partial, Placement, Placements, Replicate
from ..ranks.per_rank_functorch import join_ranks
from ..redistribute import execute, move_between, plan, start
from ..state.functorch import detach_any, is_inside_transform, is_wrapped_by_transform, layout_of
from ..state.shared_memory import clone_if_aliased, storage_addresses
from ..state.version_counters import check_unwritten
from ..state.wrap import wrap_local, wrap_pending
from .functorch_function import FunctorchFunction, make_apply
from .observers import ACTIVE_OBSERVERS, notify_layout_read, notify_redistributed
from .replica_gradients import compare_replicas, find_use

BATCH_GRAD_PLACEMENTS = "_own_uses"
"""Attribute of a parameter of a data-parallel unit: mesh dim that shards the batch -> the Partial of its local gradients."""


def grad_layout(layout: Layout, placements: Placements | None) -> Layout:
    """Return the gradient's layout: ``layout`` with ``placements`` if given, else with Partial replaced by Replicate.

    With ``placements`` it has these. By default, and along mesh dims that placements by name leave out, it is ``layout`` with
    Partial replaced by Replicate.
    """
    reduced = _without_partials(layout)
    return reduced if placements is None else reduced.replace(placements=placements)


def local_grad_layout(x: Any, layout: Layout, placements: Placements | None) -> Layout:
    """Return the layout of the gradient of ``x.to_local()``; partial over the batch's mesh dims for FSDP parameters.

    As :func:`grad_layout`, except for parameters of data-parallel units (``BATCH_GRAD_PLACEMENTS``): along mesh dims that shard
    the batch, ranks compute different gradients of equal values, so there the gradient is partial.
    """
    batch_placements = x.__dict__.get(BATCH_GRAD_PLACEMENTS) if placements is None else None
    if batch_placements:
        reduced = _without_partials(layout).placements
        placements = [batch_placements.get(i, p) if isinstance(p, Replicate) else p for i, p in enumerate(reduced)]
    return grad_layout(layout, placements)


@memoize(4096)
def _without_partials(layout: Layout) -> Layout:
    return layout.reduced()


def redistribute_no_grad(x: Any, target: Layout) -> Any:
    """Return ``x`` redistributed to the placements of ``target``, without autograd.

    No gradient is recorded, and the result may share memory with ``x``.
    """
    local = execute(plan(x._layout, x._layout.replace(placements=target.placements)), x._local)
    return wrap_local(local, x._layout.replace(placements=target.placements))


def zeros_outside_mesh(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the local tensor of a rank outside the mesh: zeros, whatever that rank passed."""
    return local.detach().new_zeros(layout.local_shape(None))


class _DTensorFunction(FunctorchFunction):
    """An autograd function of DTensors that also runs under ``torch.func`` transforms."""

    @staticmethod
    def lay(x: Any, placements: Sequence[Placement]) -> Any:
        return redistribute_if_needed(x, placements)


def _without_repeated_dims(layout: Layout) -> Layout:
    """Return ``layout`` with row-major strides if it is of an expanded tensor: gradients of its repeated elements differ."""
    return layout.replace(shape=layout.shape) if repeated_dims(layout) else layout


class FromLocal(_DTensorFunction):
    """Local tensors -> DTensor. Takes one local tensor for each rank in this process."""

    @staticmethod
    def forward(layout: Layout, backward: Layout, copied: bool, *locals_: torch.Tensor) -> Any:
        """Return the DTensor of the local tensors, as copies if ``copied``; a rank outside the mesh gets zeros."""
        comm = communicator_of(layout.mesh)
        if not comm.held:
            return wrap_local(zeros_outside_mesh(locals_[0], layout), layout)
        return wrap_local(comm.local([local.detach().clone() if copied else local.detach() for local in locals_]), layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the layout, the gradient layout, and the shapes of the local tensors for backward."""
        ctx.layout, ctx.target, ctx.copied = inputs[:3]
        ctx.shapes, ctx.device = [local.shape for local in inputs[3:]], inputs[3].device
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Return the tangent of the DTensor, from the tangents of the local tensors."""
        _grad_divisor(ctx.layout)
        like = next(tangent for tangent in tangents if tangent is not None)
        tangent_locals = [like.new_zeros(shape) if t is None else t for t, shape in zip(tangents[3:], ctx.shapes, strict=True)]
        tangent_locals = copies_for_ranks(tangent_locals[0], ctx.layout) if ctx.copied else tangent_locals
        return from_local_recorded(ctx.layout, ctx.target, ctx.copied, *tangent_locals)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the local gradients, in the layout that ``from_local`` was asked for."""
        if grad is None:  # gradients are global, so it is None on all ranks
            return None, None, None, *[None] * len(ctx.shapes)
        if not communicator_of(ctx.layout.mesh).held:
            return None, None, None, torch.zeros(ctx.shapes[0], dtype=ctx.layout.dtype, device=ctx.device)
        divisor, grad = _grad_divisor(ctx.layout), to_dtensor_grad(grad, ctx.layout)
        target = layout_of(grad).replace(placements=ctx.target.placements)
        target_grad = redistribute_recorded(grad, target, False, None)
        grad_locals = to_local_recorded(
            target_grad if divisor == 1 else target_grad / divisor, target, _second_grad_layout(target, ctx.layout, ctx.copied)
        )
        return None, None, None, *(grad_locals if type(grad_locals) is tuple else (grad_locals,))


class ToLocal(_DTensorFunction):
    """DTensor -> local tensor of this rank; a tuple with one tensor for each rank if all ranks are in this process."""

    @staticmethod
    def forward(x: Any, source: Layout, backward: Layout) -> Any:
        local = x._local
        return tuple(shard.view_as(shard) for shard in local.shards) if isinstance(local, PerRank) else local.view_as(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the source's layout, the gradient layout, and the program line that :func:`compare_replicas` names."""
        _, ctx.source, target = inputs
        ctx.target = _without_repeated_dims(target)
        ctx.use = find_use(ctx.target)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        tangent = to_dtensor_grad(tangent, ctx.source)
        return to_local_recorded(redistribute_if_needed(tangent, ctx.source.placements), ctx.source, ctx.target)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Return the local gradients as a DTensor, after replicas compared their gradients."""
        layout, local_grads = ctx.target, list(map(to_plain_grad, grads))
        compare_replicas(layout, local_grads, ctx.use)
        return from_local_recorded(layout, grad_layout(layout, None), False, *map(_make_writable, local_grads)), None, None


def get_replica(x: Any, shared: bool) -> torch.Tensor:
    """Return the value of a replicated DTensor as a plain tensor; a copy if ``shared`` (other code holds the same memory)."""
    first: torch.Tensor = shards_of(x._local)[0]
    return first.clone() if shared else first.detach()


class FullTensor(_DTensorFunction):
    """Replicated DTensor -> one plain tensor, also if all ranks are in this process; see :func:`get_replica`."""

    @staticmethod
    def forward(x: Any, backward: Layout, shared: bool) -> Any:
        return get_replica(x, shared)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.target = _without_repeated_dims(inputs[1])
        ctx.use = find_use(ctx.target)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return to_full_tensor(tangent, None)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradient of the DTensor: each rank's shard of the plain gradient, which all ranks have."""
        layout, copied, grad = ctx.target, communicator_of(ctx.target.mesh).holds_all, to_plain_grad(grad)
        compare_replicas(layout, [grad], ctx.use)
        return (
            from_local_recorded(layout, grad_layout(layout, None), copied, *copies_for_ranks(_make_writable(grad), layout)),
            None,
            None,
        )


def redistribute_to_copy(x: Any, target: Layout, async_op: bool = False) -> Any:
    """Return the DTensor ``x`` with the layout ``target``, in memory of its own. No gradient is recorded."""
    check_not_in_graph(x, "redistribute()")
    steps = None if x._layout.mesh != target.mesh else plan(x._layout, target)
    if selective_checkpoint_mode() is not None:
        result = redistribute_under_policy(x, target, steps)
        return notify_redistributed(x, result) if ACTIVE_OBSERVERS else result
    if steps is not None and not (async_op and steps.communicates):
        local = execute(steps, x._local)
        result = wrap_local(local if steps.communicates else clone_if_aliased(local, storage_addresses(x._local)), target)
    else:
        pending = move_between(x._local, x._layout, target) if steps is None else start(steps, x._local)
        result = wrap_pending(check_unwritten(pending, [x]), target, x._local) if async_op else wrap_local(pending.wait(), target)
    return notify_redistributed(x, result) if ACTIVE_OBSERVERS else result


class Redistribute(_DTensorFunction):
    """DTensor -> the same global value with another layout.

    The gradient gets the layout of the source, with Partial replicated.
    """

    @staticmethod
    def forward(x: Any, target: Layout, async_op: bool, backward_dtype: torch.dtype | None) -> Any:
        return redistribute_to_copy(x, target, async_op)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.source, ctx.target, ctx.backward_dtype = layout_of(inputs[0]), inputs[1], inputs[3]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return _redistribute_like(to_dtensor_grad(tangent, ctx.source), grad_layout(ctx.target, None))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Redistribute the gradient to the gradient layout of the source, in its dtype."""
        if grad is None:
            return None, None, None, None
        grad = to_dtensor_grad(grad, ctx.target)
        if ctx.backward_dtype is not None:
            grad = grad.to(ctx.backward_dtype)
        redistribute_back = partial(_redistribute_like, grad, grad_layout(ctx.source, None))
        source_grad = (
            redistribute_grad_unless_planned(grad, redistribute_back)
            if layout_of(grad).mesh is ctx.source.mesh
            else redistribute_back()
        )
        return (source_grad if source_grad.dtype == ctx.source.dtype else source_grad.to(ctx.source.dtype)), None, None, None


def redistribute_if_needed(x: Any, placements: Placements) -> Any:
    """Return the DTensor ``x`` with other placements; ``x`` itself if it has them. Differentiable, also under ``torch.func``."""
    layout = layout_of(x)
    target = layout.replace(placements=placements)
    return x if target is layout else _redistribute(x, target)


def _redistribute(x: Any, target: Layout) -> Any:
    return redistribute_recorded(x, target, False, None) if is_recorded(x) else redistribute_to_copy(x, target)


def _redistribute_like(x: Any, like: Layout) -> Any:
    """Return ``x`` on the mesh and with the placements of ``like``."""
    layout = layout_of(x)
    if layout.mesh is like.mesh:
        return redistribute_if_needed(x, like.placements)
    return redistribute_recorded(x, Layout.of(like.mesh, like.placements, layout.shape, layout.stride, layout.dtype), False, None)


from_local_recorded, full_tensor_recorded = make_apply(FromLocal), make_apply(FullTensor)
to_local_recorded, redistribute_recorded = make_apply(ToLocal), make_apply(Redistribute)


def is_recorded(x: torch.Tensor) -> bool:
    """Return True if autograd, forward-mode AD or a ``torch.func`` transform records operations on ``x``.

    Below transforms (in code that runs under their interpreter) it is False.
    """
    if functorch_active():
        return is_inside_transform()
    return (x.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0 or is_wrapped_by_transform(x)


def to_full_tensor(x: Any, grad_placements: Placements | None) -> torch.Tensor:
    """Return the global value of a DTensor as a plain tensor with memory of its own; see ``DTensor.full_tensor``."""
    layout = layout_of(x)
    mesh, target = layout.mesh, layout.replace(placements=[Replicate()] * layout.mesh.ndim)
    backward = None if grad_placements is None else grad_layout(target, grad_placements)  # raises before any communication
    check_not_in_graph(x, "full_tensor()")
    is_replicated = target is layout
    replicated = x if is_replicated else _redistribute(x, target)
    has_partial_grad = (
        backward is not None and any(isinstance(p, Partial) for p in backward.placements) and is_recorded(replicated)
    )
    # each rank has a gradient, or a value, of its own
    if communicator_of(mesh).holds_all and (has_partial_grad or not mesh.spans_root):
        locals_ = to_local_tensor(replicated, local_grad_layout(x, target, grad_placements).placements)
        return locals_.clone() if is_replicated else locals_
    if is_recorded(replicated):
        return cast(torch.Tensor, full_tensor_recorded(replicated, local_grad_layout(x, target, grad_placements), is_replicated))
    return get_replica(replicated, is_replicated)


def to_local_tensor(
    x: Any, grad_placements: Placements | None = None, give: Callable[..., Any] = to_local_recorded
) -> torch.Tensor:
    """Return the local tensors of a DTensor, with a gradient that ``give`` records; see ``DTensor.to_local``."""
    if ACTIVE_OBSERVERS and hasattr(x, "_layout"):
        notify_layout_read(x)
    layout = layout_of(x)
    locals_ = give(x, layout, local_grad_layout(x, layout, grad_placements))
    return join_ranks(locals_, PerRank) if type(locals_) is tuple else locals_


def to_plain_grad(grad: Any) -> Any:
    """Return a gradient of a plain tensor as a plain tensor.

    It may be a DTensor, for example if a number was multiplied by a DTensor. All ranks hold the number.
    """
    return to_full_tensor(grad, None) if layout_of(grad) is not None else grad


def _make_writable(grad: Any) -> Any:
    """Return ``grad``, as a copy if elements share memory (stride 0): autograd adds to gradients in place."""
    return grad.contiguous() if grad is not None and 0 in grad.stride() and grad.numel() > 1 else grad


def to_dtensor_grad(grad: Any, like: Layout, placements: Placements | None = None) -> Any:
    """Return a gradient of a DTensor as a DTensor, on the mesh of ``like``.

    The user may pass a plain one, equal on all ranks (``y.backward(torch.ones(3))``). It gets ``placements``, by default
    Replicate.
    """
    if layout_of(grad) is not None:
        return grad
    layout = Layout.replicated(like.mesh, grad.shape, grad.stride(), grad.dtype)
    target = layout if placements is None else layout.replace(placements=placements)
    if communicator_of(like.mesh).holds_all or is_recorded(grad):
        return redistribute_if_needed(
            from_local_recorded(layout, layout, True, *copies_for_ranks(grad, layout)), target.placements
        )
    local = execute(plan(layout, target), grad.detach())
    return wrap_local(local.clone(), target)  # the user may write to it, and efficient zeros have no memory


def _second_grad_layout(grad: Layout, source: Layout, copied: bool) -> Layout:
    """Return the layout of second derivatives of the gradient that :meth:`FromLocal.backward` splits into local tensors.

    An addend of a partial value was a variable of its own on each rank, a replica was not. With ``copied``, one tensor was copied
    to all ranks, and only the first copy has a derivative.
    """
    single_valued = (Partial, Replicate) if copied else (Partial,)
    placements = (
        Partial()
        if isinstance(p, Replicate) and isinstance(source_placement, single_valued)
        else Replicate()
        if isinstance(p, Partial)
        else p
        for p, source_placement in zip(grad.placements, source.placements, strict=True)
    )
    return grad.replace(placements=tuple(placements))


def copies_for_ranks(value: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return ``value`` as the local tensor of each rank in this process; of replicas only the first gets a gradient.

    If all ranks are in this process, the replicas are one value, and so are the copies on a submesh. The gradient arrives once,
    from the first of them; the others are detached.
    """
    mesh, coordinates = layout.mesh, set()
    if not communicator_of(mesh).holds_all:
        return [value]
    replicated_dims = [i for i, p in enumerate(layout.placements) if isinstance(p, Replicate)]
    copies = []
    for coordinate in mesh.coordinates:
        copies.append(detach_any(value) if coordinate in coordinates or any(coordinate[i] for i in replicated_dims) else value)
        coordinates.add(coordinate)
    return copies


def _grad_divisor(layout: Layout) -> int:
    """Return the number by which the gradient of the local tensors is smaller than the gradient of the global tensor.

    Raises:
        UnsupportedOperationError: a partial placement with another reduction than sum and avg.
    """
    for op in layout.partials:
        if op not in (None, "sum", "avg"):
            raise UnsupportedOperationError(
                f"the gradient of the local tensors of {layout!r} is not defined by the local tensors alone; call "
                ".redistribute(placements=[Replicate()] * mesh.ndim) before you use the value"
            )
    return math.prod(layout.mesh.shape[i] for i, op in enumerate(layout.partials) if op == "avg")
