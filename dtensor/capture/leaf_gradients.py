"""Tensors that calls leave for later ones: ``.grad`` of the tensors that a function reads (a whole step finds gradients there,
adds to them, takes them away), and what units of data parallelism keep until gradients are reduced.

What matters of them for a replay is known after the run: nothing, if no Python code looked at ``.grad`` and no backward pass
accumulated; else whether each leaf has a gradient, of which layout, and who listens to it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..base import tensor_tree
from ..base.recorder_hooks import Between, current
from ..base.torch_internals import DisableTorchFunctionSubclass, TensorBase, pytree
from ..errors import CaptureError
from ..tensor.dtensor import DTensor
from ..tensor.leaf_gradients import grad_placements_of
from ..tensor.redistribute_many import redistribute_many
from .impure_calls import of_user
from .signature import described, picking

_GRAD, _LAYOUT, _BEFORE, _AFTER = map(attrgetter, ("grad", "_layout", "_backward_hooks", "_post_accumulate_grad_hooks"))
_PLACE: Any = TensorBase.grad
# While torch.autograd.grad runs, the mode does not see what hooks look at.
_LOOKS = frozenset((_PLACE.__get__, _PLACE.__set__, _PLACE.__delete__, torch.autograd.grad))
_RUNS: Any = frozenset(
    (
        torch.autograd.grad,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        *(getattr(TensorBase, name).__get__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    )
)


# What is one call's affair, or one rank's: how often a tensor was written to, where it lies, what it is a view of.
_MEMORY: Any = frozenset(
    (
        *(getattr(TensorBase, name) for name in ("data_ptr", "storage_offset", "untyped_storage", "_is_view", "is_set_to")),
        *(getattr(TensorBase, name).__get__ for name in ("_version", "_base", "_cdata", "_post_accumulate_grad_hooks")),
        torch.Tensor.storage,
    )
)


class Guarded(NamedTuple):
    """Leaves by their numbers in the survey, and what a replay takes for granted of each: its gradient's kind, and its hooks
    where a backward pass inside of the run may have called them.

    Attributes:
        pick: gives the leaves, of the tensors of a survey.
        layouts: of gradients; of a plain one its metadata.
        between: what the library keeps for later calls; ``forms`` of it, tensors aside.
    """

    numbers: tuple[int, ...] = ()
    hooks: tuple[list[Any], ...] | None = None
    layouts: list[Any] = []  # noqa: RUF012  never written to
    pick: Callable[[Sequence[Any]], Sequence[Any]] = picking(())
    between: Sequence[Between] = ()
    forms: list[Any] = []  # noqa: RUF012  as above

    def gradients(self, tensors: Sequence[Any]) -> list[Any] | None:
        """The leaves' gradients, and the tensors that are kept between calls; None if it is not so."""
        leaves = self.pick(tensors)
        with DisableTorchFunctionSubclass():  # of which each getter asks the class otherwise
            found = [*map(_GRAD, leaves)]
        if any(self.between):
            found += tensor_tree.tensors([[*kept.values()] for kept in self.between])
        if [*map(_form, self.between)] != self.forms:
            return None
        held = _kinds(found) == self.layouts and (self.hooks is None or hooks_of(leaves) == self.hooks)
        return found if held else None


def _form(kept: Between) -> Any:
    """What is kept, without tensors."""
    if not kept:
        return None
    leaves, tree = pytree.tree_flatten(dict(kept))
    return tree, [None if isinstance(x, torch.Tensor) else x for x in leaves]


def _kinds(grads: Sequence[Any]) -> list[Any]:
    if {*map(type, grads)} == {DTensor}:
        return [*map(_LAYOUT, grads)]
    return [None if grad is None else grad._layout if type(grad) is DTensor else described(grad) for grad in grads]


def hooks_of(leaves: Sequence[Any]) -> tuple[list[Any], ...]:
    """The numbers of the hooks on leaves; torch never uses one again."""
    return _keys(map(_BEFORE, leaves)), _keys(map(_AFTER, leaves))


def _keys(hooks: Iterable[Any]) -> list[Any]:
    found = [*hooks]
    return [tuple(held or ()) for held in found] if any(found) else []


def put(kept: Between, values: Mapping[Any, Any]) -> None:
    """Have this kept for later calls."""
    kept.clear()
    kept.update(values)


