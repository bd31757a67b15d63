"""Traced collectives: the collectives of a compiled program, each a call of a graph operator.

They give the bits of the eager collectives: the same addends are reduced in the same order, in all-to-alls of rows, or by the
backend's own reductions if the eager collectives use those. For the reason see [Note: Collectives are effects in a graph].
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from re import sub
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...base import torch_internals
from ...base.caches import BoundedDict, memoize
from ...base.graph_operators import GraphOperator
from ...base.symbolic_sizes import contains_symbols, hashable_sizes
from ...base.tracing import has_range_observer, is_traced
from ...errors import UnsupportedOperationError
from ...mesh.process_groups import Group, backend_name, library_group
from ...placement import Monoid
from ..communicator import BoundCollective, BoundReduction
from ..events import Event, all_reduce_bytes, issue_reported, listeners
from ..flat_rows import chunk_lengths, view_as_row
from ..local_reduce import Op, fold, row_major_copy
from ..pack import Packing, Scatter, Transfer
from ..pending import Pending
from .checked_collectives import wrap_checked
from .torch_backends import (
    Waitable,
    all_to_all_rows,
    backend_traits_of,
    bind_native_all_reduce,
    bind_native_reduce_scatter,
    make_pending,
    native_reduction,
    start_all_gather_rows,
    to_row_major,
)
from .transfer import Issue, is_native_gather, make_gather_packing, make_packings


@dataclass(frozen=True, slots=True)
class TracedCollective:
    """The constants of a collective in a graph. The operator gets them as one encoded text, since each argument costs 1 to 2 us.

    Attributes:
        kind: "exchange", "gather", "reduce" or "reduce_scatter".
        group, size: name of the process group, and its number of ranks.
        description: text that ranks compare.
        op: the backend's reduction.
        lengths: of an exchange: elements received from each rank, then elements sent to each. Empty if they are symbolic; the
            operator gets those as an argument.
    """

    kind: str
    group: str
    size: int
    description: str
    op: Any = None
    lengths: tuple[int, ...] = ()

    def add_to_graph(self, row: Tensor, lengths: Sequence[int] = ()) -> Tensor:
        """Add the collective of ``row`` to the graph, and return its result."""
        collective, lengths = self, hashable_sizes(lengths)
        if not contains_symbols(lengths):
            collective, lengths = replace(self, lengths=lengths), ()
        length_args = (list(lengths),) if self.kind == "exchange" else ()
        return cast(Tensor, _OPERATORS[self.kind].add_to_graph(row, *length_args, collective.encode()))

    def encode(self) -> str:
        """Return this collective as text, the operand of its operator.

        The text is complete, so that nothing must be kept as long as the graph exists.
        """
        op = None if self.op is None else self.op.name
        return json.dumps([self.kind, self.group, self.size, self.description, op, self.lengths])

    @staticmethod
    @memoize(4096)
    def decode(name: str) -> TracedCollective:
        """Return the collective that ``name`` encodes."""
        kind, group, size, description, op, lengths = json.loads(name)
        reduction = None if op is None else getattr(dist.ReduceOp, op)
        return TracedCollective(kind, group, size, description, reduction, tuple(lengths))

    def make_result(self, row: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return an empty tensor with shape and dtype of the result of this collective."""
        match self.kind:
            case "exchange":
                return row.new_empty(sum((lengths or self.lengths)[: self.size]))
            case "gather":
                return row.new_empty(row.numel() * self.size)
            case "reduce":
                return torch.empty_like(row)
            case _:
                return row.new_empty(row.numel() // self.size)

    def bind_to_group(self, handle: Any, lengths: Sequence[int], device_type: str) -> Issue:
        """Bind this collective to a process group. As with eager ones, ranks compare each run before it sends anything."""
        ranks = dist.get_process_group_ranks(handle)
        group = Group(handle, tuple(range(self.size)), handle.rank(), None, backend_name(handle, device_type))
        recv_lengths, send_lengths = list(lengths[: self.size]), list(lengths[self.size :])
        start = self._bind_start(group, recv_lengths, send_lengths)

        def issue_collective(row: Tensor) -> Pending[Tensor]:
            into = self.make_result(row, lengths)
            return make_pending(start(row, into), lambda: into)

        mesh_dims = f"a graph of ranks {', '.join(map(str, ranks))}"
        run_checked = wrap_checked(
            group,
            self.description,
            mesh_dims,
            issue_collective,
            compare_shape=not lengths,
            lengths=(send_lengths, recv_lengths) if lengths else None,
        )
        num_received = sum(recv_lengths) - recv_lengths[group.position] if lengths else None

        def run_reported(row: Tensor) -> Pending[Tensor]:
            """Run the compared collective; listeners and the profiler get an event for it."""
            if not (listeners or has_range_observer()):
                return run_checked(row)
            nbytes = row.dtype.itemsize * (self._received_elements(row.numel()) if num_received is None else num_received)
            kind = self.description.split("(")[0].split()[0]
            return issue_reported(Event(kind, (), self.size, nbytes, groups=(tuple(ranks),)), lambda: run_checked(row), row)

        return run_reported

    def _bind_start(
        self, group: Group, recv_lengths: list[int], send_lengths: list[int]
    ) -> Callable[[Tensor, Tensor], list[Waitable]]:
        """Return the function that starts this collective, given a row and the memory of its result."""
        match self.kind:
            case "exchange":
                return lambda row, into: all_to_all_rows(group, into, row, recv_lengths, send_lengths)
            case "gather":
                return lambda row, into: start_all_gather_rows(group, into, row)
            case "reduce":
                reduce = bind_native_all_reduce(group, self.op)
                return lambda row, into: reduce(into.copy_(row))
        scatter = bind_native_reduce_scatter(group, self.op)
        return lambda row, into: scatter(into, row)

    def _received_elements(self, elements: int) -> int:
        """Return how many elements a rank receives from others, for rows of ``elements``."""
        from_each = {"gather": elements, "reduce_scatter": elements // self.size}.get(self.kind)
        return all_reduce_bytes(elements, self.size) if from_each is None else from_each * (self.size - 1)


def _run_collective(row: Tensor, lengths: Sequence[int], what: str) -> Tensor:
    """Run the collective that ``what`` encodes, and return its completed result. It is bound once for each process group."""
    collective = TracedCollective.decode(what)
    lengths, handle = tuple(lengths) or collective.lengths, torch_internals.resolve_process_group(collective.group)
    handle = library_group(handle, row.device.type)
    key = (what, lengths, row.device.type)
    bound = _BOUND_COLLECTIVES.get(key)
    if bound is None or bound[0] is not handle:
        bound = _BOUND_COLLECTIVES.keep(key, (handle, collective.bind_to_group(handle, lengths, row.device.type)))
    return bound[1](row.contiguous()).wait()  # inductor may choose other strides than at tracing


_OPERATORS = {
    "exchange": GraphOperator(
        "exchange",
        "Tensor row, SymInt[] lengths, str what",
        _run_collective,
        lambda row, lengths, what: TracedCollective.decode(what).make_result(row, lengths),
    ),
    **{
        kind: GraphOperator(
            kind,
            "Tensor row, str what",
            lambda row, what: _run_collective(row, (), what),
            lambda row, what: TracedCollective.decode(what).make_result(row, ()),
        )
        for kind in ("gather", "reduce", "reduce_scatter")
    },
}
_BOUND_COLLECTIVES: BoundedDict[Any, tuple[Any, Issue]] = BoundedDict(1024, "comm.traced_collectives")


# --- the collectives of a traced program --------------------------------------------------------------------------------
def select_when_traced(eager: BoundCollective, bind: Any) -> BoundCollective:
    """Return a collective that runs ``eager``, or, for a traced local value, the collective that ``bind()`` returns."""
    bound: list[BoundCollective] = []

    def issue_eager_or_traced(x: Tensor) -> Pending[Tensor]:
        """Run the eager collective, or the traced one if ``x`` is traced. The traced one is bound at its first use."""
        if not is_traced(x):
            return eager(x)
        if not bound:
            bound.append(bind())
        return bound[0](x)

    return issue_eager_or_traced


def _make_collective(group: Group, kind: str, description: str, op: Any = None) -> TracedCollective:
    return TracedCollective(kind, group.name, group.size, description, op)


def _exchange_rows(group: Group, row: Tensor, recv_lengths: list[int], send_lengths: list[int], description: str) -> Tensor:
    """Add one all-to-all of the parts of ``row``, by ranks of torch's group, to the graph. Ranks compare ``description``."""
    return _make_collective(group, "exchange", description).add_to_graph(row, [*recv_lengths, *send_lengths])


def _view_as(row: Tensor, dtype: torch.dtype) -> Tensor:
    return row if row.dtype is dtype else row.view(dtype)


def _without_sizes(description: str) -> str:
    """Remove the sizes in brackets from a description, since ranks may have graphs for any size and for one size."""
    return sub(r"\[[^]]*\]", "", description, count=1)


def bind_traced_transfer(group: Group, transfer: Transfer) -> BoundCollective:
    """Bind a transfer for traced local values: by the backend's all-gather, or by one all-to-all."""
    route = transfer.route_of(group.members[group.position])
    if is_native_gather(group, transfer, route):
        return _bind_traced_gather(group, route, _without_sizes(transfer.description))
    send_packing, recv_packing = make_packings(group, route)
    description = f"{transfer.kind} {_without_sizes(transfer.description)}"

    def trace_all_to_all(x: Tensor) -> Pending[Tensor]:
        """Add an all-to-all of the regions of ``x`` to the traced graph."""
        row = send_packing.pack(to_row_major(x, route.old))
        received = _exchange_rows(group, row, recv_packing.lengths, send_packing.lengths, description)
        return Pending.of(recv_packing.unpack(received))

    return trace_all_to_all


def _bind_traced_gather(group: Group, route: Any, description: str) -> BoundCollective:
    """Bind an all-gather of equal blocks by the backend, as an operator of the graph."""
    recv_packing = make_gather_packing(group, route)
    gather = _make_collective(group, "gather", f"all_gather {description}")

    def trace_gather(x: Tensor) -> Pending[Tensor]:
        return Pending.of(recv_packing.unpack(gather.add_to_graph(view_as_row(to_row_major(x, route.old)))))

    return trace_gather


def raise_without_group() -> BoundCollective:
    """Raise UnsupportedOperationError: the ranks of two meshes have no process group of their own."""
    raise UnsupportedOperationError(
        "a redistribution between two meshes inside torch.compile needs a process group of their ranks, "
        "and neither mesh has all of them. Allow a graph break here (fullgraph=False), or redistribute "
        "outside of the compiled function"
    )


def bind_traced_scatter(group: Group, scatter: Scatter) -> BoundCollective:
    """Bind a reduce-scatter for traced local values: by the backend, or by one all-to-all and a local reduction."""
    member, op = group.members[group.position], scatter.op
    old, chunks = tuple(scatter.old(member)), scatter.chunks_of(member)
    own = chunks[group.position]
    send_packing = Packing(tuple(group.to_torch(chunks)), old)
    native = native_reduction(group, op, scatter.dtype)
    description = f"reduce_scatter({op}) {_without_sizes(scatter.description)}"
    if native is not None and len({box.size for box in chunks}) == 1:
        return _bind_traced_native_scatter(group, send_packing, own.size, native, description)

    def trace_scatter(x: Tensor) -> Pending[Tensor]:
        """Add an all-to-all of the packed regions and a local reduction to the traced graph."""
        rows = _exchange_rows(
            group, send_packing.pack(to_row_major(x, old)), [own.numel] * group.size, send_packing.lengths, description
        )
        return Pending.of(fold(group.to_mesh(rows.view(group.size, *own.size).unbind(0)), op))

    return trace_scatter


def _bind_traced_native_scatter(
    group: Group, send_packing: Packing, size: tuple[int, ...], native: tuple[Any, torch.dtype], description: str
) -> BoundCollective:
    """Bind a reduce-scatter of a packed row by the backend, as an operator of the graph."""
    op, view_dtype = native
    reduce = _make_collective(group, "reduce_scatter", description, op)

    def trace_native_scatter(x: Tensor) -> Pending[Tensor]:
        row = view_as_row(send_packing.pack(to_row_major(x, send_packing.shape))).view(view_dtype)
        return Pending.of(_view_as(reduce.add_to_graph(row), x.dtype).view(size))

    return trace_native_scatter


def bind_traced_all_reduce(group: Group, op: Op, dtype: torch.dtype) -> BoundCollective:
    """Bind an all-reduce for traced local values."""
    native = native_reduction(group, op, dtype)
    if native is not None:
        return _bind_traced_native_reduction(_make_collective(group, "reduce", f"all_reduce({op})", native[0]), native[1])
    max_one_round_bytes = math.inf if isinstance(op, Monoid) else backend_traits_of(group).one_round_bytes

    def trace_reduction(x: Tensor) -> Pending[Tensor]:
        """Add an all-reduce to the graph: in one round if the received bytes are few, else in two."""
        in_one_round = x.numel() * x.dtype.itemsize * group.size <= max_one_round_bytes
        reduce = _trace_one_round_reduction if in_one_round else _trace_two_round_reduction
        return Pending.of(reduce(group, to_row_major(x, tuple(x.shape)), op))

    return trace_reduction


def _bind_traced_native_reduction(reduce: TracedCollective, view_dtype: torch.dtype) -> BoundCollective:
    """Bind an all-reduce by the backend, which reads the row as dtype ``view_dtype``, as an operator of the graph."""

    def trace_native_reduction(x: Tensor) -> Pending[Tensor]:
        return Pending.of(_view_as(reduce.add_to_graph(view_as_row(row_major_copy(x)).view(view_dtype)), x.dtype).view(x.shape))

    return trace_native_reduction


def _trace_one_round_reduction(group: Group, x: Tensor, op: Op) -> Tensor:
    """Add an all-reduce by one all-to-all to the graph: each rank receives all addends and reduces them itself."""
    lengths = [x.numel()] * group.size
    rows = _exchange_rows(group, x.expand(group.size, *x.shape).contiguous().view(-1), lengths, lengths, f"all_reduce({op})")
    return fold(group.to_mesh(rows.view(group.size, *x.shape).unbind(0)), op)


def _trace_two_round_reduction(group: Group, x: Tensor, op: Op) -> Tensor:
    """Add an all-reduce by two all-to-alls to the graph: each rank reduces one chunk in mesh order, and sends it to all."""
    lengths = chunk_lengths(x.numel(), group.size)
    own = lengths[group.torch_rank]
    rows = _exchange_rows(group, x.view(-1), [own] * group.size, lengths, f"all_reduce({op}), to its parts")
    reduced = fold(group.to_mesh(rows.view(group.size, own).unbind(0)), op)
    repeated = reduced.expand(group.size, own).contiguous().view(-1)
    return _exchange_rows(group, repeated, lengths, [own] * group.size, f"all_reduce({op}), of its parts").view(x.shape)


def add_traced_reduction(eager: BoundReduction, group: Group, op: Op, dtype: torch.dtype) -> BoundReduction:
    """Return a bound all-reduce that runs ``eager``, or, for a traced local value, operators of the graph."""

    def bind() -> BoundCollective:
        return bind_traced_all_reduce(group, op, dtype)

    return BoundReduction(
        select_when_traced(eager.run, bind),
        None if eager.run_donated is None else select_when_traced(eager.run_donated, bind),
        eager.at_once,
    )
