"""Plan builder: turns chosen options into a program plan: strategies, redistributions, and the second best strategies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..base.group_by import group_by_key
from ..layout.layout import Layout
from ..placement import Monoid
from ..propagation.strategy_table import texts_of_strategies
from ..redistribute import plan as plan_redistribution
from .disjoint_placements import list_strategies
from .graph import Graph, Node
from .liveness import CopyKey, MemoryModel, MemoryUsage
from .node_costs import recorded_collective_seconds, redistribute_seconds
from .objective import Move, Objective
from .program_plan import PlannedCall, PlannedMove, ProgramPlan, Spelled, placement_texts
from .repeated_layers import NodeClasses
from .strategy_options import Option, Options, canonical_layout, list_options

_EXECUTED = ("call", "fixed", "parts")  # the kinds of nodes that the executor sees


def build_plan(
    graph: Graph, classes: NodeClasses, options: Sequence[Option], recorded: Sequence[Option], memory: MemoryModel
) -> ProgramPlan:
    """Return the program plan that one option per node describes: planned calls, estimated costs and peak memory.

    Args:
        graph: the recorded program.
        classes: its classes.
        options: the chosen options.
        recorded: the options of the recorded program.
        memory: the memory model.
    """
    mesh, objective, usage = graph.mesh, memory.objective, memory.compute_usage(options)
    assert mesh is not None
    state = classes.per_class(options)
    dims = [i for i, ranks in enumerate(mesh.shape) if ranks > 1]
    alternatives = [classes.per_node(list_options(graph, classes, state, i)) for i in dims]
    builder = _PlanBuilder(graph, list(options), objective, objective.list_all_moves(options), usage, alternatives)
    calls = [builder.build_call(node) for node in graph.nodes if node.kind not in ("input", "written")]
    peak = graph.nodes[usage.peak_node]
    eager_collectives = sum(recorded_collective_seconds(event, steps, mesh) for event, steps in graph.collectives)
    return ProgramPlan(
        tuple(mesh.shape),
        tuple(calls),
        objective.total_seconds(options) + usage.seconds,
        objective.received_bytes(options) + usage.nbytes,
        usage.peak,
        f"{peak.name}{' (backward)' if peak.is_backward else ''}{f' at {peak.line}' if peak.line else ''}",
        objective.local_seconds(recorded) + eager_collectives,
        sum(event.bytes for event, _ in graph.collectives),
    )


def eager_plan(plan: ProgramPlan, peak: int) -> ProgramPlan:
    """Return ``plan`` with no planned strategies, so that every call chooses its own; ``peak``: its peak memory in bytes."""
    unplanned: dict[str, Any] = {"rows": (), "operands": (), "drops": (), "moves": (), "runner_up": "", "extra": 0.0}
    calls = tuple(replace(call, kind="fixed" if call.kind == "call" else call.kind, **unplanned) for call in plan.calls)
    return replace(plan, calls=calls, seconds=plan.eager_seconds, nbytes=plan.eager_nbytes, peak_bytes=peak)


@dataclass(slots=True)
class _PlanBuilder:
    """Builder of the planned calls of a program, one node after the other.

    Attributes:
        moves: the redistributions of each value.
        alternatives: for each mesh dim, the options of each node that differ on this mesh dim.
        copies: the copies that exist at the present node.
        drops: for each node, the copies that it is the last to use.
    """

    graph: Graph
    options: list[Option]
    objective: Objective
    moves: dict[int, list[Move]]
    usage: MemoryUsage
    alternatives: list[Options]
    copies: set[CopyKey] = field(default_factory=set)
    drops: dict[int, list[CopyKey]] = field(init=False)

    def __post_init__(self) -> None:
        """Find the last executed call that uses each copy, after which the plan drops the copy."""
        uses = [(key, one.uses) for key, ranges in self.usage.live_ranges.items() for one in ranges]
        is_executed = [node.kind in _EXECUTED for node in self.graph.nodes]
        self.drops = group_by_key((max([n for n in numbers if is_executed[n]] or numbers), key) for key, numbers in uses)

    def build_call(self, node: Node) -> PlannedCall:
        """Return the planned call of a node: strategies, redistributions of its operands, and the runner-up."""
        option = self.options[node.number]
        operands = enumerate(zip(node.operands, option.operands, strict=True))
        paths = [[] if place in node.pinned else self._find_path(number, layout) for place, (number, layout) in operands]
        moves = tuple(move for place in range(len(paths)) for move in self._list_new_moves(node, place, paths[place]))
        runner_up, extra = self._find_runner_up(node) if moves else ("", 0.0)
        return PlannedCall(
            node.name,
            repr(node.key),
            node.kind,
            _strategy_texts(node, option),
            tuple(tuple(placement_texts(layout.placements) for layout in path) for path in paths),
            tuple(self._list_drops(node)),
            node.line,
            node.is_backward,
            moves,
            runner_up,
            extra,
        )

    def _find_path(self, number: int | None, target: Layout | None) -> list[Layout]:
        """Return the layouts to which an operand is redistributed in turn; [] if the plan leaves it as it is.

        A partial operand with the user's own reduction stays as it is, because a plan has no name for the reduction.
        """
        if number is None or target is None or any(isinstance(op, Monoid) for op in target.partials):
            return []
        for source, layout in self.moves.get(number, ()):
            if layout.has_same_blocks(target) and any(source is via for _, via in self.moves[number]):
                return [source, target]
        return [target]

    def _list_new_moves(self, node: Node, place: int, path: list[Layout]) -> list[PlannedMove]:
        """Return the communicating redistributions for an operand that no earlier call of the plan has made."""
        number, planned = node.operands[place], []
        for source, target in self.moves.get(number, ()) if number is not None else ():
            key = number or 0, canonical_layout(target)
            if key in self.copies or not any(layout.has_same_blocks(target) for layout in path):
                continue
            self.copies.add(key)
            move = plan_redistribution(source, target)
            if move.communicates:
                producer = self.graph.values[number or 0].producer
                origin = "an input" if producer.kind == "input" else f"the result of {producer.name}"
                what = f"{origin} {list(source.shape)}"
                ends: tuple[Spelled, Spelled] = placement_texts(source.placements), placement_texts(target.placements)
                planned.append(PlannedMove(what, *ends, move.bytes, redistribute_seconds(source, target)))
        return planned

    def _list_drops(self, node: Node) -> Iterator[tuple[int, Spelled]]:
        """Yield (index of the operand, placements) of the copies of operands that are freed after this call."""
        for number, key in self.drops.get(node.number, ()):
            self.copies.discard((number, key))
            target = next(target for _, target in self.moves[number] if canonical_layout(target) == key)
            yield node.operands.index(number), placement_texts(target.placements)

    def _find_runner_up(self, node: Node) -> tuple[str, float]:
        """Return the second best strategies of a call and how many seconds longer they take; ("", 0.0) for none."""
        own = self.options[node.number]
        present, best = self.objective.seconds_around(node, self.options), ("", float("inf"))
        for options in self.alternatives:
            for option in options[node.number]:
                if option is not own and option.strategies != own.strategies:
                    self.options[node.number] = option
                    extra = self.objective.seconds_around(node, self.options) - present
                    best = min(best, (" & ".join(_strategy_texts(node, option)), extra), key=lambda pair: pair[1])
        self.options[node.number] = own
        return best if best[0] else ("", 0.0)


def _strategy_texts(node: Node, option: Option) -> tuple[str, ...]:
    """Return the strategies of an option in the notation of rules."""
    if node.query is None or not option.strategies:
        return ()
    return texts_of_strategies(option.strategies, list_strategies(node.query, option.operands), node.query.factors)
