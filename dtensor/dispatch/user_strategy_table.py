"""A user's table of placements read as factors: every form of a row that makes sense, and what is wrong with others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import PlacementError, RuleError
from ..layout.layout import Layout
from ..placement import Partial, Placement, Replicate, Shard, normalize
from ..propagation.op_schema import arguments_given, operator_of
from ..rules.call import Call
from ..rules.rule import Along, Factors, Row, Spec

Placed = Placement | None | Sequence[Placement | None]  # of one argument or result: a tensor, no tensor, a list of tensors
Sharding = tuple[Placed | Sequence[Placed], Placed | Sequence[Placed]]
Table = Callable[..., Iterable[Sharding]]


class _Misfit(Exception):
    """What is wrong with a row."""


def factors_of_table(table: Table, call: Call, outs: Sequence[str] = ()) -> Factors:
    """The rows of a user's table, each shard row a factor of its own. ``outs`` names what the table's operator writes results to.

    Raises:
        RuleError: see ``register_sharding``.
    """
    metas = [meta for meta in call.results if meta is not None]
    shapes = [layout.shape for layout in call.operands], [meta.shape for meta in metas]
    dims: tuple[list[list[tuple[str, ...]]], ...] = tuple([[() for _ in shape] for shape in side] for side in shapes)
    sizes: dict[str, int] = {}
    rows = []
    for k, row in enumerate(_asked(table, call, outs)):
        try:
            placed = _read(row, call, shapes[0], shapes[1], len(outs))
            factor = _factor(f"@{k}", placed, shapes, dims, sizes)
        except (_Misfit, PlacementError) as error:
            raise RuleError(f"register_sharding for {call.func}: row {k}, {row!r}: {error}") from None
        specs = [tuple(_spec(placement, factor) for placement in side) for side in placed]
        rows.append(Row(specs[0], specs[1], factor))
    operands, results = (tuple(map(tuple, side)) for side in dims)
    return Factors(operands, results, sizes, rows=tuple(rows))


def _asked(table: Table, call: Call, outs: Sequence[str]) -> list[Any]:
    arguments, taken = arguments_given(call.func), inspect.signature(table).parameters
    positional = [call.arguments[a.name] for a in arguments if not a.kwarg_only]
    named = {a.name: call.arguments[a.name] for a in arguments if a.kwarg_only and a.name in call.arguments}
    named |= {name: meta for name, meta in zip(outs, call.results, strict=False) if name in taken}
    try:
        inspect.signature(table).bind(*positional, **named)
    except TypeError as error:
        raise RuleError(f"register_sharding for {call.func}: its table {error}; the operator is {call.func._schema}") from None
    rows = table(*positional, **named)
    if isinstance(rows, (str, Placement)) or not isinstance(rows, Iterable):
        raise RuleError(f"register_sharding for {call.func}: its table returned {rows!r}; return a list of rows, {_FORM}")
    return list(rows)


_FORM = "([Shard(0)], [Shard(0), None]) for example: outputs, inputs"


def _read(
    row: Any, call: Call, operands: Sequence[Any], results: Sequence[Any], written: int
) -> tuple[list[Placement], list[Placement]]:
    """The placements of all operands and of all results, of which ``written`` may be given as inputs, too."""
    if not isinstance(row, (list, tuple)) or len(row) != 2:
        raise _Misfit(f"a strategy is a pair, {_FORM}")
    outputs = _checked(_outputs(row[0], call, len(results)), results)
    inputs, outs = _inputs(row[1], call, written)
    if outs and [p for p in outs if p is not None] not in ([], outputs):
        raise _Misfit(f"out= tensors are the outputs, {outputs}, and cannot be placed otherwise; leave them out")
    placed = _checked(inputs, operands)
    if all(isinstance(placement, Replicate) for placement in placed) and not all(map(_as_computed, outputs)):
        raise _Misfit("no input is sharded or partial, so every rank computes the full output: write Replicate() for it")
    return placed, outputs


def _as_computed(output: Placement) -> bool:
    """Whether the whole value on every rank is an output placed like this: their mean or maximum is, their sum is not."""
    return isinstance(output, Replicate) or (isinstance(output, Partial) and output.reduce_op in ("avg", "max", "min"))


def _checked(placements: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Placement]:
    checked = [normalize([placement], 1, len(shape))[0] for placement, shape in zip(placements, shapes, strict=True)]
    for placement in checked:
        if isinstance(placement, Shard) and (placement.sizes is not None or placement.level is not None):
            raise _Misfit(
                f"a strategy names the dim that is sharded, not the shard sizes: write Shard({placement.dim}) for {placement!r}"
            )
    return checked


def _outputs(given: Any, call: Call, count: int) -> list[Any]:
    """One placement for each of ``count`` result tensors."""
    listed = [str(r.type).startswith("List") for r in call.func._schema.returns if "Tensor" in str(r.type)]
    if _alone(given):
        if len(listed) != 1:
            raise _Misfit(f"one placement, {given!r}, is given for {len(listed)} outputs; write a list with a placement for each")
        given = [given]
    if len(given) == len(call.func._schema.returns) > len(listed):  # None for what is no tensor
        given = [item for item in given if item is not None]
    flat: list[Any] = []
    for k, item in enumerate(given):
        one_for_all = len(given) == len(listed) and listed[k] and sum(listed) == 1 and _alone(item)
        flat += [item] * (count - len(listed) + 1) if one_for_all else [item] if _alone(item) or item is None else item
    if len(flat) != count:
        raise _Misfit(f"{len(flat)} outputs, but the operator has {count}: {call.func._schema}")
    return flat


def _alone(given: Any) -> bool:
    """Whether it is (meant as) one placement, not a list of them."""
    return given is not None and not isinstance(given, (list, tuple))


def _inputs(given: Any, call: Call, written: int) -> tuple[list[Any], list[Any]]:
    """One placement for each operand; and what the row says of ``out=`` tensors."""
    operator, arguments = operator_of(call.func), arguments_given(call.func)
    values = [call.arguments.get(a.name) for a in arguments]
    if _alone(given):
        holding = [k for k, value in enumerate(values) if _layouts(value)]
        if len(holding) != 1:
            raise _Misfit(
                f"one placement, {given!r}, is given for {len(holding)} tensor inputs; write a list with one for each argument"
            )
        given = [given if k == holding[0] else None for k in range(len(values))]
    given = list(given or ())
    given, outs = given[: len(arguments)], given[len(arguments) :]
    if len(outs) not in (0, written):
        raise _Misfit(f"{len(given) + len(outs)} inputs, but the operator has {len(arguments)} arguments: {call.func._schema}")
    flat: list[Any] = []
    for k, (argument, value) in enumerate(zip(arguments, values, strict=True)):
        number = argument.name in operator.number_operands and isinstance(value, (int, float, complex))
        flat += _of_argument(argument, value, given[k] if k < len(given) else None, number)
    return flat, outs


def _of_argument(argument: Any, value: Any, placed: Any, number: bool) -> list[Any]:
    """The placements of the tensors that one argument holds. A number in a tensor's place is an operand that is never moved."""
    listed = isinstance(value, (list, tuple)) and "Tensor" in str(argument.type)
    if not _layouts(value):
        if "Tensor" not in str(argument.type) and placed not in (None, Replicate()):
            raise _Misfit(f"{placed!r} is given for {argument.name}, which is not a tensor: write None for it")
        return [Replicate()] * number
    several = placed if listed and isinstance(placed, (list, tuple)) else [placed] * (len(value) if listed else 1)
    if listed and len(several) != len(value):
        raise _Misfit(f"{len(several)} placements for {argument.name}, which is a list of {len(value)} tensors")
    found = [p for p, item in zip(several, value if listed else [value], strict=True) if isinstance(item, Layout)]
    if None in found:
        raise _Misfit(
            f"there is no placement for the tensor {argument.name}: write Replicate() if the operator needs the full tensor"
        )
    return found


