"""Registry of rules by operator name: one rule serves all overloads, in-place and ``out=`` variants.

Modules of declarations, also those of the library, are registered by name and imported at the first look-up, not at import of the
package: half of the package is declarations.
"""

from __future__ import annotations

import sys
from importlib import import_module
from threading import RLock
from typing import Any

import torch

from ..base.caches import memoize
from ..errors import RuleError
from .rule import Rule

_RULES: dict[str, Rule] = {}
_FAMILIES: dict[str, str] = {}  # operator -> the module of dtensor.rules.aten that declares its rule
_TAGGED: dict[Any, Rule] = {}
_SEEDED = frozenset({torch.Tag.nondeterministic_seeded})
_READ_LOCK = RLock()
_UNREAD_MODULES: list[str] = []  # modules that declare rules


def add_rule_module(module: str) -> None:
    """Add a module that declares rules, so that the first rule look-up imports it."""
    _UNREAD_MODULES.append(module)


def load_rules() -> dict[str, Rule]:
    """Import the modules of rules that are not imported yet, and return the table of all rules by operator name."""
    if _UNREAD_MODULES:
        with _READ_LOCK:  # other threads wait: a partly loaded registry would give them other plans
            for module in tuple(_UNREAD_MODULES):
                import_module(module)
                _UNREAD_MODULES.remove(module)
    return _RULES


def register(names: str, rule: Rule) -> Rule:
    """Enter a rule in the registry under operator names, separated by spaces.

    ``"mm"`` is ``aten::mm``, ``"lib::op"`` another library's operator, and ``"op.overload"`` one overload only.

    Raises:
        RuleError: a name already has a rule.
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
    """Search the call stack for the operator family (``aten/`` module) that declares a rule; None if a program does."""
    frame = sys._getframe(1)
    while frame is not None:
        package, _, module = frame.f_globals.get("__name__", "").partition(".rules.aten.")
        if package == "dtensor" and module:
            return module.partition(".")[0]
        frame = frame.f_back  # type: ignore[assignment]  # None in the outermost frame
    return None


def family_of(name: str) -> str | None:
    """Return the operator family (``"pooling"``) of a rule of the library, by its full name (``"aten::avg_pool2d"``)."""
    load_rules()
    return _FAMILIES.get(name)


def register_for_tag(tag: Any, rule: Rule) -> None:
    """Enter a rule for all operators that have a tag of torch and no rule of their own, and are not random."""
    _TAGGED[tag] = rule


def unregister(name: str) -> None:
    """Remove the rule of one operator name."""
    load_rules().pop(name if "::" in name else f"aten::{name}", None)


def rules() -> dict[str, Rule]:
    """Return all registered rules by operator name (a copy)."""
    return dict(load_rules())


def lookup(func: Any) -> Rule | None:
    """Return the rule of an overload, or None if it has no rule.

    It is that of the overload, of its operator, of the operator of which it is the in-place variant, or of its tag.
    """
    registered = load_rules() if _UNREAD_MODULES else _RULES
    name = func._schema.name
    rule = registered.get(f"{name}.{overload_without_out(func) or 'default'}")
    if rule is not None:
        return rule
    rule = registered.get(name)
    if rule is None and name.endswith("_") and not name.endswith("__"):
        rule = registered.get(name[:-1])
    if rule is None and name.startswith("prims::"):  # decompositions of forward AD use prims operators
        aten_rule = registered.get(name.replace("prims::", "aten::"))
        rule = aten_rule if aten_rule is not None and aten_rule.kind == "pointwise" else None
    if rule is None and not _SEEDED.issubset(func.tags):
        rule = next((_TAGGED[tag] for tag in func.tags if tag in _TAGGED), None)
    return rule


@memoize(8192)
def overload_without_out(func: Any) -> str:
    """Return the overload's name. For an ``out=`` overload, that of the overload with the same arguments without ``out=``."""
    name = str(func._schema.overload_name)
    packet = getattr(func, "overloadpacket", None)
    if packet is None or not any(argument.is_out for argument in func._schema.arguments):
        return name
    types = _argument_types(func._schema)
    others = [other for other in packet.overloads() if not any(a.is_out for a in getattr(packet, other)._schema.arguments)]
    matching = [other for other in others if _argument_types(getattr(packet, other)._schema) == types]
    return name.removesuffix("_out") if not matching else matching[0].removeprefix("default")


def _argument_types(schema: Any) -> list[str]:
    return [str(argument.type) for argument in schema.arguments if not argument.is_out]
