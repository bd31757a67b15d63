"""What all ranks must say alike, compared before anything follows from it: the arguments of functions that take plain tensors."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch

from ..base.caches import remembered
from ..base.recorder_hooks import aside
from ..base.tracing import has_no_values
from ..errors import LayoutError, MixedTensorError
from ..mesh.device_mesh import DeviceMesh
from . import communicator_of
from .flat_rows import content

T = TypeVar("T")

_MOST = 64  # whole numbers that a rank can tell besides
_HEAD = (2 + _MOST) * 8  # bytes before the load
_LOADS = 1 << 16  # bytes of the loads of all ranks, which every rank gets: as quick as none, measured on 4 ranks of gloo


class Told(NamedTuple):
    """What the ranks of a mesh told each other, by position in it.

    Attributes:
        same: whether all said the same.
        numbers: of each rank.
        loads: of each rank a row of bytes, which begins with its load.
    """

    same: bool
    numbers: list[tuple[int, ...]]
    loads: torch.Tensor


def room(mesh: DeviceMesh) -> int:
    """Bytes of a load that fit in the one exchange of :func:`alike`."""
    return _LOADS // mesh.size() // 16 * 16


@aside
def alike(
    mesh: DeviceMesh, what: str, make: Callable[[], T], tell: Callable[[T], tuple[Hashable, tuple[int, ...], bytes]]
) -> tuple[T, Told | None]:
    """``make()``, and what each rank of the mesh tells besides; None where there is no other.

    ``tell(made)`` gives what must be alike, as something to be printed, and what need not: whole numbers, and a load of up to
    :func:`room` bytes. One exchange on process groups, of one form whatever ranks make and tell (a second one, of the words,
    where they differ), nothing in one process.

    Raises:
        LayoutError: on all ranks with the same words, if what they make differs. The error of ``make``, if all meet the same.
    """
    if not communicator_of(mesh).talks or mesh.size() == 1:
        return make(), None
    problem: Exception | None = None
    said: Hashable
    numbers, load = tuple[int, ...](), b""
    try:
        made = make()
        said, numbers, load = tell(made)
    except Exception as error:
        problem, said = error, f"{type(error).__name__}: {error}"
    told = told_by_all(mesh, said, numbers, load, room(mesh))
    if not told.same:
        words_compared(mesh, what, str(said), problem)
    if problem is not None:
        raise problem
    return made, told


def told_by_all(mesh: DeviceMesh, said: Hashable, numbers: Sequence[int] = (), load: bytes = b"", room: int = 0) -> Told:
    """What each rank tells: whether all say the same, up to 64 ``numbers``, and up to ``room`` bytes, in one exchange."""
    row = bytearray(_HEAD + room)
    head = array("q", (_digest(said), len(numbers), *numbers)).tobytes()
    row[: len(head)] = head
    row[_HEAD : _HEAD + len(load)] = load
    rows = communicator_of(mesh).all_gather_rows(row, tuple(range(mesh.ndim)))
    heads = rows[:, : 2 + _MOST].tolist()
    numbers_of = [tuple(head[2 : 2 + head[1]]) for head in heads]
    return Told(len({head[0] for head in heads}) == 1, numbers_of, rows[:, 2 + _MOST :].view(torch.uint8))


@remembered(1024)
def _digest(said: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(str(said).encode(), digest_size=8).digest(), "big", signed=True)


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
        f"{what}: arguments differ between ranks: {said[other]} on rank {ranks[other]}, {said[0]} on rank "
        f"{ranks[0]}; pass the same arguments on all ranks of {mesh!r}"
    ) from problem


@aside
def same_on_all(
    mesh: DeviceMesh,
    value: torch.Tensor,
    what: str,
    instead: str = "distribute its source with distribute_tensor(t, mesh, placements)",
) -> None:
    """Check that all ranks of ``mesh`` hold the same plain ``value``: one exchange of a few bytes, none in one process.

    Args:
        instead: the advice of the error.

    Raises:
        MixedTensorError: on all ranks, if they do not.
    """
    if not communicator_of(mesh).talks or has_no_values(value):
        return
    digest = hashlib.blake2b(content(value), digest_size=16).hexdigest()
    if not told_by_all(mesh, f"{tuple(value.shape)} {value.dtype} {digest}").same:
        raise MixedTensorError(
            f"{what} mixes DTensors with a plain tensor of shape {tuple(value.shape)} that differs between ranks; {instead}"
        )
