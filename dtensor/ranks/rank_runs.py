"""Rank runs: the runs of one function for each rank of this process, kept as independent as runs in processes.

``map_ranks`` calls the function once per rank. Processes would each have their own plain tensors, gradients and generators. Here
the runs share them, so three rules hold for what exists outside of the function:

- a plain tensor that a run reads is that rank's own copy: its gradient is what each rank finds, see :class:`UsedByRanks`;
- a tensor that one run wrote to (in place, or by accumulating its gradient) may not be used by the run of another rank;
- every run starts from the same state of the random generators, which are left as the first run leaves them.

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

from ..base.generators import default_generator, go_to, state_now
from ..base.tensor_tree import leaves, like, mapped
from ..base.torch_internals import (
    AccumulateGrad,
    DisableFuncTorch,
    TensorBase,
    is_functorch_wrapped,
    single_level_functions_allowed,
)
from ..errors import LayoutError
from .per_rank import PerRank, shards_of
from .rank_values import RankValues
from .run_mode import RunMode
from .shared_reads import UsedByRanks
from .shared_writes import is_plain, statistics_written, written_tensors

_ACCUMULATING = (Tensor.backward, torch.autograd.backward)
_AS_GIVEN = (  # calls that concern the tensor object itself, and compute nothing from it
    *_ACCUMULATING,
    torch.autograd.grad,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.retain_grad,
    Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
)
_VIEWS = [vars(TensorBase)[name].__get__ for name in ("T", "mT", "H", "mH", "real", "imag")]  # attributes that are computed
_PRUNED = 4096  # entries of a table of memories, at which those of freed memories are first dropped


class RankRuns:
    """The runs of one ``map_ranks`` call, in rank order."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._writers, self._makers = _Memories(), _Memories()
        # by id of a plain tensor: it, its state, and the copy of each rank
        self._copies: dict[int, tuple[Tensor, Any, Sequence[Tensor]]] = {}
        self._streams: dict[Any, _Stream] = {
            "random": _Stream(random.getstate, random.setstate),
            "numpy": _Stream(np.random.get_state, np.random.set_state),
        }
        for generator in {default_generator(torch.device("cpu")), default_generator(device)}:
            self._watch_generator(generator)

    @contextmanager
    def run(self, rank: int) -> Iterator[None]:
        """Treat the calls inside as those of ``rank``."""
        for stream in self._streams.values():
            stream.restart()
        before, _RUNNING.run = _RUNNING.run, (self, rank)
        try:
            with RunMode(partial(self.follow, rank)):
                yield
        finally:
            _RUNNING.run = before
        for stream in self._streams.values():
            stream.finish()

    def separated(self, value: Any) -> Any:
        """Return what the runs returned, with memory of its own for each rank where several ranks returned the same."""
        if isinstance(value, PerRank):
            shards = value.shards
            shared = [_is_shared(x, shards[:k] + shards[k + 1 :]) for k, x in enumerate(shards)]
            return PerRank(self._cloned(k, x) if shared[k] else x for k, x in enumerate(shards)) if any(shared) else value
        if isinstance(value, (list, tuple)) and not isinstance(value, RankValues):
            return like(value, [self.separated(item) for item in value])
        return value

    def _cloned(self, rank: int, x: Tensor) -> Tensor:
        return (self.own_copy(rank, x) if torch.is_grad_enabled() else x).clone()

    def follow(self, rank: int, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)``, which the run of ``rank`` calls.

        Raises:
            LayoutError: it uses a tensor that another rank's run wrote to, or writes to one that another rank's run has.
        """
        given = [*leaves((args, kwargs))]
        for value in given:
            if isinstance(value, torch.Generator):
                self._watch_generator(value)
        used = _tensors(given)
        if func in _ACCUMULATING:
            used += _leaves_below(used)
        memories = [_memories(x) for x in used]
        for x in _joined(memories):
            self._check_use(rank, x)
        states = [_state(x) for x in used]
        targets, uncounted = written_tensors(func, args, kwargs), statistics_written(func, args, kwargs)
        accessor = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
        if torch.is_grad_enabled() and func not in _AS_GIVEN and (not accessor or func in _VIEWS):
            args, kwargs = mapped(lambda x: x if _among(x, targets) else self.own_copy(rank, x), (args, kwargs))
        result = func(*args, **kwargs)
        for x, own, state in zip(used, memories, states, strict=True):
            if _state(x) != state or _among(x, uncounted) or (x.is_inference() and _among(x, targets)):
                for memory in own:
                    self._add_write(rank, memory)
        if not accessor:
            before = {_key(x) for x in _joined(memories)}
            for x in _joined(map(_memories, _tensors(leaves(result)))):
                if _key(x) not in before:
                    self._add_made(rank, x)
        return result

    def _watch_generator(self, generator: torch.Generator) -> None:
        """Have the runs of later ranks start from the state that ``generator`` has now."""
        if generator not in self._streams:
            self._streams[generator] = _Stream(lambda: state_now(generator), lambda state: go_to(generator, state))

    def _check_use(self, rank: int, x: Tensor) -> None:
        """Raise LayoutError if the run of another rank wrote to ``x``, which it did not make itself."""
        writer = self._writers.rank_of(x)
        if writer not in (None, rank, self._makers.rank_of(x)):
            raise LayoutError(_conflict(rank, x, writer))

    def _add_write(self, rank: int, x: Tensor) -> None:
        """Record that the run of ``rank`` wrote to ``x``; raise LayoutError if another rank's run made it or wrote to it."""
        for other in (self._writers.rank_of(x), self._makers.rank_of(x)):
            if other not in (None, rank):
                raise LayoutError(_conflict(rank, x, other))
        self._writers.add(rank, x)

    def _add_made(self, rank: int, x: Tensor) -> None:
        """Record that the run of ``rank`` made the memory of ``x``."""
        if self._makers.rank_of(x) is None:
            self._makers.add(rank, x)

    def own_copy(self, rank: int, x: Tensor) -> Tensor:
        """Return the copy of ``x`` that ``rank`` differentiates; ``x`` itself where there is nothing to separate."""
        if (
            not is_plain(x)
            or not x.requires_grad
            or x.is_inference()
            or is_functorch_wrapped(x)
            or self._makers.rank_of(x) == rank
        ):
            return x
        state = x.shape, x._version, _key(x)
        known = self._copies.get(id(x))
        if known is None or known[1] != state:
            with DisableFuncTorch(), single_level_functions_allowed():  # transforms of torch.func end before the copies do
                copies = super(Function, UsedByRanks).apply(x, self._count)
            known = self._copies[id(x)] = x, state, copies
        return known[2][rank]


