"""The collectives, draws and checks that stand in a compiled program's graph: one operator each, which has ended when it returns.

Every rank must issue the collectives of a program, in its order, once. Compilers drop what has no effect and no use, and a rank
may have no use for what it gets (the first one of a cumulative sum). They keep what has an effect wherever they copy a part of
the forward pass into the backward one, as ``wait_tensor`` of torch's functional collectives, and which part that is they choose
by sizes, which differ between uneven blocks. So these are effects in order, which torch neither drops nor copies nor exchanges.
Random numbers are such effects too: every rank advances its generator alike, once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import torch_internals
from ..base.caches import Bounded, remembered
from ..base.patches import changed
from ..base.symbolic_sizes import as_torch_has_them, has_symbols, sizes
from ..base.tracing import kept_object, shows_ranges
from ..mesh.process_groups import Group, backend_of, beside
from .backends import Ending, all_gather_rows, all_reduction, all_to_all_rows, scattered_reduction, started
from .checked_collectives import watched
from .events import Event, listeners, reduced, reporting
from .pending import Pending
from .transfer import Issue

_OF_ROWS = ("gather", "reduce", "reduce_scatter")
_SCHEMAS = {
    "exchange": "(Tensor row, SymInt[] lengths, str what, Tensor? after=None) -> Tensor",
    **dict.fromkeys(_OF_ROWS, "(Tensor row, str what, Tensor? after=None) -> Tensor"),
    "check": "(Tensor beside, str check, SymInt[] given, Tensor? after=None) -> Tensor",
    "draw": "(str make, Tensor[] given, SymInt[] sizes, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device,"
    " Tensor? after=None) -> Tensor",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """What is constant of one: an operator is given this by name, since each argument of it takes a microsecond or two.

    ``said`` is what it is for, ``lengths`` of an exchange what arrives from each rank, then what leaves for each; none where
    sizes are symbols, which the operator is given.
    """

    kind: str
    group: str
    size: int
    said: str
    op: Any = None
    lengths: tuple[int, ...] = ()

    def of(self, row: Tensor, lengths: Sequence[int] = ()) -> Tensor:
        """Issue it for ``row``; in a graph."""
        said, lengths = self, sizes(lengths)
        if not has_symbols(lengths):
            said, lengths = replace(self, lengths=lengths), ()
        given = (list(lengths),) if self.kind == "exchange" else ()
        return cast(Tensor, in_graph(self.kind, row, *given, said.written()))

    def written(self) -> str:
        """Its name in a graph: all of it, so that nothing needs to be kept for as long as there is the graph."""
        op = None if self.op is None else self.op.name
        return json.dumps([self.kind, self.group, self.size, self.said, op, self.lengths])

    @staticmethod
    @remembered(4096)
    def read(name: str) -> Collective:
        """What has that name."""
        kind, group, size, said, op, lengths = json.loads(name)
        return Collective(kind, group, size, said, None if op is None else getattr(dist.ReduceOp, op), tuple(lengths))

    def outcome(self, row: Tensor, lengths: Sequence[int]) -> Tensor:
        """What it gives, without data."""
        match self.kind:
            case "exchange":
                return row.new_empty(sum((lengths or self.lengths)[: self.size]))
            case "gather":
                return row.new_empty(row.numel() * self.size)
            case "reduce":
                return torch.empty_like(row)
            case _:
                return row.new_empty(row.numel() // self.size)

    def bound(self, handle: Any, lengths: Sequence[int], device_type: str) -> Issue:
        """Compared with other ranks' before anything is sent, as the eager collectives are."""
        ranks = dist.get_process_group_ranks(handle)
        group = Group(handle, tuple(range(self.size)), handle.rank(), None, backend_of(handle, device_type))
        arriving, leaving = list(lengths[: self.size]), list(lengths[self.size :])
        start = self._start(group, arriving, leaving)

        def issue(row: Tensor) -> Pending[Tensor]:
            into = self.outcome(row, lengths)
            return started(start(row, into), lambda: into)

        over = f"a graph of ranks {', '.join(map(str, ranks))}"
        run = watched(group, self.said, over, issue, compare_shape=not lengths, lengths=(leaving, arriving) if lengths else None)
        others = sum(arriving) - arriving[group.position] if lengths else None

        def reported(row: Tensor) -> Pending[Tensor]:
            if not (listeners or shows_ranges()):
                return run(row)
            nbytes = row.dtype.itemsize * (self._received(row.numel()) if others is None else others)
            kind = self.said.split("(")[0].split()[0]
            return reporting(Event(kind, (), self.size, nbytes, groups=(tuple(ranks),)), lambda: run(row), row)

        return reported

    def _start(self, group: Group, arriving: list[int], leaving: list[int]) -> Callable[[Tensor, Tensor], list[Ending]]:
        """What the backend does, of a row and into memory."""
        match self.kind:
            case "exchange":
                return lambda row, into: all_to_all_rows(group, into, row, arriving, leaving)
            case "gather":
                return lambda row, into: all_gather_rows(group, into, row)
            case "reduce":
                reduce = all_reduction(group, self.op)
                return lambda row, into: reduce(into.copy_(row))
        scatter = scattered_reduction(group, self.op)
        return lambda row, into: scatter(into, row)

    def _received(self, elements: int) -> int:
        """From the others, of rows of so many elements."""
        others = {"gather": elements, "reduce_scatter": elements // self.size}.get(self.kind)
        return reduced(elements, self.size) if others is None else others * (self.size - 1)


def _ended(row: Tensor, lengths: Sequence[int], what: str, after: Tensor | None = None) -> Tensor:
    """What the collective gives when it has ended; bound once for a group, which may be remade."""
    told = Collective.read(what)
    lengths, handle = tuple(lengths) or told.lengths, torch_internals.resolve_process_group(told.group)
    handle = beside(handle, row.device.type)
    key = (what, lengths, row.device.type)
    found = _BOUND.get(key)
    if found is None or found[0] is not handle:
        found = _BOUND.keep(key, (handle, told.bound(handle, lengths, row.device.type)))
    return found[1](row.contiguous()).wait()  # inductor may have laid it otherwise than it was traced


def _draw(
    make: str,
    given: list[Tensor],
    sizes: list[int],
    size: list[int],
    stride: list[int],
    dtype: torch.dtype,
    device: torch.device,
    after: Tensor | None = None,
) -> Tensor:
    made: Tensor = kept_object(make)(given, sizes)
    if list(made.stride()) == stride:
        return made
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(made)


def _checked(beside: Tensor, check: str, given: list[int], after: Tensor | None = None) -> Tensor:
    kept_object(check)(given)
    return beside.new_empty(0)


_RUN: dict[str, Callable[..., Any]] = {
    "check": _checked,
    "draw": _draw,
    "exchange": _ended,
    **dict.fromkeys(_OF_ROWS, lambda row, what, after=None: _ended(row, (), what)),
}
_WITHOUT_DATA: dict[str, Callable[..., Any]] = {
    "check": lambda beside, check, given, after=None: beside.new_empty(0),
    "draw": lambda make, given, sizes, size, stride, dtype, device, after=None: torch.empty_strided(
        size, stride, dtype=dtype, device=device
    ),
    "exchange": lambda row, lengths, what, after=None: Collective.read(what).outcome(row, lengths),
    **dict.fromkeys(_OF_ROWS, lambda row, what, after=None: Collective.read(what).outcome(row, ())),
}


def in_graph(name: str, *args: Any) -> Any:
    """The operator of this name, issued while a program is traced.

    It is given what the last one gave: inductor of torch 2.13 forgets that effects have an order, and issues them in that of
    their operands, which differs between ranks. The backward pass begins anew: it would keep a result for that alone.
    """
    operator, args = getattr(_operators(), name), as_torch_has_them(args)
    mode = torch_internals.infra_mode(_PROXY)
    if mode is None:
        return operator(*args)
    nodes, last, part = mode.tracer.graph.nodes, _LAST.setdefault(mode.tracer, {}), torch_internals.graph_task() >= 0
    before = len(nodes)
    last[part] = issued = operator(*args, after=last.get(part))
    for node in islice(reversed(nodes), len(nodes) - before):
        node.meta = _Saved(node.meta)
    return issued


class _Saved(dict[str, Any]):
    """What is known of a node whose result is kept, also where activation checkpointing marks all of its block as to be computed
    again: ranks would issue it twice, and not all of them."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, torch_internals.CheckpointPolicy.MUST_SAVE if key == "recompute" else value)


@cache
def _operators() -> Any:
    """``torch.ops.dtensor``, whose operators are defined when the first of them is traced."""
    for name, schema in _SCHEMAS.items():
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, _RUN[name], "CompositeExplicitAutograd")
        torch.library.register_fake(f"dtensor::{name}", _WITHOUT_DATA[name], lib=_LIBRARY)
        _LIBRARY._register_effectful_op(f"dtensor::{name}", torch_internals.EffectType.ORDERED)
    changed("torch.ops.dtensor")
    return torch.ops.dtensor


_BOUND: Bounded[Any, tuple[Any, Issue]] = Bounded(1024, "comm.graph_ops.collectives")
_PROXY = torch_internals.DISPATCH_MODE_KEYS.PROXY
_LAST: WeakKeyDictionary[Any, dict[bool, Any]] = WeakKeyDictionary()  # what the last one gave, by the graph's tracer
_LIBRARY = torch.library.Library("dtensor", "FRAGMENT")
