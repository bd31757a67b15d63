"""Sizes of a program that is traced for any size: integers that are not known yet, in tables and layouts as numbers are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import DTensorError
from . import torch_internals
from .torch_internals import DISPATCH_MODE_KEYS, FakeTensorMode, infra_mode
from .tracing import aside

_PROXY = DISPATCH_MODE_KEYS.PROXY


class OpenSize(torch.SymInt):
    """A symbol of torch's that may be a key: equal ones are those of one program, under one expression.

    What is computed of it, and whether something is larger, torch records; what was decided so is a guard of the graph. So
    integer maths needs no other form for it, and what is kept for it is found again in the same program alone. It keeps no
    program alive, and means nothing after its own.
    """

    def __init__(self, node: Any) -> None:
        self._expr, self._hint, self._program = node.expr, node.hint, weakref.ref(node.shape_env)
        self._hash = hash((id(node.shape_env), node.expr))

    @property
    def shape_env(self) -> Any:
        """Torch's record of the program.

        Raises:
            DTensorError: it has ended, and a number is asked for that was one for each of its calls.
        """
        found = self._program()
        if found is None:
            raise DTensorError(f"the symbolic size {self._expr} of a compiled program has no value outside of that program")
        return found

    @property
    def node(self) -> Any:
        """What torch computes with. In a program that is recorded one of its own: torch finds out where a size comes from by this
        object, and one that an earlier trace has seen may be that of a gradient, which the forward pass does not have."""
        node = self.shape_env.create_symintnode(self._expr, hint=self._hint).node
        mode = infra_mode(_PROXY)
        if mode is None:  # also where torch records a step: it has asked for the node before
            found = _RECORDED.last().get(node.expr)
            return node if found is None or found.shape_env is not node.shape_env else found
        recorded = _RECORDED.of(mode.tracer)
        if node.expr not in recorded:
            recorded[node.expr] = _recorded(node, mode.tracer)
        return recorded[node.expr]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OpenSize):
            if other._program is not self._program:
                return False
            if other._expr == self._expr:
                return True
        return _decided("__eq__", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __repr__(self) -> str:
        return str(self._expr)


class _Recorded(weakref.WeakKeyDictionary[Any, dict[Any, Any]]):
    """What stands for expressions in programs that are recorded, by their tracers."""

    tracer: Any = None  # the last

    def of(self, tracer: Any) -> dict[Any, Any]:
        self.tracer = weakref.ref(tracer)
        return self.setdefault(tracer, {})

    def last(self) -> dict[Any, Any]:
        tracer = self.tracer and self.tracer()
        return {} if tracer is None else self.of(tracer)


_RECORDED = _Recorded()


def _recorded(node: Any, tracer: Any) -> Any:
    """What stands for ``node`` in a program: computed of the sizes that it has."""
    known = tracer.sympy_expr_tracker.get(node.expr)
    if known is not None:
        return known.value.node
    symbols = {symbol: tracer.sympy_expr_tracker.get(symbol) for symbol in node.expr.free_symbols}
    if None in symbols.values():  # none of this program's: of the one that compiled autograd records
        return node
    symbols = {symbol: known.value for symbol, known in symbols.items()}
    same = torch_internals.sympy_interp(torch_internals.PythonReferenceAnalysis, symbols, node.expr)
    return same.node if isinstance(same, torch.SymInt) else node.wrap_int(int(same))


class OpenPrice(torch.SymFloat):
    """What is computed of open sizes and a rate. Prices that differ by no more than rounding are equal: torch computes its guards
    in another order, and would find the greater one smaller."""

    def __lt__(self, other: Any) -> bool:
        return _less(self, other)

    def __gt__(self, other: Any) -> bool:
        return _less(other, self)

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        return not (self < other or self > other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = torch.SymFloat.__hash__


def _less(one: Any, other: Any) -> bool:
    one, other = (torch.SymFloat(value.node) if isinstance(value, OpenPrice) else value for value in (one, other))
    with aside():
        return bool(other - one > (one + other) * 1e-9)


def _priced(plain: Any) -> Any:
    def operation(*values: Any) -> Any:
        found = plain(*values)
        return OpenPrice(found.node) if type(found) is torch.SymFloat else found

    return operation


def _keeping(plain: Any) -> Any:
    price = _priced(plain)

    def operation(self: OpenSize, *others: Any) -> Any:
        if others and isinstance(others[0], (float, torch.SymFloat)):
            return price(self, *others)
        with aside():  # no step of the program
            return size_of(plain(self, *others))

    return operation


def _decided(name: str, *values: Any) -> Any:
    with aside():
        found = getattr(torch.SymInt, name)(*values)
        return found if found is NotImplemented else bool(found)


def _deciding(name: str) -> Any:
    return lambda self, other: _decided(name, self, other)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "neg"):
    setattr(OpenSize, f"__{_name}__", _keeping(getattr(torch.SymInt, f"__{_name}__")))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg"):
    setattr(OpenPrice, f"__{_name}__", _priced(getattr(torch.SymFloat, f"__{_name}__")))
for _name in ("truediv", "rtruediv"):
    setattr(OpenSize, f"__{_name}__", _priced(getattr(torch.SymInt, f"__{_name}__")))
for _name in ("lt", "le", "gt", "ge"):
    setattr(OpenSize, f"__{_name}__", _deciding(f"__{_name}__"))


def size_of(value: Any) -> Any:
    """``value``; for a symbol one that may be a key, or the number if it can be no other."""
    if not isinstance(value, torch.SymInt):
        return value
    known = value.node.maybe_as_int()
    if known is not None:
        return known
    if type(value) is OpenSize:
        return value
    if not value.node.has_hint():
        raise torch_internals.GuardOnDataDependentSymNode(value.node.expr)
    return int(value) if _CLOSED.of(value.node) else OpenSize(value.node)


def sizes(values: Iterable[Any]) -> tuple[Any, ...]:
    values = tuple(values)
    return values if _NUMBERS.issuperset(map(type, values)) else tuple(map(size_of, values))


_NUMBERS = frozenset({int, type(None)})


def as_torch_has_them(values: Any) -> Any:
    """``values``, in lists also: symbols as steps of the program that is recorded know them."""
    if isinstance(values, (list, tuple)):
        return [as_torch_has_them(value) for value in values]
    return torch.SymInt(values.node) if type(values) is OpenSize else values


def has_symbols(values: Iterable[Any]) -> bool:
    return OpenSize in set(map(type, values))


def settled(value: Any) -> Any:
    """``value``, in lists and by name also; for a symbol the number that it is here: for others the program is traced anew."""
    if isinstance(value, dict):
        return {name: settled(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value) if _NUMBERS.issuperset(map(type, value)) else [settled(item) for item in value]
    return int(value) if isinstance(value, torch.SymInt) else value


def _sources(expr: Any, node: Any) -> set[str]:
    """Where the symbols of ``expr`` come from."""
    return {str(source.name) for symbol in expr.free_symbols for source in node.shape_env.var_to_sources.get(symbol, ())}


class _Closed:
    """The sizes that a program is to be for as they are: by where they come from, while it is compiled."""

    def __init__(self) -> None:
        self.program: Any = None
        self.names: set[str] = set()

    def add(self, names: set[str]) -> None:
        program = torch_internals.compile_id()
        if program != self.program:
            self.program, self.names = program, set()
        self.names |= names

    def of(self, node: Any) -> bool:
        """Also sizes of the gradient that a leaf has: of those torch makes symbols, too, and can have no guards."""
        sources = _sources(node.expr, node)
        if self.names and self.program == torch_internals.compile_id() and not self.names.isdisjoint(sources):
            return True
        return any(".grad" in name for name in sources)


_CLOSED = _Closed()


def still_open(values: Iterable[Any]) -> None:
    """Have the program compiled anew if a symbol among ``values`` has become a number since they were put down: torch then has
    results with fewer symbols than it wrote down before."""
    if infra_mode(_PROXY) is not None:
        _compile_anew([value for value in values if type(value) is OpenSize and value.node.maybe_as_int() is not None])


def for_one_size(values: Iterable[Any]) -> None:
    """Have the program compiled anew, with numbers for the symbols among ``values``."""
    _compile_anew([value for value in values if type(value) is OpenSize])


def only_told(values: Iterable[Any], told: Iterable[Any]) -> None:
    """Have the program compiled anew, with numbers for symbols among ``values`` and ``told`` that no number of ``told`` is, but
    a size of what an argument is a view of: torch gives graphs the sizes of their arguments alone."""
    told = [value for value in sizes(told) if type(value) is OpenSize]
    known = {value.node.expr for value in told if value.node.expr.is_symbol}
    for_one_size(value for value in (*values, *told) if type(value) is OpenSize and _of_a_base(value.node, known))


def _of_a_base(node: Any, known: set[Any]) -> bool:
    names = [_sources(symbol, node) for symbol in node.expr.free_symbols - known]
    return any(all("._base" in name or "<" in name for name in each) for each in names)  # or made while a view was made again


def _compile_anew(closed: list[OpenSize]) -> None:
    if closed:
        _CLOSED.add(set().union(*[_sources(value._expr, value) for value in closed]))
        raise torch_internals.restart(restart_reason="the program is right for one size alone")


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode | None:
    """Where tensors of such sizes are made without data; None where all are numbers."""
    for value in values:
        if type(value) is OpenSize:
            return FakeTensorMode(shape_env=value.shape_env)
        inner = (
            value if isinstance(value, (list, tuple)) else (*value.shape, *value.stride) if getattr(value, "sized", False) else ()
        )
        found = fake_mode_of(inner)
        if found is not None:
            return found
    return None
