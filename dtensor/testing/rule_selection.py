"""Rule selection: find rules by operator, by name in any spelling, by pattern, or by the module that declares them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import RuleError
from ..propagation.op_schema import resolve_overload
from ..rules import rules
from .call_variants import operator_exists
from .samples import full_name


def rule_name(op: Any) -> str:
    """Return the registered name of the rule of an operator, given as an object or as ``"mm"``, ``"aten::mm"``.

    Raises:
        RuleError: there is no such operator; the message suggests similar names.
    """
    if not isinstance(op, str):
        return _name_of_operator(op)
    known = rules()
    spellings = [full_name(op)] + [op.replace(".", "::", 1)] * ("::" not in op and "." in op)
    for name in spellings:
        if name in known or f"{name}.default" in known:
            return name if name in known else f"{name}.default"
    for name in spellings:
        if operator_exists(name.replace("::", ".")):
            return name
    raise RuleError(f"torch has no operator {full_name(op)!r}, and no rule has that name{_suggestion_text(op)}")


def _name_of_operator(op: Any) -> str:
    """Return the name under which rules are registered for an operator."""
    overload, known = resolve_overload(op), rules()
    if overload is None:
        return str(op._qualified_op_name)
    name, which = overload._schema.name, overload._schema.overload_name
    full = f"{name}.{which or 'default'}"
    return full if full in known else f"{name}.{which}" if which else str(name)


def _suggestion_text(word: str) -> str:
    """Return a suggestion of similar names for an error message; "" if there are none."""
    name_of = {form: name for name in rules() for form in (name.partition("::")[2], name, name.replace("::", "."))}
    names = dict.fromkeys(name_of[form] for form in get_close_matches(word, list(name_of), n=5))
    return f"; did you mean {', '.join(names)}?" if names else ""


def select_rules(words: Iterable[str]) -> list[str]:
    """Return the names of the rules that command-line words select: patterns, modules or files that declare rules.

    A word is a pattern as in ``fnmatch`` (``"mm"``, ``"*softmax*"``, ``"acme::*"``). Or it is the name of a module or of a
    ``.py`` file, which is imported. Or it is both: ``"my.module::halve"``. Modules alone select the rules that they declare.

    Raises:
        RuleError: a word selects nothing, or a module declares no rule.
    """
    rules_before, patterns, modules = rules(), [], []
    for word in words:
        module, _, pattern = word.rpartition("::") if "::" in word else (word, "", "")
        if _matching_rules(word) or "*" in module or not _is_module(module):
            patterns.append(word)
            continue
        _import_module(module)
        modules.append(module)
        patterns += [f"*::{pattern}"] if pattern else []
    if modules and not patterns:
        declared = sorted(name for name, rule in rules().items() if rules_before.get(name) is not rule)
        if not declared:
            raise RuleError(f"{', '.join(modules)} declares no rule; declare one with dtensor.register_sharding")
        return declared
    selected: dict[str, None] = {}
    for pattern in patterns or ["*"]:
        selected |= dict.fromkeys(_matching_rules(pattern) or [rule_name(pattern.removeprefix("*::"))])
    return list(selected)


def _matching_rules(pattern: str) -> list[str]:
    """Return the sorted names of registered rules that match the ``fnmatch`` pattern in full or without ``aten::``."""
    known = sorted(rules())
    forms = {name: {name, name.removeprefix("aten::"), name.removesuffix(".default")} for name in known}
    return [name for name in known if any(fnmatch(form, pattern) for form in forms[name])]


def _is_module(word: str) -> bool:
    """Return True if ``word`` is the name of a ``.py`` file or of an importable module."""
    if word.endswith(".py"):
        return True
    try:
        return importlib.util.find_spec(word) is not None
    except (ImportError, ValueError):
        return False


def _import_module(word: str) -> None:
    """Import a module by name, or a file by its path."""
    if not word.endswith(".py"):
        importlib.import_module(word)
        return
    path = Path(word)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise RuleError(f"there is no file {word}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
