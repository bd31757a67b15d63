"""Rules by users, in the registry that the library's own live in: in the library's words, or as a table of placements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from ..base.torch_internals import OpOverloadPacket
from ..errors import RuleError
from ..propagation.schema import arguments_given, operator_of, overload_of
from ..rules.call import Call
from ..rules.factoring import by
from ..rules.folds import Fold
from ..rules.notation import EACH, Pattern, is_picked, parse
from ..rules.registry import overload_served, register, rules, unregister
from ..rules.rule import Choice, Factors, Kernel, LocalView, Rule
from ..rules.verbs import by_pattern
from .dispatcher import clear_plans
from .placement_tables import Table, factors_of_table

_REPLACED: dict[str, Rule | None] = {}  # by the key of a user's rule: what was there before


@overload
def register_sharding(op: Any, *, samples: Sequence[Any] = ()) -> Callable[[Table], Table]: ...


@overload
def register_sharding(
    op: Any,
    notation: str | by,
    *,
    sums: str | Mapping[str, Any] = "",
    reduce: Any = "sum",
    partials: Any = (),
    kernel: Callable[..., Any] | Kernel | Fold | None = None,
    kernels: Mapping[str, Kernel] | None = None,
    sizes: Mapping[str, str | Callable[[Call], int]] | None = None,
    nonempty: str = "",
    when: Callable[[Choice], bool] | None = None,
    local_args: Callable[[Call, LocalView], dict[str, Any]] | None = None,
    local: Callable[..., Any] | None = None,
    plain: tuple[str, ...] = (),
    samples: Sequence[Any] = (),
) -> None: ...


def register_sharding(op: Any, notation: str | by | None = None, *, samples: Sequence[Any] = (), **words: Any) -> Any:
    """Declare how ``op`` may be sharded: by notation, in one call; or, without one, as a decorator of a table of placements.

    The notation and its words are those of the library's own rules (table: ``docs/sharding_rules.md``). A rule that the library
    has for the op is replaced until :func:`unregister_sharding`. Check yours with ``dtensor.testing.verify_rule(op)``.

    Args:
        op: an overload, ``torch.ops.aten.add.Tensor``; an operator that has one signature, ``torch.ops.mylib.halve``; what
            ``torch.library.custom_op`` returned; or a list of these.
        notation: ``"m k, k n -> m n"``, ``"each: a* [@dim] b* -> each: a* [@dim] b*"``, ``by("left", {True: ..., False: ...})``.
        sums: letters, groups and picked dims whose shards leave terms, combined by ``reduce``; or what each leaves.
        partials: how terms pass: ``linear("x")``, ``monotone``, ``"sum,R -> sum"``, or a tuple of these.
        kernel: what computes with blocks of the dims in brackets: ``kernel(at, *args, **kwargs)`` on locals, a ``Kernel`` that
            also says what it costs, or a ``Fold``. ``kernels``: by letter.
        sizes: letters whose sizes an argument says, ``{"r": "factor"}``.
        nonempty: letters whose blocks must have elements, ``"*"`` for all.
        when: a predicate on a full choice, for what depends on more.
        local_args: arguments to replace on one rank, ``local_args(call, view) -> {name: value}``: a size argument, an offset.
        local: a function to call on locals instead of the op.
        plain: arguments that may be plain tensors, the same on all ranks, beside DTensors.
        samples: arguments that ``python -m dtensor verify`` and ``verify_rule`` call it with: tuples, or
            ``dtensor.testing.Sample`` s.

    A table, the decorated function, gets the op's arguments (keyword-only ones by keyword, ``out=`` ones if it names them, as the
    ``.shape`` and ``.dtype`` of the result), each tensor as its ``Layout`` (``.shape``, ``.ndim``, ``.dtype``), and returns rows
    ``(outputs, inputs)`` for ONE mesh dim: a placement for each tensor, in the order of the schema, None for what is no tensor. A
    list of tensors takes a list of placements, or one for all of them; an optional tensor that is left out takes None or
    anything; where there is one tensor only, its placement may stand alone. Arguments at the end that are no tensors may be left
    out. ``out=`` tensors are the outputs: a row says nothing of them, or the same again. Meshes of more dims combine rows.

    Raises:
        RuleError: ``op`` is none of these; the notation cannot be read, or names what the operator lacks; when first used, a row
            that does not fit the op's arguments or results.

    >>> import torch, dtensor as dt
    >>> @torch.library.custom_op("doc::twice", mutates_args=())
    ... def twice(x: torch.Tensor) -> torch.Tensor:
    ...     return x * 2
    >>> _ = twice.register_fake(lambda x: torch.empty_like(x))
    >>> dt.register_sharding(twice, "s* -> s*", partials=dt.rules.linear())
    >>> x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> twice(x).placements
    (Shard(dim=0),)
    >>> @dt.register_sharding(twice)  # the same as a table
    ... def _(x):
    ...     return [(dt.Shard(d), dt.Shard(d)) for d in range(x.ndim)] + [(dt.Partial(), dt.Partial())]
    >>> twice(x).placements
    (Shard(dim=0),)
    """
    overloads = _overloads(op)
    if notation is not None:
        return _declare({found: _by_words(found, notation, samples, words) for found in overloads})
    if words:
        raise RuleError(f'register_sharding takes {", ".join(sorted(words))} with a notation only, for example "s* -> s*"')
    return functools.partial(_declare_table, overloads, samples)


def unregister_sharding(op: Any) -> None:
    """Forget what ``register_sharding`` declared for ``op``; a rule that the library has for it is back.

    Raises:
        RuleError: ``op`` is no operator, or nothing was declared for it.

    >>> import torch, dtensor as dt
    >>> dt.register_sharding(torch.ops.aten.relu.default, "s* -> s*")
    >>> dt.unregister_sharding(torch.ops.aten.relu.default)

    No communication.
    """
    for key in map(_key, _overloads(op)):
        if key not in _REPLACED:
            raise RuleError(f"unregister_sharding: nothing was registered for {key}")
        unregister(key)
        before = _REPLACED.pop(key)
        if before is not None:
            register(key, before)
    clear_plans()


def _declare_table(overloads: Sequence[Any], samples: Sequence[Any], table: Table) -> Table:
    if not callable(table):
        raise RuleError(f"register_sharding decorates a function that returns strategies, got {table!r}")
    _declare({found: _by_table(table, samples, operator_of(found).outs) for found in overloads})
    return table


def _declare(made: Mapping[Any, Rule]) -> None:
    """Each overload's rule, in place of what it had."""
    for key, rule in ((_key(found), rule) for found, rule in made.items()):
        _REPLACED.setdefault(key, rules().get(key))
        unregister(key)
        register(key, rule)
    clear_plans()


