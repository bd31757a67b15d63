"""The ways in which calls of a class can run: rows of their rule, the layouts that they want, and what they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.caches import remembered
from ..layout.layout import Layout
from ..placement import Partial, Replicate, Shard
from ..propagation.select_strategy import realized
from ..propagation.strategy_table import Line, Where
from ..rules.call import Call
from ..rules.rule import Row
from .costs import work_seconds
from .disjoint_partial import ByOwner, facts_of, lines_of, marked, marks_of, parted_as, placed, plain, unmarked
from .graph import Asked, Graph, Node
from .repeated_layers import Class, Classes, classes_of

Form = Layout  # one for all layouts that differ in strides only, and in the spelling of mesh dims of one rank


@remembered(65536)
def form_of(layout: Layout) -> Form:
    """What two layouts of one tensor share that need no move between them."""
    marks = dict(marks_of(layout))
    return Layout.from_splits(layout.mesh, layout.splits, layout.partials, layout.shape, None, layout.dtype, marks)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a node.

    Attributes:
        rows: per mesh dim a row of its rule; () for nodes without.
        operands: the layouts that it takes operands in; None for what is no DTensor.
        results: the layouts that it leaves.
        seconds: what it takes by itself, moves of operands not counted.
    """

    rows: tuple[Row, ...]
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]
    seconds: float = 0.0


Options = list[list[Option]]  # by class


def eager_options(graph: Graph) -> list[Option]:
    """What the recorded program took."""
    unread = _unread(graph)
    return [_as_recorded(graph, node, unread) for node in graph.nodes]


def _unread(graph: Graph) -> frozenset[int]:
    """The views of which nothing but parts was asked that were found in what they are views of."""
    users, unread = graph.users(), set[int]()
    for value in reversed(graph.values):
        asking = [node for node, _ in users[value.number]] if value.producer.view and not value.kept else []
        if asking and all(all(number in unread for number in node.results) or _found(graph, node) for node in asking):
            unread.add(value.number)
    return frozenset(unread)


def _found(graph: Graph, node: Node) -> bool:
    """Whether parts that a call picked of a view lie otherwise than its rows leave them."""
    chosen, whole = None if node.asked is None else node.asked.chosen, node.operands[0] if node.view and node.operands else None
    if chosen is None or whole is None or len(chosen.results) != len(node.results):
        return False
    made = [None if number is None else graph.values[number].layout for number in node.results]
    size = graph.values[whole].layout.numel
    return all(x is not None and x is not left and x.numel < size for x, left in zip(made, chosen.results, strict=True))


def _as_recorded(graph: Graph, node: Node, unread: frozenset[int]) -> Option:
    results = tuple(None if number is None else graph.values[number].layout for number in node.results)
    if node.view and any(number in unread for number in (*node.operands, *node.results)):
        rows = () if node.asked is None or node.asked.chosen is None else node.asked.chosen.choice.rows
        return Option(rows, tuple(None if number is None else graph.values[number].layout for number in node.operands), results)
    if node.asked is not None and (chosen := node.asked.chosen) is not None and len(chosen.results) == len(results):
        # of rows what these leave: a view that is computed when it is read showed another layout
        results = tuple(None if made is None else left for made, left in zip(results, chosen.results, strict=True))
    operands = tuple(None if number is None else layout for number, layout in zip(node.operands, node.wanted, strict=False))
    if node.asked is None or node.asked.chosen is None:
        return Option((), operands, results)
    rows, known = node.asked.chosen.choice.rows, node.asked.call.parted
    if known:
        operands = tuple(layout and parted_as(layout, fact) for layout, fact in zip(operands, known, strict=True))
    results = marked(results, node.asked.chosen.left, known)
    return Option(rows, operands, results, work_seconds(node, rows, operands, results))


