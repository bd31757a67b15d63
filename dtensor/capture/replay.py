"""The autograd function behind which tapes run, and the one behind which the recorded run itself stands."""

from __future__ import annotations

from typing import Any

import torch

from ..dispatch.local_op import below_autograd, recorded
from ..errors import CaptureError
from ..tensor.dtensor import DTensor
from .memory import detached
from .program import Backward, Compiled, Program, Sources, as_recorded, locals_of
from .signature import described


class Replayed(torch.autograd.Function):
    """``(program, sources, rest, *differentiable inputs)`` -> the bases that have gradients; ``rest`` receives the others."""

    @staticmethod
    def forward(ctx: Any, program: Program, sources: Sources, rest: dict[int, Any], *inputs: torch.Tensor) -> Any:
        compiled = program.compile()
        made, saved = program.run(compiled, sources)
        ctx.program, ctx.compiled = program, compiled
        watched = [made[owner] if isinstance(owner, int) else sources[owner[0]][owner[1]] for owner in compiled.watched]
        # Torch checks that what is saved here was not written to since; locals have no versions of their own.
        ctx.save_for_backward(*saved, *watched)
        ctx.set_materialize_grads(False)
        rest.update((number, x) for number, x in enumerate(made) if not program.bases[number].requires_grad)
        return tuple(x for number, x in enumerate(made) if program.bases[number].requires_grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_graph()
        compiled: Compiled = ctx.compiled
        saved = ctx.saved_tensors
        key = kind_of(grads)
        backward = compiled.backwards.get(key)
        if backward is None:
            key, grads = _nearest(compiled, grads)
            backward = compiled.backwards[key]
        values = [saved[place] for place in compiled.places[key]]
        return None, None, None, *run_backward(backward, grads, values)


def refuse_graph() -> None:
    """The tape of a backward pass has no gradients of its own."""
    if torch.is_grad_enabled():
        raise CaptureError(
            "capture: backward with create_graph=True asks for a graph of the backward pass, and a captured function cannot be "
            "differentiated twice; call the function itself, which is f.fn, or capture one that contains torch.autograd.grad"
        )


replayed = recorded(Replayed)


def kind_of(grads: Any) -> tuple[Any, ...]:
    """What decides how a backward pass computes."""
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return (autocast, *(None if grad is None else grad._layout if type(grad) is DTensor else described(grad) for grad in grads))


def _nearest(compiled: Compiled, grads: Any) -> tuple[Any, Any]:
    """A recorded backward pass, and these gradients in the layouts that it takes: a gradient is a global value, any will do."""
    for key, backward in compiled.backwards.items():
        if all((grad is None) == (not held) for grad, held in zip(grads, backward.incoming, strict=True)) and all(
            isinstance(grad, DTensor) or grad is None for grad in grads
        ):
            moved = [
                grad if grad is None or layout is None else _in_layout(grad, layout)
                for grad, layout in zip(grads, backward.layouts, strict=True)
            ]
            return key, moved
    raise CaptureError(
        "capture: the backward pass gets gradients of other results than the recorded ones; call backward in the same way each "
        "time, or forget the recordings with .clear() before it changes"
    )


def _in_layout(grad: DTensor, layout: Any) -> Any:
    moved = grad if grad._layout.placements == layout.placements else grad.redistribute(layout.mesh, layout.placements)
    return moved if moved.dtype == layout.dtype else moved.to(layout.dtype)


def run_backward(backward: Backward, grads: Any, values: list[torch.Tensor]) -> list[Any]:
    """The gradients of the differentiable inputs."""
    locals_ = [
        as_recorded(local, stride)
        for grad, strides in zip(grads, backward.strides, strict=True)
        if grad is not None
        for local, stride in zip(locals_of(grad), strides, strict=True)
    ]
    assert backward.source is not None
    with below_autograd():
        computed = backward.source.run(*locals_, *values)
    return backward.given(computed)


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