class Leaves:
    """The leaves of one recorded run.

    Attributes:
        accumulated: numbers of those that a backward pass inside of the run gave a gradient.
        looked: addresses of tensors that a torch function was called on, ``x.shape`` and the like among them.
        touched: whether anything of the run depends on gradients that were there, or changes them;
        hooked: on hooks, because a backward pass may have called them, or code looked at them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], between: Sequence[Between]) -> None:
        self._between = [(kept, dict(kept)) for kept in between]
        self._leaves = {number: x for number, x in enumerate(tensors) if x.requires_grad and x.is_leaf}
        leaves = [*self._leaves.values()]
        self._before = {number: x.grad for number, x in self._leaves.items()}
        numbers, forms = tuple(self._leaves), [*map(_form, between)]
        self._known = Guarded(numbers, hooks_of(leaves), _kinds(self.gradients()), picking(numbers), between, forms)
        self.accumulated: set[int] = set()
        self.looked: set[int] = set()
        self.touched = self.hooked = False

    def gradients(self) -> list[torch.Tensor | None]:
        """Those that were there before the run, of each leaf; then what was kept by calls before."""
        return [*self._before.values(), *tensor_tree.tensors([[*before.values()] for _, before in self._between])]

    def number(self, place: int) -> int | None:
        """Of a leaf, in the survey; None for what was kept."""
        return self._known.numbers[place] if place < len(self._known.numbers) else None

    def left(self) -> list[tuple[Between, list[Any], Any]]:
        """What is kept for later calls, where that is not what was: its leaves, and how they are nested."""
        changed = [kept for kept, before in self._between if [*map(id, kept.values())] != [*map(id, before.values())]]
        return [(kept, *pytree.tree_flatten(dict(kept))) for kept in changed]

    def changed(self) -> dict[int, torch.Tensor | None]:
        """The gradients of leaves that have another one than before, or none."""
        found = {number: x.grad for number, x in self._leaves.items() if x.grad is not self._before[number]}
        self.touched |= bool(found)
        return found

    def put_back(self) -> None:
        """What was there before the run."""
        for number, x in self._leaves.items():
            x.grad = self._before[number]
        for kept, before in self._between:
            put(kept, before)

    def guards(self) -> Guarded:
        """What a replay must find."""
        if self.hooked or self.accumulated:
            return self._known
        if self.touched or not self._between:
            return self._known._replace(hooks=None) if self.touched else Guarded()
        kept = self.gradients()[len(self._leaves) :]  # kept by calls before
        return Guarded(layouts=_kinds(kept), between=self._known.between, forms=self._known.forms)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, it is seen who looks at ``.grad`` and which leaves get gradients."""
        self._thread = get_ident()
        with ExitStack() as stack:
            for number, x in self._leaves.items():
                stack.callback(x.register_post_accumulate_grad_hook(self._noting(number)).remove)
            stack.enter_context(_Looking(self))
            yield

    def _noting(self, number: int) -> Callable[[Any], None]:
        def note(_: Any) -> None:
            if current() is not None or get_ident() == self._thread:  # not of another thread's backward pass
                self.accumulated.add(number)

        return note


class _Looking(TorchFunctionMode):
    """In this thread."""

    def __init__(self, leaves: Leaves) -> None:
        self._leaves = leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MEMORY and of_user(_asking()):
            raise CaptureError(
                f"capture: the function reads {_named(func)} of a tensor, which differs between calls or ranks; "
                "read it outside of the captured function"
            )
        if func in _LOOKS:
            self._leaves.touched = True
        if func in _RUNS:
            self._leaves.touched = self._leaves.hooked = True
        self._leaves.looked.update(id(x) for x in args if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def _asking() -> Any:
    """The frame that calls a torch function, past those of modes."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("__torch_function__", "called"):
        frame = frame.f_back
    return frame


def _named(func: Any) -> str:
    return str(getattr(getattr(func, "__self__", func), "__name__", func))


def leaves_of(roots: list[torch.Tensor]) -> dict[int, Any]:
    """By address the leaves, and the nodes, that the history of ``roots`` reaches."""
    reached: dict[int, Any] = {}
    nodes: list[Any] = [x.grad_fn if x.grad_fn is not None else x for x in roots]
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in reached:
            continue
        reached[id(node)] = node
        if isinstance(node, torch.Tensor):
            continue
        if hasattr(node, "variable"):
            reached[id(node.variable)] = node.variable
        nodes.extend(following for following, _ in node.next_functions)
    return reached


@contextmanager
def without_hooks(leaves: list[Any]) -> Iterator[None]:
    """The users' hooks run when the gradients are accumulated, not when they are computed."""
    held = [(x, x._backward_hooks) for x in leaves]
    for x, hooks in held:
        if hooks is not None:
            x._backward_hooks = None
    try:
        yield
    finally:
        for x, hooks in held:
            if hooks is not None:
                x._backward_hooks = hooks


def arrived(given: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Gradients on their way to what was given: where that is a leaf, as the leaf's gradients lie."""
    found = list(gradients)
    moving = [place for place, (x, gradient) in enumerate(zip(given, gradients, strict=True)) if _differs(x, gradient)]
    wanted = [grad_placements_of(given[place]) for place in moving]
    for place, moved in zip(moving, redistribute_many([gradients[place] for place in moving], wanted), strict=True):
        found[place] = moved
    return found


def _differs(given: Any, gradient: Any) -> bool:
    if not isinstance(gradient, DTensor) or "_grad_layout" not in given.__dict__ or given.grad_fn is not None:
        return False
    return gradient._layout.mesh == given._layout.mesh and gradient._layout.placements != grad_placements_of(given)
