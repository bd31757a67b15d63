"""Symbolic sizes: hashable ``SymInt`` values that layouts and cache keys contain while a program is traced for any size."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import DTensorError
from . import torch_internals
from .torch_internals import DISPATCH_MODE_KEYS, FakeTensorMode, infra_mode
from .tracing import untraced

_PROXY = DISPATCH_MODE_KEYS.PROXY


class SymbolicSize(torch.SymInt):
    """Hashable ``SymInt``. Two are equal if they have the same expression in the same program.

    Torch records what is computed from it and which comparisons were decided; a decided comparison becomes a guard of the
    graph. So integer arithmetic needs no second form for symbols, and a cache entry with this key is found again only in the
    same program. It does not keep the program alive, and is not valid after the program.
    """

    def __init__(self, node: Any) -> None:
        self._expr, self._hint, self._program = node.expr, node.hint, weakref.ref(node.shape_env)
        self._hash = hash((id(node.shape_env), node.expr))

    @property
    def shape_env(self) -> Any:
        """Return torch's ``ShapeEnv`` of the program that has this size.

        Raises:
            DTensorError: the program has ended, so the size has no value.
        """
        shape_env = self._program()
        if shape_env is None:
            raise DTensorError(f"the symbolic size {self._expr} of a compiled program has no value outside of that program")
        return shape_env

    @property
    def node(self) -> Any:
        """Return the ``SymNode`` that torch computes with, of the program that is being recorded if there is one.

        While a program is recorded, the node belongs to that program. Torch finds the source of a size by this object, and a
        node of an earlier trace may belong to a gradient, which the forward pass does not have.
        """
        node = self.shape_env.create_symintnode(self._expr, hint=self._hint).node
        mode = infra_mode(_PROXY)
        if mode is None:  # also while torch records a step: it asked for the node before
            traced = _TRACED_NODES.last().get(node.expr)
            return node if traced is None or traced.shape_env is not node.shape_env else traced
        nodes = _TRACED_NODES.of(mode.tracer)
        if node.expr not in nodes:
            nodes[node.expr] = _node_in_program(node, mode.tracer)
        return nodes[node.expr]

    def __eq__(self, other: object) -> bool:
        """Return True if both sizes are equal in one program, which may add a guard; False for another program."""
        if isinstance(other, SymbolicSize):
            if other._program is not self._program:
                return False
            if other._expr == self._expr:
                return True
        return _decide("__eq__", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __repr__(self) -> str:
        return str(self._expr)


class _TracedNodes(weakref.WeakKeyDictionary[Any, dict[Any, Any]]):
    """Nodes for expressions in the programs that are recorded, by tracer."""

    tracer: Any = None  # weak reference to the last tracer

    def of(self, tracer: Any) -> dict[Any, Any]:
        self.tracer = weakref.ref(tracer)
        return self.setdefault(tracer, {})

    def last(self) -> dict[Any, Any]:
        tracer = self.tracer and self.tracer()
        return {} if tracer is None else self.of(tracer)


_TRACED_NODES = _TracedNodes()


def _node_in_program(node: Any, tracer: Any) -> Any:
    """Return a node for ``node`` in the program of ``tracer``, computed from the symbols of that program."""
    known = tracer.sympy_expr_tracker.get(node.expr)
    if known is not None:
        return known.value.node
    symbols = {symbol: tracer.sympy_expr_tracker.get(symbol) for symbol in node.expr.free_symbols}
    if None in symbols.values():  # a symbol of another program: the one that compiled autograd records
        return node
    symbols = {symbol: known.value for symbol, known in symbols.items()}
    same = torch_internals.sympy_interp(torch_internals.PythonReferenceAnalysis, symbols, node.expr)
    return same.node if isinstance(same, torch.SymInt) else node.wrap_int(int(same))


class SymbolicCost(torch.SymFloat):
    """Estimated cost that is computed from symbolic sizes. Costs that differ only by rounding compare equal.

    Torch evaluates its guards in another order of operations, and could find the greater cost smaller.
    """

    def __lt__(self, other: Any) -> bool:
        return _is_clearly_less(self, other)

    def __gt__(self, other: Any) -> bool:
        return _is_clearly_less(other, self)

    def __le__(self, other: Any) -> bool:
        return not self > other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __eq__(self, other: object) -> bool:
        return not (self < other or self > other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = torch.SymFloat.__hash__


def _is_clearly_less(one: Any, other: Any) -> bool:
    """Return True if cost ``one`` is less than ``other`` by more than rounding error."""
    one, other = (torch.SymFloat(value.node) if isinstance(value, SymbolicCost) else value for value in (one, other))
    with untraced():
        return bool(other - one > (one + other) * 1e-9)


def _wrap_cost_operation(plain: Any) -> Any:
    """Wrap the operation ``plain`` so that a symbolic float result is a :class:`SymbolicCost`."""

    def run_cost_operation(*values: Any) -> Any:
        result = plain(*values)
        return SymbolicCost(result.node) if type(result) is torch.SymFloat else result

    return run_cost_operation


def _wrap_size_operation(plain: Any) -> Any:
    """Wrap an operation of symbolic sizes so that its result is a size, or a cost if the other operand is a float."""
    compute_cost = _wrap_cost_operation(plain)

    def run_size_operation(self: SymbolicSize, *others: Any) -> Any:
        """Compute the symbolic size outside of the traced program; with a float operand return a symbolic cost."""
        if others and isinstance(others[0], (float, torch.SymFloat)):
            return compute_cost(self, *others)
        with untraced():  # must not become a step of the program
            return hashable_size(plain(self, *others))

    return run_size_operation


def _decide(name: str, *values: Any) -> Any:
    """Compare symbolic sizes with torch's method ``name``, and return a plain bool (or NotImplemented)."""
    with untraced():
        result = getattr(torch.SymInt, name)(*values)
        return result if result is NotImplemented else bool(result)


