"""The program as a graph: operator calls on global tensors, and the values between them. Nothing in it depends on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ..comm.events import Event
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.select_strategy import declared
from ..propagation.strategy_table import Chosen, Line
from ..redistribute import Step
from ..rules.call import Call
from ..rules.flops import Work, work_of
from ..rules.rule import Factors, Rule

Kind = Literal["input", "call", "fixed", "move", "same", "parts", "gradient"]


@dataclass(slots=True, eq=False)
class Value:
    """A global tensor between two writes to it.

    Attributes:
        producer: the node that gives it, and which of its results it is.
        layout: how it lies in the recorded program.
        root: the value whose memory it shows (itself, if it is no view).
        kept: it must be given as recorded: the user looks at it, or code that asks for placements.
        dies: the last node at which the program, or autograd for it, holds the tensor; None if that outlives the program.
    """

    number: int
    producer: Node
    place: int
    layout: Layout
    root: int
    kept: bool = False
    dies: int | None = None


@dataclass(frozen=True, eq=False)
class Asked:
    """What a rule is asked for a call, and what was taken in the recorded program; calls that are alike share one.

    Attributes:
        answers: what was found for rows and layouts of operands.
    """

    rule: Rule
    factors: Factors
    call: Call
    kept: Mapping[int, int]
    chosen: Chosen | None
    answers: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """All rows that the rule has for the call."""
        return declared(self.rule, self.factors, self.call).lines

    @cached_property
    def work(self) -> Work:
        """What the whole call computes and touches."""
        return work_of(self.rule, self.factors, self.call)


@dataclass(slots=True, eq=False)
class Node:
    """What makes values of values.

    Attributes:
        kind: one of

            - ``"input"``: given from outside, it lies where it lies;
            - ``"call"``: an operator whose rule has rows;
            - ``"fixed"``: it runs as recorded, whatever the plan;
            - ``"move"``: an explicit redistribution, whose result is the user's choice;
            - ``"same"``: a tensor after a write to memory that it shares, which lies as it lay;
            - ``"parts"``: a call whose parts are the nodes that follow;
            - ``"gradient"``: where leaves are placed, a leaf's gradient, brought to where the leaf lies, its second operand.
        key: what a later run is compared with: operator, static arguments, shapes and dtypes.
        operands: values by number, None for plain tensors and numbers.
        results: values by number, None for what is no tensor.
        pinned: operands that are taken as they lie, since they are written to or looked at in place.
        asked: of a ``"call"``.
        wanted: layouts of the operands in the recorded program.
        line: the user's source line; of a backward call that of its forward call.
        gathers: it is a part of adding up a leaf's gradient, which stays when the program has ended.
        memory: of an input that is placed, bytes that are held for each of its own, as for an optimizer's state; ``given``: it
            lies where the user says.
    """

    number: int
    kind: Kind
    name: str
    key: tuple[object, ...] = ()
    operands: list[int | None] = field(default_factory=list)
    results: list[int | None] = field(default_factory=list)
    pinned: frozenset[int] = frozenset()
    asked: Asked | None = None
    wanted: tuple[Layout | None, ...] = ()
    view: bool = False
    line: str = ""
    backward: bool = False
    gathers: bool = False
    memory: float | None = None
    given: bool = False


@dataclass(slots=True)
class Graph:
    """A recorded program; ``heard``: the collectives that it issued as it ran, each with the steps of redistributions that
    it was issued for."""

    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    heard: list[tuple[Event, Sequence[Step]]] = field(default_factory=list)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of most calls; what lies on others is not planned."""
        counts = Counter(value.layout.mesh for value in self.values)
        return counts.most_common(1)[0][0] if counts else None

    def users(self) -> list[list[tuple[Node, int]]]:
        """For each value the nodes that take it, and as which operand."""
        found: list[list[tuple[Node, int]]] = [[] for _ in self.values]
        for node in self.nodes:
            for place, number in enumerate(node.operands):
                if number is not None:
                    found[number].append((node, place))
        return found
