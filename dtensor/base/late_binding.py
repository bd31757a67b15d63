"""Late binding: functions of upper packages that lower packages call by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_PROVIDERS: dict[str, str] = {}


def register_provider(module: str, *names: str) -> None:
    """Register ``module`` as the provider of functions. Only the package root calls this: it may import every package."""
    _PROVIDERS.update(dict.fromkeys(names, module))


def resolve_late(name: str) -> Callable[..., Any]:
    """Return the function with this name and import its module."""
    function: Callable[..., Any] = getattr(import_module(_PROVIDERS[name]), name)
    return function


def html_repr(x: Any) -> str:
    """Return the HTML of ``x``, for ``_repr_html_``."""
    return str(resolve_late("html_of")(x))
