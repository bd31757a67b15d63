"""Operations on remote views: what is written to the view arrives in its base.

An operation that acts element by element runs on the base's own elements, so the view is not even read. Any other runs on the
view's value, which is then written into the base: into the slice that a row is, through a reshape backwards, or, where nothing
cheaper is known, into the gathered base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch

from ...base.memory_order import overlaps
from ...base.symbolic_sizes import settled
from ...base.tensor_tree import listed
from ...base.tracing import REFUSED, is_argument, under_way
from ...comm import communicator_of
from ...dispatch.cached_redistribute import NESTED
from ...dispatch.dispatcher import dispatch
from ...dispatch.steps import in_one_memory, in_turn
from ...errors import UnsupportedOperationError
from ...propagation.op_schema import Operator, operator_of
from ...ranks.write_result import assign as assign_local
from ...redistribute import redistribute_local
from ...rules import lookup
from ..copies import dense_copy
from ..dtensor import DTensor, wrap
from .flattened_sharded_dims import run_on_stack
from .fused_projection_slices import slice_of_base
from .lazy_view import Origin, RemoteView, changes_values, copy_view, is_local, make_lazy_runner, plan_of, trace_to_base

_aten = torch.ops.aten

Writer = Callable[[DTensor, Callable[[Any], Any]], Any]  # writes to the first argument; the second shapes a value like it
Region = tuple[DTensor, tuple[int, ...]]  # and which of its dims the view has; the others have one element


def operate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``__torch_dispatch__`` of a remote view."""
    operator = operator_of(func)
    if operator.is_view:  # which is for one size, as what it is a view of
        args, kwargs = (args[0], *settled(args[1:])), settled(kwargs)
    written = (
        [x for name in operator.mutated for x in _lazy_views_in(operator.bind(args, kwargs).get(name))]
        if operator.mutated
        else []
    )
    if (
        written and operator.reshapes and plan_of(operator, args, kwargs).how != "decompose"
    ):  # t_: the view is seen in another way
        args[0]._adopt_memory(operate(operator.out_of_place, (copy_view(args[0]), *args[1:]), kwargs))
        return args[0]
    if written and all(view._origin.pinned for view in written):  # a part of a write in progress, on the value that will arrive
        return dispatch(DTensor, func, (), args, kwargs)
    if written and under_way() and is_argument(written[0]._root):
        raise UnsupportedOperationError(
            "torch.compile: the function writes to an argument that is a view with elements on other ranks "
            f"({operator.name} of {written[0]._layout!r}): pass the base, or write to a clone"
        )
    if written and not operator.reshapes:
        if operator.facts.per_element and in_one_memory(operator, args, kwargs):
            return in_turn(operator, args, kwargs)
        with NESTED:
            elementwise = _is_elementwise_write(operator, args, kwargs)
            return (
                _write_elementwise(operator, args, kwargs)
                if elementwise
                else _write_through_value(operator, args, kwargs, written)
            )
    found = run_on_stack(operator, args, kwargs)
    if found is NotImplemented:
        found = slice_of_base(operator, args, kwargs)
    if found is not NotImplemented:
        return found
    if operator.is_view and isinstance(args[0], RemoteView):
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # as in dispatch
                return operate(func, args, kwargs)
        plan = plan_of(operator, args, kwargs)
        if plan.how not in ("answer", "decompose") and plan.results:  # without, the operator itself says what is wrong
            return make_lazy_runner(operator, plan)(args, kwargs, [], {})
    return dispatch(DTensor, func, (), args, kwargs)


def _lazy_views_in(value: Any) -> Iterator[RemoteView]:
    for item in listed(value):
        if isinstance(item, RemoteView):
            yield item


def _write_through_value(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[RemoteView]) -> Any:
    """Any operation: on the view's value, which then goes to the base."""
    origins = [view._origin for view in written]
    for origin in origins:
        origin.shown()
        origin.pinned = True
    try:
        result = dispatch(DTensor, operator.func, (), args, kwargs)
        for view in written:
            if isinstance(view, RemoteView):  # or it was resized, and is a view no more
                _write_to_base(view, _make_copy_writer(wrap(view._local, view._layout)))
    finally:
        for origin in origins:
            origin.pinned = False
            origin.results = None
    return result


