"""``CommDebugMode``: the collectives that ran inside a ``with`` block."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..base.mode_stack import Block
from ..base.tables import table_text
from ..base.torch_internals import OpOverloadPacket
from ..base.units import bytes_text
from ..comm import events
from ..comm.events import Event
from . import c10d_calls
from .module_tracker import ModuleLog

EXCHANGE = "all_gather_object"


class Counts(defaultdict[Any, int]):
    """Numbers by kind of collective; torch's operators (``torch.ops.c10d_functional.all_reduce``) stand for their kinds where one
    is asked for. Who goes through all of them gets the kinds: ``"all_reduce"``.

    >>> counts = Counts(int, {"all_reduce": 2})
    >>> counts[torch.ops._c10d_functional.all_reduce], torch.ops.c10d_functional.all_reduce in counts, list(counts)
    (2, True, ['all_reduce'])
    """

    def __missing__(self, key: Any) -> int:
        return self.get(key, 0)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_kind(key), default)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_kind(key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and dict(self) == {_kind(key): count for key, count in other.items()}

    def __ne__(self, other: object) -> bool:
        return not self == other  # a dict has one of its own

    __hash__ = None  # type: ignore[assignment]  # as of any dict


def _kind(key: Any) -> Any:
    """The kind that a torch operator stands for; any other key is its own."""
    packet = getattr(key, "overloadpacket", key)
    return c10d_calls.kind_of(packet.__name__) if isinstance(packet, OpOverloadPacket) else key


class CommDebugMode:
    """Counts collectives and the bytes they bring to a rank; modes nest, each counts its own block.

    One call of a collective counts once, whether its ranks are processes or all live here. Groups of one rank do not
    communicate and do not count. What the program itself calls of ``torch.distributed`` counts as well, messages and barriers
    too: once for each call of a process group, also for a coalesced one of many tensors (``all_gather_object`` makes two), and
    the table says "direct". Exchanges of small Python values (``from_local`` asks for the sizes of ragged pieces) are no
    collectives of tensors: the table has a line for them, and :meth:`get_exchange_count` their number.

    Counted is what the thread or task that entered it issues, and its backward passes.

    >>> mesh = DeviceMesh("cpu", 2)
    >>> with CommDebugMode() as comm:
    ...     _ = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).full_tensor()
    >>> dict(comm.get_comm_counts()), dict(comm.get_comm_bytes())
    ({'all_gather': 1}, {'all_gather': 8})

    It counts and moves nothing, and raises nothing of its own.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._modules = ModuleLog()
        self._world: Any = None
        self._blocks: list[Block[events.Listener]] = []

    def __enter__(self) -> CommDebugMode:
        self.events.clear()
        self._world = dist.group.WORLD
        block = events.LISTENING.enter(self._record)
        self._blocks.append(block)
        self._modules.follow(lambda: events.LISTENING.sees(block))
        c10d_calls.REPORTED.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        c10d_calls.REPORTED.__exit__()
        events.LISTENING.leave_one(self._blocks)
        self._modules.stop()

    def _record(self, event: Event) -> events.Around | None:
        if self._world is None:  # it was made inside of the block
            self._world = dist.group.WORLD
        if event.mesh is not None and event.mesh.kind == "process_group" and event.mesh._root.world is not self._world:
            return None  # of another rank, in programs whose ranks are threads
        return self._counted(event)

    def _counted(self, event: Event) -> events.Around | None:
        """Takes it down; what wants to see it run."""
        self.events.append(event)
        if event.kind != EXCHANGE:
            self._modules.record(event)
        return None

    @property
    def _collectives(self) -> list[Event]:
        return [event for event in self.events if event.kind != EXCHANGE]

    def get_total_counts(self) -> int:
        """Number of collectives of all kinds."""
        return len(self._collectives)

    def get_exchange_count(self) -> int:
        """Number of exchanges of small Python values between ranks."""
        return len(self.events) - len(self._collectives)

    @property
    def comm_counts(self) -> dict[Any, int]:
        """What :meth:`get_comm_counts` gives."""
        return self.get_comm_counts()

    def get_comm_counts(self) -> dict[Any, int]:
        """Number of collectives of each kind; 0 for a kind that did not run."""
        return Counts(int, Counter(event.kind for event in self._collectives))

    def get_direct_counts(self) -> dict[Any, int]:
        """Those of :meth:`get_comm_counts` that are the program's own calls of ``torch.distributed``."""
        return Counts(int, Counter(event.kind for event in self.events if event.direct))

    def get_comm_bytes(self) -> dict[Any, int]:
        """Bytes received by one rank (the largest over ranks, for each collective) of each kind."""
        totals = Counts(int)
        for event in self._collectives:
            totals[event.kind] += event.bytes
        return totals

    def get_table(self) -> str:
        """One line for each kind, mesh dims and group size, in order of first use."""
        rows: dict[tuple[str, str, str], list[int]] = {}
        for event in self.events:
            over = "direct" if event.direct else event.over
            row = rows.setdefault((event.kind, over, str(event.group_size)), [0, 0])
            row[0] += 1
            row[1] += event.bytes
        head = ("collective", "over", "ranks", "count", "received per rank")
        lines = [head, *((*key, str(count), bytes_text(size)) for key, (count, size) in rows.items())]
        lines.append(("total", "", "", str(self.get_total_counts()), bytes_text(sum(event.bytes for event in self.events))))
        return table_text(lines)

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """Number of collectives by module ("Global" for all), then "forward" or "backward", then kind.

        A module is named by the type of the outermost one and its path in it (``"MLP.layers.0"``) and counts those of its parts;
        backward runs outside of modules and counts under "Global" only.
        """
        return {
            name: {phase: Counts(int, counts) for phase, counts in phases.items()}
            for name, phases in self._modules.inclusive().items()
        }

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Parameters of the modules that ran: module -> name -> parameter."""
        return dict(self._modules.parameters)

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """Placements of the distributed parameters of the modules that ran, by ``module.parameter``."""
        return self._modules.sharding()

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The modules that ran, the placements of their parameters, and the collectives of their forward and backward.

        Args:
            noise_level: accepted for programs written for torch; operations are not listed (``dtensor.explain`` does that).
        """
        return self._modules.table()

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Writes that table to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Writes the modules that ran to a JSON file, each with its parts under ``"children"``; "Global" is the outermost.

        A module has ``"fqn"``, ``"module_type"``, ``"parameters"`` (pairs of name and placements), ``"collectives_forward"`` and
        ``"collectives_backward"`` (pairs of kind and number, its parts' included).

        Args:
            noise_level: accepted for programs written for torch, whose lists of operations are empty here.
        """
        Path(file_name).write_text(json.dumps(self._modules.tree(), indent=4) + "\n")

    def __str__(self) -> str:
        return self.get_table()

    def __repr__(self) -> str:
        return f"<CommDebugMode: {self.get_total_counts()} collectives, {bytes_text(sum(event.bytes for event in self.events))}>"
