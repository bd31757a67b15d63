"""``PerRank``: the local tensors of all ranks of an in-process mesh, as one ``torch.Tensor``.

Every torch function runs once per rank on that rank's own tensor, so shapes may be ragged and each rank has its own
autograd graph. This happens in ``__torch_function__``, above autograd. Where torch has that switched off (inside
another subclass's ``__torch_dispatch__``) the same mapping happens in ``__torch_dispatch__``; the wrapper itself has
neither storage nor sizes, so nothing can read it instead of the ranks' tensors.

One thing torch keeps from us: ``torch.autograd.Function.apply`` is no torch function; see ``autograd_function_hook.py``.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..base import torch_internals
from ..base.late_binding import in_use
from ..base.reenable_autograd import seen_by_autograd
from ..base.tensor_tree import leaves, like
from ..base.torch_internals import OpOverload, functorch_active, make_wrapper_subclass
from ..errors import LayoutError, MeshError, MixedTensorError, PlacementError
from .functorch import each_rank
from .rank_values import _EACH_RANK, RankNumber, RankValues, agreed
from .run_mode import OF_EACH_RANK
from .shared_reads import UsedByRanks
from .shared_writes import refuse_writes_to_dtensors, write_back, written_tensors


class PerRank(Tensor):
    """One tensor per rank of an in-process mesh, in ``.shards``; make it with :func:`per_rank`.

    Functions map over ranks; other arguments are shared. Tensors come back as ``PerRank``; a Python value (``.shape``,
    ``.item()``, ``bool()``) is the common one. No communication.

    Raises:
        LayoutError: a Python value that differs between ranks (``.shape`` of ragged shards, ``.item()`` of unequal ones).

    >>> x = per_rank([torch.ones(2, 3), torch.zeros(1, 3)])
    >>> (x + 1).sum(0).shards
    (tensor([4., 4., 4.]), tensor([1., 1., 1.]))
    """

    shards: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls, shards: Iterable[Tensor]) -> PerRank:
        shards = tuple(shards)
        if not shards or any(not isinstance(shard, Tensor) or isinstance(shard, PerRank) for shard in shards):
            raise PlacementError("per_rank takes one plain tensor per rank: per_rank([tensor_of_rank_0, tensor_of_rank_1, ...])")
        made = _holding(shards)
        return handed_out(made) if any(shard.requires_grad for shard in shards) else made

    def __init__(self, shards: Iterable[Tensor]) -> None:
        pass

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # asked at each operation: not through all ranks
        return self.shards[0].is_cpu

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_dynamo_compiling():
            torch_internals.graph_break(msg=OF_EACH_RANK)
        joint = _JOINT.get(func)
        return over_ranks(func, args, kwargs or {}) if joint is None else joint(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub declares the disabled one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        joint = _JOINT.get(func)
        if joint is not None:
            return joint(*args, **(kwargs or {}))
        for x in args:
            if type(x) is PerRank and x.shards[0].requires_grad and torch.is_grad_enabled():
                return recorded_again(func, args, kwargs or {})
        return over_ranks(func, args, kwargs or {})

    def backward(
        self, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """Gradients of the sum over ranks: every rank's tensor is a root of one joint backward pass."""
        _JOINT[torch.autograd.backward](
            [self], None if gradient is None else [gradient], retain_graph, create_graph, inputs=inputs
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own takes tensor_contents, for its printing only
        shown = [repr(shard).replace("\n", "\n          ") for shard in self.shards]
        return "PerRank(" + "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(shown)) + "\n)"

    def __format__(self, spec: str) -> str:
        texts = [format(shard, spec) for shard in self.shards]
        alike = len(set(texts)) == 1
        return texts[0] if alike else "[" + ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts)) + "]"

    def __deepcopy__(self, memo: dict[int, Any]) -> PerRank:
        made = PerRank(copy.deepcopy(shard, memo) for shard in self.shards)
        if getattr(self, "_is_param", False):
            made._is_param = True  # what isinstance(x, nn.Parameter) looks at
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return per_rank, (list(self.shards),)


def per_rank(tensors: Sequence[Tensor]) -> PerRank:
    """A :class:`PerRank` of ``tensors``, one for each member of the mesh's root in order; shapes may differ.

    No communication. Raises ``PlacementError`` for what is no plain tensor.

    >>> (per_rank([torch.tensor([0.0, 1.0]), torch.tensor([2.0])]) + 1).shards[1]
    tensor([3.])
    """
    return handed_out(PerRank(tensors))


def handed_out(local: Any) -> Any:
    """``local``, which a program is given; what such tensors need of torch is prepared where it holds those of all ranks."""
    if type(local) is PerRank:
        expected()
    return local


