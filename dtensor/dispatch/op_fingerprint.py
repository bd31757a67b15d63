"""Counted operations: each operation becomes a part of what ranks compare at the next collective.

Under ``check_ranks("strict")`` each is taken down with its line and numbers. Under ``"watch"`` the plans that are looked up are
noted: but for views, memory that is made and left as it is, and what computes with copies alone, which a rank may do by itself
(the first one prints a norm, and loads what others have no values of yet: ``module.to_empty``). What
autograd does when it stores a gradient counts nowhere: it copies or does not as somebody else holds a reference, a debugger too.
Additions in place count in any order: so torch adds gradients up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..base.caches import remembered
from ..base.tensor_tree import listed
from ..base.torch_internals import AccumulateGrad, autograd_node, count_dispatch_modes
from ..base.tracing import has_no_values, under_way
from ..comm.checked_collectives import holders, trail_of
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.op_schema import Operator
from ..watchdog import source_location
from ..watchdog.collective_hooks import note, operations_among
from ..watchdog.flight_recorder import FAILED, Ring, Trail, fingerprint
from ..watchdog.levels import Level
from . import wrap
from .cache_key import TRUTHS

_KINDS = str | bool | int | float | complex | None | torch.dtype | torch.layout | torch.memory_format


def counting(operator: Operator, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, an operator's dispatch, whose calls count."""
    stores, unordered = operator.facts.stores or operator.is_view, operator.facts.accumulates

    def counted(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if stores and isinstance(autograd_node(), AccumulateGrad):
            return run(cls, func, types, args, kwargs)
        layouts = list(_layouts_of(args, kwargs or {}))
        ring = _ring_of(layouts) if _counts() else None
        if ring is None:
            return run(cls, func, types, args, kwargs)
        what = f"{func}({', '.join(_given(operator, args, kwargs or {}))})  {', '.join(map(_shown, layouts))}"
        take_down = ring.add_unordered if unordered else ring.add
        take_down(fingerprint(what), what, _over(layouts[0].mesh), source_location.at(sys._getframe(1)))
        made = run(cls, func, types, args, kwargs)
        for result in _tensors(listed(made)):  # by another rule it may lie elsewhere, while the collectives are the same
            if unordered:
                ring.unordered += _placed(result._layout)
            else:
                ring.mix(_placed(result._layout))
        return made

    return counted


def failed(operator: Operator, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leaves word of an operation's error, which counts where the operation does: others may not have met it, and its program
    may go on. Errors count alike, whatever they say: that may be of a rank's own data.
    """
    note(error)
    if operator.facts.stores and isinstance(autograd_node(), AccumulateGrad):
        return
    layouts, what = list(_layouts_of(args, kwargs)), f"{operator.name}, which raised {type(error).__name__}"
    if not _counts():
        return
    if Level.now == "strict" and (ring := _ring_of(layouts)) is not None:
        ring.add(FAILED, what, _over(layouts[0].mesh), source_location.at(sys._getframe(2)))
    elif Level.now == "watch" and not operator.is_view and (trail := trail_of(layouts)) is not None:
        trail.fail(what)


def _counts() -> bool:
    """Whether operations count now: those of other threads come in no order, those of a program that is traced are not done."""
    return threading.get_ident() == threading.main_thread().ident and not (count_dispatch_modes() and under_way())


def _ring_of(layouts: list[Layout]) -> Ring | None:
    """Return the operations of all ranks of the first tensor's mesh; None where they are no processes."""
    return operations_among(layouts[0].mesh._root.world, holders(layouts[0].mesh)) if layouts else None


def _layouts_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Layout]:
    return (value._layout for value in _tensors((*args, *kwargs.values())))


class Notes:
    """One operator's plans, with what notes the calls that find them: a plan is kept with its trail, fingerprint and words.

    Attributes:
        find: ``plans.get`` of the plan alone, whose calls count, with the numbers that enter only the arithmetic; not those of
            other threads, which come in no order, nor while a program is traced.
    """

    def __init__(self, operator: Operator, plans: dict[Any, Any]) -> None:
        self._operator, stores, unordered, many = operator, operator.facts.stores, operator.facts.accumulates, Trail.MANY
        special = stores or unordered
        get, thread, main, modes = plans.get, threading.get_ident, threading.main_thread().ident, count_dispatch_modes

        def find(signature: tuple[Any, ...], numbers: list[Any] | None = None) -> Any:
            kept = get(signature)
            found, trail, step, words = (None, *self._step_of(signature)) if kept is None else kept
            if trail is None or thread() != main or (modes() and under_way()):
                return found
            if not special:
                trail.hash = hash((trail.hash, step))  # of whole numbers: the same in all processes
            elif unordered:
                trail.unordered += step
            elif isinstance(autograd_node(), AccumulateGrad):
                return found
            else:
                trail.hash = hash((trail.hash, step))
            trail.last = words
            if numbers:
                (so_far := trail.numbers).extend(numbers)
                if len(so_far) > many:
                    trail.settle()
            return found

        self.find = find

    def beside(self, plan: Any, signature: tuple[Any, ...]) -> tuple[Any, ...]:
        """A plan as it is kept."""
        return plan, *self._step_of(signature)

    def _step_of(self, signature: tuple[Any, ...]) -> tuple[Trail | None, int, str]:
        """No trail of views, of memory that is made and left as it is, of what ranks do with copies, each for itself."""
        trail = None
        if not self._operator.is_view and self._operator.facts.touches != "nothing":
            trail = trail_of(list(_layouts(signature)))
        if trail is None:
            return None, 0, ""
        words = f"{self._operator.name}({', '.join(map(_part, signature))})"
        return trail, fingerprint(words), words


def _layouts(signature: Iterable[Any]) -> Iterator[Layout]:
    for part in signature:
        if isinstance(part, Layout):
            yield part
        elif isinstance(part, tuple):
            yield from _layouts(part)


def _part(part: Any) -> str:
    """A part of a plan's key in words."""
    if isinstance(part, tuple):
        values = [_part(value) for value in part if not isinstance(value, type)]  # beside the types that numbers have
        return values[0] if len(values) == 1 else f"[{', '.join(values)}]"
    if isinstance(part, Layout):
        return _shown(part)
    return part.__name__ if isinstance(part, type) else TRUTHS.get(part) or _said(part)


@remembered(1024)
def _placed(layout: Layout) -> int:
    return fingerprint(_shown(layout))


@remembered(64)
def _over(mesh: DeviceMesh) -> str:
    return repr(mesh.named(range(mesh.ndim)))


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if type(value) is wrap.TENSOR:
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _given(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """The static arguments by name, in words that are the same on all ranks."""
    for name, value in (*zip(operator.names, args, strict=False), *kwargs.items()):
        if type(value) is not wrap.TENSOR:
            yield f"{name}={_said(value)}"


def _shown(layout: Layout) -> str:
    dtype = str(layout.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, layout.shape))}] ({', '.join(map(str, layout.placements))})"


def _said(value: Any) -> str:
    if type(value) is wrap.TENSOR:
        return "*"
    if isinstance(value, torch.Tensor):
        if value.dim() or value.device.type != "cpu" or has_no_values(value):
            return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
        return repr(value.item())  # a number
    if isinstance(value, list | tuple):
        return _said(value[0]) if len(value) == 1 else f"[{', '.join(map(_said, value))}]"  # dim=[0] is dim=0
    if isinstance(value, torch.device):
        return value.type  # each rank has its own
    return repr(value) if isinstance(value, _KINDS) else type(value).__name__
