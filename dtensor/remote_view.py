"""Views whose elements are not in the base's own local: a row of a sharded dim, a reshape that had to gather.

The law is that of plain tensors: writing through a view changes its base, and a change of the base is seen by the view. A view
whose local is a view of the base's local keeps it by itself. Any other is a ``RemoteView``, which remembers base and operation.
It is computed when it is first read, and again when the base has changed since (autograd keeps one version counter for a base
and all its views). What writes to it runs on the base's own elements if it acts element by element; otherwise it runs on the
view's value, which is then written into the base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch

from .comm import communicator_of
from .compiled import Runner
from .dispatch import dispatch, install_views, plan_for
from .errors import UnsupportedOperationError
from .execute import execute
from .layout import Layout
from .operators import Operator, operator_of
from .propagate import Plan
from .redistribute import redistribute_local
from .rules import lookup
from .tensor import DTensor, wrap

_aten = torch.ops.aten
_make: Any = torch.Tensor._make_wrapper_subclass  # the documented way to build wrapper subclasses

Assign = Callable[[DTensor, Callable[[Any], Any]], Any]  # writes to the first argument; the second shapes a value like it

Region = tuple[DTensor, tuple[int, ...]]  # and which of its dims the view has; the others have one element
_ROWS = ("select", "unbind", "slice")


@dataclass(slots=True, eq=False)
class Origin:
    """What a view is a view of; shared by all results of a split.

    Attributes:
        version: its version when ``results`` were computed.
        pinned: a write is in progress: ``results`` are the value.
    """

    base: DTensor
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: Plan
    results: list[DTensor] | None = None
    version: int | None = None
    pinned: bool = False

    def shown(self) -> list[DTensor]:
        """The views as the base is now."""
        version = None if self.base.is_inference() else self.base._version
        if self.results is None or not (self.pinned or (version is not None and version == self.version)):
            self.results, self.version = self.computed(self.base), version
        return self.results

    def computed(self, base: DTensor) -> list[DTensor]:
        try:
            return [wrap(_resolved(view._local), view._layout) for view in self.run(base)]
        except RuntimeError:
            if not _is_local(self.plan):
                raise
            return self.run(_dense(base))  # blocks whose strides do not allow the view that the global strides do

    def run(self, base: DTensor) -> list[DTensor]:
        """The operation on ``base``, which has the layout that the plan was made for."""
        bound = self.operator.bind((base, *self.args[1:]), self.kwargs)
        made = execute(self.plan, self.operator, dict(bound), {**bound, self.operator.names[0]: base._local}, wrap)
        return list(made) if isinstance(made, (list, tuple)) else [made]

    @property
    def name(self) -> str:
        return str(self.operator.func._schema.name).removeprefix("aten::")


class RemoteView(DTensor):
    """A view that is computed when it is read and writes back what is written to it."""

    _origin: Origin
    _place: int  # among the results of the operation

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        return _dispatch(func, args, kwargs or {})

    @property
    def _local(self) -> Any:
        return self._origin.shown()[self._place]._local

    @_local.setter
    def _local(self, value: Any) -> None:
        del self.__dict__["_origin"]
        self.__class__ = DTensor  # type: ignore[assignment]  # a plain one from now on
        self._local = value


def viewing(plan: Plan, operator: Operator, found: Layout | Runner) -> Layout | Runner:
    """How to run the plan of a view operation: ``found`` where locals are views of locals."""
    if plan.how in ("answer", "decompose"):
        return found

    def deferred(args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        return _views(Origin(args[0], operator, args, kwargs, plan))

    if not _is_local(plan) or (plan.rule is not None and plan.rule.run is not None):
        return deferred
    if str(operator.func._schema.name) not in _NEED_STRIDES:
        return found

    def guarded(args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        try:
            if isinstance(found, Layout):
                return wrap(operator.func(*local_args, **local_kwargs), found)
            return found(args, kwargs, local_args, local_kwargs)
        except RuntimeError:
            return deferred(args, kwargs, local_args, local_kwargs)

    return guarded


_NEED_STRIDES = ("aten::view", "aten::_reshape_alias", "aten::view_as_complex", "aten::view_as_real")

install_views(viewing)


def _is_local(plan: Plan) -> bool:
    """Whether the plan runs on the base's own local, a function of it alone."""
    return not plan.moves and (plan.chosen is None or plan.chosen.kernel_row is None)