def expected() -> None:
    """Prepare what tensors of all ranks need of torch: a program is given some, or its modules will make some."""
    for prepare in _BEFORE:
        prepare()


def recorded_again(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a transform has hidden comes here below autograd, which saw no graph: the ranks' tensors have them."""
    with seen_by_autograd():
        return over_ranks(func, args, kwargs)


def shards_of(local: Any) -> tuple[Tensor, ...]:
    """The tensors of a local, one per member held here."""
    return local.shards if isinstance(local, PerRank) else (local,)


# --- mapping over ranks ----------------------------------------------------------------------------------------------
def over_ranks(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func`` on each rank's part of the arguments; an argument written in place comes back as itself."""
    rows = None if kwargs else _rows(args)
    if rows is not None:
        results = [func(*own) for own in rows]
        first = args[0].shards[0] if type(args[0]) is PerRank else None
        if type(results[0]) is Tensor and results[0] is not first and all(type(x) is Tensor for x in results):
            return _holding(tuple(results))
    else:
        count = count_ranks((args, kwargs))
        refuse_writes_to_dtensors(func, args, kwargs)
        targets = [(x, _copies(x, count)) for x in written_tensors(func, args, kwargs)]
        if targets:
            args, kwargs = _replaced(args, targets), _replaced(kwargs, targets)
        args, kwargs = _each_its_own(args, count), {name: _its_own(value, count) for name, value in kwargs.items()}
        results = [func(*own, **named) for own, named in parts(args, kwargs, count)]
        for x, copies in targets:
            write_back(x, copies.shards)
        written = [(copies.shards[0], x) for x, copies in targets]
        if any(item is own for item in leaves(results[0]) for own, _ in written):
            return _replaced(results[0], written)  # the plain tensors themselves are the result
    if isinstance(results[0], Tensor):
        if hasattr(results[0], "_layout"):
            what = f"{_name_of(func)} mixes a DTensor with a tensor of each rank's own"
            raise MixedTensorError(f"{what}; to a loss of each rank's part of a batch add penalty.full_tensor()")
        for arg in (*args[:1], *kwargs.values()):
            if isinstance(arg, PerRank) and results[0] is arg.shards[0] and all(map(operator.is_, results, arg.shards)):
                return arg
    return merge(results, lambda values: agreed(values, _name_of(func)), ragged=False)


def _rows(args: Sequence[Any]) -> Sequence[Sequence[Any]] | None:
    """For each rank its arguments, where the first is a ``PerRank``, or begins with one, and the others are that, the same for
    all ranks, or lists of these."""
    first = args[0] if args else None
    while type(first) in _LISTS and first:
        first = first[0]
    return _plain_column(args, len(first.shards)) if type(first) is PerRank else None


def _plain_column(arg: Any, count: int) -> Sequence[Any] | None:
    """What each rank has of an argument; None: it may be of the kinds that need care (plain tensors, numbers of each rank)."""
    kind = type(arg)
    if kind is PerRank and len(arg.shards) == count:
        own: tuple[Any, ...] = arg.shards
        return own
    if kind in _SHARED:
        return (arg,) * count
    if kind not in _LISTS:
        return None
    columns = [() if type(item) is int else _plain_column(item, count) for item in arg]
    if not any(columns):
        return None if None in columns else (arg,) * count
    whole = [column or (item,) * count for column, item in zip(columns, arg, strict=True) if column is not None]
    return [kind(row) for row in zip(*whole, strict=True)] if len(whole) == len(arg) else None


def _each_its_own(values: Sequence[Any], count: int) -> list[Any]:
    return [_its_own(value, count) for value in values]


def _its_own(value: Any, count: int) -> Any:
    """A plain tensor that all ranks use, as each rank's own where gradients are recorded: see ``UsedByRanks``."""
    kind = type(value)
    if kind is Tensor and functorch_active() and isinstance(value := each_rank(value), PerRank):
        return value
    if (kind is Tensor or kind is nn.Parameter) and value.requires_grad and torch.is_grad_enabled():
        return PerRank(UsedByRanks.apply(value, count))
    return kind(_each_its_own(value, count)) if kind is list or kind is tuple else value


def _copies(x: Tensor, count: int) -> PerRank:
    own = _its_own(x, count)
    return PerRank(shard.clone() for shard in (own.shards if isinstance(own, PerRank) else (x,) * count))


def _replaced(value: Any, targets: Sequence[tuple[Any, Any]]) -> Any:
    """``value`` with the second of each pair for the first."""
    for old, new in targets:
        if value is old:
            return new
    if isinstance(value, dict):
        return {name: _replaced(item, targets) for name, item in value.items()}
    return like(value, [_replaced(item, targets) for item in value]) if isinstance(value, (list, tuple)) else value


_SHARED = frozenset((int, float, bool, complex, type(None), torch.dtype))
_LISTS = (list, tuple)
ALONE = _SHARED | {Tensor, OpOverload, str}  # values of these types have no part for each rank


def _holding(shards: tuple[Tensor, ...]) -> PerRank:
    made: PerRank = make_wrapper_subclass(
        PerRank, (), dtype=shards[0].dtype, device=shards[0].device, dispatch_sizes_strides_policy="sizes"
    )
    made.shards = shards
    return made


def parts(args: Sequence[Any], kwargs: dict[str, Any], count: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """For each of ``count`` ranks its arguments."""
    rows = zip(*[_column(arg, count) for arg in args], strict=True) if args else repeat((), count)
    if not kwargs:
        return zip(rows, repeat({}, count), strict=True)
    columns = [_column(value, count) for value in kwargs.values()]
    named = (dict(zip(kwargs, row, strict=True)) for row in zip(*columns, strict=True))
    return zip(rows, named, strict=True)


def _column(value: Any, count: int) -> Iterable[Any]:
    """``value`` as each of ``count`` ranks has it."""
    if isinstance(value, PerRank):
        return value.shards
    return [pick(value, rank) for rank in range(count)] if isinstance(value, _HOLDERS) else repeat(value, count)


def _name_of(func: Any) -> str:
    of = func.__self__ if getattr(func, "__name__", "") == "__get__" else func  # a property such as Tensor.shape
    name = getattr(of, "__name__", str(of))
    return f"`{name}` of a PerRank tensor"


def count_ranks(value: Any, expected: int = 0) -> int:
    """How many ranks the values of each rank inside ``value`` have (``expected``, or 0, if there are none).

    Raises:
        MeshError: not all the same number.
    """
    if isinstance(value, (PerRank, RankValues, RankNumber)):
        count = len(value if isinstance(value, RankValues) else value.values if isinstance(value, RankNumber) else value.shards)
        if expected not in (0, count):
            raise MeshError(
                f"a value of {count} ranks and one of {expected} ranks cannot be combined: they belong to different meshes"
            )
        return count
    for item in _items(value):
        if type(item) is PerRank and len(item.shards) == expected:
            continue
        if isinstance(item, _INSIDE):
            expected = count_ranks(item, expected)
    return expected


_HOLDERS = (list, tuple, dict, slice, RankNumber)  # RankValues is a tuple
_INSIDE = (PerRank, *_HOLDERS)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    return (value.start, value.stop, value.step) if isinstance(value, slice) else ()


def pick(value: Any, rank: int) -> Any:
    """``value`` with one rank's part of every value of each rank in it; itself where there is none."""
    if isinstance(value, PerRank):
        return value.shards[rank]
    if isinstance(value, RankValues):
        return value[rank]
    if not isinstance(value, _HOLDERS):
        return value
    if isinstance(value, RankNumber):
        return value.values[rank]
    items = list(_items(value))
    picked = [pick(item, rank) for item in items]
    if all(map(operator.is_, items, picked)):
        return value
    if isinstance(value, dict):
        return dict(zip(value, picked, strict=True))
    return slice(*picked) if isinstance(value, slice) else like(value, picked)


def merge(results: list[Any], leaf: Callable[[list[Any]], Any], ragged: bool = True) -> Any:
    """One value for the ranks' ``results``: tensors become ``PerRank``, sequences holding tensors are transposed.

    What is neither goes through ``leaf``; sequences of different lengths too, where they may be ``ragged``.
    """
    first = results[0]
    if first is None and all(result is None for result in results):
        return None
    if isinstance(first, Tensor) and all(isinstance(result, Tensor) for result in results):
        return PerRank(results)
    if isinstance(first, (list, tuple)) and any(_holds_tensor(result) for result in results):
        if len({(type(result), len(result)) for result in results}) == 1:
            columns = zip(*results, strict=True)
            return like(first, [merge(list(column), leaf, ragged) for column in columns])
        if not ragged:
            raise LayoutError(
                f"the results of the ranks have different lengths, {[len(result) for result in results]}, and "
                "cannot be one sequence; run per-rank code with dtensor.map_ranks(lambda coordinate, x: ..., x, "
                "mesh=mesh)"
            )
    return first if isinstance(first, (list, tuple)) and not first and not any(results) else leaf(results)


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensor, value)))


_JOINT: dict[Any, Callable[..., Any]] = {}  # what does not simply run once per rank; see ``joint_autograd.py``
_BEFORE: list[Callable[[], None]] = [
    in_use
]  # what has to be set up where programs meet such tensors; see ``autograd_function_hook.py``
_EACH_RANK.append(PerRank.__torch_function__)
