"""Reads that a replay would not see change: values of tensors that become Python values, and what compiled code looks up in the
world.

A call into compiled code is *closed* if what it gives depends on its arguments alone, or on state that is guarded. All of
torch's and numpy's are, of the standard library's those of the modules below, and those that the user declares. Any other may ask
a clock, a file or memory of its own, so it is refused where the user's code makes it, directly or through the standard library.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any

import torch

from ..base import tensor_tree
from ..errors import CaptureError
from .bytecode_names import names_of
from .guard_set import Ran
from .guards import contents
from .object_ownership import MISSING
from .tape import Step, Var

_READS = frozenset(
    {"tolist", "numpy", "apply_", "map_", "map2_", "_to_dlpack", "_to_dlpack_versioned"}
)  # no dispatch key sees it
_SETS = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"})  # of generators
_DECIDING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

# fmt: off
_CLOSED = frozenset({
    "builtins", "abc", "array", "atexit", "binascii", "bisect", "cmath", "codecs", "collections", "contextvars", "copyreg",
    "enum", "functools", "gc", "hashlib", "heapq", "inspect", "itertools", "json", "math", "operator", "random", "re",
    "sre", "statistics", "string", "struct", "sys", "thread", "threading", "tracemalloc", "types", "typing", "warnings",
    "weakref", "zlib", "torch", "numpy", "dtensor",
})
# Of these open: what tells of the process, of memory, of who else has an object, of generators' states.
_OPEN = frozenset({
    "open", "input", "breakpoint", "fromfile", "lookup", "lookup_error", "getweakrefcount", "getweakrefs", "__subclasses__",
    "get_state", "getstate", "initial_seed", "_ncallbacks",
})
_DOING = {  # and of these, all but what does something
    "gc": frozenset({"collect", "enable", "disable", "freeze", "unfreeze", "is_tracked"}),
    "sys": frozenset({
        "audit", "displayhook", "exc_info", "excepthook", "exit", "getdefaultencoding", "getfilesystemencodeerrors",
        "getfilesystemencoding", "getprofile", "intern", "is_finalizing", "setprofile", "setrecursionlimit", "settrace",
        "unraisablehook",
    }),
    "tracemalloc": frozenset({"start", "stop"}),
}
# fmt: on
# What these look up is not handed on; the last calls what is told of an object's end.
_TELLING = frozenset({"logging", "warnings", "importlib", "linecache", "weakref"})
_KEEPING = (torch.UntypedStorage, torch.TypedStorage, torch.Generator)  # of torch's, what is no affair of its operators alone
_COMPILED = (BuiltinFunctionType, ClassMethodDescriptorType, MethodDescriptorType, WrapperDescriptorType)
_LIBRARY = frozenset({"torch", "dtensor"})  # what its code looks up is its own affair
_THROUGH = frozenset({*sys.stdlib_module_names, "numpy", "typing_extensions"})


def decides(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether values become Python values or decide a shape. An index of integers has a shape that is known, one of bools not."""
    if not any(tag in func.tags for tag in _DECIDING):
        return func is torch.ops.aten.is_nonzero.default  # what bool() is below autograd, where rules compute
    numbers = torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor
    return func not in numbers or any(x.dtype not in (torch.int64, torch.int32) for x in tensor_tree.tensors(args[1]))


def refuse(what: str, within: str = "") -> CaptureError:
    """The error for a read of values."""
    inside = f" (in {within})" if within and within != what else ""
    return CaptureError(
        f"capture: {what}{inside} reads the values of a tensor into Python, or makes a shape depend on "
        "them, so a replay would use the recorded values. Return the tensor and read it outside of the "
        "captured function, or write the choice with torch.where and masks"
    )


