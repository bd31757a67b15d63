"""The names that a function's code looks up, read from its instructions."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ..base.caches import remembered

_WHOLE = frozenset({"globals", "eval", "exec"})  # builtins with which any variable of the module can be read
_COMPUTED = frozenset({"getattr", "hasattr", "vars", "dir", "attrgetter", "__dict__"})  # and any attribute
_OTHERS = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # of class bodies


class Names(NamedTuple):
    """What code looks up, with the functions defined in it.

    Attributes:
        variables: of its module (or builtins),
        attributes: of any object: by ``.name``, or by a string that it holds.
        modules: that it imports, or holds the names of.
        whole: whether it can read any variable, and
        computed: any attribute.
    """

    variables: tuple[str, ...]
    attributes: tuple[str, ...]
    modules: tuple[str, ...]
    whole: bool
    computed: bool


@remembered(4096)
def names_of(code: CodeType) -> Names:
    """The names in ``code``."""
    variables: dict[str, None] = {}
    attributes: dict[str, None] = {}
    modules: dict[str, None] = {}
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            if instruction.opname == "IMPORT_NAME":
                modules[instruction.argval] = None
            elif instruction.opname.endswith("_GLOBAL") or instruction.opname in _OTHERS:
                variables[instruction.argval] = None
            elif instruction.opcode in dis.hasname:
                attributes[instruction.argval] = None
        strings = dict.fromkeys(_strings(part.co_consts))
        attributes.update(dict.fromkeys(part for text in strings for part in text.split(".")))  # attrgetter("a.b") too
        if {"modules", "import_module", "__import__"} & {*variables, *attributes}:
            modules.update(strings)
    whole, computed = not _WHOLE.isdisjoint(variables), not _COMPUTED.isdisjoint((*variables, *attributes))
    return Names(tuple(variables), tuple(attributes), tuple(modules), whole, computed)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _strings(constants: Any) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _strings(constant)


def modules_named(fn: FunctionType) -> Iterator[ModuleType]:
    """The loaded modules that a function imports or names, absolutely or from where it stands."""
    package = str(fn.__globals__.get("__package__") or "").split(".")
    above = [".".join(package[:length]) for length in range(len(package), 0, -1) if package[0]]
    for name in names_of(fn.__code__).modules:
        for path in (name, *(f"{prefix}.{name}" if name else prefix for prefix in above)):
            parts = path.split(".")
            if path in sys.modules:
                yield from (sys.modules[".".join(parts[:length])] for length in range(1, len(parts) + 1))
