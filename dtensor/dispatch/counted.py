"""Operations count: what they are becomes part of what ranks compare at the next collective.

Under ``check_ranks("strict")`` each is taken down with its line and numbers. Under ``"watch"`` the plans that are looked up are
noted: but for views and what computes with copies alone, which a rank may do by itself (the first one prints a norm). What
autograd does when it stores a gradient counts nowhere: it copies or does not as somebody else holds a reference, a debugger too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..base.caches import Bounded, remembered
from ..base.torch_internals import AccumulateGrad, autograd_node, count_dispatch_modes
from ..base.tracing import has_no_values, under_way
from ..comm.watched import holders
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.schema import Operator
from ..watch import lines
from ..watch.levels import Level
from ..watch.ring import Trail, fingerprint
from ..watch.watching import operations_among
from . import wrapping
from .keys import TRUTHS

_MAIN = threading.main_thread().ident
_KINDS = str | bool | int | float | complex | None | torch.dtype | torch.layout | torch.memory_format


def counting(operator: Operator, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, an operator's dispatch, whose calls count."""

    def counted(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if isinstance(autograd_node(), AccumulateGrad):
            return run(cls, func, types, args, kwargs)
        ring, layouts = None, [value._layout for value in _tensors((*args, *(kwargs or {}).values()))]
        if layouts:
            mesh = layouts[0].mesh
            ring = operations_among(holders(mesh))
        if ring is None:
            return run(cls, func, types, args, kwargs)
        what = f"{func}({', '.join(_given(operator, args, kwargs or {}))})  {', '.join(map(_shown, layouts))}"
        ring.add(fingerprint(what), what, _over(mesh), lines.at(sys._getframe(1)))
        return run(cls, func, types, args, kwargs)

    return counted


def noting(operator: Operator, plans: dict[Any, Any]) -> Callable[[Any], Any]:
    """``plans.get``, whose calls count; not those of other threads, which come in no order, nor while a program is traced."""
    get, known, thread, modes = plans.get, Bounded[Any, Callable[[], None]](1024), threading.get_ident, count_dispatch_modes

    def find(signature: tuple[Any, ...]) -> Any:
        found = get(signature)
        if thread() == _MAIN and not (modes() and under_way()) and not isinstance(autograd_node(), AccumulateGrad):
            note = known.get(signature)
            if note is None:
                note = known.keep(signature, _note_of(operator, signature))
            note()
        return found

    return find


def _note_of(operator: Operator, signature: tuple[Any, ...]) -> Callable[[], Any]:
    """What notes a call. Ranks that hold copies of all operands do it each for itself."""
    ranks = _together(list(_layouts(signature)))
    if operator.is_view or len(ranks) < 2:
        return int
    trail = Level.trails.get(ranks) or Level.trails.setdefault(ranks, Trail(ranks))
    return trail.note(f"{operator.name}({', '.join(map(_part, signature))})")


def _together(layouts: list[Layout]) -> frozenset[int]:
    """The ranks along all mesh dims over which some of these tensors are parts or terms."""
    dims: dict[DeviceMesh, set[int]] = {}
    for layout in layouts:
        own = (dim for dim in range(layout.mesh.ndim) if not layout.placements[dim].is_replicate())
        dims.setdefault(layout.mesh, set()).update(own)
    return frozenset[int]().union(*(holders(mesh, tuple(sorted(along))) for mesh, along in dims.items()))


def _layouts(signature: Iterable[Any]) -> Iterator[Layout]:
    for part in signature:
        if isinstance(part, Layout):
            yield part
        elif isinstance(part, tuple):
            yield from _layouts(part)


def _part(part: Any) -> str:
    """A part of a plan's key in words."""
    if isinstance(part, tuple):
        values = [_part(value) for value in part if not isinstance(value, type)]  # beside the types that numbers have
        return values[0] if len(values) == 1 else f"[{', '.join(values)}]"
    if isinstance(part, Layout):
        return _shown(part)
    return part.__name__ if isinstance(part, type) else TRUTHS.get(part) or _said(part)


@remembered(64)
def _over(mesh: DeviceMesh) -> str:
    return repr(mesh.named(range(mesh.ndim)))


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is wrapping.TENSOR:
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _given(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """The static arguments by name, in words that are the same on all ranks."""
    for name, value in (*zip(operator.names, args, strict=False), *kwargs.items()):
        if type(value) is not wrapping.TENSOR:
            yield f"{name}={_said(value)}"


def _shown(layout: Layout) -> str:
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, layout.shape))}] ({', '.join(map(str, layout.placements))})"


def _said(value: Any) -> str:
    if type(value) is wrapping.TENSOR:
        return "*"
    if isinstance(value, torch.Tensor):
        if value.dim() or value.device.type != "cpu" or has_no_values(value):
            return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
        return repr(value.item())  # a number
    if isinstance(value, list | tuple):
        return _said(value[0]) if len(value) == 1 else f"[{', '.join(map(_said, value))}]"  # dim=[0] is dim=0
    if isinstance(value, torch.device):
        return value.type  # each rank has its own
    return repr(value) if isinstance(value, _KINDS) else type(value).__name__
