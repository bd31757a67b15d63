"""Dispatcher: look up the plan of an operator call, or make it, and run it.

A hit without redistribution costs the look-up, the local operator and one wrapper. A miss binds the arguments by name. Operands
on several meshes, and plain tensors that are written to, get runners of their own. For other calls a plan is made, bound to a
program and cached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any

import torch

from ..base import tracing
from ..base.caches import PooledDicts, register_cache
from ..base.modes import IMPLICIT_REPLICATION, MODES
from ..base.patches import patch_applied, patch_removed
from ..base.tensor_tree import tensor_leaves
from ..base.torch_internals import autograd_node, count_dispatch_modes, find_torch_dispatch_rule
from ..base.user_frames import torch_ddp_hint
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..propagation.op_schema import OperatorSchema, operator_schema_of
from ..propagation.propagate import CallPlan
from ..propagation.select_strategy import StrategySelector, select_strategies
from ..rules.op_traits import element_rule_of
from ..rules.registry import lookup
from ..state import wrap
from ..state.wrap import wrap_local, wrap_view
from ..watchdog.levels import CheckLevel
from .announced_collectives import find_announced_runner
from .cache_key import KEYED_AS_IS, append_list_to_key, append_to_key, replace_symbolic_numbers
from .cross_mesh import make_cross_mesh_runner
from .op_fingerprint import PlanFingerprints, record_calls, record_error
from .operand_layouts import plan_call, specialize_sizes
from .plain_tensor_args import compare_plain_arguments, make_constants_runner, make_plain_write_runner
from .programs.frame import Runner
from .programs.local_op import local_function
from .programs.program import bind_program, runner_of
from .programs.variants import with_variants

PLANS: PooledDicts[tuple[Any, ...], Any] = PooledDicts(
    each=1024, together=8192
)  # limits: per operator, and for all operators together
register_cache("plans", PLANS.fullness)


class OperatorDispatch:
    """The dispatch of one operator: its plan cache, and the ``__torch_dispatch__`` that looks calls up in it.

    Attributes:
        func, operator: the overload, and its parsed schema.
        local_op: the callable for local tensors.
        scalar_names, scalar_positions: arguments whose numbers are in the cache key by their type.
        plans: cache key -> program.
        fingerprints: records each look-up for ``check_ranks``; None if ranks are not compared.
        misses: the number of plans made.
        run: the ``__torch_dispatch__`` of this operator.
    """

    __slots__ = ("fingerprints", "func", "local_op", "misses", "operator", "plans", "run", "scalar_names", "scalar_positions")

    def __init__(self, func: Any) -> None:
        """Read the schema and the rule of an overload, make its plan cache, and make the function that dispatches it."""
        self.func = func
        self.local_op = local_function(func)
        self.operator: OperatorSchema = operator_schema_of(func)
        rule = lookup(func) or element_rule_of(func)
        by_type = frozenset() if rule is None or rule.floats_matter else self.operator.scalars | self.operator.tensors
        self.scalar_names = by_type
        self.scalar_positions = frozenset(i for i, name in enumerate(self.operator.names) if name in by_type)
        self.plans = PLANS.make_part()
        self.fingerprints = (
            PlanFingerprints(self.operator, self.plans) if CheckLevel.now == "watch" and CheckLevel.has_peers else None
        )
        self.misses = 0
        self.run = _make_dispatch(self)


_DISPATCHES: dict[int, OperatorDispatch] = {}
_DISPATCHES_LOCK = RLock()  # held to add or drop operators; a look-up only reads the dictionary
_make_view_runners: Any = lambda plan, operator: (None, None)  # noqa: E731  # replaced by tensor/views/lazy_view.py
_in_inference_mode = torch.is_inference_mode_enabled
_count_modes = count_dispatch_modes
_LIBRARY: torch.library.Library | None = None
# namespaces of collectives; on gathered operands they would count each value once for each rank
_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"))


def install_view_runners(make_view_runners: Callable[[CallPlan, OperatorSchema], tuple[Runner | None, Runner | None]]) -> None:
    """Set the function that makes the two runners of view operators with results that are not views of local tensors.

    The first one, if it is not None, runs every call; the second one runs a call that the local operator refuses.
    """
    global _make_view_runners
    _make_view_runners = make_view_runners


def clear_plans() -> None:
    """Drop the plan caches of all operators and their registration with torch, as after registering a rule."""
    global _LIBRARY
    with _DISPATCHES_LOCK:
        _DISPATCHES.clear()
        PLANS.clear()
        if _LIBRARY is not None:
            _LIBRARY._destroy()
            patch_removed("torch.library.register_torch_dispatch")
            _LIBRARY = None


CheckLevel.changed.append(clear_plans)


def plans_of_operators() -> dict[str, tuple[int, int]]:
    """Return for each operator that was called (number of cached plans, number of plans made)."""
    return {str(op_dispatch.func): (len(op_dispatch.plans), op_dispatch.misses) for op_dispatch in list(_DISPATCHES.values())}


def dispatch(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run an operator call: the ``__torch_dispatch__`` of a DTensor."""
    op_dispatch = _DISPATCHES.get(id(func))  # an overload's own hash is Python code; op_dispatch keeps it alive
    return (_get_or_make_dispatch(func) if op_dispatch is None else op_dispatch).run(cls, func, types, args, kwargs)


