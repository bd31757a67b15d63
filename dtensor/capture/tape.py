"""The tape: what ran on local tensors, in order, as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..base.memory_order import contiguous_stride
from ..comm import Communicator

ALL_REDUCE: Any = getattr(Communicator.all_reduce, "__wrapped__")  # noqa: B009  what a recorder keeps of a site


@dataclass(frozen=True, slots=True)
class Var:
    """A local tensor of the recorded run, or a collective under way; ``storage`` numbers the memory that it shares."""

    index: int
    storage: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """What a ``PerRank`` holds: one variable for each rank of an in-process mesh."""

    items: tuple[Var, ...]


@dataclass(slots=True, eq=False)
class Step:
    """One call on local tensors.

    Attributes:
        fn: a torch function, an overload, or a *site* (a collective, a draw): a function of the library that is one step.
        args, kwargs: with :class:`Var` and :class:`Ranks` in place of tensors.
        out: the same for what it gave.
        writes: the memory that it writes to.
        keep: it must run at every replay, in this order, whether or not its results are used. What a rank does with the result of
            a collective is its own affair, so no rank may leave one out.
        within: the operation on DTensors, or "" for one on plain tensors.
        stores: whether it is autograd's as it stores a gradient: it copies where somebody else holds a reference (a debugger).
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    writes: frozenset[int] = frozenset()
    keep: bool = False
    site: bool = False
    within: str = ""
    stores: bool = False

    @property
    def inputs(self) -> Iterator[Var]:
        yield from variables(self.args)
        yield from variables(self.kwargs)

    @property
    def outputs(self) -> Iterator[Var]:
        yield from variables(self.out)


@dataclass(slots=True, eq=False)
class Tape:
    """Steps with the variables that they start from and those that are wanted of them."""

    inputs: tuple[Var, ...]
    steps: list[Step]
    results: tuple[Var, ...]
    constants: dict[Var, Any] = field(default_factory=dict)  # tensors made of Python numbers


def variables(value: Any) -> Iterator[Var]:
    """The variables in a nested value, in order."""
    kind = type(value)
    if kind is Var:
        yield value
    elif kind is Ranks:
        yield from value.items
    elif kind is tuple or kind is list or isinstance(value, (tuple, list)):
        for item in value:
            yield from variables(item)
    elif kind is dict:
        for item in value.values():
            yield from variables(item)
    elif kind is slice:
        yield from variables((value.start, value.stop, value.step))


def substituted(value: Any, one: Callable[[Any], Any]) -> Any:
    """A nested value with ``one(x)`` for everything in it that is no list, tuple, dict or slice."""
    if isinstance(value, (list, tuple)):
        items = [substituted(item, one) for item in value]
        return items if isinstance(value, list) else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: substituted(item, one) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*[substituted(part, one) for part in (value.start, value.stop, value.step)])
    return one(value)


def is_row_major(fact: Any) -> bool:
    """Of memory of its own, which is what collectives that are joined give."""
    offset, shape, stride, _, conjugated, negated = fact
    return not (offset or conjugated or negated) and all(
        size == 1 or own == step for size, own, step in zip(shape, stride, contiguous_stride(tuple(shape)), strict=True)
    )
