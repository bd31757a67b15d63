"""A program's own calls of ``torch.distributed``, told to those who listen while :class:`dtensor.debug.CommDebugMode` is entered.

The library's collectives report themselves. Torch's, functional or in place, are operators, so a kernel in front of theirs sees
them; it is there only while somebody listens. What is part of a collective that is reported as a whole says nothing more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ..base.patches import Together
from ..base.tensor_tree import tensors
from ..base.torch_internals import DispatchKey, keys_after, resolve_process_group
from ..comm import events
from ..comm.events import Event


class Kind(NamedTuple):
    """What an operator counts as, and the argument whose bytes tell how much a rank receives."""

    name: str
    given: str


# "_" and "_out" forms of the first kind, too
FUNCTIONAL = {
    "all_reduce": Kind("all_reduce", "input"),
    "all_reduce_coalesced": Kind("all_reduce", "inputs"),
    "all_gather_into_tensor": Kind("all_gather", "input"),
    "all_gather_into_tensor_coalesced": Kind("all_gather", "inputs"),
    "reduce_scatter_tensor": Kind("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": Kind("reduce_scatter", "inputs"),
    "all_to_all_single": Kind("all_to_all", "input"),
    "broadcast": Kind("broadcast", "input"),
}
DIRECT = {
    "allreduce_": Kind("all_reduce", "tensors"),
    "allreduce_coalesced_": Kind("all_reduce", "tensors"),
    "allgather_": Kind("all_gather", "input_tensors"),
    "_allgather_base_": Kind("all_gather", "input_tensor"),
    "allgather_coalesced_": Kind("all_gather", "input_list"),
    "allgather_into_tensor_coalesced_": Kind("all_gather", "inputs"),
    "reduce_scatter_": Kind("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": Kind("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": Kind("reduce_scatter", "inputs"),
    "alltoall_": Kind("all_to_all", "output_tensors"),
    "alltoall_base_": Kind("all_to_all", "output"),
    "broadcast_": Kind("broadcast", "tensors"),
    "reduce_": Kind("reduce", "tensors"),
    "gather_": Kind("gather", "input_tensors"),
    "scatter_": Kind("scatter", "output_tensors"),
    "send": Kind("send", "tensors"),
    "recv_": Kind("recv", "tensors"),
    "recv_any_source_": Kind("recv", "tensors"),
    "barrier": Kind("barrier", "tensor"),
    "monitored_barrier_": Kind("barrier", "tensor"),
}
_SPACES = {
    "_c10d_functional": {name + end: kind for name, kind in FUNCTIONAL.items() for end in ("", "_", "_out")},
    "c10d": DIRECT,
}
_KEY = "BackendSelect"  # before all devices, in every mode
_BELOW = keys_after(DispatchKey.BackendSelect)
_LIBRARIES: list[torch.library.Library] = []


def kind_of(operator: str) -> str:
    """What an operator of torch's counts as; "" for one that does not communicate."""
    for kinds in _SPACES.values():
        if operator in kinds:
            return kinds[operator].name
    return "all_to_all" if operator == "shard_dim_alltoall" else ""  # of torch's own DTensor


def received(kind: str, given: int, size: int) -> int:
    """Bytes that a rank of ``size`` receives, having given so many (``"scatter"``, ``"recv"``: having room for them)."""
    if kind == "all_reduce":
        return events.reduced(given, size)
    if kind in ("all_gather", "gather"):
        return given * (size - 1)
    if kind in ("reduce_scatter", "all_to_all"):
        return given * (size - 1) // size
    return 0 if kind in ("send", "barrier") else given


def _received(kind: Kind, named: dict[str, Any], group: Any) -> int:
    given = [math.prod(x.shape) * x.element_size() for x in tensors(named[kind.given])]
    splits: Sequence[int] = named.get("output_split_sizes") or ()
    if kind.name == "all_to_all" and kind.given == "output_tensors":
        return sum(given) - given[group.rank()]
    if kind.name == "all_to_all" and splits:
        row = named[kind.given]
        return (sum(splits) - splits[group.rank()]) * math.prod(row.shape[1:]) * row.element_size()
    return received(kind.name, sum(given), group.size())


def _group_in(named: dict[str, Any]) -> Any:
    """The group, which functional collectives name; only private torch knows it by name."""
    if "process_group" in named:
        return dist.ProcessGroup.unbox(named["process_group"])
    group, resolve = named["group_name"], cast("Any", resolve_process_group)
    return resolve(group) if isinstance(group, str) else group


def _reporting(operator: Any, kind: Kind) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    @events.issuing  # the functional ones call the others
    def below(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keys & _BELOW, *args, **kwargs)

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if events.LISTENING and not events.reported():
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            group = _group_in(named)
            if group.size() > 1:
                ranks = tuple(dist.get_process_group_ranks(group))
                event = Event(kind.name, (), group.size(), _received(kind, named, group), direct=True, groups=(ranks,))
                return events.reporting(event, lambda: below(keys, *args, **kwargs))
        return below(keys, *args, **kwargs)

    return run


@contextmanager
def _kernels() -> Iterator[None]:
    """Inside, such calls are reported.

    Another thread may be on its way into a kernel, which then must not be taken away: with threads running it stays, and says
    nothing, until a mode is left without any.
    """
    for space, kinds in () if _LIBRARIES else _SPACES.items():
        library = torch.library.Library(space, "IMPL")
        _LIBRARIES.append(library)
        for name, kind in kinds.items():
            operator = getattr(getattr(torch.ops, space), name, None)
            if operator is not None:
                library.impl(name, _reporting(operator.default, kind), _KEY, with_keyset=True)
    yield
    if threading.active_count() == 1:
        for library in _LIBRARIES:
            library._destroy()
        _LIBRARIES.clear()


REPORTED = Together(_kernels)
