"""Lazy views: views with elements that are not in the base's local tensor (a row of a sharded dim, a gathering reshape).

They follow the rules of views of plain tensors: a write to the view changes the base, and the view shows a change of the base. If
the local tensor of a view is a view of the base's local tensor, torch ensures both. All other views are lazy
(:class:`LazyView`): they store the base and the operation. A lazy view is computed when it is first read, and again if the base
has changed since. Autograd keeps one version counter for a base and all its views. For writes see ``view_writeback.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from ...base.caches import BoundedDict, nested_key
from ...base.modes import MODES
from ...base.symbolic_sizes import specialize_symbols
from ...base.tensor_tree import tensor_leaves
from ...base.torch_internals import make_wrapper_subclass
from ...base.tracing import KERNEL_ERRORS
from ...dispatch import Runner, dispatch, install_view_runners, make_eager_view_runner, plan_call, specialize_sizes
from ...errors import LayoutError
from ...layout.layout import Layout
from ...propagation.op_schema import OperatorSchema, operator_schema_of
from ...propagation.propagate import CallPlan
from ...rules.aten.views import check_memory, own_strides
from ...rules.op_traits import traits_of
from ...state.shared_memory import join_alias_groups, named_version_owner, share_versions, view_in_plain_torch
from ...state.version_counters import is_unwritten, versions_of_all
from ...state.wrap import storage_offset_of_view
from ..autograd import grad_layout
from ..compile_protocol import FlattenMethod
from ..copies import dense_copy
from ..dtensor import DTensor, wrap
from .flattened_layouts import find_stack_shape

_make: Any = make_wrapper_subclass  # the documented function for wrapper subclasses
_DISPATCH_VIEW: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # set by the package root


def install_view_dispatch(operate: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Set the function that ``__torch_dispatch__`` of lazy views calls."""
    global _DISPATCH_VIEW
    _DISPATCH_VIEW = operate


@dataclass(slots=True, eq=False)
class Origin:
    """The base and the operation of a lazy view; shared by all results of one operation (``split``).

    A view is a view of memory. If the base later gets another shape (``t_``) or other memory (``x.data = y``), the view shows
    what it showed before.

    Attributes:
        viewed: the base, of which the version counters are read. ``memory`` and ``layout`` are those of the time of the view
            operation.
        versions: of the base, its own base, ... when ``results`` were computed.
        pinned: a write is in progress: ``results`` are the value.
    """

    viewed: DTensor
    operator: OperatorSchema
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: CallPlan
    memory: Any = field(init=False)
    layout: Layout = field(init=False)
    results: list[DTensor] | None = None
    versions: tuple[int, ...] | None = None
    pinned: bool = False
    runner: Runner | None = None

    def __post_init__(self) -> None:
        self.memory, self.layout = _memory_of(self.viewed), self.viewed._layout

    @property
    def base(self) -> DTensor:
        """Return the base with its memory and layout at the time of the view operation, whatever happened to the tensor since."""
        viewed, memory = self.viewed, self.memory
        if self.layout is viewed._layout:
            if type(memory) is _LocalRef and type(viewed) is DTensor:  # the usual case
                if memory.local is viewed._local:
                    return viewed
            elif memory == _memory_of(viewed):
                return viewed
        if isinstance(memory, _LocalRef):
            base = wrap(self.memory.local, self.layout)
        else:
            base = _make_view(self.memory[0], self.layout, self.memory[1])
        base.__dict__["_version_owner"] = self.viewed.__dict__.get("_version_owner", self.viewed)
        return base

    def bases(self) -> Iterator[DTensor]:
        """Yield the base, and the bases of lazy bases."""
        yield self.viewed
        if not isinstance(self.memory, _LocalRef):
            yield from self.memory[0].bases()

    def get_results(self) -> list[DTensor]:
        """Return the results of the view operation as plain DTensors, cached until the base is written.

        They are computed again if it was written to.
        """
        versions = versions_of_all(self.bases())
        if self.results is None or not (self.pinned or is_unwritten(self.versions, versions)):
            self.results, self.versions = self._compute(self.base), versions
        return self.results

    def _compute(self, base: DTensor) -> list[DTensor]:
        """Return the results of the operation as plain DTensors."""
        try:
            return [wrap(_resolve_conj(view._local), view._layout) for view in self.run_on(base)]
        except KERNEL_ERRORS:
            if not is_local(self.plan):
                raise
            return self.run_on(dense_copy(base))  # the strides of a shard do not allow the view

    def run_on(self, base: DTensor) -> list[DTensor]:
        """Run the operation on ``base``, which has the layout of the plan. Return a list of the results."""
        static_args = self.args[1:]
        if self.runner is None:
            self.runner = make_eager_view_runner(self.plan, self.operator, (base, *static_args), self.kwargs)
        local = _resolve_conj(base._local)  # views of empty shards are copies, which are conjugated: ranks would differ
        result = self.runner((base, *static_args), self.kwargs, [local, *static_args], dict(self.kwargs))
        return list(result) if isinstance(result, (list, tuple)) else [result]

    @property
    def view_kind(self) -> str | None:
        """Return the trait ``OperatorTraits.view_kind`` of the operator (``dtensor.rules.op_traits``)."""
        return traits_of(self.operator.func).view_kind


