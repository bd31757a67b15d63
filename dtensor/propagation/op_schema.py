"""Operator schemas: argument names, mutated arguments and returned aliases of an aten overload. Read once per overload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from ..base.caches import memoize
from ..base.torch_internals import CustomOpDef, OpOverload, OpOverloadPacket
from ..rules.op_traits import OperatorTraits, returns_view, traits_of


@dataclass(frozen=True, slots=True)
class OperatorSchema:
    """The schema of one overload, and its traits.

    Attributes:
        names: all argument names, of which the first ``positional`` may be passed by position.
        tensors: names of arguments that hold tensors or lists of tensors.
        scalars: names of number arguments (``Scalar`` or ``float``). No plan depends on their value.
        number_operands: names of number arguments that are tensors in another overload (``other`` of ``mul.Scalar``). For rules
            they are replicated operands.
        mutated: names of the arguments that are written to. ``outs``: those of them that are ``out=`` arguments and are returned.
        fills_lists: the operator writes its results into a list of tensors and returns nothing.
        returns: for each return value the name of the argument that is returned, or None for a new value.
        gives_tensors: some return value is a tensor or a list of tensors.
        is_view: some result aliases an argument without writing to it.
        reshapes: the written argument becomes another view of its memory (``unsqueeze_``).
        seeded: the operator generates random numbers.
        keyed: how many leading arguments, after a first tensor, are ints, bools, strings or lists of them. Equal values give
            equal cache keys.
        listed: some of the ``keyed`` arguments are lists.
        options: names of arguments of which equal values give equal cache keys at any position: dtypes, devices, flags, strings.
        traits: the traits that the schema does not state.
    """

    func: Any
    name: str
    names: tuple[str, ...]
    positional: int
    defaults: dict[str, Any]
    tensors: frozenset[str]
    scalars: frozenset[str]
    number_operands: frozenset[str]
    mutated: frozenset[str]
    outs: tuple[str, ...]
    fills_lists: bool
    returns: tuple[str | None, ...]
    gives_tensors: bool
    is_view: bool
    reshapes: bool
    seeded: bool
    keyed: int
    listed: bool
    options: frozenset[str]
    traits: OperatorTraits

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the argument values of a call by name, with defaults filled in."""
        bound = dict(self.defaults)
        bound.update(zip(self.names, args, strict=False))
        bound.update(kwargs)
        return bound

    def lacks_first_tensor(self, bound: dict[str, Any]) -> bool:
        """Return True if the first argument must be a tensor and is None, as the gradient of a result that has none.

        A backward pass passes None as the gradient of a result that has none. Other tensors that are None are optional.
        """
        first = self.func._schema.arguments[0] if self.names else None
        return first is not None and bound[first.name] is None and str(first.type) == "Tensor"

    def move_to_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call with as many of them as possible passed by position."""
        named = list(self.names[len(args) : self.positional])
        while named and named[-1] not in kwargs:
            named.pop()
        trailing = [kwargs[name] if name in kwargs else self.defaults[name] for name in named]
        return [*args, *trailing], {name: value for name, value in kwargs.items() if name not in named}

    @property
    def is_unrecorded_alias(self) -> bool:
        """Whether the result is a view that autograd does not record as one: ``detach``, ``view`` of a dtype."""
        return self.func in _UNRECORDED_ALIASES

    @property
    def out_of_place(self) -> Any:
        """Return the overload that returns what this in-place overload writes into its first argument; raise if there is none."""
        packet = getattr(torch.ops.aten, self.func._schema.name.removeprefix("aten::").removesuffix("_"))
        for overload in packet.overloads():
            overload_function = getattr(packet, overload)
            if tuple(a.name for a in overload_function._schema.arguments) == self.names and _argument_types(
                overload_function
            ) == _argument_types(self.func):
                return overload_function
        raise NotImplementedError(f"{self.name} has no out-of-place variant")

    def call(self, bound: dict[str, Any], func: Any = None) -> Any:
        """Call the overload with arguments by name. ``func`` replaces it: a function with the same signature without ``out=``."""
        positional = [bound[name] for name in self.names[: self.positional]]
        omitted = () if func is None else self.outs
        keywords = {name: bound[name] for name in self.names[self.positional :] if name in bound and name not in omitted}
        return (func or self.func)(*positional, **keywords)


_UNRECORDED_ALIASES = frozenset((torch.ops.aten.detach.default, torch.ops.aten.view.dtype))
ArgumentPosition = int | str  # how an argument was passed: a position or a name


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Which arguments of a call are passed by position (the first ``count``) and which by name (those in ``named``).

    Calls with one plan share it.

    ``reordered``: the call passed arguments by name that may be passed by position. This is the signature after they are put in
    order.
    """

    operator: OperatorSchema
    count: int
    named: frozenset[str]
    reordered: bool = False

    @classmethod
    def of(cls, operator: OperatorSchema, args: Sequence[Any], kwargs: dict[str, Any]) -> CallSignature:
        """Return the signature of a call; arguments by keyword count as positional where they have a position."""
        if not any(name in kwargs for name in operator.names[len(args) : operator.positional]):
            return cls(operator, len(args), frozenset(kwargs))
        ordered, named = operator.move_to_positions(args, kwargs)
        return cls(operator, len(ordered), frozenset(named), True)

    def given(self, name: str) -> ArgumentPosition | None:
        """Return the position or the name by which the argument was passed, or None if it was omitted."""
        position = self.operator.names.index(name)
        return position if position < self.count else name if name in self.named else None

    def place(self, name: str) -> ArgumentPosition:
        """Return the position or the name by which the argument was passed. Raise ``LookupError`` if it was omitted."""
        place = self.given(name)
        if place is None:
            raise LookupError(f"{self.operator.name}: the argument {name} was not passed")
        return place

    @property
    def omitted_positional(self) -> tuple[Any, ...]:
        """Return the defaults of the omitted arguments that may be passed by position."""
        operator = self.operator
        return tuple([operator.defaults[name] for name in operator.names[self.count : operator.positional]])

    @property
    def omitted_by_name(self) -> dict[str, Any]:
        """Return the defaults of the omitted arguments that can only be passed by name."""
        operator = self.operator
        names = operator.names[operator.positional :]
        return {name: operator.defaults[name] for name in names if name in operator.defaults and name not in self.named}


