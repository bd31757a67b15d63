"""``PerRank``: the local tensors of all ranks of an in-process mesh, as one ``torch.Tensor``.

Each torch function runs once per rank on the rank's own tensor, so shapes may be ragged, and each rank has its own autograd
graph. This happens in ``__torch_function__``, above autograd. If torch has disabled that (inside ``__torch_dispatch__`` of
another subclass), the same mapping happens in ``__torch_dispatch__``. The wrapper itself has neither storage nor sizes, so no
code can read it instead of the ranks' tensors.

``torch.autograd.Function.apply`` is not a torch function; see ``autograd_function.py``.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ..base import torch_internals
from ..base.reenable_autograd import reenable_autograd
from ..base.tensor_tree import iter_tree_leaves, rebuild_sequence
from ..base.torch_internals import OpOverload, functorch_active, make_wrapper_subclass
from ..errors import LayoutError, MeshError, MixedTensorError, PlacementError
from .per_rank_functorch import split_ranks
from .plain_tensors import ReplicateToRanks, check_no_dtensor_written, list_written_tensors, write_equal_shards
from .rank_values import RUN_PER_RANK, RankNumber, RankValues, require_equal
from .run_mode import NOT_COMPILED

if TYPE_CHECKING:
    from ..base.tensor_methods import TensorMethods

    class LocalTensor(TensorMethods):
        """A local tensor, for type checkers: a ``PerRank``, or on processes a plain tensor, which has no ``shards``."""

        shards: tuple[Tensor, ...]
else:
    LocalTensor = Tensor


class PerRank(LocalTensor):
    """Tensors of all ranks of an in-process mesh, in ``.shards``. Make it with :func:`per_rank`.

    Functions run once per rank; other arguments are shared. Tensor results are ``PerRank``. A Python result (``.shape``,
    ``.item()``, ``bool()``) is the value that all ranks have. No communication.

    Raises:
        LayoutError: a Python value that differs between ranks (``.shape`` of ragged shards, ``.item()`` of unequal ones).

    >>> x = per_rank([torch.ones(2, 3), torch.zeros(1, 3)])
    >>> (x + 1).sum(0).shards
    (tensor([4., 4., 4.]), tensor([1., 1., 1.]))
    """

    shards: tuple[Tensor, ...]

    @staticmethod
    def __new__(cls, shards: Iterable[Tensor]) -> PerRank:
        """Wrap one plain tensor per rank. If one requires grad, first apply the patches of torch."""
        shards = tuple(shards)
        if not shards or any(not isinstance(shard, Tensor) or isinstance(shard, PerRank) for shard in shards):
            raise PlacementError("per_rank takes one plain tensor per rank: per_rank([tensor_of_rank_0, tensor_of_rank_1, ...])")
        x = _make_per_rank(shards)
        return patch_torch_for(x) if any(shard.requires_grad for shard in shards) else x

    def __init__(self, shards: Iterable[Tensor]) -> None:
        pass

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]  # torch reads it at each operation, so only the first rank is asked
        return self.shards[0].is_cpu

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function once for all ranks if it is a joint function, else once per rank."""
        if is_dynamo_compiling():
            torch_internals.graph_break(msg=NOT_COMPILED)
        joint = JOINT_FUNCTIONS.get(func)
        return over_ranks(func, args, kwargs or {}) if joint is None else joint(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub declares the disabled one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator for all ranks where torch has disabled ``__torch_function__``."""
        joint = JOINT_FUNCTIONS.get(func)
        if joint is not None:
            return joint(*args, **(kwargs or {}))
        for x in args:
            if type(x) is PerRank and x.shards[0].requires_grad and torch.is_grad_enabled():
                # under a torch.func transform, autograd saw no graph: the ranks' tensors of a hidden ``PerRank`` have the graphs
                with reenable_autograd():
                    return over_ranks(func, args, kwargs or {})
        return over_ranks(func, args, kwargs or {})

    def backward(
        self, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """Run one backward pass for all ranks, with each rank's tensor as a root: gradients of the sum over ranks."""
        JOINT_FUNCTIONS[torch.autograd.backward](
            [self], None if gradient is None else [gradient], retain_graph, create_graph, inputs=inputs
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own takes tensor_contents, for its printing only
        shown = [repr(shard).replace("\n", "\n          ") for shard in self.shards]
        return "PerRank(" + "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(shown)) + "\n)"

    def __format__(self, spec: str) -> str:
        """Return the formatted value that all ranks have, else a list with that of each rank."""
        texts = [format(shard, spec) for shard in self.shards]
        is_equal = len(set(texts)) == 1
        return texts[0] if is_equal else "[" + ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts)) + "]"

    def __deepcopy__(self, memo: dict[int, Any]) -> PerRank:
        """Copy the tensor of each rank; a parameter stays a parameter."""
        copied = PerRank(copy.deepcopy(shard, memo) for shard in self.shards)
        if getattr(self, "_is_param", False):
            copied._is_param = True  # isinstance(x, nn.Parameter) reads this attribute
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return per_rank, (list(self.shards),)