def _layouts(value: Any) -> list[Layout]:
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Layout)]


# --- rows as factors ----------------------------------------------------------------------------------------------------
def _factor(
    label: str,
    placed: tuple[list[Placement], list[Placement]],
    shapes: tuple[Sequence[Any], Sequence[Any]],
    dims: tuple[list[list[tuple[str, ...]]], ...],
    sizes: dict[str, int],
) -> str | None:
    """The factor that a row shards, entered as one more reading of every dim that the row shards; None if it shards none.

    Dims of different sizes are cut together in blocks of the smallest: where that has 3 elements and another 6, a block of one is
    two elements of the other.
    """
    cut = [
        (side, i, p.dim, shapes[side][i][p.dim])
        for side, placements in enumerate(placed)
        for i, p in enumerate(placements)
        if isinstance(p, Shard)
    ]
    if not cut:
        return None
    base = sizes[label] = min(size for *_, size in cut)
    for side, i, d, size in cut:
        times = size // base if base else 1
        if size != base * times:
            raise _Misfit(
                f"it shards dims of sizes {base} and {size} together, which are not multiples of each other; "
                "leave this strategy out for these sizes"
            )
        inside = f"{label}/{times}"
        sizes[inside] = times
        dims[side][i][d] += (label,) if times == 1 else (label, inside)
    return label


def _spec(placement: Placement, factor: str | None) -> Spec:
    match placement:
        case Shard():
            return Along(factor or "")
        case Partial():
            return placement
        case _:
            return Replicate()
