"""Register sharding rules of users: a notation with keywords, or a table of placements, into the registry of all rules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, get_overloads, overload

from ..base.torch_internals import OpOverloadPacket
from ..dispatch import clear_plans
from ..errors import PlacementError, RuleError
from ..placement import REDUCE_OPS
from ..propagation.op_schema import arguments_without_out, operator_schema_of, resolve_overload
from ..rules.call import Call
from ..rules.declare import make_blockwise_rule
from ..rules.declared_factors import by
from ..rules.folds import Fold
from ..rules.notation import EACH, Pattern, is_selected, parse_notation
from ..rules.partial_rules import CombinedPartials, combine_partials, linear, one_of
from ..rules.registry import overload_without_out, register, rules, unregister
from ..rules.rule import Factors, Kernel, LocalView, Rule, StrategyChoice, parse_labels, parse_partial_strategy
from .user_strategy_table import Table, factors_of_table

_REPLACED: dict[str, Rule | None] = {}  # by the key of a user's rule: the rule that it replaced


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
    when: Callable[[StrategyChoice], bool] | None = None,
    local_args: Callable[[Call, LocalView], dict[str, Any]] | None = None,
    local: Callable[..., Any] | None = None,
    plain: tuple[str, ...] = (),
    samples: Sequence[Any] = (),
) -> None: ...


def register_sharding(op: Any, notation: str | by | None = None, *, samples: Sequence[Any] = (), **words: Any) -> Any:
    """Declare how ``op`` may be sharded: by notation, in one call, or without one as a decorator of a table of strategies.

    The notation and its keywords are those of the library's own rules (table: ``docs/sharding_rules.md``). The library's rule for
    the op, if any, is replaced until :func:`unregister_sharding`. Check your rule with ``dtensor.testing.verify_rule(op)``.

    Args:
        op: an overload, ``torch.ops.aten.add.Tensor``; an operator that has one signature, ``torch.ops.mylib.halve``; the
            result of ``torch.library.custom_op``; or a list of these.
        notation: ``"m k, k n -> m n"``, ``"each: a* [@dim] b* -> each: a* [@dim] b*"``, ``by("left", {True: ..., False: ...})``.
        sums: letters, groups and selected dims with shards that give partial results, reduced by ``reduce``; or a dict from each
            to its reduction.
        partials: how partial operands pass to results: ``linear("x")``, ``monotone``, ``"sum,R -> sum"``, or a tuple of these.
        kernel: the function that computes with shards of the dims in brackets: ``kernel(at, *args, **kwargs)`` on local tensors,
            a ``Kernel`` that also says its cost, or a ``Fold``.
        kernels: the same by letter.
        sizes: letters that have their size from an argument, ``{"r": "factor"}``.
        nonempty: letters whose shards must have elements, ``"*"`` for all.
        when: a predicate on a complete choice of strategies, for conditions that the notation cannot say.
        local_args: arguments to replace on one rank, ``local_args(call, view) -> {name: value}``: a size argument, an offset.
        local: a function to call on local tensors instead of the op.
        plain: arguments that may be plain tensors next to DTensors; they must be the same on all ranks.
        samples: arguments that ``python -m dtensor verify`` and ``verify_rule`` call it with: tuples, or
            ``dtensor.testing.Sample`` s.

    The decorated function, a table, gets the op's arguments: each tensor as its ``Layout`` (``.shape``, ``.ndim``, ``.dtype``),
    keyword-only arguments by keyword, and ``out=`` arguments, if it has parameters for them, as the ``.shape`` and ``.dtype`` of
    the result. It returns strategies ``(outputs, inputs)`` for ONE mesh dim, and meshes of more dims combine them. Each side has
    a placement for each tensor, in the order of the schema, and None for an argument that is no tensor:

    - A list of tensors takes a list of placements, or one placement for all of them.
    - An optional tensor that is left out takes None or anything.
    - If a side has one tensor only, its placement may be given without a list.
    - Arguments at the end that are no tensors may be left out.
    - ``out=`` tensors are the outputs: a strategy says nothing of them, or the placements of the outputs again.

    Raises:
        RuleError: ``op`` is none of these, or the notation cannot be read or does not fit the operator. When the rule is first
            used: a strategy of the table does not fit the op's arguments or results.

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
    overloads = _overloads_of(op)
    if notation is not None:
        return _register_rules({each: _make_notation_rule(each, notation, samples, words) for each in overloads})
    if words:
        raise RuleError(f'register_sharding takes {", ".join(sorted(words))} with a notation only, for example "s* -> s*"')
    return functools.partial(_register_table, overloads, samples)


