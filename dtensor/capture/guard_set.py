"""What a survey writes down: tensors, a key of everything else, where each part of it stands, and what is watched then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch

from ..base.group_by import by_key
from ..base.recorder_hooks import Between
from .guards import Watch


@dataclass
class Ran:
    """What runs of a function were seen to do that is not found without: functions that they called, and the code of those that
    compute names (of attributes, variables or modules)."""

    functions: list[FunctionType] = field(default_factory=list)
    computing: set[CodeType] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.functions or self.computing)

    def __str__(self) -> str:
        names = [*(fn.__qualname__ for fn in self.functions), *(code.co_name for code in self.computing)]
        return f"what {names[0]} reads"

    def extend(self, other: Ran) -> None:
        """All that either has."""
        self.functions += other.functions
        self.computing |= other.computing


class Notes:
    """Those of one survey.

    Attributes:
        tensors: all that were found, each once, in the order found.
        key: everything else, and which places hold the same tensor; equal keys mean that a replay reads the same.
        paths: for each entry of ``key`` where it stands, to tell the user.
        floats: entries of ``key`` that are floats in dictionaries (of attributes too): the dictionary, and the key there.
        wrapped: compiled functions that partials and the like call, which nobody sees them do.
        between: what the library keeps for later calls.
        codes: the code that was looked into.
        version: how often only such floats were found to have changed.
        unchanged: tells whether every container still holds the objects that the survey found.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.key: list[Any] = []
        self.paths: list[str] = []
        self.floats: dict[int, tuple[dict[Any, Any], Any]] = {}
        self.wrapped: list[Any] = []
        self.between: list[Between] = []
        self.codes: set[CodeType] = set()
        self.version = 0
        self._watch = Watch()
        self.unchanged = self._watch.unchanged
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []

    def _note(self, part: Any, path: str) -> None:
        self.key.append(part)
        self.paths.append(path)

    def _note_state(self, state: Callable[[], Any], path: str) -> None:
        """What ``state()`` gives, now and later."""
        self._note(state(), path)
        self._watch.state(state, self.key[-1])

    def _first(self, value: Any) -> bool:
        """Whether an object is met for the first time; from then on its address is not used again."""
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = len(self.key)
        self._alive.append(value)
        return True

    def refreshed(self) -> bool:
        """Whether nothing but floats has changed; then the key is brought up to date."""
        changed = self._watch.changed_entries()
        known = by_key(((id(held), key), place) for place, (held, key) in self.floats.items())  # some are met in several ways
        if changed is None or any(entry not in known for entry in changed):
            return False
        places = [place for entry in changed for place in known[entry]]
        if any(type(self.floats[place][0][self.floats[place][1]]) is not float for place in places):
            return False
        for place in places:
            held, key = self.floats[place]
            self.key[place] = (float, repr(held[key]))
        self.version += 1
        return True

    def difference(self, other: Notes) -> str | None:
        """Where ``other``, a later survey, holds something else; None if it does not."""
        for path, mine, its in zip(self.paths, self.key, other.key, strict=False):
            if mine != its:
                return path
        if len(self.key) != len(other.key):
            return (self.paths if len(self.paths) > len(other.paths) else other.paths)[min(len(self.key), len(other.key))]
        for number, (mine, its) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if mine is not its:
                return self.paths[self.key.index(("tensor", number))]
        return None
