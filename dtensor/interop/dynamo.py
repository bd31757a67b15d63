"""The library's own frames, kept from being compiled: ``torch.compile`` of a program with DTensors breaks the graph at each.

A compiler that looked into these functions would trace how locals are handled (per rank, in one process) instead of the
program, and lost gradients or failed on the way. What they call runs as it is, too; the user's own frames are compiled as ever.
Two things are told: frame evaluation, that frames of ours are not compiled; and Dynamo, that calls of ours are not inlined. The
latter is a module of a second's import, so it is told when somebody else imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from ..base.torch_internals import eval_frame, opaque_object
from .when_imported import when_imported

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_DONE: set[str] = set()


def keep_from_inlining() -> None:
    """Tell Dynamo, now or when it comes, that no function of this package is looked into."""
    when_imported("torch._dynamo.trace_rules", lambda module: module.add("dtensor"))


def no_opaque_type(kind: type) -> None:
    """Tell Dynamo that objects of this class are ordinary ones.

    It takes torch's device mesh, and so a subclass, for something that graphs pass around, with attributes that ours lacks.
    Torch 2.11 looks at the class itself only.
    """
    if hasattr(opaque_object, "_resolve_opaque_type_info"):
        opaque_object._OPAQUE_TYPES[kind] = None  # found before the entries of its bases


def written_in_python(kind: type) -> None:
    """Give ``kind`` its operators in place (``x += y``) as functions of this package, at which a compiled graph breaks.

    Dynamo of torch 2.13 looks up those written in C for ever.
    """
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]:
        setattr(kind, f"__i{name}__", _forwarding(getattr(kind, f"__i{name}__")))


def _forwarding(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def in_place(self: Any, other: Any) -> Any:
        return method(self, other)

    in_place.__name__ = method.__name__
    return in_place


def leave_untraced(package: str) -> None:
    """Mark all functions of the modules of ``package`` that are loaded and not yet marked."""
    for name, module in list(sys.modules.items()):
        if (name == package or name.startswith(f"{package}.")) and name not in _DONE:
            _DONE.add(name)
            for value in list(vars(module).values()):
                members = list(vars(value).values()) if isinstance(value, type) and value.__module__ == name else [value]
                for code in {code for member in members for code in _codes(member, module.__file__)}:
                    eval_frame.set_code_exec_strategy(code, _SKIP)


def _codes(value: Any, file: str | None) -> Iterator[CodeType]:
    """The code of a function, method or property of this file, and of the functions inside it."""
    for inner in ("__func__", "fget", "__wrapped__"):
        value = getattr(value, inner, value) if not isinstance(value, type) else None
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType) and code.co_filename == file:
        yield from _inner(code)


def _inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _inner(value)