class _Running(local):
    run: tuple[RankRuns, int] | None = None  # the runs that this thread is in, and the rank


_RUNNING = _Running()


def function_arguments(function: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a ``torch.autograd.Function`` as the rank that runs here differentiates them.

    Torch functions are followed by a mode, which does not see ``Function.apply``.

    Raises:
        LayoutError: it is a reentrant checkpoint, which would use plain tensors again after the run, in the backward pass.
    """
    if _RUNNING.run is None or not torch.is_grad_enabled() or function is UsedByRanks:
        return args
    if function is CheckpointFunction:
        raise LayoutError(
            "checkpoint(..., use_reentrant=True) inside map_ranks: its backward pass adds up the gradients of all ranks in plain "
            "tensors. Write use_reentrant=False, or call the checkpoint on per_rank tensors, outside of map_ranks"
        )
    runs, rank = _RUNNING.run
    return [runs.own_copy(rank, x) if isinstance(x, Tensor) else x for x in args]


class _Stream:
    """One source of random numbers: its state before the first run, and after it."""

    def __init__(self, read: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        self._read, self._restore = read, restore
        self._before, self._after = read(), None

    def restart(self) -> None:
        self._restore(self._before)

    def finish(self) -> None:
        """Leave the source as the first run left it."""
        if self._after is None:
            self._after = self._read()
        self._restore(self._after)


class _Memories:
    """A rank for each of some memories, which are held weakly."""

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = _PRUNED

    def rank_of(self, x: Tensor) -> int | None:
        found = self._ranks.get(_key(x))
        return None if found is None else found[1]

    def add(self, rank: int, x: Tensor) -> None:
        if _key(x):
            self._ranks[_key(x)] = StorageWeakRef(x.untyped_storage()), rank  # no other memory gets its key while this is kept
        if len(self._ranks) > self._most:
            self._ranks = {key: entry for key, entry in self._ranks.items() if not entry[0].expired()}
            self._most = max(_PRUNED, 2 * len(self._ranks))


def _conflict(rank: int, x: Tensor, other: int | None) -> str:
    return (
        f"map_ranks: the function writes to a tensor of shape {tuple(x.shape)} on rank {other} and uses it on rank {rank}. All "
        "ranks of this process share it, and as processes each would have its own. Return the new value instead of writing it "
        "(x + y, not x.add_(y)), give each rank its own tensor with per_rank([...]), or call backward() and optimizer.step() "
        "once, on what map_ranks returns"
    )


def _tensors(values: Any) -> list[Tensor]:
    """All tensors in ``values``, each rank's own of a ``PerRank``."""
    return [own for x in values if isinstance(x, Tensor) for own in shards_of(x)]


def _memories(x: Any) -> Sequence[Tensor]:
    """The tensors that hold the elements of ``x``: the local tensors of a DTensor, else itself."""
    return shards_of(x._local) if hasattr(x, "_layout") else (x,)


def _joined(rows: Any) -> list[Tensor]:
    return [x for row in rows for x in row]


def _key(x: Tensor) -> int:
    """The identity of the memory of ``x``; 0 where it has none of its own (sparse tensors, tensors of ``torch.func``)."""
    try:
        return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _is_shared(x: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether the range of memory of ``x`` overlaps that of one of the others."""
    if not is_plain(x) or x.layout is not torch.strided or x.is_nested:
        return False
    first, last = _extent(x)
    return any(_key(x) == _key(y) != 0 and first <= _extent(y)[1] and _extent(y)[0] <= last for y in others)


def _extent(x: Tensor) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """Return the offsets of the first and the last element of ``x`` in its memory; an empty range where it has none."""
    if not x.numel():
        return 1, 0
    return x.storage_offset(), x.storage_offset() + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))


def _state(x: Tensor) -> Any:
    """What changes when ``x`` is written to, or a gradient is accumulated in it."""
    version = 0 if x.is_inference() else x._version
    grad = x.grad if x.requires_grad and x.is_leaf else None
    return version, [_key(memory) for memory in _memories(x)], None if grad is None else (id(grad), grad._version)


def _leaves_below(roots: Sequence[Tensor]) -> list[Tensor]:
    """The leaves in which a backward pass from ``roots`` accumulates gradients."""
    found = [x for x in roots if x.requires_grad and x.is_leaf]
    nodes: list[Any] = [x.grad_fn for x in roots]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, AccumulateGrad):
            found.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found


def _among(x: Tensor, others: Sequence[Tensor]) -> bool:
    return any(x is other for other in others)