def _deciding_method(name: str) -> Any:
    return lambda self, other: _decide(name, self, other)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "neg"):
    setattr(SymbolicSize, f"__{_name}__", _wrap_size_operation(getattr(torch.SymInt, f"__{_name}__")))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg"):
    setattr(SymbolicCost, f"__{_name}__", _wrap_cost_operation(getattr(torch.SymFloat, f"__{_name}__")))
for _name in ("truediv", "rtruediv"):
    setattr(SymbolicSize, f"__{_name}__", _wrap_cost_operation(getattr(torch.SymInt, f"__{_name}__")))
for _name in ("lt", "le", "gt", "ge"):
    setattr(SymbolicSize, f"__{_name}__", _deciding_method(f"__{_name}__"))


def hashable_size(value: Any) -> Any:
    """Return ``value``, with a ``SymInt`` as a hashable :class:`SymbolicSize`, or as an int if it can have only one value."""
    if not isinstance(value, torch.SymInt):
        return value
    known = value.node.maybe_as_int()
    if known is not None:
        return known
    if type(value) is SymbolicSize:
        return value
    if not value.node.has_hint():
        raise torch_internals.GuardOnDataDependentSymNode(value.node.expr)
    return int(value) if _SPECIALIZED.includes(value.node) else SymbolicSize(value.node)


def hashable_sizes(values: Iterable[Any]) -> tuple[Any, ...]:
    values = tuple(values)
    return values if _PLAIN_TYPES.issuperset(map(type, values)) else tuple(map(hashable_size, values))


_PLAIN_TYPES = frozenset({int, type(None)})


def to_torch_symbols(values: Any) -> Any:
    """Return nested ``values`` with each :class:`SymbolicSize` as a plain ``SymInt``, as operators of a recorded program need."""
    if isinstance(values, (list, tuple)):
        return [to_torch_symbols(value) for value in values]
    return torch.SymInt(values.node) if type(values) is SymbolicSize else values


def contains_symbols(values: Iterable[Any]) -> bool:
    return SymbolicSize in set(map(type, values))


