"""Run a plan on locals: move operands, call the local op or kernel, wrap what comes out, write back what was mutated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..base.modes import MODES
from ..comm import PerRank, communicator_of
from ..errors import ImplicitCommunicationError, UnsupportedOperationError
from ..layout.layout import Layout
from ..propagation.choose import Chosen
from ..propagation.propagate import Plan, Slot
from ..propagation.schema import Operator
from ..random.draw import default_generator, set_state, state_of, synchronize
from ..redistribute import execute as run_move
from ..redistribute import execute_many as run_moves
from ..redistribute import plan as plan_move
from ..rules.call import Call
from ..rules.kernels import KernelContext
from ..rules.rule import LocalView
from .laid_out import moved_in_order
from .report import announce, describe

Wrap = Callable[[Any, Layout], Any]


def execute(plan: Plan, operator: Operator, values: dict[str, Any], local: dict[str, Any], wrap: Wrap) -> Any:
    """The results of a plan.

    Args:
        values: arguments by name as the user gave them.
        local: the same with DTensors replaced by their locals.
    """
    if plan.how == "answer":
        return plan.answer
    if plan.how == "decompose":
        return _decomposed(plan, operator, values, wrap)
    if MODES.explicit and plan.communicates:
        raise ImplicitCommunicationError(f"{operator.name} would communicate under explicit():\n{describe(plan)}")
    if plan.how == "gather":
        announce(plan, operator.name)
    if plan.call.mesh.current_member() is None:
        return _absent(plan, operator, values, local, wrap)
    _move_operands(plan, local)
    if plan.rule is not None and plan.rule.as_laid_out:
        moved_in_order(plan, local)
    for name in operator.outs:
        local[name] = _scratch(plan, operator, name, local[name])
    computed = _compute(plan, operator, local)
    produced = _as_tuple(computed, operator)
    for slot, move in plan.write_back:
        _write_back(plan, slot, move, operator, values, local, produced)
    return _wrap_results(plan, operator, values, produced, wrap)


def _move_operands(plan: Plan, local: dict[str, Any]) -> None:
    if sum(index is not None for (_, index), _ in plan.moves) > 1:  # lists, as of foreach operators: few collectives for all
        moved = run_moves([move for _, move in plan.moves], [_get(local, slot) for slot, _ in plan.moves])
    else:
        moved = [run_move(move, _get(local, slot)) for slot, move in plan.moves]
    for (slot, _), value in zip(plan.moves, moved, strict=True):
        _put(local, slot, value)


def _decomposed(plan: Plan, operator: Operator, values: dict[str, Any], wrap: Wrap) -> Any:
    """The operations that an operator is made of; a rule's own know no ``out=`` and get no plain tensors."""
    own = plan.rule is not None and plan.rule.decompose is not None
    if own:
        values = {name: _distributed(value, plan.call.arguments.get(name), wrap) for name, value in values.items()}
    positional, keywords = [values[name] for name in operator.names[: operator.positional]], _keywords(operator, values)
    if not own:
        return operator.func.decompose(*positional, **keywords)
    assert plan.rule is not None
    assert plan.rule.decompose is not None
    made = plan.rule.decompose(*positional, **{name: value for name, value in keywords.items() if name not in operator.outs})
    if not any(operator.returns):
        return made
    given = []
    for owner, value in zip(operator.returns, _as_tuple(made, operator), strict=True):
        if owner is not None and values[owner] is not value:
            resized = owner in operator.outs and values[owner].shape != value.shape
            value = _given_to(values[owner], value, operator.reshapes or resized)
        given.append(value)
    return given[0] if len(given) == 1 else tuple(given)


def _given_to(target: Any, value: Any, reshapes: bool) -> Any:
    """``target`` with this value (and its shape and layout: ``resize_``, ``out=`` of another shape)."""
    if not reshapes:
        return target.copy_(value)
    target.data = value.to(target.dtype)
    return target


def _distributed(value: Any, layout: Any, wrap: Wrap) -> Any:
    """An argument whose plain tensors, which all ranks hold alike, are replicated ones."""
    if isinstance(layout, list):
        return [_distributed(item, own, wrap) for item, own in zip(value, layout, strict=True)]
    if isinstance(layout, Layout) and not hasattr(value, "_layout"):
        return wrap(communicator_of(layout.mesh).map(lambda member, x: x, value), layout)
    return value


def _compute(plan: Plan, operator: Operator, local: dict[str, Any]) -> Any:
    rule, chosen = plan.rule, plan.chosen
    if operator.flat:
        return _through_memory(operator, local)
    if rule is None or chosen is None:
        return _drawn_alike(plan, operator, local) if operator.seeded else operator.call(local)
    if rule.run is not None or chosen.kernel_row is not None:
        return _in_place(operator, local, operator.call(local, kernel_of(plan)))
    if rule.local_args is not None:
        return _with_local_args(plan, operator, local)
    return operator.call(local, rule.local)