def per_rank(tensors: Sequence[Tensor]) -> PerRank:
    """Return a :class:`PerRank` of ``tensors``, one for each rank of the mesh's root in order. Shapes may differ.

    No communication. Raises ``PlacementError`` if an element is not a plain tensor.

    >>> (per_rank([torch.tensor([0.0, 1.0]), torch.tensor([2.0])]) + 1).shards[1]
    tensor([3.])
    """
    return patch_torch_for(PerRank(tensors))


def patch_torch_for(local: Any) -> Any:
    """Return ``local``, a local value that a program gets. If it is a ``PerRank``, first apply the patches of torch."""
    if type(local) is PerRank:
        patch_torch_for_per_rank()
    return local


def patch_torch_for_per_rank() -> None:
    """Apply the patches of torch that ``PerRank`` tensors need, before a program gets such tensors."""
    for apply_patches in SETUP_HOOKS:
        apply_patches()


def shards_of(local: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a local value, one for each member held here."""
    return local.shards if isinstance(local, PerRank) else (local,)


# --- mapping over ranks ----------------------------------------------------------------------------------------------
def over_ranks(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the merged results of ``func`` on each rank's arguments. An argument written in place is returned itself."""
    rows = None if kwargs else _arguments_by_rank(args)
    if rows is not None:
        results = [func(*own) for own in rows]
        first = args[0].shards[0] if type(args[0]) is PerRank else None
        if type(results[0]) is Tensor and results[0] is not first and all(type(x) is Tensor for x in results):
            return _make_per_rank(tuple(results))
    else:
        count = count_ranks((args, kwargs))
        check_no_dtensor_written(func, args, kwargs)
        targets = [(x, _clone_for_ranks(x, count)) for x in list_written_tensors(func, args, kwargs)]
        if targets:
            args, kwargs = _replace_items(args, targets), _replace_items(kwargs, targets)
        args, kwargs = _replicate_all(args, count), {name: _replicate_to_ranks(value, count) for name, value in kwargs.items()}
        results = [func(*own, **named) for own, named in split_arguments(args, kwargs, count)]
        for x, copies in targets:
            write_equal_shards(x, copies.shards)
        written = [(copies.shards[0], x) for x, copies in targets]
        if any(item is own for item in iter_tree_leaves(results[0]) for own, _ in written):
            return _replace_items(results[0], written)  # the function returns the plain tensors to which it wrote
    if isinstance(results[0], Tensor):
        if hasattr(results[0], "_layout"):
            what = f"{_describe_function(func)} mixes a DTensor with a PerRank tensor"
            raise MixedTensorError(f"{what}. To add a DTensor to a PerRank loss, write loss + penalty.full_tensor()")
        for arg in (*args[:1], *kwargs.values()):
            if isinstance(arg, PerRank) and results[0] is arg.shards[0] and all(map(operator.is_, results, arg.shards)):
                return arg
    return merge_results(results, lambda values: require_equal(values, _describe_function(func)), ragged=False)


def _arguments_by_rank(args: Sequence[Any]) -> Sequence[Sequence[Any]] | None:
    """Return the positional arguments of each rank if all are ``PerRank``, numbers, or lists of these; else None.

    The first argument, or its first element, must be a ``PerRank``.
    """
    innermost = args[0] if args else None
    while type(innermost) in _LIST_TYPES and innermost:
        innermost = innermost[0]
    return _simple_column(args, len(innermost.shards)) if type(innermost) is PerRank else None


def _simple_column(arg: Any, count: int) -> Sequence[Any] | None:
    """Return each rank's value of one argument; None if it is a plain tensor, a ``RankNumber`` or another type."""
    kind = type(arg)
    if kind is PerRank and len(arg.shards) == count:
        shards: tuple[Any, ...] = arg.shards
        return shards
    if kind in _SHARED_TYPES:
        return (arg,) * count
    if kind not in _LIST_TYPES:
        return None
    columns = [() if type(item) is int else _simple_column(item, count) for item in arg]
    if not any(columns):
        return None if None in columns else (arg,) * count
    full_columns = [column or (item,) * count for column, item in zip(columns, arg, strict=True) if column is not None]
    return [kind(row) for row in zip(*full_columns, strict=True)] if len(full_columns) == len(arg) else None


def _replicate_all(values: Sequence[Any], count: int) -> list[Any]:
    return [_replicate_to_ranks(value, count) for value in values]


def _replicate_to_ranks(value: Any, count: int) -> Any:
    """Return ``value`` with each plain tensor that requires grad replaced by a ``PerRank`` of copies with separate gradients."""
    kind = type(value)
    if kind is Tensor and functorch_active() and isinstance(value := split_ranks(value), PerRank):
        return value
    if (kind is Tensor or kind is nn.Parameter) and value.requires_grad and torch.is_grad_enabled():
        return PerRank(ReplicateToRanks.apply(value, count))
    return kind(_replicate_all(value, count)) if kind is list or kind is tuple else value


def _clone_for_ranks(x: Tensor, count: int) -> PerRank:
    copies = _replicate_to_ranks(x, count)
    return PerRank(shard.clone() for shard in (copies.shards if isinstance(copies, PerRank) else (x,) * count))


def _replace_items(value: Any, targets: Sequence[tuple[Any, Any]]) -> Any:
    """Return ``value`` with each occurrence of ``old`` replaced by ``new``, for each pair (old, new) in ``targets``."""
    for old, new in targets:
        if value is old:
            return new
    if isinstance(value, dict):
        return {name: _replace_items(item, targets) for name, item in value.items()}
    return (
        rebuild_sequence(value, [_replace_items(item, targets) for item in value]) if isinstance(value, (list, tuple)) else value
    )


_SHARED_TYPES = frozenset((int, float, bool, complex, type(None), torch.dtype))
_LIST_TYPES = (list, tuple)
TYPES_WITHOUT_RANKS = _SHARED_TYPES | {Tensor, OpOverload, str}  # types of values that contain no ``PerRank``


def _make_per_rank(shards: tuple[Tensor, ...]) -> PerRank:
    """Make the wrapper of one tensor for each rank."""
    x: PerRank = make_wrapper_subclass(
        PerRank, (), dtype=shards[0].dtype, device=shards[0].device, dispatch_sizes_strides_policy="sizes"
    )
    x.shards = shards
    return x


def split_arguments(args: Sequence[Any], kwargs: dict[str, Any], count: int) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return an iterator over the (args, kwargs) of each of ``count`` ranks."""
    rows = zip(*[_values_by_rank(arg, count) for arg in args], strict=True) if args else repeat((), count)
    if not kwargs:
        return zip(rows, repeat({}, count), strict=True)
    columns = [_values_by_rank(value, count) for value in kwargs.values()]
    kwargs_by_rank = (dict(zip(kwargs, row, strict=True)) for row in zip(*columns, strict=True))
    return zip(rows, kwargs_by_rank, strict=True)


def _values_by_rank(value: Any, count: int) -> Iterable[Any]:
    """Return one value for each of ``count`` ranks: the rank's part of a per-rank value, else ``value`` itself."""
    if isinstance(value, PerRank):
        return value.shards
    return [select_rank(value, rank) for rank in range(count)] if isinstance(value, _CONTAINER_TYPES) else repeat(value, count)


def _describe_function(func: Any) -> str:
    """Return "`name` of a PerRank tensor", with the name of a function or property, for error messages."""
    # the getter of a property such as Tensor.shape
    target = func.__self__ if getattr(func, "__name__", "") == "__get__" else func
    name = getattr(target, "__name__", str(target))
    return f"`{name}` of a PerRank tensor"


def count_ranks(value: Any, expected: int = 0) -> int:
    """Return the number of ranks of the per-rank values in ``value``; ``expected``, or 0, if there are none.

    Raises:
        MeshError: per-rank values with different numbers of ranks.
    """
    if isinstance(value, (PerRank, RankValues, RankNumber)):
        count = len(value if isinstance(value, RankValues) else value.values if isinstance(value, RankNumber) else value.shards)
        if expected not in (0, count):
            raise MeshError(
                f"a value of {count} ranks and one of {expected} ranks cannot be combined: they belong to different meshes; "
                "use values of one mesh"
            )
        return count
    for item in _list_items(value):
        if type(item) is PerRank and len(item.shards) == expected:
            continue
        if isinstance(item, _SEARCHED_TYPES):
            expected = count_ranks(item, expected)
    return expected


_CONTAINER_TYPES = (list, tuple, dict, slice, RankNumber)  # RankValues is a tuple
_SEARCHED_TYPES = (PerRank, *_CONTAINER_TYPES)


def _list_items(value: Any) -> Iterable[Any]:
    """Return the elements of a list, tuple, dict or slice; none of other values."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    return (value.start, value.stop, value.step) if isinstance(value, slice) else ()


def select_rank(value: Any, rank: int) -> Any:
    """Return ``value`` with each per-rank value in it replaced by the part of one rank; ``value`` itself if it has none."""
    if isinstance(value, PerRank):
        return value.shards[rank]
    if isinstance(value, RankValues):
        return value[rank]
    if not isinstance(value, _CONTAINER_TYPES):
        return value
    if isinstance(value, RankNumber):
        return value.values[rank]
    items = list(_list_items(value))
    selected = [select_rank(item, rank) for item in items]
    if all(map(operator.is_, items, selected)):
        return value
    if isinstance(value, dict):
        return dict(zip(value, selected, strict=True))
    return slice(*selected) if isinstance(value, slice) else rebuild_sequence(value, selected)


def merge_results(results: list[Any], leaf: Callable[[list[Any]], Any], ragged: bool = True) -> Any:
    """Return the results of all ranks as one value: tensors as ``PerRank``, a sequence for sequences with tensors.

    Other values go through ``leaf``. Sequences of different lengths do too if they may be ``ragged``; else they raise
    LayoutError.
    """
    first = results[0]
    if first is None and all(result is None for result in results):
        return None
    if isinstance(first, Tensor) and all(isinstance(result, Tensor) for result in results):
        return PerRank(results)
    if isinstance(first, (list, tuple)) and any(_contains_tensor(result) for result in results):
        if len({(type(result), len(result)) for result in results}) == 1:
            columns = zip(*results, strict=True)
            return rebuild_sequence(first, [merge_results(list(column), leaf, ragged) for column in columns])
        if not ragged:
            raise LayoutError(
                f"the results of the ranks have different lengths, {[len(result) for result in results]}, and "
                "cannot be one sequence; run per-rank code with dtensor.map_ranks(lambda coordinate, x: ..., x, "
                "mesh=mesh)"
            )
    return first if isinstance(first, (list, tuple)) and not first and not any(results) else leaf(results)


def _contains_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_contains_tensor, value)))


JOINT_FUNCTIONS: dict[Any, Callable[..., Any]] = {}  # functions that run once for all ranks, see ``joint_functions.py``
# Called before a program gets its first ``PerRank`` tensor: they patch torch, see ``autograd_function.py``.
SETUP_HOOKS: list[Callable[[], None]] = []
RUN_PER_RANK.append(PerRank.__torch_function__)


def each_shard(fn: Callable[..., Tensor], local: Any, *rest: Any) -> Any:
    """Return the local value with ``fn(shard, *rest)`` for each shard of ``local``."""
    return PerRank(fn(shard, *rest) for shard in local.shards) if isinstance(local, PerRank) else fn(local, *rest)


def reordered(local: Any, order: Sequence[int]) -> Any:
    """Return ``local`` with the shards at these positions; a local value of one rank unchanged."""
    return PerRank(local.shards[k] for k in order) if isinstance(local, PerRank) else local
