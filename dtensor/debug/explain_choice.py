"""Reasons of implicit communication: what an operator redistributed, what to write instead, and the strategies considered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..base.tables import table_text
from ..base.units import seconds_text
from ..dispatch.comm_report import Cause
from ..placement import Partial, Placement
from ..plan.graph import Asked
from ..plan.graph_recorder import Listening
from ..propagation.make_call import make_call
from ..propagation.propagate import propagate
from ..propagation.select_strategy import prices
from ..propagation.strategy_table import spelled
from ..redistribute.step import place
from ..rules.rule import Row
from ..testing.reproduction import source_of

SHOWN = 3  # strategies on each mesh dim, and the chosen one


def reasons(cause: Cause, can_be_written: bool = True) -> list[str]:
    """Return lines about one operator call: what it redistributed, what to write instead, and the strategies by mesh dim.

    Args:
        can_be_written: whether the program writes the operands; it does not in a backward pass.
    """
    lines = [text for text in _moved(cause) if can_be_written or not text.startswith("write instead")]
    if cause.plan.how == "gather":
        return ["no sharding rule applies: all operands are gathered and every rank computes the full result", *lines]
    for asked in _asked(cause):
        lines += [*(_made_otherwise(cause, asked) if can_be_written else ()), *_strategies(asked)]
    return lines


def _moved(cause: Cause) -> Iterator[str]:
    for (name, index), move in cause.plan.moves:
        if move.communicates:
            what = name if index is None else f"{name}[{index}]"
            yield f"redistributed: {what} {move.src!r} -> {place(move.dst)}"
            yield f"write instead: {what}.redistribute(placements={source_of(list(move.dst.placements))}), once, before this line"
    for (name, _), move in cause.plan.write_back:
        if move.communicates:
            yield f"redistributed back: {name} {place(move.src)} -> {place(move.dst)}, as the tensor that is written to"
    kernel = None if cause.plan.chosen is None else cause.plan.chosen.kernel_row
    if kernel is not None and kernel.kernel is not None and kernel.kernel.collectives:
        yield f"the kernel of this strategy (factor {kernel.factor!r} is sharded) communicates on its own"


def _asked(cause: Cause) -> list[Asked]:
    """Return the strategies considered for this call. Planning has no side effects: it runs once more under a listener."""
    call = cause.plan.call
    if cause.plan.how != "rule" or call.mesh.size() == 1:
        return []
    listening, (_, slots) = Listening(), make_call(cause.operator, call.mesh, call.arguments)
    known = {slot: fact for slot, fact in zip(slots, call.known, strict=False) if fact is not None}
    propagate(cause.operator, call.mesh, call.arguments, frozenset(slots[i] for i in call.plain), listening, known)
    return [asked for asked in listening.calls if asked.chosen is not None][:1]  # of lists the first element


def _made_otherwise(cause: Cause, asked: Asked) -> Iterator[str]:
    """Yield the operand that, made with other placements, would avoid the redistribution."""
    moves = [(slot, move) for slot, move in cause.plan.moves if move.communicates]
    if len(moves) != 1 or len(cause.plan.moves) != 1:
        return
    (moved, move), (_, slots) = moves[0], make_call(cause.operator, asked.call.mesh, cause.plan.call.arguments)
    changed = [dim for dim, (a, b) in enumerate(zip(move.src.placements, move.dst.placements, strict=True)) if a != b]
    if len(changed) != 1:
        return
    for _, row in _priced(asked, changed[0]):
        wanted, made = _wanted(row, asked)
        pairs = zip(slots, asked.call.operands, wanted, strict=True)
        others = [(slot, layout, to) for slot, layout, to in pairs if layout.placements[changed[0]] != to]
        if len(others) != 1 or others[0][0] == moved or row.kernel is not None:
            continue
        ((name, index), layout, to) = others[0]
        placements = [to if dim == changed[0] else old for dim, old in enumerate(layout.placements)]
        what = name if index is None else f"{name}[{index}]"
        owed = any(isinstance(result, Partial) for result in made)
        yield (
            f"or: make {what} {layout!r} with placements={source_of(placements)}; then nothing is redistributed"
            + (" and the result is Partial" if owed else "")
        )


def _strategies(asked: Asked) -> Iterator[str]:
    assert asked.chosen is not None
    for mesh_dim, taken in enumerate(asked.chosen.choice.rows):
        priced = _priced(asked, mesh_dim)
        shown = [item for k, item in enumerate(priced) if k < SHOWN or item[1] == taken]
        (name,) = asked.call.mesh.named((mesh_dim,))
        dim = name if asked.call.mesh.mesh_dim_names else f"mesh dim {name}"
        yield f"strategies on {dim} ({len(shown)} of {len(priced)}, * chosen), by estimated time, later reductions included:"
        texts = [(f"{'*' if row == taken else ' '} {_told(row, asked)}", seconds_text(price[0])) for price, row in shown]
        yield from (f"  {text}" for text in table_text(texts, numbers=True).splitlines())


def _priced(asked: Asked, mesh_dim: int) -> list[Any]:
    """Return every strategy with its cost, cheapest first."""
    return prices(asked.rule, asked.factors, asked.call, asked.kept)[mesh_dim]


def _wanted(row: Row, asked: Asked) -> tuple[list[Placement], list[Placement]]:
    """Return the placement that a strategy needs of each operand, and the one that it gives each result."""
    given = [spelled(spec, dims) for spec, dims in zip(row.operands, asked.factors.operands, strict=True)]
    return given, [spelled(spec, dims) for spec, dims in zip(row.results, asked.factors.results, strict=True)]


def _told(row: Row, asked: Asked) -> str:
    """``S(0), R -> S(0)``."""
    given, made = (", ".join(map(str, side)) for side in _wanted(row, asked))
    return f"{given} -> {made}" + (" (kernel)" if row.kernel is not None else "")
