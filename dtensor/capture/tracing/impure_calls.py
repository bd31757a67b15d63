"""Impure calls: refuses reads of tensor values, and calls of compiled code that is not known to be pure, during a recording.

A replay would not repeat such a read. It turns the values of a tensor into Python values, or asks compiled code for something
outside of the program.

A call into compiled code is *pure* if its result depends only on its arguments, or on state that is guarded. Pure are calls into
torch, numpy, the modules of the standard library that are listed below, and modules that the user declares as trusted. Any other
call may read a clock, a file or memory of its own. It is refused if user code makes it, directly or through the standard library.
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

from ...base import tensor_tree
from ...errors import CaptureError
from ..guards.bytecode_names import read_code_names
from ..guards.guard_set import GuardSet, ObservedCode, cell_contents
from ..guards.object_model import MISSING, opaque_object_error
from .tape import Step, Var

_VALUE_READERS = frozenset(  # methods of tensors that no dispatch key sees
    {"tolist", "numpy", "apply_", "map_", "map2_", "_to_dlpack", "_to_dlpack_versioned"}
)
_GENERATOR_SETTERS = frozenset({"manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"})
_DATA_DEPENDENT_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

# fmt: off
_PURE_MODULES = frozenset({
    "builtins", "abc", "array", "atexit", "binascii", "bisect", "cmath", "codecs", "collections", "contextvars", "copyreg",
    "enum", "functools", "gc", "hashlib", "heapq", "inspect", "itertools", "json", "math", "operator", "random", "re",
    "sre", "statistics", "string", "struct", "sys", "thread", "threading", "tracemalloc", "types", "typing", "warnings",
    "weakref", "zlib", "torch", "numpy", "dtensor",
})
# Impure functions of these modules. They report facts of the process, memory, references to an object, states of generators.
_IMPURE_FUNCTIONS = frozenset({
    "open", "input", "breakpoint", "fromfile", "lookup", "lookup_error", "getweakrefcount", "getweakrefs", "__subclasses__",
    "get_state", "getstate", "initial_seed", "_ncallbacks",
})
# Modules with mostly impure functions: only these are pure.
_PURE_FUNCTIONS = {
    "gc": frozenset({"collect", "enable", "disable", "freeze", "unfreeze", "is_tracked"}),
    "sys": frozenset({
        "audit", "displayhook", "exc_info", "excepthook", "exit", "getdefaultencoding", "getfilesystemencodeerrors",
        "getfilesystemencoding", "getprofile", "intern", "is_finalizing", "setprofile", "setrecursionlimit", "settrace",
        "unraisablehook",
    }),
    "thread": frozenset({"__enter__", "__exit__", "allocate_lock", "get_ident", "get_native_id", "release"}),
    "tracemalloc": frozenset({"start", "stop"}),
}
# fmt: on
# Modules that do not return what they read to user code. ``weakref`` calls finalizers.
_NOT_RETURNING = frozenset({"logging", "warnings", "importlib", "linecache", "weakref"})
_STATEFUL_TORCH_TYPES = (torch.UntypedStorage, torch.TypedStorage, torch.Generator)
_COMPILED_TYPES = (BuiltinFunctionType, ClassMethodDescriptorType, MethodDescriptorType, WrapperDescriptorType)
_LIBRARIES = frozenset({"torch", "dtensor"})  # their own calls are allowed
_TRANSPARENT = frozenset({*sys.stdlib_module_names, "numpy", "typing_extensions"})  # they return results to their caller


def is_data_dependent(func: Any, args: tuple[Any, ...]) -> bool:
    """Return True if an operator turns values into Python values, or derives a shape from them.

    The result of an index with integers has a known shape. With bools it has none.
    """
    if not any(tag in func.tags for tag in _DATA_DEPENDENT_TAGS):
        return func is torch.ops.aten.is_nonzero.default  # ``bool()`` below autograd, inside of rules
    index_ops = torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor
    return func not in index_ops or any(x.dtype not in (torch.int64, torch.int32) for x in tensor_tree.tensor_leaves(args[1]))


def value_read_error(call: str, operator: str = "") -> CaptureError:
    """Return the error for a read of a tensor's values."""
    inside = f" (in {operator})" if operator and operator != call else ""
    return CaptureError(
        f"capture: {call}{inside} reads the values of a tensor into Python, or makes a shape depend on "
        "them, so a replay would use the recorded values. Return the tensor and read it outside of the "
        "captured function, or write the choice with torch.where and masks"
    )


