"""Plain tensors beside DTensors: which count as replicated, what is asked of the ranks, and writes to them.

The law, the same in one process and on processes:

- numbers (0-d, one element, one element expanded) and tensors without elements count as the same on every rank;
- while autograd computes gradients, backward or forward, so do all: its formulas make constants from shapes. Where else torch
  makes tensors of its own, as ``vmap`` does for ``embedding``, it says so itself;
- arguments that the operator's rule declares (``Rule.plain``: tables of indices, class weights) are taken, and compared between
  ranks when their call is planned, once for each combination of shapes and layouts: one exchange of a few bytes, none on a hit;
- everything else raises on all ranks, unless ``implicit_replication()`` says that every rank holds the same.

A plain tensor that is *written to* must be the same again afterwards: under ``implicit_replication()``, and while autograd adds
up the gradients of a plain leaf, the operation runs on a replicated copy, and every rank takes over the whole result. Elsewhere
such a write is refused.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from ..base.modes import MODES
from ..base.tensor_tree import listed
from ..base.torch_internals import forward_ad, graph_task
from ..base.user_frames import wrapped_by_torch
from ..base.validation import strided
from ..comm import PerRank, communicator_of
from ..comm.cross_rank_check import same_on_all
from ..errors import LayoutError, MixedTensorError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.op_schema import Operator
from ..propagation.propagate import Plan
from ..ranks.write_result import assign
from ..rules.registry import lookup
from .cross_mesh import Runner, meshes_of
from .wrap import wrap_local

try:
    from ..base.torch_internals import said_alike
except ImportError:  # torch before 2.12 does not say it

    def said_alike() -> bool:
        return False


def made_by_torch() -> bool:
    """Whether torch makes the plain tensors of this thread: autograd, backward or forward, or a batching rule of ``vmap``."""
    return graph_task() != -1 or forward_ad._current_level >= 0 or said_alike()


def as_plain_gradient(value: torch.Tensor) -> None:
    """Have the gradient of a plain operand be plain: of a loss of this rank's own part of the batch, to which a penalty of
    distributed parameters is added. (That of a leaf is the distributed one, as it arrives.)
    """
    if value.grad_fn is not None and torch.is_grad_enabled():
        value.register_hook(_whole)


def _whole(grad: Any) -> Any:
    return grad.full_tensor() if hasattr(grad, "_layout") else None


def is_number(value: torch.Tensor) -> bool:
    """Whether a plain tensor holds one number, expanded or 0-d, or none (as on ``meta``): it counts as the same on all ranks."""
    if value.numel() <= 1 or value.is_meta:
        return True
    if value.is_nested:  # it has no sizes to look at
        return False
    return value.layout is torch.strided and not any(n != 1 and step for n, step in zip(value.shape, value.stride(), strict=True))


def taken_as_replicated(value: torch.Tensor) -> bool:
    """Whether a plain tensor beside DTensors counts as the same on all ranks without being asked for."""
    return is_number(value) or ((MODES.implicit_replication or made_by_torch()) and not isinstance(value, PerRank))


def declared(operator: Operator) -> tuple[str, ...]:
    """The arguments of an operator that may be plain by its rule."""
    rule = lookup(operator.func)
    return () if rule is None else rule.plain


def admit(value: torch.Tensor, name: str, position: int | None, operator: Operator) -> None:
    """Let a plain tensor stand as argument ``name`` beside DTensors, or at a ``position`` of the list that it is.

    Raises:
        MixedTensorError: the law above does not allow it.
    """
    anything = MODES.implicit_replication or made_by_torch()
    # step counts of optimizers are alike on all ranks; so is what a list operator writes beside its lists (``found_inf``)
    number = operator.facts.per_element and (value.ndim == 0 or (position is None and value.numel() == 1))
    # results under the mode take the whole value
    if name in operator.mutated and not (number or (anything and name in operator.outs)):
        raise MixedTensorError(
            f"{operator.name} would write the value of a DTensor into the plain tensor {name!r}. Distribute "
            "it first with distribute_tensor(t, mesh, [Replicate()] * mesh.ndim), or, if it is the same on "
            "every rank, use `with dtensor.implicit_replication():`"
        )
    if not is_number(value) and not anything and (isinstance(value, PerRank) or name not in declared(operator)):
        raise MixedTensorError(
            f"{operator.name} mixes DTensors with a plain tensor of shape {tuple(value.shape)} (argument {name!r}). "
            f"If every rank holds the same value, use `with dtensor.implicit_replication():`, or distribute_tensor(t, mesh, "
            f"placements){wrapped_by_torch(sys._getframe())}"
        )


def agree_on_declared(operator: Operator, bound: dict[str, Any], plan: Plan) -> bool:
    """Compare between ranks the plain tensors that stand in a call because its rule declares them: of a call that layouts answer
    their shapes, which is all that it reads. Return True if there were any.

    Raises:
        MixedTensorError: on all ranks, if they differ.
    """
    names, compared = declared(operator), False
    for name in names if names and not (MODES.implicit_replication or made_by_torch()) else ():
        for item in listed(bound.get(name)):
            if isinstance(item, torch.Tensor) and not hasattr(item, "_layout") and not is_number(item):
                read = torch.tensor(item.shape, device=item.device) if plan.how == "answer" else item
                same_on_all(plan.call.mesh, read, f"{operator.name} (argument {name!r})")
                compared = True
    return compared


def through_copies(operator: Operator, bound: dict[str, Any]) -> Runner | None:
    """How to run a call that writes to plain tensors, where it may: on replicated copies of them, from which every rank takes the
    whole values (``out=`` arguments have their own way). None: it does not."""
    if not operator.mutated or not (MODES.implicit_replication or made_by_torch()):
        return None
    written = (name for name in operator.names if name in operator.mutated and name not in operator.outs)
    names = tuple(name for name in written if any(_copied(operator, item) for item in listed(bound.get(name))))
    return partial(_through_copies, operator, names) if names else None


def _copied(operator: Operator, value: Any) -> bool:
    """Whether it is a plain tensor; step counts of optimizers stay as they are."""
    plain = isinstance(value, torch.Tensor) and not hasattr(value, "_layout")
    return plain and not (operator.facts.per_element and value.ndim == 0)


def _through_copies(operator: Operator, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any) -> Any:
    bound = operator.bind(args, kwargs)
    given = {name: bound[name] for name in names}
    (mesh,) = meshes_of(bound.values())
    copies: list[tuple[torch.Tensor, Any]] = []  # each plain tensor and its copy

    def copied(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [*map(copied, value)]
        if not _copied(operator, value):
            return value
        copies.append((value, replicated(value, mesh)))
        return copies[-1][1]

    bound.update({name: copied(value) for name, value in given.items()})
    result = operator.call(bound)
    for value, copy in copies if communicator_of(mesh).held else ():
        assign(value, copy._local)
    if len(operator.returns) == 1:
        return given.get(operator.returns[0] or "", result)
    results = zip(operator.returns, result or (), strict=True)
    return tuple(given.get(owner or "", made) for owner, made in results) if operator.returns else None


def replicated(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """A copy of ``value`` on every rank."""
    local = communicator_of(mesh).map(lambda member, x: x.clone(), strided(value, "a replicated copy").detach())
    return wrap_local(local, Layout.replicated(mesh, local.shape, local.stride(), local.dtype))


def laid_out_alike(value: torch.Tensor, x: Any) -> Any:
    """A plain ``value``, the same on every rank, under the placements of ``x``, which is to have it as its ``data``.

    Raises:
        LayoutError: nobody said that it is the same.
    """
    if not MODES.implicit_replication or isinstance(value, PerRank):
        raise LayoutError(
            "x.data = t needs a DTensor t if x is a DTensor; use distribute_tensor(t, x.device_mesh, "
            "x.placements), or, if t is the same on every rank, `with dtensor.implicit_replication():`"
        )
    with torch.no_grad():
        return replicated(value, x._layout.mesh).redistribute(placements=x.placements)
