"""C10d calls: report a program's own calls of ``torch.distributed`` while a :class:`dtensor.debug.CommDebugMode` is active.

The library reports its own collectives. Collectives of torch, functional or in place, are operators. A kernel at a dispatch key
above theirs reports them. It is installed only while a mode is active. Calls inside a collective that the library already
reports are not reported again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ..base.patches import RefCountedPatch
from ..base.tensor_tree import tensor_leaves
from ..base.torch_internals import DispatchKey, keys_after, resolve_process_group
from ..comm import events
from ..comm.events import Event


class CollectiveKind(NamedTuple):
    """The kind of an operator, and the name of the argument with the size that determines the received bytes."""

    name: str
    argument: str


# operators of _c10d_functional, also with the suffixes "_" and "_out"
FUNCTIONAL = {
    "all_reduce": CollectiveKind("all_reduce", "input"),
    "all_reduce_coalesced": CollectiveKind("all_reduce", "inputs"),
    "all_gather_into_tensor": CollectiveKind("all_gather", "input"),
    "all_gather_into_tensor_coalesced": CollectiveKind("all_gather", "inputs"),
    "reduce_scatter_tensor": CollectiveKind("reduce_scatter", "input"),
    "reduce_scatter_tensor_coalesced": CollectiveKind("reduce_scatter", "inputs"),
    "all_to_all_single": CollectiveKind("all_to_all", "input"),
    "broadcast": CollectiveKind("broadcast", "input"),
}
DIRECT = {
    "allreduce_": CollectiveKind("all_reduce", "tensors"),
    "allreduce_coalesced_": CollectiveKind("all_reduce", "tensors"),
    "allgather_": CollectiveKind("all_gather", "input_tensors"),
    "_allgather_base_": CollectiveKind("all_gather", "input_tensor"),
    "allgather_coalesced_": CollectiveKind("all_gather", "input_list"),
    "allgather_into_tensor_coalesced_": CollectiveKind("all_gather", "inputs"),
    "reduce_scatter_": CollectiveKind("reduce_scatter", "input_tensors"),
    "_reduce_scatter_base_": CollectiveKind("reduce_scatter", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": CollectiveKind("reduce_scatter", "inputs"),
    "alltoall_": CollectiveKind("all_to_all", "output_tensors"),
    "alltoall_base_": CollectiveKind("all_to_all", "output"),
    "broadcast_": CollectiveKind("broadcast", "tensors"),
    "reduce_": CollectiveKind("reduce", "tensors"),
    "gather_": CollectiveKind("gather", "input_tensors"),
    "scatter_": CollectiveKind("scatter", "output_tensors"),
    "send": CollectiveKind("send", "tensors"),
    "recv_": CollectiveKind("recv", "tensors"),
    "recv_any_source_": CollectiveKind("recv", "tensors"),
    "barrier": CollectiveKind("barrier", "tensor"),
    "monitored_barrier_": CollectiveKind("barrier", "tensor"),
}
_NAMESPACES = {
    "_c10d_functional": {name + end: kind for name, kind in FUNCTIONAL.items() for end in ("", "_", "_out")},
    "c10d": DIRECT,
}
_DISPATCH_KEY = "BackendSelect"  # runs before the kernels of all devices, in every mode
_KEYS_BELOW = keys_after(DispatchKey.BackendSelect)
_LIBRARIES: list[torch.library.Library] = []


def collective_kind_of(operator: str) -> str:
    """Return the kind of collective that a torch operator issues, by its name; "" if it does not communicate."""
    for kinds in _NAMESPACES.values():
        if operator in kinds:
            return kinds[operator].name
    return "all_to_all" if operator == "shard_dim_alltoall" else ""  # used by torch's DTensor


def received_bytes(kind: str, nbytes: int, size: int) -> int:
    """Return the bytes that one rank receives in a collective of a group of ``size`` ranks.

    Args:
        nbytes: bytes of the input of one rank. For ``"scatter"`` and ``"recv"``: bytes of the output.
    """
    if kind == "all_reduce":
        return events.all_reduce_bytes(nbytes, size)
    if kind in ("all_gather", "gather"):
        return nbytes * (size - 1)
    if kind in ("reduce_scatter", "all_to_all"):
        return nbytes * (size - 1) // size
    return 0 if kind in ("send", "barrier") else nbytes


def _received_by_call(kind: CollectiveKind, arguments: dict[str, Any], group: Any) -> int:
    """Return the bytes that this rank receives in the program's own call of a collective."""
    sizes = [math.prod(x.shape) * x.element_size() for x in tensor_leaves(arguments[kind.argument])]
    splits: Sequence[int] = arguments.get("output_split_sizes") or ()
    if kind.name == "all_to_all" and kind.argument == "output_tensors":
        return sum(sizes) - sizes[group.rank()]
    if kind.name == "all_to_all" and splits:
        row = arguments[kind.argument]
        return (sum(splits) - splits[group.rank()]) * math.prod(row.shape[1:]) * row.element_size()
    return received_bytes(kind.name, sum(sizes), group.size())


def _group_of_call(arguments: dict[str, Any]) -> Any:
    """Return the process group of a collective's arguments. Functional collectives pass its name."""
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    group, resolve = arguments["group_name"], cast("Any", resolve_process_group)
    return resolve(group) if isinstance(group, str) else group


def _make_reporting_kernel(operator: Any, kind: CollectiveKind) -> Callable[..., Any]:
    """Return a kernel that reports the program's own collective calls to listeners, then runs the collective."""
    names = [argument.name for argument in operator._schema.arguments]

    @events.mark_reported  # functional collectives call those of c10d
    def redispatch(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return operator.redispatch(keys & _KEYS_BELOW, *args, **kwargs)

    def report_and_redispatch(keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Report a direct c10d call to listeners, then run it; a call inside a reported one is not reported again."""
        if events.LISTENING and not events.is_reported():
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            group = _group_of_call(arguments)
            if group.size() > 1:
                ranks = tuple(dist.get_process_group_ranks(group))
                event = Event(
                    kind.name, (), group.size(), _received_by_call(kind, arguments, group), direct=True, groups=(ranks,)
                )
                return events.issue_reported(event, lambda: redispatch(keys, *args, **kwargs))
        return redispatch(keys, *args, **kwargs)

    return report_and_redispatch


@contextmanager
def _reporting_kernels() -> Iterator[None]:
    """Install the kernels that report the program's own collective calls, and remove them at the end of the block.

    Another thread may be entering a kernel, which must then not be destroyed. If other threads run at the end, the kernels stay
    installed and report nothing. They are removed at the next end without other threads.
    """
    for space, kinds in () if _LIBRARIES else _NAMESPACES.items():
        library = torch.library.Library(space, "IMPL")
        _LIBRARIES.append(library)
        for name, kind in kinds.items():
            operator = getattr(getattr(torch.ops, space), name, None)
            if operator is not None:
                library.impl(name, _make_reporting_kernel(operator.default, kind), _DISPATCH_KEY, with_keyset=True)
    yield
    if threading.active_count() == 1:
        for library in _LIBRARIES:
            library._destroy()
        _LIBRARIES.clear()


REPORT_C10D_CALLS = RefCountedPatch(_reporting_kernels)
