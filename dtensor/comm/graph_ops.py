"""The collectives, draws and checks that stand in a compiled program's graph: one operator each, which has ended when it returns.

Every rank must issue the collectives of a program, in its order, once. Compilers drop what has no effect and no use, and a rank
may have no use for what it gets (the first one of a cumulative sum). They keep what has an effect wherever they copy a part of
the forward pass into the backward one, as ``wait_tensor`` of torch's functional collectives, and which part that is they choose
by sizes, which differ between uneven blocks. So these are effects in order, which torch neither drops nor copies nor exchanges.
Random numbers are such effects too: every rank advances its generator alike, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import torch_internals
from ..base.caches import Bounded
from ..base.symbols import as_torch_has_them
from ..base.told import changed
from ..base.tracing import kept_object
from ..mesh.groups import Group, backend_of
from .pending import Pending
from .transfer import Issue
from .watched import watched

_SCHEMAS = {
    "exchange": "(Tensor row, SymInt[] arriving, SymInt[] leaving, str said, str group) -> Tensor",
    "gather": "(Tensor row, int size, str said, str group) -> Tensor",
    "reduce": "(Tensor row, str op, str group) -> Tensor",
    "reduce_scatter": "(Tensor row, str op, int size, str said, str group) -> Tensor",
    "check": "(Tensor beside, str check, SymInt[] given) -> ()",
    "draw": "(str make, Tensor[] given, SymInt[] sizes, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device)"
    " -> Tensor",
}


def _exchange(row: Tensor, arriving: list[int], leaving: list[int], said: str, group: str) -> Tensor:
    return _ended("all_to_all_single", (tuple(arriving), tuple(leaving)), said, group, row)


def _gather(row: Tensor, size: int, said: str, group: str) -> Tensor:
    return _ended("all_gather_into_tensor", (size,), said, group, row)


def _reduce(row: Tensor, op: str, group: str) -> Tensor:
    return _ended("all_reduce", (op,), f"all_reduce({op})", group, row)


def _reduce_scatter(row: Tensor, op: str, size: int, said: str, group: str) -> Tensor:
    return _ended("reduce_scatter_tensor", (op, size), said, group, row)


def _ended(kind: str, args: tuple[Any, ...], said: str, name: str, row: Tensor) -> Tensor:
    """What torch's collective of this kind gives when it has ended; bound once for a group, which may be remade."""
    handle, key = torch_internals.resolve_process_group(name), (kind, args, said, name, row.device.type)
    kept = _BOUND.get(key)
    if kept is None or kept[0] is not handle:
        kept = _BOUND.keep(key, (handle, _watched(handle, *key)))
    ended: Tensor = kept[1](row).wait()
    return ended


def _watched(handle: Any, kind: str, args: tuple[Any, ...], said: str, name: str, device_type: str) -> Issue:
    """Compared with other ranks' before anything is sent, as the eager collectives are."""
    collective, wait = getattr(torch.ops._c10d_functional, kind).default, torch.ops._c10d_functional.wait_tensor.default
    ranks = dist.get_process_group_ranks(handle)
    group = Group(handle, tuple(range(len(ranks))), handle.rank(), None, backend_of(handle, device_type))

    def issue(row: Tensor) -> Pending[Tensor]:
        return Pending(partial(wait, collective(row, *args, name)))

    over = f"a graph of ranks {', '.join(map(str, ranks))}"
    own = (args[1], args[0]) if kind == "all_to_all_single" else None
    return watched(group, said, over, issue, shaped=own is None, own=own)


def _draw(
    make: str,
    given: list[Tensor],
    sizes: list[int],
    size: list[int],
    stride: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    made: Tensor = kept_object(make)(given, sizes)
    if list(made.stride()) == stride:
        return made
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(made)


_RUN: dict[str, Callable[..., Any]] = {
    "check": lambda beside, check, given: kept_object(check)(given),
    "exchange": _exchange,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "draw": _draw,
}
_WITHOUT_DATA: dict[str, Callable[..., Any]] = {
    "check": lambda beside, check, given: None,
    "exchange": lambda row, arriving, leaving, said, group: row.new_empty(sum(arriving)),
    "gather": lambda row, size, said, group: row.new_empty(row.numel() * size),
    "reduce": lambda row, op, group: torch.empty_like(row),
    "reduce_scatter": lambda row, op, size, said, group: row.new_empty(row.numel() // size),
    "draw": lambda make, given, sizes, size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype, device=device),
}


def in_graph(name: str, *args: Any) -> Any:
    """The operator of this name, issued while a program is traced."""
    tracer = torch_internals.infra_mode(_PROXY)
    nodes = () if tracer is None else tracer.tracer.graph.nodes
    before = len(nodes)
    issued = getattr(_operators(), name)(*as_torch_has_them(args))
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
_LIBRARY = torch.library.Library("dtensor", "FRAGMENT")