def unregister_sharding(op: Any) -> None:
    """Remove the rule that ``register_sharding`` declared for ``op``, and restore the rule that it replaced, if any.

    Raises:
        RuleError: ``op`` is no operator, or nothing was declared for it.

    >>> import torch, dtensor as dt
    >>> dt.register_sharding(torch.ops.aten.relu.default, "s* -> s*")
    >>> dt.unregister_sharding(torch.ops.aten.relu.default)

    No communication.
    """
    for key in map(_rule_key, _overloads_of(op)):
        if key not in _REPLACED:
            raise RuleError(f"unregister_sharding: nothing was registered for {key}")
        unregister(key)
        before = _REPLACED.pop(key)
        if before is not None:
            register(key, before)
    clear_plans()


def _register_table(overloads: Sequence[Any], samples: Sequence[Any], table: Table) -> Table:
    """Register a user's function that lists strategies as the rule of these overloads, and return the function (a decorator)."""
    if not callable(table):
        raise RuleError(f"register_sharding decorates a function that returns strategies, got {table!r}")
    _register_rules({each: _make_table_rule(table, samples, operator_schema_of(each).outs) for each in overloads})
    return table


def _register_rules(by_overload: Mapping[Any, Rule]) -> None:
    """Register one rule for each overload, keep the rules that they replace, and clear the plan cache."""
    for key, rule in ((_rule_key(each), rule) for each, rule in by_overload.items()):
        _REPLACED.setdefault(key, rules().get(key))
        unregister(key)
        register(key, rule)
    clear_plans()


def _make_table_rule(table: Table, samples: Sequence[Any], outs: tuple[str, ...]) -> Rule:
    """Make the rule of a user's table. The table may read the values of numbers, so each value has its own plan."""
    factors: Callable[[Call], Factors] = lambda call: factors_of_table(table, call, outs)  # noqa: E731
    return Rule(factors, kind="custom", floats_matter=True, samples=tuple(samples))


def _make_notation_rule(overload: Any, notation: str | by, samples: Sequence[Any], words: dict[str, Any]) -> Rule:
    """Make the rule of a user's notation and keywords. Raise ``RuleError`` if they do not fit the operator."""
    if unknown := sorted(words.keys() - _ACCEPTED):
        raise RuleError(
            f"register_sharding for {overload}: unexpected keyword argument {unknown[0]!r}; with a notation it takes "
            f"{', '.join(sorted(_ACCEPTED))}"
        )
    texts = [notation] if isinstance(notation, str) else list(notation.table.values())
    patterns = [parse_notation(one) for text in texts for one in text.split("|")]
    for pattern in patterns:
        _check_pattern(pattern, overload)
    _check_keywords(patterns, overload, words)
    kernel = words.get("kernel")
    if callable(kernel) and not isinstance(kernel, Fold):
        words = words | {"kernel": Kernel(kernel)}
    reads_numbers = any(callable(words.get(name)) for name in ("when", "local_args", "partials", "reduce"))
    return make_blockwise_rule(notation, kind="custom", floats_matter=reads_numbers, samples=tuple(samples), **words)


_ACCEPTED = frozenset(inspect.signature(get_overloads(register_sharding)[1]).parameters) - {"op", "notation", "samples"}


def _check_pattern(pattern: Pattern, overload: Any) -> None:
    """Raise RuleError if a notation names an argument that the operator lacks, or has another number of tensors than it."""
    tensors = _tensor_arguments(overload)
    required = [name for name, kind in tensors.items() if not kind.startswith("Optional")]
    known = {argument.name for argument in arguments_without_out(overload)}
    terms = (*pattern.operands, *pattern.results)
    selected = {dim[0].strip("@!") for term in terms for dim in term.dims if is_selected(dim)}
    named = {term.name for term in pattern.operands} - {"", EACH}
    results = _result_count(overload)
    each = pattern.operands[0].name == EACH
    count, problem = len(pattern.operands), ""
    if lacking := sorted((selected | named).difference(known)):
        problem = f"names {', '.join(lacking)}, which the operator does not have"
    elif not pattern.named and count > len(tensors) and not _takes_list(overload):
        problem = f"has {count} operands, but the operator takes {len(tensors)} tensors"
    elif not pattern.named and count < len(required):
        problem = f"has {count} operands, but the operator takes {len(required)} tensors: {', '.join(required)}"
    elif pattern.named and not each and (left_out := sorted(set(required) - named)):
        problem = f"leaves out {', '.join(left_out)}: name all tensors of the operator"
    elif results and pattern.results[0].name != EACH and len(pattern.results) != results:
        problem = f"has {len(pattern.results)} results, but the operator gives {results}"
    if problem:
        raise RuleError(f"register_sharding for {overload}: {pattern.text!r} {problem}: {overload._schema}")


