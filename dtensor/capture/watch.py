"""Whether containers still hold the objects that they held: what is checked at each call, so in few, large comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from types import CellType
from typing import Any


class Watch:
    """Collects containers until :meth:`settle`, and compares them from then on."""

    __slots__ = ("_before", "_cells", "_dicts", "_lengths", "_names", "_others")

    def __init__(self) -> None:
        self._dicts: list[Mapping[Any, Any]] = []
        self._cells: list[CellType] = []
        self._names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}  # per module, of what functions look up in it
        self._others: list[Callable[[], Iterable[Any]]] = []

    def dict_(self, held: Mapping[Any, Any]) -> None:
        """All values of a dictionary."""
        self._dicts.append(held)

    def cells(self, cells: Iterable[CellType]) -> None:
        """Variables of closures."""
        self._cells.extend(cells)

    def names(self, space: dict[str, Any], names: Iterable[str]) -> None:
        """Some variables of a module."""
        self._names.setdefault(id(space), (space, {}))[1].update(dict.fromkeys(names))

    def other(self, held: Callable[[], Iterable[Any]]) -> None:
        """Whatever ``held()`` gives."""
        self._others.append(held)

    def settle(self) -> None:
        """Remember what they hold now."""
        self._lengths = [*map(len, self._dicts)]
        self._before = self._now()

    def unchanged(self) -> bool:
        """Whether they hold the same objects."""
        if [*map(len, self._dicts)] != self._lengths:
            return False
        now = self._now()
        return len(now) == len(self._before) and all(map(is_, now, self._before))

    def changed_entries(self) -> list[tuple[int, Any]] | None:
        """The entries of dictionaries, by address and key, that hold another object; None if that is not all that changed."""
        now = self._now()
        if [*map(len, self._dicts)] != self._lengths or len(now) != len(self._before):
            return None
        entries = [(id(held), key) for held in self._dicts for key in held]
        places = [place for place, (one, other) in enumerate(zip(now, self._before, strict=True)) if one is not other]
        return [entries[place] for place in places] if not places or places[-1] < len(entries) else None

    def _now(self) -> list[Any]:
        found = [value for held in self._dicts for value in held.values()]
        try:
            found += [cell.cell_contents for cell in self._cells]
        except ValueError:  # one is not assigned yet
            found += [contents(cell) for cell in self._cells]
        for space, names in self._names.values():
            found += map(space.get, names)
        for held in self._others:
            found += held()
        return found


def contents(cell: CellType) -> Any:
    """What a variable of a closure holds; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
