"""How a replay makes what the function returned: new tensors, the very tensors that were given, and views of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from ..base.recorder_hooks import Between
from ..comm import PerRank
from ..errors import CaptureError
from ..layout.layout import Layout
from ..tensor.dtensor import DTensor
from ..tensor.views.block_owners import locals_of
from ..tensor.views.lazy_view import RemoteView
from .float_provenance import Number, plain
from .object_ownership import VALUES
from .recorder import Recorder
from .tape import Var

ARG, ENV, GRAD = range(3)


class Given(NamedTuple):
    """A tensor by number: among the arguments (``ARG``) or in the survey (``ENV``), or a leaf's gradient (``GRAD``)."""

    kind: int
    number: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A Python value."""

    value: Any


@dataclass(frozen=True, slots=True)
class LocalOf:
    """The local of a given tensor, as ``to_local`` gives it."""

    given: Given


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that the tape computes: number ``base`` of them."""

    base: int


@dataclass(frozen=True, slots=True)
class Joined:
    """A ``PerRank`` of tensors that the tape computes."""

    bases: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """View operations on a tensor, one after the other: (overload, place in its results, arguments after the first, keywords)."""

    root: Given | Made
    chain: tuple[tuple[Any, int | None, tuple[Any, ...], dict[str, Any]], ...]


Result: TypeAlias = Given | Constant | LocalOf | Made | Joined | View
Kept: TypeAlias = tuple[Between, tuple[Result, ...], Any]  # where, its leaves, and how they are nested


@dataclass(frozen=True, slots=True)
class Base:
    """A tensor that the tape computes: its locals, its layout (None: a plain tensor), whether it has a gradient."""

    locals: tuple[Var, ...]
    layout: Layout | None
    requires_grad: bool


class Sorter:
    """Sorts the leaves of what the function returned."""

    def __init__(
        self,
        recorder: Recorder,
        given: dict[int, Given],
        locals_of_given: dict[int, Given],
        storages: set[int],
        spent: Callable[[torch.Tensor], bool],
    ) -> None:
        self.recorder, self.given, self.locals_of_given, self.storages = recorder, given, locals_of_given, storages
        self.spent = spent  # whether a tensor's history is used up
        self.bases: list[Base] = []
        self.tensors: list[Any] = []  # of the recorded run, one for each base
        self._numbers: dict[int, int] = {}

    def sort(self, leaves: list[Any]) -> list[Result]:
        """How each leaf is made."""
        shared = self._shared(leaves)
        return [self._one(leaf, shared) for leaf in leaves]

    def local_of(self, x: Any) -> int:
        """The number of what the tape computes as the local of a tensor that was there before.

        Raises:
            CaptureError: it is another tensor's too.
        """
        found = self._vars(x)
        known = self.storages | {var.storage for base in self.bases for var in base.locals}
        if any(var.storage in known for var in found):
            raise CaptureError(
                "capture: the function makes one of its variables share memory with another tensor (x.data = y); "
                "write to it in place: x.copy_(y)"
            )
        return self._base(x, found)

    def _shared(self, leaves: list[Any]) -> set[int]:
        """Memory that several different results show, or the given tensors."""
        seen: dict[int, int] = {}
        shared = set(self.storages)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self.given:
                for var in self._vars(leaf):
                    if seen.setdefault(var.storage, id(leaf)) != id(leaf):
                        shared.add(var.storage)
        return shared

    def _vars(self, x: Any) -> tuple[Var, ...]:
        found = tuple(map(self.recorder.find, locals_of(x)))
        if any(var is None for var in found):
            raise CaptureError(
                "capture: the function returns a tensor that is neither an argument nor computed by it; pass it as an argument"
            )
        return found  # type: ignore[return-value]  # none is None

    def _one(self, leaf: Any, shared: set[int]) -> Result:
        if type(leaf) is Number:
            self.bases.append(Base((leaf.var,), None, False))
            self.tensors.append(plain(leaf))
            return Made(len(self.bases) - 1)
        if not isinstance(leaf, torch.Tensor):
            if isinstance(leaf, VALUES) or leaf is Ellipsis:
                return Constant(leaf)
            raise CaptureError(
                f"capture: the function returns a {type(leaf).__name__}, and a replay cannot make a new one; "
                "return tensors, numbers and containers of them"
            )
        if id(leaf) in self.given:
            return self.given[id(leaf)]
        if id(leaf) in self.locals_of_given:
            return LocalOf(self.locals_of_given[id(leaf)])
        variables = self._vars(leaf)
        aliases = isinstance(leaf, RemoteView) or any(var.storage in shared for var in variables)
        if not aliases:
            if isinstance(leaf, PerRank):
                return Joined(tuple(self._base(shard, (var,)) for shard, var in zip(leaf.shards, variables, strict=True)))
            return Made(self._base(leaf, variables))
        root, chain = self._chain(leaf)
        if id(root) in self.given:
            return View(self.given[id(root)], chain) if chain else self.given[id(root)]
        if any(var.storage in self.storages for var in self._vars(root)) or not isinstance(root, DTensor):
            raise CaptureError(
                f"capture: the function returns a tensor of shape {tuple(leaf.shape)} that shares its memory with an argument, a "
                "variable of the function or another result in a way that a replay cannot follow; return x.clone()"
            )
        number = self._base(root, self._vars(root))
        return View(Made(number), chain) if chain else Made(number)

    def _chain(self, leaf: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """The tensor that ``leaf`` is a view of, and the operations in between."""
        chain: list[Any] = []
        while id(leaf) not in self.given and id(leaf) in self.recorder.views:
            _, (func, place), args, kwargs = self.recorder.views[id(leaf)]
            if leaf.requires_grad and not args[0].requires_grad:
                break  # a view below autograd (see folded.py): a result of its own
            chain.append((func, place, args[1:], kwargs))
            leaf = args[0]
        return leaf, tuple(reversed(chain))

    def _base(self, x: Any, variables: tuple[Var, ...]) -> int:
        number = self._numbers.setdefault(id(x), len(self.bases))
        if number == len(self.bases):
            layout = x._layout if isinstance(x, DTensor) else None
            self.bases.append(Base(variables, layout, x.requires_grad and not self.spent(x)))
            self.tensors.append(x)
        return number


def kept(left: Sequence[tuple[Between, list[Any], Any]], made: Iterator[Result]) -> Iterator[Kept]:
    """How what is left for later calls is made, of how its tensors are."""
    for held, leaves, tree in left:
        yield held, tuple([next(made) if isinstance(leaf, torch.Tensor) else Constant(leaf) for leaf in leaves]), tree


def follow(chain: tuple[Any, ...], root: Any) -> Any:
    """The view of ``root``."""
    for func, place, args, kwargs in chain:
        root = func(root, *args, **kwargs)
        root = root if place is None else root[place]
    return root
