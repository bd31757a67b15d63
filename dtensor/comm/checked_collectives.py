"""Checked collectives: each collective of process groups is compared with other ranks before anything is sent, and its wait is
watched.
"""

from __future__ import annotations

import functools
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ..base.caches import BoundedDict, memoize
from ..base.generators import get_generator_state
from ..base.tensor_text import tensor_text
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import BEFORE_NEW_GROUP, Group
from ..mesh.root import MESH_HOOKS
from ..watchdog.collective_hooks import (
    get_or_make_log,
    get_or_make_operation_log,
    make_divergence_error,
    make_issue_error,
    run_wait,
    start_watchdog,
    wait_after_skip,
    wait_for_group_members,
)
from ..watchdog.collective_log import CollectiveLog, CollectiveRecord, find_length_mismatches, format_lengths, parse_lengths
from ..watchdog.diagnosis import RankReport, format_difference, format_length_mismatch, report_event
from ..watchdog.flight_recorder import LAST_ISSUED, OperationHash, fingerprint
from ..watchdog.levels import CheckLevel, operation_records_of, raise_in_forked_child
from .flat_rows import gather_route
from .pack import SendRecvPlan, Transfer
from .pending import Pending
from .transfer import Issue, bind_direct, bind_transfer

P = ParamSpec("P")
T = TypeVar("T")

BEFORE_NEW_GROUP.append(wait_for_group_members)
MESH_HOOKS.append(start_watchdog)
_MAIN_THREAD = threading.main_thread().ident
_MAX_RECORDS = 1024  # records of one collective, by dtype and shape of its operand
_REPORT_BYTES = 1024  # size of a rank's report in the second exchange