@dataclass(slots=True, frozen=True, eq=False)
class _LocalRef:
    """A local tensor, compared by identity."""

    local: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LocalRef) and self.local is other.local

    __hash__ = None  # type: ignore[assignment]  # never a key


def _memory_of(x: DTensor) -> Any:
    """Return the memory of a DTensor: its local tensor, or for a lazy view the origin and the index of the result."""
    return (x._origin, x._place) if isinstance(x, LazyView) else _LocalRef(x._local)


# --- protocol of torch.compile: see ``tensor/compile_protocol.py`` ---------------------------------------------------------
with torch.inference_mode():
    _UNCOUNTED = torch.empty(0, device="cpu")  # a tensor of inference mode has no version counter


def _flatten_view(view: LazyView) -> tuple[list[str], tuple[Any, ...]]:
    """Return, as ``__tensor_flatten__``, the name of the base's local tensor, and the constants that graphs guard."""
    root, links = trace_to_base(view)
    view_calls = tuple((o.operator.func, tuple(o.args[1:]), tuple(o.kwargs.items()), place) for o, place in links)
    return ["_root"], (view._layout, MODES.explicit, MODES.implicit_replication, root._layout, view_calls)


def _unflatten_view(inner_tensors: dict[str, torch.Tensor], constants: tuple[Any, ...], size: Any, stride: Any) -> Any:
    """Return, as ``__tensor_unflatten__``, the lazy view of the base with the local tensor ``inner_tensors["_root"]``."""
    view = wrap(inner_tensors["_root"], constants[3])
    view.__dict__["_version_owner"] = _UNCOUNTED  # other tensors may share this memory: the view is computed at each read
    for func, static_args, options, place in constants[4]:
        operator, args, kwargs = operator_schema_of(func), (view, *static_args), dict(options)
        views = make_views(Origin(view, operator, args, kwargs, plan_of(operator, args, kwargs)))
        view = views[place] if isinstance(views, list) else views
    return view


def _view_to_tangent_layout(view: LazyView) -> DTensor:
    """Return an uninitialized plain DTensor in the layout of a gradient: a gradient is no view."""
    layout = grad_layout(view._layout, None)
    return wrap(layout.new_local_like(view._root, layout.mesh.current_member()), layout)


class LazyView(DTensor):
    """A lazy view: a DTensor that is computed when it is read. Writes to it are written to its base."""

    _origin: Origin
    _place: int  # the index among the results of the operation
    __tensor_flatten__ = FlattenMethod(_flatten_view, "_root")
    __tensor_unflatten__ = staticmethod(_unflatten_view)
    __coerce_tangent_metadata__ = _view_to_tangent_layout

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        return _DISPATCH_VIEW(func, args, kwargs or {})

    @property
    def _local(self) -> Any:
        return self._origin.get_results()[self._place]._local

    @_local.setter
    def _local(self, value: Any) -> None:
        del self.__dict__["_origin"]
        self.__class__ = DTensor  # type: ignore[assignment]  # a plain one from now on
        self._local = value

    @property
    def _root(self) -> Any:
        """Return the local tensor of the first base that is no lazy view."""
        return trace_to_base(self)[0]._local

    def _get_data_alias(self) -> DTensor:
        """Return another lazy view of the same elements, as ``.data`` does, in the same alias group."""
        alias = copy_view(self)
        join_alias_groups(alias, self)
        return alias

    def _assign_memory_to(self, target: Any) -> None:
        """Make ``target`` a lazy view of the same elements of the base."""
        origin, place, layout = self._origin, self._place, self._layout
        target.__class__, target._storage_start = LazyView, self._storage_start
        target._layout, target._origin, target._place = layout, origin, place


