"""Rank runs: the runs of one function for each rank of this process, kept as independent as runs in processes.

``map_ranks`` calls the function once per rank. Processes would each have their own plain tensors, gradients and generators.
Here the runs share them, so three rules hold for what exists outside of the function:

- A plain tensor that a run reads is that rank's own copy: its gradient is the one that each rank computes, see
  :class:`ReplicateToRanks`.
- A tensor that one run wrote to (in place, or by accumulating its gradient) may not be used by the run of another rank.
- Each run starts from the same state of the random generators. Afterwards they have the state in which the first run left them.

Python objects (lists, counters) are shared by all runs: torch does not see writes to them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointFunction

from ..base.generators import default_generator, get_generator_state, set_generator_state
from ..base.tensor_tree import iter_tree_leaves, map_tensors, rebuild_sequence
from ..base.torch_internals import (
    AccumulateGrad,
    DisableFuncTorch,
    TensorBase,
    is_functorch_wrapped,
    single_level_functions_allowed,
)
from ..errors import LayoutError
from .per_rank import PerRank, shards_of
from .plain_tensors import ReplicateToRanks, is_plain, list_written_statistics, list_written_tensors
from .rank_values import RankValues
from .run_mode import RunMode

_BACKWARD_FUNCTIONS = (Tensor.backward, torch.autograd.backward)
_OBJECT_FUNCTIONS = (  # functions of the tensor object itself, which compute nothing from its values
    *_BACKWARD_FUNCTIONS,
    torch.autograd.grad,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
)
# attributes that return new tensors
_COMPUTED_ATTRIBUTES = [vars(TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH", "real", "imag")]
_PRUNE_ENTRIES = 4096  # number of entries at which entries of freed storages are first removed


class RankRuns:
    """The runs of one ``map_ranks`` call, in rank order."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._writers, self._makers = _StorageRanks(), _StorageRanks()
        # by id of a plain tensor: the tensor, its state, and the copy of each rank
        self._copies: dict[int, tuple[Tensor, Any, Sequence[Tensor]]] = {}
        self._streams: dict[Any, _RandomStream] = {
            "random": _RandomStream(random.getstate, random.setstate),
            "numpy": _RandomStream(np.random.get_state, np.random.set_state),
        }
        for generator in {default_generator(torch.device("cpu")), default_generator(device)}:
            self._watch_generator(generator)

    @contextmanager
    def enter_run(self, rank: int) -> Iterator[None]:
        """Enter the run of ``rank`` for a ``with`` block: its random states, and the mode that follows its torch functions."""
        for stream in self._streams.values():
            stream.restart()
        before, _ACTIVE_RUN.run = _ACTIVE_RUN.run, (self, rank)
        try:
            with RunMode(partial(self.run_function, rank)):
                yield
        finally:
            _ACTIVE_RUN.run = before
        for stream in self._streams.values():
            stream.restore_after_first_run()

    def copy_shared_results(self, value: Any) -> Any:
        """Return the merged results ``value``, in which ranks that returned one tensor each get a copy of their own."""
        if isinstance(value, PerRank):
            shards = list(value.shards)
            shared = [_is_shared(x, value.shards[:k] + value.shards[k + 1 :]) for k, x in enumerate(shards)]
            for k in [k for k, is_shared in enumerate(shared) if is_shared]:
                shards[k] = (self.replicate_for(k, shards[k]) if torch.is_grad_enabled() else shards[k]).clone()
            return PerRank(shards) if any(shared) else value
        if isinstance(value, (list, tuple)) and not isinstance(value, RankValues):
            return rebuild_sequence(value, [self.copy_shared_results(item) for item in value])
        return value

    def run_function(self, rank: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a torch function in the run of ``rank``, with its copies of plain tensors; check and record reads and writes.

        Raises:
            LayoutError: it uses a tensor to which another rank's run wrote, or writes to a tensor of another rank's run.
        """
        values = [*iter_tree_leaves((args, kwargs))]
        for value in values:
            if isinstance(value, torch.Generator):
                self._watch_generator(value)
        used = _list_tensors(values)
        if func in _BACKWARD_FUNCTIONS:
            used += _leaves_below(used)
        storages_of_used = [_storage_tensors(x) for x in used]
        for x in _concat_lists(storages_of_used):
            self._check_use(rank, x)
        states = [_write_state(x) for x in used]
        targets, statistics = list_written_tensors(func, args, kwargs), list_written_statistics(func, args, kwargs)
        is_accessor = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
        if torch.is_grad_enabled() and func not in _OBJECT_FUNCTIONS and (not is_accessor or func in _COMPUTED_ATTRIBUTES):
            args, kwargs = map_tensors(lambda x: x if _is_among(x, targets) else self.replicate_for(rank, x), (args, kwargs))
        result = func(*args, **kwargs)
        for x, storages, state in zip(used, storages_of_used, states, strict=True):
            if _write_state(x) != state or _is_among(x, statistics) or (x.is_inference() and _is_among(x, targets)):
                for storage in storages:
                    self._add_write(rank, storage)
        if not is_accessor:
            known_keys = {_storage_key(x) for x in _concat_lists(storages_of_used)}
            for x in _concat_lists(map(_storage_tensors, _list_tensors(iter_tree_leaves(result)))):
                if _storage_key(x) not in known_keys:
                    self._add_made(rank, x)
        return result

    def _watch_generator(self, generator: torch.Generator) -> None:
        """Make the runs of later ranks start from the present state of ``generator``."""
        if generator not in self._streams:
            self._streams[generator] = _RandomStream(
                lambda: get_generator_state(generator), lambda state: set_generator_state(generator, state)
            )

    def _check_use(self, rank: int, x: Tensor) -> None:
        """Raise LayoutError if the run of another rank wrote to ``x``, unless this rank's run made ``x``."""
        writer = self._writers.rank_of(x)
        if writer not in (None, rank, self._makers.rank_of(x)):
            raise LayoutError(_format_conflict(rank, x, writer))

    def _add_write(self, rank: int, x: Tensor) -> None:
        """Record a write to ``x`` in the run of ``rank``. Raise LayoutError if another rank's run made it or wrote to it."""
        for other in (self._writers.rank_of(x), self._makers.rank_of(x)):
            if other not in (None, rank):
                raise LayoutError(_format_conflict(rank, x, other))
        self._writers.set_rank(rank, x)

    def _add_made(self, rank: int, x: Tensor) -> None:
        """Record that the run of ``rank`` made the storage of ``x``."""
        if self._makers.rank_of(x) is None:
            self._makers.set_rank(rank, x)

    def replicate_for(self, rank: int, x: Tensor) -> Tensor:
        """Return ``rank``'s copy of the plain tensor ``x``, with its own gradient; ``x`` itself if it needs none."""
        if (
            not is_plain(x)
            or not x.requires_grad
            or x.is_inference()
            or is_functorch_wrapped(x)
            or self._makers.rank_of(x) == rank
        ):
            return x
        state = x.shape, x._version, _storage_key(x)
        entry = self._copies.get(id(x))
        if entry is None or entry[1] != state:
            with DisableFuncTorch(), single_level_functions_allowed():  # the copies outlive transforms of torch.func
                copies = super(Function, ReplicateToRanks).apply(x, self._count)
            entry = self._copies[id(x)] = x, state, copies
        return entry[2][rank]


class _ActiveRun(local):
    """The ``map_ranks`` run that is active in this thread."""

    run: tuple[RankRuns, int] | None = None  # the runs and the rank that this thread runs


_ACTIVE_RUN = _ActiveRun()


def replace_plain_arguments(function: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return arguments of an autograd function, with plain tensors replaced by copies of the rank that runs in this thread.

    The mode that follows torch functions does not see ``Function.apply``.

    Raises:
        LayoutError: the function is a reentrant checkpoint, which uses plain tensors again after the run, in the backward pass.
    """
    if _ACTIVE_RUN.run is None or not torch.is_grad_enabled() or function is ReplicateToRanks:
        return args
    if function is CheckpointFunction:
        raise LayoutError(
            "checkpoint(..., use_reentrant=True) inside map_ranks: its backward pass adds up the gradients of all ranks in plain "
            "tensors. Write use_reentrant=False, or call the checkpoint on per_rank tensors, outside of map_ranks"
        )
    runs, rank = _ACTIVE_RUN.run
    return [runs.replicate_for(rank, x) if isinstance(x, Tensor) else x for x in args]


class _RandomStream:
    """A source of random numbers, with its state before and after the first run."""

    def __init__(self, read: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        self._read, self._restore = read, restore
        self._before, self._after = read(), None

    def restart(self) -> None:
        self._restore(self._before)

    def restore_after_first_run(self) -> None:
        """Set the source of random numbers to the state in which the first run left it."""
        if self._after is None:
            self._after = self._read()
        self._restore(self._after)


class _StorageRanks:
    """Table of the rank that made, or wrote to, each storage; storages are referenced weakly."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[StorageWeakRef, int]] = {}
        self._max_entries = _PRUNE_ENTRIES

    def rank_of(self, x: Tensor) -> int | None:
        entry = self._ranks.get(_storage_key(x))
        return None if entry is None else entry[1]

    def set_rank(self, rank: int, x: Tensor) -> None:
        """Store ``rank`` for the storage of ``x``; drop entries of freed storages when there are many."""
        if _storage_key(x):
            # no other storage gets this key while the weak reference exists
            self._ranks[_storage_key(x)] = StorageWeakRef(x.untyped_storage()), rank
        if len(self._ranks) > self._max_entries:
            self._ranks = {key: entry for key, entry in self._ranks.items() if not entry[0].expired()}
            self._max_entries = max(_PRUNE_ENTRIES, 2 * len(self._ranks))


def _format_conflict(rank: int, x: Tensor, other: int | None) -> str:
    """Return the error message for a tensor that one rank writes and another uses in ``map_ranks``."""
    return (
        f"map_ranks: the function writes to a tensor of shape {tuple(x.shape)} on rank {other} and uses it on rank {rank}. All "
        "ranks of this process share it, and as processes each would have its own. Return the new value instead of writing it "
        "(x + y, not x.add_(y)), give each rank its own tensor with per_rank([...]), or call backward() and optimizer.step() "
        "once, on what map_ranks returns"
    )


def _list_tensors(values: Any) -> list[Tensor]:
    """Return all tensors in ``values``, and the shards of each ``PerRank``."""
    return [own for x in values if isinstance(x, Tensor) for own in shards_of(x)]


def _storage_tensors(x: Any) -> Sequence[Tensor]:
    """Return the tensors that have the elements of ``x``: the local tensors of a DTensor, else ``x`` itself."""
    return shards_of(x._local) if hasattr(x, "_layout") else (x,)


def _concat_lists(lists: Any) -> list[Tensor]:
    return [x for values in lists for x in values]


def _storage_key(x: Tensor) -> int:
    """Return the identity of the storage of ``x``; 0 if it has none of its own (sparse tensors, tensors of ``torch.func``)."""
    try:
        return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _is_shared(x: Tensor, others: Sequence[Tensor]) -> bool:
    """Return True if the memory range of ``x`` overlaps that of one of the others."""
    if not is_plain(x) or x.layout is not torch.strided or x.is_nested:
        return False
    first, last = _storage_range(x)
    return any(
        _storage_key(x) == _storage_key(y) != 0 and first <= _storage_range(y)[1] and _storage_range(y)[0] <= last for y in others
    )


def _storage_range(x: Tensor) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """Return the offsets of the first and the last element of ``x`` in its storage; an empty range if it has no elements."""
    if not x.numel():
        return 1, 0
    return x.storage_offset(), x.storage_offset() + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))


def _write_state(x: Tensor) -> Any:
    """Return a value that changes when ``x`` is written to, or when a gradient is accumulated in it."""
    version = 0 if x.is_inference() else x._version
    grad = x.grad if x.requires_grad and x.is_leaf else None
    return (
        version,
        [_storage_key(storage) for storage in _storage_tensors(x)],
        None if grad is None else (id(grad), grad._version),
    )


def _leaves_below(roots: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves in which a backward pass from ``roots`` accumulates gradients."""
    leaves_found = [x for x in roots if x.requires_grad and x.is_leaf]
    nodes: list[Any] = [x.grad_fn for x in roots]
    visited = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if isinstance(node, AccumulateGrad):
            leaves_found.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves_found


def _is_among(x: Tensor, others: Sequence[Tensor]) -> bool:
    return any(x is other for other in others)