def _views(origin: Origin) -> Any:
    layouts = origin.plan.results[0]
    if isinstance(layouts, Layout):
        return _view(origin, layouts, 0)
    return [_view(origin, layout, place) for place, layout in enumerate(layouts)]


def _view(origin: Origin, layout: Layout, place: int) -> RemoteView:
    made = _make(RemoteView, layout.shape, strides=layout.stride, dtype=layout.dtype, device=origin.base.device)
    made._layout, made._origin, made._place = layout, origin, place
    return cast(RemoteView, made)


# --- operations on such views ---
def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operator = operator_of(func)
    written = [x for name in operator.mutated for x in _remote(operator.bind(args, kwargs).get(name))] if operator.mutated else []
    if written:
        elementwise = _by_element(operator, args, kwargs)
        return _write_elements(operator, args, kwargs) if elementwise else _write_value(operator, args, kwargs, written)
    if operator.is_view and isinstance(args[0], RemoteView):
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # as in dispatch
                return _dispatch(func, args, kwargs)
        plan = _plan(operator, args, kwargs)
        if plan.how not in ("answer", "decompose"):
            return _views(Origin(args[0], operator, args, kwargs, plan))
    return dispatch(DTensor, func, (), args, kwargs)


def _remote(value: Any) -> Iterator[RemoteView]:
    for item in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(item, RemoteView):
            yield item


_PLANS: dict[Any, Plan] = {}


