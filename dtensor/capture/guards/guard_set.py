"""Guard set: all that a function can read besides its arguments, and the checks that it is unchanged.

Containers (dictionaries, lists, closures, objects) are compared with a snapshot, by identity. The comparison runs at each call of
a captured function, so it is made of few, large comparisons in compiled code.

[Note: Dictionary versions] Python 3.11 stores a version number in each dictionary, and changes it with each write (PEP 509). If
it is unchanged, the contents are not compared. Later Pythons report changes to watchers, but not changes of attributes. There all
contents are compared.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter, call, is_, itemgetter, ne
from types import CellType, CodeType, FunctionType, MappingProxyType
from typing import Any

import torch

from ...base.group_by import group_by_key
from ...base.recorder_hooks import CrossCallState
from ...base.torch_internals import dict_version
from .object_model import MISSING, guarded_attributes, read_slots, stored_entries

_HAS_DICT_VERSIONS = sys.version_info < (3, 12)
_FUNCTION_PARTS: Any = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CLASS_PARTS: Any = attrgetter("__mro__", "__name__", "__qualname__")
_DICT: Any = attrgetter("__dict__")
_CELL_CONTENTS: Any = attrgetter("cell_contents")
_END = object()  # marks the end of a result of variable length


@dataclass
class ObservedCode:
    """Code that runs were seen to execute and that discovery does not find by itself.

    Attributes:
        functions: functions that user code called and that discovery did not reach.
        computing: code that ran and computes names of attributes, variables or modules.
    """

    functions: list[FunctionType] = field(default_factory=list)
    computing: set[CodeType] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.functions or self.computing)

    def __str__(self) -> str:
        names = [*(fn.__qualname__ for fn in self.functions), *(code.co_name for code in self.computing)]
        return f"what {names[0]} reads"

    def extend(self, other: ObservedCode) -> None:
        """Add all that ``other`` has."""
        self.functions += other.functions
        self.computing |= other.computing


class GuardSet:
    """The guards of a function, filled by ``guard_discovery.discover_guards``.

    Tensors are inputs of the tape, and are read again at each call. All else is guarded.

    Attributes:
        observed: code that earlier runs were seen to execute.
        tensors: the reachable tensors, each once, in the order in which they were found.
        key: all else, and which places have the same tensor. Equal keys mean that a replay reads equal values.
        paths: for each entry of ``key``, where it was found, for messages.
        floats: the entries of ``key`` that are floats in a dictionary: by place the dictionary, and the key in it.
        compiled_callables: compiled functions in partials and the like. No profile event shows their calls.
        library_states: state that the library keeps from one call for the next.
        codes: the code that discovery has looked into.
        opaque_objects: by the name of a variable or attribute, an opaque object that only code of installed packages names, and
            its path.
        containers: compares the contents of all containers with their snapshot.
        version: how often only floats have changed.
    """

    def __init__(self, observed: ObservedCode | None = None) -> None:
        self.observed = observed or ObservedCode()
        self.tensors: list[torch.Tensor] = []
        self.key: list[Any] = []
        self.paths: list[str] = []
        self.floats: dict[int, tuple[dict[Any, Any], Any]] = {}
        self.compiled_callables: list[Any] = []
        self.library_states: list[CrossCallState] = []
        self.codes: set[CodeType] = set()
        self.opaque_objects: dict[str, tuple[Any, str]] = {}
        self.containers = ContainerGuards()
        self.unchanged = self.containers.unchanged  # bound here, because each call of a captured function calls it
        self.version = 0
        self._tensor_numbers: dict[int, int] = {}
        self._places: dict[int, int] = {}  # by address of an object, the place of its first entry
        self._alive: list[Any] = []

    @property
    def object_count(self) -> int:
        """The number of objects that were found."""
        return len(self._places)

    def add(self, entry: Any, path: str) -> None:
        """Add an entry to the key."""
        self.key.append(entry)
        self.paths.append(path)

    def add_state(self, get_state: Callable[[], Any], path: str) -> None:
        """Guard the value that ``get_state()`` returns."""
        self.add(get_state(), path)
        self.containers.add_state(get_state, self.key[-1])

    def add_tensor(self, x: torch.Tensor, path: str) -> bool:
        """Add a tensor; return True if it is new."""
        number = self._tensor_numbers.setdefault(id(x), len(self.tensors))
        self.add(("tensor", number), path)
        if number == len(self.tensors):
            self.tensors.append(x)
            return True
        return False

    def add_object(self, value: Any) -> bool:
        """Keep an object alive, so that its address is not used again; return True if it is new."""
        if id(value) in self._places:
            return False
        self._places[id(value)] = len(self.key)
        self._alive.append(value)
        return True

    def add_known_object(self, value: Any, path: str) -> None:
        """Add an entry that refers to the first entry of an object."""
        self.add(("again", self._places[id(value)]), path)

    def update_floats(self) -> bool:
        """Return True if only floats have changed; the key then has their present values."""
        changed = self.containers.take_changed_entries()
        # One float may be found by several paths.
        places_of = group_by_key(((id(mapping), key), place) for place, (mapping, key) in self.floats.items())
        if changed is None or any(entry not in places_of for entry in changed):
            return False
        places = [place for entry in changed for place in places_of[entry]]
        if any(type(self.floats[place][0][self.floats[place][1]]) is not float for place in places):
            return False
        for place in places:
            mapping, key = self.floats[place]
            self.key[place] = (float, repr(mapping[key]))
        self.version += 1
        return True

    def find_difference(self, later: GuardSet) -> str | None:
        """Return the path at which a later guard set differs; None if both are equal."""
        for path, mine, other in zip(self.paths, self.key, later.key, strict=False):
            if mine != other:
                return path
        if len(self.key) != len(later.key):
            longer = self.paths if len(self.paths) > len(later.paths) else later.paths
            return longer[min(len(self.key), len(later.key))]
        for number, (mine, other) in enumerate(zip(self.tensors, later.tensors, strict=True)):
            if mine is not other:
                return self.paths[self.key.index(("tensor", number))]
        return None


# --- containers --------------------------------------------------------------------------------------------------------------
class ContainerGuards:
    """Collects containers until :meth:`snapshot`, and compares them with it afterwards."""

    def __init__(self) -> None:
        self._dicts = DictGuards()
        self._sized: list[Collection[Any]] = []
        # Pairs of lists: getters, and the objects that they are called on
        self._single_getters: tuple[list[Callable[[Any], Any]], list[Any]] = [], []
        self._several_getters: tuple[list[Callable[[Any], Iterable[Any]]], list[Any]] = [], []
        self._state_getters: list[Callable[[], Any]] = []
        self._states: list[Any] = []
        self._tensors: list[Any] = []

    def add_dict(self, mapping: Mapping[Any, Any]) -> None:
        """Guard all keys and values of a dictionary."""
        self._dicts.coverage_of(mapping).entries = True

    def add_dict_keys(self, mapping: Mapping[Any, Any]) -> None:
        """Guard the keys of a dictionary."""
        self._dicts.coverage_of(mapping).keys = True

    def add_dict_size(self, mapping: Mapping[Any, Any]) -> None:
        """Guard the number of entries of a dictionary."""
        self._dicts.coverage_of(mapping).size = True

    def add_names(self, namespace: Mapping[str, Any], names: Iterable[str]) -> None:
        """Guard some variables of a module or class, which may be missing."""
        self._dicts.coverage_of(namespace).names.update(dict.fromkeys(names))

    def add_cells(self, cells: Iterable[CellType]) -> None:
        """Guard variables of closures."""
        for cell in cells:
            if cell_contents(cell) is MISSING:
                self._add_several(lambda cell: (cell_contents(cell),), cell)
            else:
                self._add_single(_CELL_CONTENTS, cell)

    def add_function(self, fn: FunctionType) -> None:
        """Guard the code and the defaults of a function."""
        self._add_several(_FUNCTION_PARTS, fn)

    def add_function_attributes(self, names: Sequence[str], functions: list[FunctionType]) -> tuple[Any, ...]:
        """Guard these attributes of functions, and return their values."""
        for name in names:
            for fn in functions:
                self._add_single(attrgetter(name), fn)
        return tuple(getattr(fn, name) for name in names for fn in functions)

    def add_class(self, kind: type) -> tuple[Any, ...]:
        """Guard the MRO, name and qualified name of a class, and return them."""
        self._add_several(_CLASS_PARTS, kind)
        parts: tuple[Any, ...] = _CLASS_PARTS(kind)
        return parts

    def add_collection(self, collection: Collection[Any]) -> None:
        """Guard the items of a list or set."""
        self._sized.append(collection)
        self._add_several(iter, collection)

    def add_slots(self, slots: Mapping[str, Any], value: Any) -> None:
        """Guard what an object holds under these slot descriptors."""
        values = read_slots(slots.values(), value)
        for slot, slot_value in zip(slots.values(), values, strict=True):
            if slot_value is not MISSING:
                self._add_single(slot.__get__, value)
        if empty := [slot for slot, slot_value in zip(slots.values(), values, strict=True) if slot_value is MISSING]:
            self._add_several(lambda value: read_slots(empty, value), value)

    def add_object(self, value: Any) -> None:
        """Guard the class of an object, and the identity of its ``__dict__``, which may be replaced."""
        self._add_single(type, value)
        if type(getattr(value, "__dict__", None)) is dict:
            self._add_single(_DICT, value)

    def add_tensors(self, values: Iterable[Any]) -> None:
        """Guard the classes of tensors, and the names of the attributes that user code has set on them."""
        for value in values:
            self._tensors.append(value)
            self._add_single(type, value)

    def add_referents(self, value: Any) -> None:
        """Guard the objects that an object of compiled code refers to."""
        self._add_several(gc.get_referents, value)

    def add_objects(self, get_objects: Callable[[], Iterable[Any]]) -> None:
        """Guard the identity of the objects that ``get_objects()`` returns."""
        self._add_several(call, get_objects)
        self._add_several(iter, (_END,))

    def add_state(self, get_state: Callable[[], Any], state: Any) -> None:
        """Guard that ``get_state()`` equals ``state``."""
        self._state_getters.append(get_state)
        self._states.append(state)

    def _add_single(self, getter: Callable[[Any], Any], value: Any) -> None:
        self._single_getters[0].append(getter)
        self._single_getters[1].append(value)

    def _add_several(self, getter: Callable[[Any], Iterable[Any]], value: Any) -> None:
        self._several_getters[0].append(getter)
        self._several_getters[1].append(value)

    def snapshot(self) -> None:
        """Remember the present contents."""
        self._dicts.snapshot()
        self._attribute_names, self._attribute_counts = self._read_attribute_names(), [*map(len, map(_DICT, self._tensors))]
        self._objects, self._lengths = [*self._read_objects()], [*map(len, self._sized)]

    def unchanged(self) -> bool:
        """Return True if the contents are those of the snapshot."""
        return self._dicts.unchanged() and self._same_objects() and self._same_states()

    def take_changed_entries(self) -> list[tuple[int, Any]] | None:
        """Return the changed dictionary entries as ``(address of the dictionary, key)``, and remember their present values.

        Return None, and remember nothing, if more than values of dictionaries has changed.
        """
        return self._dicts.take_changed() if self._same_objects() and self._same_states() else None

    def _same_objects(self) -> bool:
        try:
            return [*map(len, self._sized)] == self._lengths and all(map(is_, self._read_objects(), self._objects))
        except (AttributeError, ValueError):  # a slot or a closure variable is empty now
            return False

    def _read_objects(self) -> Iterator[Any]:
        several = chain.from_iterable(map(call, *self._several_getters))
        return chain(map(call, *self._single_getters), several, (_END,))

    def _same_states(self) -> bool:
        """Return True if states are equal, and user code has set no attribute on tensors. The library may set its own."""
        if [*map(call, self._state_getters)] != self._states:
            return False
        counts = [*map(len, map(_DICT, self._tensors))]
        if counts != self._attribute_counts:
            if self._read_attribute_names() != self._attribute_names:
                return False
            self._attribute_counts = counts
        return True

    def _read_attribute_names(self) -> list[list[str]]:
        return [[*guarded_attributes(x)] for x in self._tensors]


def cell_contents(cell: CellType) -> Any:
    """Return the value of a closure variable; MISSING before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