def call_captured(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``fn(*args, **kwargs)``. The frame of this call separates library frames from those of the captured function."""
    return fn(*args, **kwargs)


class CallMonitor:
    """Profile hook of a recording that raises for impure calls of user code, and for reads of a tensor's values.

    It is a profile function (``sys.setprofile``). A Python profiler that is active continues. A compiled one (cProfile) pauses.

    Args:
        reading_operator: returns the running operator for a read of a tensor (None: an unknown tensor); None if it is allowed.
        note_generator_set: is called when the state of a random generator is set.
        trusted: further modules with pure functions.
        guards: the guards of the function. Compiled functions in them are checked at once, because the profile function does not
            see their calls. Code that runs must not name one of their opaque objects.

    Attributes:
        observed: user code that ran and that guard discovery has not looked into, and code that newly computes names.
    """

    def __init__(
        self,
        reading_operator: Callable[[torch.Tensor | None], str | None],
        note_generator_set: Callable[[], None],
        trusted: Collection[str],
        guards: GuardSet,
    ) -> None:
        self._codes, self._computing, self._opaque_objects = guards.codes, guards.observed.computing, guards.opaque_objects
        self._seen_codes: set[CodeType] = set()
        self.observed = ObservedCode()
        self._reading_operator, self._note_generator_set = reading_operator, note_generator_set
        self._compiled_callables = guards.compiled_callables
        self._trusted = {*trusted}
        self._pure: dict[tuple[Any, str], bool] = {}  # by module or class, and name
        self._print_depth = 0
        self._error: CaptureError | None = None
        self._user_profiler: Callable[[FrameType, str, Any], Any] | None = None

    @contextmanager
    def monitored(self) -> Iterator[None]:
        """Check the calls of this thread inside of the context; a refused call raises, and raises again at the end.

        Raises:
            CaptureError: there is a refused call. It is raised again at the end, in case user code has caught it.
        """
        for fn in self._compiled_callables:
            if not self._is_pure(fn):
                raise self._impure_call_error(fn)
        profiler: Any = sys.getprofile()
        self._user_profiler = profiler if callable(profiler) else None
        sys.setprofile(self._on_profile_event)
        try:
            yield
        finally:
            sys.setprofile(self._user_profiler)
            if profiler is not self._user_profiler:
                profiler.enable()
        if self._error is not None:
            raise self._error

    def _on_profile_event(self, frame: FrameType, event: str, fn: Any) -> None:
        """Handle a profile event: raise if user code reads a value or calls impure compiled code."""
        if self._user_profiler is not None:
            self._user_profiler(frame, event, fn)
        if event == "call":
            if frame.f_code not in self._seen_codes:
                self._observe_code(frame)
        elif event == "c_call":
            if fn.__name__ in _VALUE_READERS:
                self._check_value_read(fn)
            elif fn.__name__ in _GENERATOR_SETTERS and isinstance(fn.__self__, torch.Generator):
                self._note_generator_set()
            if not (self._print_depth or self._is_pure(fn) or _is_internal_query(frame, fn)) and is_user_call(
                frame, through_torch=fn.__name__ == "initial_seed"
            ):
                self._error = self._impure_call_error(fn)
                raise self._error
            self._print_depth += fn is print
        elif fn is print:
            self._print_depth -= 1

    def _observe_code(self, frame: FrameType) -> None:
        """Note user code at its first run, so that the next guard discovery looks into it."""
        code = frame.f_code
        self._seen_codes.add(code)
        root = _root_package(frame)
        if root in _LIBRARIES or root in _TRANSPARENT or code.co_name == "<module>":
            return
        if self._opaque_objects:
            name = next((name for name in (*code.co_names, *code.co_freevars) if name in self._opaque_objects), None)
            if name is not None and _is_below_captured(frame):
                self._error = opaque_object_error(*self._opaque_objects[name])
                raise self._error
        if code in self._codes:
            names = read_code_names(code)
            computes_names = names.computes_attributes or names.reads_any_variable or names.computes_imports
            if computes_names and code not in self._computing:
                self.observed.computing.add(code)
        elif _is_below_captured(frame) and is_user_call(frame):
            self.observed.functions += _find_functions(frame)

    def _check_value_read(self, fn: Any) -> None:
        """Raise if a compiled tensor method, or DLPack export, reads values that may differ at a replay."""
        x = fn.__self__ if isinstance(fn.__self__, torch.Tensor) else None
        if (x is not None or "dlpack" in fn.__name__) and (operator := self._reading_operator(x)) is not None:
            self._error = value_read_error(f"Tensor.{fn.__name__}()", operator)
            raise self._error

    def _impure_call_error(self, fn: Any) -> CaptureError:
        """Return the CaptureError for a call of compiled code that is not known to be pure."""
        name = f"{_module_of(fn)}.{getattr(fn, '__qualname__', fn.__name__)}"
        return CaptureError(
            f"capture: the function calls {name}, compiled code that may return something else at the "
            "next call (the time, the content of a file), and a replay would not see that. Call it outside "
            "and pass its result, or declare that it depends on its arguments only: capture(fn, "
            f"trusted=[{_module_of(fn)!r}])"
        )

    def _is_pure(self, fn: Any) -> bool:
        """Return True if the result of a compiled function depends only on its arguments, or its module is trusted."""
        owner = fn.__module__ if type(fn.__module__) is str else _class_of(fn)
        is_pure = self._pure.get((owner, fn.__name__))
        if is_pure is None:
            module = _module_of(fn)
            root = _root_of(module)
            is_pure = root in _PURE_MODULES and fn.__name__ not in _IMPURE_FUNCTIONS
            is_pure = is_pure and fn.__name__ in _PURE_FUNCTIONS.get(root, (fn.__name__,))
            is_pure = is_pure and not issubclass(_class_of(fn), _STATEFUL_TORCH_TYPES)
            is_pure = is_pure or not self._trusted.isdisjoint((module, root))
            self._pure[owner, fn.__name__] = is_pure
        return is_pure


def is_user_call(frame: FrameType | None, through_torch: bool = False) -> bool:
    """Return True if user code makes the call, directly or through libraries that return their results to user code.

    Finalizers and callbacks of the garbage collector may run at any time. They do not count.

    Args:
        frame: of the caller.
        through_torch: whether torch also counts as such a library.
    """
    owner: str | None = None
    gc_callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in gc_callbacks or frame.f_code.co_name == "__del__":
            return False
        root = _root_package(frame)
        if root in _NOT_RETURNING:
            return False
        if owner is None and root not in _TRANSPARENT and not (through_torch and root == "torch"):
            owner = root
            if owner in _LIBRARIES:
                return False
        frame = frame.f_back
    return owner is not None


def _root_package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


def _is_below_captured(frame: FrameType | None) -> bool:
    """Return True if the captured function makes the call, and no code of the library in between."""
    while frame is not None and _root_package(frame) != "dtensor":
        frame = frame.f_back
    return frame is not None and frame.f_code is call_captured.__code__


def _is_internal_query(frame: FrameType, fn: Any) -> bool:
    """Return True if the standard library itself asks for facts of the process, as ``inspect`` asks for the recursion limit."""
    return _root_package(frame) in _TRANSPARENT and _root_of(_module_of(fn)) in _PURE_FUNCTIONS


def _find_functions(frame: FrameType) -> list[FunctionType]:
    """Return the functions that the frame may be a call of: those with its code and the same closure variables."""
    code, local_vars = frame.f_code, frame.f_locals
    return [
        fn
        for fn in gc.get_referrers(code)
        if isinstance(fn, FunctionType)
        and fn.__code__ is code
        and all(
            cell_contents(cell) is local_vars.get(name, MISSING)
            for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)
        )
    ]


def _root_of(module: str) -> str:
    return module.partition(".")[0].lstrip("_")


def _class_of(fn: Any) -> type:
    """Return the class that a compiled method is called on."""
    owner = getattr(fn, "__self__", None)
    return owner if isinstance(owner, type) else getattr(fn, "__objclass__", type(owner))


def _module_of(fn: Any) -> str:
    """Return the module of a compiled function, or of the class that defines it."""
    if type(fn.__module__) is str:
        return str(fn.__module__)
    kind = _class_of(fn)
    definers = (base for base in kind.__mro__ if isinstance(vars(base).get(fn.__name__), _COMPILED_TYPES))
    return str(next(definers, kind).__module__)


class ConstantStorages:
    """Set of memory with the same values at every replay, because it was computed from Python values only."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def contain(self, variables: Iterable[Var]) -> bool:
        """Return True if there are variables, and the memory of all of them is constant."""
        storages = {var.storage for var in variables}
        return bool(storages) and storages <= self._storages

    def add(self, var: Var) -> None:
        """Mark the memory of a tensor made of Python numbers as constant."""
        self._storages.add(var.storage)

    def update(self, step: Step) -> None:
        """Mark the memory that a step makes or writes as constant, if all that the step reads is, else as not constant."""
        inputs = {var.storage for var in step.inputs}
        if step.required or step.is_library_op or not inputs <= self._storages:
            self._storages -= inputs if step.is_library_op else step.writes
        else:
            self._storages |= {var.storage for var in step.outputs}
