"""Which rules are meant: by an operator, by a name in any spelling, by a pattern, by the module that declares them."""

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
from ..propagation.op_schema import overload_of
from ..rules import rules
from .samples import full_name
from .variants import exists


def rule_name(op: Any) -> str:
    """The name in the registry of an operator, or of one that is named: ``"mm"``, ``"aten::mm"``, ``"acme.halve"``.

    Raises:
        RuleError: there is no such operator; near names stand in the message.
    """
    if not isinstance(op, str):
        return _of_operator(op)
    known = rules()
    spelled = [full_name(op)] + [op.replace(".", "::", 1)] * ("::" not in op and "." in op)
    for name in spelled:
        if name in known or f"{name}.default" in known:
            return name if name in known else f"{name}.default"
    for name in spelled:
        if exists(name.replace("::", ".")):
            return name
    raise RuleError(f"torch has no operator {full_name(op)!r}, and no rule has that name{_near(op)}")


def _of_operator(op: Any) -> str:
    overload, known = overload_of(op), rules()
    if overload is None:
        return str(op._qualified_op_name)
    name, which = overload._schema.name, overload._schema.overload_name
    own = f"{name}.{which or 'default'}"
    return own if own in known else f"{name}.{which}" if which else str(name)


def _near(word: str) -> str:
    """The names that look like this one."""
    known = {form: name for name in rules() for form in (name.partition("::")[2], name, name.replace("::", "."))}
    found = dict.fromkeys(known[form] for form in get_close_matches(word, list(known), n=5))
    return f"; did you mean {', '.join(found)}?" if found else ""


def rules_asked(words: Iterable[str]) -> list[str]:
    """The names of the rules that the words of a command line mean, in order.

    A word is a pattern as of ``fnmatch`` (``"mm"``, ``"*softmax*"``, ``"acme::*"``); the name of a module or a file ending in
    ``.py``, which is imported; or a module and a pattern, ``"my.module::halve"``. Modules alone mean the rules that they declare.

    Raises:
        RuleError: a word means nothing, or a module declares no rule.
    """
    before, patterns, modules = rules(), [], []
    for word in words:
        module, _, pattern = word.rpartition("::") if "::" in word else (word, "", "")
        if _matching(word) or "*" in module or not _is_module(module):
            patterns.append(word)
            continue
        _import(module)
        modules.append(module)
        patterns += [f"*::{pattern}"] if pattern else []
    if modules and not patterns:
        declared = sorted(name for name, rule in rules().items() if before.get(name) is not rule)
        if not declared:
            raise RuleError(f"{', '.join(modules)} declares no rule; declare one with dtensor.register_sharding")
        return declared
    return list(dict.fromkeys(name for pattern in patterns or ["*"] for name in _found(pattern)))


def _found(pattern: str) -> list[str]:
    found = _matching(pattern)
    return found if found else [rule_name(pattern.removeprefix("*::"))]


def _matching(pattern: str) -> list[str]:
    known = sorted(rules())
    forms = {name: {name, name.removeprefix("aten::"), name.removesuffix(".default")} for name in known}
    return [name for name in known if any(fnmatch(form, pattern) for form in forms[name])]


def _is_module(word: str) -> bool:
    if word.endswith(".py"):
        return True
    try:
        return importlib.util.find_spec(word) is not None
    except (ImportError, ValueError):
        return False


def _import(word: str) -> None:
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
