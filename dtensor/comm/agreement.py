"""What all ranks must say alike, compared before anything follows from it: the arguments of functions that take plain tensors."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..base.caches import remembered
from ..base.recording import aside
from ..base.tracing import has_no_values
from ..errors import LayoutError, MixedTensorError
from ..mesh.device_mesh import DeviceMesh
from . import communicator_of
from .rows import content

T = TypeVar("T")

_WORDS = 68  # of a row: of what is said a hash, the bytes expected, how many numbers there are, and these
_HEAD = _WORDS * 8  # its bytes: what follows in memory may be of any dtype


class Telling(NamedTuple):
    """What a rank tells in :func:`alike`.

    Attributes:
        said: what all must say alike, as something to be printed.
        source: the position in the mesh whose numbers and pieces all are to have;
        numbers: these, up to 64 whole ones.
        nbytes: of the piece that comes to this rank, 0 for none.
        pieces: on the first rank of the mesh, where that is the source: the pieces for all, as rows of bytes.
    """

    said: Hashable
    source: int
    numbers: tuple[int, ...]
    nbytes: int = 0
    pieces: Sequence[torch.Tensor] = ()


class Told(NamedTuple):
    """The source's numbers, and the piece that it had for this rank, as a row of bytes."""

    numbers: tuple[int, ...]
    piece: torch.Tensor


@aside
def alike(mesh: DeviceMesh, what: str, make: Callable[[], T], tell: Callable[[T], Telling]) -> tuple[T, Told | None]:
    """``make()``, which is alike on all ranks of the mesh, and what the source of ``tell(made)`` has for this one; None where
    there is no other rank.

    On process groups one round trip to the first rank, of one form whatever ranks make and tell (where they differ an exchange
    of the words follows), nothing in one process.

    Raises:
        LayoutError: on all ranks with the same words, if what they make differs. The error of ``make``, if all meet the same.
    """
    comm = communicator_of(mesh)
    if not comm.talks or mesh.size() == 1:
        return make(), None
    problem: Exception | None = None
    try:
        made = make()
        mine = tell(made)
    except Exception as error:
        problem, mine = error, Telling(f"{type(error).__name__}: {error}", 0, ())
    row = _row(_digest(mine.said), mine.numbers, mine.nbytes)

    def answer(rows: torch.Tensor) -> Sequence[torch.Tensor]:
        heads, expected = rows.view(torch.uint8), rows[:, :2].tolist()
        if any(digest != row[0] for digest, _ in expected):
            return [heads.new_zeros(_HEAD + nbytes) for _, nbytes in expected]
        head = heads[mine.source]
        return [torch.cat([head, piece]) for piece in mine.pieces] or [head] * len(rows)

    answered = comm.answered(row, _HEAD + mine.nbytes, answer)
    digest, _, count, *numbers = answered[:_HEAD].view(torch.int64).tolist()
    if digest != row[0]:
        words_compared(mesh, what, str(mine.said), problem)
        raise LayoutError(f"{what}: ranks differ in what reads alike, {mine.said}")
    if problem is not None:
        raise problem
    return made, Told(tuple(numbers[:count]), answered[_HEAD:])


def told_by_all(mesh: DeviceMesh, said: str, numbers: Sequence[int] = ()) -> tuple[bool, list[tuple[int, ...]]]:
    """Whether all ranks say the same, and up to 64 numbers of each, by position in the mesh, in one exchange."""
    rows = communicator_of(mesh).all_gather_numbers(_row(_digest(said), numbers), tuple(range(mesh.ndim)))
    return len({row[0] for row in rows}) == 1, [tuple(row[3 : 3 + row[2]]) for row in rows]


def _row(digest: int, numbers: Sequence[int], nbytes: int = 0) -> array[int]:
    return array("q", (digest, nbytes, len(numbers), *numbers, *(0,) * (_WORDS - 3 - len(numbers))))


@remembered(1024)
def _digest(said: Hashable) -> int:
    """Of the words; not 0."""
    return int.from_bytes(hashlib.blake2b(str(said).encode(), digest_size=8).digest(), "big", signed=True) or 1


def words_compared(mesh: DeviceMesh, what: str, said: str, problem: Exception | None = None) -> None:
    """:func:`compared`, after an exchange of the words themselves."""
    compared(mesh, what, communicator_of(mesh).all_gather_object(said, tuple(range(mesh.ndim))), problem)


def compared(mesh: DeviceMesh, what: str, said: Sequence[str], problem: Exception | None = None) -> None:
    """Raises on every rank unless all said the same; ``said`` by position in the mesh."""
    other = next((position for position, words in enumerate(said) if words != said[0]), None)
    if other is None:
        return
    ranks = mesh.ranks_here()
    raise LayoutError(
        f"{what}: rank {ranks[other]} holds {said[other]}, rank {ranks[0]} holds {said[0]}; "
        f"all ranks of {mesh!r} give the same arguments"
    ) from problem


@aside
def same_on_all(mesh: DeviceMesh, value: torch.Tensor, what: str) -> None:
    """Check that all ranks of ``mesh`` hold the same plain ``value``: one exchange of a few bytes, none in one process.

    Raises:
        MixedTensorError: on all ranks, if they do not.
    """
    if not communicator_of(mesh).talks or has_no_values(value):
        return
    digest = hashlib.blake2b(content(value), digest_size=16).hexdigest()
    same, _ = told_by_all(mesh, f"{tuple(value.shape)} {value.dtype} {digest}")
    if not same:
        raise MixedTensorError(
            f"{what} mixes DTensors with a plain tensor of shape {tuple(value.shape)} that differs between ranks; "
            "distribute what it was made from with distribute_tensor(t, mesh, placements)"
        )
