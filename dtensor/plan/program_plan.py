"""Program plan: the strategy of each operator call of a program, its cost and the reason. It prints itself and saves to JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.group_by import group_by_key
from ..base.late_binding import html_repr
from ..base.units import bytes_text, seconds_text
from ..base.user_frames import NO_SOURCE_LINE, SourceLine
from ..errors import ArgumentError, PlacementError
from ..placement import Placement, parse_placement

FORMAT = 2
Spelled = tuple[str, ...]  # placements as text, one for each mesh dim


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """Planned redistribution: the value, placements before and after, bytes that one rank receives, estimated seconds."""

    what: str
    source: Spelled
    target: Spelled
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        cost = f"{bytes_text(self.nbytes)}, {seconds_text(self.seconds)}"
        return f"{self.what}: {_join_placements(self.source)} -> {_join_placements(self.target)}, {cost}"


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A planned operator call.

    Attributes:
        name, key: the operator and its arguments. A run that differs does not follow the plan from there on.
        kind: ``"call"``, ``"fixed"`` (the call chooses for itself) or ``"parts"`` (a decomposition; its parts follow).
        rows: the strategy of the operator's rule, for each mesh dim.
        operands: for each operand the placements that it is redistributed to, in order; () if it stays as it is.
        drops: operands with the redistributed copies that are freed after the call.
        line: the user's source line; ``backward``: True if the line is that of the forward call.
        moves: redistributions that no earlier call has made.
        runner_up, extra: the next best strategy, and how many seconds longer the program takes with it.
    """

    name: str
    key: str
    kind: str
    rows: tuple[str, ...] = ()
    operands: tuple[tuple[Spelled, ...], ...] = ()
    drops: tuple[tuple[int, Spelled], ...] = ()
    line: str = ""
    backward: bool = False
    moves: tuple[PlannedMove, ...] = ()
    runner_up: str = ""
    extra: float = 0.0

    def __str__(self) -> str:
        strategy = f", strategy {strategy_text(' & '.join(self.rows))}" if self.rows else ""
        moves = "".join(f"\n  redistributes {move}" for move in self.moves)
        return f"{self.name}{' (backward)' if self.backward else ''}{strategy}{moves}"

    def next_best(self, extras: Sequence[float]) -> str:
        """Return a line of text about the second best strategy and the seconds it adds; "" if there is none."""
        if not self.runner_up:
            return ""
        least, most = (f"{extra:+.0f}"[0] + seconds_text(abs(extra)) for extra in (min(extras), max(extras)))
        return f"  next best strategy: {strategy_text(self.runner_up)}, {least if least == most else f'{least} to {most}'}"


