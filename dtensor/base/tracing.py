"""Whether a program is being traced: then values are not there yet, and what is done is recorded for later."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from uuid import uuid4

from torch import Tensor
from torch.fx import Proxy

from ..errors import DTensorError, UnsupportedOperationError
from . import torch_internals
from .tensor_tree import leaves
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

LOOKERS: dict[type, bool] = {}  # dispatch modes of torch's that take down what runs; whether ranges of the profiler, too
_STAND_INS = (FakeTensor, FunctionalTensor)
_PROXY = DISPATCH_MODE_KEYS.PROXY
_FUNCTIONAL = DISPATCH_MODE_KEYS.FUNCTIONAL
REFUSED = (RuntimeError, ValueError)  # what torch raises of operands that a kernel does not take; the latter without data
_TRACING = (_PROXY, _FUNCTIONAL, DISPATCH_MODE_KEYS.FAKE)


def has_no_values(x: Any) -> bool:
    """Whether ``x`` stands for a tensor that comes later."""
    return isinstance(x, _STAND_INS)


def is_traced(x: Any) -> bool:
    """Whether ``x`` does, or operators are being recorded for a graph."""
    if type(x) is Tensor and not count_dispatch_modes():  # most often
        return False
    return isinstance(x, _STAND_INS) or infra_mode(_PROXY) is not None


def any_number_is_open() -> bool:
    """Whether a program is being traced whose numbers are not all known from the start."""
    context = torch_internals.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    return mode is not None and mode.shape_env is not None and bool(mode.shape_env.var_to_range)


def under_way() -> bool:
    """Whether some program is being traced here."""
    return bool(count_dispatch_modes()) and any(infra_mode(key) is not None for key in _TRACING)


def is_argument(x: Any) -> bool:
    """Whether ``x`` is what a program that is traced was given, while all that it computes stands for values to come."""
    return infra_mode(_FUNCTIONAL) is not None and not isinstance(x, FunctionalTensor)


def is_counted(piece: Any) -> bool:
    """Whether a program is run on such pieces to find out what its graph returns, before that is made."""
    return isinstance(piece, FunctionalTensor) and infra_mode(_PROXY) is None


def counted_before(piece: Any) -> Any:
    """What stood for the same piece in the run before, in which torch found out what is written to; None in the first."""
    given = vars(torch_internals.from_functional(piece.elem))
    before, given["_last_run"] = given.get("_last_run"), piece
    return before


def is_written(piece: Any) -> bool:
    """Whether such a piece has been written to since the run began."""
    return torch_internals.has_data_mutation(piece.elem)


def _graph_of_wholes() -> Any:
    """The tracer of a graph whose values are DTensors as they are (of ``make_fx``, ``torch.func.linearize``); None where none is
    recorded, or one of stand-ins for pieces, as the compiler's."""
    mode = infra_mode(_PROXY)
    return (
        None
        if mode is None or infra_mode(_FUNCTIONAL) is not None or infra_mode(DISPATCH_MODE_KEYS.FAKE) is not None
        else mode.tracer
    )


def taken_in(operands: Any) -> bool:
    """Whether some of ``operands`` were no values of the graph of whole tensors that is recorded. They are its constants now: a
    graph does not see what is computed of a tensor that it does not know, and would give what was found while it was recorded."""
    tracer = _graph_of_wholes()
    if tracer is None:
        return False
    found = [x for x in leaves(operands) if isinstance(x, Tensor) and x not in tracer.tensor_tracker and hasattr(x, "_layout")]
    for x in found:
        torch_internals.track_tensor(x, Proxy(tracer.create_arg(x), tracer), constant=None, tracer=tracer)
    return bool(found)


def not_in_graph(x: Any, what: str) -> None:
    """Nothing, unless ``x`` is a value of a graph of whole tensors, which has no operator for ``what``.

    Raises:
        UnsupportedOperationError: it is.
    """
    tracer = _graph_of_wholes() if count_dispatch_modes() else None
    if tracer is not None and x in tracer.tensor_tracker:
        raise UnsupportedOperationError(
            f"{what} inside of make_fx (torch.func.linearize) is not supported: the graph contains DTensors, "
            "and this is not an operator on a DTensor. Do it outside, or use torch.compile or dtensor.capture"
        )


def explained(error: Exception, operation: str) -> Exception:
    """``error``; where the operation asked a number of a program that is traced which its values decide, what says so."""
    if not (under_way() and isinstance(error, torch_internals.GuardOnDataDependentSymNode)):
        return error
    return UnsupportedOperationError(
        f"{operation} of DTensors inside torch.compile: values decide a size here, or what is done, and both are decided before "
        "there are values; let the graph break there (fullgraph=False), or keep the size: torch.where(m, x, 0) for x[m]"
    )


def aside() -> AbstractContextManager[Any]:
    """A block that is no part of the program that is traced, or looked at: what is computed there is computed now."""
    apart = count_dispatch_modes() and (under_way() or any(map(looks_on, current_dispatch_modes())))
    return without_modes() if apart else nullcontext()


def looks_on(mode: Any) -> bool:
    """Whether a dispatch mode takes down what runs, and nothing runs otherwise for it."""
    return getattr(mode, "looks_on", False) or type(mode) in LOOKERS


def only_looked_at(of_dtensors: bool = False) -> bool:
    """Whether all dispatch modes here look on; ``of_dtensors``: or take down what DTensors are asked for, as our recorders do."""
    return not count_dispatch_modes() or all(
        looks_on(mode) or (of_dtensors and hasattr(mode, "of_dtensors")) for mode in current_dispatch_modes()
    )


def shows_ranges() -> bool:
    """Whether somebody shows ranges here: torch's profiler, or its ``DebugMode``."""
    return profiler_enabled() or bool(
        LOOKERS and count_dispatch_modes() and any(LOOKERS.get(type(mode)) for mode in current_dispatch_modes())
    )


def constant_of_graph(x: Any) -> Any:
    """``x``; where a graph broke, torch may hand on a constant that was made in it in a wrapper of its own."""
    return x.real_obj if type(x) is WrappedConstant else x


def kept(value: Any, alike: Any = None) -> str:
    """A name for an object that stands in compiled programs, in this process; ``alike``: what others that do the same have too,
    for which the first of them is kept."""
    key = value if alike is None else alike
    place = _KEPT.get(key)
    if place is None:
        place = _KEPT[key] = len(_OBJECTS)
        _OBJECTS.append(value)
    return f"{_PROCESS} {place}"


def kept_object(name: str) -> Any:
    """What has that name."""
    process, where = name.split()
    if process != _PROCESS:
        raise DTensorError(
            "this compiled program was made by another process, and its meshes do not exist in this one; compile it here"
        )
    return _OBJECTS[int(where)]


_KEPT: dict[Any, int] = {}
_OBJECTS: list[Any] = []
_PROCESS = uuid4().hex