# --- dictionaries ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class DictCoverage:
    """The guarded part of a dictionary: all entries, all keys, the number of entries, and the values of some names."""

    mapping: Mapping[Any, Any]
    entries: bool = False
    keys: bool = False
    size: bool = False
    names: dict[str, None] = field(default_factory=dict)

    @property
    def versioned_dict(self) -> dict[Any, Any] | None:
        """The dictionary with a version that changes with each write; None if there is none. An OrderedDict has its own order."""
        mapping = gc.get_referents(self.mapping)[0] if isinstance(self.mapping, MappingProxyType) else self.mapping
        has_own_order = isinstance(mapping, OrderedDict) and len(mapping) > 1
        return mapping if _HAS_DICT_VERSIONS and isinstance(mapping, dict) and not has_own_order else None


class DictSnapshot:
    """A snapshot of the guarded parts of several dictionaries. Strings are compared by value, all else by identity."""

    __slots__ = (
        "_dicts",
        "_key_lists",
        "_keys",
        "_lengths",
        "_name_getters",
        "_objects",
        "_sized",
        "_string_key_lists",
        "_string_keys",
        "_values",
    )

    def __init__(self, coverages: Sequence[DictCoverage]) -> None:
        self._dicts = [one.mapping for one in coverages if one.entries]
        getters = [stored_entries(mapping) for mapping in self._dicts]
        self._values: list[Iterable[Any]] = [values() for _, values, _ in getters]  # live views
        keys = [*(keys() for keys, _, _ in getters), *(one.mapping.keys() for one in coverages if one.keys and not one.entries)]
        self._string_key_lists = [one for one in keys if {*map(type, one)} == {str}]
        self._key_lists = [one for one in keys if {*map(type, one)} != {str}]
        sized = (one.mapping for one in coverages if one.size and not one.entries)
        self._sized = [*self._string_key_lists, *self._key_lists, *sized]
        self._name_getters: tuple[list[Callable[[Any], Iterable[Any]]], list[Any]] = [], []
        for one in coverages:
            if one.names and not one.entries:
                self._add_names(one.mapping, one.names)
        self.remember()

    def _add_names(self, namespace: Mapping[str, Any], names: Iterable[str]) -> None:
        """Add names to compare: the values of those that are there, and the absence of the others."""
        present = [name for name in names if name in namespace]
        if present:
            # With one name itemgetter would not return a tuple, so the name is there twice.
            self._name_getters[0].append(itemgetter(*present, *present[: len(present) == 1]))
            self._name_getters[1].append(namespace)
        if missing := [name for name in names if name not in namespace]:
            self._name_getters[0].append(lambda namespace: (namespace.keys().isdisjoint(missing),))
            self._name_getters[1].append(namespace)

    def remember(self) -> None:
        """Replace the snapshot by the present contents."""
        self._lengths = [*map(len, self._sized)]
        self._string_keys = [*chain.from_iterable(self._string_key_lists)]
        self._keys = [*chain.from_iterable(self._key_lists)]
        self._objects = [*self._read_objects()]

    def _read_objects(self) -> Iterable[Any]:
        return chain(chain.from_iterable(self._values), chain.from_iterable(map(call, *self._name_getters)))

    def unchanged(self) -> bool:
        """Return True if the dictionaries have the contents of the snapshot: their keys, and the same objects as values."""
        try:
            return self._same_keys() and all(map(is_, self._read_objects(), self._objects))
        except KeyError:  # a name is gone
            return False

    def _same_keys(self) -> bool:
        """Return True if all dicts have the keys that they had, in the same order."""
        return (
            [*map(len, self._sized)] == self._lengths
            and [*chain.from_iterable(self._string_key_lists)] == self._string_keys
            and all(map(is_, chain.from_iterable(self._key_lists), self._keys))
        )

    def find_changed(self) -> list[tuple[int, Any]] | None:
        """Return the entries with another value, as ``(address of the dictionary, key)``; None if more has changed."""
        if not self._same_keys():
            return None
        entries = [(id(mapping), key) for mapping in self._dicts for key in stored_entries(mapping)[0]()]
        try:
            pairs = enumerate(zip(self._read_objects(), self._objects, strict=True))
            places = [place for place, (now, before) in pairs if now is not before]
        except KeyError:
            return None
        return [entries[place] for place in places] if not places or places[-1] < len(entries) else None


