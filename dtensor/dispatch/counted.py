"""Under ``check_ranks("strict")`` operations count: what they are becomes part of what ranks compare at the next collective."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..base.caches import remembered
from ..base.tracing import has_no_values
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.schema import Operator
from ..watch import lines
from ..watch.ring import Ring, fingerprint
from ..watch.watching import operations_among
from . import wrapping

_KINDS = str | bool | int | float | complex | None | torch.dtype | torch.device | torch.layout | torch.memory_format


def counting(operator: Operator, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, an operator's dispatch, whose calls count."""

    def counted(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        ring, layouts = None, [value._layout for value in _tensors((*args, *(kwargs or {}).values()))]
        if layouts:
            mesh = layouts[0].mesh
            ring = operations_among(_ranks(mesh))
        if ring is None:
            return run(cls, func, types, args, kwargs)
        what = f"{func}({', '.join(_given(operator, args, kwargs or {}))})  {', '.join(map(_shown, layouts))}"
        ring.add(fingerprint(what), what, _over(mesh), lines.at(sys._getframe(1)))
        result = run(cls, func, types, args, kwargs)
        if operator.seeded:
            _mix_generator(ring, (kwargs or {}).get("generator") or torch.default_generator)
        return result

    return counted


def _mix_generator(ring: Ring, generator: torch.Generator) -> None:
    """What it draws next is to be the same on all ranks."""
    ring.mix(fingerprint(generator.get_state().numpy().tobytes()))


@remembered(64)
def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    """Those that hold a tensor together with this one; none where they are no processes."""
    if mesh.kind != "process_group":
        return frozenset()
    return frozenset(mesh.ranks[member] for member in mesh.members_of(range(mesh.ndim), mesh.current_member() or 0))


@remembered(64)
def _over(mesh: DeviceMesh) -> str:
    return repr(tuple(mesh.mesh_dim_names or range(mesh.ndim)))


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