def _get_or_make_dispatch(func: Any) -> OperatorDispatch:
    """Return the dispatch of an operator. A new one is registered with torch, which calls its ``run`` directly from now on."""
    global _LIBRARY
    with _DISPATCHES_LOCK:
        op_dispatch = _DISPATCHES.get(id(func))
        if op_dispatch is not None:  # another thread has made it
            return op_dispatch
        op_dispatch = OperatorDispatch(func)
        if func.namespace == "aten" and not find_torch_dispatch_rule(func, wrap.TENSOR):
            if _LIBRARY is None:
                _LIBRARY = torch.library.Library("aten", "FRAGMENT")
                patch_applied("torch.library.register_torch_dispatch")
            torch.library.register_torch_dispatch(func, wrap.TENSOR, op_dispatch.run, lib=_LIBRARY)
        _DISPATCHES[id(func)] = op_dispatch
        return op_dispatch


def _make_dispatch(op_dispatch: OperatorDispatch) -> Callable[..., Any]:
    """Make the ``__torch_dispatch__`` of one operator; it looks up calls with few tensors in fewer steps than others."""
    tensor, is_view, local_op = wrap.TENSOR, op_dispatch.operator.is_view, op_dispatch.local_op
    find: Callable[..., Any] = op_dispatch.plans.get if op_dispatch.fingerprints is None else op_dispatch.fingerprints.find
    run_general = _make_general_dispatch(op_dispatch, find)
    keyed, listed = op_dispatch.operator.keyed, op_dispatch.operator.listed

    def dispatch_call(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Look up the program of a call by layouts and static arguments, or make it, and run it."""
        cache_key: tuple[Any, ...]
        try:
            if _count_modes() and tracing.add_graph_constants((args, kwargs)):
                return func(*args, **(kwargs or {}))
            if is_view:
                if _in_inference_mode() and not args[0].is_inference():
                    with torch.inference_mode(False):  # a view of a normal tensor shares its version counter
                        return dispatch_call(cls, func, types, args, kwargs)
                if args[0]._storage_start:
                    return run_general(args, kwargs or {})
            if not kwargs:
                kwargs = {}
                if args and type(args[0]) is tensor:  # the most frequent calls: the look-up in fewer steps
                    if len(args) == 2 and type(args[1]) is tensor:
                        program = find(cache_key := (args[0]._layout, args[1]._layout))
                        if type(program) is Layout:
                            return wrap_local(local_op(args[0]._local, args[1]._local), program)
                        if program is None:
                            program = runner_of(_make_program_on_miss(op_dispatch, cache_key, args, kwargs), op_dispatch.operator)
                        return program(args, kwargs, [args[0]._local, args[1]._local], {})
                    if len(args) == 3 and type(args[1]) is tensor and type(args[2]) is tensor:
                        cache_key = (args[0]._layout, args[1]._layout, args[2]._layout)
                        program = find(cache_key)
                        if program is None:
                            program = _make_program_on_miss(op_dispatch, cache_key, args, kwargs)
                        if type(program) is Layout:
                            return wrap_local(local_op(args[0]._local, args[1]._local, args[2]._local), program)
                        return program(args, kwargs, [args[0]._local, args[1]._local, args[2]._local], {})
                    if len(args) <= keyed:
                        try:
                            if listed and len(args) == 2:
                                cache_key = (args[0]._layout, tuple(args[1]))
                            elif listed:
                                cache_key = (args[0]._layout, *[tuple(x) if type(x) is list else x for x in args[1:]])
                            else:
                                cache_key = (args[0]._layout, *args[1:])
                            program = find(cache_key)
                        except TypeError:  # symbolic numbers
                            pass
                        else:
                            if program is None:
                                program = _make_program_on_miss(op_dispatch, cache_key, args, kwargs)
                            if type(program) is Layout:
                                return wrap_local(local_op(args[0]._local, *args[1:]), program)
                            return program(args, kwargs, [args[0]._local, *args[1:]], {})
            return run_general(args, kwargs)
        except Exception as error:
            record_error(op_dispatch.operator, error, args, kwargs or {})
            if (explained := tracing.explain_data_dependence(error, op_dispatch.operator.name)) is not error:
                raise explained from error
            raise

    return record_calls(op_dispatch.operator, dispatch_call) if CheckLevel.now == "strict" else dispatch_call


def _make_general_dispatch(op_dispatch: OperatorDispatch, find: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that dispatches calls of one operator with any arguments: it builds the complete cache key."""
    tensor, is_view, local_op = wrap.TENSOR, op_dispatch.operator.is_view, op_dispatch.local_op
    by_type, names_by_type, records = op_dispatch.scalar_positions, op_dispatch.scalar_names, op_dispatch.fingerprints is not None
    options = op_dispatch.operator.options

    def dispatch_general_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Build the cache key of a call with lists, keywords or plain tensors, look up or make its program, and run it."""
        key: list[Any] = []
        numbers: list[Any] | None = [] if records else None
        local_args: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is tensor:
                key.append(value._layout)
                local_args.append(value._local)
            elif kind in KEYED_AS_IS or (kind is int and len(local_args) not in by_type):
                key.append(value)
                local_args.append(value)
            else:
                read = append_list_to_key if kind is list else append_to_key
                local_args.append(read(value, key, len(local_args) in by_type, numbers))
        if options.issuperset(kwargs):
            key += kwargs.items()
            local_kwargs = kwargs.copy()
        else:
            local_kwargs = {}
            for name, value in kwargs.items():
                key.append(name)
                local_kwargs[name] = append_to_key(value, key, name in names_by_type, numbers)
        if IMPLICIT_REPLICATION.held and MODES.implicit_replication:
            key.append(MODES)
        cache_key = tuple(key)
        program = find(cache_key, numbers)
        if program is None:
            program = _make_program_on_miss(op_dispatch, cache_key, args, kwargs)
        if type(program) is not Layout:
            return program(args, kwargs, local_args, local_kwargs)
        result = local_op(*local_args, **local_kwargs) if local_kwargs else local_op(*local_args)
        return wrap_view(result, program, args[0]) if is_view else wrap_local(result, program)

    return dispatch_general_call


def _broadcast_replicated(args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> Any:
    """Run ``c10d.broadcast_`` on the local tensors of replicated DTensors, which are exposed to user code from now on."""
    local = [x.to_local() if hasattr(x, "_layout") else x for x in args[0]]
    return torch.ops.c10d.broadcast_.default(local, *args[1:], **kwargs)


def _make_program_on_miss(
    op_dispatch: OperatorDispatch, cache_key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Layout | Runner:
    """Make the program of a call whose plan is not cached, and cache it unless it depends on more than ``cache_key``."""
    if op_dispatch.func.namespace in _COLLECTIVES:
        if args and (announced := find_announced_runner(args[0])) is not None:
            return announced
        wrapper = torch_ddp_hint(sys._getframe())
        is_broadcast = op_dispatch.operator.name == "c10d::broadcast_" and not wrapper
        if is_broadcast and all(x._layout.is_replicated for x in args[0] if hasattr(x, "_layout")):
            return _broadcast_replicated
        raise UnsupportedOperationError(
            f"{op_dispatch.operator.name} got a DTensor, but collectives of torch.distributed take local tensors; "
            f"use x.redistribute(placements=...), or pass the local tensor: x.to_local(){wrapper}"
        )
    if tracing.is_tracing():
        args = tuple([replace_symbolic_numbers(value, i in op_dispatch.scalar_positions) for i, value in enumerate(args)])
        kwargs = {name: replace_symbolic_numbers(value, name in op_dispatch.scalar_names) for name, value in kwargs.items()}
    operator, bound = op_dispatch.operator, op_dispatch.operator.bind(args, kwargs)
    if autograd_node() is not None and operator.lacks_first_tensor(bound):
        return lambda *call: None if len(operator.returns) == 1 else (None,) * len(operator.returns)
    tensors: list[Any] = tensor_leaves(list(bound.values()))
    layouts = [x._layout for x in tensors if hasattr(x, "_layout")]
    if any(0 in layout.shape and layout.has_symbols for layout in layouts):  # kernels treat size 0 specially
        specialize_sizes(tensors)
    is_mixed = len(layouts) < len(tensors) or len({layout.mesh for layout in layouts}) > 1 or not tensors
    if is_mixed:  # plain tensors, or several meshes
        runner, is_keyed = _make_runner_without_rule(operator, bound)
        if runner is not None:
            return _cache_program(op_dispatch, cache_key, runner) if is_keyed else runner
    plan, program = _plan_and_bind(operator, args, kwargs)
    was_compared = is_mixed and compare_plain_arguments(operator, bound, plan)
    program = with_variants(plan, program, operator, args, kwargs, partial(_plan_and_bind, operator))
    if was_compared and operator.mutated and plan.rule is not None and plan.rule.kind == "pointwise":
        return program  # not cached: a plain value that is written to a DTensor is compared in every call
    return _cache_program(op_dispatch, cache_key, program)


def _plan_and_bind(
    operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any], choose: StrategySelector = select_strategies
) -> tuple[CallPlan, Layout | Runner]:
    """Return the plan of a call and its bound program, neither of them cached yet."""
    with tracing.untraced():
        plan = plan_call(operator, operator.bind(args, kwargs), choose)
        whole, if_refused = _make_view_runners(plan, operator) if operator.is_view or operator.reshapes else (None, None)
        return plan, bind_program(plan, operator, args, kwargs, whole, if_refused)


def _cache_program(op_dispatch: OperatorDispatch, cache_key: tuple[Any, ...], program: Layout | Runner) -> Layout | Runner:
    """Cache a new program under the cache key of its call, count it as a miss, and return it."""
    op_dispatch.misses += 1
    cached = program if op_dispatch.fingerprints is None else op_dispatch.fingerprints.with_fingerprint(program, cache_key)
    PLANS.keep(op_dispatch.plans, cache_key, cached)
    return program


def _make_runner_without_rule(operator: OperatorSchema, bound: dict[str, Any]) -> tuple[Runner | None, bool]:
    """Return the runner of a call on several meshes, on written plain tensors or on constants of torch; None for other calls.

    Also return whether the cache key determines it. For constants the key does not say which function calls.
    """
    runner = make_cross_mesh_runner(operator, bound) or make_plain_write_runner(operator, bound)
    return (runner, True) if runner is not None else (make_constants_runner(operator, bound), False)


def bypasses_rules(operator: OperatorSchema, bound: dict[str, Any]) -> bool:
    """Return True if a call runs without a rule: on several meshes, on written plain tensors, or on constants of torch."""
    return _make_runner_without_rule(operator, bound)[0] is not None


def make_eager_view_runner(plan: CallPlan, operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Runner:
    """Return the runner that computes a planned view operation now, where dispatch would make lazy views.

    Its results do not share version counters with the base.
    """
    return runner_of(bind_program(plan, operator, args, kwargs, after=()), operator)


def run_with_strategies(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], choose: StrategySelector) -> Any:
    """Return the results of one call, run with the strategies that ``choose`` selects. Its plan is not cached."""
    operator = operator_schema_of(func)
    _, program = _plan_and_bind(operator, args, kwargs, choose)
    local_args = [append_to_key(value, [], False) for value in args]
    local_kwargs = {name: append_to_key(value, [], False) for name, value in kwargs.items()}
    return runner_of(program, operator)(args, kwargs, local_args, local_kwargs)
