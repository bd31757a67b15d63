"""Under ``check_ranks("strict")`` operations count: what they are becomes part of what ranks compare at the next collective."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..base.caches import remembered
from ..base.tracing import has_no_values
from ..comm.watched import holders
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.schema import Operator
from ..watch import lines
from ..watch.ring import fingerprint
from ..watch.watching import operations_among
from . import wrapping

_KINDS = str | bool | int | float | complex | None | torch.dtype | torch.device | torch.layout | torch.memory_format


def counting(operator: Operator, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, an operator's dispatch, whose calls count."""

    def counted(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
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
    return repr(value) if isinstance(value, _KINDS) else type(value).__name__
