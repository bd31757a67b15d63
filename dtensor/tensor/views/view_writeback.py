"""View write-back: operations on lazy views, and writes through a lazy view into its base.

An elementwise operation runs on the elements of the base, so the view is not read. Any other operation runs on the value of the
view, which is then written into the base: into a slice of it, through an inverted reshape, or, if there is no cheaper way, into
the gathered base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import torch

from ...base.memory_order import has_overlap
from ...base.symbolic_sizes import specialize_symbols
from ...base.tensor_tree import as_sequence
from ...base.tracing import KERNEL_ERRORS, is_program_argument, is_tracing
from ...comm.map_ranks import communicator_of
from ...dispatch import IN_DECOMPOSITION, dispatch, has_aliased_elements, run_per_element
from ...errors import UnsupportedOperationError
from ...propagation.op_schema import OperatorSchema, operator_schema_of
from ...redistribute import redistribute_local
from ...rules import lookup
from ...state.wrap import write_value as assign_local
from ..copies import dense_copy
from ..dtensor import DTensor, wrap
from .flattened_sharded_dims import run_on_stack
from .fused_projection_slices import slice_of_base
from .lazy_view import LazyView, Origin, changes_values, copy_view, is_local, make_lazy_runner, plan_of, trace_to_base

_aten = torch.ops.aten

Writer = Callable[[DTensor, Callable[[Any], Any]], Any]  # writes to the first argument; the second gives a value its shape
Region = tuple[DTensor, tuple[int, ...]]  # a slice, and the dims of it that the view has; the others have one element


def dispatch_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with lazy views among its arguments, as ``__torch_dispatch__`` of :class:`LazyView`."""
    operator = operator_schema_of(func)
    if operator.is_view:  # views are made for one size
        args, kwargs = (args[0], *specialize_symbols(args[1:])), specialize_symbols(kwargs)
    written_views = []
    if operator.mutated:
        bound = operator.bind(args, kwargs)
        written_views = [x for name in operator.mutated for x in _lazy_views_in(bound.get(name))]
    if written_views and operator.reshapes and plan_of(operator, args, kwargs).how != "decompose":
        # t_: the view gets another shape
        args[0]._adopt_memory(dispatch_view(operator.out_of_place, (copy_view(args[0]), *args[1:]), kwargs))
        return args[0]
    if written_views and all(view._origin.pinned for view in written_views):
        # inside a write: this is the value, which is written back later
        return dispatch(DTensor, func, (), args, kwargs)
    if written_views and is_tracing() and is_program_argument(written_views[0]._root):
        raise UnsupportedOperationError(
            "torch.compile: the function writes to an argument that is a view with elements on other ranks "
            f"({operator.name} of {written_views[0]._layout!r}): pass the base, or write to a clone"
        )
    if written_views and not operator.reshapes:
        if operator.traits.per_element and has_aliased_elements(operator, args, kwargs):
            return run_per_element(operator, args, kwargs)
        with IN_DECOMPOSITION:
            if _is_elementwise_write(operator, args, kwargs):
                return _write_elementwise(operator, args, kwargs)
            return _write_through_value(operator, args, kwargs, written_views)
    result = run_on_stack(operator, args, kwargs)
    if result is NotImplemented:
        result = slice_of_base(operator, args, kwargs)
    if result is not NotImplemented:
        return result
    if operator.is_view and isinstance(args[0], LazyView):
        if torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # as in dispatch
                return dispatch_view(func, args, kwargs)
        plan = plan_of(operator, args, kwargs)
        if plan.how not in ("answer", "decompose") and plan.results:  # without results the operator raises
            return make_lazy_runner(operator, plan)(args, kwargs, [], {})
    return dispatch(DTensor, func, (), args, kwargs)


def _lazy_views_in(value: Any) -> Iterator[LazyView]:
    """Yield the lazy views in an argument: a tensor or a list."""
    for item in as_sequence(value):
        if isinstance(item, LazyView):
            yield item


def _write_through_value(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[LazyView]) -> Any:
    """Run an in-place operation on the computed values of lazy views, then copy these values into the bases."""
    origins = [view._origin for view in written]
    for origin in origins:
        origin.get_results()
        origin.pinned = True
    try:
        result = dispatch(DTensor, operator.func, (), args, kwargs)
        for view in written:
            if isinstance(view, LazyView):  # resize_ makes it a plain DTensor
                _write_to_base(view, _make_copy_writer(wrap(view._local, view._layout)))
    finally:
        for origin in origins:
            origin.pinned = False
            origin.results = None
    return result


