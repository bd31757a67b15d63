"""What all ranks must say alike, compared before anything follows from it: the arguments of functions that take plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from .comm import communicator_of
from .errors import LayoutError
from .mesh import DeviceMesh

T = TypeVar("T")


def alike(mesh: DeviceMesh, what: str, make: Callable[[], T], tell: Callable[[T], tuple[Any, Any]]) -> tuple[T, list[Any]]:
    """``make()``, and what each rank of the mesh (by position) tells besides.

    ``tell(made)`` gives what must be alike, as something to be printed, and what need not. One exchange of small Python values on
    process groups, nothing in one process.

    Raises:
        LayoutError: on all ranks with the same words, if what they make differs. The error of ``make``, if all meet the same.
    """
    problem: Exception | None = None
    told: Any = None
    besides: Any = None
    try:
        made = make()
        told, besides = tell(made)
    except Exception as error:
        if not _talks(mesh):
            raise
        problem = error
    if not _talks(mesh):
        return made, [besides]
    said = repr(told) if problem is None else f"{type(problem).__name__}: {problem}"
    found = communicator_of(mesh).all_gather_object((said, besides), tuple(range(mesh.ndim)))
    compared(mesh, what, [words for words, _ in found], problem)
    if problem is not None:
        raise problem
    return made, [value for _, value in found]


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


def _talks(mesh: DeviceMesh) -> bool:
    """Whether there are others to ask."""
    return mesh.kind == "process_group" and mesh.current_member() is not None and mesh.size() > 1 and dist.get_backend() != "fake"
