"""Dispatch: look the plan of an operator call up, or make it; run it.

A hit with nothing to move costs the look-up, the local op and one wrapper. A miss goes down once: its arguments are bound by
name; operands in several places, and plain ones that are written to, have ways of their own; else a plan is made, bound to steps,
and kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import RLock
from typing import Any

import torch

from ..base import tracing
from ..base.caches import Shared, watched
from ..base.modes import IMPLICIT_REPLICATION, MODES
from ..base.patches import changed, restored
from ..base.torch_internals import autograd_node, count_dispatch_modes, find_torch_dispatch_rule
from ..base.user_frames import wrapped_by_torch
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.op_schema import Operator, operator_of
from ..propagation.propagate import Plan
from ..propagation.select_strategy import Chooser, choose
from ..rules.op_traits import rule_of_each
from ..rules.registry import lookup
from ..watchdog.levels import Level
from . import wrap
from .announced import announced_call
from .cache_key import AS_IT_IS, settle, sized_of, stand_in, static, static_list
from .cross_mesh import across_places, meshes_of
from .frame import Runner
from .local_op import local_function
from .op_fingerprint import Notes, counting, failed
from .operand_layouts import plan_of_bound
from .plain_tensor_args import agree_on_declared, through_copies
from .program import bind_program, runner_of
from .torch_constants import with_constants
from .variants import with_variants
from .wrap import wrap_local, wrap_view

PLANS: Shared[tuple[Any, ...], Any] = Shared(each=1024, together=8192)  # per operator, of all operators
watched("plans", PLANS.fullness)


class Entry:
    """One operator's plans, and ``run``, its ``__torch_dispatch__``."""

    __slots__ = ("func", "local", "misses", "notes", "operator", "plans", "run", "scalar_names", "scalar_positions")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.local = local_function(func)
        self.operator: Operator = operator_of(func)
        rule = lookup(func) or rule_of_each(func)
        by_type = frozenset() if rule is None or rule.floats_matter else self.operator.scalars | self.operator.tensors
        self.scalar_names = by_type
        self.scalar_positions = frozenset(i for i, name in enumerate(self.operator.names) if name in by_type)
        self.plans = PLANS.part()
        self.notes = Notes(self.operator, self.plans) if Level.now == "watch" and Level.armed else None
        self.misses = 0
        self.run = _dispatch_of(self)


_ENTRIES: dict[int, Entry] = {}
_CHANGING = RLock()  # who adds or drops entries; those who look one up read a dictionary


_VIEWING: Any = lambda plan, operator: (None, None)  # noqa: E731  # replaced by tensor/views/lazy_view.py
_IN_INFERENCE = torch.is_inference_mode_enabled
_modes = count_dispatch_modes
_LIBRARY: torch.library.Library | None = None
_COLLECTIVES = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
)  # gathered, they would count twice


def install_views(viewing: Callable[[Plan, Operator], tuple[Runner | None, Runner | None]]) -> None:
    """Set how view operators run if their results cannot be views of local tensors: always, or if the local operator refuses."""
    global _VIEWING
    _VIEWING = viewing


def clear_plans() -> None:
    """Forget all plans, as after registering a rule."""
    global _LIBRARY
    with _CHANGING:
        _ENTRIES.clear()
        PLANS.clear()
        if _LIBRARY is not None:
            _LIBRARY._destroy()
            restored("torch.library.register_torch_dispatch")
            _LIBRARY = None


Level.changed.append(clear_plans)


def plans_of_operators() -> dict[str, tuple[int, int]]:
    """Per operator: plans kept, plans made."""
    return {str(entry.func): (len(entry.plans), entry.misses) for entry in list(_ENTRIES.values())}


