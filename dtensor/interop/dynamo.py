"""The library's own frames, kept from being compiled: ``torch.compile`` of a program with DTensors breaks the graph at each.

A compiler that looked into these functions would trace how locals are handled (per rank, in one process) instead of the
program, and lost gradients or failed on the way. What they call runs as it is, too; the user's own frames are compiled as ever.
Two things are told: frame evaluation, that frames of ours are not compiled; and Dynamo, that calls of ours are not inlined. Both
when somebody else imports Dynamo, which takes a second: until then nobody evaluates frames.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from ..base.patches import changed
from ..base.torch_internals import eval_frame
from .import_hooks import when_imported

_TOLD = "torch._dynamo.trace_rules"
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_DONE: set[str] = set()

# Values whose methods are answered at once (see compiled.py), the functions around modules, which are the program's own, and the
# mode of map_ranks, which lets pass what is compiled.
LOOKED_INTO = frozenset(
    {
        "interop/torch_compile",
        "layout/layout",
        "mesh/device_mesh",
        "mesh/geometry",
        "parallel/tensor/colwise_rowwise",
        "parallel/tensor/loss",
        "parallel/tensor/prepare_io",
        "parallel/tensor/shared_input",
        "parallel/tensor/style",
        "placement",
        "ranks/run_mode",
        "tensor/local_map",
    }
)


def keep_from_inlining() -> None:
    """Tell Dynamo, now or when it comes, that functions of this package are not looked into, but for :data:`LOOKED_INTO`."""
    when_imported(_TOLD, _skip)


def _skip(module: Any) -> None:
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).with_suffix("").as_posix() not in LOOKED_INTO:
            module.SKIP_DIRS.append(str(file))
    module._recompile_re()
    changed("torch._dynamo.trace_rules.SKIP_DIRS")
    leave_untraced(package.name)


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
    """Mark all functions of the modules of ``package`` that are loaded and not yet marked, once Dynamo is there."""
    if _TOLD not in sys.modules:
        return
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
