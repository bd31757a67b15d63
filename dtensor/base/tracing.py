"""Tracing: whether a program is being traced (tensors without values), and what recorded graphs may contain."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from uuid import uuid4

from torch import Tensor
from torch.fx import Proxy

from ..errors import DTensorError, UnsupportedOperationError
from . import torch_internals
from .tensor_tree import iter_tree_leaves
from .torch_internals import (
    DISPATCH_MODE_KEYS,
    FakeTensor,
    FunctionalTensor,
    WrappedConstant,
    count_dispatch_modes,
    current_dispatch_modes,
    infra_mode,
    profiler_enabled,
    without_modes,
)

# dispatch modes of torch that only observe operators -> whether they also observe profiler ranges
OBSERVER_MODES: dict[type, bool] = {}
_VALUELESS_TYPES = (FakeTensor, FunctionalTensor)
_PROXY = DISPATCH_MODE_KEYS.PROXY
_FUNCTIONAL = DISPATCH_MODE_KEYS.FUNCTIONAL
# raised by kernels for operands that they do not accept; ValueError only on meta tensors
KERNEL_ERRORS = (RuntimeError, ValueError)
_TRACING_KEYS = (_PROXY, _FUNCTIONAL, DISPATCH_MODE_KEYS.FAKE)


def has_no_values(x: Any) -> bool:
    """Return True if ``x`` is a fake or functional tensor, which has no values."""
    return isinstance(x, _VALUELESS_TYPES)


def is_traced(x: Any) -> bool:
    """Return True if ``x`` has no values, or operators are being recorded for a graph."""
    if type(x) is Tensor and not count_dispatch_modes():  # the common case
        return False
    return isinstance(x, _VALUELESS_TYPES) or infra_mode(_PROXY) is not None


def has_symbolic_sizes() -> bool:
    """Return True if a program with symbolic sizes is being traced."""
    context = torch_internals.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    return mode is not None and mode.shape_env is not None and bool(mode.shape_env.var_to_range)


def is_tracing() -> bool:
    """Return True if a program is being traced in this thread."""
    return bool(count_dispatch_modes()) and any(infra_mode(key) is not None for key in _TRACING_KEYS)


def is_program_argument(x: Any) -> bool:
    """Return True if ``x`` is an argument of the program that is traced, not a value that the program computes."""
    return infra_mode(_FUNCTIONAL) is not None and not isinstance(x, FunctionalTensor)


def is_analysis_local(local: Any) -> bool:
    """Return True if ``local`` is a local tensor of a run that analyzes the outputs of a graph, before the graph is made."""
    return isinstance(local, FunctionalTensor) and infra_mode(_PROXY) is None


def swap_analysis_local(local: Any) -> Any:
    """Store ``local`` as that of the last analysis run, and return that of the run before; None in the first run."""
    state = vars(torch_internals.from_functional(local.elem))
    before, state["_last_run"] = state.get("_last_run"), local
    return before


def has_data_mutation(local: Any) -> bool:
    """Return True if a local tensor of an analysis run was written to since the run began."""
    return torch_internals.has_data_mutation(local.elem)


def _dtensor_graph_tracer() -> Any:
    """Return the tracer of a graph of DTensors (``make_fx``, ``linearize``), None if no such graph is recorded."""
    mode = infra_mode(_PROXY)
    is_of_locals = infra_mode(_FUNCTIONAL) is not None or infra_mode(DISPATCH_MODE_KEYS.FAKE) is not None
    return None if mode is None or is_of_locals else mode.tracer


def add_graph_constants(operands: Any) -> bool:
    """Make DTensors among ``operands`` that the recorded graph does not know constants of it; return True if there are any.

    A graph does not see what is computed from a tensor that it does not know: it would contain the results of the recording
    instead.
    """
    tracer = _dtensor_graph_tracer()
    if tracer is None:
        return False
    unknown = [
        x
        for x in iter_tree_leaves(operands)
        if isinstance(x, Tensor) and x not in tracer.tensor_tracker and hasattr(x, "_layout")
    ]
    for x in unknown:
        torch_internals.track_tensor(x, Proxy(tracer.create_arg(x), tracer), constant=None, tracer=tracer)
    return bool(unknown)


def check_not_in_graph(x: Any, what: str) -> None:
    """Raise if ``x`` is a value of a recorded graph of DTensors, which has no operator for ``what``.

    Raises:
        UnsupportedOperationError: ``x`` is a value of such a graph.
    """
    tracer = _dtensor_graph_tracer() if count_dispatch_modes() else None
    if tracer is not None and x in tracer.tensor_tracker:
        raise UnsupportedOperationError(
            f"{what} inside of make_fx (torch.func.linearize) is not supported: the graph contains DTensors, "
            "and this is not an operator on a DTensor. Do it outside, or use torch.compile or dtensor.capture"
        )


def explain_data_dependence(error: Exception, operation: str) -> Exception:
    """Return an error with advice if ``operation`` needed a number from values of a traced program, else ``error`` itself."""
    if not (is_tracing() and isinstance(error, torch_internals.GuardOnDataDependentSymNode)):
        return error
    return UnsupportedOperationError(
        f"{operation} of DTensors inside torch.compile: values decide a size here, or what is done, and both are decided before "
        "there are values; let the graph break there (fullgraph=False), or keep the size: torch.where(m, x, 0) for x[m]"
    )


def untraced() -> AbstractContextManager[Any]:
    """Return a context manager for work that is computed now, and neither traced nor observed."""
    needs_escape = count_dispatch_modes() and (is_tracing() or any(map(is_observer, current_dispatch_modes())))
    return without_modes() if needs_escape else nullcontext()


def is_observer(mode: Any) -> bool:
    """Return True if a dispatch mode only observes operators and does not change how they run."""
    return getattr(mode, "looks_on", False) or type(mode) in OBSERVER_MODES


def has_only_observers(of_dtensors: bool = False) -> bool:
    """Return True if all active modes are observers; ``of_dtensors=True`` also accepts recorders of DTensor operators."""
    return not count_dispatch_modes() or all(
        is_observer(mode) or (of_dtensors and hasattr(mode, "of_dtensors")) for mode in current_dispatch_modes()
    )


def has_range_observer() -> bool:
    """Return True if torch's profiler or its ``DebugMode`` observes ranges now."""
    return profiler_enabled() or bool(
        OBSERVER_MODES and count_dispatch_modes() and any(OBSERVER_MODES.get(type(mode)) for mode in current_dispatch_modes())
    )


def unwrap_graph_constant(x: Any) -> Any:
    """Return ``x`` without the wrapper in which torch may pass a constant of a graph after a graph break."""
    return x.real_obj if type(x) is WrappedConstant else x


def register_object(value: Any, shared_key: Any = None) -> str:
    """Store an object that compiled programs of this process refer to, and return a name for it.

    Args:
        shared_key: key that equivalent objects share. Only the first object of a key is registered.
    """
    key = value if shared_key is None else shared_key
    index = _OBJECT_INDEX.get(key)
    if index is None:
        index = _OBJECT_INDEX[key] = len(_PROGRAM_OBJECTS)
        _PROGRAM_OBJECTS.append(value)
    return f"{_PROCESS_ID} {index}"


def registered_object(name: str) -> Any:
    """Return the object that :func:`register_object` registered under ``name``."""
    process, index = name.split()
    if process != _PROCESS_ID:
        raise DTensorError(
            "this compiled program was made by another process, and its meshes do not exist in this one; compile it here"
        )
    return _PROGRAM_OBJECTS[int(index)]


_OBJECT_INDEX: dict[Any, int] = {}
_PROGRAM_OBJECTS: list[Any] = []
_PROCESS_ID = uuid4().hex
