"""A tape as Python: one line for each step, over local tensors. This text is what runs."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from ..base.group_by import by_key
from ..base.torch_internals import OpOverload
from ..comm import PerRank, communicator_of
from ..dispatch.wrap import wrap_local
from .outputs import Base
from .tape import Ranks, Step, Tape, Var

_INFIX: dict[Any, str] = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**"}
_WRITTEN_OUT = (int, bool, str, type(None), torch.dtype, torch.memory_format, torch.layout)


class Source:
    """The text of a tape and the function that it defines.

    Attributes:
        text: a module that defines ``name``; what it names besides ``torch`` is in ``space``.
        run: the function: locals of the inputs in, a tuple out: of ``values``, whose locals are the tape's first results
            (``copied``: fresh copies of them), and of its other results.
    """

    def __init__(self, name: str, tape: Tape, values: Sequence[Base | None], copied: Iterable[bool] = repeat(False)) -> None:
        self.space: dict[str, Any] = {"torch": torch, "PerRank": PerRank, "inf": math.inf, "nan": math.nan}
        self._names: dict[int, str] = {}
        self._kept: list[Any] = []  # what names were given to, by address
        self._vars: dict[Var, str] = {var: f"x{k}" for k, var in enumerate(tape.inputs)}
        body = [*self._constants(tape), *self._steps(tape)]
        results = "".join(f"{text}, " for text in self._results(tape, values, iter(copied))).rstrip()
        head = f"def {name}({', '.join(self._vars[var] for var in tape.inputs)}):"
        self.text = "\n    ".join([head, *body, f"return ({results})"]) + "\n"
        exec(compile(self.text, f"<captured {name}>", "exec"), self.space)
        self.run: Callable[..., tuple[Any, ...]] = self.space[name]

    def _results(self, tape: Tape, values: Sequence[Base | None], copied: Iterator[bool]) -> Iterator[str]:
        found = map(self._var, tape.results)
        for value in values:
            parts = [next(found) + (".clone()" if next(copied) else "") for _ in (() if value is None else value.locals)]
            if value is None or value.layout is None:
                yield parts[0] if parts else "None"
                continue
            local = f"PerRank(({', '.join(parts)},))" if communicator_of(value.layout.mesh).holds_all else parts[0]
            yield f"{self._constant('wrap_local', wrap_local)}({local}, {self._constant('layout', value.layout)})"
        yield from found

    def _constants(self, tape: Tape) -> Iterator[str]:
        """Tensors made of Python numbers: the same one each time, unless somebody could write to it."""
        open_ = {storage for step in tape.steps for storage in step.writes} | {var.storage for var in tape.results}
        for var, value in tape.constants.items():
            shown = self._constant("constant", value)
            yield f"{self._var(var)} = {shown}{'.clone()' if var.storage in open_ else ''}"

    def _steps(self, tape: Tape) -> Iterator[str]:
        last = _last_uses(tape)
        for k, step in enumerate(tape.steps):
            yield from self._step(step)
            gone = [self._var(var) for var in last.get(k, ())]
            if gone:
                yield f"del {', '.join(gone)}"

    def _step(self, step: Step) -> Iterator[str]:
        call, out = self._call(step), step.out
        if not any(True for _ in step.outputs):
            yield call
        elif not isinstance(out, tuple):
            yield from self._taken_apart(out, call)
        elif all(isinstance(item, (Var, type(None))) for item in out):
            yield f"{', '.join('_' if item is None else self._var(item) for item in out)}, = {call}"
        else:
            yield f"r = {call}"
            yield from self._taken_apart(out, "r")

    def _taken_apart(self, out: Any, name: str) -> Iterator[str]:
        match out:
            case Var():
                yield f"{self._var(out)} = {name}"
            case Ranks(items):
                yield f"{', '.join(map(self._var, items))}, = {name}.shards"
            case tuple():
                for k, item in enumerate(out):
                    yield from self._taken_apart(item, f"{name}[{k}]")

    def _call(self, step: Step) -> str:
        args = [self._value(value) for value in step.args]
        named = [f"{name}={self._value(value)}" for name, value in step.kwargs.items()]
        fn: Any = step.fn
        if isinstance(fn, MethodDescriptorType) and isinstance(step.args[0], Var):
            return f"{args[0]}.{fn.__name__}({', '.join([*args[1:], *named])})"
        if fn in _INFIX and len(args) == 2:
            one, other = (f"({arg})" if arg.startswith("-") else arg for arg in args)
            return f"{one} {_INFIX[fn]} {other}"
        return f"{self._function(fn)}({', '.join([*args, *named])})"

    def _function(self, fn: Any) -> str:
        if isinstance(fn, OpOverload):
            return self._constant(fn.name().replace("::", "_").replace(".", "_"), fn._op)
        name: str = fn.__name__
        if isinstance(fn, BuiltinFunctionType) and getattr(torch, name, None) is fn:
            return f"torch.{name}"
        return self._constant(name.strip("_"), fn)

    def _value(self, value: Any) -> str:
        match value:
            case Var():
                return self._var(value)
            case Ranks(items):
                return f"PerRank(({', '.join(map(self._var, items))},))"
            case list():
                return f"[{', '.join(map(self._value, value))}]"
            case tuple() if not hasattr(value, "_fields") and type(value) in (tuple, torch.Size):
                return f"({''.join(f'{self._value(item)}, ' for item in value).rstrip()})"
            case slice():
                return f"slice({', '.join(map(self._value, (value.start, value.stop, value.step)))})"
            case float():
                return repr(value)
            case complex() if math.isfinite(value.real) and math.isfinite(value.imag):
                return repr(value)
            case _ if type(value) in _WRITTEN_OUT:
                return repr(value)
            case _:
                return self._constant(type(value).__name__.lower(), value)

    def _constant(self, name: str, value: Any) -> str:
        """The name of an object that the text refers to."""
        found = self._names.get(id(value))
        if found is None:
            found, number = name, 1
            while found in self.space or not found.isidentifier():
                number += 1
                found = f"{name}_{number}" if name.isidentifier() else f"object_{number}"
            self.space[found] = value
            self._names[id(value)] = found
            self._kept.append(value)
        return found

    def _var(self, var: Var) -> str:
        found = self._vars.get(var)
        if found is None:
            found = self._vars[var] = f"t{var.index}"
        return found


def _last_uses(tape: Tape) -> dict[int, list[Var]]:
    """For each step the variables that nobody reads after it: what they hold is freed there, as it is when a program runs."""
    last: dict[Var, int] = {}
    for k, step in enumerate(tape.steps):
        for var in (*step.inputs, *step.outputs):
            last[var] = k
    wanted = {*tape.results, *tape.inputs, *tape.constants}
    return by_key((k, var) for var, k in last.items() if var not in wanted)
