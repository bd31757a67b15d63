"""Plans in the form that dispatch runs: everything known at planning time is bound, so that a call does what it must and no more.

A fast path skips work whose result is known; it is never a different algorithm: each falls back to :func:`execute` for the
rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..base.memory_order import memory_order
from ..base.modes import EXPLICIT
from ..comm import communicator_of
from ..layout.layout import Layout
from ..propagation.propagate import Plan
from ..propagation.schema import Operator
from ..redistribute import execute as run_move
from ..rules.call import kind_of
from .conjugation import carried_out, is_complex
from .execute import Wrap, execute, kernel_of, local_view, served
from .laid_out import as_laid_out
from .list_numbers import with_numbers_once
from .local_op import local_function

Args = tuple[Any, ...]
Runner = Callable[[Args, dict[str, Any], list[Any], dict[str, Any]], Any]  # user's args, kwargs, then local ones


def compile_plan(plan: Plan, operator: Operator, wrap: Wrap) -> Layout | Runner:
    """How to run ``plan``: the result's layout alone where the local op and one wrapper are all there is, else a function."""
    found = _compiled(plan, operator, wrap)
    if plan.rule is not None and plan.rule.as_laid_out:
        found = as_laid_out(plan, operator, runner_of(found, operator, wrap))
    if is_complex(plan):
        found = carried_out(runner_of(found, operator, wrap))
    return _counted(found, operator) if operator.per_element and operator.mutated and not isinstance(found, Layout) else found


