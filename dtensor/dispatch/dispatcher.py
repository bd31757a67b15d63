"""Dispatch: look the plan of an operator call up, or make it; run it.

A call's key is its static arguments and the interned layouts of its tensors. Numbers that only enter the arithmetic (a step size)
are keyed by type, so a plan is found again when they change. A hit with nothing to move costs the look-up, the local op and
one wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any

import torch

from ..base.caches import Shared, watched
from ..base.modes import IMPLICIT_REPLICATION, MODES
from ..base.torch_internals import find_torch_dispatch_rule, make_wrapper_subclass, set_conj
from ..errors import MeshError, UnsupportedOperationError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.choose import Chooser, choose
from ..propagation.propagate import Plan, Slot, propagate
from ..propagation.schema import Operator, operator_of
from ..rules.registry import foreach_base, lookup
from .compiled import Runner, by_kinds, compile_plan, floats_by_default, runner_of, under_default_dtype
from .local_op import local_function
from .mixed_meshes import across_places
from .plain_operands import admit, agree_on_declared, in_autograd, plainly_written, through_copies

PLANS: Shared[tuple[Any, ...], Layout | Runner] = Shared(each=1024, together=8192)  # per operator, of all operators
watched("plans", PLANS.fullness)


class Entry:
    """One operator's plans, and ``run``, its ``__torch_dispatch__``."""

    __slots__ = ("func", "local", "misses", "operator", "plans", "run", "scalar_names", "scalar_positions")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.local = local_function(func)
        self.operator: Operator = operator_of(func)
        rule = lookup(func) or foreach_base(func)
        by_type = frozenset() if rule is None or rule.floats_matter else self.operator.scalars | self.operator.tensors
        self.scalar_names = by_type
        self.scalar_positions = frozenset(i for i, name in enumerate(self.operator.names) if name in by_type)
        self.plans = PLANS.part()
        self.misses = 0
        self.run = _dispatch_of(self)


_ENTRIES: dict[int, Entry] = {}
_CHANGING = RLock()  # who adds or drops entries; those who look one up read a dictionary
_TENSOR: Any = None  # the DTensor class, installed by tensor/dtensor.py
_PENDING: Any = None


def _as_found(plan: Any, operator: Any, found: Any) -> Any:
    return found


_VIEWING: Any = _as_found  # replaced by tensor/views/remote_view.py
_MAKE = make_wrapper_subclass
_IN_INFERENCE = torch.is_inference_mode_enabled
_CPU = torch.device("cpu")
_LIBRARY: torch.library.Library | None = None
_COLLECTIVES = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
)  # gathered, they would count twice
_AS_IT_IS = frozenset((type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, str))  # in a key as in a call
_TRUE, _FALSE = object(), object()  # True == 1 as a dictionary key; these are not


def install(tensor_type: Any, pending: Any) -> None:
    """Tell dispatch which class it serves (a layer above this one) and how to make one whose local is on its way."""
    global _TENSOR, _PENDING
    _TENSOR, _PENDING = tensor_type, pending


def install_views(viewing: Callable[[Plan, Operator, Layout | Runner], Layout | Runner]) -> None:
    """Tell dispatch how view operations run whose results cannot be views of the local."""
    global _VIEWING
    _VIEWING = viewing


def wrap_pending(pending: Any, layout: Layout, like: Any) -> Any:
    return _PENDING(pending, layout, like)


def clear_plans() -> None:
    """Forget all plans, as after registering a rule."""
    global _LIBRARY
    with _CHANGING:
        _ENTRIES.clear()
        PLANS.clear()
        if _LIBRARY is not None:
            _LIBRARY._destroy()
            _LIBRARY = None


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
        if func.namespace == "aten" and find_torch_dispatch_rule(func, _TENSOR) is None:
            if _LIBRARY is None:
                _LIBRARY = torch.library.Library("aten", "FRAGMENT")
            torch.library.register_torch_dispatch(func, _TENSOR, entry.run, lib=_LIBRARY)
        _ENTRIES[id(func)] = entry
        return entry


