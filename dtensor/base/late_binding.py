"""Late binding: functions of upper packages that lower packages call by name, and hooks that run before the first mesh exists."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_PROVIDERS: dict[str, str] = {}
_FIRST_USE_HOOKS: list[Callable[[], None]] = []


def register_provider(module: str, *names: str) -> None:
    """Register ``module`` as the provider of functions. Only the package root calls this: it may import every package."""
    _PROVIDERS.update(dict.fromkeys(names, module))


def resolve_late(name: str) -> Callable[..., Any]:
    """Return the function with this name and import its module."""
    function: Callable[..., Any] = getattr(import_module(_PROVIDERS[name]), name)
    return function


def on_first_use(action: Callable[[], None]) -> None:
    """Register a hook that runs before the first mesh or the first ``PerRank`` is made. Imports that take long belong here."""
    _FIRST_USE_HOOKS.append(action)


def run_first_use_hooks() -> None:
    """Run and remove all hooks of :func:`on_first_use`."""
    while _FIRST_USE_HOOKS:
        try:
            action = _FIRST_USE_HOOKS.pop()
        except IndexError:  # another thread took the last hook
            return
        action()


def html_repr(x: Any) -> str:
    """Return the HTML of ``x``, for ``_repr_html_``."""
    return str(resolve_late("html_of")(x))
