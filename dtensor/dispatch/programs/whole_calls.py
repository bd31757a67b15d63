"""Whole calls: runners that replace the local call and the passes around it.

They give a known answer, run a decomposition, or run the call on a rank outside the mesh.
"""

from __future__ import annotations

from typing import Any

import torch

from ...comm.map_ranks import communicator_of
from ...errors import UnsupportedOperationError
from ...layout.layout import Layout
from ...propagation.op_schema import CallSignature, OperatorSchema
from ...propagation.propagate import CallPlan
from ...state.wrap import wrap_local, write_value
from .frame import Args, Frame, Keywords, Runner, Step, argument_at, results_as_tuple
from .local_call import call_local_function
from .redistribution_cache import run_in_decomposition
from .steps import check_explicit, resize_to


def make_whole_call_step(runner: Runner) -> Step:
    """Make the step that takes the output of the call from ``runner``."""

    def step(frame: Frame) -> None:
        frame.output = runner(frame.args, frame.kwargs, frame.local_args, frame.local_kwargs)

    return step


def make_answer_runner(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Runner | None:
    """Return the runner that gives the answer which the rule knows without running anything; None if it knows none."""
    answer = plan.answer
    return (lambda args, kwargs, local_args, local_kwargs: answer) if plan.how == "answer" else None


# --- decompositions -----------------------------------------------------------------------------------------------------
def make_decomposition_runner(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Runner | None:
    """Return the runner of a call that is planned as a decomposition into other operators; None for other plans.

    A decomposition of the rule takes no ``out=`` arguments and no plain tensors.
    """
    if plan.how != "decompose":
        return None
    if plan.rule is None or plan.rule.decompose is None:
        return run_in_decomposition(lambda args, kwargs, local_args, local_kwargs: operator.func.decompose(*args, **kwargs))
    compose, tail = plan.rule.decompose, signature.omitted_positional
    layouts = [plan.call.arguments.get(name) for name in operator.names[: signature.count]]
    lacking = {name: value for name, value in signature.omitted_by_name.items() if name not in operator.outs}

    def run_decomposition(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        """Call the rule's decomposition, with plain arguments distributed as planned, and write its results to arguments."""
        named = {name: value for name, value in kwargs.items() if name not in operator.outs}
        result = compose(
            *[_distribute_plain(value, layout) for value, layout in zip(args, layouts, strict=True)],
            *tail,
            **lacking,
            **{name: _distribute_plain(value, plan.call.arguments.get(name)) for name, value in named.items()},
        )
        return _write_to_arguments(operator, signature, args, kwargs, result) if any(operator.returns) else result

    return run_in_decomposition(run_decomposition)


def _write_to_arguments(operator: OperatorSchema, signature: CallSignature, args: Args, kwargs: Keywords, result: Any) -> Any:
    """Write the results of a decomposition to the arguments that the operator writes to; return the output of the call."""
    outputs = []
    for owner, value in zip(operator.returns, results_as_tuple(result, operator), strict=True):
        if owner is not None:
            target = argument_at(signature.place(owner), args, kwargs)
            if target is not value and operator.reshapes:
                target.data, value = value.to(target.dtype), target  # it gets the shape and the layout of the result
            elif owner in operator.outs and target.shape != value.shape:
                value = resize_to(target, value.to(target.dtype))
            value = write_value(target, value)
        outputs.append(value)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _distribute_plain(value: Any, layout: Any) -> Any:
    """Return an argument with replicated DTensors in place of plain tensors, which are the same on all ranks."""
    if isinstance(layout, list):
        return [_distribute_plain(item, own) for item, own in zip(value, layout, strict=True)]
    if isinstance(layout, Layout) and not hasattr(value, "_layout"):
        return wrap_local(communicator_of(layout.mesh).map(lambda member, x: x, value), layout)
    return value


# --- ranks outside of the mesh ------------------------------------------------------------------------------------------
_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def make_outside_mesh_runner(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Runner | None:
    """Return the runner of a call on a rank outside the mesh, where results have no elements; None on other ranks.

    Operators that draw random numbers run on the empty operands, so that this rank's generator advances as on the other ranks.
    """
    if communicator_of(plan.call.mesh).held:
        return None
    check = check_explicit(plan, operator, signature)
    is_random = plan.rule is not None and plan.rule.kind == "random"
    local_call = call_local_function(plan, operator, signature) if is_random else None
    layouts = plan.results or (None,) * len(operator.returns)
    owners = [None if owner is None else signature.place(owner) for owner in operator.returns]

    def run_outside_mesh(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        """Return empty outputs on a rank outside of the mesh; raise if the caller would need values."""
        frame = Frame(args, kwargs, list(local_args), dict(local_kwargs))
        if check is not None:
            check(frame)
        if local_call is not None:
            local_call(frame)
        if plan.rule is not None and plan.rule.absent is not None:
            return plan.rule.absent
        if _DATA_DEPENDENT.intersection(plan.call.func.tags):
            raise UnsupportedOperationError(
                f"{operator.name} depends on values, and this rank has none because it is not part of "
                f"{plan.call.mesh!r}; redistribute to a mesh with this rank first"
            )
        devices = (x.device for x in (*local_args, *local_kwargs.values()) if isinstance(x, torch.Tensor))
        device = kwargs.get("device") or next(devices, None)
        outputs = []
        for name, place, layout in zip(operator.returns, owners, layouts, strict=True):
            if place is None:
                outputs.append(_make_empty(layout, device))
                continue
            target = argument_at(place, args, kwargs)
            is_out = name in operator.outs and isinstance(layout, Layout) and hasattr(target, "_layout")
            if is_out and target.shape != layout.shape:
                target.data = _make_empty(layout.replace(dtype=target.dtype), device)  # it gets the shape of the result
            outputs.append(target)
        return None if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)

    return run_outside_mesh


def _make_empty(layout: Any, device: Any) -> Any:
    """Return an empty DTensor, or a list of them, for a rank outside of the mesh."""
    if isinstance(layout, list):
        return [_make_empty(item, device) for item in layout]
    if layout is None:
        return None
    return wrap_local(torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=device), layout)