def classes_from(graph: Graph, start: Sequence[Option]) -> Classes:
    """The classes of a graph whose nodes start from these options."""
    found: list[Any] = []
    for node, option in zip(graph.nodes, start, strict=True):
        what: Any = id(node.asked) if node.asked is not None else (node.name, node.key)
        forms = tuple([None if layout is None else form_of(layout) for layout in (*option.operands, *option.results)])
        kept = tuple([number is not None and graph.values[number].kept for number in node.results])
        found.append((node.kind, what, forms, option.rows, node.pinned, kept, node.memory, node.given))
    return classes_of(graph, found)


def options_along(graph: Graph, classes: Classes, state: Sequence[Option], mesh_dim: int) -> Options:
    """For each class the options that differ from ``state`` on one mesh dim only, the present one first.

    Terms are of use where some operand comes in terms of that kind, which is known when all options of its makers are: so until
    nothing new is found.
    """
    forms: list[dict[Form, Layout]] = [{} for _ in classes.makers]  # that values may have
    known = -1
    while known != (now := sum(map(len, forms))):
        known = now
        found = [_options(graph, own, option, mesh_dim, forms) for own, option in zip(classes.classes, state, strict=True)]
    return found


def _options(graph: Graph, own: Class, now: Option, mesh_dim: int, forms: list[dict[Form, Layout]]) -> list[Option]:
    options, node = [now], own.node
    if node.kind == "call":
        options += [option for option in _of_call(own, now, mesh_dim, forms) if _allowed(graph, node, option)]
    elif node.kind == "input" and node.memory is not None and not node.given:
        options += _placed_along(now, mesh_dim)
    elif node.kind == "gradient":
        options += _of_gradient(own, now, forms)
    elif node.kind == "same":
        before = {form: layout for value in own.feeds[0] for form, layout in forms[value].items()}
        options += [replace(now, operands=(layout,), results=(layout,)) for layout in before.values()]
    options = _without_repeats(options)
    for place, value in enumerate(own.results):
        for option in options if value is not None else ():
            if (layout := option.results[place]) is not None:
                forms[value].setdefault(form_of(layout), layout)  # type: ignore[index]  # no tensor is None
    return options


def _of_call(own: Class, now: Option, mesh_dim: int, forms: list[dict[Form, Layout]]) -> Iterator[Option]:
    asked = own.node.asked
    assert asked is not None
    for seen in _known(asked.call, own, now, mesh_dim, forms):
        for line in lines_of(asked, seen):
            if not line.on(mesh_dim) or not _reachable(line, own, mesh_dim, forms):
                continue
            rows = (*now.rows[:mesh_dim], line.row_for(asked.factors), *now.rows[mesh_dim + 1 :])
            given = tuple(
                layout if where is None else _seed(layout, where, mesh_dim)
                for layout, where in zip(seen, line.operands, strict=True)
            )
            key = rows, given
            if key not in asked.answers:
                asked.answers[key] = _realized(own.node, asked, rows, given)
            if (option := asked.answers[key]) is not None:
                yield option


def _known(call: Call, own: Class, now: Option, mesh_dim: int, forms: list[dict[Form, Layout]]) -> Iterator[tuple[Layout, ...]]:
    """The operands as ``now`` takes them, and with rows that are parted on the mesh dim in one way, where they come so."""
    taken = now.operands or (None,) * len(call.operands)
    have = [y if x is None else x for x, y in zip(taken, call.operands, strict=True)]
    yield tuple(unmarked(layout, mesh_dim) for layout in have)
    coming = [{layout.placements[mesh_dim] for value in feeds for layout in forms[value].values()} for feeds in own.feeds]
    marks = [[mark for mark in each if isinstance(mark, ByOwner)] for each in coming]
    for split in dict.fromkeys(mark.split for each in marks for mark in each):
        alike = [next((mark for mark in each if mark.split == split), None) for each in marks]
        yield tuple(x if mark is None else placed(x, mesh_dim, mark) for x, mark in zip(have, alike, strict=True))


