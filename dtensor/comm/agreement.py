"""What all ranks must say alike, compared before anything follows from it: the arguments of functions that take plain tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ..base.recording import aside
from ..base.tracing import has_no_values
from ..errors import LayoutError, MixedTensorError
from ..mesh.device_mesh import DeviceMesh
from . import communicator_of
from .rows import flat_bytes

T = TypeVar("T")


_MOST = 64  # whole numbers that a rank can tell besides


def alike(
    mesh: DeviceMesh, what: str, make: Callable[[], T], tell: Callable[[T], tuple[Any, tuple[int, ...]]]
) -> tuple[T, list[tuple[int, ...]]]:
    """``make()``, and what each rank of the mesh (by position) tells besides.

    ``tell(made)`` gives what must be alike, as something to be printed, and whole numbers that need not. One exchange of a few
    bytes on process groups (a second one, of the words, where they differ), nothing in one process.

    Raises:
        LayoutError: on all ranks with the same words, if what they make differs. The error of ``make``, if all meet the same.
    """
    if not communicator_of(mesh).talks or mesh.size() == 1:
        made = make()
        return made, [tell(made)[1]]
    problem: Exception | None = None
    told: Any = None
    besides: tuple[int, ...] = ()
    try:
        made = make()
        told, besides = tell(made)
    except Exception as error:
        problem = error
    said = repr(told) if problem is None else f"{type(problem).__name__}: {problem}"
    found, same = told_by_all(mesh, said, besides)
    if not same:
        words_compared(mesh, what, said, problem)
    if problem is not None:
        raise problem
    return made, found


def told_by_all(mesh: DeviceMesh, said: str, numbers: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
    """Each rank's ``numbers`` (up to 64), by position in the mesh, and whether all say the same: one exchange of a few bytes."""
    digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "big", signed=True)
    row = [digest, len(numbers), *numbers, *(0,) * (_MOST - len(numbers))]
    rows = communicator_of(mesh).all_gather_numbers(row, tuple(range(mesh.ndim)))
    return [tuple(row[2 : 2 + row[1]]) for row in rows], len({row[0] for row in rows}) == 1


def words_compared(mesh: DeviceMesh, what: str, said: str, problem: Exception | None = None) -> None:
    """:func:`compared`, after an exchange of the words themselves."""
    compared(mesh, what, communicator_of(mesh).all_gather_object(said, tuple(range(mesh.ndim))), problem)


def compared(mesh: DeviceMesh, what: str, said: Sequence[str], problem: Exception | None = None) -> None:
    """Raises on every rank unless all said the same; ``said`` by position in the mesh."""
    other = next((position for position, words in enumerate(said) if words != said[0]), None)
    if other is None:
        return
    ranks = [mesh.ranks[member] for member in mesh.members_of(range(mesh.ndim), mesh.current_member() or 0)]
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
    content = flat_bytes(value.detach()).cpu().numpy().tobytes()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    _, same = told_by_all(mesh, f"{tuple(value.shape)} {value.dtype} {digest}", ())
    if not same:
        raise MixedTensorError(
            f"{what} mixes DTensors with a plain tensor of shape {tuple(value.shape)} that differs between ranks; "
            "distribute what it was made from with distribute_tensor(t, mesh, placements)"
        )
