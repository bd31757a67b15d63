"""Collectives while somebody traces the program: operators that stand in the graph (:mod:`.custom_ops`).

A compiler that traced the eager ones would run them once, on nothing, and leave them out of its graph. What is issued here gives
the same bits: the same terms are folded in the same order, in all-to-alls of rows, or by the backend's own reductions where the
eager collectives are those.
"""

from __future__ import annotations

import math
from re import sub
from typing import Any

import torch
from torch import Tensor

from ..base.tracing import is_traced
from ..errors import UnsupportedOperationError
from ..mesh.process_groups import Group
from ..placement import Monoid
from .backend_base import Reduction, Run
from .backends import native_reduction, row_major, traits_of
from .custom_ops import Collective
from .flat_rows import as_row, chunk_lengths
from .local_reduce import Op, dense, fold
from .pack import Packing, Scatter, Traffic, Transfer
from .pending import Pending
from .transfer import of_gather, packings


def either(eager: Run, bind: Any) -> Run:
    """``eager``, and what ``bind()`` gives for locals that are being traced."""
    bound: list[Run] = []

    def issue(x: Tensor) -> Pending[Tensor]:
        if not is_traced(x):
            return eager(x)
        if not bound:
            bound.append(bind())
        return bound[0](x)

    return issue


def _collective(group: Group, kind: str, said: str, op: Any = None) -> Collective:
    return Collective(kind, group.name, group.size, said, op)


def _exchange(group: Group, row: Tensor, arriving: list[int], leaving: list[int], said: str) -> Tensor:
    """One all-to-all of the parts of ``row`` by torch's ranks; ``said`` is what it is for."""
    return _collective(group, "exchange", said).of(row, [*arriving, *leaving])


def _as(row: Tensor, dtype: torch.dtype) -> Tensor:
    return row if row.dtype is dtype else row.view(dtype)


def _unsized(said: str) -> str:
    """Without sizes, which stand in brackets: of a program for any size, of which a rank may have a graph for one."""
    return sub(r"\[[^]]*\]", "", said, count=1)


def bind_transfer(group: Group, transfer: Transfer) -> Run:
    route = transfer.route_of(group.members[group.position])
    if transfer.kind == "all_gather" and traits_of(group).reduces and Traffic.of_gather(route).alike:
        return _gathered(group, route, _unsized(transfer.said))
    leaving, arriving = packings(group, route)
    said = f"{transfer.kind} {_unsized(transfer.said)}"

    def issue(x: Tensor) -> Pending[Tensor]:
        row = _exchange(group, leaving.pack(row_major(x, route.old)), arriving.lengths, leaving.lengths, said)
        return Pending.of(arriving.unpack(row))

    return issue


def _gathered(group: Group, route: Any, said: str) -> Run:
    arriving = of_gather(group, route)
    gather = _collective(group, "gather", f"all_gather {said}")

    def issue(x: Tensor) -> Pending[Tensor]:
        return Pending.of(arriving.unpack(gather.of(as_row(row_major(x, route.old)))))

    return issue


def refusing_part() -> Run:
    """Between meshes whose ranks, together, have no process group of their own."""
    raise UnsupportedOperationError(
        "a redistribution between two meshes inside torch.compile needs a process group of their ranks, "
        "and neither mesh has all of them. Allow a graph break here (fullgraph=False), or redistribute "
        "outside of the compiled function"
    )


def bind_scatter(group: Group, scatter: Scatter) -> Run:
    """``chunks[k]`` of every member's block, reduced, goes to group position k."""
    member, op = group.members[group.position], scatter.op
    old, chunks = tuple(scatter.old(member)), scatter.chunks_of(member)
    own = chunks[group.position]
    leaving = Packing(tuple(group.to_torch(chunks)), old)
    native, said = native_reduction(group, op, scatter.dtype), f"reduce_scatter({op}) {_unsized(scatter.said)}"
    if native is not None and len({box.size for box in chunks}) == 1:
        return _scattered_natively(group, leaving, own.size, native, said)

    def issue(x: Tensor) -> Pending[Tensor]:
        rows = _exchange(group, leaving.pack(row_major(x, old)), [own.numel] * group.size, leaving.lengths, said)
        return Pending.of(fold(group.to_mesh(rows.view(group.size, *own.size).unbind(0)), op))

    return issue


def _scattered_natively(group: Group, leaving: Packing, size: tuple[int, ...], native: tuple[Any, torch.dtype], said: str) -> Run:
    op, seen = native
    reduce = _collective(group, "reduce_scatter", said, op)

    def issue(x: Tensor) -> Pending[Tensor]:
        row = as_row(leaving.pack(row_major(x, leaving.shape))).view(seen)
        return Pending.of(_as(reduce.of(row), x.dtype).view(size))

    return issue


def bind_all_reduce(group: Group, op: Op, dtype: torch.dtype) -> Run:
    native = native_reduction(group, op, dtype)
    if native is not None:
        return _reduced_natively(_collective(group, "reduce", f"all_reduce({op})", native[0]), native[1])
    most = math.inf if isinstance(op, Monoid) else traits_of(group).one_round_bytes

    def issue(x: Tensor) -> Pending[Tensor]:
        in_one_round = x.numel() * x.dtype.itemsize * group.size <= most
        reduced = _in_one_round if in_one_round else _in_two_rounds
        return Pending.of(reduced(group, row_major(x, tuple(x.shape)), op))

    return issue


def _reduced_natively(reduce: Collective, seen: torch.dtype) -> Run:
    def issue(x: Tensor) -> Pending[Tensor]:
        return Pending.of(_as(reduce.of(as_row(dense(x)).view(seen)), x.dtype).view(x.shape))

    return issue


def _in_one_round(group: Group, x: Tensor, op: Op) -> Tensor:
    lengths = [x.numel()] * group.size
    rows = _exchange(group, x.expand(group.size, *x.shape).contiguous().view(-1), lengths, lengths, f"all_reduce({op})")
    return fold(group.to_mesh(rows.view(group.size, *x.shape).unbind(0)), op)


def _in_two_rounds(group: Group, x: Tensor, op: Op) -> Tensor:
    """Reduce-scatter, then all-gather, of chunks by torch's ranks."""
    lengths = chunk_lengths(x.numel(), group.size)
    own = lengths[group.torch_rank]
    rows = _exchange(group, x.view(-1), [own] * group.size, lengths, f"all_reduce({op}), to its parts")
    reduced = fold(group.to_mesh(rows.view(group.size, own).unbind(0)), op)
    again = reduced.expand(group.size, own).contiguous().view(-1)
    return _exchange(group, again, lengths, [own] * group.size, f"all_reduce({op}), of its parts").view(x.shape)


def beside(eager: Reduction, group: Group, op: Op, dtype: torch.dtype) -> Reduction:
    """``eager``, and the same while somebody traces."""

    def bind() -> Run:
        return bind_all_reduce(group, op, dtype)

    return Reduction(either(eager.run, bind), None if eager.taking is None else either(eager.taking, bind), eager.at_once)
