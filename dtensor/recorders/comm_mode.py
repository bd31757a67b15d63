"""Communication debug mode: ``CommDebugMode`` counts the collectives of a ``with`` block."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..base.mode_stack import ModeBlock
from ..base.text_tables import table_text
from ..base.torch_internals import OpOverloadPacket
from ..base.units import bytes_text
from ..comm import events
from ..comm.events import Event
from . import c10d_calls
from .module_tracker import ModuleTracker

EXCHANGE_KIND = "all_gather_object"


class CollectiveCounts(defaultdict[Any, int]):
    """Counts by kind of collective. A lookup also accepts the torch operator of a kind.

    Iteration yields the names of kinds, such as ``"all_reduce"``.

    >>> counts = CollectiveCounts(int, {"all_reduce": 2})
    >>> counts[torch.ops._c10d_functional.all_reduce], torch.ops.c10d_functional.all_reduce in counts, list(counts)
    (2, True, ['all_reduce'])
    """

    def __missing__(self, key: Any) -> int:
        return self.get(key, 0)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_kind_of_key(key), default)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(_kind_of_key(key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and dict(self) == {_kind_of_key(key): count for key, count in other.items()}

    def __ne__(self, other: object) -> bool:
        return not self == other  # dict defines its own __ne__

    __hash__ = None  # type: ignore[assignment]  # unhashable, as any dict


def _kind_of_key(key: Any) -> Any:
    """Return the kind of collective that a torch operator issues; any other key is returned unchanged."""
    packet = getattr(key, "overloadpacket", key)
    return c10d_calls.collective_kind_of(packet.__name__) if isinstance(packet, OpOverloadPacket) else key


class CommDebugMode:
    """Count collectives and the bytes that a rank receives. Modes nest, and each counts its own block.

    One call of a collective counts once, whether its ranks are processes or share this process. Groups of one rank do not
    communicate and do not count. The program's own calls of ``torch.distributed`` count as well, including point-to-point
    messages and barriers, and the table calls them "direct". Each call of a process group counts once, also a coalesced one for
    many tensors; ``all_gather_object`` makes two calls. Exchanges of small Python values (``from_local`` exchanges the sizes of
    uneven shards) are not collectives of tensors. The table has a line for them, and :meth:`get_exchange_count` returns their
    number.

    The mode counts collectives that the thread or task that entered it issues, and those of its backward passes. It communicates
    nothing and raises no errors.

    >>> mesh = DeviceMesh("cpu", 2)
    >>> with CommDebugMode() as comm:
    ...     _ = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).full_tensor()
    >>> dict(comm.get_comm_counts()), dict(comm.get_comm_bytes())
    ({'all_gather': 1}, {'all_gather': 8})
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._modules = ModuleTracker()
        self._world: Any = None
        self._blocks: list[ModeBlock[events.Listener]] = []

    def __enter__(self) -> CommDebugMode:
        """Clear the events, and start to listen for collectives, to track modules and to report c10d calls."""
        self.events.clear()
        self._world = dist.group.WORLD
        block = events.LISTENING.enter(self._handle_own_event)
        self._blocks.append(block)
        self._modules.start_tracking(lambda: events.LISTENING.is_entered(block))
        c10d_calls.REPORT_C10D_CALLS.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        c10d_calls.REPORT_C10D_CALLS.__exit__()
        events.LISTENING.leave_last(self._blocks)
        self._modules.stop_tracking()

    def _handle_own_event(self, event: Event) -> events.CollectiveWrapper | None:
        """Handle a reported collective, unless it is of another rank in a program with one thread per rank."""
        if self._world is None:  # the process group was created inside the block
            self._world = dist.group.WORLD
        if event.mesh is not None and event.mesh.kind == "process_group" and event.mesh._root.world is not self._world:
            return None
        return self._handle_event(event)

    def _handle_event(self, event: Event) -> events.CollectiveWrapper | None:
        """Store a reported collective, and count it for the running module. A subclass returns what wraps its execution."""
        self.events.append(event)
        if event.kind != EXCHANGE_KIND:
            self._modules.record_collective(event)
        return None

    @property
    def _tensor_collectives(self) -> list[Event]:
        return [event for event in self.events if event.kind != EXCHANGE_KIND]

    def get_total_counts(self) -> int:
        """Return the number of collectives of all kinds."""
        return len(self._tensor_collectives)

    def get_exchange_count(self) -> int:
        """Return the number of exchanges of small Python values between ranks."""
        return len(self.events) - len(self._tensor_collectives)

    @property
    def comm_counts(self) -> dict[Any, int]:
        """Return the number of collectives by kind, as :meth:`get_comm_counts` does."""
        return self.get_comm_counts()

    def get_comm_counts(self) -> dict[Any, int]:
        """Return the number of collectives of each kind; 0 for a kind that did not run."""
        return CollectiveCounts(int, Counter(event.kind for event in self._tensor_collectives))

    def get_direct_counts(self) -> dict[Any, int]:
        """Return the counts of the program's own ``torch.distributed`` calls. :meth:`get_comm_counts` includes them."""
        return CollectiveCounts(int, Counter(event.kind for event in self.events if event.direct))

    def get_comm_bytes(self) -> dict[Any, int]:
        """Return the bytes that one rank received by each kind: for each collective, the maximum over ranks."""
        totals = CollectiveCounts(int)
        for event in self._tensor_collectives:
            totals[event.kind] += event.bytes
        return totals

    def get_table(self) -> str:
        """Return a table with one line for each kind, mesh dims and group size, in order of first use."""
        rows: dict[tuple[str, str, str], list[int]] = {}
        for event in self.events:
            over = "direct" if event.direct else event.dims_text
            row = rows.setdefault((event.kind, over, str(event.group_size)), [0, 0])
            row[0] += 1
            row[1] += event.bytes
        head = ("collective", "over", "ranks", "count", "received per rank")
        lines = [head, *((*key, str(count), bytes_text(size)) for key, (count, size) in rows.items())]
        lines.append(("total", "", "", str(self.get_total_counts()), bytes_text(sum(event.bytes for event in self.events))))
        return table_text(lines)

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """Return the collectives by module ("Global" for all), then by phase ("forward" or "backward"), then by kind.

        The name of a module is the type of the outermost module and the path inside it (``"MLP.layers.0"``). Counts include
        submodules. Backward passes run outside of modules and count under "Global" only.
        """
        return {
            name: {phase: CollectiveCounts(int, counts) for phase, counts in phases.items()}
            for name, phases in self._modules.counts_by_module().items()
        }

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """Return the parameters of the modules that ran: module -> name -> parameter."""
        return dict(self._modules.parameters)

    def get_sharding_info(self) -> dict[str, tuple[Any, ...]]:
        """Return the placements of the distributed parameters of the modules that ran, by ``module.parameter``."""
        return self._modules.placements_by_parameter()

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table of the modules that ran, with placements of parameters and collectives of forward and backward passes.

        Args:
            noise_level: accepted for programs written for torch; operations are not listed (``dtensor.explain`` does that).
        """
        return self._modules.text_table()

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """Write the table of :meth:`generate_comm_debug_tracing_table` to a file."""
        Path(file_name).write_text(self.generate_comm_debug_tracing_table(noise_level) + "\n")

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """Write the modules that ran to a JSON file. "Global" is the outermost, and ``"children"`` has the submodules of each.

        A module has ``"fqn"``, ``"module_type"``, ``"parameters"`` (pairs of name and placements), ``"collectives_forward"`` and
        ``"collectives_backward"`` (pairs of kind and number, submodules included).

        Args:
            noise_level: accepted for programs written for torch; the lists of operations are always empty here.
        """
        Path(file_name).write_text(json.dumps(self._modules.as_tree(), indent=4) + "\n")

    def __str__(self) -> str:
        return self.get_table()

    def __repr__(self) -> str:
        return f"<CommDebugMode: {self.get_total_counts()} collectives, {bytes_text(sum(event.bytes for event in self.events))}>"