def _by_table(table: Table, samples: Sequence[Any], outs: tuple[str, ...]) -> Rule:
    """A table sees the values of numbers and may ask them, so each value has a plan of its own."""
    factors: Callable[[Call], Factors] = lambda call: factors_of_table(table, call, outs)  # noqa: E731
    return Rule(factors, kind="custom", floats_matter=True, samples=tuple(samples))


def _by_words(overload: Any, notation: str | by, samples: Sequence[Any], words: dict[str, Any]) -> Rule:
    """What is a function of the call may ask the values of numbers, as a table may."""
    for text in (notation,) if isinstance(notation, str) else notation.table.values():
        for one in text.split("|"):
            _check(parse(one), overload)
    kernel = words.get("kernel")
    if callable(kernel) and not isinstance(kernel, Fold):
        words = words | {"kernel": Kernel(kernel)}
    asks = any(callable(words.get(name)) for name in ("when", "local_args", "partials", "reduce"))
    try:
        return by_pattern(notation, kind="custom", floats_matter=asks, samples=tuple(samples), **words)
    except TypeError as error:
        raise RuleError(f"register_sharding for {overload}: {error}") from None


def _check(pattern: Pattern, overload: Any) -> None:
    """Raises where a notation speaks of what the operator does not have."""
    known = {argument.name: str(argument.type) for argument in arguments_given(overload)}
    tensors = [name for name in known if name in operator_of(overload).tensors]
    terms = (*pattern.operands, *pattern.results)
    said = {dim[0].strip("@!") for term in terms for dim in term.dims if is_picked(dim)}
    said |= {term.name for term in pattern.operands} - {"", EACH}
    results = [result for result in overload._schema.returns if "Tensor" in str(result.type)]
    problem = ""
    if lacking := sorted(said.difference(known)):
        problem = f"names {', '.join(lacking)}, which the operator does not have"
    elif not pattern.named and len(pattern.operands) > len(tensors) and not any("List" in known[name] for name in tensors):
        problem = f"has {len(pattern.operands)} operands, but the operator takes {len(tensors)} tensors"
    elif results and pattern.results[0].name != EACH and len(pattern.results) != len(results):
        problem = f"has {len(pattern.results)} results, but the operator gives {len(results)}"
    if problem:
        raise RuleError(f"register_sharding for {overload}: {pattern.text!r} {problem}: {overload._schema}")


def _overloads(op: Any) -> list[Any]:
    return [_overload(item) for item in (op if isinstance(op, (list, tuple)) else [op])]


def _overload(op: Any) -> Any:
    found = overload_of(op)
    if found is not None:
        return found
    if isinstance(op, OpOverloadPacket):
        names = ", ".join(f"torch.ops.{getattr(op, name)}" for name in op.overloads())
        raise RuleError(f"{op} has several overloads with different signatures; register one, or a list of {names}")
    raise RuleError(
        "register_sharding takes an operator overload, such as torch.ops.aten.add.Tensor, or the result "
        f"of torch.library.custom_op, got {op!r}"
    )


def _key(overload: Any) -> str:
    """The rule's name in the registry: the operator's where its overloads take the same arguments, else that overload's alone."""
    name, which = overload._schema.name, overload_served(overload)
    if which:
        return f"{name}.{which}"
    return name if overload_of(overload.overloadpacket) is not None else f"{name}.default"