@memoize(8192)
def operator_schema_of(func: Any) -> OperatorSchema:
    """Return the parsed schema of an overload, made at the first request."""
    schema = func._schema
    arguments = schema.arguments
    types = {argument.name: str(argument.type) for argument in arguments}
    mutated = frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    written_by_alias_set = {
        name: argument.name
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for name in argument.alias_info.before_set
    }
    returns = tuple(
        next((written_by_alias_set[name] for name in r.alias_info.before_set if name in written_by_alias_set), None)
        if r.alias_info is not None
        else None
        for r in schema.returns
    )
    key_types = [*takewhile(_CACHE_KEY_TYPES.__contains__, [types[a.name] for a in arguments if not a.kwarg_only][1:])]
    return OperatorSchema(
        func=func,
        name=schema.name + (f".{schema.overload_name}" if schema.overload_name else ""),
        names=tuple(a.name for a in arguments),
        positional=sum(not a.kwarg_only for a in arguments),
        defaults={a.name: a.default_value for a in arguments if a.has_default_value()},
        tensors=frozenset(name for name, kind in types.items() if "Tensor" in kind),
        scalars=frozenset(name for name, kind in types.items() if kind in _NUMBER_TYPES),
        number_operands=_number_operands(func, types),
        mutated=mutated,
        outs=tuple(a.name for a in arguments if a.is_out and a.name in returns),
        fills_lists=any(a.is_out and a.name not in returns and types[a.name].startswith("List") for a in arguments),
        returns=returns,
        gives_tensors=any("Tensor" in str(r.type) for r in schema.returns),
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        reshapes=torch.Tag.inplace_view in func.tags,
        traits=traits_of(func),
        is_view=returns_view(func),
        keyed=len(key_types) + 1,
        listed=any("List" in kind for kind in key_types),
        options=frozenset(
            a.name for a in arguments if str(a.real_type).removeprefix("Optional[").removesuffix("]") in _OPTION_TYPES
        ),
    )


def _argument_types(func: Any) -> list[str]:
    return [str(a.type) for a in func._schema.arguments]


_CACHE_KEY_TYPES = frozenset(("int", "Optional[int]", "bool", "str", "List[int]", "Optional[List[int]]", "List[bool]"))
_OPTION_TYPES = frozenset(("ScalarType", "Layout", "Device", "MemoryFormat", "bool", "str"))
_NUMBER_TYPES = frozenset(("number", "Optional[number]", "float", "Optional[float]", "List[number]", "List[float]"))


def _number_operands(func: Any, types: dict[str, str]) -> frozenset[str]:
    """Return the names of number arguments that rules see as operands, since another overload takes tensors there."""
    packet = getattr(func, "overloadpacket", None)
    tensor_arguments = {"scalar", "scalars"}
    for overload in packet.overloads() if packet is not None else ():
        arguments = getattr(packet, overload)._schema.arguments
        tensor_arguments |= {a.name for a in arguments if "Tensor" in str(a.type)}
    return frozenset(name for name, kind in types.items() if kind in _NUMBER_TYPES and name in tensor_arguments)


def arguments_without_out(overload: Any) -> list[Any]:
    """Return the schema's arguments of an overload without ``out=`` arguments."""
    outs = operator_schema_of(overload).outs
    return [argument for argument in overload._schema.arguments if argument.name not in outs]


def resolve_overload(op: Any) -> Any:
    """Return the overload that ``op`` means, or None if ``op`` is no operator or is ambiguous.

    ``op`` is an overload, a result of ``torch.library.custom_op``, or an operator of which all overloads take the same arguments,
    apart from ``out=``.
    """
    if isinstance(op, OpOverload):
        return op
    op = op._opoverload.overloadpacket if isinstance(op, CustomOpDef) else op
    if not isinstance(op, OpOverloadPacket):
        return None
    overloads = [getattr(op, name) for name in op.overloads()]
    signatures = {tuple((a.name, str(a.type)) for a in arguments_without_out(overload)) for overload in overloads}
    return overloads[0] if len(signatures) == 1 else None