class DictGuards:
    """Collects dictionaries until :meth:`snapshot`, and compares them with it afterwards. See [Note: Dictionary versions]."""

    def __init__(self) -> None:
        self._coverages: dict[int, DictCoverage] = {}

    def coverage_of(self, mapping: Mapping[Any, Any]) -> DictCoverage:
        """Return the guarded part of a dictionary, to be extended."""
        return self._coverages.setdefault(id(mapping), DictCoverage(mapping))

    def snapshot(self) -> None:
        """Remember the present contents."""
        pairs = [(one, one.versioned_dict) for one in self._coverages.values()]
        self._versioned = [mapping for _, mapping in pairs if mapping is not None]
        self._snapshots = [DictSnapshot([one]) for one, mapping in pairs if mapping is not None]
        unversioned = [one for one, mapping in pairs if mapping is None]
        self._unversioned = [DictSnapshot(unversioned)] if unversioned else []
        self._versions = [*map(dict_version, self._versioned)]

    def unchanged(self) -> bool:
        """Return True if the contents are those of the snapshot."""
        if (versions := [*map(dict_version, self._versioned)]) != self._versions:
            if not all(snapshot.unchanged() for snapshot in self._with_new_version(versions)):
                return False
            self._versions = versions
        return all(snapshot.unchanged() for snapshot in self._unversioned) if self._unversioned else True

    def _with_new_version(self, versions: list[int]) -> Iterable[DictSnapshot]:
        return compress(self._snapshots, map(ne, versions, self._versions))

    def take_changed(self) -> list[tuple[int, Any]] | None:
        """Return the changed entries and remember their present values; None if more than values has changed."""
        versions = [*map(dict_version, self._versioned)]
        snapshots = [*self._with_new_version(versions), *self._unversioned]
        changed = [snapshot.find_changed() for snapshot in snapshots]
        if None in changed:
            return None
        for snapshot in snapshots:
            snapshot.remember()
        self._versions = versions
        return [entry for entries in changed for entry in entries or ()]
