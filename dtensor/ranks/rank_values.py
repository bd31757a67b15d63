"""One Python value per member: ``RankValues`` of any kind, ``RankNumber`` to calculate with, and when all count as one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch

from ..base.tensor_tree import leaves
from ..errors import LayoutError, MeshError, MixedTensorError

_EACH_RANK: list[Callable[..., Any]] = []  # how a torch function runs for each rank; ``per_rank``, which stands on this, says


class RankValues(tuple[Any, ...]):
    """One arbitrary Python value per member of the mesh, in member order.

    ``map`` and ``map_ranks`` take it apart again. Its attributes and methods are those of each member's value, one value where
    all agree (``x.to_local().untyped_storage().nbytes()``). It refuses ``bool()`` where members disagree.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"a value of each rank has no attribute {name!r}")
        of = operator.attrgetter(name)
        if not all(map(callable, map(of, self))):
            return _EACH_RANK[0](of, (), (self,))

        def method(*args: Any, **kwargs: Any) -> Any:
            return _EACH_RANK[0](call, (), (self, *args), kwargs)

        def call(own: Any, *args: Any, **kwargs: Any) -> Any:
            return of(own)(*args, **kwargs)

        call.__name__ = name
        return method

    def __bool__(self) -> bool:
        truths = {bool(value) for value in self}
        if len(truths) > 1:
            raise LayoutError(f"the truth value of {self!r} differs between ranks; reduce it with any() or all()")
        return True in truths

    def __repr__(self) -> str:
        return "RankValues(" + ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(self)) + ")"


class RankNumber:
    """A number of each rank, in member order, where all ranks live in this process and differ: ``mesh.get_local_rank()``.

    Arithmetic and comparisons are each rank's own, and give a plain number where all ranks get the same. Torch functions that
    take it run once per rank and give ``PerRank`` tensors. What needs one number (a slice, ``range``, an index, ``if``) raises.

    Raises:
        LayoutError: it is asked to be one number.

    >>> import torch, dtensor as dt
    >>> rank = dt.init_device_mesh("cpu", (2,)).get_local_rank()
    >>> rank * 3 + 1, rank < 2
    (RankNumber(rank 0: 1, rank 1: 4), True)
    >>> torch.arange(6).narrow(0, rank * 3, 3).shards
    (tensor([0, 1, 2]), tensor([3, 4, 5]))
    """

    __slots__ = ("values",)
    __array_ufunc__ = None  # an array holds no such numbers
    values: tuple[Any, ...]

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def _alone(self) -> Any:
        shown = ", ".join(f"rank {rank}: {_short(value)}" for rank, value in enumerate(self.values))
        raise LayoutError(
            f"a Python number that differs between ranks ({shown}) is used where one number is needed, and "
            "all ranks are in this process. Select each rank's part with dtensor.map_ranks(lambda at: "
            "data[at[0] * n : (at[0] + 1) * n], mesh=mesh), or pass the full batch to "
            "dtensor.distribute_tensor. What one rank does for all (printing, saving) belongs under `if "
            "mesh.get_rank() == 0:` (docs/porting.md)"
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __hash__ = _alone

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(type(value), "device_mesh") for value in leaves((args, kwargs or {}))):
            raise MixedTensorError(
                "a DTensor has one value for all ranks and cannot be combined with a Python number of each rank. "
                "Use the number with local tensors, in dtensor.map_ranks or dtensor.local_map, and make a "
                "DTensor of the result with DTensor.from_local"
            )
        return _EACH_RANK[0](func, types, args, kwargs)

    def __repr__(self) -> str:
        return "RankNumber(" + ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(self.values)) + ")"

    def __format__(self, spec: str) -> str:
        return "[" + ", ".join(f"rank {rank}: {value:{spec}}" for rank, value in enumerate(self.values)) + "]"

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self


class AnswerOfAll(RankNumber):
    """Whether each rank is (or is not) rank 0. Under ``if`` it is rank 0's answer; calculations take each rank's own."""

    __slots__ = ("first",)
    first: bool

    def __init__(self, values: Sequence[Any], first: bool) -> None:
        super().__init__(values)
        self.first = first

    def __bool__(self) -> bool:
        return self.first


class RankOfAll(RankNumber):
    """The global rank of each. As for what one rank does for all: a process that holds all of them does what rank 0 does."""

    __slots__ = ()

    def __eq__(self, other: object) -> Any:
        return AnswerOfAll([rank == 0 for rank in self.values], True) if _is_zero(other) else RankNumber(self.values) == other

    def __ne__(self, other: object) -> Any:
        return AnswerOfAll([rank != 0 for rank in self.values], False) if _is_zero(other) else RankNumber(self.values) != other

    def __bool__(self) -> bool:
        return False

    __hash__ = RankNumber.__hash__


def _is_zero(value: object) -> bool:
    return isinstance(value, Number) and not value


def one_or_each(values: Sequence[Any]) -> Any:
    """The number that all ranks have, else each one's."""
    first = values[0]
    return first if all(_same(first, value) for value in values[1:]) else RankNumber(values)


def rank_of_all(ranks: Sequence[int]) -> Any:
    """What ``get_rank()`` is for a process that holds all ranks."""
    return RankOfAll(ranks) if len(ranks) > 1 else ranks[0]


def _each(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` of a ``RankNumber`` (and another one, or a number) for each rank."""

    def method(self: RankNumber, *others: Any) -> Any:
        columns = [self.values]
        for other in others:
            if not isinstance(other, (RankNumber, Number)):
                return NotImplemented
            columns.append(other.values if isinstance(other, RankNumber) else (other,) * len(self.values))
        if any(len(column) != len(self.values) for column in columns):
            counts = " and one of ".join(f"{len(column)} ranks" for column in columns)
            raise MeshError(f"a number of {counts} cannot be combined: they belong to different meshes")
        return one_or_each(list(map(fn, *columns)))

    return method


for _name in ("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(RankNumber, f"__{_name}__", _each(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _of = getattr(operator, f"__{_name}__")
    setattr(RankNumber, f"__{_name}__", _each(_of))
    setattr(RankNumber, f"__r{_name}__", _each(lambda a, b, of=_of: of(b, a)))


_PLAIN = (bool, int, float, complex, str, list, tuple)


def agreed(values: list[Any], what: str) -> Any:
    """The value that all ranks have, bit for bit; a ``RankValues`` of objects that have no value to compare.

    Raises:
        LayoutError: plain values that differ, with ``what`` they are.
    """
    first = values[0]
    if all(_same(first, value) for value in values[1:]):
        if isinstance(first, np.ndarray):
            first.flags.writeable = False  # it is the first rank's memory: a write would leave the others behind
        return first
    if not isinstance(first, (*_PLAIN, np.ndarray, torch.dtype, torch.device)):
        return RankValues(values)
    shown = ", ".join(f"rank {rank}: {_short(value)}" for rank, value in enumerate(values))
    raise LayoutError(
        f"{what} differs between ranks ({shown}); take one rank's tensor from .shards, or run per-rank code with "
        "dtensor.map_ranks(lambda coordinate, x: ..., x, mesh=mesh)"
    )


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (int, str, torch.Size)):
        return bool(a == b)
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, _PLAIN):
        return repr(a) == repr(b)  # repr tells 0.0 from -0.0, 1 from True, and takes nan for nan, at any depth
    return isinstance(a, (torch.dtype, torch.device)) and bool(a == b)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
