"""Floats that are not frozen in a tape: read from a tensor (``.item()``), or of a variable that changes (a learning rate).

Arithmetic on them is recorded; what a replay could not follow guards the variable, or is refused. Torch hands operators plain
floats, so which of an operator's floats are these is known from the torch function that called it: the floats of both are
compared, by keyword or in order.
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

from ..base.group_by import by_key
from ..base.patches import Together
from ..base.tensor_tree import leaves
from ..base.torch_internals import TensorBase
from ..errors import CaptureError
from .tape import Step, Var, substituted


class Number(float):
    """A float that is a variable of the tape. ``places``: of the variables of the function that it was computed from;
    ``read``: whether from a tensor too."""

    __slots__ = ("numbers", "places", "read", "var")
    numbers: Numbers
    places: frozenset[int]
    read: bool
    var: Var

    def __copy__(self) -> Number:
        return self

    def __deepcopy__(self, memo: Any) -> Number:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.numbers.escaped(self, "what is saved")
        return float, (plain(self),)


def plain(x: Any) -> Any:
    """The float that a number is."""
    return float.__float__(x) if type(x) is Number else x


class Numbers:
    """The numbers of one recorded run.

    Attributes:
        live: the thread whose run is under way; elsewhere, and afterwards, numbers are floats like any other.
        guarded: places of variables whose value the run depends on after all.
        seen: whether there are any.
        reading: whether a float is being read from a tensor, which will be known as ``last``.
    """

    def __init__(self, fresh: Callable[[], Var], append: Callable[[Step], None]) -> None:
        self._fresh, self._append = fresh, append
        self._frames: list[_Frame] = []
        self._until = ExitStack()  # the end of the run
        self.seen = self.reading = False
        self.live: int | None = None
        self.last: Var | None = None
        self.guarded: set[int] = set()

    @property
    def follows(self) -> bool:
        """Whether this is the thread whose run is under way."""
        return self.live == get_ident()

    def make(self, value: float, var: Var, places: frozenset[int] = frozenset(), read: bool = False) -> Number:
        """A float known as ``var``."""
        made = Number(value)
        made.numbers, made.var, made.places, made.read = self, var, places, read
        if not self.seen and self.follows:
            self._until.enter_context(_MATH)
        self.seen = True
        return made

    def compute(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)``, a step of the tape."""
        value = fn(*map(plain, args))
        if not self.follows:
            return value
        sources = [x for x in args if type(x) is Number]
        if type(value) is not float:
            for x in sources:
                self.escaped(x, getattr(fn, "__name__", "an operation"))
            return value
        var = self._fresh()
        self._append(Step(fn, tuple(x.var if type(x) is Number else x for x in args), {}, var))
        places = frozenset().union(*(x.places for x in sources))
        return self.make(value, var, places, any(x.read for x in sources))

    def escaped(self, x: Number, how: str) -> None:
        """Python code learns a number's value, and may decide by it."""
        if not self.follows:
            return
        if x.read:
            raise CaptureError(
                f"capture: a float that was read from a tensor with .item() is used by {how}, where a replay "
                "would use the old value. Compute with the 0-d tensor itself (torch.where for choices), or read "
                "it outside of the captured function"
            )
        self.guarded |= x.places

    def read(self, x: torch.Tensor) -> Any:
        """``x.item()``."""
        self.reading, self.last = True, None
        try:
            value = TensorBase.item(x)
        finally:
            self.reading = False
        if type(value) is not float or self.last is None:
            return value
        return self.make(value, self.last, read=True)

    # --- torch functions -----------------------------------------------------------------------------------------------
    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``func(*args, **kwargs)``, which takes numbers."""
        frame = _Frame(args, kwargs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)):
            for x in frame.numbers:  # autograd keeps the float for its formulas
                self.escaped(x, f"the differentiable operation {func.__name__}; use the 0-d tensor itself")
        self._frames.append(frame)
        try:
            result = func(*args, **kwargs)
        finally:
            self._frames.pop()
        for outer in self._frames:
            outer.followed |= frame.followed
        for x in frame.numbers:
            if id(x) not in frame.followed:
                self.escaped(x, func.__name__)
        return result

    def inserted(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a local operation with variables in place of numbers."""
        if not self._frames or not self._frames[-1].numbers:
            return args, kwargs
        frame, found = self._frames[-1], dict(_floats(args, kwargs))
        chosen = frame.match(found)
        if not chosen:
            return args, kwargs
        places = iter(range(len(found)))
        return substituted((args, kwargs), lambda x: chosen.get(next(places), x) if isinstance(x, float) else x)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, numbers are followed."""
        self.live = get_ident()
        try:
            with ExitStack() as self._until, _Mode(self):
                if self.seen:
                    self._until.enter_context(_MATH)
                yield
        finally:
            self.live = None


@contextmanager
def _math_followed() -> Iterator[None]:
    """``math`` while anybody records a run in which there are numbers.

    Its functions take the bits of a float, which nothing shows, so there are others in their places. They are the same for
    everybody: a number knows its recording, and all else goes to the function itself. A module that was imported meanwhile may
    hold some: it gets the functions themselves.
    """
    own = {name: fn for name, fn in vars(math).items() if isinstance(fn, BuiltinFunctionType)}
    modules = set(sys.modules)
    vars(math).update({name: _followed(fn) for name, fn in own.items()})
    yield
    theirs = {vars(math)[name]: fn for name, fn in own.items()}
    vars(math).update(own)
    for name in sys.modules.keys() - modules:
        if isinstance(module := sys.modules.get(name), ModuleType):
            _exchange(vars(module), theirs)


def _exchange(names: dict[str, Any], own: dict[Any, Any]) -> None:
    """Functions for those that stood in their places."""
    names.update({name: own[fn] for name, fn in list(names.items()) if isinstance(fn, FunctionType) and fn in own})


_MATH = Together(_math_followed)


def _followed(fn: Any) -> Any:
    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        number = next((x for x in args if type(x) is Number), None)
        return fn(*args, **kwargs) if number is None or kwargs else number.numbers.compute(fn, *args)

    return run


class _Mode(TorchFunctionMode):
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is TensorBase.item:
            return self.numbers.read(args[0])
        if func is torch.Tensor.backward:  # seen are, too, the hooks that run in it
            with self:
                return torch.autograd.backward(*_backward(*args, **kwargs))
        if not self.numbers.seen or not any(type(x) is Number for x in leaves((args, kwargs))):
            return func(*args, **kwargs)
        return self.numbers.called(func, args, kwargs)


def _backward(
    x: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> tuple[Any, ...]:
    """The arguments of ``torch.autograd.backward`` that do what ``x.backward`` does with these."""
    return x, gradient, retain_graph, create_graph, None, inputs


class _Frame:
    """A call of a torch function: its floats by their bits, in order."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.numbers = [x for x in leaves((args, kwargs)) if type(x) is Number]
        self.followed: set[int] = set()
        self._by_bits = by_key((plain(x).hex(), (label, x)) for _, (label, x) in _floats(args, kwargs))

    def match(self, found: dict[int, tuple[str | None, Any]]) -> dict[int, Var]:
        """Which of an operation's floats are which numbers: by keyword, or in order; none where that leaves a doubt."""
        chosen: dict[int, Var] = {}
        for bits, places in by_key((x.hex(), place) for place, (_, x) in found.items()).items():
            mine = self._by_bits.get(bits, [])
            if len(mine) != len(places) or not any(type(x) is Number for _, x in mine):
                continue
            labels = [label for label, _ in mine]
            if len(set(labels)) == len(labels) and {found[place][0] for place in places} == set(labels):
                named = dict(mine)
                pairs = [(place, named[found[place][0]]) for place in places]
            else:
                pairs = [(place, x) for place, (_, x) in zip(places, mine, strict=True)]
            for place, x in pairs:
                if type(x) is Number:
                    chosen[place] = x.var
                    self.followed.add(id(x))
        return chosen


