"""Why an operator moved something: the rows that were considered, with their prices, and the line to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dispatch.report import Cause
from ..placement import Partial, Placement
from ..plan.graph import Asked
from ..plan.record import Listening
from ..propagation.calls import make_call
from ..propagation.choose import prices
from ..propagation.propagate import propagate
from ..propagation.row_table import spelled
from ..redistribute.step import place, seconds_of
from ..rules.rule import Row
from ..testing.reproduction import source_of

SHOWN = 3  # rows on each mesh dim, and the one that was taken


def reasons(cause: Cause, can_be_written: bool = True) -> list[str]:
    """Lines about one call: what was moved and what to write instead (of a backward pass nobody writes the operands), then the
    rows by mesh dim.
    """
    lines = [text for text in _moved(cause) if can_be_written or not text.startswith("instead")]
    if cause.plan.how == "gather":
        return ["no rule fits: computed whole on every rank", *lines]
    for asked in _asked(cause):
        lines += [*(_made_otherwise(cause, asked) if can_be_written else ()), *_rows(asked)]
    return lines


def _moved(cause: Cause) -> Iterator[str]:
    for (name, index), move in cause.plan.moves:
        if move.communicates:
            what = name if index is None else f"{name}[{index}]"
            yield f"moved: {what} {move.src!r} -> {place(move.dst)}"
            yield f"instead: {what}.redistribute(placements={source_of(list(move.dst.placements))}), once, before this line"
    for (name, _), move in cause.plan.write_back:
        if move.communicates:
            yield f"written back: {name} {place(move.src)} -> {place(move.dst)}, where the program holds it"
    kernel = None if cause.plan.chosen is None else cause.plan.chosen.kernel_row
    if kernel is not None and kernel.kernel is not None and kernel.kernel.collectives:
        yield f"a kernel over the cut factor {kernel.factor!r} communicates itself"


def _asked(cause: Cause) -> list[Asked]:
    """What the rule was asked for this call. Planning is pure: it is done once more, and listened to."""
    call = cause.plan.call
    if cause.plan.how != "rule" or call.mesh.size() == 1:
        return []
    listening, (_, slots) = Listening(), make_call(cause.operator, call.mesh, call.arguments)
    known = {slot: fact for slot, fact in zip(slots, call.known, strict=False) if fact is not None}
    propagate(cause.operator, call.mesh, call.arguments, frozenset(slots[i] for i in call.plain), listening, known)
    return [asked for asked in listening.calls if asked.chosen is not None][:1]  # of lists the first element


def _made_otherwise(cause: Cause, asked: Asked) -> Iterator[str]:
    """Operands that stayed as they are: had one of them been made in another way, nothing would move."""
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
            f"or: {what} {layout!r} made with placements={source_of(placements)}: nothing moves then"
            + (", the result is left in terms" if owed else "")
        )


def _rows(asked: Asked) -> Iterator[str]:
    assert asked.chosen is not None
    for mesh_dim, taken in enumerate(asked.chosen.choice.rows):
        priced = _priced(asked, mesh_dim)
        shown = [item for k, item in enumerate(priced) if k < SHOWN or item[1] == taken]
        (name,) = asked.call.mesh.named((mesh_dim,))
        yield f"rows considered on {name} ({len(priced)}), by price of what they move now and owe:"
        for price, row in shown:
            yield f"  {'*' if row == taken else ' '} {_told(row, asked)}: {seconds_of(price[0])}"


def _priced(asked: Asked, mesh_dim: int) -> list[Any]:
    """Every row with its price, the cheapest first."""
    return prices(asked.rule, asked.factors, asked.call, asked.kept)[mesh_dim]


def _wanted(row: Row, asked: Asked) -> tuple[list[Placement], list[Placement]]:
    """What a row wants of each operand, and makes of each result."""
    given = [spelled(spec, dims) for spec, dims in zip(row.operands, asked.factors.operands, strict=True)]
    return given, [spelled(spec, dims) for spec, dims in zip(row.results, asked.factors.results, strict=True)]


def _told(row: Row, asked: Asked) -> str:
    """``S(0), R -> S(0)``."""
    given, made = (", ".join(map(str, side)) for side in _wanted(row, asked))
    return f"{given} -> {made}" + (" by a kernel" if row.kernel is not None else "")