def wrap_checked(
    group: Group,
    text: str,
    mesh_dims: str,
    run: Issue,
    compare_shape: bool = False,
    lengths: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Issue:
    """Wrap ``run`` so that each call is logged and compared with other ranks before it sends anything, and its wait is watched.

    Return ``run`` itself if the ranks of the group are not processes.

    Args:
        text: description that must be equal on all ranks of the group. The dtype of the operand and whether it has data are
            compared too, and its shape if ``compare_shape``.
        mesh_dims: the mesh dims of the group, as text.
        lengths: elements that this rank sends to each rank of the group and receives from each, if ranks do not know each
            other's lengths.
    """
    ranks = ranks_of(group)
    log = get_or_make_log(ranks, group.handle, group.backend)
    if log is None:
        return run
    records: BoundedDict[Any, CollectiveRecord] = BoundedDict(_MAX_RECORDS)
    if list(log.ranks) != ranks:
        mesh_dims = f"{mesh_dims} of ranks {', '.join(map(str, ranks))}"
    positions = {rank: position for position, rank in enumerate(ranks)}
    lengths_text = "" if lengths is None else format_lengths(*([side[positions[rank]] for rank in log.ranks] for side in lengths))

    def issue_checked(x: torch.Tensor) -> Pending[torch.Tensor]:
        """Log the call and compare it with those of other ranks, then run it."""
        if (level := CheckLevel.now) == "off":
            return run(x)
        key = (x.dtype, x.is_meta, x.shape) if compare_shape else (x.dtype, x.is_meta)
        record = records.get(key)
        if record is None:
            record = records.keep(
                key, CollectiveRecord.of(f"{text} {_describe_operand(x, compare_shape)}", mesh_dims, lengths_text)
            )
        _log_and_compare(log, group, ranks, level, record)
        number = log.count
        try:
            pending = run(x)
        except BaseException as error:
            raise make_issue_error(log, number, error) from error
        log.slots[LAST_ISSUED] = number
        return pending.within(functools.partial(run_wait, log, number), rounds=True)

    return issue_checked


def lengths_of(route: SendRecvPlan) -> tuple[list[int], list[int]]:
    """Return how many elements a rank sends to each rank of its group, and how many it receives from each."""
    send_lengths, recv_lengths = ([0 if box is None else box.numel for box in side] for side in (route.sends, route.receives))
    return send_lengths, recv_lengths


def ranks_of(group: Group) -> list[int]:
    """Return the global rank at each position of a group."""
    global_ranks = dist.get_process_group_ranks(group.handle)
    return [global_ranks[k] for k in group.order or range(group.size)]


@memoize(256)
def ranks_along(mesh: DeviceMesh, dims: tuple[int, ...] | None = None) -> frozenset[int]:
    """Return the ranks along the given mesh dims (default: all) of this rank; empty if they are not processes."""
    if mesh.kind != "process_group":
        return frozenset()
    along = range(mesh.ndim) if dims is None else dims
    return frozenset(mesh.ranks[member] for member in mesh.members_of(along, mesh.current_member() or 0))


def ranks_computing_with(layouts: Sequence[Layout]) -> frozenset[int]:
    """Return the ranks along all mesh dims over which any of these tensors is sharded or partial.

    Empty if the ranks are not processes, and if ranks could disagree about the set. A tensor on a slice of one mesh and a
    tensor on another mesh have other ranks in common for each copy of the slice.
    """
    dims: dict[DeviceMesh, set[int]] = {}
    for layout in layouts:
        group_dims = layout.mesh.group_id(dim for dim in range(layout.mesh.ndim) if not layout.placements[dim].is_replicate())
        if group_dims:
            dims.setdefault(layout.mesh._get_root_mesh(), set()).update(group_dims)
    if len(dims) > 1 and any(root.size_of(group_dims) != root.size() for root, group_dims in dims.items()):
        return frozenset()
    return frozenset[int]().union(*(ranks_along(root, tuple(sorted(group_dims))) for root, group_dims in dims.items()))


def operation_hash_of(layouts: Sequence[Layout]) -> OperationHash | None:
    """Return the rolling hash of the :func:`ranks_computing_with` these tensors; None for fewer than two ranks."""
    ranks = ranks_computing_with(layouts)
    return operation_records_of(layouts[0].mesh._root.world).trail_of(ranks) if len(ranks) > 1 else None


def count_as_operation(layouts: Sequence[Layout], mesh_dims: Sequence[int], text: str, run: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``run``, a collective over ``mesh_dims`` of one mesh, so that its calls count as operations on tensors of these
    layouts.

    Ranks that share such tensors issue the collectives of their different groups in one order. If the tensors are sharded over
    ``mesh_dims`` alone, the group itself compares that order, and ``run`` is returned as it is.
    """
    mesh = layouts[0].mesh
    trail = operation_hash_of(layouts) if len(ranks_computing_with(layouts)) > mesh.size_of(mesh_dims) else None
    if trail is None:
        return run
    step = fingerprint(f"{text} {mesh.named(mesh_dims)}")

    def run_counted(*args: P.args, **kwargs: P.kwargs) -> T:
        if CheckLevel.now != "off" and threading.get_ident() == _MAIN_THREAD:
            trail.hash = hash((trail.hash, step))
        return run(*args, **kwargs)

    return run_counted


def compare_generator_state(mesh: DeviceMesh, generator: torch.Generator, how: str) -> None:
    """Add the state of the generator, from which all ranks draw, and ``how`` they draw to what the ranks compare."""
    if _is_compared(mesh):
        state_hash = zlib.crc32(how.encode(), zlib.crc32(get_generator_state(generator).numpy().data))
        _add_to_hash(mesh, state_hash, f"{how} from the generator in state {state_hash:x}")


def compare_text(mesh: DeviceMesh, text: str) -> None:
    """Add ``text``, what ranks of ``mesh`` do alike with local tensors between collectives, to what the ranks compare."""
    if _is_compared(mesh):
        _add_to_hash(mesh, fingerprint(text), text)


def _is_compared(mesh: DeviceMesh) -> bool:
    return CheckLevel.now in ("watch", "strict") and len(ranks_along(mesh)) > 1 and threading.get_ident() == _MAIN_THREAD


def _add_to_hash(mesh: DeviceMesh, value: int, text: str) -> None:
    if CheckLevel.now == "watch":
        trail = operation_records_of(mesh._root.world).trail_of(ranks_along(mesh))
        trail.hash, trail.last = hash((trail.hash, value)), text
    elif (ring := get_or_make_operation_log(mesh._root.world, ranks_along(mesh))) is not None:
        ring.mix(value)


def _log_and_compare(log: CollectiveLog, group: Group, ranks: list[int], level: str, record: CollectiveRecord) -> None:
    """Log a collective, and compare it with other ranks.

    Raises:
        DivergenceError: another rank issues another collective. Nothing was sent.
    """
    if level == "forked" and log.host_state.pid != os.getpid():
        raise_in_forked_child()
    if not log.log_and_compare(record):
        raise make_divergence_error(log)
    if log.skipped:
        wait_after_skip(log)
    if level == "strict" or (log.spans_hosts and group.backend == "gloo"):  # gloo aborts a process if a message is too long
        _compare_by_exchange(log, group, ranks, record)


def _describe_operand(x: torch.Tensor, with_shape: bool) -> str:
    text = tensor_text(x.dtype, x.shape) if with_shape else str(x.dtype).removeprefix("torch.")
    return f"{text} without data" if x.is_meta else text  # torch sends nothing for a meta tensor


def _compare_by_exchange(log: CollectiveLog, group: Group, ranks: list[int], record: CollectiveRecord) -> None:
    """Compare number and hash of a collective in an exchange between all ranks of the group.

    If they differ, and the ranks are on several hosts, a second exchange gathers what each rank does, for the error.
    """
    number = log.count
    rows = _gather_rows(log, group, number, torch.tensor([number, log.hash - 2**63], device="cpu")).view(-1, 2).tolist()
    if len({hashed for _, hashed in rows}) > 1:
        if not log.spans_hosts:
            raise make_divergence_error(log)
        reports = _gather_reports(log, group, ranks, [hashed for _, hashed in rows])
        raise make_divergence_error(log, format_difference(number, reports))
    if record.lengths:
        own_lengths = parse_lengths(record.lengths)
        row = torch.tensor([*own_lengths[0], *own_lengths[1]], device="cpu")
        length_rows = _gather_rows(log, group, number, row).view(len(ranks), 2, -1).tolist()
        lengths = {rank: (sent, received) for rank, (sent, received) in zip(ranks, length_rows, strict=True)}
        if find_length_mismatches(log.ranks, lengths):
            reports = _gather_reports(log, group, ranks, [0] * len(ranks))
            raise make_divergence_error(log, format_length_mismatch(log.ranks, number, lengths, reports))


def _gather_reports(log: CollectiveLog, group: Group, ranks: list[int], hashes: list[int]) -> dict[int, RankReport]:
    """Return the report of each rank, gathered from all ranks of the group."""
    report = report_event(log.last_event())
    encoded = f"{report.mesh_dims}\n{report.text}".encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES)
    rows = _gather_rows(log, group, log.count, torch.frombuffer(bytearray(encoded), dtype=torch.uint8)).view(-1, _REPORT_BYTES)
    texts = [bytes(row.tolist()).decode(errors="replace").strip().partition("\n") for row in rows]
    return {
        rank: RankReport(hashed, mesh_dims, text) for rank, hashed, (mesh_dims, _, text) in zip(ranks, hashes, texts, strict=True)
    }


def _gather_rows(log: CollectiveLog, group: Group, number: int, row: torch.Tensor) -> torch.Tensor:
    """Return the ``row`` of each rank, gathered in the order of group positions."""
    length, key = len(row), (len(row), group.order)
    if key not in log.bound_exchanges:
        route = gather_route([(length,)] * group.size, group.position)
        is_whole_group = group.handle.size() == group.size
        transfer = Transfer(lambda _: route, row.dtype, "all_gather", blocking=True)
        log.bound_exchanges[key] = bind_transfer(group, transfer) if is_whole_group else bind_direct(group, route)
    pending: Pending[torch.Tensor] = log.bound_exchanges[key](row)
    return run_wait(log, number, pending.wait)
