"""Views whose elements are not in the base's own local: a row of a sharded dim, a reshape that had to gather.

The law is that of plain tensors: writing through a view changes its base, and a change of the base is seen by the view. A view
whose local is a view of the base's local keeps it by itself. Any other is a ``RemoteView``, which remembers base and operation.
It is computed when it is first read, and again when the base has changed since (autograd keeps one version counter for a base
and all its views). How operations write to it: see ``write_through``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from ...base.caches import Bounded, nested_key
from ...base.symbolic_sizes import settled
from ...base.torch_internals import make_wrapper_subclass
from ...base.tracing import REFUSED
from ...dispatch.alias_base import shown_in
from ...dispatch.cache_key import settle
from ...dispatch.cached_redistribute import aliases_unseen, share_versions
from ...dispatch.dispatcher import dispatch, install_views
from ...dispatch.frame import Runner
from ...dispatch.operand_layouts import plan_for
from ...dispatch.program import bind_program, runner_of
from ...dispatch.version_counters import counted_together, counting, versions_of
from ...dispatch.wrap import begins_after
from ...errors import LayoutError
from ...layout.layout import Layout
from ...propagation.op_schema import Operator
from ...propagation.propagate import Plan
from ...rules.aten.views import check_memory, own_strides
from ...rules.op_traits import facts_of
from ..copies import dense
from ..dtensor import DTensor, wrap
from .flattened_layouts import regrouped

_make: Any = make_wrapper_subclass  # the documented way to build wrapper subclasses
_OPERATE: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # what operations do on such views, installed by write_through.py


def install_operations(operate: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Tell what ``__torch_dispatch__`` of a remote view does."""
    global _OPERATE
    _OPERATE = operate


@dataclass(slots=True, eq=False)
class Origin:
    """What a view is a view of; shared by all results of a split.

    A view is one of memory: where its base later comes to be seen in another way (``t_``), or as other memory (``x.data = y``),
    it shows what it showed.

    Attributes:
        viewed: the base, whose versions tell of writes; ``memory`` and ``layout`` are what it was when the view was made.
        versions: of the base, its own base, ... when ``results`` were computed.
        pinned: a write is in progress: ``results`` are the value.
    """

    viewed: DTensor
    operator: Operator
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    plan: Plan
    memory: Any = field(init=False)
    layout: Layout = field(init=False)
    results: list[DTensor] | None = None
    versions: tuple[int, ...] | None = None
    pinned: bool = False
    runner: Runner | None = None

    def __post_init__(self) -> None:
        self.memory, self.layout = _memory(self.viewed), self.viewed._layout

    @property
    def base(self) -> DTensor:
        """What the view was made of, as it was then."""
        viewed, memory = self.viewed, self.memory
        if self.layout is viewed._layout:
            if type(memory) is _Held and type(viewed) is DTensor:  # most often
                if memory.local is viewed._local:
                    return viewed
            elif memory == _memory(viewed):
                return viewed
        if isinstance(memory, _Held):
            base = wrap(self.memory.local, self.layout)
        else:
            base = _view(self.memory[0], self.layout, self.memory[1])
        base.__dict__["_counted"] = self.viewed
        return base

    def now(self) -> tuple[int, ...] | None:
        """How often the base and what it is a view of have been written to; None where nobody counts."""
        counted = counting(self.viewed)
        own = None if counted is None else versions_of(counted)
        if own is None or isinstance(self.memory, _Held):
            return own
        rest = self.memory[0].now()
        return None if rest is None else (*own, *rest)

    def shown(self) -> list[DTensor]:
        """The views as the base is now."""
        versions = self.now()
        if self.results is None or not (self.pinned or (versions is not None and versions == self.versions)):
            self.results, self.versions = self.computed(self.base), versions
        return self.results

    def computed(self, base: DTensor) -> list[DTensor]:
        try:
            return [wrap(_resolved(view._local), view._layout) for view in self.run(base)]
        except REFUSED:
            if not is_local(self.plan):
                raise
            return self.run(dense(base))  # blocks whose strides do not allow the view that the global strides do

    def run(self, base: DTensor) -> list[DTensor]:
        """The operation on ``base``, which has the layout that the plan was made for."""
        others = self.args[1:]
        if self.runner is None:
            program = bind_program(self.plan, self.operator, (base, *others), self.kwargs, after=())
            self.runner = runner_of(program, self.operator)
        local = _resolved(base._local)  # views of empty blocks are copies, which carry a conjugation out: ranks would differ
        made = self.runner((base, *others), self.kwargs, [local, *others], dict(self.kwargs))
        return list(made) if isinstance(made, (list, tuple)) else [made]

    @property
    def shows(self) -> str | None:
        """Return the trait ``OperatorTraits.shows`` of the operator (``dtensor.rules.op_traits``)."""
        return facts_of(self.operator.func).shows