def _realized(node: Node, asked: Asked, rows: tuple[Row, ...], given: tuple[Layout, ...]) -> Option | None:
    call = replace(asked.call, operands=tuple(map(unmarked, given)), known=facts_of(asked, given))
    chosen = realized(asked.rule, rows, asked.factors, call, asked.kept)
    if chosen is None:
        return None
    taken = [x if y.same_data(x) else y for x, y in zip(given, chosen.operands, strict=True)]
    operands = tuple(None if n is None else x for n, x in zip(node.operands, taken, strict=True))
    left = marked(chosen.results, chosen.left, call.parted)
    results = tuple(None if n is None else x for n, x in zip(node.results, left, strict=True))
    return Option(rows, operands, results, work_seconds(node, rows, operands, results))


def _seed(layout: Layout, where: Where, mesh_dim: int) -> Layout:
    """An operand as it is taken, but for one mesh dim; terms whose rows are parted are terms."""
    here = layout.placements[mesh_dim]
    if layout.along(mesh_dim) == where or (isinstance(here, ByOwner) and where == Partial("sum")):
        return layout
    return placed(layout, mesh_dim, Shard(where) if isinstance(where, int) else where)


def _placed_along(now: Option, mesh_dim: int) -> Iterator[Option]:
    """The ways in which an input can lie along one mesh dim: whole, or cut in even parts."""
    layout = now.results[0]
    assert layout is not None
    ranks = layout.mesh.shape[mesh_dim]
    cuts = [d for d, blocks in enumerate(_blocks(layout, mesh_dim)) if blocks and blocks % ranks == 0]
    for placement in (Replicate(), *map(Shard, cuts)):
        yield replace(now, results=(placed(layout, mesh_dim, placement),))


def _blocks(layout: Layout, mesh_dim: int) -> list[int]:
    """What the other mesh dims leave of each tensor dim."""
    other = whole(layout, mesh_dim)
    return [size if split is None else min(split.sizes) for size, split in zip(other.shape, other.splits, strict=True)]


def _of_gradient(own: Class, now: Option, forms: list[dict[Form, Layout]]) -> Iterator[Option]:
    """A gradient lies as its leaf does."""
    given = now.operands[0]
    assert given is not None
    for leaf in (layout for value in own.feeds[1] for layout in forms[value].values()):
        target = given.replace(placements=list(map(plain, leaf.placements)))
        yield replace(now, operands=(target, leaf), results=(target,))


def _reachable(line: Line, own: Class, mesh_dim: int, forms: list[dict[Form, Layout]]) -> bool:
    """Terms are of use where some operand comes in terms of that kind."""
    terms = [(i, where) for i, where in enumerate(line.operands) if isinstance(where, Partial)]
    coming = ((where, layout) for i, where in terms for value in own.feeds[i] for layout in forms[value].values())
    return not terms or any(_seed(layout, where, mesh_dim) is layout for where, layout in coming)


def _allowed(graph: Graph, node: Node, option: Option) -> bool:
    """What is written to stays where it is; what the user looks at lies as it lay."""
    for r, i in node.asked.kept.items() if node.asked is not None else ():
        result, operand = option.results[r], option.operands[i]
        if result is not None and operand is not None and form_of(result) != form_of(operand):
            return False
    for number, layout in zip(node.results, option.results, strict=True):
        kept = number is not None and graph.values[number].kept
        if kept and layout is not None and form_of(unmarked(layout)) != form_of(graph.values[number].layout):  # type: ignore[index]
            return False
    return True


def _without_repeats(options: list[Option]) -> list[Option]:
    """Of options that take and leave the same the first of the cheapest."""
    best: dict[object, Option] = {}
    for option in options:
        key = tuple(None if x is None else form_of(x) for x in (*option.operands, *option.results))
        if key not in best or option.seconds < best[key].seconds:
            best[key] = option
    return list(best.values())


def whole(layout: Layout, mesh_dim: int) -> Layout:
    """``layout`` with everything on every rank of one mesh dim."""
    return placed(layout, mesh_dim, Replicate())
