"""What a value becomes at the boundary of a parallel module, remembered for the module beside it.

Query, key and value, or the two columns of a gated MLP, are given one tensor. Each would make a DTensor of it, gather it, and in
backward reduce its own share of its gradient. They get one DTensor instead: it is gathered once, and the shares are added before
they are reduced, once. The memory of this is short: the last value, inside a call of the modules that hold the styled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from ...base.mode_stack import Block, Scoped
from ...base.selective_checkpoint import policy_mode
from ...base.torch_internals import forward_ad, functorch_active
from ...base.tracing import under_way
from ...comm import PerRank
from ...dispatch.functorch import recorded
from ...dispatch.version_counters import stamp
from ...layout.layout import Layout
from ...tensor.autograd import ToLocal, as_local


class Crossing:
    """The value that crossed last, as it was then, and what was made of it."""

    __slots__ = ("made", "policy", "then", "value")

    def __init__(self) -> None:
        self.policy = policy_mode()
        self.value: Any = None
        self.then: Any = None
        self.made: dict[Hashable, tuple[Any, Any]] = {}

    def of(self, x: torch.Tensor, way: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make()`` gives; or gave before, if neither it nor ``x`` was written to since."""
        now = x.requires_grad, stamp(x)
        if self.value is not x or self.then != now:
            self.value, self.then, self.made = x, now, {}
        found = self.made.get(way)
        if found is None or found[1] != stamp(found[0]):
            made = make()
            found = self.made[way] = made, stamp(made)
        return found[0]


_INSIDE: Scoped[Crossing] = Scoped("crossing")


def crossed(x: Any, way: Hashable, make: Callable[[], Any]) -> Any:
    """``make()``, which makes ``x`` what a module asks for in this ``way``; the same for all modules that ask so."""
    if torch.compiler.is_compiling() or under_way():  # a graph remembers nothing of a value
        return make()
    inside = _INSIDE.last(None)
    if inside is None or not isinstance(x, torch.Tensor) or functorch_active():
        return make()
    if inside.policy is not policy_mode():  # a recomputation of what is checkpointed here begins without this memory
        return make()
    if torch.is_inference_mode_enabled() or x.is_inference():  # nobody counts what is written
        return make()
    return inside.of(x, (way, torch.is_grad_enabled()), make)


def shared_within(module: nn.Module) -> None:
    """Have the parallel modules that ``module`` holds share what they are given, while it runs."""
    if getattr(module, "_shares_crossings", False):
        return
    module._shares_crossings = True  # type: ignore[assignment]
    entered: list[Block[Crossing]] = []

    def begin(*_: Any) -> None:
        if not (torch.compiler.is_compiling() or under_way()):
            entered.append(_INSIDE.enter(Crossing()))

    def end(*_: Any) -> None:
        if entered:
            _INSIDE.leave_one(entered)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


class _Away(ToLocal):
    """The pieces as no views of anything: what is written to them in place is recorded."""

    @staticmethod
    def forward(x: Any, source: Layout, backward: Layout) -> Any:
        local = x._local
        return tuple(piece.detach() for piece in local.shards) if isinstance(local, PerRank) else local.detach()


_away = recorded(_Away)


def given_away(x: Any) -> torch.Tensor:
    """The pieces of a result that nobody has from now on, nor saved for a backward pass: they can be written to in place."""
    traced = torch.compiler.is_compiling() or under_way() or functorch_active() or forward_ad._current_level >= 0
    return as_local(x) if traced else as_local(x, give=_away)
