"""What classes can do that rooms above them provide: found by name at the first call, so that they import none of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_MODULES: dict[str, str] = {}


def provided_by(module: str, *names: str) -> None:
    """Say which module has the functions of these names. The face of the package does, which may know every room."""
    _MODULES.update(dict.fromkeys(names, module))


def provided(name: str) -> Callable[..., Any]:
    """The function of this name; its module is imported now if nobody has needed it yet."""
    return getattr(import_module(_MODULES[name]), name)


def pictured(x: Any) -> str:
    """What a notebook shows: the ``_repr_html_`` of what has a picture."""
    return str(provided("html_of")(x))
