"""What the schema of an aten operator says: argument names, what it mutates, what it returns. Read once per overload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from ..base.caches import remembered
from ..base.torch_internals import CustomOpDef, OpOverload, OpOverloadPacket
from ..rules.op_traits import Facts, facts_of, shows_memory


@dataclass(frozen=True, slots=True)
class Operator:
    """The schema facts of one overload.

    Attributes:
        names: all argument names, ``positional`` of them positional.
        tensors: names of arguments that hold tensors or lists of them.
        scalars: positions of number arguments (``Scalar`` or ``float``), whose value no plan depends on.
        number_operands: names of number arguments that stand for a tensor in another overload (``mul.Scalar``'s ``other``): rules
            see them as one more replicated operand.
        mutated: names of the arguments written to; ``outs`` those of them that are ``out=`` results and come back.
        fills_lists: it writes its results into a list of tensors and returns nothing.
        returns: per return value the name of the argument that it is, or None for a new one.
        gives_tensors: some return value is a tensor or a list of them.
        is_view: some result aliases an argument without writing to it.
        reshapes: the argument written to is the same memory seen in another way (``unsqueeze_``).
        seeded: it draws random numbers.
        keyed: how many arguments, where the first is a tensor, are by their types ints, bools, strings or lists of them, so that
            equal ones mean the same.
        listed: some of these are lists.
        options: names of arguments of which the same holds by their types wherever they stand: dtypes, devices, flags, words.
        facts: what is known of it beside its schema.
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
    facts: Facts

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Argument values by name, defaults filled in."""
        bound = dict(self.defaults)
        bound.update(zip(self.names, args, strict=False))
        bound.update(kwargs)
        return bound

    def lacks(self, bound: dict[str, Any]) -> bool:
        """Whether the tensor that it is about, its first argument, is not there though it has to be: in a backward pass the
        gradient of a result that has none. Others that are not there are of calls that do without (lengths of attention)."""
        first = self.func._schema.arguments[0] if self.names else None
        return first is not None and bound[first.name] is None and str(first.type) == "Tensor"

    def in_order(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The same arguments, by position all that can be."""
        named = list(self.names[len(args) : self.positional])
        while named and named[-1] not in kwargs:
            named.pop()
        late = [kwargs[name] if name in kwargs else self.defaults[name] for name in named]
        return [*args, *late], {name: value for name, value in kwargs.items() if name not in named}

    @property
    def out_of_place(self) -> Any:
        """The overload that gives what this one, which ends on ``_``, makes of its first argument."""
        packet = getattr(torch.ops.aten, self.func._schema.name.removeprefix("aten::").removesuffix("_"))
        for overload in packet.overloads():
            found = getattr(packet, overload)
            if tuple(a.name for a in found._schema.arguments) == self.names and _kinds(found) == _kinds(self.func):
                return found
        raise NotImplementedError(f"{self.name} has no out-of-place variant")

    def call(self, bound: dict[str, Any], func: Any = None) -> Any:
        """Call the overload (or ``func``, a function with its signature but for ``out=``) with arguments by name."""
        positional = [bound[name] for name in self.names[: self.positional]]
        left_out = () if func is None else self.outs
        keywords = {name: bound[name] for name in self.names[self.positional :] if name in bound and name not in left_out}
        return (func or self.func)(*positional, **keywords)


Place = int | str  # where an argument stands in a call: by position, or by name


@dataclass(frozen=True, slots=True)
class Form:
    """Which arguments a call was given: the first ``count`` by position, others by name. Calls that share a plan share it.

    ``reordered``: arguments that may stand by position were given by name; this is the form after they are put in order.
    """

    operator: Operator
    count: int
    named: frozenset[str]
    reordered: bool = False

    @classmethod
    def of(cls, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Form:
        """Return the form of a call, its arguments put in order."""
        if not any(name in kwargs for name in operator.names[len(args) : operator.positional]):
            return cls(operator, len(args), frozenset(kwargs))
        ordered, named = operator.in_order(args, kwargs)
        return cls(operator, len(ordered), frozenset(named), True)

    def given(self, name: str) -> Place | None:
        """Where an argument stands; None: it was left out."""
        position = self.operator.names.index(name)
        return position if position < self.count else name if name in self.named else None

    def place(self, name: str) -> Place:
        """Where an argument stands that was given."""
        place = self.given(name)
        if place is None:
            raise LookupError(f"{self.operator.name}: the argument {name} was not passed")
        return place

    @property
    def tail(self) -> tuple[Any, ...]:
        """The defaults of what could stand by position and was left out."""
        operator = self.operator
        return tuple([operator.defaults[name] for name in operator.names[self.count : operator.positional]])

    @property
    def lacking(self) -> dict[str, Any]:
        """The defaults of what can only stand by name and was left out."""
        operator = self.operator
        names = operator.names[operator.positional :]
        return {name: operator.defaults[name] for name in names if name in operator.defaults and name not in self.named}


@remembered(8192)
def operator_of(func: Any) -> Operator:
    """The operator facts of an overload."""
    schema = func._schema
    arguments = schema.arguments
    kinds = {argument.name: str(argument.type) for argument in arguments}
    written = frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    owners = {
        name: argument.name
        for argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for name in argument.alias_info.before_set
    }
    returns = tuple(
        next((owners[name] for name in r.alias_info.before_set if name in owners), None) if r.alias_info is not None else None
        for r in schema.returns
    )
    keyed = [*takewhile(_KEYED.__contains__, [kinds[a.name] for a in arguments if not a.kwarg_only][1:])]
    return Operator(
        func=func,
        name=schema.name + (f".{schema.overload_name}" if schema.overload_name else ""),
        names=tuple(a.name for a in arguments),
        positional=sum(not a.kwarg_only for a in arguments),
        defaults={a.name: a.default_value for a in arguments if a.has_default_value()},
        tensors=frozenset(name for name, kind in kinds.items() if "Tensor" in kind),
        scalars=frozenset(name for name, kind in kinds.items() if kind in _NUMBERS),
        number_operands=_number_operands(func, kinds),
        mutated=written,
        outs=tuple(a.name for a in arguments if a.is_out and a.name in returns),
        fills_lists=any(a.is_out and a.name not in returns and kinds[a.name].startswith("List") for a in arguments),
        returns=returns,
        gives_tensors=any("Tensor" in str(r.type) for r in schema.returns),
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
        reshapes=torch.Tag.inplace_view in func.tags,
        facts=facts_of(func),
        is_view=shows_memory(func),
        keyed=len(keyed) + 1,
        listed=any("List" in kind for kind in keyed),
        options=frozenset(a.name for a in arguments if str(a.real_type).removeprefix("Optional[").removesuffix("]") in _OPTIONS),
    )


def _kinds(func: Any) -> list[str]:
    return [str(a.type) for a in func._schema.arguments]


_KEYED = frozenset(("int", "Optional[int]", "bool", "str", "List[int]", "Optional[List[int]]", "List[bool]"))
_OPTIONS = frozenset(("ScalarType", "Layout", "Device", "MemoryFormat", "bool", "str"))
_NUMBERS = frozenset(("number", "Optional[number]", "float", "Optional[float]", "List[number]", "List[float]"))


def _number_operands(func: Any, kinds: dict[str, str]) -> frozenset[str]:
    packet = getattr(func, "overloadpacket", None)
    tensors = {"scalar", "scalars"}
    for overload in packet.overloads() if packet is not None else ():
        arguments = getattr(packet, overload)._schema.arguments
        tensors |= {a.name for a in arguments if "Tensor" in str(a.type)}
    return frozenset(name for name, kind in kinds.items() if kind in _NUMBERS and name in tensors)


def arguments_given(overload: Any) -> list[Any]:
    """The schema's arguments but for ``out=`` results."""
    outs = operator_of(overload).outs
    return [argument for argument in overload._schema.arguments if argument.name not in outs]


def overload_of(op: Any) -> Any:
    """The overload that is meant: itself, the one that ``torch.library.custom_op`` made, or an operator's where all take the same
    arguments (``out=`` aside); None: it is no operator, or which is not said."""
    if isinstance(op, OpOverload):
        return op
    op = op._opoverload.overloadpacket if isinstance(op, CustomOpDef) else op
    if not isinstance(op, OpOverloadPacket):
        return None
    overloads = [getattr(op, name) for name in op.overloads()]
    signatures = {tuple((a.name, str(a.type)) for a in arguments_given(overload)) for overload in overloads}
    return overloads[0] if len(signatures) == 1 else None