def _dispatch_of(entry: Entry) -> Callable[..., Any]:
    """What happens at each call of one operator."""
    tensor, is_view, local_op = _TENSOR, entry.operator.is_view, entry.local
    find, by_type, names_by_type = entry.plans.get, entry.scalar_positions, entry.scalar_names
    numbered, sized = entry.operator.numbered, entry.operator.sized

    def run(cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if is_view and _IN_INFERENCE() and not args[0].is_inference():
            with torch.inference_mode(False):  # a view of an ordinary tensor is one: autograd gives it the tensor's version
                return run(cls, func, types, args, kwargs)
        if not kwargs:
            kwargs = {}
            if args and type(args[0]) is tensor:  # the most frequent forms: the same look-up in fewer steps
                if len(args) == 2 and type(args[1]) is tensor:
                    found = find(signature := (args[0]._layout, args[1]._layout))
                    if type(found) is Layout:
                        return wrap_local(local_op(args[0]._local, args[1]._local), found)
                    if found is None:
                        found = runner_of(_miss(entry, signature, args, kwargs), entry.operator, wrap_local)
                    return found(args, kwargs, [args[0]._local, args[1]._local], {})  # type: ignore[operator]  # a Runner
                if numbered or len(args) == 1 or (sized and len(args) == 2):
                    try:
                        signature = (args[0]._layout, tuple(args[1])) if sized else (args[0]._layout, *args[1:])
                        found = find(signature)
                    except (TypeError, IndexError):  # sizes that are symbols, or left out
                        pass
                    else:
                        if found is None:
                            found = _miss(entry, signature, args, kwargs)
                        if type(found) is Layout:
                            return wrap_local(local_op(args[0]._local, *args[1:]), found)
                        return found(args, kwargs, [args[0]._local, *args[1:]], {})  # type: ignore[operator]  # a Runner
        key: list[Any] = []
        local_args: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is tensor:
                key.append(value._layout)
                local_args.append(value._local)
            elif kind in _AS_IT_IS or (kind is int and not by_type):
                key.append(value)
                local_args.append(value)
            else:
                local_args.append(_static(value, key, len(local_args) in by_type))
        local_kwargs = {}
        for name, value in kwargs.items():
            key.append(name)
            if type(value) in _AS_IT_IS:
                key.append(value)
                local_kwargs[name] = value
            else:
                local_kwargs[name] = _static(value, key, name in names_by_type)
        if IMPLICIT_REPLICATION.held and MODES.implicit_replication:
            key.append(MODES)
        signature = tuple(key)
        found = find(signature)
        if found is None:
            found = _miss(entry, signature, args, kwargs)
        if type(found) is not Layout:
            return found(args, kwargs, local_args, local_kwargs)  # type: ignore[operator]  # a Runner
        return wrap_local(local_op(*local_args, **local_kwargs) if local_kwargs else local_op(*local_args), found)

    return run


def wrap_local(local: Any, layout: Layout) -> Any:
    """The DTensor with this local and layout. The hot path's wrapper: nothing is checked."""
    if layout.made_with is not None and local.is_cpu:
        made = _MAKE(*layout.made_with)
        made._local = local
        made._layout = layout
        return made
    options = (None if layout.dense else layout.stride, None, None, layout.dtype, torch.strided)
    made = _MAKE(_TENSOR, layout.shape, *options, local.device)
    made._local = local
    made._layout = layout
    if not layout.is_complex:
        layout.made_with = (_TENSOR, layout.shape, *options, _CPU)
    elif local.is_conj():
        set_conj(made, True)  # below __torch_dispatch__ nobody carries out a lazy conjugation: torch must see it above
    return made


def _static(value: Any, key: list[Any], by_type: bool) -> Any:
    """The local form of one argument, its part of the key appended."""
    kind = type(value)
    if kind is _TENSOR:
        key.append(value._layout)
        return value._local
    if kind is int:
        key.append(kind if by_type else value)
        return value
    if kind is float or kind is complex:
        key.append(kind)
        if not by_type:
            key.append(value)
        return value
    if kind is bool:
        key.append(_TRUE if value else _FALSE)
        return value
    if kind is list or kind is tuple:
        return _static_list(value, key, by_type)
    if isinstance(value, torch.Tensor):
        if isinstance(value, _TENSOR):
            key.append(value._layout)
            return value._local
        strides = value.stride() if value.layout is torch.strided else None
        key.append((value.shape, strides, value.dtype, in_autograd()))
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        value = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else value
    if kind is torch.Size:
        value = tuple(value)
    if isinstance(value, torch.Generator):
        key.append(kind)
        return value
    key.append(value)
    return value


def _static_list(value: Any, key: list[Any], by_type: bool) -> Any:
    first = type(value[0]) if value else None
    if first is _TENSOR:
        try:
            layouts, locals_ = [item._layout for item in value], [item._local for item in value]
        except AttributeError:  # a plain tensor or None among them
            pass
        else:
            key.append(len(value))
            key += layouts
            return locals_
    elif (first is int or first is float) and (len(value) == 1 or len(set(map(type, value))) == 1):  # True == 1 as a key
        key.append((first, len(value)) if by_type else (first, *value))
        return value
    key.append(len(value))
    return [_static(item, key, by_type) for item in value]


def _miss(entry: Entry, signature: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layout | Runner:
    if entry.func.namespace in _COLLECTIVES:
        raise UnsupportedOperationError(
            f"{entry.operator.name} of a DTensor: collectives of torch.distributed combine what the ranks hold, and a DTensor is "
            "one value; use x.redistribute(placements=...), or give it the piece: x.to_local()"
        )
    found: Layout | Runner | None = across_places(entry.operator, args, kwargs, wrap_local)
    if found is not None:
        return _kept(entry, signature, found)
    written = plainly_written(entry.operator, args, kwargs, _TENSOR) if MODES.implicit_replication else ()
    if written:
        found = through_copies(entry.operator, written, wrap_local)
    else:
        plan, found = _planned(entry.operator, args, kwargs)
        agree_on_declared(entry.operator, args, kwargs, plan.call.mesh)
        if plan.by_numbers:
            again = lambda *given: runner_of(_planned(entry.operator, *given)[1], entry.operator, wrap_local)  # noqa: E731
            found = by_kinds(runner_of(found, entry.operator, wrap_local), args, kwargs, again)
        if floats_by_default(plan):
            found = under_default_dtype(runner_of(found, entry.operator, wrap_local), partial(_anew, entry, signature))
    return _kept(entry, signature, found)


def _planned(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], choose: Chooser = choose
) -> tuple[Plan, Layout | Runner]:
    plan = plan_for(operator, args, kwargs, choose)
    found = compile_plan(plan, operator, wrap_local)
    return plan, _VIEWING(plan, operator, found) if operator.is_view or operator.reshapes else found


def _kept(entry: Entry, signature: tuple[Any, ...], found: Layout | Runner) -> Layout | Runner:
    entry.misses += 1
    return PLANS.keep(entry.plans, signature, found)


def _anew(entry: Entry, signature: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], *local: Any) -> Any:
    entry.plans.pop(signature, None)
    return entry.run(_TENSOR, entry.func, (), args, kwargs)


