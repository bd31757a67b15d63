"""The names that a function's code looks up, read from its instructions."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ..base.caches import remembered

_WHOLE = frozenset({"globals", "eval", "exec", "__globals__", "f_globals"})  # with which any variable of a module can be read
_COMPUTED = _WHOLE | {"vars", "dir", "attrgetter", "methodcaller", "__dict__", "__getattribute__"}  # and any attribute
_NAMED = frozenset({"getattr", "hasattr"})  # if the name is no constant
_IMPORTS = frozenset({"modules", "import_module", "__import__"})
_KINDS = frozenset({"isinstance", "issubclass"})
_OTHERS = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # of class bodies
_OF_IT = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "STORE_ATTR")  # what takes an attribute of what was loaded, and no more
_CALLS = ("PRECALL", "CALL", "CALL_FUNCTION")


class Names(NamedTuple):
    """What code looks up, with the functions defined in it.

    Attributes:
        variables: of its module (or builtins),
        attributes: of any object: by ``.name``, or by a string that it holds.
        modules: that it imports, or holds the names of.
        loose: variables and attributes that it hands on, so that their own attributes may be read elsewhere.
        whole: whether it can read any variable,
        computed: any attribute, and
        imports: any module.
        kinds: whether it asks for an object's class.
        codes: it, and the code of what is defined in it.
    """

    variables: tuple[str, ...]
    attributes: tuple[str, ...]
    modules: tuple[str, ...]
    loose: frozenset[str]
    whole: bool
    computed: bool
    imports: bool
    kinds: bool
    codes: frozenset[CodeType]


@remembered(4096)
def names_of(code: CodeType) -> Names:
    """The names in ``code``."""
    variables: dict[str, None] = {}
    attributes: dict[str, None] = {}
    modules: dict[str, None] = {}
    loose: set[str] = set()
    computed = imports = kinds = False
    for part in _codes(code):
        instructions = [*dis.get_instructions(part)]
        for place, instruction in enumerate(instructions):
            name, following = instruction.argval, instructions[place + 1 : place + 2]
            if instruction.opname == "IMPORT_NAME":
                modules[name] = None
            elif instruction.opname.endswith("_GLOBAL") or instruction.opname in _OTHERS:
                variables[name] = None
            elif instruction.opcode in dis.hasname:
                attributes[name] = None
            else:
                kinds = kinds or instruction.opname == "MATCH_CLASS"
                continue
            if not (following and following[0].opname in _OF_IT):
                loose.add(name)
            computed = computed or (name in _NAMED and not _is_constant(instructions, place))
            imports = imports or (name in _IMPORTS and not _of_constant(instructions, place))
        strings = dict.fromkeys(_strings(part.co_consts))
        attributes.update(dict.fromkeys(part for text in strings for part in text.split(".")))  # attrgetter("a.b") too
        if not _IMPORTS.isdisjoint((*variables, *attributes)):
            modules.update(strings)
    named = {*variables, *attributes}
    whole, computed = not _WHOLE.isdisjoint(named), computed or not _COMPUTED.isdisjoint(named)
    return Names(
        tuple(variables),
        tuple(attributes),
        tuple(modules),
        frozenset(loose),
        whole,
        computed,
        imports,
        kinds or not _KINDS.isdisjoint(variables),
        frozenset(_codes(code)),
    )


def _is_constant(instructions: list[dis.Instruction], place: int) -> bool:
    """Whether what is loaded at ``place`` is called at once, with a constant as its second argument."""
    depth, constant = 0, False
    for instruction in instructions[place + 1 :]:
        if instruction.opname in _CALLS and instruction.arg == depth:
            return constant
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return False
        before, depth = depth, depth + dis.stack_effect(instruction.opcode, instruction.arg)
        if depth < 1 and before:
            return False
        if depth == 2 or before == 2 > depth:
            constant = before == 1 and depth == 2 and instruction.opname == "LOAD_CONST"
    return False


def _of_constant(instructions: list[dis.Instruction], place: int) -> bool:
    """Whether what is loaded at ``place`` is indexed by a constant, called with one, or asked whether it has one."""
    following = [(one.opname, one.argval) for one in instructions[place + 1 : place + 4] if one.opname != "PUSH_NULL"]
    before = [(one.opname, one.argval) for one in instructions[max(place - 2, 0) : place]]
    if following and following[0][0] == "CONTAINS_OP":
        return any(kind == "LOAD_CONST" for kind, _ in before)
    (first, name), (second, _) = (*following, ("", None), ("", None))[:2]
    return first == "LOAD_CONST" and type(name) is str and second in ("BINARY_SUBSCR", "BINARY_OP", *_CALLS)


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


def paths_named(fn: FunctionType) -> Iterator[str]:
    """The modules that a function imports or names, absolutely or from where it stands; what they are in, too."""
    package = str(fn.__globals__.get("__package__") or "").split(".")
    above = [".".join(package[:length]) for length in range(len(package), 0, -1) if package[0]]
    for name in names_of(fn.__code__).modules:
        for path in (name, *(f"{prefix}.{name}" if name else prefix for prefix in above)):
            parts = path.split(".")
            yield from (".".join(parts[:length]) for length in range(1, len(parts) + 1))
