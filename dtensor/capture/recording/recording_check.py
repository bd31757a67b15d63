"""Recording check: compares two recordings of one program, and lets ranks agree on the recording that they replay.

A float that differs between two recordings has reached the tape by a way that the float tracer does not follow. A recording that
one rank cannot replay is replayed on no rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import and_
from typing import Any, TypeAlias

import torch

from ...base.tensor_tree import iter_tree_leaves
from ...comm.events import Event, listening
from ...comm.map_ranks import communicator_of
from ...errors import CaptureError
from ...mesh.device_mesh import DeviceMesh
from ..replay.outputs import ConstantOutput
from ..replay.replay_program import ReplayProgram

HAS_ROOM = 1  # the bit that says that a rank can keep another recording; each further bit stands for one recording
Group: TypeAlias = tuple[DeviceMesh, tuple[int, ...]]  # the ranks along these mesh dims


def is_confirmed_by(first: ReplayProgram, second: ReplayProgram, with_integers: bool = False) -> bool:
    """Return True if a second recording has the same steps as the first; raise if only frozen Python values differ.

    Args:
        first: a recording.
        second: a later recording of an equal call.
        with_integers: whether integers must be equal, too.

    Raises:
        CaptureError: the steps differ only in Python values. Such a value would be frozen in the tape.
    """
    compared = (int, float, complex, str) if with_integers else (float, complex, str)
    first_steps, second_steps = ([step for step in program.steps if not step.stores_grad] for program in (first, second))
    if len(first_steps) != len(second_steps) or len(first.outputs) != len(second.outputs):
        return False
    if len(first.constants) != len(second.constants):
        return False
    pairs = []
    for a, b in zip(first_steps, second_steps, strict=True):
        a_leaves, b_leaves = [*iter_tree_leaves((a.args, a.kwargs))], [*iter_tree_leaves((b.args, b.kwargs))]
        if getattr(a.fn, "__name__", a.fn) != getattr(b.fn, "__name__", b.fn) or len(a_leaves) != len(b_leaves):
            return False
        place = a.operator or getattr(a.fn, "__name__", "a step")
        pairs += [(x, y, place) for x, y in zip(a_leaves, b_leaves, strict=True)]
    if any(type(x) is not type(y) for x, y, _ in pairs):
        return False
    pairs += [(x, y, "a result") for x, y in zip(_constant_values(first), _constant_values(second), strict=False)]
    for x, y, place in pairs:
        if isinstance(x, compared) and repr(x) != repr(y):
            raise _frozen_value_error(place, x, y)
    for x, y in zip(first.constants.values(), second.constants.values(), strict=True):
        if x.shape == y.shape and x.dtype == y.dtype and not torch.equal(x, y):
            raise _frozen_value_error("a tensor made of Python numbers", x, y)
    return True


def _constant_values(program: ReplayProgram) -> list[Any]:
    return [output.value for output in program.outputs if isinstance(output, ConstantOutput)]


def _frozen_value_error(place: str, x: Any, y: Any) -> CaptureError:
    """Return the CaptureError for a Python value of a recording that depends on a tensor and differs between calls."""
    return CaptureError(
        f"capture: {place} takes a Python value that was {x!r} in one call and is {y!r} in the next: it was computed from a "
        "float that was read from a tensor, in a way that is not followed; compute it with 0-d tensors, or by operators and math"
    )


def check_recording(recorded: ReplayProgram, program: ReplayProgram | None, groups: Iterable[Group]) -> None:
    """Raise on all ranks if a new recording of an equal call differs from the kept one, for ``capture(check=)``.

    Raises:
        CaptureError: on all ranks, if the recordings differ on one of them.
    """
    difference = "the function runs other operations than its recording"
    try:
        is_equal = program is None or is_confirmed_by(recorded, program, with_integers=True)
    except CaptureError as error:
        is_equal, difference = False, str(error).removeprefix("capture: ").partition(": it was computed")[0]
    if not agree_on_bits(groups, int(is_equal)):
        raise CaptureError(
            f"capture(check=): {'the recordings differ on another rank' if is_equal else difference}, so the replays since "
            "the recording may have given wrong results. The function reads something that capture does not guard, such as "
            "compiled code in trusted=. Pass it as an argument, or call the function without capture"
        )


@contextmanager
def collect_groups() -> Iterator[dict[Group, None]]:
    """Yield a dict that collects the groups of the collectives that are issued inside of the context, in order."""
    groups: dict[Group, None] = {}

    def add_group(event: Event) -> None:
        if event.mesh is not None and event.group_size > 1:
            groups[event.mesh, event.mesh_dims] = None

    with listening(add_group):
        yield groups


def agree_on_bits(groups: Iterable[Group], bits: int) -> int:
    """Return the bits of ``bits`` that are set on all ranks that record and replay together; one exchange per group.

    Each group exchanges one number. Groups may have ranks in common, so with several groups there is a second round, in which
    each group learns the bits of the others.
    """
    process_groups = [(comm, dims) for mesh, dims in groups if (comm := communicator_of(mesh)).has_other_processes]
    for comm, dims in (*process_groups, *process_groups[-2::-1]):
        bits = functools.reduce(and_, [number for row in comm.all_gather_numbers([bits], dims) for number in row])
    return bits


class RankAgreement:
    """Groups and guards of a function's recordings on the same meshes, to decide if ranks must agree before a replay.

    Attributes:
        groups: of the collectives that the recordings issue.
    """

    def __init__(self) -> None:
        self.groups: dict[Group, None] = {}
        self._same_on_ranks = True  # whether the guards check only facts that are equal on all ranks
        self._count = 0  # recordings that all ranks made together

    def add_recording(self, groups: Iterable[Group], same_on_ranks: bool) -> None:
        """Add the groups and guards of one more recording."""
        self.groups.update(dict.fromkeys(groups))
        self._same_on_ranks = self._same_on_ranks and same_on_ranks

    def may_disagree(self, may_differ: bool) -> bool:
        """Return True if ranks could choose different recordings; ``may_differ``: arguments may differ between ranks."""
        return (may_differ or not self._same_on_ranks) and bool(self.groups)

    def next_bit(self) -> int:
        """Return the bit that identifies one more recording on all ranks; 0 if there are more than 62."""
        self._count += 1
        return HAS_ROOM << self._count if self._count < 63 else 0