def _tensor_arguments(overload: Any) -> dict[str, str]:
    """Return the schema type of each argument that holds tensors, by name, without ``out=``."""
    held = operator_schema_of(overload).tensors
    return {argument.name: str(argument.type) for argument in arguments_without_out(overload) if argument.name in held}


def _takes_list(overload: Any) -> bool:
    return any("List" in kind for kind in _tensor_arguments(overload).values())


def _result_count(overload: Any) -> int:
    """Return how many results of an operator are tensors or lists of tensors."""
    return sum("Tensor" in str(result.type) for result in overload._schema.returns)


def _check_keywords(patterns: Sequence[Pattern], overload: Any, words: Mapping[str, Any]) -> None:
    """Raise RuleError if a keyword names letters that no notation has, arguments that the operator lacks, or no reduction."""
    letters = {name.strip("@!*.") for pattern in patterns for term in pattern.operands for dim in term.dims for name in dim}
    sizes, partials = words.get("sizes") or {}, words.get("partials", ())
    sums = words.get("sums", "")
    listed = combine_partials(partials)
    parts = listed.parts if isinstance(listed, CombinedPartials) else listed
    letters_named: dict[str, Set[str]] = {
        "sums": parse_labels(sums if isinstance(sums, str) else " ".join(sums)),
        "kernels": frozenset(words.get("kernels") or ()),
        "sizes": frozenset(sizes),
        "nonempty": parse_labels(words.get("nonempty", "")) - {"reduced"},
    }
    arguments = {argument.name for argument in arguments_without_out(overload)}
    arguments_named: dict[str, Set[str]] = {
        "plain": set(words.get("plain", ())),
        "sizes": {size for size in sizes.values() if isinstance(size, str)},
        "partials": {name for part in parts if isinstance(part, (linear, one_of)) for name in part.given},
    }
    for word, names in letters_named.items():
        if unknown := sorted(names - letters):
            texts = " | ".join(pattern.text for pattern in patterns)
            raise RuleError(
                f"register_sharding for {overload}: {word}= names {', '.join(unknown)}, which {texts!r} does not have"
            )
    for word, names in arguments_named.items():
        if unknown := sorted(names - arguments):
            raise RuleError(
                f"register_sharding for {overload}: {word}= names {', '.join(unknown)}, which the operator does not have: "
                f"{overload._schema}"
            )
    reductions = (words.get("reduce", "sum"), *(() if isinstance(sums, str) else sums.values()))
    for op in (each for value in reductions for each in (value if isinstance(value, tuple) else (value,))):
        if isinstance(op, str) and op not in (*REDUCE_OPS, "R"):
            raise RuleError(f"register_sharding for {overload}: {op!r} is no reduction; use one of {', '.join(REDUCE_OPS)}")
    for part in parts:
        if isinstance(part, str):
            _check_partial_strategy(part, overload)


def _check_partial_strategy(text: str, overload: Any) -> None:
    """Raise RuleError for a text of ``partials=`` that cannot be parsed, or has a wrong number of operands or results."""
    tensors, results = _tensor_arguments(overload), _result_count(overload)
    required = sum(not kind.startswith("Optional") for kind in tensors.values())
    try:
        parse_partial_strategy(text, text.partition("->")[0].count(",") + 1, text.partition("->")[2].count(",") + 1)
        fits = _takes_list(overload) or any(
            parse_partial_strategy(text, count, results) is not None for count in range(required, len(tensors) + 1)
        )
    except (PlacementError, RuleError) as error:
        raise RuleError(f"register_sharding for {overload}: partials= has {text!r}: {error}") from None
    if not fits:
        raise RuleError(
            f"register_sharding for {overload}: partials= has {text!r}, but the operator takes {len(tensors)} tensors and gives "
            f"{results}: {overload._schema}"
        )


def _overloads_of(op: Any) -> list[Any]:
    return [_find_overload(item) for item in (op if isinstance(op, (list, tuple)) else [op])]


def _find_overload(op: Any) -> Any:
    """Return the overload that ``op`` stands for. Raise RuleError if it is none, or has several signatures."""
    found = resolve_overload(op)
    if found is not None:
        return found
    if isinstance(op, OpOverloadPacket):
        names = ", ".join(f"torch.ops.{getattr(op, name)}" for name in op.overloads())
        raise RuleError(f"{op} has several overloads with different signatures; register one, or a list of {names}")
    raise RuleError(
        "register_sharding takes an operator overload, such as torch.ops.aten.add.Tensor, or the result "
        f"of torch.library.custom_op, got {op!r}"
    )


def _rule_key(overload: Any) -> str:
    """Return the registry name of an overload's rule: the operator's if all its overloads take equal arguments."""
    name, which = overload._schema.name, overload_without_out(overload)
    if which:
        return f"{name}.{which}"
    return name if resolve_overload(overload.overloadpacket) is not None else f"{name}.default"
