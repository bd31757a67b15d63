"""``ProgramPlan``: what each call of a program does, what that costs, and why: a value that prints itself and goes to JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.extensions import pictured
from ..errors import ArgumentError
from ..placement import Partial, Placement, Replicate, Shard

FORMAT = 2
Spelled = tuple[str, ...]  # placements as text, one for each mesh dim


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """A value that changes its placements: between which, the bytes that a rank receives, seconds."""

    what: str
    source: Spelled
    target: Spelled
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.what}: {_joined(self.source)} -> {_joined(self.target)}, {self.nbytes:,} B, {self.seconds * 1e6:,.0f} us"


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call.

    Attributes:
        name, key: which operator, with what: a run that differs does not follow the plan from there on.
        kind: ``"call"``, ``"fixed"`` (it chooses for itself) or ``"parts"`` (a decomposition; its parts follow).
        rows: per mesh dim the row of the operator's rule.
        operands: for each operand the placements that it passes on its way to the call; () as it lies.
        drops: operands and the forms of them that are let go after the call.
        line: the user's source line; ``backward``: it is that of the forward call.
        moves: what is moved for it, and for nobody before it.
        runner_up, extra: the next best rows, and by how many seconds they lose.
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
        rows = f" [{' & '.join(self.rows)}]" if self.rows else ""
        why = f"\n    next best: {self.runner_up}, {self.extra * 1e6:+,.0f} us" if self.runner_up else ""
        moves = "".join(f"\n    {move}" for move in self.moves)
        return f"  {self.name}{' (backward)' if self.backward else ''}{rows}{moves}{why}"


@dataclass(frozen=True, slots=True)
class ProgramPlan:
    """How a program runs on a mesh.

    Attributes:
        mesh: the shape of the mesh.
        calls: every operator call, in order.
        seconds, nbytes: predicted: time of a step, and bytes that one rank receives.
        peak_bytes: most that a rank holds at once of what the step takes, makes and keeps; ``peak_at``: the call at which.
        eager_seconds, eager_nbytes: the same for the program without a plan, its moves shared as a plan shares them.

    A record: making it costs what ``plan`` says, asking it nothing. ``loads`` raises ``ArgumentError`` for what is no plan.

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
            f"{len(self.calls)} calls on a mesh of {'x'.join(map(str, self.mesh))}: {self.seconds * 1e3:.3f} ms, "
            f"{self.nbytes:,} B received per rank (without a plan {self.eager_seconds * 1e3:.3f} ms, {self.eager_nbytes:,} B); "
            f"at most {self.peak_bytes:,} B held per rank, in {self.peak_at}"
        )
        lines = [head]
        where = None
        for call in self.calls:
            if call.moves:
                if call.line != where:
                    where = call.line
                    lines.append(where or "(no line of the user's)")
                lines.append(str(call))
        return "\n".join(lines)

    __repr__ = __str__

    _repr_html_ = pictured

    def dumps(self) -> str:
        """The plan as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    def save(self, path: str | Path) -> None:
        """Write it to a file."""
        Path(path).write_text(self.dumps())

    @classmethod
    def loads(cls, text: str) -> ProgramPlan:
        """The plan in ``text``.

        Raises:
            ArgumentError: it is no plan of this format.
        """
        read = json.loads(text)
        if not isinstance(read, dict) or read.pop("format", None) != FORMAT:
            raise ArgumentError(f"no plan of format {FORMAT}")
        calls = tuple(_call_of(call) for call in read.pop("calls"))
        return cls(mesh=tuple(read.pop("mesh")), calls=calls, **read)

    @classmethod
    def load(cls, path: str | Path) -> ProgramPlan:
        """The plan in a file."""
        return cls.loads(Path(path).read_text())


def _call_of(read: dict[str, Any]) -> PlannedCall:
    moves = tuple(PlannedMove(**_frozen(move)) for move in read.pop("moves"))
    return PlannedCall(**_frozen(read), moves=moves)


def _frozen(read: Any) -> Any:
    """What JSON gives, its lists as tuples."""
    if isinstance(read, dict):
        return {name: _frozen(value) for name, value in read.items()}
    return tuple(map(_frozen, read)) if isinstance(read, list) else read


# --- placements as text -------------------------------------------------------------------------------------------------
def spelled(placements: Iterable[Placement]) -> Spelled:
    """Placements as text.

    >>> spelled((Shard(0, level=1), Partial(), Replicate()))
    ('S(0@1)', 'P(sum)', 'R')
    """
    return tuple(map(str, placements))


_SHARD = re.compile(r"S\((\d+)(?::([\d+]+))?(?:@(\d+))?\)")


def placements_of(words: Sequence[str]) -> tuple[Placement, ...]:
    """What :func:`spelled` gave, read back.

    >>> placements_of(("S(1:3+2)", "R"))
    (Shard(dim=1, sizes=(3, 2)), Replicate())
    """
    return tuple(map(_read, words))


def _read(word: str) -> Placement:
    if word == "R":
        return Replicate()
    if word.startswith("P("):
        return Partial(word[2:-1])
    found = _SHARD.fullmatch(word)
    if found is None:
        raise ArgumentError(f"{word!r} in a plan is no placement")
    dim, sizes, level = found.groups()
    blocks = None if sizes is None else tuple(map(int, sizes.split("+")))
    return Shard(int(dim), blocks, None if level is None else int(level))


def _joined(words: Spelled) -> str:
    return words[0] if len(words) == 1 else f"({', '.join(words)})"
