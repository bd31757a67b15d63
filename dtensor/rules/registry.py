"""Where rules are found: by operator name, for all its overloads, in-place and ``out=`` variants.

Modules of declarations, the library's own among them, are named here and read at the first question, not at import: half of the
package is declarations.
"""

from __future__ import annotations

import sys
from importlib import import_module
from threading import RLock
from typing import Any

import torch

from ..base.caches import remembered
from ..errors import RuleError
from .rule import Rule

_RULES: dict[str, Rule] = {}
_FAMILIES: dict[str, str] = {}  # operator -> the module of dtensor.rules.aten that declares its rule
_TAGGED: dict[Any, Rule] = {}
_SEEDED = frozenset({torch.Tag.nondeterministic_seeded})
_reading = RLock()
_unread: list[str] = []  # modules that declare rules


def read_from(module: str) -> None:
    """Say which module declares rules when it is imported."""
    _unread.append(module)


def read_all() -> dict[str, Rule]:
    """The rules, those of modules that were not read yet among them."""
    if _unread:
        with _reading:  # who comes meanwhile waits: half of the rules would be another plan
            for module in tuple(_unread):
                import_module(module)
                _unread.remove(module)
    return _RULES


def register(names: str, rule: Rule) -> Rule:
    """Declare ``rule`` for operators (``"mm"`` is ``aten::mm``; ``"lib::op"``; ``"op.overload"`` for one overload only).

    Raises:
        RuleError: a name has a rule already.
    """
    for name in names.split():
        full = name if "::" in name else f"aten::{name}"
        if full in _RULES:
            raise RuleError(f"{full} has a rule already; unregister it first")
        _RULES[full] = rule
        if (family := _declaring_family()) is not None:
            _FAMILIES[full] = family
    return rule


def _declaring_family() -> str | None:
    """Return the module name below ``dtensor.rules.aten`` that is calling, or None if a program declares the rule."""
    frame = sys._getframe(1)
    while frame is not None:
        package, _, module = frame.f_globals.get("__name__", "").partition(".rules.aten.")
        if package == "dtensor" and module:
            return module.partition(".")[0]
        frame = frame.f_back  # type: ignore[assignment]  # None in the outermost frame
    return None


def family_of(name: str) -> str | None:
    """Return the operator family (``"pooling"``) of a rule of the library, by its full name (``"aten::avg_pool2d"``)."""
    read_all()
    return _FAMILIES.get(name)


def register_tagged(tag: Any, rule: Rule) -> None:
    """Declare ``rule`` for operators without one of their own that say by a tag of torch what they are (and draw nothing)."""
    _TAGGED[tag] = rule


def unregister(name: str) -> None:
    """Forget the rule of one operator name."""
    read_all().pop(name if "::" in name else f"aten::{name}", None)


def rules() -> dict[str, Rule]:
    """All registered rules by operator name (a copy)."""
    return dict(read_all())


def lookup(func: Any) -> Rule | None:
    """The rule for an operator overload: its own, its operator's, that of the one it is an in-place variant of, or of its tag."""
    known = read_all() if _unread else _RULES
    name = func._schema.name
    found = known.get(f"{name}.{overload_served(func) or 'default'}")
    if found is not None:
        return found
    found = known.get(name)
    if found is None and name.endswith("_") and not name.endswith("__"):
        found = known.get(name[:-1])
    if found is None and name.startswith("prims::"):  # torch's decompositions in forward mode, in words of their own
        same = known.get(name.replace("prims::", "aten::"))
        found = same if same is not None and same.kind == "pointwise" else None
    if found is None and not _SEEDED.issubset(func.tags):
        found = next((_TAGGED[tag] for tag in func.tags if tag in _TAGGED), None)
    return found


@remembered(8192)
def overload_served(func: Any) -> str:
    """The overload's name; that of the one without ``out=`` that takes the same arguments, where it has such a form."""
    name = str(func._schema.overload_name)
    packet = getattr(func, "overloadpacket", None)
    if packet is None or not any(argument.is_out for argument in func._schema.arguments):
        return name
    taken = _taken(func._schema)
    others = [other for other in packet.overloads() if not any(a.is_out for a in getattr(packet, other)._schema.arguments)]
    same = [other for other in others if _taken(getattr(packet, other)._schema) == taken]
    return name.removesuffix("_out") if not same else same[0].removeprefix("default")


def _taken(schema: Any) -> list[str]:
    return [str(argument.type) for argument in schema.arguments if not argument.is_out]
