"""Gradient guards: guards on the ``.grad`` of leaves and on library state that one captured call leaves for the next.

A captured training step finds gradients, adds to them and clears them. Units of data parallelism keep unreduced gradients.

The guards on gradients are known after the run. There are none if no Python code read ``.grad`` and no backward pass accumulated.
Otherwise a replay checks whether each leaf has a gradient, its layout, and the hooks on the leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ...base import tensor_tree
from ...base.recorder_hooks import CrossCallState
from ...base.torch_internals import DisableTorchFunctionSubclass, pytree
from ...tensor.dtensor import DTensor
from .signature import guarded_metadata, make_picker

_GRAD, _LAYOUT, _PRE_HOOKS, _POST_HOOKS = map(attrgetter, ("grad", "_layout", "_backward_hooks", "_post_accumulate_grad_hooks"))


class GradGuards(NamedTuple):
    """Guards on the gradients and hooks of leaves and on library state, checked before a replay.

    Attributes:
        numbers: of the leaves, in the guard set.
        hooks: ids of the hooks on the leaves; None if no backward pass of the run may have called them.
        grad_kinds: for each gradient its layout, the metadata of a plain one, or None.
        pick_leaves: picks the leaves of the tensors of a guard set.
        library_states: state that the library keeps from one call for the next.
        state_kinds: these states without their tensors.
    """

    numbers: tuple[int, ...] = ()
    hooks: tuple[list[Any], ...] | None = None
    grad_kinds: list[Any] = []  # noqa: RUF012  never written to
    pick_leaves: Callable[[Sequence[Any]], Sequence[Any]] = make_picker(())
    library_states: Sequence[CrossCallState] = ()
    state_kinds: list[Any] = []  # noqa: RUF012  never written to

    def get_gradients(self, tensors: Sequence[Any]) -> list[Any] | None:
        """Return the leaves' gradients and the tensors of library states, or None if a guard fails."""
        leaves = self.pick_leaves(tensors)
        with DisableTorchFunctionSubclass():  # otherwise each getter calls __torch_function__ of the class
            gradients = [*map(_GRAD, leaves)]
        if any(self.library_states):
            gradients += tensor_tree.tensor_leaves([[*state.values()] for state in self.library_states])
        if [*map(describe_state, self.library_states)] != self.state_kinds:
            return None
        holds = describe_gradients(gradients) == self.grad_kinds and (self.hooks is None or list_hook_ids(leaves) == self.hooks)
        return gradients if holds else None


def describe_state(state: CrossCallState) -> Any:
    """Return the structure and plain values of a library state, to compare it; None if it is empty."""
    if not state:
        return None
    leaves, tree = pytree.tree_flatten(dict(state))
    return tree, [None if isinstance(x, torch.Tensor) else x for x in leaves]


def describe_gradients(grads: Sequence[Any]) -> list[Any]:
    """Return what a replay depends on of each gradient: a DTensor's layout or a plain tensor's metadata, None without."""
    if {*map(type, grads)} == {DTensor}:
        return [*map(_LAYOUT, grads)]
    return [None if grad is None else grad._layout if type(grad) is DTensor else guarded_metadata(grad) for grad in grads]


def list_hook_ids(leaves: Sequence[Any]) -> tuple[list[Any], ...]:
    """Return the ids of the hooks on leaves. Torch never uses an id again."""

    def ids(hooks: Iterable[Any]) -> list[Any]:
        tables = [*hooks]
        return [tuple(table or ()) for table in tables] if any(tables) else []

    return ids(map(_PRE_HOOKS, leaves)), ids(map(_POST_HOOKS, leaves))


def set_carried_state(state: CrossCallState, values: Mapping[Any, Any]) -> None:
    """Replace the content of a library state that is carried to later calls."""
    state.clear()
    state.update(values)
