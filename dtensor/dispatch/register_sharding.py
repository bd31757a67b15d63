"""Rules by users, in the registry that the library's own live in: in the library's words, or as a table of placements."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, get_overloads, overload

from ..base.torch_internals import OpOverloadPacket
from ..errors import PlacementError, RuleError
from ..placement import REDUCE_OPS
from ..propagation.op_schema import arguments_given, operator_of, overload_of
from ..rules.call import Call
from ..rules.declare import by_pattern
from ..rules.folds import Fold
from ..rules.notation import EACH, Pattern, is_picked, parse
from ..rules.notation_rules import by
from ..rules.partial_rules import linear, one_of, rows, together
from ..rules.registry import overload_served, register, rules, unregister
from ..rules.rule import Choice, Factors, Kernel, LocalView, Rule, labels, parse_partial
from .dispatcher import clear_plans
from .user_strategy_table import Table, factors_of_table

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
    """Return the rule of a notation. Functions of the call may read the values of numbers, as a table may."""
    if unknown := sorted(words.keys() - _ACCEPTED):
        raise RuleError(
            f"register_sharding for {overload}: unexpected keyword argument {unknown[0]!r}; with a notation it takes "
            f"{', '.join(sorted(_ACCEPTED))}"
        )
    texts = [notation] if isinstance(notation, str) else list(notation.table.values())
    patterns = [parse(one) for text in texts for one in text.split("|")]
    for pattern in patterns:
        _check_pattern(pattern, overload)
    _check_words(patterns, overload, words)
    kernel = words.get("kernel")
    if callable(kernel) and not isinstance(kernel, Fold):
        words = words | {"kernel": Kernel(kernel)}
    asks = any(callable(words.get(name)) for name in ("when", "local_args", "partials", "reduce"))
    return by_pattern(notation, kind="custom", floats_matter=asks, samples=tuple(samples), **words)


_ACCEPTED = frozenset(inspect.signature(get_overloads(register_sharding)[1]).parameters) - {"op", "notation", "samples"}


def _check_pattern(pattern: Pattern, overload: Any) -> None:
    """Raise RuleError where a notation names what the operator lacks, or leaves out a tensor that every call has."""
    tensors = _tensor_arguments(overload)
    required = [name for name, kind in tensors.items() if not kind.startswith("Optional")]
    known = {argument.name for argument in arguments_given(overload)}
    terms = (*pattern.operands, *pattern.results)
    said = {dim[0].strip("@!") for term in terms for dim in term.dims if is_picked(dim)}
    named = {term.name for term in pattern.operands} - {"", EACH}
    results = _result_count(overload)
    each = pattern.operands[0].name == EACH
    count, problem = len(pattern.operands), ""
    if lacking := sorted((said | named).difference(known)):
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
    """Return the types of the arguments that hold tensors, by name, without ``out=``."""
    held = operator_of(overload).tensors
    return {argument.name: str(argument.type) for argument in arguments_given(overload) if argument.name in held}


def _takes_list(overload: Any) -> bool:
    return any("List" in kind for kind in _tensor_arguments(overload).values())


def _result_count(overload: Any) -> int:
    """Return how many results of an operator are tensors, or lists of tensors."""
    return sum("Tensor" in str(result.type) for result in overload._schema.returns)


def _check_words(patterns: Sequence[Pattern], overload: Any, words: Mapping[str, Any]) -> None:
    """Raise RuleError where a keyword speaks of letters that no notation has, or of arguments that the operator lacks."""
    letters = {name.strip("@!*.") for pattern in patterns for term in pattern.operands for dim in term.dims for name in dim}
    sizes, partials = words.get("sizes") or {}, words.get("partials", ())
    sums = words.get("sums", "")
    listed = rows(partials)
    parts = listed.parts if isinstance(listed, together) else listed
    spoken: dict[str, Set[str]] = {
        "sums": labels(sums if isinstance(sums, str) else " ".join(sums)),
        "kernels": frozenset(words.get("kernels") or ()),
        "sizes": frozenset(sizes),
        "nonempty": labels(words.get("nonempty", "")) - {"reduced"},
    }
    arguments = {argument.name for argument in arguments_given(overload)}
    asked: dict[str, Set[str]] = {
        "plain": set(words.get("plain", ())),
        "sizes": {size for size in sizes.values() if isinstance(size, str)},
        "partials": {name for part in parts if isinstance(part, (linear, one_of)) for name in part.given},
    }
    for word, names in spoken.items():
        if unknown := sorted(names - letters):
            texts = " | ".join(pattern.text for pattern in patterns)
            raise RuleError(
                f"register_sharding for {overload}: {word}= names {', '.join(unknown)}, which {texts!r} does not have"
            )
    for word, names in asked.items():
        if unknown := sorted(names - arguments):
            raise RuleError(
                f"register_sharding for {overload}: {word}= names {', '.join(unknown)}, which the operator does not have: "
                f"{overload._schema}"
            )
    left = (words.get("reduce", "sum"), *(() if isinstance(sums, str) else sums.values()))
    for op in (each for value in left for each in (value if isinstance(value, tuple) else (value,))):
        if isinstance(op, str) and op not in (*REDUCE_OPS, "R"):
            raise RuleError(f"register_sharding for {overload}: {op!r} is no reduction; use one of {', '.join(REDUCE_OPS)}")
    for part in parts:
        if isinstance(part, str):
            _check_partial_row(part, overload)


def _check_partial_row(text: str, overload: Any) -> None:
    """Raise RuleError for a partial row that cannot be read, or that has too few or too many operands or results."""
    tensors, results = _tensor_arguments(overload), _result_count(overload)
    required = sum(not kind.startswith("Optional") for kind in tensors.values())
    try:
        parse_partial(text, text.partition("->")[0].count(",") + 1, text.partition("->")[2].count(",") + 1)
        fits = _takes_list(overload) or any(
            parse_partial(text, count, results) is not None for count in range(required, len(tensors) + 1)
        )
    except (PlacementError, RuleError) as error:
        raise RuleError(f"register_sharding for {overload}: partials= has {text!r}: {error}") from None
    if not fits:
        raise RuleError(
            f"register_sharding for {overload}: partials= has {text!r}, but the operator takes {len(tensors)} tensors and gives "
            f"{results}: {overload._schema}"
        )


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
