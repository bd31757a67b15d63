"""Passes that run a whole call in place of the local call: a known answer, a decomposition, a rank outside the mesh."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import communicator_of
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..propagation.op_schema import Form, Operator
from ..propagation.propagate import Plan
from ..ranks.write_result import assign
from .cached_redistribute import nested
from .frame import Args, Frame, Keywords, Runner, Step, argument_at, results_of
from .local_call import call_local_function
from .steps import check_explicit, resized_to
from .wrap import wrap_local


def run_whole(runner: Runner) -> Step:
    """Make the step that gets a call's output from ``runner``."""

    def step(frame: Frame) -> None:
        frame.output = runner(frame.args, frame.kwargs, frame.local_args, frame.local_kwargs)

    return step


def give_answer(plan: Plan, operator: Operator, form: Form) -> Runner | None:
    """Return what the rule knows without running anything."""
    answer = plan.answer
    return (lambda args, kwargs, local_args, local_kwargs: answer) if plan.how == "answer" else None


# --- decompositions -----------------------------------------------------------------------------------------------------
def decompose(plan: Plan, operator: Operator, form: Form) -> Runner | None:
    """Run the operators that an operator is composed of. A rule's own decomposition takes no ``out=`` and no plain tensors."""
    if plan.how != "decompose":
        return None
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
    """Write what a decomposition made into the arguments that the operator writes to, and return them."""
    given = []
    for owner, value in zip(operator.returns, results_of(made, operator), strict=True):
        if owner is not None:
            target = argument_at(form.place(owner), args, kwargs)
            if target is not value and operator.reshapes:
                target.data, value = value.to(target.dtype), target  # its shape and its layout, too
            elif owner in operator.outs and target.shape != value.shape:
                value = resized_to(target, value.to(target.dtype))
            value = assign(target, value)
        given.append(value)
    return given[0] if len(given) == 1 else tuple(given)


def _distributed(value: Any, layout: Any) -> Any:
    """Return an argument with replicated DTensors in place of plain tensors, which are the same on all ranks."""
    if isinstance(layout, list):
        return [_distributed(item, own) for item, own in zip(value, layout, strict=True)]
    if isinstance(layout, Layout) and not hasattr(value, "_layout"):
        return wrap_local(communicator_of(layout.mesh).map(lambda member, x: x, value), layout)
    return value


# --- ranks outside of the mesh ------------------------------------------------------------------------------------------
_DATA_DECIDES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def run_outside_mesh(plan: Plan, operator: Operator, form: Form) -> Runner | None:
    """Run a call on a rank outside the mesh, which has no local tensors: results have no elements there.

    Operators that draw random numbers run on the empty operands, so that this rank's generator advances as on the other ranks.
    """
    if communicator_of(plan.call.mesh).held:
        return None
    check = check_explicit(plan, operator, form)
    random = plan.rule is not None and plan.rule.kind == "random"
    in_step = call_local_function(plan, operator, form) if random else None
    layouts = plan.results or (None,) * len(operator.returns)
    owners = [None if owner is None else form.place(owner) for owner in operator.returns]

    def run(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        frame = Frame(args, kwargs, list(local_args), dict(local_kwargs))
        if check is not None:
            check(frame)
        if in_step is not None:
            in_step(frame)
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
            target = argument_at(place, args, kwargs)
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
