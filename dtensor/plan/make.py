"""``plan``: record a program, choose for all of its calls together, and say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, ParamSpec, TypeVar

from ..comm import communicator_of
from ..errors import PlanError
from .classes import Classes
from .describe import described
from .graph import Graph
from .memory import Memory
from .options import Option, classes_from, eager_options, options_along
from .program_plan import ProgramPlan
from .record import recorded
from .solver import Assembly
from .total import Total

P = ParamSpec("P")
T = TypeVar("T")
_SWEEPS = 3
_SECONDS = 45.0  # for all sweeps together


def plan(step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> ProgramPlan:
    """How a program should run: rows for all of its operator calls together, so that the whole takes least time by the model.

    ``step`` runs once, as it is. On a dry run (``init_device_mesh("meta", ...)``) that costs no data and no ranks.

    Raises:
        PlanError: there is nothing to plan, or scipy is missing (the extra ``dtensor[plan]``).

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("meta", (8,))
    >>> w1, w2 = (dt.empty(4096, 4096, device_mesh=mesh, placements=[dt.Shard(d)]) for d in (1, 0))
    >>> x = dt.empty(512, 4096, device_mesh=mesh)
    >>> found = dt.plan(lambda: (torch.relu(x @ w1) @ w2).redistribute(placements=[dt.Replicate()]))
    >>> [str(move) for call in found.calls for move in call.moves], found.seconds <= found.eager_seconds
    (['...P(sum) -> R...'], True)
    """
    return planned(step, args, kwargs)[1]


def planned(
    step: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float = _SECONDS
) -> tuple[T, ProgramPlan]:
    """What ``step`` gives, and its plan."""
    made, graph = recorded(step, args, kwargs)
    mesh = graph.mesh
    if mesh is None:
        raise PlanError("plan: the program has no calls on DTensors")
    return made, agreed(mesh, lambda: plan_of(graph, seconds))


def agreed(mesh: Any, make: Callable[[], ProgramPlan]) -> ProgramPlan:
    """One plan for all ranks: the first of the mesh makes it. A solver that runs out of time may end otherwise elsewhere."""
    if mesh.kind != "process_group":
        return make()
    first = mesh.current_member() == 0
    text = make().dumps() if first else ""
    return ProgramPlan.loads(communicator_of(mesh).all_gather_object(text, tuple(range(mesh.ndim)))[0])


def plan_of(graph: Graph, seconds: float = _SECONDS) -> ProgramPlan:
    """The plan of a recorded program: never worse than it, by the model."""
    eager = eager_options(graph)
    classes = classes_from(graph, eager)
    return described(graph, classes, best_options(graph, classes, eager, seconds), eager)


def best_options(
    graph: Graph, classes: Classes, start: Sequence[Option], seconds: float, memory: Memory | None = None, reverse: bool = False
) -> list[Option]:
    """Mesh dim by mesh dim the best options given those on the others, until nothing gets better; for each node.

    Args:
        seconds: how long to search.
        memory: what a rank may hold: what does not fit costs so much that less comes first.
        reverse: begin with the last mesh dim.
    """
    mesh, total = graph.mesh, Total(graph)
    assert mesh is not None
    penalty = 0.0 if memory is None else 100 * total.seconds(start) / memory.limit

    def price_of(options: Sequence[Option]) -> float:
        excess = 0.0 if memory is None else max(0.0, memory.bytes(graph, total, options) - memory.limit)
        return total.seconds(options) + penalty * excess

    taken, price, end = list(start), price_of(start), monotonic() + seconds
    dims = [i for i, ranks in enumerate(mesh.shape) if ranks > 1][:: -1 if reverse else 1]
    since = 0  # mesh dims tried without success
    for mesh_dim in dims * _SWEEPS:
        left = end - monotonic()
        if since >= len(dims) or left <= 0:
            break
        options = options_along(graph, classes, classes.together(taken), mesh_dim)
        found = Assembly(classes, options, mesh_dim, memory, penalty).solved(min(left, seconds / _SWEEPS))
        since += 1
        if found is not None and (now := price_of(spread := classes.spread(found))) < price * (1 - 1e-6):
            taken, price, since = spread, now, 1
    return taken