@dataclass(slots=True, frozen=True, eq=False)
class _Held:
    """A local, compared by identity."""

    local: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.local is other.local

    __hash__ = None  # type: ignore[assignment]  # never a key


def _memory(x: DTensor) -> Any:
    """Where the elements are: in a local, or in what a remote view is a view of."""
    return (x._origin, x._place) if isinstance(x, RemoteView) else _Held(x._local)


class RemoteView(DTensor):
    """A view that is computed when it is read and writes back what is written to it."""

    _origin: Origin
    _place: int  # among the results of the operation

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        return _OPERATE(func, args, kwargs or {})

    @property
    def _local(self) -> Any:
        return self._origin.shown()[self._place]._local

    @_local.setter
    def _local(self, value: Any) -> None:
        del self.__dict__["_origin"]
        self.__class__ = DTensor  # type: ignore[assignment]  # a plain one from now on
        self._local = value

    @property
    def _root(self) -> Any:
        """The local of the tensor that it is a view of."""
        return chain_of(self)[0]._local

    def _uncounted(self) -> DTensor:
        apart = twin(self)
        counted_together(apart, self)
        return apart

    def _share(self, target: Any) -> None:
        origin, place, layout = self._origin, self._place, self._layout
        target.__class__, target._begins = RemoteView, self._begins
        target._layout, target._origin, target._place = layout, origin, place


def viewing(plan: Plan, operator: Operator) -> tuple[Runner | None, Runner | None]:
    """Return how to run a view operator in place of its local call, and how if the local call refuses a shard's strides.

    (None, None) where local results are views of local tensors.
    """
    if plan.how in ("answer", "decompose") or not plan.results:  # without results the operator itself says what is wrong
        return None, None
    if operator.reshapes:
        return _seen_anew(operator.out_of_place), None
    if operator.func is _AS_STRIDED or not is_local(plan) or changes(plan) or (plan.rule is not None and plan.rule.run):
        return remote(operator, plan), None
    return None, remote(operator, plan) if facts_of(operator.func).needs_strides else None


def remote(operator: Operator, plan: Plan) -> Runner:
    """What makes a remote view: of tensors whose sizes are known."""
    if any(layout.sized for layout in plan.call.operands):
        return partial(_in_numbers, operator)
    if operator.func is _AS_STRIDED:
        return _restriding(operator, plan)

    between = regrouped(plan.call.operands[0], plan.results[0].shape) if operator.func in _RESHAPED else None

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        if between is not None and type(args[0]) is DTensor:
            return _in_two_steps(args[0], operator, between, args[1])
        given = (args[0], *settled(args[1:]))  # a compiled program that is given the view makes it again
        made = views_of(Origin(args[0], operator, given, settled(kwargs) if kwargs else kwargs, plan))
        if aliases_unseen(operator):
            share_versions(made, args[0])
        return made

    return run


def _in_two_steps(x: DTensor, operator: Operator, between: tuple[int, ...], shape: Any) -> Any:
    """What blocks show of the view is seen at once, so that only a dim folded of others is left to be read: see ``folded``."""
    stack = dispatch(DTensor, operator.func, (), (x, between))
    stack.__dict__["_counted"] = x
    return views_of(Origin(stack, operator, (stack, shape), {}, plan_of(operator, (stack, shape), {})))


def _in_numbers(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any) -> Any:
    settle(operator.bind(args, kwargs).values())
    return dispatch(DTensor, operator.func, (), tuple(settled(args)), settled(kwargs))


