"""Bytecode names: the variables, attributes and modules that a function looks up, read from its instructions."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ...base.caches import memoize

_ANY_VARIABLE = frozenset({"globals", "eval", "exec", "__globals__", "f_globals"})  # give access to all variables of a module
_ANY_ATTRIBUTE = _ANY_VARIABLE | {"vars", "dir", "attrgetter", "methodcaller", "__dict__", "__getattribute__"}
_BY_NAME = frozenset({"getattr", "hasattr"})  # access to any attribute, unless the name is a constant
_IMPORTS = frozenset({"modules", "import_module", "__import__"})
_CLASS_CHECKS = frozenset({"isinstance", "issubclass"})
_CLASS_BODY_LOADS = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE_ACCESS = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "STORE_ATTR")
_ATTRIBUTE_WRITES = ("STORE_ATTR", "DELETE_ATTR")
_CALLS = ("PRECALL", "CALL", "CALL_FUNCTION")


class CodeNames(NamedTuple):
    """The names that a code object looks up, together with the functions defined in it.

    Attributes:
        variables: global variables or builtins.
        attributes: attributes of any object, by ``.name``, or by a string constant.
        read_attributes: those of them that it does not only assign.
        modules: modules that it imports, or has the names of.
        escaping: variables and attributes that it passes on. Other code may read their attributes.
        reads_any_variable: whether it may read any global variable.
        computes_attributes: whether it may read any attribute.
        computes_imports: whether it may import any module.
        checks_classes: whether it checks the class of an object.
        codes: the code object and those of the functions defined in it.
    """

    variables: tuple[str, ...]
    attributes: tuple[str, ...]
    read_attributes: frozenset[str]
    modules: tuple[str, ...]
    escaping: frozenset[str]
    reads_any_variable: bool
    computes_attributes: bool
    computes_imports: bool
    checks_classes: bool
    codes: frozenset[CodeType]


@memoize(4096)
def read_code_names(code: CodeType) -> CodeNames:
    """Return the names that ``code`` looks up."""
    variables: dict[str, None] = {}
    attributes: dict[str, None] = {}
    modules: dict[str, None] = {}
    escaping: set[str] = set()
    read_attributes: set[str] = set()
    computes_attributes = computes_imports = checks_classes = False
    for part in _nested_codes(code):
        instructions = [*dis.get_instructions(part)]
        for place, instruction in enumerate(instructions):
            name, following = instruction.argval, instructions[place + 1 : place + 2]
            if instruction.opname == "IMPORT_NAME":
                modules[name] = None
            elif instruction.opname.endswith("_GLOBAL") or instruction.opname in _CLASS_BODY_LOADS:
                variables[name] = None
            elif instruction.opcode in dis.hasname:
                attributes[name] = None
                if instruction.opname not in _ATTRIBUTE_WRITES:
                    read_attributes.add(name)
            else:
                checks_classes = checks_classes or instruction.opname == "MATCH_CLASS"
                continue
            if not (following and following[0].opname in _ATTRIBUTE_ACCESS):
                escaping.add(name)
            computes_attributes = computes_attributes or (name in _BY_NAME and not _is_called_with_name(instructions, place))
            computes_imports = computes_imports or (name in _IMPORTS and not _is_used_with_constant(instructions, place))
        strings = dict.fromkeys(_string_constants(part.co_consts))
        words = dict.fromkeys(part for text in strings for part in text.split("."))  # as for attrgetter("a.b")
        attributes.update(words)
        read_attributes.update(words)
        if not _IMPORTS.isdisjoint((*variables, *attributes)):
            modules.update(strings)
    names = {*variables, *attributes}
    return CodeNames(
        tuple(variables),
        tuple(attributes),
        frozenset(read_attributes),
        tuple(modules),
        frozenset(escaping),
        reads_any_variable=not _ANY_VARIABLE.isdisjoint(names),
        computes_attributes=computes_attributes or not _ANY_ATTRIBUTE.isdisjoint(names),
        computes_imports=computes_imports,
        checks_classes=checks_classes or not _CLASS_CHECKS.isdisjoint(variables),
        codes=frozenset(_nested_codes(code)),
    )


def _is_called_with_name(instructions: list[dis.Instruction], place: int) -> bool:
    """Return True if the function loaded at ``place`` is called at once, with a constant as its second argument."""
    depth, is_constant = 0, False
    for instruction in instructions[place + 1 :]:
        if instruction.opname in _CALLS and instruction.arg == depth:
            return is_constant
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return False
        before, depth = depth, depth + dis.stack_effect(instruction.opcode, instruction.arg)
        if depth < 1 and before:
            return False
        if depth == 2 or before == 2 > depth:
            is_constant = before == 1 and depth == 2 and instruction.opname == "LOAD_CONST"
    return False


def _is_used_with_constant(instructions: list[dis.Instruction], place: int) -> bool:
    """Return True if the object loaded at ``place`` is indexed by a constant, called with one, or the right side of ``in``."""
    following = [(one.opname, one.argval) for one in instructions[place + 1 : place + 4] if one.opname != "PUSH_NULL"]
    preceding = [(one.opname, one.argval) for one in instructions[max(place - 2, 0) : place]]
    if following and following[0][0] == "CONTAINS_OP":
        return any(opname == "LOAD_CONST" for opname, _ in preceding)
    (first, name), (second, _) = (*following, ("", None), ("", None))[:2]
    return first == "LOAD_CONST" and type(name) is str and second in ("BINARY_SUBSCR", "BINARY_OP", *_CALLS)


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_codes(constant)


def _string_constants(constants: Any) -> Iterator[str]:
    """Yield the strings among the constants of code, at any depth."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _string_constants(constant)


def imported_module_names(fn: FunctionType) -> Iterator[str]:
    """Yield the names of the modules that a function imports or names, and of their packages.

    A name may be relative, so it is also tried in each package around the function.
    """
    package = str(fn.__globals__.get("__package__") or "").split(".")
    packages = [".".join(package[:length]) for length in range(len(package), 0, -1) if package[0]]
    for name in read_code_names(fn.__code__).modules:
        for path in (name, *(f"{prefix}.{name}" if name else prefix for prefix in packages)):
            parts = path.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