def dispatch(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """``__torch_dispatch__`` of a DTensor."""
    entry = _ENTRIES.get(id(func))  # an overload's own hash is Python code; the entry keeps it alive
    return (_entered(func) if entry is None else entry).run(cls, func, types, args, kwargs)


def _entered(func: Any) -> Entry:
    """The entry of an operator met for the first time. Torch is told, so that it calls ``run`` directly from now on."""
    global _LIBRARY
    with _CHANGING:
        entry = _ENTRIES.get(id(func))
        if entry is not None:  # another thread was faster
            return entry
        entry = Entry(func)
        if func.namespace == "aten" and find_torch_dispatch_rule(func, wrap.TENSOR) is None:
            if _LIBRARY is None:
                _LIBRARY = torch.library.Library("aten", "FRAGMENT")
                changed("torch.library.register_torch_dispatch")
            torch.library.register_torch_dispatch(func, wrap.TENSOR, entry.run, lib=_LIBRARY)
        _ENTRIES[id(func)] = entry
        return entry


def _dispatch_of(entry: Entry) -> Callable[..., Any]:
    """What happens at each call of one operator."""
    tensor, is_view, local_op = wrap.TENSOR, entry.operator.is_view, entry.local
    find: Callable[..., Any] = entry.plans.get if entry.notes is None else entry.notes.find
    general = _general_form_of(entry, find)
    keyed, listed = entry.operator.keyed, entry.operator.listed

    def run(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        try:
            if _modes() and tracing.taken_in((args, kwargs)):
                return func(*args, **(kwargs or {}))
            if is_view:
                if _IN_INFERENCE() and not args[0].is_inference():
                    with torch.inference_mode(False):  # a view of an ordinary tensor is one: autograd gives it its version
                        return run(cls, func, types, args, kwargs)
                if args[0]._begins:
                    return general(args, kwargs or {})
            if not kwargs:
                kwargs = {}
                if args and type(args[0]) is tensor:  # the most frequent forms: the same look-up in fewer steps
                    if len(args) == 2 and type(args[1]) is tensor:
                        found = find(signature := (args[0]._layout, args[1]._layout))
                        if type(found) is Layout:
                            return wrap_local(local_op(args[0]._local, args[1]._local), found)
                        if found is None:
                            found = runner_of(_miss(entry, signature, args, kwargs), entry.operator)
                        return found(args, kwargs, [args[0]._local, args[1]._local], {})
                    if len(args) == 3 and type(args[1]) is tensor and type(args[2]) is tensor:
                        three = (args[0]._layout, args[1]._layout, args[2]._layout)
                        found = find(three)
                        if found is None:
                            found = _miss(entry, three, args, kwargs)
                        if type(found) is Layout:
                            return wrap_local(local_op(args[0]._local, args[1]._local, args[2]._local), found)
                        return found(args, kwargs, [args[0]._local, args[1]._local, args[2]._local], {})
                    if len(args) <= keyed:
                        try:
                            if listed and len(args) == 2:
                                signature = (args[0]._layout, tuple(args[1]))
                            elif listed:
                                signature = (args[0]._layout, *[tuple(x) if type(x) is list else x for x in args[1:]])
                            else:
                                signature = (args[0]._layout, *args[1:])
                            found = find(signature)
                        except TypeError:  # numbers that are symbols
                            pass
                        else:
                            if found is None:
                                found = _miss(entry, signature, args, kwargs)
                            if type(found) is Layout:
                                return wrap_local(local_op(args[0]._local, *args[1:]), found)
                            return found(args, kwargs, [args[0]._local, *args[1:]], {})
            return general(args, kwargs)
        except Exception as error:
            failed(entry.operator, error, args, kwargs or {})
            if (told := tracing.explained(error, entry.operator.name)) is not error:
                raise told from error
            raise

    return counting(entry.operator, run) if Level.now == "strict" else run


def _general_form_of(entry: Entry, find: Callable[..., Any]) -> Callable[..., Any]:
    """A call of one operator, whatever its arguments."""
    tensor, is_view, local_op = wrap.TENSOR, entry.operator.is_view, entry.local
    by_type, names_by_type, noted = entry.scalar_positions, entry.scalar_names, entry.notes is not None
    options = entry.operator.options

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key: list[Any] = []
        numbers: list[Any] | None = [] if noted else None
        local_args: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is tensor:
                key.append(value._layout)
                local_args.append(value._local)
            elif kind in AS_IT_IS or (kind is int and len(local_args) not in by_type):
                key.append(value)
                local_args.append(value)
            else:
                read = static_list if kind is list else static
                local_args.append(read(value, key, len(local_args) in by_type, numbers))
        if options.issuperset(kwargs):
            key += kwargs.items()
            local_kwargs = kwargs.copy()
        else:
            local_kwargs = {}
            for name, value in kwargs.items():
                key.append(name)
                local_kwargs[name] = static(value, key, name in names_by_type, numbers)
        if IMPLICIT_REPLICATION.held and MODES.implicit_replication:
            key.append(MODES)
        signature = tuple(key)
        found = find(signature, numbers)
        if found is None:
            found = _miss(entry, signature, args, kwargs)
        if type(found) is not Layout:
            return found(args, kwargs, local_args, local_kwargs)
        made = local_op(*local_args, **local_kwargs) if local_kwargs else local_op(*local_args)
        return wrap_view(made, found, args[0]) if is_view else wrap_local(made, found)

    return run


def _replicated(tensors: Sequence[Any]) -> bool:
    return all(x._layout.is_replicated for x in tensors if hasattr(x, "_layout"))


def _broadcast(args: Any, kwargs: Any, local_args: Any, local_kwargs: Any) -> Any:
    """The one collective that leaves what all ranks have alike as it is. The pieces are the user's from now on."""
    pieces = [x.to_local() if hasattr(x, "_layout") else x for x in args[0]]
    return torch.ops.c10d.broadcast_.default(pieces, *args[1:], **kwargs)


def _miss(entry: Entry, signature: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout | Runner:
    if entry.func.namespace in _COLLECTIVES:
        if args and (announced := announced_call(args[0])) is not None:
            return announced
        wrapper = wrapped_by_torch(sys._getframe())
        if entry.operator.name == "c10d::broadcast_" and not wrapper and _replicated(args[0]):
            return _broadcast
        raise UnsupportedOperationError(
            f"{entry.operator.name} got a DTensor, but collectives of torch.distributed take local tensors; "
            f"use x.redistribute(placements=...), or pass the local tensor: x.to_local(){wrapper}"
        )
    if tracing.under_way():
        args = tuple([stand_in(value, i in entry.scalar_positions) for i, value in enumerate(args)])
        kwargs = {name: stand_in(value, name in entry.scalar_names) for name, value in kwargs.items()}
    operator, bound = entry.operator, entry.operator.bind(args, kwargs)
    if autograd_node() is not None and operator.lacks(bound):
        return lambda *call: None if len(operator.returns) == 1 else (None,) * len(operator.returns)
    if any(0 in x._layout.shape for x in sized_of(bound.values())):  # what kernels do of nothing is looked up, in numbers
        settle(bound.values())
    meshes = tuple(meshes_of(bound.values()))
    special = across_places(operator, bound, meshes) or through_copies(operator, bound)
    if special is not None:
        return _kept(entry, signature, special)
    if (constants := with_constants(operator, bound)) is not None:
        return constants  # not kept: the key does not say which function calls
    replan = partial(_plan, operator)
    plan, program = replan(args, kwargs, bound, meshes)
    compared = agree_on_declared(operator, bound, plan)
    program = with_variants(plan, program, operator, args, kwargs, replan)
    if compared and operator.mutated and plan.rule is not None and plan.rule.kind == "pointwise":
        return program  # not kept: a plain value that is written to a DTensor is compared in every call
    return _kept(entry, signature, program)


def _plan(
    operator: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: dict[str, Any] | None = None,
    meshes: Sequence[DeviceMesh] | None = None,
    choose: Chooser = choose,
) -> tuple[Plan, Layout | Runner]:
    """Plan a call and bind its program. This is the only way into planning, for a cache miss and for a variant of a key.

    Args:
        bound, meshes: the arguments by name and the meshes of the operands, where the caller has them.
    """
    bound = operator.bind(args, kwargs) if bound is None else bound
    meshes = tuple(meshes_of(bound.values())) if meshes is None else meshes
    with tracing.aside():
        plan = plan_of_bound(operator, bound, meshes, choose)
        whole, if_refused = _VIEWING(plan, operator) if operator.is_view or operator.reshapes else (None, None)
        return plan, bind_program(plan, operator, args, kwargs, whole, if_refused)


def _kept(entry: Entry, signature: tuple[Any, ...], found: Layout | Runner) -> Layout | Runner:
    entry.misses += 1
    PLANS.keep(entry.plans, signature, found if entry.notes is None else entry.notes.beside(found, signature))
    return found


def run_chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], choose: Chooser) -> Any:
    """The results of one call whose rows ``choose`` picks. The plan is made anew and not kept."""
    operator = operator_of(func)
    _, found = _plan(operator, args, kwargs, choose=choose)
    local_args = [static(value, [], False) for value in args]
    local_kwargs = {name: static(value, [], False) for name, value in kwargs.items()}
    return runner_of(found, operator)(args, kwargs, local_args, local_kwargs)
