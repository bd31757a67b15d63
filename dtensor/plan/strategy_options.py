"""Strategy options: the ways in which the calls of a class can run. An option has strategies and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..base.caches import memoize
from ..layout.layout import Layout
from ..layout.splits import without_sizes
from ..placement import Partial, Replicate, Shard
from ..propagation.select_strategy import realize_selection
from ..propagation.strategy_table import BoundStrategy, DimPlacement
from ..rules.call import Call
from ..rules.rule import Strategy
from .disjoint_placements import (
    DisjointPartial,
    disjoint_placements,
    list_strategies,
    mark_disjoint,
    mark_disjoint_results,
    operand_facts,
    with_placement,
    without_disjoint,
)
from .graph import Graph, Node, RuleQuery
from .node_costs import work_seconds
from .repeated_layers import NodeClass, NodeClasses, find_classes

CanonicalLayout = Layout  # equal for layouts that differ only in strides, and in the placement on mesh dims of one rank


@memoize(65536)
def canonical_layout(layout: Layout) -> CanonicalLayout:
    """Return a layout that is equal for two layouts of one tensor if no redistribution is needed between them."""
    marks = dict(disjoint_placements(layout))
    return Layout.from_splits(layout.mesh, layout.splits, layout.partials, layout.shape, None, layout.dtype, marks)


@dataclass(frozen=True, slots=True)
class Option:
    """A way to run a node.

    Attributes:
        strategies: one strategy of its rule per mesh dim; () for a node without.
        operands: the layouts of its operands; None for an operand that is no DTensor.
        results: the layouts of its results; None for a result that is no DTensor.
        seconds: its work, without redistributions of operands.
    """

    strategies: tuple[Strategy, ...]
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]
    seconds: float = 0.0


Options = list[list[Option]]  # for each class
ValueLayouts = list[dict[CanonicalLayout, Layout]]  # for each value of the classes, the layouts that it may have


# --- the recorded program --------------------------------------------------------------------------------------------------
def recorded_options(graph: Graph) -> list[Option]:
    """Return, for each node of the graph, the option that the recorded program took."""
    unread = _find_unread_views(graph)
    return [_recorded_option(graph, node, unread) for node in graph.nodes]


def _find_unread_views(graph: Graph) -> frozenset[int]:
    """Return the numbers of views that were never computed, because the program read only parts of their bases."""
    users, unread = graph.find_users(), set[int]()
    for value in reversed(graph.values):
        is_candidate = value.producer.is_view and not value.keeps_layout
        readers = [node for node, _ in users[value.number]] if is_candidate else []
        if readers and all(all(n in unread for n in node.results) or _reads_parts_of_base(graph, node) for node in readers):
            unread.add(value.number)
    return frozenset(unread)


def _reads_parts_of_base(graph: Graph, node: Node) -> bool:
    """Return True if a call picks parts of a view, and the parts have other layouts than its strategies give."""
    chosen = None if node.query is None else node.query.chosen
    viewed = node.operands[0] if node.is_view and node.operands else None
    if chosen is None or viewed is None or len(chosen.results) != len(node.results):
        return False
    recorded = [None if number is None else graph.values[number].layout for number in node.results]
    size = graph.values[viewed].layout.numel
    pairs = zip(recorded, chosen.results, strict=True)
    return all(x is not None and x is not predicted and x.numel < size for x, predicted in pairs)


def _recorded_option(graph: Graph, node: Node, unread: frozenset[int]) -> Option:
    """Return the option that the recorded run took for a node: strategies, layouts and estimated seconds."""
    chosen = None if node.query is None else node.query.chosen
    results = tuple(None if number is None else graph.values[number].layout for number in node.results)
    if node.is_view and any(number in unread for number in (*node.operands, *node.results)):
        strategies = () if chosen is None else chosen.choice.strategies
        return Option(strategies, tuple(None if n is None else graph.values[n].layout for n in node.operands), results)
    if chosen is not None and len(chosen.results) == len(results):
        # Use the layouts that the strategies give: a lazy view may have had another layout.
        results = tuple(None if layout is None else predicted for layout, predicted in zip(results, chosen.results, strict=True))
    pairs = zip(node.operands, node.recorded_layouts, strict=False)
    operands = tuple(None if number is None else layout for number, layout in pairs)
    if node.query is None or chosen is None:
        return Option((), operands, results)
    strategies, facts = chosen.choice.strategies, node.query.call.disjoint_splits
    if facts:
        operands = tuple(layout and mark_disjoint(layout, fact) for layout, fact in zip(operands, facts, strict=True))
    results = mark_disjoint_results(results, chosen.disjoint_results, facts)
    return Option(strategies, operands, results, work_seconds(node, strategies, operands, results))


def make_classes(graph: Graph, start: Sequence[Option]) -> NodeClasses:
    """Return the equivalence classes of a graph's nodes, where nodes of a class have equal options ``start``."""
    colors: list[Any] = []
    for node, option in zip(graph.nodes, start, strict=True):
        call: Any = id(node.query) if node.query is not None else (node.name, node.key)
        layouts = tuple([None if x is None else canonical_layout(x) for x in (*option.operands, *option.results)])
        keeps = tuple([number is not None and graph.values[number].keeps_layout for number in node.results])
        placed = node.bytes_factor, node.is_user_placed
        colors.append((node.kind, call, layouts, option.strategies, node.pinned, keeps, *placed))
    return find_classes(graph, colors)


