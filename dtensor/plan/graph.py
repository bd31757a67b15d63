"""Program graph: operator calls on global tensors, and the values between them. Nothing in it depends on a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from ..comm.events import Event
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.flops import OperatorWork, work_of
from ..propagation.select_strategy import bound_strategies_of, select_strategies
from ..propagation.strategy_table import BoundStrategy, StrategySelection
from ..redistribute import Step
from ..rules.call import Call
from ..rules.rule import Factors, Rule

Kind = Literal["input", "call", "fixed", "move", "written", "parts", "gradient"]


@dataclass(slots=True, eq=False)
class Value:
    """A global tensor between two writes to it.

    Attributes:
        producer: the node that makes it; ``place``: its index among the node's results.
        layout: its layout in the recorded program.
        root: the value with the memory that it aliases; itself, if it is no view.
        keeps_layout: the plan must not change its layout, because the user reads it.
        last_node: the last node at which the program, or autograd for it, holds the tensor; None if it outlives the program.
    """

    number: int
    producer: Node
    place: int
    layout: Layout
    root: int
    keeps_layout: bool = False
    last_node: int | None = None


@dataclass(frozen=True, eq=False)
class RuleQuery:
    """Query of a call to its sharding rule, and the strategies that were chosen in the recorded program. Equal calls share it.

    Attributes:
        inplace_results: for each result that is written in place, by number, the operand that it is.
        chosen: the choice; None if the rule has none.
        answers: results of later queries, by strategies and layouts of operands.
    """

    rule: Rule
    factors: Factors
    call: Call
    inplace_results: Mapping[int, int]
    chosen: StrategySelection | None
    answers: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def strategies(self) -> tuple[BoundStrategy, ...]:
        """The strategies that the rule has for the call."""
        return bound_strategies_of(self.rule, self.factors, self.call).strategies

    @cached_property
    def work(self) -> OperatorWork:
        """The floating-point operations and bytes of the call on global tensors."""
        return work_of(self.rule, self.factors, self.call)


class RuleQueryRecorder:
    """A strategy selector that chooses as dispatch does, and records the queries to rules in ``queries``."""

    def __init__(self) -> None:
        self.queries: list[RuleQuery] = []

    def __call__(self, rule: Rule, factors: Factors, call: Call, inplace_results: Mapping[int, int]) -> StrategySelection | None:
        """Choose strategies as dispatch does, and append the query and the choice to ``queries``."""
        chosen = select_strategies(rule, factors, call, inplace_results)
        self.queries.append(RuleQuery(rule, factors, call, inplace_results, chosen))
        return chosen


@dataclass(slots=True, eq=False)
class Node:
    """Node of a program graph: an operator call, an input or a redistribution, with the values that it uses and makes.

    Attributes:
        kind: one of

            - ``"input"``: a tensor from outside of the program. It keeps its layout, unless ``auto_shard`` places it.
            - ``"call"``: an operator with strategies.
            - ``"fixed"``: a call that runs as recorded under any plan.
            - ``"move"``: an explicit redistribution. The user chose its result.
            - ``"written"``: a tensor after a write to memory that it shares. Its layout is that of its operand.
            - ``"parts"``: a decomposed call. The nodes that follow are its parts.
            - ``"gradient"``: for ``auto_shard``, a leaf's gradient, redistributed to the layout of the leaf, its second operand.
        key: operator, static arguments, shapes and dtypes. A later run is compared with it.
        operands: numbers of values, None for plain tensors and Python numbers.
        results: numbers of values, None for results that are no DTensor.
        pinned: operands that keep their layouts, because they are written to or read in place.
        query: the query to the rule of a ``"call"``.
        recorded_layouts: layouts of the operands in the recorded program.
        line: the user's source line; for a backward call, that of its forward call.
        accumulates_grad: autograd ran it to add up a leaf's gradient, which outlives the program.
        bytes_factor: for an input that is placed, bytes held per byte of it, such as 3.0 with two optimizer states.
        is_user_placed: the user has given the placements of an input.
    """

    number: int
    kind: Kind
    name: str
    key: tuple[object, ...] = ()
    operands: list[int | None] = field(default_factory=list)
    results: list[int | None] = field(default_factory=list)
    pinned: frozenset[int] = frozenset()
    query: RuleQuery | None = None
    recorded_layouts: tuple[Layout | None, ...] = ()
    is_view: bool = False
    line: str = ""
    is_backward: bool = False
    accumulates_grad: bool = False
    bytes_factor: float | None = None
    is_user_placed: bool = False


@dataclass(slots=True)
class Graph:
    """Program graph: the nodes in order, the values between them, and the collectives of the recorded run.

    ``collectives``: the collectives that the recorded run issued, each with the redistribution steps that it was issued for.
    """

    nodes: list[Node] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    collectives: list[tuple[Event, Sequence[Step]]] = field(default_factory=list)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of most values; None without values. Values on other meshes are not planned."""
        counts = Counter(value.layout.mesh for value in self.values)
        return counts.most_common(1)[0][0] if counts else None

    def find_users(self) -> list[list[tuple[Node, int]]]:
        """Return, for each value, the nodes that use it, each with the index of the operand."""
        users: list[list[tuple[Node, int]]] = [[] for _ in self.values]
        for node in self.nodes:
            for place, number in enumerate(node.operands):
                if number is not None:
                    users[number].append((node, place))
        return users
