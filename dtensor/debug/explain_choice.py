"""Explain a choice of strategies: which operands an operator redistributed, what to write instead, and the other strategies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..base.text_tables import table_text
from ..base.units import seconds_text
from ..dispatch import Cause
from ..placement import Partial, Placement
from ..plan.graph import RuleQuery, RuleQueryRecorder
from ..propagation.make_call import make_call
from ..propagation.propagate import propagate_sharding
from ..propagation.select_strategy import rank_all_strategies
from ..propagation.strategy_table import spec_to_placement
from ..redistribute.step import describe_placements
from ..rules.rule import Strategy
from ..testing.reproduction import python_source

SHOWN_STRATEGIES = 3  # per mesh dim, besides the chosen one


def reason_lines(cause: Cause, can_be_written: bool = True) -> list[str]:
    """Return lines of text on why an operator call redistributed: what to write instead, and its strategies by cost.

    Args:
        can_be_written: True if the program writes the operands; it does not in a backward pass.
    """
    lines = [text for text in _redistribution_lines(cause) if can_be_written or not text.startswith("write instead")]
    if cause.plan.how == "gather":
        return ["no sharding rule applies: all operands are gathered and every rank computes the full result", *lines]
    for query in _considered_query(cause):
        lines += [*(_alternative_lines(cause, query) if can_be_written else ()), *_strategy_lines(query)]
    return lines


def _redistribution_lines(cause: Cause) -> Iterator[str]:
    """Yield lines of text on the redistributions of an operator call, and on communication inside its kernel."""
    for (name, index), plan in cause.plan.redistributions:
        if plan.communicates:
            operand = name if index is None else f"{name}[{index}]"
            yield f"redistributed: {operand} {plan.src!r} -> {describe_placements(plan.dst)}"
            placements = python_source(list(plan.dst.placements))
            yield f"write instead: {operand}.redistribute(placements={placements}), once, before this line"
    for (name, _), plan in cause.plan.write_back:
        if plan.communicates:
            change = f"{describe_placements(plan.src)} -> {describe_placements(plan.dst)}"
            yield f"redistributed back: {name} {change}, as the tensor that is written to"
    kernel = None if cause.plan.chosen is None else cause.plan.chosen.kernel_strategy
    if kernel is not None and kernel.kernel is not None and kernel.kernel.collectives:
        yield f"the kernel of this strategy (factor {kernel.factor!r} is sharded) communicates on its own"


def _considered_query(cause: Cause) -> list[RuleQuery]:
    """Return the rule query of the call with all its strategies, in a list; [] if the call made none.

    Planning has no side effects, so it runs again and records the query. For a list operator the query is that of the first
    element.
    """
    call = cause.plan.call
    if cause.plan.how != "rule" or call.mesh.size() == 1:
        return []
    recorder, (_, slots) = RuleQueryRecorder(), make_call(cause.operator, call.mesh, call.arguments)
    facts = {slot: fact for slot, fact in zip(slots, call.operand_facts, strict=False) if fact is not None}
    propagate_sharding(cause.operator, call.mesh, call.arguments, frozenset(slots[i] for i in call.plain), recorder, facts)
    return [query for query in recorder.queries if query.chosen is not None][:1]  # of a list: the first element


def _alternative_lines(cause: Cause, query: RuleQuery) -> Iterator[str]:
    """Yield a line of text on which placements an operand would need so that no redistribution is necessary."""
    plans = [(slot, plan) for slot, plan in cause.plan.redistributions if plan.communicates]
    if len(plans) != 1 or len(cause.plan.redistributions) != 1:
        return
    (moved_slot, plan), (_, slots) = plans[0], make_call(cause.operator, query.call.mesh, cause.plan.call.arguments)
    changed_dims = [dim for dim, (a, b) in enumerate(zip(plan.src.placements, plan.dst.placements, strict=True)) if a != b]
    if len(changed_dims) != 1:
        return
    for _, strategy in _strategies_by_cost(query, changed_dims[0]):
        needed, results = _strategy_placements(strategy, query)
        pairs = zip(slots, query.call.operands, needed, strict=True)
        others = [(slot, layout, target) for slot, layout, target in pairs if layout.placements[changed_dims[0]] != target]
        if len(others) != 1 or others[0][0] == moved_slot or strategy.kernel is not None:
            continue
        ((name, index), layout, target) = others[0]
        placements = [target if dim == changed_dims[0] else old for dim, old in enumerate(layout.placements)]
        operand = name if index is None else f"{name}[{index}]"
        is_partial = any(isinstance(result, Partial) for result in results)
        yield (
            f"or: make {operand} {layout!r} with placements={python_source(placements)}; then nothing is redistributed"
            + (" and the result is Partial" if is_partial else "")
        )


def _strategy_lines(query: RuleQuery) -> Iterator[str]:
    """Yield, for each mesh dim, lines of text with the cheapest strategies and their estimated times."""
    assert query.chosen is not None
    for mesh_dim, chosen in enumerate(query.chosen.choice.strategies):
        priced = _strategies_by_cost(query, mesh_dim)
        shown = [item for k, item in enumerate(priced) if k < SHOWN_STRATEGIES or item[1] == chosen]
        (name,) = query.call.mesh.named((mesh_dim,))
        dim = name if query.call.mesh.mesh_dim_names else f"mesh dim {name}"
        yield f"strategies on {dim} ({len(shown)} of {len(priced)}, * chosen), by estimated time, later reductions included:"
        texts = []
        for cost, strategy in shown:
            mark = "*" if strategy == chosen else " "
            texts.append((f"{mark} {_strategy_text(strategy, query)}", seconds_text(cost[0])))
        yield from (f"  {text}" for text in table_text(texts, numbers=True).splitlines())


def _strategies_by_cost(query: RuleQuery, mesh_dim: int) -> list[Any]:
    """Return every strategy with its cost, cheapest first."""
    return rank_all_strategies(query.rule, query.factors, query.call, query.inplace_results)[mesh_dim]


def _strategy_placements(strategy: Strategy, query: RuleQuery) -> tuple[list[Placement], list[Placement]]:
    """Return the placements that a strategy needs of the operands, and those that it gives the results."""
    operands = [spec_to_placement(spec, dims) for spec, dims in zip(strategy.operands, query.factors.operands, strict=True)]
    return operands, [spec_to_placement(spec, dims) for spec, dims in zip(strategy.results, query.factors.results, strict=True)]


def _strategy_text(strategy: Strategy, query: RuleQuery) -> str:
    """Return the text of a strategy, such as ``"S(0), R -> S(0)"``."""
    operands, results = (", ".join(map(str, side)) for side in _strategy_placements(strategy, query))
    return f"{operands} -> {results}" + (" (kernel)" if strategy.kernel is not None else "")