def _through_memory(operator: Operator, local: dict[str, Any]) -> Any:
    """An optimizer step over lists. Its kernels go through memory without a look at strides, so tensors laid out otherwise than
    those of the first list are copied before and, where written, back."""
    strayed = []
    lists = [name for name in operator.names if isinstance(local.get(name), list)]
    for name in sorted(lists, key=lambda name: name != "self"):
        for i, (x, first) in enumerate(zip(local[name], local["self"], strict=False)):
            fits = all(map(_dense, _shards(x))) if name == "self" else all(map(_alike, _shards(x), _shards(first)))
            if not fits:
                local[name][i] = copy = torch.empty_like(first, dtype=x.dtype).copy_(x)
                strayed += [(x, copy)] if name in operator.mutated else []
    computed = operator.call(local)
    for x, copy in strayed:
        x.copy_(copy)
    return computed


def _shards(x: Any) -> tuple[torch.Tensor, ...]:
    return x.shards if isinstance(x, PerRank) else (x,)


def _dense(x: torch.Tensor) -> bool:
    """No gaps in memory, as a slice of rows has them."""
    return x.numel() < 2 or x.stride() == torch.empty_like(x).stride()


def _alike(x: torch.Tensor, first: torch.Tensor) -> bool:
    return x.shape != first.shape or x.stride() == first.stride() or x.numel() < 2


def _drawn_alike(plan: Plan, operator: Operator, local: dict[str, Any]) -> Any:
    """The op on whole operands, every rank drawing from the same generator state, which advances once."""
    mesh = plan.call.mesh
    synchronize(mesh)
    generator = local.get("generator") or default_generator(mesh)
    state = state_of(generator)

    def one(member: int, bound: dict[str, Any]) -> Any:
        set_state(generator, state)
        return operator.call(bound)

    return communicator_of(mesh).map(one, local)


def kernel_of(plan: Plan) -> Callable[..., Any]:
    """The function that a plan runs instead of the operator, its context bound."""
    assert plan.rule is not None
    assert plan.chosen is not None
    row = plan.chosen.kernel_row
    if row is not None and row.kernel is not None:
        return partial(row.kernel.run, _context(plan, plan.chosen))
    assert plan.rule.run is not None
    return partial(plan.rule.run, KernelContext(served(plan), plan.chosen.operands, plan.chosen.results, (), (1,)))


def served(plan: Plan) -> Call:
    """The call as all that the plan serves have it."""
    return plan.call if plan.rule is not None and plan.rule.floats_matter else plan.call.for_all_numbers()


def _context(plan: Plan, chosen: Chosen) -> KernelContext:
    splits = chosen.kernel_splits
    mesh_dims = tuple(mesh_dim for split in splits.values() for mesh_dim in split.mesh_dims)
    sizes = next(iter(splits.values())).sizes if len(splits) == 1 else ()
    return KernelContext(served(plan), chosen.operands, chosen.results, mesh_dims, sizes, splits)


def _in_place(operator: Operator, local: dict[str, Any], computed: Any) -> Any:
    """What a kernel computed for an argument written in place, written there (kernels return new locals)."""
    produced = list(_as_tuple(computed, operator))
    for k, owner in enumerate(operator.returns):
        if owner is not None and owner not in operator.outs and produced[k] is not local[owner]:
            produced[k] = local[owner].copy_(produced[k])
    return produced[0] if len(operator.returns) == 1 else tuple(produced)


def _with_local_args(plan: Plan, operator: Operator, local: dict[str, Any]) -> Any:
    rule, chosen = plan.rule, plan.chosen
    assert rule is not None
    assert chosen is not None
    assert rule.local_args is not None
    rewrite, call = rule.local_args, served(plan)

    def one(member: int, bound: dict[str, Any]) -> Any:
        values = rewrite(call, local_view(plan, member))
        extra = {name: value for name, value in values.items() if name not in operator.names}
        return operator.call(
            {**bound, **values}, partial(rule.local, **extra) if extra and rule.local is not None else rule.local
        )

    return communicator_of(plan.call.mesh).map(one, local)


def local_view(plan: Plan, member: int) -> LocalView:
    """Shapes and offsets of one member's blocks."""
    assert plan.chosen is not None
    results = [layout for layout in plan.chosen.results if layout is not None]
    return LocalView(plan.chosen.operands, results, plan.call.mesh.coordinates[member])


def _write_back(
    plan: Plan,
    slot: Slot,
    move: Any,
    operator: Operator,
    values: dict[str, Any],
    local: dict[str, Any],
    produced: tuple[Any, ...],
) -> None:
    """Bring what was written to the layout of the user's tensor, and copy it there."""
    name = slot[0]
    if name in operator.returns and slot[1] is None:
        written = produced[operator.returns.index(name)]
    else:
        written = _get(local, slot)
    target = _get(values, slot)
    if not plan.results and name in operator.outs and written.shape != target.shape:
        return  # the data decided the shape: it takes it in the end
    moved = run_move(move, written)
    if hasattr(target, "_layout"):
        target._local.copy_(moved)
    else:  # a buffer of torch's own: the move made the value whole
        target.copy_(_one(moved))


