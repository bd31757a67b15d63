"""Operator fingerprints: each operator call enters the fingerprint that ranks compare at the next collective.

Under ``check_ranks("strict")`` each call is recorded with its line and numbers. Under ``"watch"`` each look-up of a plan is
recorded. Calls that one rank may make alone are left out: views, memory that is allocated and not written, and computation with
replicated tensors (rank 0 prints a norm, or loads values that other ranks do not have: ``module.to_empty``).

Calls by which autograd stores a gradient are never recorded: autograd copies the gradient or not, depending on references that
others hold, such as a debugger. In-place additions are recorded without their order, since torch adds up gradients in any order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..base.caches import memoize
from ..base.tensor_text import tensor_text
from ..base.tensor_tree import as_sequence
from ..base.torch_internals import AccumulateGrad, autograd_node, count_dispatch_modes
from ..base.tracing import has_no_values, is_tracing
from ..comm.compared_operations import operation_hash_of, ranks_along
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.op_schema import OperatorSchema
from ..state import wrap
from ..watchdog import source_location
from ..watchdog.collective_hooks import get_or_make_operation_log, record_operation_error
from ..watchdog.flight_recorder import FAILED_MARK, EventLog, OperationHash, fingerprint
from ..watchdog.levels import CheckLevel
from .cache_key import BOOL_NAMES

_REPR_TYPES = str | bool | int | float | complex | None | torch.dtype | torch.layout | torch.memory_format


def record_calls(operator: OperatorSchema, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run``, the dispatch of an operator, to add each call to the log that ranks compare under ``"strict"``."""
    stores, unordered = operator.traits.stores_gradient or operator.is_view, operator.traits.accumulates_gradient

    def run_recorded(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Log the fingerprints of the call and of its result layouts, if it is recorded, and run the call."""
        if stores and isinstance(autograd_node(), AccumulateGrad):
            return run(cls, func, types, args, kwargs)
        layouts = list(_layouts_of(args, kwargs or {}))
        log = _operation_log_of(layouts) if _is_recording() else None
        if log is None:
            return run(cls, func, types, args, kwargs)
        text = f"{func}({', '.join(_static_arguments(operator, args, kwargs or {}))})  {', '.join(map(_layout_text, layouts))}"
        add = log.add_unordered_event if unordered else log.add_event
        add(fingerprint(text), text, _mesh_text(layouts[0].mesh), source_location.line_of_frame(sys._getframe(1)))
        output = run(cls, func, types, args, kwargs)
        for result in _iter_dtensors(as_sequence(output)):  # another rule may give it another layout with the same collectives
            if unordered:
                log.unordered += _layout_fingerprint(result._layout)
            else:
                log.mix(_layout_fingerprint(result._layout))
        return output

    return run_recorded


def record_error(operator: OperatorSchema, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record that a call raised, if calls of the operator are recorded: other ranks may not raise, and the program may go on.

    All errors of one type are equal: their messages may be about a rank's own data.
    """
    record_operation_error(error)
    if operator.traits.stores_gradient and isinstance(autograd_node(), AccumulateGrad):
        return
    layouts, text = list(_layouts_of(args, kwargs)), f"{operator.name}, which raised {type(error).__name__}"
    if not _is_recording():
        return
    if CheckLevel.now == "strict" and (log := _operation_log_of(layouts)) is not None:
        log.add_event(FAILED_MARK, text, _mesh_text(layouts[0].mesh), source_location.line_of_frame(sys._getframe(2)))
    elif CheckLevel.now == "watch" and not operator.is_view and (op_hash := operation_hash_of(layouts)) is not None:
        op_hash.fail(text)


def _is_recording() -> bool:
    """Return True if calls are recorded now: not in other threads, which have no common order, nor while tracing."""
    return threading.get_ident() == threading.main_thread().ident and not (count_dispatch_modes() and is_tracing())


def _operation_log_of(layouts: list[Layout]) -> EventLog | None:
    """Return the operation log that the ranks of the first tensor's mesh compare; None if ranks are not processes."""
    return get_or_make_operation_log(layouts[0].mesh._root.world, ranks_along(layouts[0].mesh)) if layouts else None


def _layouts_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Layout]:
    return (value._layout for value in _iter_dtensors((*args, *kwargs.values())))


