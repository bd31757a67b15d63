"""Late binding: functions of upper packages that lower packages call by name, and hooks that run before the first mesh exists."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_PROVIDERS: dict[str, str] = {}
_FIRST_USE_HOOKS: list[Callable[[], None]] = []


def provided_by(module: str, *names: str) -> None:
    """Register ``module`` as the provider of the functions ``names``. Only the package root calls this: it may import every
    package.
    """
    _PROVIDERS.update(dict.fromkeys(names, module))


def provided(name: str) -> Callable[..., Any]:
    """Return the function with this name and import its module."""
    function: Callable[..., Any] = getattr(import_module(_PROVIDERS[name]), name)
    return function


def before_use(action: Callable[[], None]) -> None:
    """Register a hook that runs before the first mesh or the first ``PerRank`` is made. Imports that take long belong here."""
    _FIRST_USE_HOOKS.append(action)


def in_use() -> None:
    """Run and remove all hooks of :func:`before_use`."""
    while _FIRST_USE_HOOKS:
        try:
            action = _FIRST_USE_HOOKS.pop()
        except IndexError:  # another thread took the last hook
            return
        action()


def pictured(x: Any) -> str:
    """Return the HTML of ``x``, for ``_repr_html_``."""
    return str(provided("html_of")(x))