def _one(local: Any) -> torch.Tensor:
    """What every rank holds."""
    return local.shards[0] if isinstance(local, PerRank) else local


def _take_shape(plan: Plan, target: Any, value: Any, layout: Layout | None, wrap: Wrap) -> None:
    """An ``out=`` tensor of another shape than the result becomes what the result is, as in torch."""
    layout = layout or Layout.replicated(plan.call.mesh, value.shape, value.stride(), value.dtype)
    if hasattr(target, "_layout"):
        target.data = wrap(value, layout.replace(dtype=target.dtype))
    else:
        whole = Layout.replicated(layout.mesh, layout.shape, layout.stride, layout.dtype)
        target.resize_(layout.shape).copy_(_one(run_move(plan_move(layout, whole), value)))


def _wrap_results(plan: Plan, operator: Operator, values: dict[str, Any], produced: tuple[Any, ...], wrap: Wrap) -> Any:
    results = plan.results or tuple(None for _ in produced)
    wrapped = []
    for owner, layout, value in zip(operator.returns, results, produced, strict=True):
        if owner is not None:
            if owner in operator.outs and values[owner].shape != (value.shape if layout is None else layout.shape):
                _take_shape(plan, values[owner], value, layout, wrap)
            wrapped.append(values[owner])
        else:
            wrapped.append(_wrap_one(plan, layout, value, wrap))
    if not operator.returns:
        return None
    return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)


def _wrap_one(plan: Plan, layout: Any, value: Any, wrap: Wrap) -> Any:
    if isinstance(value, (list, tuple)) and not hasattr(value, "common"):
        layouts = layout if isinstance(layout, list) else [None] * len(value)
        return [_wrap_one(plan, lay, item, wrap) for lay, item in zip(layouts, value, strict=True)]
    if isinstance(value, torch.Tensor):
        if plan.how == "gather" and value.layout is not torch.strided:
            raise UnsupportedOperationError(
                f"{plan.call.func} would give a sparse tensor, which no DTensor is; pass sparse=False, or use x.full_tensor()"
            )
        if plan.how == "gather" or layout is None:
            # whole on every rank: the local is the global one, whatever planning knew of it
            layout = Layout.replicated(plan.call.mesh, value.shape, value.stride(), value.dtype)
        return wrap(value, layout)
    return value[0] if isinstance(value, tuple) else value


_DATA_DECIDES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _absent(plan: Plan, operator: Operator, values: dict[str, Any], local: dict[str, Any], wrap: Wrap) -> Any:
    """This rank is not part of the mesh: it holds nothing, and results have no elements here."""
    device = values.get("device") or next((v.device for v in local.values() if isinstance(v, torch.Tensor)), None)

    def empty(layout: Any) -> Any:
        if isinstance(layout, list):
            return [empty(item) for item in layout]
        return None if layout is None else wrap(torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=device), layout)

    if plan.rule is not None and plan.rule.kind == "random":
        _compute(plan, operator, dict(local))  # its generator stays in step
    if plan.rule is not None and plan.rule.absent is not None:
        return plan.rule.absent
    if _DATA_DECIDES.intersection(plan.call.func.tags):
        raise UnsupportedOperationError(
            f"{operator.name} depends on data, of which this rank, outside of {plan.call.mesh!r}, has none; redistribute first"
        )
    out = []
    for owner, layout in zip(operator.returns, plan.results or [None] * len(operator.returns), strict=True):
        out.append(empty(layout) if owner is None else values[owner])
        seen = owner is not None and isinstance(layout, Layout) and hasattr(out[-1], "_layout")
        if seen and owner in operator.outs and out[-1].shape != layout.shape:
            out[-1].data = empty(layout.replace(dtype=out[-1].dtype))  # it looks otherwise from now on
    return None if not out else out[0] if len(out) == 1 else tuple(out)


def _scratch(plan: Plan, operator: Operator, name: str, value: Any) -> Any:
    """A fresh tensor to compute an ``out=`` result in, of its local shape; it is copied to the user's tensor in its layout."""
    if value is None:
        return None
    layout = plan.results[operator.returns.index(name)] if plan.results else None
    if not isinstance(layout, Layout):
        return torch.empty_like(value).resize_(0)
    coordinates = layout.mesh.coordinates
    comm = communicator_of(layout.mesh)
    return comm.map(lambda member, like: like.new_empty(layout.local_shape(coordinates[member])), value)


def _keywords(operator: Operator, values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in operator.names[operator.positional :] if name in values}


def _as_tuple(computed: Any, operator: Operator) -> tuple[Any, ...]:
    count = len(operator.returns)
    return () if count == 0 else (computed,) if count == 1 else tuple(computed)


def _get(bound: dict[str, Any], slot: Slot) -> Any:
    value = bound[slot[0]]
    return value if slot[1] is None else value[slot[1]]


def _put(bound: dict[str, Any], slot: Slot, value: Any) -> None:
    name, index = slot
    if index is None:
        bound[name] = value
    else:
        items = list(bound[name])
        items[index] = value
        bound[name] = items
