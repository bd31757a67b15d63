"""Rules by users: the placements that an operator keeps, as a table, in the registry that the library's own rules live in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .dispatch import clear_plans
from .errors import RuleError
from .layout import Layout
from .placement import Partial, Placement, Replicate, Shard
from .rules.call import Call
from .rules.registry import register, unregister
from .rules.rule import Along, Dims, Factors, Row, Rule, Spec

Sharding = tuple[Sequence[Placement | None], Sequence[Placement | None]]


def register_sharding(op: Any) -> Callable[[Callable[..., Sequence[Sharding]]], Callable[..., Sequence[Sharding]]]:
    """A decorator that declares how ``op`` (an ``OpOverload``, or a list of them) may be sharded along ONE mesh dim.

    The decorated function gets the op's arguments (keyword-only ones by keyword), each tensor as its ``Layout`` (``.shape``,
    ``.ndim``, ``.dtype``), and returns pairs ``(output placements, input placements)``, inputs in order with None for
    what is no tensor. Meshes of more dims combine rows.
    A rule that the library has for the op is replaced. Check it with ``dtensor.testing.verify_rule(op)``.

    Raises:
        RuleError: a row that does not fit the op's arguments or results, when it is first used.

    >>> import torch, dtensor as dt
    >>> @torch.library.custom_op("doc::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2
    >>> _ = twice.register_fake(lambda x: torch.empty_like(x))
    >>> @dt.register_sharding(torch.ops.doc.twice.default)
    ... def _(x):
    ...     return [([dt.Shard(d)], [dt.Shard(d)]) for d in range(x.ndim)] + [([dt.Partial()], [dt.Partial()])]
    >>> x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> twice(x).placements
    (Shard(dim=0),)
    """
    overloads = list(op) if isinstance(op, (list, tuple)) else [op]
    for overload in overloads:
        if not isinstance(overload, torch._ops.OpOverload):
            raise RuleError(
                f"register_sharding takes an operator's overload, torch.ops.aten.add.Tensor for example, got {overload!r}"
            )

    def declare(table: Callable[..., Sequence[Sharding]]) -> Callable[..., Sequence[Sharding]]:
        for overload in overloads:
            schema = overload._schema
            name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            unregister(name)
            register(name, Rule(lambda call: factors_of_table(table, call), kind="custom", source=table.__name__))
        clear_plans()
        return table

    return declare


def factors_of_table(table: Callable[..., Sequence[Sharding]], call: Call) -> Factors:
    """The rows of a user's table, each shard row a factor of its own."""
    given = [a for a in call.func._schema.arguments if a.name in call.arguments]
    arguments = [call.arguments[a.name] for a in given]
    positional = [call.arguments[a.name] for a in given if not a.kwarg_only]
    named = {a.name: call.arguments[a.name] for a in given if a.kwarg_only}
    operand_dims: list[list[list[str]]] = [[[] for _ in layout.shape] for layout in call.operands]
    metas = [meta for meta in call.results if meta is not None]
    result_dims: list[list[list[str]]] = [[[] for _ in meta.shape] for meta in metas]
    sizes: dict[str, int] = {}
    rows = []
    for k, (outputs, inputs) in enumerate(table(*positional, **named)):
        flat = _tensor_placements(inputs, arguments)
        if len(flat) != len(call.operands) or len(outputs) != len(metas):
            raise RuleError(
                f"register_sharding for {call.func}: row {k} has {len(flat)} tensor inputs and {len(outputs)} outputs, "
                f"the op has "
                f"{len(call.operands)} and {len(metas)}"
            )
        label = f"@{k}"
        for placement, dims, layout in zip(flat, operand_dims, call.operands, strict=True):
            if isinstance(placement, Shard):
                d = placement.dim % len(dims)
                sizes.setdefault(label, layout.shape[d])
                dims[d] += _reading(label, sizes, layout.shape[d])
        for result, dims, meta in zip(outputs, result_dims, metas, strict=True):
            if isinstance(result, Shard):
                d = result.dim % len(dims)
                dims[d] += _reading(label, sizes, meta.shape[d])
        sharded = label in sizes
        rows.append(
            Row(tuple(_spec(p, label) for p in flat), tuple(_spec(p, label) for p in outputs), label if sharded else None)
        )
    freeze: Callable[[list[list[list[str]]]], tuple[Dims, ...]] = lambda side: tuple(tuple(map(tuple, dims)) for dims in side)  # noqa: E731
    return Factors(freeze(operand_dims), freeze(result_dims), sizes, rows=tuple(rows))


def _reading(label: str, sizes: dict[str, int], size: int) -> list[str]:
    """The factor, and what is inside it where the dim is a multiple of it."""
    base = sizes.setdefault(label, size)
    if base == size:
        return [label]
    if not base or size % base:
        raise RuleError(f"a row shards dims of {base} and {size} elements together, which do not divide; leave that row out")
    inside = f"{label}x{size // base}".replace("@", "in")
    sizes[inside] = size // base
    return [label, inside]


def _tensor_placements(inputs: Sequence[Placement | None], arguments: list[Any]) -> list[Placement]:
    """The placements that belong to tensors, lists of tensors flattened."""
    flat: list[Placement] = []
    given = list(inputs)
    for k, argument in enumerate(arguments):
        items = argument if isinstance(argument, (list, tuple)) else [argument]
        placements = given[k] if k < len(given) else None
        several = list(placements) if isinstance(placements, (list, tuple)) else [placements] * len(items)
        flat += [placement or Replicate() for item, placement in zip(items, several, strict=True) if isinstance(item, Layout)]
    return flat


def _spec(placement: Placement | None, label: str) -> Spec:
    match placement:
        case Shard():
            return Along(label)
        case Partial():
            return placement
        case _:
            return Replicate()
