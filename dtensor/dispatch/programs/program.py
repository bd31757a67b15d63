"""Program: what runs one planned operator call, as ordered steps.

:data:`~dtensor.dispatch.programs.steps.PASSES` is the one table of what may happen around the local call, in order. Each pass
is a function of the plan, the operator and the signature of the call. It returns a step, or None if it has nothing to do. A
program is the steps that remain. It is bound once, at the cache miss, and every later call with the same cache key runs the
same steps.

If the local operator and one wrapper are all that is left, the program is the layout of the result, and dispatch runs it without
a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...base.tracing import KERNEL_ERRORS
from ...comm.events import issue_for_cause
from ...layout.layout import Layout
from ...propagation.op_schema import CallSignature, OperatorSchema
from ...propagation.propagate import CallPlan
from ...state.wrap import wrap_local, wrap_view
from .comm_report import Cause
from .frame import Args, Frame, Keywords, Pass, Runner, Step
from .local_call import LocalCall, runs_kernel
from .local_op import has_complex, local_function, resolve_conjugation
from .steps import AFTER, BEFORE, LOCAL, WrapOutputs
from .whole_calls import make_answer_runner, make_decomposition_runner, make_outside_mesh_runner, make_whole_call_step

# Runners that replace the passes in LOCAL; the first that applies.
WHOLE: tuple[Callable[[CallPlan, OperatorSchema, CallSignature], Runner | None], ...] = (
    make_answer_runner,
    make_decomposition_runner,
    make_outside_mesh_runner,
)


def bind_program(
    plan: CallPlan,
    operator: OperatorSchema,
    args: Sequence[Any],
    kwargs: Keywords,
    whole: Runner | None = None,
    if_refused: Runner | None = None,
    after: Sequence[Pass] = AFTER,
) -> Layout | Runner:
    """Bind ``plan`` to a program that runs all calls with the signature of these arguments.

    Args:
        whole: runs the call in place of the passes in ``LOCAL`` (a view that is computed when it is read).
        if_refused: runs the call if the local operator refuses the strides of a shard. This is the only retry.
        after: the passes that run on the wrapped results.

    Returns:
        The layout of the result if the program is the local operator and one wrapper; else the function that runs the program.
    """
    signature = CallSignature.of(operator, args, kwargs)
    if whole is None:
        whole = next((runner for make in WHOLE if (runner := make(plan, operator, signature)) is not None), None)
        communicates = whole is None and (plan.communicates or runs_kernel(plan))
    else:
        communicates = False
    before, behind = _bind_steps(BEFORE, plan, operator, signature), _bind_steps(after, plan, operator, signature)
    if whole is not None:
        run = _make_runner([*before, make_whole_call_step(whole), *behind]) if before or behind else whole
    else:
        local = _bind_steps(LOCAL, plan, operator, signature)
        call, wrap = next(x for x in local if isinstance(x, LocalCall)), local[-1]
        assert isinstance(wrap, WrapOutputs)
        if len(local) > 2 or before or behind:
            at = local.index(call)
            run = _make_local_runner([*before, *local[:at]], call, local[at + 1 : -1], wrap, behind)
        elif if_refused is None and _is_call_and_wrap(plan, operator, call, wrap):
            return wrap.layout  # type: ignore[return-value]  # it has one: it is plain
        else:
            run = _make_short_runner(call, wrap)
    if communicates:
        run = issue_for_cause(Cause(operator, plan), run)  # collectives are reported for this operator
    if has_complex(plan):
        run = resolve_conjugation(run)
    return run if if_refused is None else _with_retry(run, if_refused)


def runner_of(program: Layout | Runner, operator: OperatorSchema) -> Runner:
    """Return a program as a function; for a program that is only a layout, one that calls the operator and wraps."""
    if not isinstance(program, Layout):
        return program
    wrap = WrapOutputs.of_view(program, 0) if operator.is_view else WrapOutputs.of_one(program)
    return _make_short_runner(LocalCall(local_function(operator.func)), wrap)


def _bind_steps(passes: Sequence[Pass], plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> list[Step]:
    return [step for make in passes if (step := make(plan, operator, signature)) is not None]


def _make_runner(steps: Sequence[Step]) -> Runner:
    """Return the runner that makes a frame of a call and runs ``steps`` on it, until one ends the call."""

    def run_steps(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        """Run the steps of the program until one of them ends the call."""
        frame = Frame(args, kwargs, local_args, local_kwargs)
        for step in steps:
            if step(frame):
                break
        return frame.output

    return run_steps


def _make_local_runner(
    before: Sequence[Step], call: LocalCall, between: Sequence[Step], wrap: WrapOutputs, after: Sequence[Step]
) -> Runner:
    """Return the runner of a program with a local call, which is inlined with the wrapping: every plan-cache hit runs it."""
    func, constants, keywords = call.func, call.constants, call.keywords
    output = wrap.output

    def run_around_call(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        """Run the steps before the local function, the function, and the steps after it; return the output."""
        frame = Frame(args, kwargs, local_args, local_kwargs)
        for step in before:
            if step(frame):
                return frame.output
        for position, value in constants:
            frame.local_args[position] = value
        if keywords:
            frame.local_kwargs.update(keywords)
        frame.local_result = func(*frame.local_args, **frame.local_kwargs)
        for step in between:
            step(frame)
        frame.output = output(frame.args, frame.kwargs, frame.local_result)
        for step in after:
            step(frame)
        return frame.output

    return run_around_call


def _is_call_and_wrap(plan: CallPlan, operator: OperatorSchema, call: LocalCall, wrap: WrapOutputs) -> bool:
    """Return True if the program is only the local operator and one wrapper, without an offset or a lazy conjugation."""
    plain_call = call.func is local_function(operator.func) and not call.constants and not call.keywords
    plain_wrap = wrap.layout is not None and not any(plan.starts)
    return plain_call and plain_wrap and not has_complex(plan)


def _make_short_runner(call: LocalCall, wrap: WrapOutputs) -> Runner:
    """Return the runner of a program that only calls the local function and wraps its result; it makes no frame."""
    func, constants, keywords = call.func, call.constants, call.keywords
    layout, start, output = wrap.layout, wrap.start, wrap.output
    if constants or keywords:

        def run_with_constants(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
            """Call the local function with the rank's constants, and wrap its result."""
            for position, value in constants:
                local_args[position] = value
            if keywords:
                local_kwargs.update(keywords)
            return output(args, kwargs, func(*local_args, **local_kwargs))

        return run_with_constants
    if layout is None:
        return lambda args, kwargs, local_args, local_kwargs: output(args, kwargs, func(*local_args, **local_kwargs))
    if start is None:
        return lambda args, kwargs, local_args, local_kwargs: wrap_local(func(*local_args, **local_kwargs), layout)
    return lambda args, kwargs, local_args, local_kwargs: wrap_view(func(*local_args, **local_kwargs), layout, args[0], start)


def _with_retry(run: Runner, if_refused: Runner) -> Runner:
    """Wrap ``run`` so that a call which a kernel refuses runs by ``if_refused``."""

    def run_or_retry(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        """Run the program; run the call by ``if_refused`` if a kernel refuses the arguments."""
        try:
            return run(args, kwargs, local_args, local_kwargs)
        except KERNEL_ERRORS:
            return if_refused(args, kwargs, local_args, local_kwargs)

    return run_or_retry
