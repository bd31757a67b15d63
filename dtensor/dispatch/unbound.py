"""Calls that run otherwise than by steps on locals: decompositions, draws alike on all ranks, ranks outside of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm import communicator_of
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..propagation.propagate import Plan
from ..propagation.schema import Form, Operator
from ..random.draw import from_one_state
from ..ranks.assign import assign
from ..ranks.rank_values import RankValues, agreed
from .settled import nested
from .steps import Args, Before, Keywords, Runner, as_tuple, at, resized_to
from .wrapping import wrap_local


# --- decompositions -----------------------------------------------------------------------------------------------------
def decomposed(plan: Plan, operator: Operator, form: Form) -> Runner:
    """The operations that an operator is made of; a rule's own know no ``out=`` and get no plain tensors."""
    if plan.rule is None or plan.rule.decompose is None:
        return nested(lambda args, kwargs, local_args, local_kwargs: operator.func.decompose(*args, **kwargs))
    compose, tail = plan.rule.decompose, form.tail
    layouts = [plan.call.arguments.get(name) for name in operator.names[: form.count]]
    lacking = {name: value for name, value in form.lacking.items() if name not in operator.outs}

    def run(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        named = {name: value for name, value in kwargs.items() if name not in operator.outs}
        made = compose(
            *[_distributed(value, layout) for value, layout in zip(args, layouts, strict=True)],
            *tail,
            **lacking,
            **{name: _distributed(value, plan.call.arguments.get(name)) for name, value in named.items()},
        )
        return _given_to(operator, form, args, kwargs, made) if any(operator.returns) else made

    return nested(run)


def _given_to(operator: Operator, form: Form, args: Args, kwargs: Keywords, made: Any) -> Any:
    """What was made, in the arguments that the operator writes to and returns."""
    given = []
    for owner, value in zip(operator.returns, as_tuple(made, operator), strict=True):
        if owner is not None:
            target = at(form.place(owner), args, kwargs)
            if target is not value and operator.reshapes:
                target.data, value = value.to(target.dtype), target  # its shape and its layout, too
            elif owner in operator.outs and target.shape != value.shape:
                value = resized_to(target, value.to(target.dtype))
            value = assign(target, value)
        given.append(value)
    return given[0] if len(given) == 1 else tuple(given)


def _distributed(value: Any, layout: Any) -> Any:
    """An argument whose plain tensors, which all ranks hold alike, are replicated ones."""
    if isinstance(layout, list):
        return [_distributed(item, own) for item, own in zip(value, layout, strict=True)]
    if isinstance(layout, Layout) and not hasattr(value, "_layout"):
        return wrap_local(communicator_of(layout.mesh).map(lambda member, x: x, value), layout)
    return value


# --- random numbers -----------------------------------------------------------------------------------------------------
def drawn_alike(plan: Plan, operator: Operator) -> Callable[..., Any]:
    """The op on whole operands, every rank drawing from the same generator state, which advances once; numbers that it answers
    are those of all ranks.
    """

    def one(member: int | None, positional: Sequence[Any], keywords: Keywords) -> Any:
        return operator.func(*positional, **keywords)

    def run(*local_args: Any, **local_kwargs: Any) -> Any:
        made = from_one_state(plan.call.mesh, local_kwargs.get("generator"), one, local_args, local_kwargs)
        if not isinstance(made, tuple):
            return made
        return tuple(agreed([*value], operator.name) if isinstance(value, RankValues) else value for value in made)

    return run


# --- ranks outside of the mesh ------------------------------------------------------------------------------------------
_DATA_DECIDES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def absent(plan: Plan, operator: Operator, form: Form, before: Sequence[Before], in_step: Runner | None) -> Runner:
    """This rank is not part of the mesh: it holds nothing, and results have no elements here.

    ``in_step``: what keeps its generator in step where the others draw.
    """
    layouts = plan.results or (None,) * len(operator.returns)
    owners = [None if owner is None else form.place(owner) for owner in operator.returns]

    def run(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        for step in before:
            step(args, kwargs, local_args, local_kwargs)
        if in_step is not None:
            in_step(args, kwargs, list(local_args), dict(local_kwargs))
        if plan.rule is not None and plan.rule.absent is not None:
            return plan.rule.absent
        if _DATA_DECIDES.intersection(plan.call.func.tags):
            raise UnsupportedOperationError(
                f"{operator.name} depends on values, and this rank has none because it is not part of "
                f"{plan.call.mesh!r}; redistribute to a mesh with this rank first"
            )
        given = (x.device for x in (*local_args, *local_kwargs.values()) if isinstance(x, torch.Tensor))
        device = kwargs.get("device") or next(given, None)
        made = []
        for name, place, layout in zip(operator.returns, owners, layouts, strict=True):
            if place is None:
                made.append(_empty(layout, device))
                continue
            target = at(place, args, kwargs)
            if (
                name in operator.outs
                and isinstance(layout, Layout)
                and hasattr(target, "_layout")
                and target.shape != layout.shape
            ):
                target.data = _empty(layout.replace(dtype=target.dtype), device)  # it looks otherwise from now on
            made.append(target)
        return None if not made else made[0] if len(made) == 1 else tuple(made)

    return run


def _empty(layout: Any, device: Any) -> Any:
    if isinstance(layout, list):
        return [_empty(item, device) for item in layout]
    if layout is None:
        return None
    return wrap_local(torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=device), layout)