def runner_of(found: Layout | Runner, operator: Operator, wrap: Wrap) -> Runner:
    """``found`` as a function."""
    if not isinstance(found, Layout):
        return found
    func, layout = local_function(operator.func), found

    def run(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        return wrap(func(*local_args, **local_kwargs), layout)

    return run


def floats_by_default(plan: Plan) -> bool:
    """Whether results have a floating dtype that no distributed operand has: the default one when the plan is made."""
    given = any(_floats(layout) for i, layout in enumerate(plan.call.operands) if i not in plan.call.plain)
    return not given and any(_floats(layout) for made in plan.results for layout in (made if isinstance(made, list) else [made]))


def _floats(layout: Any) -> bool:
    return isinstance(layout, Layout) and (layout.dtype.is_floating_point or layout.is_complex)


def under_default_dtype(runner: Runner, again: Runner) -> Runner:
    """``runner`` while the default dtype is what it is now, else ``again``, which plans anew."""
    planned = torch.get_default_dtype()

    def run(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        return (runner if torch.get_default_dtype() is planned else again)(args, kwargs, local_args, local_kwargs)

    return run


def by_kinds(runner: Runner, args: Args, kwargs: dict[str, Any], plan: Callable[[Args, dict[str, Any]], Runner]) -> Runner:
    """``runner`` for numbers of the kinds that these arguments have, for others what ``plan`` makes of them, once."""
    runners = {_kinds(args, kwargs): runner}

    def run(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        kinds = _kinds(args, kwargs)
        found = runners.get(kinds)
        if found is None:
            if len(runners) >= 64:  # long lists of numbers
                runners.clear()
            found = runners[kinds] = plan(args, kwargs)
        return found(args, kwargs, local_args, local_kwargs)

    return run


def _kinds(args: Args, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return tuple([_kind(value) for value in (*args, *kwargs.values())])


def _kind(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple([_kind(item) for item in value])
    return kind_of(value) if isinstance(value, (int, float, complex)) else None


def _counted(runner: Runner, operator: Operator) -> Runner:
    """Writes to lists are counted here: torch's own count comes from the operators that it runs on each element."""
    places = [(operator.names.index(name), name) for name in operator.mutated]

    def run(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        result = runner(args, kwargs, local_args, local_kwargs)
        for place, name in places:
            written = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(written, (list, tuple)):
                try:
                    increment_version(written)
                except RuntimeError:  # nobody counts for inference tensors
                    increment_version([tensor for tensor in written if not tensor.is_inference()])
        return result

    return run


def _compiled(plan: Plan, operator: Operator, wrap: Wrap) -> Layout | Runner:

    def general(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        return execute(plan, operator, operator.bind(args, kwargs), operator.bind(tuple(local_args), local_kwargs), wrap)

    if plan.how == "answer":
        answer = plan.answer
        return lambda args, kwargs, local_args, local_kwargs: answer
    if not _plain(plan, operator):
        return general
    assert plan.rule is not None
    kernel = _is_kernel(plan)
    changed = [] if kernel else _rewrites(plan)
    call: Runner | None = _kernel_call(plan, operator) if kernel else _local_call(plan, operator, changed)
    if call is None:
        return general
    finish = _finish(plan, operator, wrap)
    if finish is None:
        return general
    only = plan.results[0] if operator.returns == (None,) else None
    as_it_is = not kernel and not changed and plan.rule.local is None
    simple = as_it_is and not plan.moves
    if simple and isinstance(only, Layout) and not only.dtype.is_complex:  # complex: the wrapper shows a lazy conjugation
        return only  # one new tensor
    if plan.moves:
        runner = _moved(plan, operator, call, finish, general)
    elif as_it_is and operator.returns in ((), ("self",)):
        runner = _in_place(_local_form(plan, operator), bool(operator.returns))
    elif isinstance(only, Layout) and (value := _one_value(plan, operator, changed)) is not None:
        runner = _with_one_value(plan.rule.local or local_function(operator.func), *value, only, wrap)
    else:
        runner = _straight(call, finish)
    return _guarded(runner, general) if plan.communicates else runner


def _in_place(func: Any, gives_self: bool) -> Runner:
    """The local op writes to its first argument, or to lists; there is nothing to wrap."""

    def run(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        try:
            func(*local_args, **local_kwargs)
        except RuntimeError:
            if not _may_share_memory(args):
                raise
            first, *others = local_args
            func(first, *map(_apart, others), **{name: _apart(value) for name, value in local_kwargs.items()})
        return args[0] if gives_self else None

    return run


def _may_share_memory(args: Args) -> bool:
    """Whether torch lets the operands overlap: it refuses where both have no gaps, which a block of one row is sooner than the
    whole. So ranks would differ.
    """
    layouts = [x._layout for x in args if hasattr(x, "_layout")]
    return any(memory_order(layout.shape, layout.stride) is None for layout in layouts)


def _apart(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _straight(call: Runner, finish: Callable[[Args, Any], Any]) -> Runner:
    return lambda args, kwargs, local_args, local_kwargs: finish(args, call(args, kwargs, local_args, local_kwargs))


def _guarded(runner: Runner, general: Runner) -> Runner:
    """Under ``explicit()`` the general way says what would have moved."""

    def run(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        return (general if EXPLICIT.held and EXPLICIT else runner)(args, kwargs, local_args, local_kwargs)

    return run


def _plain(plan: Plan, operator: Operator) -> bool:
    """A rule without write-backs or ``out=``, on a rank that takes part."""
    return (
        plan.how == "rule"
        and plan.rule is not None
        and not plan.write_back
        and not operator.outs
        and not operator.flat
        and not operator.reshapes
        and not (_is_kernel(plan) and operator.mutated)
        and not (plan.rule.as_laid_out and plan.moves)
        and plan.call.mesh.current_member() is not None
    )


def _is_kernel(plan: Plan) -> bool:
    assert plan.rule is not None
    return plan.rule.run is not None or (plan.chosen is not None and plan.chosen.kernel_row is not None)


def _kernel_call(plan: Plan, operator: Operator) -> Runner:
    """A kernel with its context bound; it gets all arguments, defaults filled in."""
    run = kernel_of(plan)
    positional, count = operator.names[: operator.positional], operator.positional
    defaults = operator.defaults
    keyword_defaults = {name: defaults[name] for name in operator.names[count:] if name in defaults}

    def call(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        for name in positional[len(local_args) :]:
            local_args.append(local_kwargs.pop(name) if name in local_kwargs else defaults[name])
        return run(*local_args, **{**keyword_defaults, **local_kwargs})

    return call


def _local_form(plan: Plan, operator: Operator) -> Callable[..., Any]:
    return with_numbers_once(plan, operator, local_function(operator.func))


def _rewrites(plan: Plan) -> list[dict[str, Any]]:
    """The arguments to replace for each member held here; nothing if there are none at all."""
    rewrite = None if plan.rule is None else plan.rule.local_args
    if rewrite is None or plan.chosen is None:
        return []
    mesh = plan.call.mesh
    members = mesh.members if mesh.kind == "in_process" else [mesh.current_member()]
    call = served(plan)
    changed = [rewrite(call, local_view(plan, member)) for member in members if member is not None]
    return changed if any(changed) else []


def _local_call(plan: Plan, operator: Operator, changed: list[dict[str, Any]]) -> Runner | None:
    rule = plan.rule
    assert rule is not None
    func = rule.local or _local_form(plan, operator)
    if not changed:
        return lambda args, kwargs, local_args, local_kwargs: func(*local_args, **local_kwargs)
    mesh = plan.call.mesh
    names = {name for values in changed for name in values}
    if not names <= set(operator.names[: operator.positional]):
        return None
    places = {name: operator.names.index(name) for name in names}
    by_member = [sorted((places[name], value) for name, value in values.items()) for values in changed]
    if mesh.kind != "in_process":
        return _with_values(func, by_member[0])
    comm = communicator_of(mesh)

    def each(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        def one(member: int, positional: list[Any], keywords: dict[str, Any]) -> Any:
            positional = list(positional)
            for place, value in by_member[member]:
                _set(positional, place, value)
            return func(*positional, **keywords)

        return comm.map(one, local_args, local_kwargs)

    return each


def _one_value(plan: Plan, operator: Operator, changed: list[dict[str, Any]]) -> tuple[int, Any] | None:
    """The only argument that the one member here gets otherwise than all, with its place; None where there is another number."""
    if plan.call.mesh.kind == "in_process" or len(changed) != 1 or len(changed[0]) != 1:
        return None
    ((name, value),) = changed[0].items()
    return operator.names.index(name), value


def _with_one_value(func: Any, place: int, value: Any, layout: Layout, wrap: Wrap) -> Runner:
    """As the general form below, for views and the like: one call less on the way."""

    def run(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        if place < len(local_args):
            local_args[place] = value
        else:
            _set(local_args, place, value)
        return wrap(func(*local_args, **local_kwargs), layout)

    return run


def _with_values(func: Any, values: list[tuple[int, Any]]) -> Runner:
    def many_values(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        for place, value in values:
            _set(local_args, place, value)
        return func(*local_args, **local_kwargs)

    return many_values


def _set(positional: list[Any], place: int, value: Any) -> None:
    """Set one positional argument. Rules that rewrite an argument left at its default rewrite those before it too."""
    if place == len(positional):
        positional.append(value)
    else:
        positional[place] = value


def _finish(plan: Plan, operator: Operator, wrap: Wrap) -> Callable[[Args, Any], Any] | None:
    """From local results to what the user gets."""
    returns, results = operator.returns, plan.results
    if not returns:
        return lambda args, computed: None
    if not results:
        return None  # the data decide the shapes
    if len(returns) == 1:
        owner, layout = returns[0], results[0] if results else None
        if owner is not None:
            place = operator.names.index(owner)
            return (lambda args, computed: args[place]) if place == 0 else None
        if isinstance(layout, Layout):
            return lambda args, computed: wrap(computed, layout)
        if isinstance(layout, list) and all(isinstance(item, Layout) for item in layout):
            return _all_of(layout, wrap)
        return None
    if all(owner is None for owner in returns) and all(isinstance(layout, Layout) for layout in results):
        return _each_of(results, wrap)
    return None


def _each_of(layouts: tuple[Layout, ...], wrap: Wrap) -> Callable[[Args, Any], Any]:
    if len(layouts) == 2:
        one, two = layouts

        def pair(args: Args, computed: Any) -> Any:
            first, second = computed
            return wrap(first, one), wrap(second, two)

        return pair
    return lambda args, computed: tuple(wrap(value, layout) for value, layout in zip(computed, layouts, strict=True))


def _all_of(layouts: list[Layout], wrap: Wrap) -> Callable[[Args, Any], Any]:
    return lambda args, computed: list(map(wrap, computed, layouts))


def _moved(plan: Plan, operator: Operator, call: Runner, finish: Callable[[Args, Any], Any], general: Runner) -> Runner:
    """Operands redistributed first; keyword operands, and lists, which move together, take the general way."""
    places = []
    if sum(index is not None for (_, index), _ in plan.moves) > 1:
        return general
    for (name, index), move in plan.moves:
        if name not in operator.names[: operator.positional]:
            return general
        places.append((operator.names.index(name), index, move))

    def run(args: Args, kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        for place, index, move in places:
            if place >= len(local_args):
                return general(args, kwargs, local_args, local_kwargs)
            if index is None:
                local_args[place] = run_move(move, local_args[place])
            else:
                local_args[place][index] = run_move(move, local_args[place][index])
        return finish(args, call(args, kwargs, local_args, local_kwargs))

    return run
