"""Whether what a survey met is as it was: what is checked at each call, so in few, large comparisons."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, call, is_
from types import CellType, FunctionType
from typing import Any

from .dict_guards import Dictionaries
from .object_ownership import MISSING, attributes_of, held_in

_MADE_OF: Any = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_ABOUT: Any = attrgetter("__mro__", "__name__", "__qualname__")  # of classes
_HOME: Any = attrgetter("__dict__")
_CELL: Any = attrgetter("cell_contents")
_END = object()  # after what may be less or more


class Watch:
    """Collects what is met until :meth:`settle`, and compares it from then on: objects by identity."""

    def __init__(self) -> None:
        self._dicts = Dictionaries()
        self._sized: list[Collection[Any]] = []
        self._one: tuple[list[Callable[[Any], Any]], list[Any]] = [], []  # what gives an object of what
        self._several: tuple[list[Callable[[Any], Iterable[Any]]], list[Any]] = [], []
        self._ask: list[Callable[[], Any]] = []
        self._told: list[Any] = []  # what each of them told
        self._tensors: list[Any] = []

    def dict_(self, held: Mapping[Any, Any]) -> None:
        """All keys and values of a dictionary."""
        self._dicts.counting(held).whole = True

    def keys(self, held: Mapping[Any, Any]) -> None:
        """Which keys a dictionary has."""
        self._dicts.counting(held).keys = True

    def size(self, held: Mapping[Any, Any]) -> None:
        """How many entries it has."""
        self._dicts.counting(held).size = True

    def names(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Some variables of a module or a class, which may be missing."""
        self._dicts.counting(space).names.update(dict.fromkeys(names))

    def cells(self, cells: Iterable[CellType]) -> None:
        """Variables of closures."""
        for cell in cells:
            if contents(cell) is MISSING:
                self._several_of(lambda cell: (contents(cell),), cell)
            else:
                self._one_of(_CELL, cell)

    def function(self, fn: FunctionType) -> None:
        """Its code and defaults."""
        self._several_of(_MADE_OF, fn)

    def asked(self, names: Sequence[str], functions: list[FunctionType]) -> tuple[Any, ...]:
        """These attributes of functions; they, as they are."""
        for name in names:
            for fn in functions:
                self._one_of(attrgetter(name), fn)
        return tuple(getattr(fn, name) for name in names for fn in functions)

    def class_(self, kind: type) -> tuple[Any, ...]:
        """Its bases and names; they, as they are."""
        self._several_of(_ABOUT, kind)
        found: tuple[Any, ...] = _ABOUT(kind)
        return found

    def list_(self, held: Collection[Any]) -> None:
        """All that a list or set holds."""
        self._sized.append(held)
        self._several_of(iter, held)

    def slots(self, slots: Mapping[str, Any], value: Any) -> None:
        """What an object holds under these descriptors."""
        there = held_in(slots.values(), value)
        for slot, held in zip(slots.values(), there, strict=True):
            if held is not MISSING:
                self._one_of(slot.__get__, value)
        if missing := [slot for slot, held in zip(slots.values(), there, strict=True) if held is MISSING]:
            self._several_of(lambda value: held_in(missing, value), value)

    def object(self, value: Any) -> None:
        """Its class, and which dictionary has its attributes, which may be exchanged."""
        self._one_of(type, value)
        if type(getattr(value, "__dict__", None)) is dict:
            self._one_of(_HOME, value)

    def tensors(self, values: Iterable[Any]) -> None:
        """Their classes, and what is put on them."""
        for value in values:
            self._tensors.append(value)
            self._one_of(type, value)

    def referents(self, value: Any) -> None:
        """What an object of compiled code holds."""
        self._several_of(gc.get_referents, value)

    def other(self, held: Callable[[], Iterable[Any]]) -> None:
        """Whatever ``held()`` gives."""
        self._several_of(call, held)
        self._several_of(iter, (_END,))

    def state(self, held: Callable[[], Any], now: Any) -> None:
        """That ``held()`` equals ``now``."""
        self._ask.append(held)
        self._told.append(now)

    def _one_of(self, get: Callable[[Any], Any], value: Any) -> None:
        self._one[0].append(get)
        self._one[1].append(value)

    def _several_of(self, get: Callable[[Any], Iterable[Any]], value: Any) -> None:
        self._several[0].append(get)
        self._several[1].append(value)

    def settle(self) -> None:
        """Remember what there is now."""
        self._dicts.settle()
        self._put, self._put_on = self._put_now(), [*map(len, map(_HOME, self._tensors))]
        self._before, self._lengths = [*self._now()], [*map(len, self._sized)]

    def unchanged(self) -> bool:
        """Whether it is the same."""
        return self._dicts.unchanged() and self._same_objects() and self._same_states()

    def changed_entries(self) -> list[tuple[int, Any]] | None:
        """The entries of dictionaries, by address and key, that hold another object, which is remembered; None if that is not all
        that changed."""
        return self._dicts.changed() if self._same_objects() and self._same_states() else None

    def _same_objects(self) -> bool:
        try:
            return [*map(len, self._sized)] == self._lengths and all(map(is_, self._now(), self._before))
        except (AttributeError, ValueError):  # what is no more in a slot, a variable
            return False

    def _now(self) -> Iterator[Any]:
        return chain(map(call, *self._one), chain.from_iterable(map(call, *self._several)), (_END,))

    def _same_states(self) -> bool:
        """Whether states are the same, and nothing was put on tensors; the library's own come and go."""
        if [*map(call, self._ask)] != self._told:
            return False
        put_on = [*map(len, map(_HOME, self._tensors))]
        if put_on != self._put_on:
            if self._put_now() != self._put:
                return False
            self._put_on = put_on
        return True

    def _put_now(self) -> list[list[str]]:
        return [[*attributes_of(x)] for x in self._tensors]


def contents(cell: CellType) -> Any:
    """What a variable of a closure holds; MISSING before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