def _seen_anew(anew: Any) -> Runner:
    """``t_``, ``squeeze_``: the tensor becomes a view of the memory that it was, which earlier views go on to show; the local is
    left as it is, since they, or the user, may hold it."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        args[0]._become(dispatch(DTensor, anew, (), args, kwargs))
        return args[0]

    return run


def _restriding(operator: Operator, plan: Plan) -> Runner:
    """``as_strided`` counts from the start of the memory, which a view shares with the tensor that it is a view of."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        bound = operator.bind(args, kwargs)
        x, size, stride, offset = (bound[name] for name in operator.names)
        root = x._base
        shown = shown_in(root, x) if isinstance(root, DTensor) else None
        if shown is None:
            found, args = plan, (x, size, stride, None if offset is None else offset - x._begins)
            if offset is not None and x._begins:
                if offset < x._begins:
                    raise LayoutError(
                        f"as_strided from offset {offset} of a view that starts at offset {x._begins}: under "
                        "torch.inference_mode() the base of the view is unknown; call as_strided on the base"
                    )
                found = plan_of(operator, args, {})
            if not own_strides(found.call):
                check_memory(found.call)
            return views_of(Origin(x, operator, args, {}, found))
        if shown.is_conj():
            root = dispatch(DTensor, torch.ops.aten._conj.default, (), (root,))
            root.__dict__["_counted"] = x._base
        if root.dtype != x.dtype:
            root = dispatch(DTensor, torch.ops.aten.view.dtype, (), (root, x.dtype))
            root.__dict__["_counted"] = x._base
        args = (root, size, stride, shown.storage_offset() if offset is None else offset)
        return views_of(Origin(root, operator, args, {}, plan_of(operator, args, {})))

    return run


_AS_STRIDED = torch.ops.aten.as_strided.default
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_RESHAPED = {torch.ops.aten.view.default, _UNSAFE_VIEW}

install_views(viewing)


def is_local(plan: Plan) -> bool:
    """Whether the plan runs on the base's own local, a function of it alone."""
    return not plan.moves and (plan.chosen is None or plan.chosen.kernel_row is None)


def changes(plan: Plan) -> bool:
    """Whether the view shows other values than its base (``_neg_view``): its locals are copies."""
    return plan.rule is not None and plan.rule.kind == "pointwise" and plan.rule.local is not None


def twin(view: RemoteView) -> RemoteView:
    """The same view as another tensor."""
    return _view(view._origin, view._layout, view._place)


def views_of(origin: Origin) -> Any:
    layouts = origin.plan.results[0]
    if isinstance(layouts, Layout):
        made = _view(origin, layouts, 0)
        if origin.operator.func is _UNSAFE_VIEW and (counted := counting(origin.viewed)) is not None:
            counted_together(made, counted)  # the same memory, which autograd counts apart
        return made
    return [_view(origin, layout, place) for place, layout in enumerate(layouts)]


def chain_of(view: RemoteView) -> tuple[DTensor, list[tuple[Origin, int]]]:
    """The tensor that is no remote view, and the operations from there to ``view``, each with the place of its result."""
    links: list[tuple[Origin, int]] = []
    x: DTensor = view
    while isinstance(x, RemoteView):
        links.insert(0, (x._origin, x._place))
        x = x._origin.base
    return x, links


def _view(origin: Origin, layout: Layout, place: int) -> RemoteView:
    viewed, starts = origin.viewed, origin.plan.starts
    begins = begins_after(viewed, layout, starts[place]) if starts else 0
    made = _make(RemoteView, layout.shape, layout.stride, begins, dtype=layout.dtype, device=viewed.device)
    made._layout, made._origin, made._place, made._begins = layout, origin, place, begins
    return cast(RemoteView, made)


def _resolved(local: Any) -> Any:
    """Without a lazy conjugation, which the view's wrapper does not show."""
    return local.resolve_conj() if local.is_complex() else local


_PLANS: Bounded[Any, Plan] = Bounded(4096, "remote_view.plans")


def plan_of(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """The plan of a view operation, found again by its arguments."""
    key = (operator.func, args[0]._layout, nested_key(args[1:]), nested_key(kwargs))
    found = _PLANS.get(key)
    return _PLANS.keep(key, plan_for(operator, args, kwargs)) if found is None else found