# --- options along one mesh dim --------------------------------------------------------------------------------------------
def list_options(graph: Graph, classes: NodeClasses, state: Sequence[Option], mesh_dim: int) -> Options:
    """Return, for each class, the options that change its present option ``state`` on one mesh dim, the present one first.

    A strategy with partial operands is an option only if an operand may be partial in this way. This depends on the options of
    the node that makes it, so the lists are made again until no value gets a new layout.
    """
    layouts: ValueLayouts = [{} for _ in classes.makers]
    before = -1
    while before != (now := sum(map(len, layouts))):
        before = now
        options = [
            _list_class_options(graph, own, option, mesh_dim, layouts) for own, option in zip(classes.classes, state, strict=True)
        ]
    return options


def _list_class_options(graph: Graph, own: NodeClass, present: Option, mesh_dim: int, layouts: ValueLayouts) -> list[Option]:
    """Return the options of a class that change one mesh dim, and add the layouts of their results to ``layouts``."""
    options, node = [present], own.node
    if node.kind == "call":
        options += [option for option in _call_options(own, present, mesh_dim, layouts) if _is_allowed(graph, node, option)]
    elif node.kind == "input" and node.bytes_factor is not None and not node.is_user_placed:
        options += _input_options(present, mesh_dim)
    elif node.kind == "gradient":
        options += _gradient_options(own, present, layouts)
    elif node.kind == "written":
        before = {key: layout for value in own.feeds[0] for key, layout in layouts[value].items()}
        options += [replace(present, operands=(layout,), results=(layout,)) for layout in before.values()]
    options = _drop_duplicates(options)
    for place, value in enumerate(own.results):
        for option in options if value is not None else ():
            if (layout := option.results[place]) is not None:
                layouts[value].setdefault(canonical_layout(layout), layout)  # type: ignore[index]  # no tensor is None
    return options


def _call_options(own: NodeClass, present: Option, mesh_dim: int, layouts: ValueLayouts) -> Iterator[Option]:
    """Yield the options of an operator call with another strategy on one mesh dim."""
    query = own.node.query
    assert query is not None
    for operands in _operand_variants(query.call, own, present, mesh_dim, layouts):
        for line in list_strategies(query, operands):
            if not line.applies_to(mesh_dim) or not _is_reachable(line, own, mesh_dim, layouts):
                continue
            strategies = (*present.strategies[:mesh_dim], line.strategy_for(query.factors), *present.strategies[mesh_dim + 1 :])
            sources = tuple(
                layout if where is None else _place_operand(layout, where, mesh_dim)
                for layout, where in zip(operands, line.operands, strict=True)
            )
            key = strategies, sources
            if key not in query.answers:
                query.answers[key] = _make_option(own.node, query, strategies, sources)
            if (option := query.answers[key]) is not None:
                yield option


def _operand_variants(
    call: Call, own: NodeClass, present: Option, mesh_dim: int, layouts: ValueLayouts
) -> Iterator[tuple[Layout, ...]]:
    """Yield the present operand layouts, then variants in which operands are disjoint partial on the mesh dim."""
    taken = present.operands or (None,) * len(call.operands)
    operands = [recorded if layout is None else layout for layout, recorded in zip(taken, call.operands, strict=True)]
    yield tuple(without_disjoint(layout, mesh_dim) for layout in operands)
    incoming = [{layout.placements[mesh_dim] for value in feeds for layout in layouts[value].values()} for feeds in own.feeds]
    marks = [[placement for placement in each if isinstance(placement, DisjointPartial)] for each in incoming]
    for split in dict.fromkeys(mark.split for each in marks for mark in each):
        same_split = [next((mark for mark in each if mark.split == split), None) for each in marks]
        yield tuple(
            layout if mark is None else with_placement(layout, mesh_dim, mark)
            for layout, mark in zip(operands, same_split, strict=True)
        )


