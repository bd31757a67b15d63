"""Whether dictionaries still hold what they held: all of it, or what of it counts.

Python 3.11 keeps with each dictionary a number that is another one after any change of it (PEP 509). Where it is the same, what
the dictionary holds is not looked at. Later Pythons tell changes to those who ask for them, but not those of attributes: there
everything is compared.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import call, is_, itemgetter, ne
from types import MappingProxyType
from typing import Any

from ..base.torch_internals import dict_version
from .object_children import entries_of

_VERSIONED = sys.version_info < (3, 12)


@dataclass(slots=True)
class Counting:
    """What of a dictionary counts: all that it holds, which keys it has, how many, what bears some names (nothing too)."""

    held: Mapping[Any, Any]
    whole: bool = False
    keys: bool = False
    size: bool = False
    names: dict[str, None] = field(default_factory=dict)

    @property
    def versioned(self) -> dict[Any, Any] | None:
        """The dictionary whose version tells of each change; None if none does: of those with an order of their own."""
        found = gc.get_referents(self.held)[0] if isinstance(self.held, MappingProxyType) else self.held
        ordered = isinstance(found, OrderedDict) and len(found) > 1
        return found if _VERSIONED and isinstance(found, dict) and not ordered else None


class Entries:
    """Of several dictionaries what counts, compared with what it was: objects by identity, names as words."""

    __slots__ = ("_dicts", "_keyed", "_known", "_lengths", "_objects", "_others", "_picks", "_sized", "_values", "_words")

    def __init__(self, counted: Sequence[Counting]) -> None:
        self._dicts = [one.held for one in counted if one.whole]
        parts = [entries_of(held) for held in self._dicts]
        self._values: list[Iterable[Any]] = [values() for _, values, _ in parts]  # as they are whenever asked
        keys = [*(keys() for keys, _, _ in parts), *(one.held.keys() for one in counted if one.keys and not one.whole)]
        self._words = [one for one in keys if {*map(type, one)} == {str}]
        self._others = [one for one in keys if {*map(type, one)} != {str}]
        self._sized = [*self._words, *self._others, *(one.held for one in counted if one.size and not one.whole)]
        self._picks: tuple[list[Callable[[Any], Iterable[Any]]], list[Any]] = [], []
        for one in counted:
            if one.names and not one.whole:
                self._pick(one.held, one.names)
        self.remember()

    def _pick(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        there = [name for name in names if name in space]
        if there:
            self._picks[0].append(itemgetter(*there, *there[: len(there) == 1]))  # of one name it would give no tuple
            self._picks[1].append(space)
        if missing := [name for name in names if name not in space]:
            self._picks[0].append(lambda space: (space.keys().isdisjoint(missing),))
            self._picks[1].append(space)

    def remember(self) -> None:
        """That they hold what they hold now."""
        self._lengths = [*map(len, self._sized)]
        self._known = [*chain.from_iterable(self._words)]
        self._keyed = [*chain.from_iterable(self._others)]
        self._objects = [*self._now()]

    def _now(self) -> Iterable[Any]:
        return chain(chain.from_iterable(self._values), chain.from_iterable(map(call, *self._picks)))

    def same(self) -> bool:
        """Whether they hold what they held."""
        try:
            return self._same_keys() and all(map(is_, self._now(), self._objects))
        except KeyError:  # a name is gone
            return False

    def _same_keys(self) -> bool:
        return (
            [*map(len, self._sized)] == self._lengths
            and [*chain.from_iterable(self._words)] == self._known
            and all(map(is_, chain.from_iterable(self._others), self._keyed))
        )

    def changed(self) -> list[tuple[int, Any]] | None:
        """The entries, by the address of the dictionary and the key, that hold another object; None if more has changed."""
        if not self._same_keys():
            return None
        entries = [(id(held), key) for held in self._dicts for key in entries_of(held)[0]()]
        try:
            pairs = enumerate(zip(self._now(), self._objects, strict=True))
            places = [place for place, (one, other) in pairs if one is not other]
        except KeyError:
            return None
        return [entries[place] for place in places] if not places or places[-1] < len(entries) else None


class Dictionaries:
    """Collects them until :meth:`settle`, and compares them from then on."""

    def __init__(self) -> None:
        self._counted: dict[int, Counting] = {}

    def counting(self, held: Mapping[Any, Any]) -> Counting:
        """What counts of one, to be added to."""
        return self._counted.setdefault(id(held), Counting(held))

    def settle(self) -> None:
        """Remember what they hold now."""
        found = [(one, one.versioned) for one in self._counted.values()]
        self._versioned = [held for _, held in found if held is not None]
        self._entries = [Entries([one]) for one, held in found if held is not None]
        rest = [one for one, held in found if held is None]
        self._rest = [Entries(rest)] if rest else []
        self._versions = [*map(dict_version, self._versioned)]

    def unchanged(self) -> bool:
        """Whether they hold the same."""
        if (now := [*map(dict_version, self._versioned)]) != self._versions:
            if not all(entries.same() for entries in self._touched(now)):
                return False
            self._versions = now
        return all(entries.same() for entries in self._rest) if self._rest else True

    def _touched(self, versions: list[int]) -> Iterable[Entries]:
        return compress(self._entries, map(ne, versions, self._versions))

    def changed(self) -> list[tuple[int, Any]] | None:
        """The entries that hold another object, which are remembered from now on; None if more has changed."""
        versions = [*map(dict_version, self._versioned)]
        parts = [*self._touched(versions), *self._rest]
        found = [entries.changed() for entries in parts]
        if None in found:
            return None
        for entries in parts:
            entries.remember()
        self._versions = versions
        return [entry for entries in found for entry in entries or ()]
