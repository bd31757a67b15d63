"""Leaf gradients: each arrives in the layout of its leaf, and gradients of one backward pass are redistributed in batches.

Autograd computes the gradients of a model one after the other, often as partial values: each rank has the gradient of its part of
the batch. Reducing them one by one costs the latency of a collective for each parameter. So gradients that must be redistributed
wait until they have ``BATCH_NBYTES`` bytes, the pass ends, or one of them is read. Then they go in few collectives, while the
pass goes on.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch

from ..base.torch_internals import autograd_node, engine, graph_task
from ..base.tracing import is_tracing
from ..comm import Pending, shards_of
from ..comm.events import CAUSES, listeners
from ..errors import DTensorError
from ..layout.layout import Layout
from ..placement import Placement
from ..redistribute import Plan, execute_many, plan
from ..state.functorch import is_wrapped_by_transform
from ..state.version_counters import WriteCheck, check_unwritten
from ..state.wrap import BATCH_TENSORS, wrap_pending
from .autograd import grad_layout, is_recorded, redistribute_if_needed, to_dtensor_grad
from .observers import ACTIVE_OBSERVERS, notify_gradient

BATCH_NBYTES = 25 << 20  # bytes of the largest local tensors, equal on all ranks


def install_grad_hook(leaf: Any) -> None:
    """Install the hook that redistributes each gradient of ``leaf`` to the layout of the leaf before accumulation.

    The hook holds only the layout, which :func:`update_hook_layout` updates when ``.data`` is assigned. A reference would keep
    the leaf alive, and a weak reference would prevent ``torch.utils.swap_tensors``.
    """
    if "_grad_layout" in leaf.__dict__:
        return
    leaf_class: Any = type(leaf)
    layout_cell: list[Any] = [
        leaf._layout
    ]  # then the redistribution cache of the leaf, see dispatch/programs/redistribution_cache.py

    def to_leaf_layout(grad: Any) -> Any:
        """Return the gradient in the layout of its leaf, or None if it has it."""
        layout = layout_cell[0]
        if len(layout_cell) > 1:
            layout_cell.pop().copies.clear()
        if grad is None:
            return None
        if ACTIVE_OBSERVERS:
            notify_gradient(grad, layout_cell)
        has_layout = type(grad) is leaf_class and grad._layout is layout is grad_layout(layout, None)
        if has_layout or is_wrapped_by_transform(grad):
            return None
        placements, mesh = grad_layout(layout, None).placements, layout.mesh
        if not hasattr(grad, "_layout"):  # the user passed it to backward()
            return to_dtensor_grad(grad, layout, placements)
        grad_layout_ = grad._layout
        if grad_layout_.mesh is not mesh and grad_layout_.mesh != mesh:  # the leaf was a number in a program on another mesh
            return grad.redistribute(mesh, placements)
        target = grad_layout_.replace(placements=placements)
        redistributed = None if target is grad_layout_ else _redistribute_in_batch(grad, target)
        if not _needs_dense_copy(target):
            return redistributed
        source = grad if redistributed is None else redistributed
        return torch.empty_like(source, memory_format=torch.contiguous_format).copy_(source)

    setattr(to_leaf_layout, "expects_none", True)  # noqa: B010  types know no attributes of functions
    leaf.register_hook(to_leaf_layout)
    leaf.__dict__["_grad_layout"] = layout_cell


def update_hook_layout(leaf: Any) -> None:
    """Make the gradient hook of ``leaf`` use its present layout; do nothing if it has no hook."""
    if (current := leaf.__dict__.get("_grad_layout")) is not None:
        current[0] = leaf._layout


def has_no_other_hooks(leaf: Any) -> bool:
    """Return True if a leaf has no gradient hooks, except that of :func:`install_grad_hook`."""
    hooks = leaf._backward_hooks
    return not leaf._post_accumulate_grad_hooks and (not hooks or (len(hooks) == 1 and "_grad_layout" in leaf.__dict__))


def grad_placements_of(leaf: Any) -> tuple[Placement, ...]:
    """Return the placements of the gradient of a leaf: those of the leaf, with Partial replaced by Replicate."""
    return grad_layout(leaf._layout, None).placements


def _needs_dense_copy(layout: Layout) -> bool:
    """Return True if a gradient with ``layout`` has stride-0 dims and uneven shards, and must be copied before autograd does.

    Autograd stores a copy of a gradient with overlapping memory. Its copy operator uses more memory than the gradient, so
    sharding propagation would choose even shards for it. The copy that is made here keeps the layout.
    """
    return 0 in layout.stride and any(split is not None and split.sizes[0] < max(split.sizes) for split in layout.splits)


def _redistribute_in_batch(grad: Any, target: Layout) -> Any:
    """Redistribute ``grad`` to ``target``, in the batch of this backward pass if it communicates and nothing observes it.

    It is redistributed at once if that needs no communication, or if autograd, an observer or a compiler must see the step.
    """
    steps = plan(grad._layout, target)
    if not steps.communicates or is_recorded(grad) or ACTIVE_OBSERVERS or graph_task() == -1 or is_tracing():
        return redistribute_if_needed(grad, target.placements)
    batch = _current_batch()
    return _wrap_pending_grad(batch.add(grad, steps), batch.waiting, target, grad._local)


def _wrap_pending_grad(pending: Pending[Any], waiting: list[weakref.ref[Any]], target: Layout, like: Any) -> Any:
    """Return a gradient of layout ``target`` that waits for ``pending``, and add it to its batch's list ``waiting``.

    This function has a frame of its own, without communication. A debugger that holds the frame of a collective would hold the
    gradient, and autograd would then copy it, and wait for it, on this rank only.
    """
    result = wrap_pending(pending, target, like)
    result.__dict__[BATCH_TENSORS] = waiting
    waiting.append(weakref.ref(result))
    return result


class GradBatchCause(NamedTuple):
    """Reason of a batch of redistributions, for listeners: the autograd node that computed the first gradient."""

    node: Any


class _GradBatch:
    """Gradients of one backward pass that are redistributed together."""

    def __init__(self, task: int, previous: _GradBatch | None) -> None:
        self.task, self.previous, self.nbytes = task, previous, 0
        self.plans: list[Plan] = []
        self.entries: list[tuple[Any, Any, WriteCheck]] = []  # gradient, local tensor, check for writes since it was added
        self.pending: Pending[Any] | None = None
        self.waiting: list[weakref.ref[Any]] = []  # the pending gradients of this batch
        self.cause = GradBatchCause(autograd_node()) if listeners else None

    def add(self, grad: Any, steps: Plan) -> Pending[Any]:
        """Add a gradient and its redistribution plan to the batch; start the batch if it is full. Return the pending result."""
        index, local = len(self.plans), grad._local  # read once: a lazy view may return another one each time
        self.plans.append(steps)
        self.entries.append((grad, local, WriteCheck((grad, *shards_of(local)))))
        self.nbytes += steps.src.max_local_nbytes
        if self.nbytes >= BATCH_NBYTES:
            self.start()
        return Pending(lambda: self.wait()[index])

    def start(self) -> None:
        """Start the redistribution of the batch, and wait for the batch before it."""
        if self.pending is not None:
            return
        if any(check.was_written() for *_, check in self.entries):
            raise DTensorError(
                "the gradient of a leaf was written to in place before its reduction ended: a hook of another "
                "tensor shares its memory; return a new tensor from that hook"
            )
        grads, locals_ = [grad for grad, _, _ in self.entries], [local for _, local, _ in self.entries]
        with nullcontext() if self.cause is None else CAUSES.entered(self.cause):
            self.pending = check_unwritten(execute_many(self.plans, locals_), grads)
        self.entries, previous, self.previous = [], self.previous, None
        if previous is not None:
            previous.wait()

    def wait(self) -> Any:
        """Return the redistributed local tensors, after they have arrived."""
        self.start()
        assert self.pending is not None
        return self.pending.wait()

    def finish(self) -> None:
        """Wait for the batch at the end of the backward pass, and turn its pending gradients into plain DTensors."""
        self.wait()
        for ref in self.waiting:
            if (grad := ref()) is not None:
                grad._local  # noqa: B018  a read turns it into a plain DTensor
        self.waiting.clear()


_CURRENT = threading.local()  # .batch: weak reference to the next batch of this thread; its gradients keep it alive


def _current_batch() -> _GradBatch:
    """Return the batch of this backward pass that is not started yet, or a new one that ends with the pass."""
    task, last = graph_task(), getattr(_CURRENT, "batch", lambda: None)()
    if last is not None and last.task == task and last.pending is None:
        return cast(_GradBatch, last)
    batch = _GradBatch(task, last if last is not None and last.task == task else None)
    _CURRENT.batch = weakref.ref(batch)
    engine.queue_callback(batch.finish)
    return batch
