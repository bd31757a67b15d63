"""Codegen: write a tape as a Python function over local tensors, one line for each step. A replay runs this text."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from ...base.group_by import group_by_key
from ...base.torch_internals import OpOverload
from ...comm import PerRank
from ...comm.map_ranks import communicator_of
from ...state.wrap import wrap_local
from ..tracing.tape import PerRankVars, Step, Tape, Var
from .outputs import ComputedTensor

_INFIX: dict[Any, str] = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**"}
_LITERAL_TYPES = (int, bool, str, type(None), torch.dtype, torch.memory_format, torch.layout)


class TapeFunction:
    """Python function generated from a tape; ``run`` calls it, ``text`` is its source.

    Its arguments are the local tensors of the tape's inputs. It returns a tuple: first ``values``, then the other results of the
    tape. The first results of the tape are the local tensors of ``values``.

    Args:
        name: of the function.
        tape: the steps.
        values: the tensors to make of the first results. None stands for a missing tensor.
        copied: for each local tensor of ``values``, whether the function returns a copy of it.

    Attributes:
        text: the source text. ``namespace`` holds the objects that it refers to.
        run: the compiled function.
    """

    def __init__(
        self, name: str, tape: Tape, values: Sequence[ComputedTensor | None], copied: Iterable[bool] = repeat(False)
    ) -> None:
        self.namespace: dict[str, Any] = {"torch": torch, "PerRank": PerRank, "inf": math.inf, "nan": math.nan}
        self._object_names: dict[int, str] = {}  # by address
        self._named_objects: list[Any] = []  # keeps the objects alive, so that no address is used again
        self._var_names: dict[Var, str] = {var: f"x{k}" for k, var in enumerate(tape.inputs)}
        body = [*self._write_constants(tape), *self._write_steps(tape)]
        results = "".join(f"{text}, " for text in self._write_results(tape, values, iter(copied))).rstrip()
        head = f"def {name}({', '.join(self._var_names[var] for var in tape.inputs)}):"
        self.text = "\n    ".join([head, *body, f"return ({results})"]) + "\n"
        exec(compile(self.text, f"<captured {name}>", "exec"), self.namespace)
        self.run: Callable[..., tuple[Any, ...]] = self.namespace[name]

    def _write_results(self, tape: Tape, values: Sequence[ComputedTensor | None], copied: Iterator[bool]) -> Iterator[str]:
        """Yield the source text of each result; the local tensors of a DTensor are wrapped in its layout."""
        names = map(self._var_name, tape.results)
        for value in values:
            parts = [next(names) + (".clone()" if next(copied) else "") for _ in (() if value is None else value.locals)]
            if value is None or value.layout is None:
                yield parts[0] if parts else "None"
                continue
            local = f"PerRank(({', '.join(parts)},))" if communicator_of(value.layout.mesh).holds_all else parts[0]
            yield f"{self._name_object('wrap_local', wrap_local)}({local}, {self._name_object('layout', value.layout)})"
        yield from names

    def _write_constants(self, tape: Tape) -> Iterator[str]:
        """Yield the assignment of each tensor made of Python numbers, cloned if it could be written to."""
        writable = {storage for step in tape.steps for storage in step.writes} | {var.storage for var in tape.results}
        for var, value in tape.constants.items():
            name = self._name_object("constant", value)
            yield f"{self._var_name(var)} = {name}{'.clone()' if var.storage in writable else ''}"

    def _write_steps(self, tape: Tape) -> Iterator[str]:
        """Yield the source lines of all steps, and ``del`` of variables after their last use."""
        last_uses = _find_last_uses(tape)
        for k, step in enumerate(tape.steps):
            yield from self._write_step(step)
            freed = [self._var_name(var) for var in last_uses.get(k, ())]
            if freed:
                yield f"del {', '.join(freed)}"

    def _write_step(self, step: Step) -> Iterator[str]:
        """Yield the source lines of one step: the call, and the assignment of its outputs to variables."""
        call, out = self._write_call(step), step.out
        if not any(True for _ in step.outputs):
            yield call
        elif not isinstance(out, tuple):
            yield from self._unpack(out, call)
        elif all(isinstance(item, (Var, type(None))) for item in out):
            yield f"{', '.join('_' if item is None else self._var_name(item) for item in out)}, = {call}"
        else:
            yield f"r = {call}"
            yield from self._unpack(out, "r")

    def _unpack(self, out: Any, name: str) -> Iterator[str]:
        """Yield assignments of the variables in ``out`` from the expression ``name``, which has the step's output."""
        match out:
            case Var():
                yield f"{self._var_name(out)} = {name}"
            case PerRankVars(items):
                yield f"{', '.join(map(self._var_name, items))}, = {name}.shards"
            case tuple():
                for k, item in enumerate(out):
                    yield from self._unpack(item, f"{name}[{k}]")

    def _write_call(self, step: Step) -> str:
        """Return the source text of a step's call, as a method, an infix operator or a function."""
        args = [self._write_value(value) for value in step.args]
        named = [f"{name}={self._write_value(value)}" for name, value in step.kwargs.items()]
        fn: Any = step.fn
        if isinstance(fn, MethodDescriptorType) and isinstance(step.args[0], Var):
            return f"{args[0]}.{fn.__name__}({', '.join([*args[1:], *named])})"
        if fn in _INFIX and len(args) == 2:
            one, other = (f"({arg})" if arg.startswith("-") else arg for arg in args)
            return f"{one} {_INFIX[fn]} {other}"
        return f"{self._function_name(fn)}({', '.join([*args, *named])})"

    def _function_name(self, fn: Any) -> str:
        """Return the name by which the generated code calls a function."""
        if isinstance(fn, OpOverload):
            return self._name_object(fn.name().replace("::", "_").replace(".", "_"), fn._op)
        name: str = fn.__name__
        if isinstance(fn, BuiltinFunctionType) and getattr(torch, name, None) is fn:
            return f"torch.{name}"
        return self._name_object(name.strip("_"), fn)

    def _write_value(self, value: Any) -> str:
        """Return the source text of an argument: a variable, a literal, or the name of an object of the generated function."""
        match value:
            case Var():
                return self._var_name(value)
            case PerRankVars(items):
                return f"PerRank(({', '.join(map(self._var_name, items))},))"
            case list():
                return f"[{', '.join(map(self._write_value, value))}]"
            case tuple() if not hasattr(value, "_fields") and type(value) in (tuple, torch.Size):
                return f"({''.join(f'{self._write_value(item)}, ' for item in value).rstrip()})"
            case slice():
                return f"slice({', '.join(map(self._write_value, (value.start, value.stop, value.step)))})"
            case float():
                return repr(value)
            case complex() if math.isfinite(value.real) and math.isfinite(value.imag):
                return repr(value)
            case _ if type(value) in _LITERAL_TYPES:
                return repr(value)
            case _:
                return self._name_object(type(value).__name__.lower(), value)

    def _name_object(self, name: str, value: Any) -> str:
        """Return the global name, similar to ``name``, under which the generated code finds the object ``value``."""
        object_name = self._object_names.get(id(value))
        if object_name is None:
            object_name, number = name, 1
            while object_name in self.namespace or not object_name.isidentifier():
                number += 1
                object_name = f"{name}_{number}" if name.isidentifier() else f"object_{number}"
            self.namespace[object_name] = value
            self._object_names[id(value)] = object_name
            self._named_objects.append(value)
        return object_name

    def _var_name(self, var: Var) -> str:
        """Return the name of a tape variable in the generated text, such as ``t3``."""
        name = self._var_names.get(var)
        if name is None:
            name = self._var_names[var] = f"t{var.index}"
        return name


def _find_last_uses(tape: Tape) -> dict[int, list[Var]]:
    """Return, by index of the step, the variables that it is the last to read, to delete them there."""
    last: dict[Var, int] = {}
    for k, step in enumerate(tape.steps):
        for var in (*step.inputs, *step.outputs):
            last[var] = k
    lasting = {*tape.results, *tape.inputs, *tape.constants}
    return group_by_key((k, var) for var, k in last.items() if var not in lasting)
