"""Rank values: one Python value for each rank of this process. ``RankValues`` has values of any kind, ``RankNumber`` numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch

from ..base.tensor_tree import iter_tree_leaves
from ..errors import LayoutError, MeshError, MixedTensorError

# one element: the function that runs torch functions per rank; ``per_rank``, a higher module, sets it
RUN_PER_RANK: list[Callable[..., Any]] = []


class RankValues(tuple[Any, ...]):
    """Python values of all ranks, in rank order.

    ``map`` and ``map_ranks`` give each rank its own value. Attributes and methods are those of each rank's value; results that
    are equal on all ranks are one value (``x.to_local().untyped_storage().nbytes()``). ``bool()`` raises if ranks disagree.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of each rank's value, merged; for a method, a method that runs on each rank's value."""
        if name.startswith("_"):
            raise AttributeError(f"a value of each rank has no attribute {name!r}")
        getter = operator.attrgetter(name)
        if not all(map(callable, map(getter, self))):
            return RUN_PER_RANK[0](getter, (), (self,))

        def method(*args: Any, **kwargs: Any) -> Any:
            return RUN_PER_RANK[0](call, (), (self, *args), kwargs)

        def call(own: Any, *args: Any, **kwargs: Any) -> Any:
            return getter(own)(*args, **kwargs)

        call.__name__ = name
        return method

    def __bool__(self) -> bool:
        """Return the truth value that all ranks have; raise LayoutError if they differ."""
        truths = {bool(value) for value in self}
        if len(truths) > 1:
            raise LayoutError(f"the truth value of {self!r} differs between ranks; reduce it with any() or all()")
        return True in truths

    def __repr__(self) -> str:
        return "RankValues(" + ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(self)) + ")"


class RankNumber:
    """A number that differs between the ranks of this process, in rank order, such as ``mesh.get_local_rank()``.

    Arithmetic and comparisons run per rank, and return a plain number if all ranks get the same. Torch functions with such an
    argument run once per rank and return ``PerRank`` tensors. A use that needs one number (a slice, ``range``, an index,
    ``if``) raises.

    Raises:
        LayoutError: one number is needed.

    >>> import torch, dtensor as dt
    >>> rank = dt.init_device_mesh("cpu", (2,)).get_local_rank()
    >>> rank * 3 + 1, rank < 2
    (RankNumber(rank 0: 1, rank 1: 4), True)
    >>> torch.arange(6).narrow(0, rank * 3, 3).shards
    (tensor([0, 1, 2]), tensor([3, 4, 5]))
    """

    __slots__ = ("values",)
    __array_ufunc__ = None  # numpy leaves operators to this class
    values: tuple[Any, ...]

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def _raise_not_one_number(self) -> Any:
        """Raise LayoutError with each rank's number, and name what to write instead."""
        shown = ", ".join(f"rank {rank}: {_shorten(value)}" for rank, value in enumerate(self.values))
        raise LayoutError(
            f"a Python number that differs between ranks ({shown}) is used where one number is needed, and "
            "all ranks are in this process. Select each rank's part with dtensor.map_ranks(lambda at: "
            "data[at[0] * n : (at[0] + 1) * n], mesh=mesh), or pass the full batch to "
            "dtensor.distribute_tensor. What one rank does for all (printing, saving) belongs under `if "
            "mesh.get_rank() == 0:` (docs/porting.md)"
        )

    __bool__ = __int__ = __float__ = __complex__ = __index__ = __hash__ = _raise_not_one_number

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function once per rank, each with the rank's number; raise MixedTensorError for a DTensor."""
        if any(hasattr(type(value), "device_mesh") for value in iter_tree_leaves((args, kwargs or {}))):
            raise MixedTensorError(
                "a DTensor has one value for all ranks and cannot be combined with a Python number that differs between ranks. "
                "Use the number with local tensors, in dtensor.map_ranks or dtensor.local_map, and make a "
                "DTensor of the result with DTensor.from_local"
            )
        return RUN_PER_RANK[0](func, types, args, kwargs)

    def __repr__(self) -> str:
        return "RankNumber(" + ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(self.values)) + ")"

    def __format__(self, spec: str) -> str:
        return "[" + ", ".join(f"rank {rank}: {value:{spec}}" for rank, value in enumerate(self.values)) + "]"

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self