class World:
    """Refuses calls into compiled code, in this thread: the user's into such that is not closed, and anybody's that read a
    tensor's values. Somebody else's profiler there goes on beside (``sys.setprofile``); a compiled one (cProfile) is halted
    meanwhile.

    Args:
        reading: gives the name of the operation at work that would read a tensor (None: one that is not seen); None if it may.
        setting: called when the state of a random generator is set.
        trusted: further modules whose functions are closed.
        wrapped: functions that compiled code would call, which is not seen.
        codes: what the survey has looked into; functions of the user's that run without being among it go to ``ran``.
        computing: code that is known to compute names; such as is run without being known goes to it too.
    """

    def __init__(
        self,
        reading: Callable[[torch.Tensor | None], str | None],
        setting: Callable[[], None],
        trusted: Collection[str],
        wrapped: Iterable[Any],
        codes: Collection[CodeType],
        computing: Collection[CodeType],
    ) -> None:
        self._surveyed, self._computing = codes, computing
        self._met: set[CodeType] = set()
        self.ran = Ran()
        self._reading, self._setting, self._wrapped = reading, setting, wrapped
        self._trusted = {*trusted}
        self._known: dict[tuple[Any, str], bool] = {}  # by module or class, and name: whether it is closed
        self._printing = 0
        self._found: CaptureError | None = None
        self._beside: Callable[[FrameType, str, Any], Any] | None = None  # somebody else's profiler

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Inside.

        Raises:
            CaptureError: there is such a call; also at the end, if the user's code has caught it.
        """
        for fn in self._wrapped:
            if not self._is_closed(fn):
                raise self._refusal(fn)
        profiler: Any = sys.getprofile()
        self._beside = profiler if callable(profiler) else None
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(self._beside)
            if profiler is not self._beside:
                profiler.enable()
        if self._found is not None:
            raise self._found

    def _see(self, frame: FrameType, event: str, fn: Any) -> None:
        if self._beside is not None:
            self._beside(frame, event, fn)
        if event == "call":
            if frame.f_code not in self._met:
                self._meet(frame)
        elif event == "c_call":
            if fn.__name__ in _READS:
                self._check_read(fn)
            elif fn.__name__ in _SETS and isinstance(fn.__self__, torch.Generator):
                self._setting()
            if not (self._printing or self._is_closed(fn) or _is_pythons(frame, fn)) and of_user(
                frame, fn.__name__ == "initial_seed"
            ):
                self._found = self._refusal(fn)
                raise self._found
            self._printing += fn is print
        elif fn is print:
            self._printing -= 1

    def _meet(self, frame: FrameType) -> None:
        """Code, the first time that it runs. What the library calls and no survey finds (who listens) is its own affair."""
        code = frame.f_code
        self._met.add(code)
        if _owner(frame) in _LIBRARY or _owner(frame) in _THROUGH or code.co_name == "<module>":
            return
        if code in self._surveyed:
            names = names_of(code)
            if (names.computed or names.whole or names.imports) and code not in self._computing:
                self.ran.computing.add(code)
        elif _calls_it(frame) and of_user(frame):
            self.ran.functions += functions_of(frame)

    def _check_read(self, fn: Any) -> None:
        x = fn.__self__ if isinstance(fn.__self__, torch.Tensor) else None
        if (x is not None or "dlpack" in fn.__name__) and (within := self._reading(x)) is not None:
            self._found = refuse(f"Tensor.{fn.__name__}()", within)
            raise self._found

    def _refusal(self, fn: Any) -> CaptureError:
        return CaptureError(
            f"capture: the function calls {_shown(fn)}, compiled code that may return something else at the "
            "next call (the time, the content of a file), and a replay would not see that. Call it outside "
            "and pass its result, or declare that it depends on its arguments only: capture(fn, "
            f"trusted=[{_module_of(fn)!r}])"
        )

    def _is_closed(self, fn: Any) -> bool:
        at = fn.__module__ if type(fn.__module__) is str else _class_of(fn)
        known = self._known.get((at, fn.__name__))
        if known is None:
            module = _module_of(fn)
            root = _root(module)
            closed = root in _CLOSED and fn.__name__ not in _OPEN and fn.__name__ in _DOING.get(root, (fn.__name__,))
            closed = closed and not issubclass(_class_of(fn), _KEEPING)
            known = self._known[at, fn.__name__] = closed or not self._trusted.isdisjoint((module, _root(module)))
        return known


def of_user(frame: FrameType | None, by_torch: bool = False) -> bool:
    """Whether the user's code asks, by itself or through libraries that hand on what they find; not what the collector calls,
    at any time."""
    owner: str | None = None
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in collecting or frame.f_code.co_name == "__del__":
            return False
        root = _owner(frame)
        if root in _TELLING:
            return False
        if owner is None and root not in _THROUGH and not (by_torch and root == "torch"):
            owner = root
            if owner in _LIBRARY:
                return False
        frame = frame.f_back
    return owner is not None


def _owner(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


def _calls_it(frame: FrameType | None) -> bool:
    """Whether the captured function calls this, and not the library."""
    while frame is not None and _owner(frame) != "dtensor":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_called"  # Recording._called


def _is_pythons(frame: FrameType, fn: Any) -> bool:
    """Whether the standard library asks the process for itself, as ``inspect`` how deep calls may be."""
    return _owner(frame) in _THROUGH and _root(_module_of(fn)) in _DOING


def functions_of(frame: FrameType) -> list[FunctionType]:
    """Those that this may be a call of."""
    code, held = frame.f_code, frame.f_locals
    return [
        fn
        for fn in gc.get_referrers(code)
        if isinstance(fn, FunctionType)
        and fn.__code__ is code
        and all(
            contents(cell) is held.get(name, MISSING) for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)
        )
    ]


def _root(module: str) -> str:
    return module.partition(".")[0].lstrip("_")


def _class_of(fn: Any) -> type:
    """The class that a method of compiled code is called on."""
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, type) else getattr(fn, "__objclass__", type(owner))


def _module_of(fn: Any) -> str:
    """Where a function of compiled code, or the class that has it, stands."""
    if type(fn.__module__) is str:
        return str(fn.__module__)
    kind = _class_of(fn)
    return str(next((base for base in kind.__mro__ if isinstance(vars(base).get(fn.__name__), _COMPILED)), kind).__module__)


def _shown(fn: Any) -> str:
    return f"{_module_of(fn)}.{getattr(fn, '__qualname__', fn.__name__)}"


class Unvarying:
    """Memory that holds the same at every replay, since it was made of Python values alone: reading it decides nothing anew."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def holds(self, variables: Iterable[Var]) -> bool:
        """Whether all of these are such memory, and there are some."""
        found = {var.storage for var in variables}
        return bool(found) and found <= self._storages

    def made(self, var: Var) -> None:
        """A tensor made of Python numbers."""
        self._storages.add(var.storage)

    def after(self, step: Step) -> None:
        """What a step makes and writes to; what a site does with what it is given is its own affair."""
        given = {var.storage for var in step.inputs}
        if step.keep or step.site or not given <= self._storages:
            self._storages -= given if step.site else step.writes
        else:
            self._storages |= {var.storage for var in step.outputs}
