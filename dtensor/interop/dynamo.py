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
from .import_hooks import on_import

_TRACE_RULES = "torch._dynamo.trace_rules"
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_MARKED_MODULES: set[str] = set()

# Values whose methods are answered at once (see compiled.py), the functions around modules, which are the program's own, and the
# mode of map_ranks, which lets pass what is compiled.
INLINED_MODULES = frozenset(
    {
        "interop/compiled",
        "layout/layout",
        "mesh/device_mesh",
        "mesh/geometry",
        "parallel/tensor/boundary",
        "parallel/tensor/crossing",
        "parallel/tensor/loss",
        "parallel/tensor/matrix",
        "parallel/tensor/style",
        "placement",
        "ranks/run_mode",
        "tensor/local_map",
    }
)


def keep_from_inlining() -> None:
    """Tell Dynamo, now or when it comes, that functions of this package are not looked into, but for :data:`LOOKED_INTO`."""
    on_import(_TRACE_RULES, _skip_files)


def _skip_files(module: Any) -> None:
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).with_suffix("").as_posix() not in INLINED_MODULES:
            module.SKIP_DIRS.append(str(file))
    module._recompile_re()
    changed("torch._dynamo.trace_rules.SKIP_DIRS")
    leave_untraced(package.name)


def written_in_python(kind: type) -> None:
    """Give ``kind`` its operators in place (``x += y``) as functions of this package, at which a compiled graph breaks.

    Dynamo of torch 2.13 looks up those written in C for ever.
    """
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]:
        setattr(kind, f"__i{name}__", _make_forwarder(getattr(kind, f"__i{name}__")))


def _make_forwarder(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def in_place(self: Any, other: Any) -> Any:
        return method(self, other)

    in_place.__name__ = method.__name__
    return in_place


def leave_untraced(package: str) -> None:
    """Mark all functions of the modules of ``package`` that are loaded and not yet marked, once Dynamo is there."""
    if _TRACE_RULES not in sys.modules:
        return
    for name, module in list(sys.modules.items()):
        if (name == package or name.startswith(f"{package}.")) and name not in _MARKED_MODULES:
            _MARKED_MODULES.add(name)
            for value in list(vars(module).values()):
                members = list(vars(value).values()) if isinstance(value, type) and value.__module__ == name else [value]
                for code in {code for member in members for code in _codes_of(member, module.__file__)}:
                    eval_frame.set_code_exec_strategy(code, _SKIP)


def _codes_of(value: Any, file: str | None) -> Iterator[CodeType]:
    """The code of a function, method or property of this file, and of the functions inside it."""
    for inner in ("__func__", "fget", "__wrapped__"):
        value = getattr(value, inner, value) if not isinstance(value, type) else None
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType) and code.co_filename == file:
        yield from _nested_codes(code)


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _nested_codes(value)