def _is_elementwise_write(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the operation is pointwise and writes its first argument only, a lazy view that shows its base's values."""
    if any(changes_values(origin.plan) for origin, _ in trace_to_base(args[0])[1]):
        return False  # on the base it would be another operation
    rule = lookup(operator.func)
    if rule is None or rule.kind != "pointwise" or operator.mutated != {operator.names[0]} or operator.outs:
        return False
    others = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, torch.Tensor)]
    return all(isinstance(x, DTensor) or x.ndim == 0 for x in others)


def _write_elementwise(operator: OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise in-place operation on the base's elements that the lazy view shows, without reading the view."""
    view, func, shape = args[0], operator.func, list(args[0].shape)
    if func is _aten.copy_.default and _show_same_elements(view, args[1]):
        return view

    def write_elements(destination: DTensor, shaped: Callable[[Any], Any]) -> None:
        """Run the operator on a destination, with the other operands in its shape."""

        def reshape_operand(value: Any) -> Any:
            """Return a tensor operand expanded to the view's shape, then ``shaped`` like the destination."""
            if not isinstance(value, DTensor) or not value.ndim:
                return value
            return shaped(value if list(value.shape) == shape else dispatch(DTensor, _aten.expand.default, (), (value, shape)))

        others = {name: reshape_operand(value) for name, value in kwargs.items()}
        dispatch(DTensor, func, (), (destination, *map(reshape_operand, args[1:])), others)

    _write_to_base(view, write_elements)
    view._origin.results = None
    return view


def _show_same_elements(a: Any, b: Any) -> bool:
    """Return True if two views show the same elements. ``x[0] += 1`` makes two equal views, one to read and one to write."""
    if a is b or not (isinstance(a, LazyView) and isinstance(b, LazyView)):
        return a is b
    first, second = a._origin, b._origin
    same_operation = (
        first.operator is second.operator
        and first.args[1:] == second.args[1:]
        and first.kwargs == second.kwargs
        and a._place == b._place
    )
    return same_operation and _show_same_elements(first.base, second.base)


def _make_copy_writer(value: Any) -> Writer:
    """Return the writer that copies ``value``."""
    return lambda destination, shaped: dispatch(DTensor, _aten.copy_.default, (), (destination, shaped(value)))


# --- writing into the base ---
def _write_to_base(view: LazyView, assign: Writer) -> None:
    """Call ``assign`` on the base's elements that ``view`` shows; if the base is a lazy view, write to its base too."""
    origin, base = view._origin, view._origin.base
    region = _find_region(view)
    if region is not None:
        _write_region(*region, assign)
    elif not isinstance(base, LazyView):
        _write_elements_of(origin, view._place, base, assign)
    elif has_overlap(base.shape, base.stride()):  # several elements of the base share memory
        root, links = trace_to_base(view)
        _write_gathered(links, root, assign)
    else:
        base_origin, was_pinned = base._origin, base._origin.pinned
        value = wrap(base._local, base._layout)
        base_origin.pinned = True
        try:
            _write_elements_of(origin, view._place, value, assign)
            _write_to_base(base, _make_copy_writer(value))
        finally:
            base_origin.pinned = was_pinned


def _find_region(view: DTensor) -> Region | None:
    """Return a lazy view as a slice of a DTensor that is no lazy view; None if it is not the result of slices and rows."""
    if not isinstance(view, LazyView):
        return view, tuple(range(view.ndim))
    base_region = _find_region(view._origin.base) if view._origin.view_kind == "slice" else None
    return None if base_region is None else _narrow_region(view._origin, view._place, *base_region)


def _narrow_region(origin: Origin, place: int, root: DTensor, dims: tuple[int, ...]) -> Region:
    """Return the slice of ``root`` that a row or slice view shows, and the dims of ``root`` that the view has.

    ``dims``: the dims of ``root`` that the operation's base has.
    """
    bound = origin.operator.bind(origin.args, origin.kwargs)
    dim = bound["dim"] % len(dims)
    if "start" in bound:
        bounds = (bound["start"], bound["end"], bound["step"])
    else:
        index = bound["index"] % origin.base.shape[dim] if "index" in bound else place
        bounds = (index, index + 1, 1)
    region = dispatch(DTensor, _aten.slice.Tensor, (), (root, dims[dim], *bounds))
    return region, dims if "start" in bound else (*dims[:dim], *dims[dim + 1 :])


def _write_region(region: DTensor, view_dims: tuple[int, ...], assign: Writer) -> None:
    """Call ``assign`` on a slice; values get a dim of size 1 for each dim of the slice that the view lacks."""
    missing_dims = [d for d in range(region.ndim) if d not in view_dims]
    assign(region, lambda value: reduce(lambda x, d: dispatch(DTensor, _aten.unsqueeze.default, (), (x, d)), missing_dims, value))


def _write_elements_of(origin: Origin, place: int, base: DTensor, assign: Writer) -> None:
    """Call ``assign`` on the elements of ``base`` that the view shows, in the cheapest way that this kind of view allows."""
    if changes_values(origin.plan):  # a negation is its own inverse
        assign(base, lambda value: dispatch(DTensor, origin.operator.func, (), (value,)))
    elif is_local(origin.plan):
        _write_local(origin, place, base, assign)
    elif origin.view_kind == "slice":
        _write_region(*_narrow_region(origin, place, base, tuple(range(base.ndim))), assign)
    elif origin.view_kind == "all":
        assign(base, lambda value: dispatch(DTensor, _aten.view_copy.default, (), (value, list(base.shape))))
    else:
        _write_gathered([(origin, place)], base, assign)


def _write_local(origin: Origin, place: int, base: DTensor, assign: Writer) -> None:
    """Call ``assign`` on a view of the base's local tensors, or on one of a dense copy that is copied back.

    It gives a view of them. Exceptions are strides that allow no view and lazy conjugation: then a dense copy is written and
    copied back.
    """
    if not base._local.is_conj() and (origin.plan.rule is None or origin.plan.rule.run is None):
        try:
            view = origin.run_on(base)[place]
        except KERNEL_ERRORS:
            pass
        else:
            assign(view, lambda value: value)
            return
    dense = dense_copy(base)
    assign(origin.run_on(dense)[place], lambda value: value)
    assign_local(base, dense._local)


def _write_gathered(links: list[tuple[Origin, int]], base: DTensor, assign: Writer) -> None:
    """Gather the base, call ``assign`` on the view of the gathered tensor, and copy the result into the base.

    Operations that change values are applied to the gathered base.
    """
    layout = base._layout
    value_changes = [origin for origin, _ in links if origin.view_kind == "mirror"]
    replicated = layout.to_replicated()
    gathered = wrap(redistribute_local(base._local, layout, replicated), replicated)
    dense_value = dense_copy(reduce(_apply_mirror, value_changes, gathered))
    links = [link for link in links if link[0] not in value_changes]
    assign(_view_of_gathered(links, dense_value), lambda value: value)
    value = reduce(_apply_mirror, value_changes, dense_value)
    if has_overlap(layout.shape, layout.stride):
        marks = wrap(communicator_of(layout.mesh).map(lambda _, block: torch.zeros_like(block), dense_value._local), replicated)
        dispatch(DTensor, _aten.fill_.Scalar, (), (_view_of_gathered(links, marks), 1))
        value = _merge_overlapping(base, value, marks)
    dispatch(DTensor, _aten.copy_.default, (), (base, value))


def _merge_overlapping(base: DTensor, value: DTensor, written: DTensor) -> DTensor:
    """Return the new value of ``base``, in which several elements share one memory location.

    Elements that ``written`` marks get the elements of ``value``. All other elements at the same location show the new value too.
    """

    def merge_block(_: int | None, block: torch.Tensor, values: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """Return one rank's block with the memory of marked elements set to ``values``."""
        extent = 1 + sum(step * (n - 1) for step, n in zip(block.stride(), block.shape, strict=True)) if block.numel() else 0
        memory = block.as_strided((extent,), (1,)).clone()
        positions = torch.arange(extent, device=block.device).as_strided(block.shape, block.stride())
        memory[positions[marks != 0]] = values[marks != 0]
        return memory.as_strided(block.shape, block.stride())

    layout = base._layout
    values = redistribute_local(value._local, value._layout, layout)
    marks = redistribute_local(written._local, written._layout, layout.reduced())
    return wrap(communicator_of(layout.mesh).map(merge_block, base._local, values, marks), layout)


def _view_of_gathered(links: list[tuple[Origin, int]], view: DTensor) -> DTensor:
    """Return the view of a replicated tensor that the operations ``links`` give, for a write to it.

    Raises:
        UnsupportedOperationError: an operation of them still is no local view.
    """
    for origin, place in links:
        args = (view, *origin.args[1:])
        plan = plan_of(origin.operator, args, origin.kwargs)
        if not is_local(plan):
            raise UnsupportedOperationError(
                f"{origin.operator.name} of {origin.layout!r} is a view that cannot be written to; write to view.clone()"
            )
        view = Origin(view, origin.operator, args, origin.kwargs, plan).run_on(view)[place]
    return view


def _apply_mirror(x: DTensor, origin: Origin) -> DTensor:
    """Apply a view operation that changes values elementwise (a negation or conjugation) to the base's value ``x``.

    Raises:
        UnsupportedOperationError: the view has another dtype, so that it shows parts of elements.
    """
    if x._layout.dtype is not origin.layout.dtype and origin.layout.dtype is not x._layout.dtype.to_real():
        description = f"{origin.operator.name} of {x._layout!r} seen as {origin.layout.dtype}"
        raise UnsupportedOperationError(f"{description} cannot be written to; write to view.clone()")
    return dense_copy(dispatch(DTensor, origin.operator.func, (), (x,)))