@dataclass(frozen=True, slots=True)
class PlannedLine:
    """The redistributions that a plan makes for one line of the program. ``str`` shows equal calls once, with their number."""

    place: SourceLine
    calls: tuple[PlannedCall, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that one rank receives in the redistributions of this line."""
        return sum(move.nbytes for call in self.calls for move in call.moves)

    @property
    def head(self) -> str:
        """Return text with the source line, the number of its redistributions and their bytes."""
        count = sum(len(call.moves) for call in self.calls)
        return f"{self.place.line}: {count} redistribution{'' if count == 1 else 's'}, {bytes_text(self.nbytes)}"

    @property
    def details(self) -> list[str]:
        """Return lines of text about the calls of this source line; equal calls appear once, with their number."""
        lines = []
        for text, own in group_by_key(((str(call), call.runner_up), call) for call in self.calls).items():
            head, *moves = text[0].splitlines()
            times = f"  ({len(own)} times)" if len(own) > 1 else ""
            lines += [head + times, *moves, own[0].next_best([call.extra for call in own])]
        return [line for line in lines if line]

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"  {text}" for text in self.details)])


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """The plan of a program on a mesh.

    Attributes:
        mesh: the shape of the mesh.
        calls: every operator call, in order.
        seconds, nbytes: estimated time of a step, and bytes that one rank receives in it.
        peak_bytes: peak memory of one rank in bytes: inputs, results and cached copies; ``peak_at``: the call of the peak.
        eager_seconds, eager_nbytes: the same without a plan. Redistributed copies are shared as the plan shares them.

    The object is a record, and reading it does not communicate. ``loads`` raises ``ArgumentError`` for text that is not a plan.

    >>> import torch, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("meta", (2,)), placements=[dt.Shard(0)])
    >>> found = dt.plan(lambda: x @ x.t())
    >>> ProgramPlan.loads(found.dumps()) == found, found.nbytes <= found.eager_nbytes
    (True, True)
    """

    mesh: tuple[int, ...]
    calls: tuple[PlannedCall, ...]
    seconds: float
    nbytes: int
    peak_bytes: int
    peak_at: str
    eager_seconds: float
    eager_nbytes: int

    def __str__(self) -> str:
        head = (
            f"{len(self.calls)} calls on a mesh of {'x'.join(map(str, self.mesh))}: {seconds_text(self.seconds)}, "
            f"{bytes_text(self.nbytes)} received per rank (without a plan {seconds_text(self.eager_seconds)}, "
            f"{bytes_text(self.eager_nbytes)}); peak memory {bytes_text(self.peak_bytes)} per rank, in {self.peak_at}"
        )
        return "\n".join([head, *map(str, self.lines)])

    @property
    def lines(self) -> tuple[PlannedLine, ...]:
        """Return the source lines of the program that redistribute something, in order of first use."""
        calls_of = group_by_key((call.line, call) for call in self.calls if call.moves)
        return tuple(PlannedLine(_parse_place(line), tuple(calls)) for line, calls in calls_of.items())

    __repr__ = __str__

    _repr_html_ = html_repr

    def dumps(self) -> str:
        """Return the plan as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(self.dumps())

    @classmethod
    def loads(cls, text: str) -> ProgramPlan:
        """Return the plan that ``text`` contains.

        Raises:
            ArgumentError: ``text`` is not a plan of this format.
        """
        read = json.loads(text)
        if not isinstance(read, dict) or read.pop("format", None) != FORMAT:
            raise ArgumentError(f"this is not a plan of format {FORMAT}; make one with dt.plan(...).save(path)")
        calls = []
        for call in read.pop("calls"):
            moves = tuple(PlannedMove(**_to_tuples(move)) for move in call.pop("moves"))
            calls.append(PlannedCall(**_to_tuples(call), moves=moves))
        return cls(mesh=tuple(read.pop("mesh")), calls=tuple(calls), **read)

    @classmethod
    def load(cls, path: str | Path) -> ProgramPlan:
        """Return the plan in a file."""
        return cls.loads(Path(path).read_text())


def _to_tuples(read: Any) -> Any:
    """Return parsed JSON with all lists, at any depth, as tuples."""
    if isinstance(read, dict):
        return {name: _to_tuples(value) for name, value in read.items()}
    return tuple(map(_to_tuples, read)) if isinstance(read, list) else read


# --- placements as text -------------------------------------------------------------------------------------------------
def placement_texts(placements: Iterable[Placement]) -> Spelled:
    """Return each placement as text, such as ``"S(0)"``.

    >>> placement_texts((Shard(0, level=1), Partial(), Replicate()))
    ('S(0@1)', 'P(sum)', 'R')
    """
    return tuple(map(str, placements))


def placements_of(words: Sequence[str]) -> tuple[Placement, ...]:
    """Return the placements that the texts of :func:`placement_texts` describe; raise for any other text.

    >>> placements_of(("S(1:3+2)", "R"))
    (Shard(dim=1, sizes=(3, 2)), Replicate())
    """
    try:
        return tuple(map(parse_placement, words))
    except PlacementError as error:
        raise ArgumentError(f"the plan has {list(words)} where a placement is expected: {error}") from None


_REDUCTION_NAME = re.compile(r"(?<![\w(])(?!R\b|S\(|by\b|owners\b)([A-Za-z]\w*)")


def strategy_text(texts: str) -> str:
    """Return the text of strategies with partial placements as users write them: ``P(sum)`` for ``sum``.

    >>> strategy_text("R,S(0) -> sum & S(1),R -> S(1)")
    'R, S(0) -> P(sum) & S(1), R -> S(1)'
    """
    return _REDUCTION_NAME.sub(r"P(\1)", texts).replace(",", ", ")


def _parse_place(line: str) -> SourceLine:
    file, _, number = line.rpartition(":")
    return SourceLine(file, int(number)) if file else NO_SOURCE_LINE


def _join_placements(words: Spelled) -> str:
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
