"""Blocked call: which collective, message or work handle of torch.distributed the main thread waits in."""

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
from ..base.caches import memoize
from . import source_location

_COLLECTIVES = frozenset(
    name
    for name in dir(dist)
    if name.startswith(("all_", "barrier", "broadcast", "reduce", "gather", "scatter", "monitored_barrier"))
    and "coalesced" not in name
)
_MESSAGES = {"recv": "send", "send": "recv"}  # a message, and the call of another rank that completes it
_CALL_NAMES = _COLLECTIVES | _MESSAGES.keys()
WORK, P2P_WORK = "Work.wait", "Work.wait of a message"  # a work handle does not say which ranks it needs
_P2P_OP_TYPES = (12, 13, 14)  # c10d's OpType of SEND, RECV and RECVANYSOURCE
_NS_PER_BYTE = 100  # a message that was sent before may still be in flight for so long
_WORK_PATIENCE_NS = 3_000_000_000  # the same for a work handle with an unknown number of bytes
_MAX_GROUPS = 64  # number of groups whose counts are published
_TAG = 0x7D7D  # tag of a message that no rank sends
_PROBE_COUNTS = WeakKeyDictionary[Any, int]()  # by group of the program: messages that this module started in it
# A call starts at the position of the variable whose method it calls.
_CALL_POSITION = attrgetter("positions.lineno", "positions.col_offset")
_LOAD_OPCODES = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME")


class C10dCall(NamedTuple):
    """A call of torch.distributed in which a rank is.

    Attributes:
        name: the function's name, or ``WORK`` or ``P2P_WORK`` for a wait for a work handle.
        ranks: global ranks that it needs. All ranks for a work handle. Empty for a message from any rank.
        nbytes, group: of a message: its size, and the key of its group as in :func:`count_started`.
    """

    name: str
    ranks: Sequence[int] = ()
    nbytes: int = 0
    group: str = ""

    @classmethod
    def read(cls, text: str) -> C10dCall:
        """Return the call encoded in ``text``; one without a name if it is empty."""
        return cls(*json.loads(text)) if text else cls("")

    @property
    def is_message(self) -> bool:
        return self.name in _MESSAGES

    @property
    def patience_ns(self) -> int:
        """Time in ns that it may take in addition to the usual patience before it counts as stuck."""
        return _WORK_PATIENCE_NS if self.name in (WORK, P2P_WORK) else self.nbytes * _NS_PER_BYTE

    def may_complete(self, rank: int, message: C10dCall) -> bool:
        """Return True if this call may complete ``message``, in which another rank, ``rank``, waits."""
        return self.name == P2P_WORK or (self.name == _MESSAGES[message.name] and (not self.ranks or rank in self.ranks))


def find_c10d_call(locations: list[tuple[CodeType, int]]) -> tuple[str, int] | None:
    """Return the call of torch.distributed that blocks the main thread, encoded as text, and an id of that call; else None.

    Args:
        locations: those of :func:`.source_location.main_thread_locations`. They show without a frame whether there may be one.
    """
    may_wait_for_work = bool(locations) and "wait" in locations[0][0].co_names
    if not may_wait_for_work and not any(_is_c10d_code(code) for code, _ in locations):
        return None
    frames: list[Any] = source_location.run_uninterrupted(partial(list, source_location.iterate_main_frames()))
    frame = next((frame for frame in frames if _is_c10d_code(frame.f_code)), None)
    if frame is None:
        work = _find_awaited_work(frames[0]) if may_wait_for_work and frames else None
        if work is None:
            return None
        name = P2P_WORK if work._get_op_type() in _P2P_OP_TYPES else WORK
        return _encode_call(C10dCall(name, range(dist.get_world_size()))), hash((id(frames[0]), id(work)))
    name, arguments = frame.f_code.co_name, source_location.run_uninterrupted(partial(getattr, frame, "f_locals"))
    try:
        return _encode_call(_make_call(name, arguments.get("group") or dist.group.WORLD, arguments)), id(frame)
    except (ValueError, RuntimeError, KeyError, TypeError):  # this process is not in the group
        return None


def _is_c10d_code(code: CodeType) -> bool:
    return code.co_name in _CALL_NAMES and code.co_filename.endswith("distributed_c10d.py")


