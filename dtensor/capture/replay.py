"""The autograd function behind which tapes run, and the one behind which the recorded run itself stands."""

from __future__ import annotations

from typing import Any

import torch

from ..base.torch_internals import autocast_enabled
from ..dispatch.functorch import recorded
from ..errors import CaptureError
from ..tensor.dtensor import DTensor
from .aliasing import detached
from .program import Compiled, Program, Sources
from .signature import described


class Replayed(torch.autograd.Function):
    """``(program, sources, rest, *differentiable inputs)`` -> the bases that have gradients; ``rest`` receives the others."""

    @staticmethod
    def forward(ctx: Any, program: Program, sources: Sources, rest: dict[int, Any], *inputs: torch.Tensor) -> Any:
        compiled = ctx.compiled = program.compiled or program.compile()
        values, bases = program.run(compiled, sources), program.bases
        watched = [values[one] if isinstance(one, int) else sources[one[0]][one[1]] for one in compiled.watched]
        # Torch checks that what is saved here was not written to since; locals have no versions of their own.
        ctx.save_for_backward(*values[len(bases) :], *watched)
        ctx.set_materialize_grads(False)
        if program.only_differentiable:
            return values[: len(bases)]
        rest.update((number, values[number]) for number, base in enumerate(bases) if not base.requires_grad)
        return tuple([values[number] for number, base in enumerate(bases) if base.requires_grad])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_graph()
        compiled, saved = ctx.compiled, ctx.saved_tensors
        known = compiled.backwards.get(kind_of(grads))
        if known is None:
            key, grads = _nearest(compiled, grads)
            known = compiled.backwards[key]
        backward, pick = known
        return None, None, None, *backward.run(grads, pick(saved))


def refuse_graph() -> None:
    """The tape of a backward pass has no gradients of its own."""
    if torch.is_grad_enabled():
        raise CaptureError(
            "capture: backward(create_graph=True) needs a graph of the backward pass, but a captured "
            "function cannot be differentiated twice. Call the uncaptured function, which is f.fn, or capture a "
            "function that contains torch.autograd.grad"
        )


replayed = recorded(Replayed)


def kind_of(grads: Any) -> tuple[Any, ...]:
    """What decides how a backward pass computes."""
    kinds = [grad._layout if type(grad) is DTensor else None if grad is None else described(grad) for grad in grads]
    return (autocast_enabled(), *kinds)


def _nearest(compiled: Compiled, grads: Any) -> tuple[Any, Any]:
    """A recorded backward pass, and these gradients in the layouts that it takes: a gradient is a global value, any will do."""
    for key, (backward, _) in compiled.backwards.items():
        if all((grad is None) == (not held) for grad, held in zip(grads, backward.incoming, strict=True)) and all(
            isinstance(grad, DTensor) or grad is None for grad in grads
        ):
            moved = [
                grad if grad is None or layout is None else _in_layout(grad, layout)
                for grad, layout in zip(grads, backward.layouts, strict=True)
            ]
            return key, moved
    raise CaptureError(
        "capture: the backward pass gets gradients of other results than the recorded one. Call backward "
        "in the same way each time, or drop the recordings with .clear() before it changes"
    )


def _in_layout(grad: DTensor, layout: Any) -> Any:
    moved = grad if grad._layout.placements == layout.placements else grad.redistribute(layout.mesh, layout.placements)
    return moved if moved.dtype == layout.dtype else moved.to(layout.dtype)


class Recorded(torch.autograd.Function):
    """The recorded run's own place in the user's graph: its gradients come from the graph that the run built."""

    @staticmethod
    def forward(ctx: Any, recording: Any, program: Program, bases: list[Any], *inputs: torch.Tensor) -> Any:
        ctx.recording, ctx.program, ctx.bases = recording, program, bases
        ctx.set_materialize_grads(False)
        wanted = [x for x, base in zip(bases, program.bases, strict=True) if base.requires_grad]
        return tuple(map(detached, wanted))  # they share the version counters of what the run has saved

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_graph()
        return None, None, None, *ctx.recording.backward(ctx.program, ctx.bases, grads)
