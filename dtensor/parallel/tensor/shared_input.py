"""Shared module inputs: a redistributed input that several parallel modules use.

Query, key and value projections, or the two columns of a gated MLP, get one tensor. Without sharing, each would convert and
gather it, and reduce its own share of the gradient in backward. With sharing they get the same DTensor. It is gathered once,
and the shares of the gradient are added before one reduction. Only the last value is kept, during a call of the modules that
contain the styled modules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ...base.mode_stack import ModeBlock, ModeStack
from ...base.selective_checkpoint import selective_checkpoint_mode
from ...base.torch_internals import forward_ad, functorch_active
from ...base.tracing import is_tracing
from ...comm import PerRank
from ...layout.layout import Layout
from ...state.version_counters import take_snapshot
from ...tensor.autograd import ToLocal, to_local_tensor
from ...tensor.functorch_function import make_apply


class SharedInput:
    """Cache of the last module input and of its redistributed results, valid until one of them is written.

    Attributes:
        policy: the selective-checkpoint policy that was active when the cache was made.
        value: the last input.
        version: its ``requires_grad`` and version snapshot.
        results: results and their version snapshots, by the requested conversion.
    """

    __slots__ = ("policy", "results", "value", "version")

    def __init__(self) -> None:
        self.policy = selective_checkpoint_mode()
        self.value: Any = None
        self.version: Any = None
        self.results: dict[Hashable, tuple[Any, Any]] = {}

    def get_or_make(self, x: torch.Tensor, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the cached result for ``x`` and ``key``, or call ``make()`` if there is none or a tensor was written since."""
        version = x.requires_grad, take_snapshot(x)
        if self.value is not x or self.version != version:
            self.value, self.version, self.results = x, version, {}
        entry = self.results.get(key)
        if entry is None or entry[1] != take_snapshot(entry[0]):
            result = make()
            entry = self.results[key] = result, take_snapshot(result)
        return entry[0]


_ACTIVE_INPUTS: ModeStack[SharedInput] = ModeStack("shared input")


def share_input(x: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """Return ``make()``, the conversion of ``x`` that ``key`` describes, or the result that another module got for it."""
    if torch.compiler.is_compiling() or is_tracing():  # a traced graph must not depend on a cached value
        return make()
    active = _ACTIVE_INPUTS.last(None)
    if active is None or not isinstance(x, torch.Tensor) or functorch_active():
        return make()
    if active.policy is not selective_checkpoint_mode():  # a checkpointed block that is recomputed starts without this cache
        return make()
    if torch.is_inference_mode_enabled() or x.is_inference():  # inference tensors have no version counter
        return make()
    return active.get_or_make(x, (key, torch.is_grad_enabled()), make)


def share_inputs_within(module: nn.Module) -> None:
    """Make the parallel modules inside ``module`` share redistributed inputs while it runs."""
    if getattr(module, "_shares_inputs", False):
        return
    module._shares_inputs = True  # type: ignore[assignment]
    entered: list[ModeBlock[SharedInput]] = []

    def open_cache(*_: Any) -> None:
        if not (torch.compiler.is_compiling() or is_tracing()):
            entered.append(_ACTIVE_INPUTS.enter(SharedInput()))

    def close_cache(*_: Any) -> None:
        if entered:
            _ACTIVE_INPUTS.leave_last(entered)

    module.register_forward_pre_hook(open_cache)
    module.register_forward_hook(close_cache, always_call=True)


class _DetachedToLocal(ToLocal):
    """``to_local`` whose results are not views, so that autograd records in-place writes to them."""

    @staticmethod
    def forward(x: Any, source: Layout, backward: Layout) -> Any:
        local = x._local
        return tuple(shard.detach() for shard in local.shards) if isinstance(local, PerRank) else local.detach()


_detached_to_local = make_apply(_DetachedToLocal)


def donate_local(x: Any) -> torch.Tensor:
    """Return the local tensors of ``x`` to a caller that may write them in place, because nothing else uses ``x``.

    No other code may use ``x``, and autograd must not have saved it.
    """
    traced = torch.compiler.is_compiling() or is_tracing() or functorch_active() or forward_ad._current_level >= 0
    return to_local_tensor(x) if traced else to_local_tensor(x, give=_detached_to_local)