def make_view_runners(plan: CallPlan, operator: OperatorSchema) -> tuple[Runner | None, Runner | None]:
    """Return the runner that makes lazy views instead of the local call, and the one to use if the local call fails.

    The first is None if local results are views of local tensors. The second is None for operators that accept all strides.
    """
    if plan.how in ("answer", "decompose") or not plan.results:  # without results the operator raises
        return None, None
    if operator.reshapes:
        return _make_inplace_runner(operator.out_of_place), None
    if operator.func is _AS_STRIDED or not is_local(plan) or changes_values(plan) or (plan.rule is not None and plan.rule.run):
        return make_lazy_runner(operator, plan), None
    return None, make_lazy_runner(operator, plan) if traits_of(operator.func).needs_strides else None


def make_lazy_runner(operator: OperatorSchema, plan: CallPlan) -> Runner:
    """Return the function that runs a view operator by making lazy views, which are computed at their first use."""
    if any(layout.has_symbols for layout in plan.call.operands):
        return partial(_run_with_ints, operator)
    if operator.func is _AS_STRIDED:
        return _make_as_strided_runner(operator, plan)

    # a local view of shape ``stack_shape`` comes first: only the dim that is flattened of several remains lazy
    stack_shape = find_stack_shape(plan.call.operands[0], plan.results[0].shape) if operator.func in _VIEW_OPERATORS else None

    def make_lazy_views(
        args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]
    ) -> Any:
        """Return the lazy views of ``args[0]``, behind a local view if only one dim must be lazy."""
        if stack_shape is not None and type(args[0]) is DTensor:
            return apply_views(args[0], ((operator.func, stack_shape), (operator.func, args[1])))
        static_args = (args[0], *specialize_symbols(args[1:]))  # a compiled program with the view as an input makes it again
        views = make_views(Origin(args[0], operator, static_args, specialize_symbols(kwargs) if kwargs else kwargs, plan))
        if operator.is_unrecorded_alias:
            share_versions(views, args[0])
        return views

    return make_lazy_views


def apply_views(base: DTensor, calls: Sequence[tuple[Any, ...]]) -> Any:
    """Apply view operations to ``base``, one after the other. Each call is an operator and its arguments after the tensor.

    Autograd does not see the views between base and result, so their version counter is that of the base.
    """
    counted, view = base.__dict__.get("_version_owner", base), base
    for func, *static_args in calls:
        if view is not base:
            view.__dict__["_version_owner"] = counted
        view = dispatch(DTensor, func, (), (view, *static_args)) if type(view) is DTensor else func(view, *static_args)
    return view


def _run_with_ints(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any) -> Any:
    """Dispatch the view operation with symbolic sizes specialized to integers."""
    specialize_sizes(tensor_leaves([args, kwargs]))
    return dispatch(DTensor, operator.func, (), tuple(specialize_symbols(args)), specialize_symbols(kwargs))


def _make_inplace_runner(out_of_place: Any) -> Runner:
    """Return the runner of ``t_``, ``squeeze_`` ...: it gives the tensor the memory and shape of a view of itself.

    Earlier views still show that memory. The local tensor is not changed, because these views, or the user, may hold it.
    """

    def change_into_view(
        args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]
    ) -> Any:
        args[0]._adopt_memory(dispatch(DTensor, out_of_place, (), args, kwargs))
        return args[0]

    return change_into_view


