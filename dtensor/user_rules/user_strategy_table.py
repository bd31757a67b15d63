"""User strategy tables: convert a table of placements, as users write it, to the factors of a rule, or raise an error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import PlacementError, RuleError
from ..layout.layout import Layout
from ..placement import Partial, Placement, Replicate, Shard, normalize_placements
from ..propagation.op_schema import arguments_without_out, operator_schema_of
from ..rules.call import Call
from ..rules.rule import Along, Factors, Spec, Strategy

Placed = Placement | None | Sequence[Placement | None]  # for one argument or result: a tensor, no tensor, a list of tensors
Sharding = tuple[Placed | Sequence[Placed], Placed | Sequence[Placed]]
Table = Callable[..., Iterable[Sharding]]


class _StrategyError(Exception):
    """A strategy of a table that does not fit the call."""


def factors_of_table(table: Table, call: Call, outs: Sequence[str] = ()) -> Factors:
    """Convert a user's table of strategies to factors for one call: each strategy that shards something has its own.

    Args:
        outs: the names of ``out=`` arguments.

    Raises:
        RuleError: see ``register_sharding``.
    """
    metas = [meta for meta in call.results if meta is not None]
    shapes = [layout.shape for layout in call.operands], [meta.shape for meta in metas]
    dims: tuple[list[list[tuple[str, ...]]], ...] = tuple([[() for _ in shape] for shape in side] for side in shapes)
    sizes: dict[str, int] = {}
    strategies = []
    for k, strategy in enumerate(_call_table(table, call, outs)):
        try:
            placed = _read_strategy(strategy, call, shapes[0], shapes[1], len(outs))
            factor = _enter_factor(f"@{k}", placed, shapes, dims, sizes)
        except (_StrategyError, PlacementError) as error:
            raise RuleError(f"register_sharding for {call.func}: strategy {k}, {strategy!r}: {error}") from None
        specs = [tuple(_make_spec(placement, factor) for placement in side) for side in placed]
        strategies.append(Strategy(specs[0], specs[1], factor))
    operands, results = (tuple(map(tuple, side)) for side in dims)
    return Factors(operands, results, sizes, listed_strategies=tuple(strategies))


def _call_table(table: Table, call: Call, outs: Sequence[str]) -> list[Any]:
    """Call the user's table with the call's arguments, and return its strategies. Raise RuleError for another result."""
    arguments, taken = arguments_without_out(call.func), inspect.signature(table).parameters
    positional = [call.arguments[a.name] for a in arguments if not a.kwarg_only]
    named = {a.name: call.arguments[a.name] for a in arguments if a.kwarg_only and a.name in call.arguments}
    named |= {name: meta for name, meta in zip(outs, call.results, strict=False) if name in taken}
    try:
        inspect.signature(table).bind(*positional, **named)
    except TypeError as error:
        raise RuleError(f"register_sharding for {call.func}: its table {error}; the operator is {call.func._schema}") from None
    strategies = table(*positional, **named)
    if isinstance(strategies, (str, Placement)) or not isinstance(strategies, Iterable):
        raise RuleError(
            f"register_sharding for {call.func}: its table returned {strategies!r}; return a list of strategies, {_EXAMPLE}"
        )
    return list(strategies)


_EXAMPLE = "([Shard(0)], [Shard(0), None]) for example: outputs, inputs"


def _read_strategy(
    strategy: Any, call: Call, operands: Sequence[Any], results: Sequence[Any], written: int
) -> tuple[list[Placement], list[Placement]]:
    """Return the placements of all operands, and those of all results, in one strategy of a user's table.

    Args:
        written: the number of ``out=`` arguments, which may be given as inputs, too.
    """
    if not isinstance(strategy, (list, tuple)) or len(strategy) != 2:
        raise _StrategyError(f"a strategy is a pair, {_EXAMPLE}")
    outputs = _check_placements(_read_outputs(strategy[0], call, len(results)), results)
    inputs, outs = _read_inputs(strategy[1], call, written)
    if outs and [p for p in outs if p is not None] not in ([], outputs):
        raise _StrategyError(f"out= tensors are the outputs, {outputs}, and cannot be placed otherwise; leave them out")
    placed = _check_placements(inputs, operands)
    if all(isinstance(placement, Replicate) for placement in placed) and not all(map(_is_full_result, outputs)):
        raise _StrategyError("no input is sharded or partial, so every rank computes the full output: write Replicate() for it")
    return placed, outputs


def _is_full_result(output: Placement) -> bool:
    """Return True if equal results on all ranks can have this placement: replicated, or a partial mean, maximum or minimum."""
    return isinstance(output, Replicate) or (isinstance(output, Partial) and output.reduce_op in ("avg", "max", "min"))


def _check_placements(placements: Sequence[Any], shapes: Sequence[Sequence[int]]) -> list[Placement]:
    """Normalize the placements of a strategy for tensors of these shapes. Raise if one has shard sizes or a level."""
    checked = [normalize_placements([placement], 1, len(shape))[0] for placement, shape in zip(placements, shapes, strict=True)]
    for placement in checked:
        if isinstance(placement, Shard) and (placement.sizes is not None or placement.level is not None):
            raise _StrategyError(
                f"a strategy names the dim that is sharded, not the shard sizes: write Shard({placement.dim}) for {placement!r}"
            )
    return checked


def _read_outputs(given: Any, call: Call, count: int) -> list[Any]:
    """Expand the outputs of a strategy to one placement for each of ``count`` result tensors."""
    listed = [str(r.type).startswith("List") for r in call.func._schema.returns if "Tensor" in str(r.type)]
    if _is_single(given):
        if len(listed) != 1:
            raise _StrategyError(
                f"one placement, {given!r}, is given for {len(listed)} outputs; write a list with a placement for each"
            )
        given = [given]
    if len(given) == len(call.func._schema.returns) > len(listed):  # None for results that are no tensors
        given = [item for item in given if item is not None]
    flat: list[Any] = []
    for k, item in enumerate(given):
        one_for_all = len(given) == len(listed) and listed[k] and sum(listed) == 1 and _is_single(item)
        flat += [item] * (count - len(listed) + 1) if one_for_all else [item] if _is_single(item) or item is None else item
    if len(flat) != count:
        raise _StrategyError(f"{len(flat)} outputs, but the operator has {count}: {call.func._schema}")
    return flat


def _is_single(given: Any) -> bool:
    """Return True if ``given`` is one placement (or another object), not None and not a list of placements."""
    return given is not None and not isinstance(given, (list, tuple))


def _read_inputs(given: Any, call: Call, written: int) -> tuple[list[Any], list[Any]]:
    """Expand the inputs of a strategy to one placement for each operand. Also return those that it gives for ``out=`` tensors."""
    operator, arguments = operator_schema_of(call.func), arguments_without_out(call.func)
    values = [call.arguments.get(a.name) for a in arguments]
    if _is_single(given):
        holding = [k for k, value in enumerate(values) if _layouts_in(value)]
        if len(holding) != 1:
            raise _StrategyError(
                f"one placement, {given!r}, is given for {len(holding)} tensor inputs; write a list with one for each argument"
            )
        given = [given if k == holding[0] else None for k in range(len(values))]
    given = list(given or ())
    given, outs = given[: len(arguments)], given[len(arguments) :]
    if len(outs) not in (0, written):
        raise _StrategyError(
            f"{len(given) + len(outs)} inputs, but the operator has {len(arguments)} arguments: {call.func._schema}"
        )
    flat: list[Any] = []
    for k, (argument, value) in enumerate(zip(arguments, values, strict=True)):
        number = argument.name in operator.number_operands and isinstance(value, (int, float, complex))
        flat += _read_argument(argument, value, given[k] if k < len(given) else None, number)
    return flat, outs


def _read_argument(argument: Any, value: Any, placed: Any, number: bool) -> list[Any]:
    """Return the placements of the tensors in one argument. A number in place of a tensor is one replicated operand."""
    listed = isinstance(value, (list, tuple)) and "Tensor" in str(argument.type)
    if not _layouts_in(value):
        if "Tensor" not in str(argument.type) and placed not in (None, Replicate()):
            raise _StrategyError(f"{placed!r} is given for {argument.name}, which is not a tensor: write None for it")
        return [Replicate()] * number
    several = placed if listed and isinstance(placed, (list, tuple)) else [placed] * (len(value) if listed else 1)
    if listed and len(several) != len(value):
        raise _StrategyError(f"{len(several)} placements for {argument.name}, which is a list of {len(value)} tensors")
    found = [p for p, item in zip(several, value if listed else [value], strict=True) if isinstance(item, Layout)]
    if None in found:
        raise _StrategyError(
            f"there is no placement for the tensor {argument.name}: write Replicate() if the operator needs the full tensor"
        )
    return found


def _layouts_in(value: Any) -> list[Layout]:
    return [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Layout)]


# --- strategies as factors ----------------------------------------------------------------------------------------------------
def _enter_factor(
    label: str,
    placed: tuple[list[Placement], list[Placement]],
    shapes: tuple[Sequence[Any], Sequence[Any]],
    dims: tuple[list[list[tuple[str, ...]]], ...],
    sizes: dict[str, int],
) -> str | None:
    """Add a strategy's factor to each dim that it shards, and return it; None if it shards no dim.

    Dims of different sizes are sharded together by the smallest one: if that has 3 elements and another has 6, one element of the
    smallest goes with two elements of the other.
    """
    sharded = [
        (side, i, p.dim, shapes[side][i][p.dim])
        for side, placements in enumerate(placed)
        for i, p in enumerate(placements)
        if isinstance(p, Shard)
    ]
    if not sharded:
        return None
    base = sizes[label] = min(size for *_, size in sharded)
    for side, i, d, size in sharded:
        times = size // base if base else 1
        if size != base * times:
            raise _StrategyError(
                f"it shards dims of sizes {base} and {size} together, which are not multiples of each other; "
                "leave this strategy out for these sizes"
            )
        inside = f"{label}/{times}"
        sizes[inside] = times
        dims[side][i][d] += (label,) if times == 1 else (label, inside)
    return label


def _make_spec(placement: Placement, factor: str | None) -> Spec:
    """Return the spec of a placement: along the factor for ``Shard``."""
    match placement:
        case Shard():
            return Along(factor or "")
        case Partial():
            return placement
        case _:
            return Replicate()