def _floats(args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[int, tuple[str | None, Any]]]:
    """Floats in the order of a walk, numbered, each with its keyword."""
    labelled = [(None, x) for x in leaves(args)] + [(name, x) for name, value in kwargs.items() for x in leaves(value)]
    return enumerate(pair for pair in labelled if isinstance(pair[1], float))


def _operators() -> None:
    def beside(fn: Any, reflected: bool = False) -> Any:
        def run(self: Number, other: Any) -> Any:
            pair = (other, self) if reflected else (self, other)
            return self.numbers.compute(fn, *pair) if isinstance(other, (int, float)) else NotImplemented

        return run

    def alone(fn: Any) -> Any:
        return lambda self: self.numbers.compute(fn, self)

    def escaping(name: str) -> Any:
        method = getattr(float, name)

        def run(self: Number, *args: Any) -> Any:
            self.numbers.escaped(self, name.strip("_"))
            return method(self, *map(plain, args))

        return run

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        fn = getattr(operator, name)
        setattr(Number, f"__{name}__", beside(fn))
        setattr(Number, f"__r{name}__", beside(fn, reflected=True))
    for name in ("neg", "pos", "abs"):
        setattr(Number, f"__{name}__", alone(getattr(operator, name)))
    decisive = ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "float", "round", "trunc", "floor", "ceil", "hash", "divmod")
    for name in (*(f"__{name}__" for name in (*decisive, "rdivmod")), "is_integer", "hex", "as_integer_ratio"):
        setattr(Number, name, escaping(name))


_operators()
