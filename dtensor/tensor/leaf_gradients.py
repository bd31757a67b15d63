"""Gradients of leaves: each comes to lie as its leaf does, and those of one backward pass travel together.

Autograd gives the gradients of a model one after the other, often as terms: of a batch that is cut, each rank has its part. To
add them up one by one takes the latency of a collective for each parameter. So what has to move waits until ``TOGETHER`` bytes
have come, the pass ends or somebody reads one of them, and goes in few collectives, while the pass goes on.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch

from ..base.torch_internals import autograd_node, engine, graph_task
from ..base.tracing import under_way
from ..comm import Pending, shards_of
from ..comm.events import CAUSES, listeners
from ..dispatch.functorch import is_wrapped
from ..dispatch.output_aliasing import unwritten
from ..dispatch.wrap import SHOWN, wrap_pending
from ..errors import DTensorError
from ..layout.layout import Layout
from ..placement import Placement
from ..redistribute import Plan, execute_many, plan
from .autograd import distributed, grad_layout, is_recorded, laid
from .observers import observed, tell_arrived

TOGETHER = 25 << 20  # bytes of the largest blocks, which all ranks know


def keep_grad_layout(leaf: Any) -> None:
    """Bring what is accumulated in a leaf's gradient to the leaf's layout.

    The hook knows the layout only, which assigning ``.data`` changes (:func:`note_layout`): it must not keep the leaf alive,
    and a weak reference would keep ``torch.utils.swap_tensors`` from exchanging it.
    """
    if "_grad_layout" in leaf.__dict__:
        return
    kind: Any = type(leaf)
    current: list[Any] = [leaf._layout]  # and the forms that are kept of it until now, see dispatch/redistribution_cache.py

    def to_leaf_layout(grad: Any) -> Any:
        layout = current[0]
        if len(current) > 1:
            current.pop().copies.clear()
        if grad is None:
            return None
        if observed:
            tell_arrived(grad, current)
        if (type(grad) is kind and grad._layout is layout is grad_layout(layout, None)) or is_wrapped(grad):  # most often
            return None
        wanted, mesh = grad_layout(layout, None).placements, layout.mesh
        if not hasattr(grad, "_layout"):  # what the user gave to backward()
            return distributed(grad, layout, wanted)
        have = grad._layout
        if have.mesh is not mesh and have.mesh != mesh:  # the leaf was a number in a program on another mesh
            return grad.redistribute(mesh, wanted)
        target = have.replace(placements=wanted)
        moved = None if target is have else _on_its_way(grad, target)
        return _copied(grad if moved is None else moved) if _would_be_dealt(target) else moved

    setattr(to_leaf_layout, "expects_none", True)  # noqa: B010  no attribute of functions that types know
    leaf.register_hook(to_leaf_layout)
    leaf.__dict__["_grad_layout"] = current


def note_layout(leaf: Any) -> None:
    """A tensor's layout has changed."""
    if (current := leaf.__dict__.get("_grad_layout")) is not None:
        current[0] = leaf._layout


def is_told_to_nobody(leaf: Any) -> bool:
    """Whether a leaf's gradient meets no hooks but the one of :func:`keep_grad_layout`."""
    hooks = leaf._backward_hooks
    return not leaf._post_accumulate_grad_hooks and (not hooks or (len(hooks) == 1 and "_grad_layout" in leaf.__dict__))


def grad_placements_of(leaf: Any) -> tuple[Placement, ...]:
    """The placements of a leaf's gradient: its own, a partial leaf's replicated."""
    return grad_layout(leaf._layout, None).placements


def _would_be_dealt(layout: Layout) -> bool:
    """Whether memory repeats a gradient, so that autograd stores a copy, and few ranks have it: what grows is dealt out."""
    return 0 in layout.stride and any(split is not None and split.sizes[0] < max(split.sizes) for split in layout.splits)


def _copied(grad: Any) -> Any:
    return torch.empty_like(grad, memory_format=torch.contiguous_format).copy_(grad)


def _on_its_way(grad: Any, target: Layout) -> Any:
    """``grad`` as ``target``, at once where that moves nothing, or where others look at each step."""
    moves = plan(grad._layout, target)
    if not moves.communicates or is_recorded(grad) or observed or graph_task() == -1 or under_way():
        return laid(grad, target.placements)
    batch = _batch_of_this_pass()
    return _awaited(batch.add(grad, moves), batch.shown, target, grad._local)


def _awaited(arriving: Pending[Any], shown: list[weakref.ref[Any]], target: Layout, like: Any) -> Any:
    """In a frame of its own, in which nothing is communicated: one that a debugger holds would hold the gradient, and autograd
    would read it at once to copy it, on this rank alone."""
    made = wrap_pending(arriving, target, like)
    made.__dict__[SHOWN] = shown
    shown.append(weakref.ref(made))
    return made


class Departure(NamedTuple):
    """Why gradients move, for those who listen: the node of autograd that gave the first of them."""

    node: Any


class _Batch:
    """Gradients of one backward pass that leave together."""

    def __init__(self, task: int, before: _Batch | None) -> None:
        self.task, self.before, self.nbytes = task, before, 0
        self.plans: list[Plan] = []
        self.sent: list[tuple[Any, Any, list[int]]] = []  # with their locals and versions, as autograd gave them
        self.moved: Pending[Any] | None = None
        self.shown: list[weakref.ref[Any]] = []  # the gradients that wait for it
        self.departure = Departure(autograd_node()) if listeners else None

    def add(self, grad: Any, moves: Plan) -> Pending[Any]:
        place, local = len(self.plans), grad._local  # once: a view that is computed may give another one each time
        self.plans.append(moves)
        self.sent.append((grad, local, _versions(grad, local)))
        self.nbytes += moves.src.max_local_nbytes
        if self.nbytes >= TOGETHER:
            self.leave()
        return Pending(lambda: self.arrived()[place])

    def leave(self) -> None:
        """They are under way, and the last ones of those that left before."""
        if self.moved is not None:
            return
        if any(_versions(grad, local) != versions for grad, local, versions in self.sent):
            raise DTensorError(
                "the gradient of a leaf was written to in place before its reduction ended: a hook of another "
                "tensor shares its memory; return a new tensor from that hook"
            )
        grads, locals_ = [grad for grad, _, _ in self.sent], [local for _, local, _ in self.sent]
        with nullcontext() if self.departure is None else CAUSES.entered(self.departure):
            self.moved = unwritten(execute_many(self.plans, locals_), grads)
        self.sent, before, self.before = [], self.before, None
        if before is not None:
            before.arrived()

    def arrived(self) -> Any:
        self.leave()
        assert self.moved is not None
        return self.moved.wait()

    def end(self) -> None:
        """The pass has ended: gradients are there."""
        self.arrived()
        for ref in self.shown:
            if (grad := ref()) is not None:
                grad._local  # noqa: B018  it is no longer one that waits
        self.shown.clear()


_HERE = threading.local()  # the batch that leaves next, of the pass that runs in this thread; weakly, as gradients have it


def _batch_of_this_pass() -> _Batch:
    task, last = graph_task(), getattr(_HERE, "batch", lambda: None)()
    if last is not None and last.task == task and last.moved is None:
        return cast(_Batch, last)
    batch = _Batch(task, last if last is not None and last.task == task else None)
    _HERE.batch = weakref.ref(batch)
    engine.queue_callback(batch.end)
    return batch


def _versions(grad: Any, local: Any) -> list[int]:
    return [t._version for t in (grad, *shards_of(local))]