def _encode_call(call: C10dCall) -> str:
    return json.dumps([call.name, list(call.ranks), call.nbytes, call.group])


def _make_call(name: str, group: Any, arguments: dict[str, Any]) -> C10dCall:
    """Return the :class:`C10dCall` of the function ``name``, from ``arguments``, the local variables of its frame."""
    if name not in _MESSAGES:
        return C10dCall(name, dist.get_process_group_ranks(group))
    side = "src" if name == "recv" else "dst"
    rank, group_rank = arguments[side], arguments[f"group_{side}"]
    is_any_source = rank is None and group_rank is None
    needed = () if is_any_source else (dist.get_global_rank(group, group_rank) if rank is None else rank,)
    return C10dCall(name, needed, arguments["tensor"].nbytes, _group_key(group))


def _group_key(group: Any) -> str:
    return str(zlib.crc32(group.group_name.encode()))


def _find_awaited_work(frame: Any) -> Any:
    """Return the work handle for which a frame waits, if a variable refers to it; else None."""
    name = _find_awaited_variable(frame.f_code, frame.f_lasti)
    if not name:
        return None
    variables = source_location.run_uninterrupted(partial(getattr, frame, "f_locals"))
    value = variables.get(name, frame.f_globals.get(name))
    return value if isinstance(value, dist.Work) else None


@memoize(256)
def _find_awaited_variable(code: CodeType, offset: int) -> str:
    """Return the variable whose method ``wait`` the instruction at ``offset`` calls; empty if it does something else."""
    *before, call = takewhile(lambda instruction: instruction.offset <= offset, dis.get_instructions(code))
    for variable, method in pairwise(before):
        is_wait = method.argval == "wait" and variable.opname in _LOAD_OPCODES
        if is_wait and _CALL_POSITION(variable) == _CALL_POSITION(call):
            return str(variable.argval)
    return ""


# --- calls that were started in each group ------------------------------------------------------------------------------------
def list_user_groups(library_groups: Iterable[Any]) -> list[Any]:
    """Return the process groups of this world except for those of this library."""
    known = set(library_groups)
    return [group for group in list(torch_internals.world.pg_names) if group not in known]


def count_started(library_groups: Iterable[Any]) -> str:
    """Return how many collectives and messages the program has started in each of its groups, as JSON by group key."""
    counts = {}
    for group in list_user_groups(library_groups):
        with suppress(RuntimeError):  # a backend without a count, or a group that is destroyed meanwhile
            counts[_group_key(group)] = group._get_sequence_number_for_group() - _PROBE_COUNTS.get(group, 0)
    return json.dumps(dict(sorted(counts.items())[:_MAX_GROUPS]))


def start_unmatched_recv(handle: Any, rank: int) -> Any:
    """Start to receive a message that no rank sends, to probe or break gloo's connection to ``rank``; return the work handle.

    Raises:
        RuntimeError: by gloo, if the connection is closed.
    """
    return handle.recv([torch.zeros(1, dtype=torch.uint8, device="cpu")], rank, _TAG)


def is_disconnected(group: Any, rank: int) -> bool:
    """Return True if a rank of a gloo group of the program has closed its connection.

    Gloo refuses to start a message over a closed connection. Over an open one the message stays, and no caller waits for it.
    """
    if "gloo" not in str(dist.get_backend_config(group)):
        return False
    _PROBE_COUNTS[group] = _PROBE_COUNTS.get(group, 0) + 1
    gloo = group._get_backend(torch.device("cpu"))  # below torch's operators, so that tools that count messages do not see it
    try:
        start_unmatched_recv(gloo, rank)
    except RuntimeError as error:
        return "by peer" in str(error)
    return False


def is_behind(started: str, call: C10dCall, other_started: str) -> bool:
    """Return True if a rank that is in ``call`` has started fewer calls before it than another rank, in a group of both.

    Args:
        started, other_started: what each of the two ranks has started, see :func:`count_started`.
    """
    counts = json.loads(started or "{}")
    if call.group in counts:
        counts[call.group] -= 1
    return any(counts.get(group, count) < count for group, count in json.loads(other_started or "{}").items())
