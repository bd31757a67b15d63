"""A user's own functional collectives, told to those who listen while :class:`dtensor.debug.CommDebugMode` is entered.

The library's collectives report themselves. Torch's functional ones (``torch.distributed._functional_collectives``) are
operators, so a kernel in front of theirs sees them; it is there only while somebody listens. They name their group, and only
private torch knows it by name.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..comm import events
from ..comm.events import Event

_KEY = "BackendSelect"  # before all devices, in every mode
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_KINDS = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
_LOCK = threading.Lock()
_ENTERED = 0
_LIBRARY: torch.library.Library | None = None


def received(kind: str, given: int, size: int) -> int:
    """Bytes that a rank of ``size`` receives, having given so many."""
    if kind == "all_reduce":
        return events.reduced(given, size)
    if kind == "all_gather":
        return given * (size - 1)
    return given if kind == "broadcast" else given * (size - 1) // size


def _reporting(operator: Any, kind: str) -> Callable[..., Any]:
    place = [argument.name for argument in operator._schema.arguments].index("group_name")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        group = args[place] if place < len(args) else kwargs["group_name"]
        named: Any = torch._C._distributed_c10d._resolve_process_group
        size = (named(group) if isinstance(group, str) else group).size()
        given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        if size > 1:
            for x in given:
                events.report(Event(kind, (), size, received(kind, math.prod(x.shape) * x.element_size(), size)))
        return operator.redispatch(keys & _BELOW, *args, **kwargs)

    return run


def listen() -> None:
    """Report functional collectives from now on; calls nest."""
    global _ENTERED, _LIBRARY
    with _LOCK:
        _ENTERED += 1
        if _ENTERED > 1 or not dist.is_available():
            return
        _LIBRARY = torch.library.Library("_c10d_functional", "IMPL")
        for name, kind in _KINDS.items():
            for variant in (name, f"{name}_", f"{name}_coalesced", f"{name}_coalesced_", f"{name}_out"):
                operator = getattr(torch.ops._c10d_functional, variant, None)
                if operator is not None:
                    _LIBRARY.impl(variant, _reporting(operator.default, kind), _KEY, with_keyset=True)


def leave() -> None:
    """The end of a :func:`listen`."""
    global _ENTERED, _LIBRARY
    with _LOCK:
        _ENTERED -= 1
        if not _ENTERED and _LIBRARY is not None:
            _LIBRARY._destroy()
            _LIBRARY = None
