"""Checked collectives: each collective of process groups is compared with other ranks before anything is sent, and its wait is
watched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...base.caches import BoundedDict
from ...base.tensor_text import tensor_text
from ...mesh.process_groups import BEFORE_NEW_GROUP, Group
from ...mesh.root import MESH_HOOKS
from ...watchdog.collective_hooks import (
    get_or_make_log,
    make_divergence_error,
    make_issue_error,
    run_wait,
    start_watchdog,
    wait_after_skip,
    wait_for_group_members,
)
from ...watchdog.collective_log import CollectiveLog, CollectiveRecord, find_length_mismatches, format_lengths, parse_lengths
from ...watchdog.diagnosis import RankReport, format_difference, format_length_mismatch, make_rank_report
from ...watchdog.flight_recorder import LAST_ISSUED
from ...watchdog.levels import CheckLevel, raise_in_forked_child
from ..flat_rows import row_gather_route
from ..pack import SendRecvPlan, Transfer
from ..pending import Pending
from .transfer import Issue, bind_direct_messages, bind_group_transfer

BEFORE_NEW_GROUP.append(wait_for_group_members)
MESH_HOOKS.append(start_watchdog)
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
        """Log the collective and compare it with other ranks, then run it; its ``wait()`` is watched."""
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
        return pending.wrap_completion(functools.partial(run_wait, log, number), rounds=True)

    return issue_checked


def send_recv_lengths(route: SendRecvPlan) -> tuple[list[int], list[int]]:
    """Return how many elements a rank sends to each rank of its group, and how many it receives from each."""
    send_lengths, recv_lengths = ([0 if box is None else box.numel for box in side] for side in (route.sends, route.receives))
    return send_lengths, recv_lengths


def ranks_of(group: Group) -> list[int]:
    """Return the global rank at each position of a group."""
    global_ranks = dist.get_process_group_ranks(group.handle)
    return [global_ranks[k] for k in group.order or range(group.size)]


def _log_and_compare(log: CollectiveLog, group: Group, ranks: list[int], level: str, record: CollectiveRecord) -> None:
    """Log a collective that this rank is about to issue, and compare it with those of other ranks.

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
    """Exchange number, hash and lengths of a collective between all ranks of the group; raise DivergenceError if they differ.

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
    """Exchange descriptions of the last collective of each rank of the group, and return them by global rank."""
    report = make_rank_report(log.last_event())
    encoded = f"{report.mesh_dims}\n{report.text}".encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES)
    rows = _gather_rows(log, group, log.count, torch.frombuffer(bytearray(encoded), dtype=torch.uint8)).view(-1, _REPORT_BYTES)
    texts = [bytes(row.tolist()).decode(errors="replace").strip().partition("\n") for row in rows]
    return {
        rank: RankReport(hashed, mesh_dims, text) for rank, hashed, (mesh_dims, _, text) in zip(ranks, hashes, texts, strict=True)
    }


def _gather_rows(log: CollectiveLog, group: Group, number: int, row: torch.Tensor) -> torch.Tensor:
    """All-gather ``row`` from each rank, concatenated by group position. The wait is watched as part of collective ``number``."""
    length, key = len(row), (len(row), group.order)
    if key not in log.bound_exchanges:
        route = row_gather_route([(length,)] * group.size, group.position)
        is_whole_group = group.handle.size() == group.size
        transfer = Transfer(lambda _: route, row.dtype, "all_gather", blocking=True)
        log.bound_exchanges[key] = bind_group_transfer(group, transfer) if is_whole_group else bind_direct_messages(group, route)
    pending: Pending[torch.Tensor] = log.bound_exchanges[key](row)
    return run_wait(log, number, pending.wait)