def _make_as_strided_runner(operator: OperatorSchema, plan: CallPlan) -> Runner:
    """Return the runner of ``as_strided``, which makes a lazy view of the first base: offsets count from its memory."""

    def run_as_strided(args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        """Return ``as_strided`` of a view's first base, as a lazy view."""
        bound = operator.bind(args, kwargs)
        x, size, stride, offset = (bound[name] for name in operator.names)
        root = x._base
        local_view = view_in_plain_torch(root, x) if isinstance(root, DTensor) else None
        if local_view is None:
            as_strided_plan, args = plan, (x, size, stride, None if offset is None else offset - x._storage_start)
            if offset is not None and x._storage_start:
                if offset < x._storage_start:
                    raise LayoutError(
                        f"as_strided from offset {offset} of a view that starts at offset {x._storage_start}: under "
                        "torch.inference_mode() the base of the view is unknown; call as_strided on the base"
                    )
                as_strided_plan = plan_of(operator, args, {})
            if not own_strides(as_strided_plan.call):
                check_memory(as_strided_plan.call)
            return make_views(Origin(x, operator, args, {}, as_strided_plan))
        if local_view.is_conj():
            root = dispatch(DTensor, torch.ops.aten._conj.default, (), (root,))
            root.__dict__["_version_owner"] = x._base
        if root.dtype != x.dtype:
            root = dispatch(DTensor, torch.ops.aten.view.dtype, (), (root, x.dtype))
            root.__dict__["_version_owner"] = x._base
        args = (root, size, stride, local_view.storage_offset() if offset is None else offset)
        return make_views(Origin(root, operator, args, {}, plan_of(operator, args, {})))

    return run_as_strided


_AS_STRIDED = torch.ops.aten.as_strided.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_VIEW_OPERATORS = {torch.ops.aten.view.default, _UNSAFE_VIEW}

install_view_runners(make_view_runners)


def is_local(plan: CallPlan) -> bool:
    """Return True if the plan computes the result from the base's local tensor only, without redistribution or kernel."""
    return not plan.redistributions and (plan.chosen is None or plan.chosen.kernel_strategy is None)


def changes_values(plan: CallPlan) -> bool:
    """Return True if the values of the view differ from those of its base (``_neg_view``). Its local tensors are copies."""
    return plan.rule is not None and plan.rule.kind == "pointwise" and plan.rule.local is not None


def copy_view(view: LazyView) -> LazyView:
    """Return another lazy view of the same elements."""
    return _make_view(view._origin, view._layout, view._place)


def make_views(origin: Origin) -> Any:
    """Return the lazy views that the operation of ``origin`` gives: one view, or a list of views."""
    layouts = origin.plan.results[0]
    if isinstance(layouts, Layout):
        view = _make_view(origin, layouts, 0)
        if origin.operator.func is _UNSAFE_VIEW and (counted := named_version_owner(origin.viewed)) is not None:
            join_alias_groups(view, counted)  # autograd has another version counter for this memory
        return view
    return [_make_view(origin, layout, place) for place, layout in enumerate(layouts)]


def trace_to_base(view: LazyView) -> tuple[DTensor, list[tuple[Origin, int]]]:
    """Return the first base that is no lazy view, and the operations from it to ``view``, each with the index of its result."""
    links: list[tuple[Origin, int]] = []
    x: DTensor = view
    while isinstance(x, LazyView):
        links.insert(0, (x._origin, x._place))
        x = x._origin.base
    return x, links


def _make_view(origin: Origin, layout: Layout, place: int) -> LazyView:
    """Return the lazy view with ``layout`` that is result ``place`` of the operation of ``origin``."""
    viewed, starts = origin.viewed, origin.plan.starts
    storage_offset = storage_offset_of_view(viewed, layout, starts[place]) if starts else 0
    view = _make(LazyView, layout.shape, layout.stride, storage_offset, dtype=layout.dtype, device=viewed.device)
    view._layout, view._origin, view._place, view._storage_start = layout, origin, place, storage_offset
    return cast(LazyView, view)


def _resolve_conj(local: Any) -> Any:
    """Return a local tensor without lazy conjugation, which the wrapper of a view does not have."""
    return local.resolve_conj() if local.is_complex() else local


_VIEW_PLANS: BoundedDict[Any, CallPlan] = BoundedDict(4096, "remote_view.plans")


def plan_of(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallPlan:
    """Return the plan of a view operation, cached by its arguments."""
    key = (operator.func, args[0]._layout, nested_key(args[1:]), nested_key(kwargs))
    cached = _VIEW_PLANS.get(key)
    return _VIEW_PLANS.keep(key, plan_call(operator, operator.bind(args, kwargs))) if cached is None else cached
