"""Dynamo settings: keep ``torch.compile`` from compiling functions of this library, so that a graph breaks at a call of one.

If the compiler traced these functions, it would trace how local tensors are handled (for each rank, in one process) instead of
the program. It lost gradients then, or failed. Functions that they call are not compiled either. Frames of the user are compiled.
Two parts of torch are configured: frame evaluation does not compile frames of the library, and Dynamo does not inline calls of
it. Both are done when other code imports Dynamo, which takes a second. Before that no frames are evaluated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from ..base.patches import patch_applied
from ..base.torch_internals import eval_frame
from .import_hooks import on_import

_TRACE_RULES = "torch._dynamo.trace_rules"
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
_MARKED_MODULES: set[str] = set()

# Modules of constants of a graph (see torch_compile.py), of functions that wrap the forward of the user's modules, and of
# the mode of map_ranks, in which compiled code may run.
INLINED_MODULES = frozenset(
    {
        "base/tensor_text",
        "interop/torch_compile",
        "layout/layout",
        "layout/placement_forms",
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


def skip_library_frames() -> None:
    """Tell Dynamo, now or at its import, not to inline functions of this package except those of ``INLINED_MODULES``."""
    on_import(_TRACE_RULES, _skip_files)


def _skip_files(module: Any) -> None:
    """Add this package's files to Dynamo's skip list, and mark its loaded functions as not compiled."""
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).with_suffix("").as_posix() not in INLINED_MODULES:
            module.SKIP_DIRS.append(str(file))
    module._recompile_re()
    patch_applied("torch._dynamo.trace_rules.SKIP_DIRS")
    mark_untraced(package.name)


def define_inplace_operators(kind: type) -> None:
    """Define the in-place operators of a class (``x += y``) in Python, so that a compiled graph breaks at them.

    Dynamo of torch 2.13 does not terminate when it looks up those written in C.
    """
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]:
        setattr(kind, f"__i{name}__", _make_forwarder(getattr(kind, f"__i{name}__")))


def _make_forwarder(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wrap a method that is written in C in a Python function, which Dynamo can trace."""

    def in_place(self: Any, other: Any) -> Any:
        return method(self, other)

    in_place.__name__ = method.__name__
    return in_place


def mark_untraced(package: str) -> None:
    """Mark all functions of the loaded modules of ``package`` as not compiled, once Dynamo is imported.

    Marked modules are skipped.
    """
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
    """Yield the code objects of a function, method or property defined in ``file``, and of its nested functions."""
    for inner in ("__func__", "fget", "__wrapped__"):
        value = getattr(value, inner, value) if not isinstance(value, type) else None
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType) and code.co_filename == file:
        yield from _nested_codes(code)


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions that are defined inside it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _nested_codes(value)