def specialize_symbols(value: Any) -> Any:
    """Return nested ``value`` with symbols specialized to ints, so that other sizes cause a new trace of the program."""
    if isinstance(value, dict):
        return {name: specialize_symbols(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value) if _PLAIN_TYPES.issuperset(map(type, value)) else [specialize_symbols(item) for item in value]
    return int(value) if isinstance(value, torch.SymInt) else value


def _source_names(expr: Any, node: Any) -> set[str]:
    """Return the names of the program inputs from which the symbols in ``expr`` come."""
    return {str(source.name) for symbol in expr.free_symbols for source in node.shape_env.var_to_sources.get(symbol, ())}


class _SpecializedSizes:
    """Names of the sources of sizes that the program under compilation is specialized on."""

    def __init__(self) -> None:
        self.program: Any = None
        self.names: set[str] = set()

    def add_names(self, names: set[str]) -> None:
        """Add size names of the program that is being compiled; names of an earlier program are dropped first."""
        program = torch_internals.compile_id()
        if program != self.program:
            self.program, self.names = program, set()
        self.names |= names

    def includes(self, node: Any) -> bool:
        """Return True if the program is specialized on a symbol of ``node``, or if that is a size of a leaf's gradient.

        Torch makes symbols of sizes of gradients too, and cannot guard them.
        """
        sources = _source_names(node.expr, node)
        if self.names and self.program == torch_internals.compile_id() and not self.names.isdisjoint(sources):
            return True
        return any(".grad" in name for name in sources)


_SPECIALIZED = _SpecializedSizes()


def recompile_if_specialized(values: Iterable[Any]) -> None:
    """Recompile the program if a symbol among ``values`` became an int since the values were recorded.

    Torch would get results with fewer symbols than it recorded.
    """
    if infra_mode(_PROXY) is not None:
        _recompile_specialized(
            [value for value in values if type(value) is SymbolicSize and value.node.maybe_as_int() is not None]
        )


def recompile_for_sizes(values: Iterable[Any]) -> None:
    """Recompile the program with ints for the symbols among ``values``."""
    _recompile_specialized([value for value in values if type(value) is SymbolicSize])


def recompile_unless_derivable(values: Iterable[Any], graph_sizes: Iterable[Any]) -> None:
    """Recompile the program with ints for symbols among ``values`` and ``graph_sizes`` that graphs cannot derive.

    Torch passes to a graph only the sizes of its arguments. A symbol that is a size of the base of a view is not among them,
    unless an item of ``graph_sizes`` is that symbol.
    """
    graph_sizes = [value for value in hashable_sizes(graph_sizes) if type(value) is SymbolicSize]
    known = {value.node.expr for value in graph_sizes if value.node.expr.is_symbol}
    recompile_for_sizes(
        value for value in (*values, *graph_sizes) if type(value) is SymbolicSize and _depends_on_view_base(value.node, known)
    )


def _depends_on_view_base(node: Any, known: set[Any]) -> bool:
    """Return True if a symbol of ``node`` outside of ``known`` comes only from a view's base, or a view that is made again."""
    names = [_source_names(symbol, node) for symbol in node.expr.free_symbols - known]
    return any(all("._base" in name or "<" in name for name in each) for each in names)


def _recompile_specialized(sizes: list[SymbolicSize]) -> None:
    """Restart compilation with the symbolic sizes ``sizes`` as constants; do nothing if there are none."""
    if sizes:
        _SPECIALIZED.add_names(set().union(*[_source_names(value._expr, value) for value in sizes]))
        raise torch_internals.restart(restart_reason="the program is right for one size alone")


def symbolic_fake_mode(values: Iterable[Any]) -> FakeTensorMode | None:
    """Return a fake mode with the ``ShapeEnv`` of the first symbol among ``values``, None if all sizes are ints.

    Values are sizes, layouts, tensors with symbols, and lists of these.
    """
    for value in values:
        if type(value) is SymbolicSize:
            return FakeTensorMode(shape_env=value.shape_env)
        sizes = value if isinstance(value, (list, tuple)) else ()
        if getattr(value, "has_symbols", False):
            sizes = (*value.shape, *value.stride)
        mode = symbolic_fake_mode(sizes)
        if mode is not None:
            return mode
    return None
