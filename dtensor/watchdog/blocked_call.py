"""What the main thread waits for in torch's own collectives, messages and works."""

from __future__ import annotations

import dis
import json
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise, takewhile
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..base import torch_internals
from ..base.caches import remembered
from . import source_location

_COLLECTIVES = frozenset(
    name
    for name in dir(dist)
    if name.startswith(("all_", "barrier", "broadcast", "reduce", "gather", "scatter", "monitored_barrier"))
    and "coalesced" not in name
)
_MESSAGES = {"recv": "send", "send": "recv"}  # and what another rank is in that ends it
_NAMES = _COLLECTIVES | _MESSAGES.keys()
WORK, WORK_OF_MESSAGE = "Work.wait", "Work.wait of a message"  # of what was begun before: it does not say whom it needs
_SENT_OR_RECEIVED = (12, 13, 14)  # as c10d numbers what a work is of
_BYTE_NS = 100  # what was sent before may still be on its way
_WORK_NS = 3_000_000_000  # so may what a work waits for, of which nobody knows how much it is
_MANY = 64  # groups of which it is told
_TAG = 0x7D7D  # of a message that nobody sends
_ASKED = WeakKeyDictionary[Any, int]()  # messages that were begun here in groups of the program
_BEGIN = attrgetter("positions.lineno", "positions.col_offset")  # a call begins where the variable does whose method it calls
_VARIABLES = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")


class Call(NamedTuple):
    """A function of torch.distributed in which a rank is.

    Attributes:
        name: of the function.
        ranks: those that it needs; of a work all: it is not known.
        nbytes, group: of a message, the group as :func:`begun` has it.
    """

    name: str
    ranks: Sequence[int] = ()
    nbytes: int = 0
    group: str = ""

    @classmethod
    def read(cls, text: str) -> Call:
        return cls(*json.loads(text)) if text else cls("")

    @property
    def is_message(self) -> bool:
        return self.name in _MESSAGES

    @property
    def patience_ns(self) -> int:
        """How much longer than others it may take."""
        return _WORK_NS if self.name in (WORK, WORK_OF_MESSAGE) else self.nbytes * _BYTE_NS

    def ends(self, rank: int, message: Call) -> bool:
        """Whether it may be what another rank, ``rank``, waits for in a message."""
        return self.name == WORK_OF_MESSAGE or (self.name == _MESSAGES[message.name] and (not self.ranks or rank in self.ranks))


def in_torch(places: list[tuple[CodeType, int]]) -> tuple[str, int] | None:
    """The call of torch.distributed that the main thread is in, as :meth:`Call.read` reads it, and which call it is."""
    waits = bool(places) and "wait" in places[0][0].co_names
    if not waits and not any(_is_torchs(code) for code, _ in places):
        return None
    frames: list[Any] = source_location.undisturbed(partial(list, source_location.main_frames()))
    frame = next((frame for frame in frames if _is_torchs(frame.f_code)), None)
    if frame is None:
        work = _work_in(frames[0]) if waits and frames else None
        if work is None:
            return None
        name = WORK_OF_MESSAGE if work._get_op_type() in _SENT_OR_RECEIVED else WORK
        return _told(Call(name, range(dist.get_world_size()))), hash((id(frames[0]), id(work)))
    name, given = frame.f_code.co_name, source_location.undisturbed(partial(getattr, frame, "f_locals"))
    try:
        return _told(_made(name, given.get("group") or dist.group.WORLD, given)), id(frame)
    except (ValueError, RuntimeError, KeyError, TypeError):  # not a group of this process
        return None


def _is_torchs(code: CodeType) -> bool:
    return code.co_name in _NAMES and code.co_filename.endswith("distributed_c10d.py")


def _told(call: Call) -> str:
    return json.dumps([call.name, list(call.ranks), call.nbytes, call.group])


def _made(name: str, group: Any, given: dict[str, Any]) -> Call:
    """A call of torch.distributed from its frame's locals."""
    if name not in _MESSAGES:
        return Call(name, dist.get_process_group_ranks(group))
    side = "src" if name == "recv" else "dst"
    rank, in_group = given[side], given[f"group_{side}"]
    anybody = rank is None and in_group is None
    needed = () if anybody else (dist.get_global_rank(group, in_group) if rank is None else rank,)
    return Call(name, needed, given["tensor"].nbytes, _key(group))


def _key(group: Any) -> str:
    return str(zlib.crc32(group.group_name.encode()))


def _work_in(frame: Any) -> Any:
    """The work of torch's for which a frame waits, if it is a variable's; else None."""
    name = _waited_for(frame.f_code, frame.f_lasti)
    if not name:
        return None
    known = source_location.undisturbed(partial(getattr, frame, "f_locals"))
    found = known.get(name, frame.f_globals.get(name))
    return found if isinstance(found, dist.Work) else None


@remembered(256)
def _waited_for(code: CodeType, at: int) -> str:
    """The variable whose method ``wait`` an instruction calls; empty where it does something else."""
    *before, call = takewhile(lambda one: one.offset <= at, dis.get_instructions(code))
    for variable, method in pairwise(before):
        if method.argval == "wait" and variable.opname in _VARIABLES and _BEGIN(variable) == _BEGIN(call):
            return str(variable.argval)
    return ""


# --- how much was asked of which group -----------------------------------------------------------------------------------------
def groups_of_program(ours: Iterable[Any]) -> list[Any]:
    """The process groups of this world but for those over which we talk."""
    known = set(ours)
    return [group for group in list(torch_internals.world.pg_names) if group not in known]


def begun(ours: Iterable[Any]) -> str:
    """How many collectives and messages the program has begun in each, as :func:`behind` reads it."""
    found = {}
    for group in groups_of_program(ours):
        with suppress(RuntimeError):  # of another kind than gloo, or gone meanwhile
            found[_key(group)] = group._get_sequence_number_for_group() - _ASKED.get(group, 0)
    return json.dumps(dict(sorted(found.items())[:_MANY]))


def begin_unsent(handle: Any, rank: int) -> Any:
    """The work of a message from a rank that sends none; gloo raises ``RuntimeError`` where the connection is closed."""
    return handle.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], rank, _TAG)


def is_cut_off(group: Any, rank: int) -> bool:
    """Whether a rank of a group of the program has closed its connection. Gloo begins no message over one that is; of one that is
    open nobody waits for the message.
    """
    if "gloo" not in str(dist.get_backend_config(group)):
        return False
    _ASKED[group] = _ASKED.get(group, 0) + 1
    gloo = group._get_backend(torch.device("cpu"))  # below torch's operators, where those who count messages would see it
    try:
        begin_unsent(gloo, rank)
    except RuntimeError as error:
        return "by peer" in str(error)
    return False


def behind(theirs: str, call: Call, mine: str) -> bool:
    """Whether a rank that is in ``call`` has begun less before than another one in a group of both."""
    known = json.loads(theirs or "{}")
    if call.group in known:
        known[call.group] -= 1
    return any(known.get(name, number) < number for name, number in json.loads(mine or "{}").items())
