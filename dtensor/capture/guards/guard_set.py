"""Guard set: all that a function can read besides its arguments, and the checks that it is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch

from ...base.group_by import group_by_key
from ...base.recorder_hooks import CrossCallState
from .container_guards import ContainerGuards


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
