"""Float provenance: traces which tensors a Python float was read from, so that a tape does not freeze its value.

Such floats are read from a tensor (``.item()``), or are variables that change between calls (a learning rate). Arithmetic on them
is recorded. If Python code uses the value in a way that a replay could not follow, the variable is guarded, or the recording is
refused.

Torch passes plain floats to operators. So which floats of an operator are traced ones follows from the torch function that called
it: the floats of both calls are matched by their bits, by keyword or in order.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...base.group_by import group_by_key
from ...base.patches import RefCountedPatch
from ...base.tensor_tree import iter_tree_leaves
from ...base.torch_internals import TensorBase
from ...errors import CaptureError
from .tape import Step, Var, map_step_values


class TracedFloat(float):
    """Float that is a variable of the tape, so that a replay computes its value again.

    Attributes:
        tracer: of the run.
        var: its variable.
        places: places, in the key of the guard set, of the floats that it was computed from.
        is_read: whether it was also computed from the values of a tensor.
    """

    __slots__ = ("is_read", "places", "tracer", "var")
    tracer: FloatTracer
    places: frozenset[int]
    is_read: bool
    var: Var

    def __copy__(self) -> TracedFloat:
        return self

    def __deepcopy__(self, memo: Any) -> TracedFloat:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.tracer.note_escape(self, "what is saved")
        return float, (to_plain_float(self),)


def to_plain_float(x: Any) -> Any:
    """Return the plain float of a traced one; any other value as it is."""
    return float.__float__(x) if type(x) is TracedFloat else x


class FloatTracer:
    """Tracer of one recorded run: records computations with traced floats, and guards those that Python code decides by.

    Args:
        new_var: returns a new variable for a float.
        add_step: adds a step to the tape.

    Attributes:
        thread: the thread of the run, None before and after. In other threads, traced floats are ordinary floats.
        guarded: places of floats that the run depends on, so they must not change.
        has_floats: whether the run has traced floats.
        is_reading: whether a float is being read from a tensor.
        last_read: the variable of this float, set by the recorder.
    """

    def __init__(self, new_var: Callable[[], Var], add_step: Callable[[Step], None]) -> None:
        self._new_var, self._add_step = new_var, add_step
        self._calls: list[_TorchCall] = []
        self._run_scope = ExitStack()
        self.has_floats = self.is_reading = False
        self.thread: int | None = None
        self.last_read: Var | None = None
        self.guarded: set[int] = set()

    @property
    def is_tracing(self) -> bool:
        """Return True if the traced run is active in this thread."""
        return self.thread == get_ident()

    def make_float(self, value: float, var: Var, places: frozenset[int] = frozenset(), is_read: bool = False) -> TracedFloat:
        """Return a traced float with this value and tape variable, and patch ``math`` for the run."""
        traced = TracedFloat(value)
        traced.tracer, traced.var, traced.places, traced.is_read = self, var, places, is_read
        if not self.has_floats and self.is_tracing:
            self._run_scope.enter_context(_MATH_PATCH)
        self.has_floats = True
        return traced

    def compute_traced(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return ``fn(*args)`` for traced floats, traced too and recorded as a step if the result is a float."""
        value = fn(*map(to_plain_float, args))
        if not self.is_tracing:
            return value
        sources = [x for x in args if type(x) is TracedFloat]
        if type(value) is not float:
            for x in sources:
                self.note_escape(x, getattr(fn, "__name__", "an operation"))
            return value
        var = self._new_var()
        self._add_step(Step(fn, tuple(x.var if type(x) is TracedFloat else x for x in args), {}, var))
        places = frozenset().union(*(x.places for x in sources))
        return self.make_float(value, var, places, any(x.is_read for x in sources))

    def note_escape(self, x: TracedFloat, user: str) -> None:
        """Guard the floats of the function's variables that ``x`` depends on, because Python code may decide by ``x``.

        Raises:
            CaptureError: the float was read from a tensor.
        """
        if not self.is_tracing:
            return
        if x.is_read:
            raise CaptureError(
                f"capture: a float that was read from a tensor with .item() is used by {user}, where a replay "
                "would use the old value. Compute with the 0-d tensor itself (torch.where for choices), or read "
                "it outside of the captured function"
            )
        self.guarded |= x.places

    def read_item(self, x: torch.Tensor) -> Any:
        """Return ``x.item()``; a float is traced and bound to the variable of the recorded read."""
        self.is_reading, self.last_read = True, None
        try:
            value = TensorBase.item(x)
        finally:
            self.is_reading = False
        if type(value) is not float or self.last_read is None:
            return value
        return self.make_float(value, self.last_read, is_read=True)

    # --- torch functions -----------------------------------------------------------------------------------------------
    def call_with_floats(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function that has traced floats as arguments; guard those that no recorded step received."""
        call = _TorchCall(args, kwargs)
        if torch.is_grad_enabled() and any(
            x.requires_grad for x in iter_tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        ):
            for x in call.traced:  # autograd keeps the float for its formulas
                self.note_escape(x, f"the differentiable operation {func.__name__}; use the 0-d tensor itself")
        self._calls.append(call)
        try:
            result = func(*args, **kwargs)
        finally:
            self._calls.pop()
        for outer in self._calls:
            outer.matched |= call.matched
        for x in call.traced:
            if id(x) not in call.matched:
                self.note_escape(x, func.__name__)
        return result

    def insert_floats(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a local operation with tape variables in place of traced floats."""
        if not self._calls or not self._calls[-1].traced:
            return args, kwargs
        floats = dict(_number_floats(args, kwargs))
        variables = self._calls[-1].match_floats(floats)
        if not variables:
            return args, kwargs
        places = iter(range(len(floats)))
        return map_step_values((args, kwargs), lambda x: variables.get(next(places), x) if isinstance(x, float) else x)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace the floats of this thread inside of the context."""
        self.thread = get_ident()
        try:
            with ExitStack() as self._run_scope, _FloatMode(self):
                if self.has_floats:
                    self._run_scope.enter_context(_MATH_PATCH)
                yield
        finally:
            self.thread = None


@contextmanager
def _patched_math() -> Iterator[None]:
    """Replace the functions of ``math`` by ones that trace floats, while any thread records a run with traced floats.

    The functions of ``math`` read the bits of a float, which no hook sees. So each is replaced by one that traces. All threads
    see the replacements: a traced float knows its recording, and all other arguments go to the function itself. A module that is
    imported meanwhile may hold replacements; it gets the functions themselves afterwards.
    """
    originals = {name: fn for name, fn in vars(math).items() if isinstance(fn, BuiltinFunctionType)}
    modules = set(sys.modules)
    vars(math).update({name: _make_tracing(fn) for name, fn in originals.items()})
    yield
    original_of = {vars(math)[name]: fn for name, fn in originals.items()}
    vars(math).update(originals)
    for name in sys.modules.keys() - modules:
        if isinstance(module := sys.modules.get(name), ModuleType):
            names = vars(module)
            patched = [(name, fn) for name, fn in list(names.items()) if isinstance(fn, FunctionType) and fn in original_of]
            names.update({name: original_of[fn] for name, fn in patched})


_MATH_PATCH = RefCountedPatch(_patched_math)


def _make_tracing(fn: Any) -> Any:
    """Return a wrapper of ``fn`` that records the call as a step if an argument is a traced float."""

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        traced = next((x for x in args if type(x) is TracedFloat), None)
        return fn(*args, **kwargs) if traced is None or kwargs else traced.tracer.compute_traced(fn, *args)

    return run


class _FloatMode(TorchFunctionMode):
    """Function mode that traces ``.item()`` and the torch functions that take traced floats."""

    def __init__(self, tracer: FloatTracer) -> None:
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is TensorBase.item:
            return self.tracer.read_item(args[0])
        if func is torch.Tensor.backward:  # run it under the mode, so that the mode also sees hooks
            with self:
                return torch.autograd.backward(*_backward_args(*args, **kwargs))
        if not self.tracer.has_floats or not any(type(x) is TracedFloat for x in iter_tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        return self.tracer.call_with_floats(func, args, kwargs)


def _backward_args(
    x: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> tuple[Any, ...]:
    """Return the arguments of ``torch.autograd.backward`` for ``x.backward`` with these arguments."""
    return x, gradient, retain_graph, create_graph, None, inputs


class _TorchCall:
    """Running call of a torch function: its float arguments are matched with those of the operations that it calls.

    Attributes:
        traced: its traced floats.
        matched: addresses of the traced floats that an operation of the call has received.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.traced = [x for x in iter_tree_leaves((args, kwargs)) if type(x) is TracedFloat]
        self.matched: set[int] = set()
        self._by_bits = group_by_key((to_plain_float(x).hex(), (label, x)) for _, (label, x) in _number_floats(args, kwargs))

    def match_floats(self, floats: dict[int, tuple[str | None, Any]]) -> dict[int, Var]:
        """Return the tape variables of an operation's floats, by number, where the match with traced floats is certain."""
        matches: dict[int, Var] = {}
        for bits, places in group_by_key((x.hex(), place) for place, (_, x) in floats.items()).items():
            own = self._by_bits.get(bits, [])
            if len(own) != len(places) or not any(type(x) is TracedFloat for _, x in own):
                continue
            labels = [label for label, _ in own]
            if len(set(labels)) == len(labels) and {floats[place][0] for place in places} == set(labels):
                by_label = dict(own)
                pairs = [(place, by_label[floats[place][0]]) for place in places]
            else:
                pairs = [(place, x) for place, (_, x) in zip(places, own, strict=True)]
            for place, x in pairs:
                if type(x) is TracedFloat:
                    matches[place] = x.var
                    self.matched.add(id(x))
        return matches


def _number_floats(args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[int, tuple[str | None, Any]]]:
    """Yield ``(number, (keyword or None, float))`` for each float in the arguments of a torch function, in order."""
    labelled = [(None, x) for x in iter_tree_leaves(args)] + [
        (name, x) for name, value in kwargs.items() for x in iter_tree_leaves(value)
    ]
    return enumerate(pair for pair in labelled if isinstance(pair[1], float))


def _add_operators() -> None:
    """Define the operators of TracedFloat: arithmetic is recorded on the tape, comparison and conversion guard the value."""

    def make_binary(fn: Any, is_reflected: bool = False) -> Any:
        """Return a method that records the binary function ``fn`` of a traced float and a number as a step."""

        def run(self: TracedFloat, other: Any) -> Any:
            pair = (other, self) if is_reflected else (self, other)
            return self.tracer.compute_traced(fn, *pair) if isinstance(other, (int, float)) else NotImplemented

        return run

    def make_unary(fn: Any) -> Any:
        return lambda self: self.tracer.compute_traced(fn, self)

    def make_escaping(name: str) -> Any:
        """Return the method ``name`` of float, which first notes that Python code may decide by the value."""
        method = getattr(float, name)

        def run(self: TracedFloat, *args: Any) -> Any:
            self.tracer.note_escape(self, name.strip("_"))
            return method(self, *map(to_plain_float, args))

        return run

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        fn = getattr(operator, name)
        setattr(TracedFloat, f"__{name}__", make_binary(fn))
        setattr(TracedFloat, f"__r{name}__", make_binary(fn, is_reflected=True))
    for name in ("neg", "pos", "abs"):
        setattr(TracedFloat, f"__{name}__", make_unary(getattr(operator, name)))
    decisive = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "round", "trunc", "floor", "ceil", "hash", "divmod")
    for name in (*(f"__{name}__" for name in (*decisive, "rdivmod")), "is_integer", "hex", "as_integer_ratio"):
        setattr(TracedFloat, name, make_escaping(name))


_add_operators()
