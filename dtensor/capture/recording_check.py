"""Two recordings of one program compared: a float that differs has come into the tape by a way that nothing follows. And what
ranks have found, told to each other: a recording that one of them cannot replay is replayed by none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import and_
from typing import Any, TypeAlias

import torch

from ..base.tensor_tree import leaves
from ..comm import communicator_of
from ..comm.events import Event, listening
from ..errors import CaptureError
from ..mesh.device_mesh import DeviceMesh
from .outputs import Constant
from .program import Program

NEW = 1  # the bit that says that there is room for another recording; each has one of the others
Group: TypeAlias = tuple[DeviceMesh, tuple[int, ...]]  # of ranks: along these dims


def confirmed(one: Program, other: Program) -> bool:
    """Whether both have the same steps. Floats that go other ways than through arithmetic would be frozen, and are found here.

    Raises:
        CaptureError: the steps are the same but for Python values.
    """
    first, second = ([step for step in program.steps if not step.stores] for program in (one, other))
    if len(first) != len(second) or len(one.results) != len(other.results) or len(one.constants) != len(other.constants):
        return False
    pairs = []
    for a, b in zip(first, second, strict=True):
        mine, its = [*leaves((a.args, a.kwargs))], [*leaves((b.args, b.kwargs))]
        if getattr(a.fn, "__name__", a.fn) != getattr(b.fn, "__name__", b.fn) or len(mine) != len(its):
            return False
        pairs += [(x, y, a.within or getattr(a.fn, "__name__", "a step")) for x, y in zip(mine, its, strict=True)]
    if any(type(x) is not type(y) for x, y, _ in pairs):
        return False
    pairs += [(x, y, "a result") for x, y in zip(_constants(one), _constants(other), strict=False)]
    for x, y, where in pairs:
        if isinstance(x, (float, complex, str)) and repr(x) != repr(y):
            raise _frozen(where, x, y)
    for x, y in zip(one.constants.values(), other.constants.values(), strict=True):
        if x.shape == y.shape and x.dtype == y.dtype and not torch.equal(x, y):
            raise _frozen("a tensor made of Python numbers", x, y)
    return True


@contextmanager
def groups_heard() -> Iterator[dict[Group, None]]:
    """The groups whose collectives are issued inside, in order."""
    found: dict[Group, None] = {}

    def hear(event: Event) -> None:
        if event.mesh is not None and event.group_size > 1:
            found[event.mesh, event.mesh_dims] = None

    with listening(hear):
        yield found


def agreed(groups: Iterable[Group], found: int) -> int:
    """The bits that all ranks have found that record and replay together: an exchange of one number in each group whose
    collectives they recorded, and where there are several a second one, since ranks may be in one through others."""
    talking = [(comm, dims) for mesh, dims in groups if (comm := communicator_of(mesh)).talks]
    for comm, dims in (*talking, *talking[-2::-1]):
        found = functools.reduce(and_, [number for row in comm.all_gather_numbers([found], dims) for number in row])
    return found


class Shared:
    """What ranks know of each other's recordings of one function for arguments on the same meshes.

    Attributes:
        groups: those whose collectives the recordings issue.
    """

    def __init__(self) -> None:
        self.groups: dict[Group, None] = {}
        self._alike = True  # whether what the function reads is guarded by facts that all ranks share
        self._count = 0  # recordings that the ranks made knowing of each other

    def add(self, groups: Iterable[Group], alike: bool) -> None:
        """Add what one more recording met."""
        self.groups.update(dict.fromkeys(groups))
        self._alike = self._alike and alike

    def may_disagree(self, plain: bool) -> bool:
        """Whether ranks could choose different recordings; ``plain``: there are plain tensors among the arguments."""
        return (plain or not self._alike) and bool(self.groups)

    def next_bit(self) -> int:
        """Return the bit of one more recording; 0 of those that are one too many."""
        self._count += 1
        return NEW << self._count if self._count < 63 else 0


def _constants(program: Program) -> list[Any]:
    return [result.value for result in program.results if isinstance(result, Constant)]


def _frozen(where: str, x: Any, y: Any) -> CaptureError:
    return CaptureError(
        f"capture: {where} takes a Python value that was {x!r} in one call and is {y!r} in the next: it was computed from a "
        "float that was read from a tensor, in a way that is not followed; compute it with 0-d tensors, or by operators and math"
    )
