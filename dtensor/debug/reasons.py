"""Why an operator moved something: the rows that were considered, with their prices, and the line to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from ..dispatch.report import Cause
from ..plan.graph import Asked
from ..plan.record import Listening
from ..propagation.choose import declared
from ..propagation.propagate import make_call, propagate
from ..propagation.row_costs import ranked
from ..propagation.row_table import spelled
from ..redistribute.step import place, seconds_of
from ..rules.rule import Row
from ..rules.work import work_of
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
        lines += _rows(asked)
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
    propagate(cause.operator, call.mesh, call.arguments, frozenset(slots[i] for i in call.plain), listening)
    return [asked for asked in listening.calls if asked.chosen is not None][:1]  # of lists the first element


def _rows(asked: Asked) -> Iterator[str]:
    assert asked.chosen is not None
    table, work = declared(asked.rule, asked.factors, asked.call), work_of(asked.rule, asked.factors, asked.call)
    mesh = asked.call.mesh
    for mesh_dim, taken in enumerate(asked.chosen.choice.rows):
        priced = ranked(table, asked.factors, asked.call, asked.kept, mesh_dim, work)
        shown = [item for k, item in enumerate(priced) if k < SHOWN or item[1] == taken]
        (name,) = mesh.named((mesh_dim,))
        yield f"rows considered on {name} ({len(priced)}), by price of what they move now and owe:"
        for price, row in shown:
            yield f"  {'*' if row == taken else ' '} {_told(row, asked)}: {seconds_of(price[0])}"


def _told(row: Row, asked: Asked) -> str:
    """``S(0), R -> S(0)``."""
    given = [str(spelled(spec, dims)) for spec, dims in zip(row.operands, asked.factors.operands, strict=True)]
    made = [str(spelled(spec, dims)) for spec, dims in zip(row.results, asked.factors.results, strict=True)]
    return f"{', '.join(given)} -> {', '.join(made)}" + (" by a kernel" if row.kernel is not None else "")
