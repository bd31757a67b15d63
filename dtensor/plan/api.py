"""``plan``: record a program, choose for all of its calls together, and say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar, cast

from ..comm import communicator_of
from ..errors import PlanError
from ..mesh.device_mesh import DeviceMesh
from .describe import as_recorded, described
from .graph import Graph
from .graph_recorder import recorded
from .liveness import Memory
from .memory_constraints import Moments
from .program_plan import ProgramPlan
from .repeated_layers import Classes
from .solver import Assembly
from .strategy_options import Option, classes_from, eager_options, options_along

T = TypeVar("T")
_SWEEPS = 3
_CUTS = 8  # moments at which memory is bounded, found by one solution after the other
_ALIKE = 1 + 1e-9
_SECONDS = 45.0  # for all sweeps together


def plan(step: Callable[..., Any], *args: Any, memory: float | None = None, **kwargs: Any) -> ProgramPlan:
    """How a program should run: rows for all of its operator calls together, so that the whole takes least time by the model.

    ``step`` runs once, as it is. On a dry run (``init_device_mesh("meta", ...)``) that costs no data and no ranks.

    Args:
        memory: bytes that a rank may hold at once, of all tensors that the step takes, makes and keeps for backward.

    Raises:
        PlanError: there is nothing to plan, no plan was found that fits into ``memory``, or scipy is missing (the extra
            ``dtensor[plan]``).

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("meta", (8,))
    >>> w1, w2 = (dt.empty(4096, 4096, device_mesh=mesh, placements=[dt.Shard(d)]) for d in (1, 0))
    >>> x = dt.empty(512, 4096, device_mesh=mesh)
    >>> found = dt.plan(lambda: (torch.relu(x @ w1) @ w2).redistribute(placements=[dt.Replicate()]))
    >>> [str(move) for call in found.calls for move in call.moves], found.seconds <= found.eager_seconds
    (['...P(sum) -> R...'], True)
    """
    return planned(step, args, kwargs, memory=math.inf if memory is None else memory)[1]


def planned(
    step: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float = _SECONDS, memory: float = math.inf
) -> tuple[T, ProgramPlan]:
    """What ``step`` gives, and its plan."""
    made, graph = recorded(step, args, kwargs)
    mesh = graph.mesh
    if mesh is None:
        raise PlanError("plan: the program calls no operator on a DTensor")
    return made, agreed(mesh, lambda: plan_of(graph, seconds, memory))


def agreed(mesh: DeviceMesh, make: Callable[[], T]) -> T:
    """One result for all ranks: the first of the mesh makes it. A solver that runs out of time may end otherwise elsewhere."""
    if mesh.kind != "process_group":
        return make()
    made: T | PlanError | None = None
    if mesh.current_member() == 0:
        try:
            made = make()
        except PlanError as error:  # which all ranks raise
            made = error
    found = communicator_of(mesh).all_gather_object(made, tuple(range(mesh.ndim)))[0]
    if isinstance(found, PlanError):
        raise found
    return cast(T, found)


def plan_of(graph: Graph, seconds: float = _SECONDS, memory: float = math.inf) -> ProgramPlan:
    """The plan of a recorded program: never worse than it, by the model, as far as that fits into ``memory``."""
    eager, limit = eager_options(graph), Memory(graph, memory)
    classes = classes_from(graph, eager)
    found = described(graph, classes, best_options(classes, eager, seconds, limit), eager, limit)
    if found.seconds > found.eager_seconds * _ALIKE and (peak := limit.held(eager, remembered=True).peak) <= memory:
        return as_recorded(found, peak)  # whose operators share more than a plan knows to
    if found.peak_bytes > memory:
        raise PlanError(
            f"plan: no plan within memory={memory:,.0f} bytes per rank was found; the smallest peak is "
            f"{found.peak_bytes:,} bytes, in {found.peak_at}. "
            "Shard parameters or the batch over more mesh dims, or use dt.auto_shard"
        )
    return found


def best_options(
    classes: Classes, start: Sequence[Option], seconds: float, memory: Memory, reverse: bool = False
) -> list[Option]:
    """Mesh dim by mesh dim the best options given those on the others, until nothing gets better; for each node.

    Args:
        seconds: how long to search.
        memory: what a rank may hold: what does not fit costs so much that less comes first.
        reverse: begin with the last mesh dim.
    """
    graph, total, bounded = memory.graph, memory.total, not math.isinf(memory.limit)
    assert graph.mesh is not None
    penalty = 100 * total.seconds(start) / memory.limit if bounded else 0.0

    def price_of(options: Sequence[Option]) -> float:
        if not bounded:
            return total.seconds(options)
        held = memory.held(options)
        if held.peak > memory.limit and held.moment not in memory.moments:
            memory.moments.append(held.moment)
        return total.seconds(options) + held.seconds + penalty * max(0.0, held.peak - memory.limit)

    taken, price, end = list(start), price_of(start), monotonic() + seconds
    dims = [i for i, ranks in enumerate(graph.mesh.shape) if ranks > 1][:: -1 if reverse else 1]
    since = 0  # mesh dims tried without success
    for mesh_dim in dims * _SWEEPS:
        if since >= len(dims):
            break
        options = options_along(graph, classes, classes.together(taken), mesh_dim)
        since += 1
        for _ in range(_CUTS):
            left, known = end - monotonic(), len(memory.moments)
            if left <= 0:
                return taken
            assembly = Assembly(classes, options, mesh_dim)
            if memory.moments:
                Moments(assembly, memory, penalty)
            found = assembly.solved(min(left, seconds / _SWEEPS))
            if found is not None and (now := price_of(spread := classes.spread(found))) < price * (1 - 1e-6):
                taken, price, since = spread, now, 1
            if len(memory.moments) == known:
                break
    return taken
