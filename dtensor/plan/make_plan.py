"""Make a plan: ``plan`` records a program, chooses strategies and layouts for all of its calls together, and returns the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar, cast

from ..comm.map_ranks import communicator_of
from ..errors import PlanError
from ..mesh.device_mesh import DeviceMesh
from .graph import Graph
from .graph_recorder import record_graph
from .liveness import MemoryModel
from .plan_builder import build_plan, eager_plan
from .program_plan import ProgramPlan
from .repeated_layers import NodeClasses
from .solver import PlanningProblem, add_memory_constraints
from .strategy_options import Option, list_options, make_classes, recorded_options

T = TypeVar("T")
_MAX_SWEEPS = 3  # over the mesh dims
_MAX_CRITICAL_NODES = 8  # that are found for one mesh dim in one sweep
_TIE_RATIO = 1 + 1e-9
_MAX_SECONDS = 45.0  # for all sweeps together


def plan(step: Callable[..., Any], *args: Any, memory: float | None = None, **kwargs: Any) -> ProgramPlan:
    """Return a plan of a program: strategies for all operator calls together, with the least estimated time of the program.

    ``step`` runs once, eagerly, with its collectives. Then the first rank sends the plan to the others. On a dry run
    (``init_device_mesh("meta", ...)``) this needs no data and no ranks.

    Args:
        step: the program, a function of DTensors.
        *args: its positional arguments.
        memory: bytes that a rank may hold at once of the inputs, results and saved tensors of the step.
        **kwargs: its keyword arguments.

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
    return run_and_plan(step, args, kwargs, memory=math.inf if memory is None else memory)[1]


def run_and_plan(
    step: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float = _MAX_SECONDS, memory: float = math.inf
) -> tuple[T, ProgramPlan]:
    """Run ``step`` once, eagerly, and return its result and its program plan. For the limits see :func:`make_plan`."""
    result, graph = record_graph(step, args, kwargs)
    mesh = graph.mesh
    if mesh is None:
        raise PlanError("plan: the program calls no operator on a DTensor; distribute its parameters or its inputs first")
    return result, broadcast_result(mesh, lambda: make_plan(graph, seconds, memory))


def broadcast_result(mesh: DeviceMesh, compute: Callable[[], T]) -> T:
    """Compute a result on the first rank of the mesh and return it on all; a timed solver may differ between ranks."""
    if mesh.kind != "process_group":
        return compute()
    computed: T | PlanError | None = None
    if mesh.current_member() == 0:
        try:
            computed = compute()
        except PlanError as error:  # all ranks raise it
            computed = error
    result = communicator_of(mesh).all_gather_object(computed, tuple(range(mesh.ndim)))[0]
    if isinstance(result, PlanError):
        raise result
    return cast(T, result)


def make_plan(graph: Graph, seconds: float = _MAX_SECONDS, memory: float = math.inf) -> ProgramPlan:
    """Return the cheapest program plan found for a recorded graph within ``memory``; the eager choices if they are no slower.

    Args:
        graph: the recorded program.
        seconds: time limit of the search.
        memory: bytes that a rank may hold at once.
    """
    recorded, model = recorded_options(graph), MemoryModel(graph, memory)
    classes = make_classes(graph, recorded)
    best = build_plan(graph, classes, choose_options(classes, recorded, seconds, model), recorded, model)
    if best.seconds > best.eager_seconds * _TIE_RATIO:  # eager calls share more copies than a plan can express
        peak = model.compute_usage(recorded, without_plan=True).peak
        if peak <= memory:
            return eager_plan(best, peak)
    if best.peak_bytes > memory:
        raise PlanError(
            f"plan: no plan within memory={memory:,.0f} bytes per rank was found; the smallest peak is "
            f"{best.peak_bytes:,} bytes, in {best.peak_at}. "
            "Shard parameters or the batch over more mesh dims, or use dt.auto_shard"
        )
    return best


def choose_options(
    classes: NodeClasses, start: Sequence[Option], seconds: float, memory: MemoryModel, reverse: bool = False
) -> list[Option]:
    """Return one option per node, optimized by the solver for one mesh dim after the other until none improves.

    Args:
        classes: the classes of the graph.
        start: the options to start from.
        seconds: time limit of the search.
        memory: the memory model. The excess over its limit has such a high cost that it is reduced first.
        reverse: whether to begin with the last mesh dim.
    """
    graph, objective, is_bounded = memory.graph, memory.objective, not math.isinf(memory.limit)
    assert graph.mesh is not None
    penalty = 100 * objective.total_seconds(start) / memory.limit if is_bounded else 0.0

    def compute_cost(options: Sequence[Option]) -> float:
        """Return the seconds of the options, with a penalty for memory over the limit; note the critical node."""
        if not is_bounded:
            return objective.total_seconds(options)
        usage = memory.compute_usage(options)
        if usage.peak > memory.limit and usage.peak_node not in memory.critical_nodes:
            memory.critical_nodes.append(usage.peak_node)
        return objective.total_seconds(options) + usage.seconds + penalty * max(0.0, usage.peak - memory.limit)

    best, cost, end = list(start), compute_cost(start), monotonic() + seconds
    dims = [i for i, ranks in enumerate(graph.mesh.shape) if ranks > 1][:: -1 if reverse else 1]
    unimproved = 0  # mesh dims since the last improvement
    for mesh_dim in dims * _MAX_SWEEPS:
        if unimproved >= len(dims):
            break
        options = list_options(graph, classes, classes.per_class(best), mesh_dim)
        unimproved += 1
        for _ in range(_MAX_CRITICAL_NODES):
            rest, critical_count = end - monotonic(), len(memory.critical_nodes)
            if rest <= 0:
                return best
            problem = PlanningProblem(classes, options, mesh_dim)
            add_memory_constraints(problem, memory, penalty)
            solution = problem.solve(min(rest, seconds / _MAX_SWEEPS))
            if solution is not None:
                candidate = classes.per_node(solution)
                candidate_cost = compute_cost(candidate)
                if candidate_cost < cost * (1 - 1e-6):
                    best, cost, unimproved = candidate, candidate_cost, 1
            if len(memory.critical_nodes) == critical_count:
                break
    return best