class RankZeroBool(RankNumber):
    """Whether each rank is (or is not) rank 0. ``if`` takes the answer of rank 0; calculations use each rank's own."""

    __slots__ = ("first",)
    first: bool

    def __init__(self, values: Sequence[Any], first: bool) -> None:
        super().__init__(values)
        self.first = first

    def __bool__(self) -> bool:
        return self.first


class RankIndices(RankNumber):
    """The global rank of each rank. ``if rank == 0`` takes the branch of rank 0, which acts for all ranks of the process."""

    __slots__ = ()

    def __eq__(self, other: object) -> Any:
        return RankZeroBool([rank == 0 for rank in self.values], True) if _is_zero(other) else RankNumber(self.values) == other

    def __ne__(self, other: object) -> Any:
        return RankZeroBool([rank != 0 for rank in self.values], False) if _is_zero(other) else RankNumber(self.values) != other

    def __bool__(self) -> bool:
        return False

    __hash__ = RankNumber.__hash__


def _is_zero(value: object) -> bool:
    return isinstance(value, Number) and not value


def collapse_if_equal(values: Sequence[Any]) -> Any:
    """Return the number that all ranks have, else a ``RankNumber``."""
    first = values[0]
    return first if all(_is_identical(first, value) for value in values[1:]) else RankNumber(values)


def make_rank_indices(ranks: Sequence[int]) -> Any:
    """Return the result of ``get_rank()`` in a process with all ranks: ``RankIndices``, an int for a mesh of one rank."""
    return RankIndices(ranks) if len(ranks) > 1 else ranks[0]


def _make_operator_method(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of ``RankNumber`` that applies the operator ``fn`` to the numbers of each rank."""

    def method(self: RankNumber, *others: Any) -> Any:
        """Apply the operator to the numbers of each rank."""
        columns = [self.values]
        for other in others:
            if not isinstance(other, (RankNumber, Number)):
                return NotImplemented
            columns.append(other.values if isinstance(other, RankNumber) else (other,) * len(self.values))
        if any(len(column) != len(self.values) for column in columns):
            counts = " and one of ".join(f"{len(column)} ranks" for column in columns)
            raise MeshError(f"a number of {counts} cannot be combined: they belong to different meshes; use values of one mesh")
        return collapse_if_equal(list(map(fn, *columns)))

    return method


for _name in ("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(RankNumber, f"__{_name}__", _make_operator_method(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _binary = getattr(operator, f"__{_name}__")
    setattr(RankNumber, f"__{_name}__", _make_operator_method(_binary))
    setattr(RankNumber, f"__r{_name}__", _make_operator_method(lambda a, b, binary=_binary: binary(b, a)))


_COMPARED_TYPES = (bool, int, float, complex, str, list, tuple)


def require_equal(values: list[Any], what: str) -> Any:
    """Return the value that all ranks have, bit for bit; ``RankValues`` for objects that have no value to compare.

    Raises:
        LayoutError: plain values differ; ``what`` describes them.
    """
    first = values[0]
    if all(_is_identical(first, value) for value in values[1:]):
        if isinstance(first, np.ndarray):
            first.flags.writeable = False  # it shares the first rank's memory: a write would not reach the other ranks
        return first
    if not isinstance(first, (*_COMPARED_TYPES, np.ndarray, torch.dtype, torch.device)):
        return RankValues(values)
    shown = ", ".join(f"rank {rank}: {_shorten(value)}" for rank, value in enumerate(values))
    raise LayoutError(
        f"{what} differs between ranks ({shown}); take one rank's tensor from .shards, or run per-rank code with "
        "dtensor.map_ranks(lambda coordinate, x: ..., x, mesh=mesh)"
    )


def _is_identical(a: Any, b: Any) -> bool:
    """Return True if the values of two ranks are equal bit by bit; False if they cannot be compared."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (int, str, torch.Size)):
        return bool(a == b)
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, _COMPARED_TYPES):
        return repr(a) == repr(b)  # repr distinguishes 0.0 and -0.0, 1 and True, and equates nan with nan, at any depth
    return isinstance(a, (torch.dtype, torch.device)) and bool(a == b)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
