"""From options to a plan in words: what each call does, what is moved for it, and what would have been second best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..base.group_by import by_key
from ..layout.layout import Layout
from ..placement import Monoid
from ..propagation.strategy_table import texts_of
from ..redistribute import plan as plan_move
from .costs import heard_seconds, move_seconds
from .disjoint_partial import lines_of
from .graph import Graph, Node
from .liveness import Held, Memory
from .objective import Move, Total
from .program_plan import PlannedCall, PlannedMove, ProgramPlan, Spelled, spelled
from .repeated_layers import Classes
from .strategy_options import Form, Option, Options, form_of, options_along

_RUN = ("call", "fixed", "parts")  # what goes by the plan as it runs


def described(graph: Graph, classes: Classes, taken: Sequence[Option], eager: Sequence[Option], memory: Memory) -> ProgramPlan:
    """The plan that these options are."""
    mesh, total, held = graph.mesh, memory.total, memory.held(taken)
    assert mesh is not None
    state = classes.together(taken)
    others = [classes.spread(options_along(graph, classes, state, i)) for i, ranks in enumerate(mesh.shape) if ranks > 1]
    writing = _Writing(graph, list(taken), total, total.all_moves(taken), held, others)
    calls = [writing.call(node) for node in graph.nodes if node.kind not in ("input", "same")]
    peak = graph.nodes[held.moment]
    return ProgramPlan(
        tuple(mesh.shape),
        tuple(calls),
        total.seconds(taken) + held.seconds,
        total.bytes(taken) + held.nbytes,
        held.peak,
        f"{peak.name}{' (backward)' if peak.backward else ''}{f' at {peak.line}' if peak.line else ''}",
        total.local_seconds(eager) + sum(heard_seconds(event, steps, mesh) for event, steps in graph.heard),
        sum(event.bytes for event, _ in graph.heard),
    )


def as_recorded(plan: ProgramPlan, peak: int) -> ProgramPlan:
    """The plan under which every call chooses for itself, as in the recorded program."""
    nothing: dict[str, Any] = {"rows": (), "operands": (), "drops": (), "moves": (), "runner_up": "", "extra": 0.0}
    calls = tuple(replace(call, kind="fixed" if call.kind == "call" else call.kind, **nothing) for call in plan.calls)
    return replace(plan, calls=calls, seconds=plan.eager_seconds, nbytes=plan.eager_nbytes, peak_bytes=peak)


@dataclass(slots=True)
class _Writing:
    """What is written of a plan so far, node by node."""

    graph: Graph
    taken: list[Option]
    total: Total
    moves: dict[int, list[Move]]
    held: Held
    others: list[Options]
    told: set[tuple[int, Form]] = field(default_factory=set)  # forms that are there
    drops: dict[int, list[tuple[int, Form]]] = field(init=False)  # by node, forms that it is the last to use

    def __post_init__(self) -> None:
        uses = [(key, piece.uses) for key, pieces in self.held.pieces.items() for piece in pieces]
        self.drops = by_key((max([n for n in own if self.graph.nodes[n].kind in _RUN] or own), key) for key, own in uses)

    def call(self, node: Node) -> PlannedCall:
        option = self.taken[node.number]
        given = enumerate(zip(node.operands, option.operands, strict=True))
        paths = [[] if place in node.pinned else self._path(number, layout) for place, (number, layout) in given]
        moves = tuple(move for place in range(len(paths)) for move in self._new(node, place, paths[place]))
        runner_up, extra = self._runner_up(node) if moves else ("", 0.0)
        return PlannedCall(
            node.name,
            repr(node.key),
            node.kind,
            _texts(node, option),
            tuple(tuple(spelled(layout.placements) for layout in path) for path in paths),
            tuple(self._dropped(node)),
            node.line,
            node.backward,
            moves,
            runner_up,
            extra,
        )

    def _path(self, number: int | None, target: Layout | None) -> list[Layout]:
        """The forms that an operand passes. Terms of a user's own reduction have no name, and are taken as they lie."""
        if number is None or target is None or any(isinstance(op, Monoid) for op in target.partials):
            return []
        for source, layout in self.moves.get(number, ()):
            if layout.same_data(target) and any(source is via for _, via in self.moves[number]):
                return [source, target]
        return [target]

    def _new(self, node: Node, place: int, path: list[Layout]) -> list[PlannedMove]:
        """Moves for an operand that nobody has asked for before."""
        number, found = node.operands[place], []
        for source, target in self.moves.get(number, ()) if number is not None else ():
            key = number or 0, form_of(target)
            if key in self.told or not any(layout.same_data(target) for layout in path):
                continue
            self.told.add(key)
            cost = plan_move(source, target)
            if cost.communicates:
                producer = self.graph.values[number or 0].producer
                origin = "an input" if producer.kind == "input" else f"the result of {producer.name}"
                what = f"{origin} {list(source.shape)}"
                ends: tuple[Spelled, Spelled] = spelled(source.placements), spelled(target.placements)
                found.append(PlannedMove(what, *ends, cost.bytes, move_seconds(source, target)))
        return found

    def _dropped(self, node: Node) -> Iterator[tuple[int, Spelled]]:
        """The forms of operands that nobody uses after this call, or not for long."""
        for number, form in self.drops.get(node.number, ()):
            self.told.discard((number, form))
            target = next(target for _, target in self.moves[number] if form_of(target) == form)
            yield node.operands.index(number), spelled(target.placements)

    def _runner_up(self, node: Node) -> tuple[str, float]:
        """The next best rows, everything else as planned, and how many seconds they take more."""
        own = self.taken[node.number]
        here, best = self.total.near(node, self.taken), ("", float("inf"))
        for options in self.others:
            for option in options[node.number]:
                if option is not own and option.rows != own.rows:
                    self.taken[node.number] = option
                    extra = self.total.near(node, self.taken) - here
                    best = min(best, (" & ".join(_texts(node, option)), extra), key=lambda found: found[1])
        self.taken[node.number] = own
        return best if best[0] else ("", 0.0)


def _texts(node: Node, option: Option) -> tuple[str, ...]:
    """Rows as the rule's lines are written."""
    if node.asked is None or not option.rows:
        return ()
    return texts_of(option.rows, lines_of(node.asked, option.operands), node.asked.factors)
