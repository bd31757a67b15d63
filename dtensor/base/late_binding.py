"""Late binding: functions of upper packages that lower packages call by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_PROVIDERS: dict[str, str] = {}


def register_provider(module: str, *names: str) -> None:
    """Register ``module`` as the provider of the functions ``names``. Only the package root, which may import all, calls it."""
    _PROVIDERS.update(dict.fromkeys(names, module))


def resolve_late(name: str) -> Callable[..., Any]:
    """Import the module that provides the function ``name``, and return the function."""
    function: Callable[..., Any] = getattr(import_module(_PROVIDERS[name]), name)
    return function


def html_repr(x: Any) -> str:
    """Return the HTML of ``x``, for ``_repr_html_``."""
    return str(resolve_late("html_of")(x))