class PlanFingerprints:
    """The plans of one operator under ``check_ranks="watch"``, each cached with the fingerprint and text of its calls.

    Attributes:
        find: ``find(cache_key, numbers)`` returns the program, None if there is none, and records the look-up: with the numbers
            that are in the key by their type; not in other threads, which have no common order, nor while tracing.
    """

    def __init__(self, operator: OperatorSchema, plans: dict[Any, Any]) -> None:
        """Make ``find``, the look-up of plans that records calls, with all that it reads as local variables."""
        self._operator, stores, unordered, many = (
            operator,
            operator.traits.stores_gradient,
            operator.traits.accumulates_gradient,
            OperationHash.MANY,
        )
        special = stores or unordered
        get, thread, main, modes = plans.get, threading.get_ident, threading.main_thread().ident, count_dispatch_modes

        def find(cache_key: tuple[Any, ...], numbers: list[Any] | None = None) -> Any:
            """Return the cached program of a cache key, None on a miss, and add the call to the hash that ranks compare."""
            cached = get(cache_key)
            program, op_hash, step, text = (None, *self._fingerprint_of(cache_key)) if cached is None else cached
            if op_hash is None or thread() != main or (modes() and is_tracing()):
                return program
            if not special:
                op_hash.hash = hash((op_hash.hash, step))  # hashes of integers are the same in all processes
            elif unordered:
                op_hash.unordered += step
            elif isinstance(autograd_node(), AccumulateGrad):
                return program
            else:
                op_hash.hash = hash((op_hash.hash, step))
            op_hash.last = text
            if numbers:
                (so_far := op_hash.numbers).extend(numbers)
                if len(so_far) > many:
                    op_hash.read_hash()
            return program

        self.find = find

    def with_fingerprint(self, program: Any, cache_key: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the plan-cache entry of a program: with the hash that its calls enter, their fingerprint and their text."""
        return program, *self._fingerprint_of(cache_key)

    def _fingerprint_of(self, cache_key: tuple[Any, ...]) -> tuple[OperationHash | None, int, str]:
        """Return the hash that calls with this cache key enter (None: they are not recorded), with their fingerprint and text."""
        op_hash = None
        if not self._operator.is_view and self._operator.traits.memory_use != "nothing":
            op_hash = operation_hash_of(list(_iter_layouts(cache_key)))
        if op_hash is None:
            return None, 0, ""
        text = f"{self._operator.name}({', '.join(map(_key_text, cache_key))})"
        return op_hash, fingerprint(text), text


def _iter_layouts(cache_key: Iterable[Any]) -> Iterator[Layout]:
    """Yield the layouts in a plan-cache key, at any depth."""
    for part in cache_key:
        if isinstance(part, Layout):
            yield part
        elif isinstance(part, tuple):
            yield from _iter_layouts(part)


def _key_text(part: Any) -> str:
    """Return a part of a plan-cache key as text that is the same on all ranks."""
    if isinstance(part, tuple):
        values = [_key_text(value) for value in part if not isinstance(value, type)]  # without the types of numbers
        return values[0] if len(values) == 1 else f"[{', '.join(values)}]"
    if isinstance(part, Layout):
        return _layout_text(part)
    return part.__name__ if isinstance(part, type) else BOOL_NAMES.get(part) or _value_text(part)


@memoize(1024)
def _layout_fingerprint(layout: Layout) -> int:
    return fingerprint(_layout_text(layout))


@memoize(64)
def _mesh_text(mesh: DeviceMesh) -> str:
    return repr(mesh.named(range(mesh.ndim)))


def _iter_dtensors(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the DTensors among values, at any depth of lists."""
    for value in values:
        if type(value) is wrap.TENSOR:
            yield value
        elif isinstance(value, list | tuple):
            yield from _iter_dtensors(value)


def _static_arguments(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield the arguments of a call that are no DTensors, each as text that is the same on all ranks."""
    for name, value in (*zip(operator.names, args, strict=False), *kwargs.items()):
        if type(value) is not wrap.TENSOR:
            yield f"{name}={_value_text(value)}"


def _layout_text(layout: Layout) -> str:
    return f"{tensor_text(layout.dtype, layout.shape)} ({', '.join(map(str, layout.placements))})"


def _value_text(value: Any) -> str:
    """Return the text of an argument in a fingerprint: the same on all ranks of a correct program."""
    if type(value) is wrap.TENSOR:
        return "*"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.device.type != "cpu" or has_no_values(value):
            return tensor_text(value.dtype, value.shape)
        return repr(value.item())  # a number
    if isinstance(value, list | tuple):
        return _value_text(value[0]) if len(value) == 1 else f"[{', '.join(map(_value_text, value))}]"  # dim=[0] is dim=0
    if isinstance(value, torch.device):
        return value.type  # each rank has its own
    return repr(value) if isinstance(value, _REPR_TYPES) else type(value).__name__