def _make_option(node: Node, query: RuleQuery, strategies: tuple[Strategy, ...], sources: tuple[Layout, ...]) -> Option | None:
    """Return the option of a call with these strategies and operand layouts; None if the rule cannot run so."""
    call = replace(query.call, operands=tuple(map(without_disjoint, sources)), operand_facts=operand_facts(query, sources))
    chosen = realize_selection(query.rule, strategies, query.factors, call, query.inplace_results)
    if chosen is None:
        return None
    layouts = [source if x.has_same_blocks(source) else x for source, x in zip(sources, chosen.operands, strict=True)]
    operands = tuple(None if n is None else x for n, x in zip(node.operands, layouts, strict=True))
    marked = mark_disjoint_results(chosen.results, chosen.disjoint_results, call.disjoint_splits)
    results = tuple(None if n is None else x for n, x in zip(node.results, marked, strict=True))
    return Option(strategies, operands, results, work_seconds(node, strategies, operands, results))


def _place_operand(layout: Layout, where: DimPlacement, mesh_dim: int) -> Layout:
    """Return an operand's layout with a strategy's placement on one mesh dim; disjoint partial satisfies ``P(sum)``."""
    present = layout.placements[mesh_dim]
    if layout.placement_along(mesh_dim) == where or (isinstance(present, DisjointPartial) and where == Partial("sum")):
        return layout
    return with_placement(layout, mesh_dim, Shard(where) if isinstance(where, int) else where)


def _input_options(present: Option, mesh_dim: int) -> Iterator[Option]:
    """Yield the options of an input that ``auto_shard`` places: replicated or evenly sharded on one mesh dim."""
    layout = present.results[0]
    assert layout is not None
    ranks = layout.mesh.shape[mesh_dim]
    dims = [d for d, size in enumerate(_smallest_blocks(layout, mesh_dim)) if size and size % ranks == 0]
    for placement in (Replicate(), *map(Shard, dims)):
        yield replace(present, results=(with_placement(layout, mesh_dim, placement),))


def _smallest_blocks(layout: Layout, mesh_dim: int) -> list[int]:
    """Return for each tensor dim the smallest shard size that the other mesh dims leave of it."""
    other = replicated_along(layout, mesh_dim)
    return [size if split is None else min(split.sizes) for size, split in zip(other.shape, other.splits, strict=True)]


def _gradient_options(own: NodeClass, present: Option, layouts: ValueLayouts) -> Iterator[Option]:
    """Yield the options of a leaf's gradient, one for each layout that the leaf may have."""
    source = present.operands[0]
    assert source is not None
    for leaf in (layout for value in own.feeds[1] for layout in layouts[value].values()):
        target = source.replace(placements=list(map(without_sizes, leaf.placements)))
        yield replace(present, operands=(target, leaf), results=(target,))


def _is_reachable(line: BoundStrategy, own: NodeClass, mesh_dim: int, layouts: ValueLayouts) -> bool:
    """Return True if a strategy has no partial operands, or one of them may be partial in this way."""
    partial = [(i, where) for i, where in enumerate(line.operands) if isinstance(where, Partial)]
    incoming = ((where, layout) for i, where in partial for value in own.feeds[i] for layout in layouts[value].values())
    return not partial or any(_place_operand(layout, where, mesh_dim) is layout for where, layout in incoming)


def _is_allowed(graph: Graph, node: Node, option: Option) -> bool:
    """Return True if an option keeps the layouts of operands written in place, and of values whose layout the user reads."""
    for r, i in node.query.inplace_results.items() if node.query is not None else ():
        result, operand = option.results[r], option.operands[i]
        if result is not None and operand is not None and canonical_layout(result) != canonical_layout(operand):
            return False
    for number, layout in zip(node.results, option.results, strict=True):
        if number is None or layout is None or not graph.values[number].keeps_layout:
            continue
        if canonical_layout(without_disjoint(layout)) != canonical_layout(graph.values[number].layout):
            return False
    return True


def _drop_duplicates(options: list[Option]) -> list[Option]:
    """Return options with distinct layouts: of those with the same layouts the cheapest."""
    best: dict[object, Option] = {}
    for option in options:
        key = tuple(None if x is None else canonical_layout(x) for x in (*option.operands, *option.results))
        if key not in best or option.seconds < best[key].seconds:
            best[key] = option
    return list(best.values())


def replicated_along(layout: Layout, mesh_dim: int) -> Layout:
    """Return ``layout`` with ``Replicate`` on one mesh dim."""
    return with_placement(layout, mesh_dim, Replicate())