def _plan(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """The plan of a view operation, found again by its arguments."""
    key = (operator.func, args[0]._layout, _hashable(args[1:]), _hashable(tuple(sorted(kwargs.items()))))
    found = _PLANS.get(key)
    if found is None:
        if len(_PLANS) > 4096:
            _PLANS.clear()
        found = _PLANS[key] = plan_for(operator, args, kwargs)
    return found


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


def _write_value(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[RemoteView]) -> Any:
    """Any operation: on the view's value, which then goes to the base."""
    origins = [view._origin for view in written]
    for origin in origins:
        origin.shown()
        origin.pinned = True
    try:
        result = dispatch(DTensor, operator.func, (), args, kwargs)
        for view in written:
            _put(view, _copying(wrap(view._local, view._layout)))
    finally:
        for origin in origins:
            origin.pinned = False
            origin.results = None
    return result


def _by_element(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation does to each element of its first argument what the others have in its place."""
    rule = lookup(operator.func)
    if rule is None or rule.kind != "pointwise" or operator.mutated != {operator.names[0]} or operator.outs:
        return False
    others = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.Tensor)]
    return all(isinstance(x, DTensor) or x.ndim == 0 for x in others)


def _write_elements(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation element by element, on the base's elements: the view itself need not be read."""
    view, func, shape = args[0], operator.func, list(args[0].shape)
    if func is _aten.copy_.default and _same(view, args[1]):
        return view

    def assign(destination: DTensor, shaped: Callable[[Any], Any]) -> None:
        def operand(value: Any) -> Any:
            if not isinstance(value, DTensor) or not value.ndim:
                return value
            return shaped(value if list(value.shape) == shape else dispatch(DTensor, _aten.expand.default, (), (value, shape)))

        others = {name: operand(value) for name, value in kwargs.items()}
        dispatch(DTensor, func, (), (destination, *map(operand, args[1:])), others)

    _put(view, assign)
    return view


def _same(a: Any, b: Any) -> bool:
    """Whether two views show the same elements, as those that ``x[0] += 1`` makes one after the other to read and to write."""
    if a is b or not (isinstance(a, RemoteView) and isinstance(b, RemoteView)):
        return a is b
    one, two = a._origin, b._origin
    alike = one.operator is two.operator and one.args[1:] == two.args[1:] and one.kwargs == two.kwargs and a._place == b._place
    return alike and _same(one.base, two.base)


def _copying(value: Any) -> Assign:
    return lambda destination, shaped: dispatch(DTensor, _aten.copy_.default, (), (destination, shaped(value)))


# --- writing into the base ---
def _put(view: RemoteView, assign: Assign) -> None:
    """Write to the elements of the base that ``view`` shows, and from there to the base's own base."""
    origin, base = view._origin, view._origin.base
    region = _region(view)
    if region is not None:
        _assign_region(*region, assign)
    elif not isinstance(base, RemoteView):
        _assign(origin, view._place, base, assign)
    else:
        own, before = base._origin, base._origin.pinned
        value = wrap(base._local, base._layout)
        own.pinned = True
        try:
            _assign(origin, view._place, value, assign)
            _put(base, _copying(value))
        finally:
            own.pinned = before


def _region(view: DTensor) -> Region | None:
    """The elements of a row (or of a slice of one) as a slice of a tensor that is no remote view."""
    if not isinstance(view, RemoteView):
        return view, tuple(range(view.ndim))
    found = _region(view._origin.base) if view._origin.name in _ROWS else None
    return None if found is None else _narrowed(view._origin, view._place, *found)


def _narrowed(origin: Origin, place: int, root: DTensor, dims: tuple[int, ...]) -> Region:
    """What a row or slice of ``root`` shows; ``dims`` are those of ``root`` that the operation's base has."""
    bound = origin.operator.bind(origin.args, origin.kwargs)
    dim = bound["dim"] % len(dims)
    if origin.name == "slice":
        bounds = (bound["start"], bound["end"], bound["step"])
    else:
        index = bound["index"] % origin.base.shape[dim] if origin.name == "select" else place
        bounds = (index, index + 1, 1)
    region = dispatch(DTensor, _aten.slice.Tensor, (), (root, dims[dim], *bounds))
    return region, dims if origin.name == "slice" else (*dims[:dim], *dims[dim + 1 :])


def _assign_region(region: DTensor, kept: tuple[int, ...], assign: Assign) -> None:
    gone = [d for d in range(region.ndim) if d not in kept]
    assign(region, lambda value: reduce(lambda x, d: dispatch(DTensor, _aten.unsqueeze.default, (), (x, d)), gone, value))


def _assign(origin: Origin, place: int, base: DTensor, assign: Assign) -> None:
    """Write to the elements of ``base`` that the view shows; the cheapest way that there is."""
    if _is_local(origin.plan):
        _assign_locally(origin, place, base, assign)
    elif origin.name in _ROWS:
        _assign_region(*_narrowed(origin, place, base, tuple(range(base.ndim))), assign)
    elif origin.name in ("view", "_reshape_alias", "squeeze", "unsqueeze"):
        assign(base, lambda value: dispatch(DTensor, _aten.view_copy.default, (), (value, list(base.shape))))
    else:
        _assign_whole(origin, place, base, assign)


def _assign_locally(origin: Origin, place: int, base: DTensor, assign: Assign) -> None:
    """The operation on the base's local gives a view of it, or of a copy whose strides allow one."""
    if origin.plan.rule is None or origin.plan.rule.run is None:
        try:
            shown = origin.run(base)[place]
        except RuntimeError:
            pass
        else:
            assign(shown, lambda value: value)
            return
    copied = _dense(base)
    assign(origin.run(copied)[place], lambda value: value)
    base._local.copy_(copied._local)


def _assign_whole(origin: Origin, place: int, base: DTensor, assign: Assign) -> None:
    """Gather the base, write to it there, and cut it back."""
    layout = base._layout
    everywhere = Layout.replicated(layout.mesh, layout.shape, layout.stride, layout.dtype)
    whole = _dense(wrap(redistribute_local(base._local, layout, everywhere), everywhere))
    args = (whole, *origin.args[1:])
    plan = _plan(origin.operator, args, origin.kwargs)
    if not _is_local(plan):
        raise UnsupportedOperationError(f"{origin.operator.name} of {layout!r} cannot be written through; write to view.clone()")
    _assign_locally(Origin(whole, origin.operator, args, origin.kwargs, plan), place, whole, assign)
    dispatch(DTensor, _aten.copy_.default, (), (base, whole))


def _dense(x: DTensor) -> DTensor:
    """A copy whose blocks lie in memory as the layout says."""
    layout, mesh = x._layout, x._layout.mesh

    def copied(member: int | None, block: torch.Tensor) -> torch.Tensor:
        stride = layout.local_stride(None if member is None else mesh.coordinates[member])
        return torch.empty_strided(block.shape, stride, dtype=block.dtype, device=block.device).copy_(block)

    return wrap(communicator_of(mesh).map(copied, x._local), layout)


def _resolved(local: Any) -> Any:
    """Without a lazy conjugation, which the view's wrapper does not show."""
    return local.resolve_conj() if local.is_complex() else local
