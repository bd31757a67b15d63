"""Gradient recording: the gradients of leaves before a recorded run, whether code reads them, and how the run changes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...base import tensor_tree
from ...base.recorder_hooks import CrossCallState, current_recorder
from ...base.torch_internals import TensorBase, pytree
from ...errors import CaptureError
from ...tensor.dtensor import DTensor
from ...tensor.leaf_gradients import grad_placements_of
from ...tensor.redistribute_many import redistribute_many
from ..guards.gradient_guards import GradGuards, describe_gradients, describe_state, list_hook_ids, set_carried_state
from ..guards.signature import make_picker
from ..tracing.float_provenance import FloatTracer
from ..tracing.impure_calls import is_user_call

_GRAD_PROPERTY: Any = TensorBase.grad
# Functions that read or write gradients. While torch.autograd.grad runs, the mode does not see what hooks read.
_GRAD_FUNCTIONS = frozenset((_GRAD_PROPERTY.__get__, _GRAD_PROPERTY.__set__, _GRAD_PROPERTY.__delete__, torch.autograd.grad))
# Functions that run, read or add hooks.
_HOOK_FUNCTIONS: Any = frozenset(
    (
        torch.autograd.grad,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        *(getattr(TensorBase, name).__get__ for name in ("_backward_hooks", "_post_accumulate_grad_hooks")),
    )
)
# Functions with results that differ between calls or ranks: versions, addresses, view relations.
_MEMORY_FUNCTIONS: Any = frozenset(
    (
        *(getattr(TensorBase, name) for name in ("data_ptr", "storage_offset", "untyped_storage", "_is_view", "is_set_to")),
        *(getattr(TensorBase, name).__get__ for name in ("_version", "_base", "_cdata", "_post_accumulate_grad_hooks")),
        torch.Tensor.storage,
    )
)


class LeafGradients:
    """Gradients of the leaves and library states of one recorded run: those from before, and how the run changes them.

    Attributes:
        accumulated: numbers of the leaves that a backward pass inside of the run gave a gradient.
        passed_to_torch: addresses of tensors that were passed to a torch function, such as ``x.shape``.
        are_used: whether the run depends on gradients from before, or changes them.
        hooks_are_used: whether the run depends on hooks: a backward pass may have called them, or code read them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], library_states: Sequence[CrossCallState]) -> None:
        self._states = [(state, dict(state)) for state in library_states]
        self._leaves = {number: x for number, x in enumerate(tensors) if x.requires_grad and x.is_leaf}
        leaves = [*self._leaves.values()]
        self._before = {number: x.grad for number, x in self._leaves.items()}
        numbers, kinds = tuple(self._leaves), [*map(describe_state, library_states)]
        self._guards = GradGuards(
            numbers,
            list_hook_ids(leaves),
            describe_gradients(self.gradients_before()),
            make_picker(numbers),
            library_states,
            kinds,
        )
        self.accumulated: set[int] = set()
        self.passed_to_torch: set[int] = set()
        self.are_used = self.hooks_are_used = False

    def gradients_before(self) -> list[torch.Tensor | None]:
        """Return the gradient of each leaf before the run, then the tensors of the library states."""
        return [*self._before.values(), *tensor_tree.tensor_leaves([[*values.values()] for _, values in self._states])]

    def leaf_number(self, place: int) -> int | None:
        """Return the guard-set number of the leaf with gradient number ``place``; None for a library state's tensor."""
        return self._guards.numbers[place] if place < len(self._guards.numbers) else None

    def changed_states(self) -> list[tuple[CrossCallState, list[Any], Any]]:
        """Return the library states that the run has changed, with their leaves and tree."""
        changed = [state for state, before in self._states if [*map(id, state.values())] != [*map(id, before.values())]]
        return [(state, *pytree.tree_flatten(dict(state))) for state in changed]

    def replaced_gradients(self) -> dict[int, torch.Tensor | None]:
        """Return ``.grad`` of the leaves, by number, where the run replaced it by another object or None."""
        replaced = {number: x.grad for number, x in self._leaves.items() if x.grad is not self._before[number]}
        self.are_used |= bool(replaced)
        return replaced

    def restore(self) -> None:
        """Restore the gradients and library states to those from before the run, after a refused recording."""
        for number, x in self._leaves.items():
            x.grad = self._before[number]
        for state, before in self._states:
            set_carried_state(state, before)

    def make_guards(self) -> GradGuards:
        """Return the guards that a replay must check. Call it after the run."""
        if self.hooks_are_used or self.accumulated:
            return self._guards
        if self.are_used or not self._states:
            return self._guards._replace(hooks=None) if self.are_used else GradGuards()
        state_tensors = self.gradients_before()[len(self._leaves) :]
        return GradGuards(
            grad_kinds=describe_gradients(state_tensors),
            library_states=self._guards.library_states,
            state_kinds=self._guards.state_kinds,
        )

    @contextmanager
    def observed_access(self) -> Iterator[None]:
        """Inside of the context, note whether code reads gradients or hooks, and which leaves get gradients."""
        self._thread = get_ident()
        with ExitStack() as stack:
            for number, x in self._leaves.items():
                stack.callback(x.register_post_accumulate_grad_hook(self._make_hook(number)).remove)
            stack.enter_context(_GradAccessMode(self))
            yield

    def _make_hook(self, number: int) -> Callable[[Any], None]:
        """Return a post-accumulate hook for a leaf, which notes that backward gave it a gradient."""

        def note_accumulation(_: Any) -> None:
            if current_recorder() is not None or get_ident() == self._thread:  # not another thread's backward pass
                self.accumulated.add(number)

        return note_accumulation


