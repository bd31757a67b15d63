"""What rooms above provide, so that those below import none of them: what classes can do, found by name at the first call, and
what is prepared once somebody has a mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_MODULES: dict[str, str] = {}
_WAITING: list[Callable[[], None]] = []


def provided_by(module: str, *names: str) -> None:
    """Say which module has the functions of these names. The face of the package does, which may know every room."""
    _MODULES.update(dict.fromkeys(names, module))


def provided(name: str) -> Callable[..., Any]:
    """Return the function of this name; its module is imported at the first call."""
    found: Callable[..., Any] = getattr(import_module(_MODULES[name]), name)
    return found


def before_use(action: Callable[[], None]) -> None:
    """Run ``action`` before the first mesh, or the first tensors of all ranks, are made: it takes its time."""
    _WAITING.append(action)


def in_use() -> None:
    """Run what waits for that."""
    while _WAITING:
        try:
            action = _WAITING.pop()
        except IndexError:  # another thread was faster
            return
        action()


def pictured(x: Any) -> str:
    """What a notebook shows: the ``_repr_html_`` of what has a picture."""
    return str(provided("html_of")(x))