def run_chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], choose: Chooser) -> Any:
    """The results of one call whose rows ``choose`` picks. The plan is made anew and not kept."""
    operator = operator_of(func)
    _, found = _planned(operator, args, kwargs, choose)
    local_args = [_static(value, [], False) for value in args]
    local_kwargs = {name: _static(value, [], False) for name, value in kwargs.items()}
    return runner_of(found, operator, wrap_local)(args, kwargs, local_args, local_kwargs)


def plan_for(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], choose: Chooser = choose) -> Plan:
    """The plan of a call with these arguments; nothing runs."""
    meshes: dict[DeviceMesh, None] = {}
    plain: set[Slot] = set()
    raw = {name: _layouts(value, meshes) for name, value in operator.bind(args, kwargs).items()}
    if len(meshes) != 1:
        raise MeshError(
            f"{operator.name}: operands live on different meshes: {', '.join(map(repr, meshes))}; "
            "bring them to one with x.redistribute(mesh, placements)"
        )
    mesh = next(iter(meshes))
    bound = {name: _beside(value, name, None, operator, mesh, plain) for name, value in raw.items()}
    return propagate(operator, mesh, bound, frozenset(plain), choose)


def _layouts(value: Any, meshes: dict[DeviceMesh, None]) -> Any:
    """DTensors replaced by their layouts, their meshes collected."""
    if isinstance(value, _TENSOR):
        meshes[value._layout.mesh] = None
        return value._layout
    if isinstance(value, (list, tuple)):
        return [_layouts(item, meshes) for item in value]
    return value


def _beside(value: Any, name: str, index: int | None, operator: Operator, mesh: DeviceMesh, plain: set[Slot]) -> Any:
    """Plain tensors replaced by a replicated layout where they are allowed."""
    if isinstance(value, list):
        return [_beside(item, name, i, operator, mesh, plain) for i, item in enumerate(value)]
    if not isinstance(value, torch.Tensor):
        return value
    admit(value, name, operator)
    plain.add((name, index))
    return Layout.replicated(mesh, value.shape, value.stride(), value.dtype)
