"""Announced collectives: explicit redistributions as policies of selective checkpointing see them.

A policy names what PyTorch's DTensor would issue: ``torch.ops._c10d_functional.all_gather_into_tensor.default`` and its siblings.
A redistribution runs no operator. So under such a policy each of its collectives is called by that name, with a DTensor. If the
policy has saved the result, the call returns it; else dispatch finds the announced call here and runs it.
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
from ..redistribute.executor import BoundStep, get_or_bind_steps
from ..redistribute.step import Plan, Step
from ..state.shared_memory import clone_if_aliased, storage_addresses
from ..state.wrap import wrap_local


class _Announced(per_thread):
    """The announced calls of this thread that have not returned, innermost last: pairs of DTensor and function to run."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Callable[[], Any]]] = []


_ANNOUNCED = _Announced()


def run_as_functional_collective(kind: str, x: Any, ranks: int, run: Callable[[], Any]) -> Any:
    """Call the functional c10d operator that policies know for one collective; dispatch then runs ``run``.

    Returns the result of ``run``, or the one of the forward pass if a policy of selective checkpointing has saved it.

    Args:
        kind: the verb of a step of a redistribution.
        x: the DTensor that is redistributed.
        ranks: the number of ranks in the collective.
        run: issues the collective.
    """
    functional = torch.ops._c10d_functional
    _ANNOUNCED.calls.append((x, run))
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
        _ANNOUNCED.calls.pop()


def find_announced_runner(x: Any) -> Callable[..., Any] | None:
    """Return the runner of the collective that :func:`run_as_functional_collective` calls on ``x``; else None."""
    if not _ANNOUNCED.calls or _ANNOUNCED.calls[-1][0] is not x:
        return None
    run = _ANNOUNCED.calls[-1][1]
    return lambda args, kwargs, local_args, local_kwargs: run()


def redistribute_under_policy(x: Any, target: Layout, plan: Plan | None) -> Any:
    """Redistribute ``x`` to the layout ``target``, with each collective visible to the policy of selective checkpointing.

    The result has arrived, also with ``async_op=True``, since a policy saves values.

    Args:
        plan: the redistribution; None if ``target`` is on another mesh.
    """
    if plan is None:
        across = hides_from_policies(move_between)
        run = lambda: wrap_local(across(x._local, x._layout, target).wait(), target)  # noqa: E731
        result = run_as_functional_collective("exchange", x, target.mesh.size(), run)
    else:
        result, bound = x, get_or_bind_steps(plan)
        if not plan.communicates:
            with hidden_from_policies():
                return wrap_local(clone_if_aliased(execute(plan, x._local), storage_addresses(x._local)), target)
        for k, (step, bound_step) in enumerate(zip_longest(plan.steps[: len(bound)], bound)):
            result = _run_step_under_policy(result, step, bound_step, target if k == len(bound) - 1 else step.after)
    with hidden_from_policies():
        return wrap_local(x._local, target) if result is x else result.detach()  # the tensor that the policy saves gets no graph


def _run_step_under_policy(x: Any, step: Step | None, bound: BoundStep, after: Layout) -> Any:
    """Run one bound step of a redistribution: as a functional collective if ``step`` communicates (None: a local step)."""
    run = hides_from_policies(lambda: wrap_local(bound.run(x._local), after))
    if step is None or not step.communicates:
        return run()
    return run_as_functional_collective(step.verb, x, math.prod(step.before.mesh.shape[i] for i in step.mesh_dims), run)
