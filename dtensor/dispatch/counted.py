"""Under ``check_ranks("strict")`` operations count: what they are becomes part of what ranks compare at the next collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.caches import remembered
from ..mesh.device_mesh import DeviceMesh
from ..watch.chain import count
from . import wrapping


def counting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, an operator's dispatch, whose calls count."""

    def counted(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = [*map(_said, args), *(f"{key}={_said(value)}" for key, value in (kwargs or {}).items())]
        at = next((value for value in args if type(value) is wrapping.TENSOR), None)
        if at is not None:
            count(_ranks(at._layout.mesh), f"{name}({', '.join(given)})")
        return run(cls, func, types, args, kwargs)

    return counted


@remembered(64)
def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    """Those that hold a tensor together with this one; none where they are no processes."""
    if mesh.kind != "process_group":
        return frozenset()
    return frozenset(mesh.ranks[member] for member in mesh.members_of(range(mesh.ndim), mesh.current_member() or 0))


def _said(value: Any) -> str:
    """An argument, in words that are the same on all ranks."""
    if type(value) is wrapping.TENSOR:
        return repr(value._layout)
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_said, value))}]"
    return repr(value) if isinstance(value, str | bool | int | float | complex | None | torch.dtype) else type(value).__name__