def _is_elementwise_write(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation does to each element of its first argument what the others have in its place."""
    if any(changes_values(origin.plan) for origin, _ in trace_to_base(args[0])[1]):
        return False  # to the base it would be another one
    rule = lookup(operator.func)
    if rule is None or rule.kind != "pointwise" or operator.mutated != {operator.names[0]} or operator.outs:
        return False
    others = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.Tensor)]
    return all(isinstance(x, DTensor) or x.ndim == 0 for x in others)


def _write_elementwise(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation element by element, on the base's elements: the view itself need not be read."""
    view, func, shape = args[0], operator.func, list(args[0].shape)
    if func is _aten.copy_.default and _show_same_elements(view, args[1]):
        return view

    def assign(destination: DTensor, shaped: Callable[[Any], Any]) -> None:
        def operand(value: Any) -> Any:
            if not isinstance(value, DTensor) or not value.ndim:
                return value
            return shaped(value if list(value.shape) == shape else dispatch(DTensor, _aten.expand.default, (), (value, shape)))

        others = {name: operand(value) for name, value in kwargs.items()}
        dispatch(DTensor, func, (), (destination, *map(operand, args[1:])), others)

    _write_to_base(view, assign)
    view._origin.results = None
    return view


def _show_same_elements(a: Any, b: Any) -> bool:
    """Whether two views show the same elements, as those that ``x[0] += 1`` makes one after the other to read and to write."""
    if a is b or not (isinstance(a, RemoteView) and isinstance(b, RemoteView)):
        return a is b
    one, two = a._origin, b._origin
    alike = one.operator is two.operator and one.args[1:] == two.args[1:] and one.kwargs == two.kwargs and a._place == b._place
    return alike and _show_same_elements(one.base, two.base)


def _make_copy_writer(value: Any) -> Writer:
    return lambda destination, shaped: dispatch(DTensor, _aten.copy_.default, (), (destination, shaped(value)))


# --- writing into the base ---
def _write_to_base(view: RemoteView, assign: Writer) -> None:
    """Write to the elements of the base that ``view`` shows, and from there to the base's own base."""
    origin, base = view._origin, view._origin.base
    region = _find_region(view)
    if region is not None:
        _write_region(*region, assign)
    elif not isinstance(base, RemoteView):
        _write_elements_of(origin, view._place, base, assign)
    elif overlaps(base.shape, base.stride()):  # the value of the base has several places for one element
        root, links = trace_to_base(view)
        _write_gathered(links, root, assign)
    else:
        own, before = base._origin, base._origin.pinned
        value = wrap(base._local, base._layout)
        own.pinned = True
        try:
            _write_elements_of(origin, view._place, value, assign)
            _write_to_base(base, _make_copy_writer(value))
        finally:
            own.pinned = before


def _find_region(view: DTensor) -> Region | None:
    """The elements of a row (or of a slice of one) as a slice of a tensor that is no remote view."""
    if not isinstance(view, RemoteView):
        return view, tuple(range(view.ndim))
    found = _find_region(view._origin.base) if view._origin.shows == "slice" else None
    return None if found is None else _narrow_region(view._origin, view._place, *found)


def _narrow_region(origin: Origin, place: int, root: DTensor, dims: tuple[int, ...]) -> Region:
    """What a row or slice of ``root`` shows; ``dims`` are those of ``root`` that the operation's base has."""
    bound = origin.operator.bind(origin.args, origin.kwargs)
    dim = bound["dim"] % len(dims)
    if "start" in bound:
        bounds = (bound["start"], bound["end"], bound["step"])
    else:
        index = bound["index"] % origin.base.shape[dim] if "index" in bound else place
        bounds = (index, index + 1, 1)
    region = dispatch(DTensor, _aten.slice.Tensor, (), (root, dims[dim], *bounds))
    return region, dims if "start" in bound else (*dims[:dim], *dims[dim + 1 :])


def _write_region(region: DTensor, kept: tuple[int, ...], assign: Writer) -> None:
    gone = [d for d in range(region.ndim) if d not in kept]
    assign(region, lambda value: reduce(lambda x, d: dispatch(DTensor, _aten.unsqueeze.default, (), (x, d)), gone, value))


def _write_elements_of(origin: Origin, place: int, base: DTensor, assign: Writer) -> None:
    """Write to the elements of ``base`` that the view shows; the cheapest way that there is."""
    if changes_values(origin.plan):  # a negation is its own inverse
        assign(base, lambda value: dispatch(DTensor, origin.operator.func, (), (value,)))
    elif is_local(origin.plan):
        _write_local(origin, place, base, assign)
    elif origin.shows == "slice":
        _write_region(*_narrow_region(origin, place, base, tuple(range(base.ndim))), assign)
    elif origin.shows == "all":
        assign(base, lambda value: dispatch(DTensor, _aten.view_copy.default, (), (value, list(base.shape))))
    else:
        _write_gathered([(origin, place)], base, assign)


def _write_local(origin: Origin, place: int, base: DTensor, assign: Writer) -> None:
    """The operation on the base's local gives a view of it, or of a copy whose strides allow one (and no conjugation is due)."""
    if not base._local.is_conj() and (origin.plan.rule is None or origin.plan.rule.run is None):
        try:
            shown = origin.run(base)[place]
        except REFUSED:
            pass
        else:
            assign(shown, lambda value: value)
            return
    copied = dense_copy(base)
    assign(origin.run(copied)[place], lambda value: value)
    assign_local(base, copied._local)


def _write_gathered(links: list[tuple[Origin, int]], base: DTensor, assign: Writer) -> None:
    """Gather the base, write to its view there, and cut it back. Of mirrored elements the base is mirrored meanwhile."""
    layout = base._layout
    mirrors = [origin for origin, _ in links if origin.shows == "mirror"]
    everywhere = layout.whole()
    gathered = wrap(redistribute_local(base._local, layout, everywhere), everywhere)
    whole = dense_copy(reduce(_apply_mirror, mirrors, gathered))
    links = [link for link in links if link[0] not in mirrors]
    assign(_view_of_gathered(links, whole), lambda value: value)
    value = reduce(_apply_mirror, mirrors, whole)
    if overlaps(layout.shape, layout.stride):
        written = wrap(communicator_of(layout.mesh).map(lambda _, block: torch.zeros_like(block), whole._local), everywhere)
        dispatch(DTensor, _aten.fill_.Scalar, (), (_view_of_gathered(links, written), 1))
        value = _merge_overlapping(base, value, written)
    dispatch(DTensor, _aten.copy_.default, (), (base, value))


def _merge_overlapping(base: DTensor, value: DTensor, written: DTensor) -> DTensor:
    """What ``base``, of which several elements are one in memory, comes to show once it has the elements of ``value`` that
    ``written`` marks; every place of such an element shows it."""

    def settle(_: int | None, block: torch.Tensor, values: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        extent = 1 + sum(step * (n - 1) for step, n in zip(block.stride(), block.shape, strict=True)) if block.numel() else 0
        memory = block.as_strided((extent,), (1,)).clone()
        where = torch.arange(extent, device=block.device).as_strided(block.shape, block.stride())
        memory[where[marks != 0]] = values[marks != 0]
        return memory.as_strided(block.shape, block.stride())

    layout = base._layout
    values = redistribute_local(value._local, value._layout, layout)
    marks = redistribute_local(written._local, written._layout, layout.reduced())
    return wrap(communicator_of(layout.mesh).map(settle, base._local, values, marks), layout)


def _view_of_gathered(links: list[tuple[Origin, int]], shown: DTensor) -> DTensor:
    """The view that the operations give of a whole tensor."""
    for origin, place in links:
        args = (shown, *origin.args[1:])
        plan = plan_of(origin.operator, args, origin.kwargs)
        if not is_local(plan):
            raise UnsupportedOperationError(
                f"{origin.operator.name} of {origin.layout!r} is a view that cannot be written to; write to view.clone()"
            )
        shown = Origin(shown, origin.operator, args, origin.kwargs, plan).run(shown)[place]
    return shown


def _apply_mirror(x: DTensor, origin: Origin) -> DTensor:
    """Views commute with what is done to each element alike, unless they show parts of elements that it treats otherwise."""
    if x._layout.dtype is not origin.layout.dtype and origin.layout.dtype is not x._layout.dtype.to_real():
        seen = f"{origin.operator.name} of {x._layout!r} seen as {origin.layout.dtype}"
        raise UnsupportedOperationError(f"{seen} cannot be written to; write to view.clone()")
    return dense_copy(dispatch(DTensor, origin.operator.func, (), (x,)))
