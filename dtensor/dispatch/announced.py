"""Announced collectives: explicit redistributions as policies of selective checkpointing see them.

A policy names what PyTorch's DTensor would issue: ``torch.ops._c10d_functional.all_gather_into_tensor.default`` and its siblings.
A redistribution runs no operator, so under such a policy each of its collectives is called by that name, with a DTensor: the
policy decides, and either the saved result comes back or dispatch finds the waiting call here and runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import zip_longest
from threading import local as per_thread
from typing import Any

import torch

from ..base.selective_checkpoint import hidden_from_policies, hides_from_policies
from ..layout.layout import Layout
from ..redistribute import execute, move_between
from ..redistribute.executor import Bound, bound_of
from ..redistribute.step import Plan, Step
from .output_aliasing import apart, memory_of
from .wrap import wrap_local


class _Waiting(per_thread):
    """The announced calls of this thread that have not returned, the innermost last: the DTensor, and what to run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Callable[[], Any]]] = []


_WAITING = _Waiting()


def announce(kind: str, x: Any, ranks: int, run: Callable[[], Any]) -> Any:
    """Return what ``run()`` gives, or gave in the forward pass where a policy has saved it.

    Args:
        kind: the verb of a step of a redistribution.
        x: the DTensor that is redistributed.
        ranks: how many of them take part in the collective.
        run: issues the collective.
    """
    functional = torch.ops._c10d_functional
    _WAITING.calls.append((x, run))
    try:
        match kind:
            case "all_gather":
                return functional.all_gather_into_tensor.default(x, ranks, "")
            case "all_reduce":
                return functional.all_reduce.default(x, "sum", "")
            case "reduce_scatter":
                return functional.reduce_scatter_tensor.default(x, "sum", ranks, "")
            case _:
                return functional.all_to_all_single.default(x, [], [], "")
    finally:
        _WAITING.calls.pop()


def announced_call(x: Any) -> Callable[..., Any] | None:
    """Return the runner of the collective that is announced for ``x``; None where the program itself calls it."""
    if not _WAITING.calls or _WAITING.calls[-1][0] is not x:
        return None
    run = _WAITING.calls[-1][1]
    return lambda args, kwargs, local_args, local_kwargs: run()


def move_under_policy(x: Any, target: Layout, moves: Plan | None) -> Any:
    """Return ``x`` under another layout, each collective announced to a policy of selective checkpointing.

    The result has arrived, also with ``async_op=True``: what a policy saves is a value.
    """
    if moves is None:
        across = hides_from_policies(move_between)
        made = announce("exchange", x, target.mesh.size(), lambda: wrap_local(across(x._local, x._layout, target).wait(), target))
    else:
        made, bound = x, bound_of(moves)
        if not moves.communicates:
            with hidden_from_policies():
                return wrap_local(apart(execute(moves, x._local), memory_of(x._local)), target)
        for k, (step, run) in enumerate(zip_longest(moves.steps[: len(bound)], bound)):
            made = _step_under_policy(made, step, run, target if k == len(bound) - 1 else step.after)
    with hidden_from_policies():
        return wrap_local(x._local, target) if made is x else made.detach()  # the policy's own is not given a graph


def _step_under_policy(x: Any, step: Step | None, bound: Bound, after: Layout) -> Any:
    run = hides_from_policies(lambda: wrap_local(bound.run(x._local), after))
    if step is None or not step.communicates:
        return run()
    return announce(step.verb, x, math.prod(step.before.mesh.shape[i] for i in step.mesh_dims), run)