class _GradAccessMode(TorchFunctionMode):
    """Function mode that notes uses of ``.grad`` and hooks, and raises if user code reads a tensor's memory address."""

    def __init__(self, gradients: LeafGradients) -> None:
        self._gradients = gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what the function reads of gradients and hooks, and run it; raise for reads of memory addresses."""
        if func in _MEMORY_FUNCTIONS and is_user_call(_calling_frame()):
            name = getattr(getattr(func, "__self__", func), "__name__", func)
            raise CaptureError(
                f"capture: the function reads {name} of a tensor, which differs between calls or ranks; "
                "read it outside of the captured function"
            )
        if func in _GRAD_FUNCTIONS:
            self._gradients.are_used = True
        if func in _HOOK_FUNCTIONS:
            self._gradients.are_used = self._gradients.hooks_are_used = True
        self._gradients.passed_to_torch.update(id(x) for x in args if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))


def _calling_frame() -> Any:
    """Return the frame that calls a torch function, outside of the frames of function modes."""
    frame: Any = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code is FloatTracer.call_with_floats.__code__
    ):
        frame = frame.f_back
    return frame


def reachable_from(roots: list[torch.Tensor]) -> dict[int, Any]:
    """Return the autograd nodes and leaf tensors in the graph of ``roots``, by ``id``."""
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
def suspend_hooks(leaves: list[Any]) -> Iterator[None]:
    """Remove the hooks of leaves inside of the context, because they must run only when gradients are accumulated."""
    saved = [(x, x._backward_hooks) for x in leaves]
    for x, hooks in saved:
        if hooks is not None:
            x._backward_hooks = None
    try:
        yield
    finally:
        for x, hooks in saved:
            if hooks is not None:
                x._backward_hooks = hooks


def redistribute_leaf_gradients(inputs: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Return the gradients, those of leaves redistributed to the placements that ``.grad`` of the leaf has."""
    result = list(gradients)
    places = [
        place for place, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)) if _needs_redistribution(x, gradient)
    ]
    targets = [grad_placements_of(inputs[place]) for place in places]
    for place, gradient in zip(places, redistribute_many([gradients[place] for place in places], targets), strict=True):
        result[place] = gradient
    return result


def _needs_redistribution(x: Any, gradient: Any) -> bool:
    """Return True if ``gradient`` has other placements than the ``.grad`` of the leaf ``x`` must have."""
    if not isinstance(gradient, DTensor) or "_grad_layout" not in x.__dict__ or x.grad_fn is not None:
        return False
    return gradient._layout.mesh == x._layout.mesh and gradient._layout.placements != grad_placements_of(x)
