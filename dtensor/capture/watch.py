"""Whether containers still hold the objects that they held: what is checked at each call, so in few, large comparisons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from types import CellType, FunctionType
from typing import Any

from .belonging import MISSING, attributes_of, held_in
from .holding import entries_of

_MADE_OF: Any = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_ABOUT: Any = attrgetter("__mro__", "__name__", "__qualname__")  # of classes
_HOME: Any = attrgetter("__dict__")


class Watch:
    """Collects containers until :meth:`settle`, and compares them from then on: objects by identity, names as words."""

    __slots__ = (
        "_asked",
        "_attributes",
        "_before",
        "_cells",
        "_classes",
        "_dicts",
        "_functions",
        "_held",
        "_homes",
        "_keyed",
        "_keys",
        "_lengths",
        "_lists",
        "_missing",
        "_names",
        "_objects",
        "_others",
        "_picks",
        "_sized",
        "_slots",
        "_spaces",
        "_states",
        "_tensors",
        "_values",
        "_worded",
    )

    def __init__(self) -> None:
        self._dicts: list[KeysView[Any]] = []
        self._held: list[Mapping[Any, Any]] = []
        self._values: list[Iterable[Any]] = []  # of these dictionaries, as they are whenever asked
        self._spaces: list[Mapping[Any, Any]] = []  # whose keys count, and not all values
        self._cells: list[CellType] = []
        self._functions: list[FunctionType] = []
        self._objects: list[Any] = []
        self._homes: list[Any] = []  # of the dictionaries of attributes, which may be exchanged
        self._tensors: list[Any] = []
        self._asked: tuple[Any, list[FunctionType]] = _MADE_OF, []
        self._classes: list[type] = []
        self._lists: list[Collection[Any]] = []
        self._slots: dict[tuple[Any, ...], list[Any]] = {}  # by descriptors
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, None]]] = {}  # per module, of what functions look up in it
        self._others: list[Callable[[], Iterable[Any]]] = []
        self._sized: list[Collection[Any]] = []
        self._states: list[tuple[Callable[[], Any], Any]] = []

    def dict_(self, held: Mapping[Any, Any]) -> None:
        """All keys and values of a dictionary."""
        keys, values, _ = entries_of(held)
        self._held.append(held)
        self._dicts.append(keys())
        self._values.append(values())

    def keys(self, held: Mapping[Any, Any]) -> None:
        """Which keys a dictionary has."""
        self._spaces.append(held)

    def cells(self, cells: Iterable[CellType]) -> None:
        """Variables of closures."""
        self._cells.extend(cells)

    def function(self, fn: FunctionType) -> None:
        """Its code and defaults."""
        self._functions.append(fn)

    def asked(self, names: Sequence[str], functions: list[FunctionType]) -> tuple[Any, ...]:
        """These attributes of functions; they, as they are."""
        if names:
            self._asked = attrgetter(*names, *names[: len(names) == 1]), functions
        return tuple(getattr(fn, name) for name in names for fn in functions)

    def class_(self, kind: type) -> tuple[Any, ...]:
        """Its bases and names; they, as they are."""
        self._classes.append(kind)
        found: tuple[Any, ...] = _ABOUT(kind)
        return found

    def list_(self, held: Collection[Any]) -> None:
        """All that a list or set holds."""
        self._lists.append(held)
        self._sized.append(held)

    def slots(self, slots: Mapping[str, Any], value: Any) -> None:
        """What an object holds under these descriptors."""
        self._slots.setdefault(tuple(slots.values()), []).append(value)

    def object(self, value: Any) -> None:
        """Its class, and which dictionary has its attributes."""
        self._objects.append(value)
        if type(getattr(value, "__dict__", None)) is dict:
            self._homes.append(value)

    def tensors(self, values: Iterable[Any]) -> None:
        """Their classes, and what is put on them."""
        self._tensors += values
        self._objects += self._tensors

    def names(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Some variables of a module or a class, which may be missing."""
        if names := dict.fromkeys(names):
            self._names.setdefault(id(space), (space, {}))[1].update(names)

    def size(self, held: Collection[Any]) -> None:
        """How many entries it has."""
        self._sized.append(held)

    def other(self, held: Callable[[], Iterable[Any]]) -> None:
        """Whatever ``held()`` gives."""
        self._others.append(held)

    def state(self, held: Callable[[], Any], now: Any) -> None:
        """That ``held()`` equals ``now``."""
        self._states.append((held, now))

    def settle(self) -> None:
        """Remember what they hold now."""
        held = [*self._dicts, *self._spaces]
        self._worded = [keys for keys in held if {*map(type, keys)} == {str}]
        self._keyed = [keys for keys in held if {*map(type, keys)} != {str}]
        self._picks, self._missing = [], []
        for space, names in self._names.values():
            there = [name for name in names if name in space]
            if there:
                self._picks.append((itemgetter(*there, *there[: len(there) == 1]), space))  # of more than one it gives a tuple
            if len(there) < len(names):
                self._missing.append((space, [name for name in names if name not in space]))
        self._attributes, self._lengths = self._names_put(), [*map(len, map(_HOME, self._tensors))]
        self._before, self._keys = self._now(), self._known_keys()

    def unchanged(self) -> bool:
        """Whether they hold the same objects."""
        return self._same_keys() and _same(self._now(), self._before)

    def _same_attributes(self) -> bool:
        """Whether nothing was put on tensors; the library's own come and go."""
        lengths = [*map(len, map(_HOME, self._tensors))]
        if lengths != self._lengths:
            if self._names_put() != self._attributes:
                return False
            self._lengths = lengths
        return True

    def _names_put(self) -> list[list[str]]:
        return [[*attributes_of(x)] for x in self._tensors]

    def changed_entries(self) -> list[tuple[int, Any]] | None:
        """The entries of dictionaries, by address and key, that hold another object; None if that is not all that changed."""
        now = self._now()
        if not self._same_keys() or len(now) != len(self._before):
            return None
        entries = [(id(held), key) for held, keys in zip(self._held, self._dicts, strict=True) for key in keys]
        places = [place for place, (one, other) in enumerate(zip(now, self._before, strict=True)) if one is not other]
        return [entries[place] for place in places] if not places or places[-1] < len(entries) else None

    def _known_keys(self) -> tuple[list[int], list[Any], list[Any]]:
        return (
            [*map(len, self._worded), *map(len, self._keyed), *map(len, self._sized)],
            [*chain.from_iterable(self._worded)],
            [*chain.from_iterable(self._keyed)],
        )

    def _same_keys(self) -> bool:
        (lengths, words, others), (before, same, known) = self._known_keys(), self._keys
        if lengths != before or words != same or not all(map(is_, others, known)):
            return False
        if self._states and not all(held() == now for held, now in self._states):
            return False
        return not self._tensors or self._same_attributes()

    def _now(self) -> list[Any]:
        found = [*chain.from_iterable(self._values)]
        try:
            found += [cell.cell_contents for cell in self._cells]
        except ValueError:  # one is not assigned yet
            found += [contents(cell) for cell in self._cells]
        found += chain.from_iterable(map(_MADE_OF, self._functions))
        if self._classes or self._lists or self._asked[1]:
            found += chain.from_iterable(map(*self._asked))
            found += chain.from_iterable(map(_ABOUT, self._classes))
            found += chain.from_iterable(self._lists)
        for slots, values in self._slots.items():
            found += _slotted(slots, values)
        found += map(type, self._objects)
        found += map(_HOME, self._homes)
        try:
            for pick, space in self._picks:
                found += pick(space)
        except KeyError:  # one is gone
            found.append(None)
        for space, names in self._missing:
            found += map(space.get, names, repeat(MISSING))
        for held in self._others:
            found += held()
        return found


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _slotted(slots: tuple[Any, ...], values: list[Any]) -> list[Any]:
    try:
        return [*chain.from_iterable(map(slot.__get__, values) for slot in slots)]
    except AttributeError:  # one is not assigned
        return [x for value in values for x in held_in(slots, value)]


def contents(cell: CellType) -> Any:
    """What a variable of a closure holds; MISSING before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
