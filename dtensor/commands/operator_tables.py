"""Operator tables: how each operator runs, from the registry and the samples, as Markdown. ``dtensor ops`` prints them.

An operator's row is its rule applied to one sample, without running it: the factors as notation, the factors that may be
sharded, those that a kernel shards, and the partial operands that stay partial.
"""

from __future__ import annotations

import re
import string
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from ..base.group_by import group_by_key
from ..base.tensor_tree import map_tensors
from ..base.torch_internals import all_schemas, has_kernel
from ..placement import Partial, Replicate
from ..plan.graph import RuleQuery
from ..rules import rules
from ..rules.call import Call
from ..rules.registry import family_of, lookup
from ..rules.rule import Along, Dims, Factors, Rule, Spec, Strategy, strategies_of_factors
from ..testing.call_variants import get_operator, operator_exists
from ..testing.force_strategy import query_rule
from ..testing.placements import get_or_make_mesh
from ..testing.samples import Sample, samples_of
from ..testing.scatter import scatter

_LEGEND = """\
Overloads, in-place, `out=` and `_foreach_` variants use the rule of their operator. [Sharding rules](sharding_rules.md) explains
the notation, which is shown for one sample:

| notation | means |
|---|---|
| `a` | a dim that may be sharded wherever the letter appears |
| `[d]`, `[]` | a dim that must not be sharded |
| `1` | a dim of size one |
| `(a b)` | one dim made of two |
| `{a, b}` | one dim that is read in several ways |

| column | means |
|---|---|
| sharded | letters that may be sharded without communication |
| partial results | letters that leave a partial result if they are sharded |
| collectives | letters that cost collectives of the operator's own |
| partial inputs | partial inputs that stay partial, `inputs→results`; `R`, `finite` and `nonzero` are replicated inputs |
"""

FAMILIES = {
    "pointwise": "Pointwise operators",
    "reduction": "Reductions",
    "extremum": "Maximum and minimum",
    "contraction": "Matrix products",
    "grouped_mm": "Grouped matrix products",
    "attention": "Attention",
    "softmax": "Softmax",
    "norms": "Norms",
    "batch_norm": "Batch norm",
    "losses": "Losses",
    "ctc": "CTC loss",
    "convolution": "Convolutions",
    "pooling": "Pooling, padding and resampling",
    "lstm": "Recurrent layers",
    "embedding_bag": "Embedding bags",
    "views": "Views and reshapes",
    "slices": "Slices and splits",
    "cat_repeat_roll": "Concatenation and rearrangement",
    "indexing": "Indexed reads",
    "scattering": "Indexed writes",
    "segments": "Segment reductions",
    "data_dependent_shape": "Data-dependent shapes",
    "count_and_compare": "Comparison and counting",
    "sorting": "Sorting and selection",
    "cumulative": "Cumulative operators",
    "fft": "Fourier transforms",
    "linalg": "Linear algebra",
    "random": "Random numbers",
    "creation": "Creation",
    "decompositions": "Decomposed operators with a rule",
}
_NAMES_PER_CELL = 30


@dataclass(frozen=True, slots=True)
class OperatorEntry:
    """Table cells of one operator; operators with equal cells share a line."""

    how: str
    notation: str
    sharded: str = ""
    reduced: str = ""
    kernels: str = ""
    partials: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the texts of the table cells, with inputs and results of the notation in separate cells."""
        inputs, _, results = self.notation.partition(" -> ")
        notation = (f"`{inputs}`", f"`{results}`") if self.notation else ("", "")
        return (self.how, *notation, self.sharded, self.reduced, self.kernels, self.partials)


def operator_tables() -> str:
    """Return Markdown tables: operators with a rule by family, decomposed ones, and those that all-gather their inputs."""
    aten_rules = [(name, rule) for name, rule in sorted(rules().items()) if name.startswith("aten::")]
    decomposed, gathered = operators_without_rule()
    parts = [
        _LEGEND,
        f"## Rules\n\n{len(aten_rules)} operator names have a rule.\n",
        *(_family_section(family, members) for family, members in _group_by_family(aten_rules)),
        f"## Decompositions\n\nTorch composes {len(decomposed)} further operators from those above.\n",
        _names_table(decomposed),
        f"## Gathering\n\n{len(gathered)} remaining operators of torch {torch_version()} all-gather their inputs. "
        "Most are for sparse, quantized or single-device kernels, or create a tensor and have no inputs.\n",
        _names_table(gathered),
    ]
    return "\n".join(parts)


def _group_by_family(aten_rules: Iterable[tuple[str, Rule]]) -> list[tuple[str, list[tuple[str, Rule]]]]:
    """Return the aten rules by family of operators, families in the order of ``FAMILIES``."""
    members: dict[str, list[tuple[str, Rule]]] = defaultdict(list)
    for name, rule in aten_rules:
        members[family_of(name) or "others"].append((name, rule))
    order = [*FAMILIES, *sorted(members.keys() - FAMILIES.keys())]
    return [(family, members[family]) for family in order if family in members]


def _family_section(family: str, members: Iterable[tuple[str, Rule]]) -> str:
    """Return the Markdown heading and table of one family of operators."""
    shared = group_by_key((table_entry_of(name, rule), name.removeprefix("aten::")) for name, rule in members)
    return f"### {FAMILIES.get(family, family.capitalize())}\n\n{_family_table(shared)}"


def _split_names(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Yield consecutive parts of ``names``, each of at most ``size`` names."""
    for start in range(0, len(names), size):
        yield names[start : start + size]


def torch_version() -> str:
    """Return the version of torch without its build tag."""
    return torch.__version__.partition("+")[0]


def _family_table(shared: Mapping[OperatorEntry, Sequence[str]]) -> str:
    """Return a Markdown table with a line for all operators that share an entry."""
    lines = [
        "| operators | run by | inputs | results | sharded | partial results | collectives | partial inputs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(shared.items(), key=lambda item: (-len(item[1]), item[1][0]))
    for entry, names in ordered:
        for part in _split_names(names, _NAMES_PER_CELL):
            lines.append("| " + " | ".join((" ".join(f"`{name}`" for name in part), *entry.cells)) + " |")
    return "\n".join(lines) + "\n"


def _names_table(names: Iterable[str]) -> str:
    """Return a Markdown table of operator names, by their first letter."""
    lines = ["| | operators |", "|---|---|"]
    for letter, group in groupby(sorted(names, key=_first_letter), key=_first_letter):
        for part in _split_names(sorted(group), _NAMES_PER_CELL):
            lines.append(f"| {letter} | " + " ".join(f"`{name}`" for name in part) + " |")
    return "\n".join(lines) + "\n"


def _first_letter(name: str) -> str:
    return name.lstrip("_")[:1].lower()


# --- operators without a rule ---------------------------------------------------------------------------------------------
def operators_without_rule() -> tuple[list[str], list[str]]:
    """Return the names of aten operators that take tensors and have no rule: (composite operators, others)."""
    decomposed: set[str] = set()
    gathered: set[str] = set()
    for schema in all_schemas():
        namespace, _, name = schema.name.partition("::")
        takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
        if (
            namespace != "aten"
            or not takes
            or name.startswith(("_foreach_", "_fused_", "_amp_"))
            or not operator_exists(f"aten.{name}")
        ):
            continue
        func = getattr(get_operator(f"aten.{name}"), schema.overload_name or "default", None)
        base = re.sub(r"(?<!_)_$", "", name)
        if func is None or lookup(func) is not None or any(argument.is_out for argument in schema.arguments):
            continue
        try:
            composite = has_kernel(func.name(), "CompositeImplicitAutograd")
        except RuntimeError:  # operators of TorchScript
            continue
        (decomposed if composite else gathered).add(base)
    ruled = {name.partition("::")[2].partition(".")[0] for name in rules()}
    return sorted(decomposed - ruled), sorted(gathered - decomposed - ruled)


# --- one operator -----------------------------------------------------------------------------------------------------------
def table_entry_of(name: str, rule: Rule) -> OperatorEntry:
    """Return the table cells of an operator: its rule applied to the sample with the most shardable factors.

    Samples are used only if their plans need no run.
    """
    if rule.answer is not None:
        return OperatorEntry("an answer from layouts, or the value", "")
    queries = [query for sample in samples_of(name) if (query := _query_sample(name, sample)) is not None and query.rule is rule]
    if not queries:
        return OperatorEntry("decomposition" if rule.decompose is not None else "rule", "")
    best = max(queries, key=lambda query: len(query.factors.sizes.keys() - query.factors.unsharded))
    return describe_rule(rule, best.factors, best.call)


def _query_sample(name: str, sample: Sample) -> RuleQuery | None:
    """Return the rule, call and factors of a sample with replicated operands; None if the call cannot be made."""
    packet = name.replace("::", ".")
    args, kwargs = map_tensors(lambda x: scatter(x, get_or_make_mesh((2,)), [Replicate()]), sample.arguments)
    with torch.no_grad():
        return query_rule(get_operator(packet if operator_exists(packet) else packet + "_"), args, kwargs)


def describe_rule(rule: Rule, factors: Factors, call: Call) -> OperatorEntry:
    """Return the table cells for a rule applied to a call: its notation, and how each factor may be sharded."""
    factors = rename_factors(factors)
    shapes = [tuple(layout.shape) for layout in call.operands]
    result_shapes = [meta.shape for meta in call.results if meta is not None]
    notation = f"{_notation_text(factors.operands, factors, shapes)} -> {_notation_text(factors.results, factors, result_shapes)}"
    partials = rule.partials(call) if callable(rule.partials) else rule.partials
    sharded: list[str] = []
    partials_kept: list[str] = []
    reduced: dict[str, list[str]] = defaultdict(list)
    kernels: dict[int, list[str]] = defaultdict(list)
    for strategy in strategies_of_factors(factors, partials):
        if strategy.factor is None:
            partials_kept += [text] if (text := _partial_strategy_text(strategy)) else []
        elif strategy.kernel is not None:
            kernels[strategy.kernel.collectives].append(strategy.factor)
        else:
            ops = {str(spec.reduce_op) for spec in strategy.results if isinstance(spec, Partial)}
            (reduced[", ".join(sorted(ops))] if ops else sharded).append(strategy.factor)
    if rule.run is not None:
        how = "draws the global tensor, keeps its shard" if rule.kind == "random" else "kernel"
    else:
        how = "kernel" if kernels and not sharded else "rule and kernel" if kernels else "rule"
    counts = {0: "none", 1: "1 collective"}
    costs = [f"{' '.join(names)}: {counts.get(count, f'{count} collectives')}" for count, names in sorted(kernels.items())]
    return OperatorEntry(
        how,
        notation,
        " ".join(sharded),
        "; ".join(f"{' '.join(names)}: P({op})" for op, names in reduced.items()),
        "; ".join(costs),
        " ".join(_shorten_partials(partials_kept)),
    )


def rename_factors(factors: Factors) -> Factors:
    """Return the factors of a rule renamed to single letters, for display."""
    names = dict.fromkeys(name for dims in (*factors.operands, *factors.results) for dim in dims for name in dim)
    taken = {name for name in names if name in string.ascii_lowercase}
    free = iter([letter for letter in string.ascii_lowercase if letter not in taken] + [f"a{i}" for i in range(100)])
    letters = {name: name if name in taken else "@" * name.startswith("@") + next(free) for name in names}

    def rename_dims(dims: Dims) -> Dims:
        return tuple(tuple(letters[name] for name in dim) for dim in dims)

    def rename_strategy(strategy: Strategy) -> Strategy:
        """Return a strategy with its factors renamed to the single letters."""
        return replace(
            strategy,
            operands=tuple(map(rename_spec, strategy.operands)),
            results=tuple(map(rename_spec, strategy.results)),
            factor=None if strategy.factor is None else letters.get(strategy.factor, strategy.factor),
        )

    def rename_spec(spec: Spec) -> Spec:
        return Along(letters.get(spec.factor, spec.factor)) if isinstance(spec, Along) else spec

    def rename_keys(table: Mapping[str, Any]) -> dict[str, Any]:
        return {letters.get(name, name): value for name, value in table.items()}

    return replace(
        factors,
        operands=tuple(map(rename_dims, factors.operands)),
        results=tuple(map(rename_dims, factors.results)),
        sizes=rename_keys(factors.sizes),
        unsharded=frozenset(letters.get(name, name) for name in factors.unsharded),
        reduced=rename_keys(factors.reduced),
        kernels=rename_keys(factors.kernels),
        listed_strategies=tuple(map(rename_strategy, factors.listed_strategies)),
    )


def _notation_text(tensors_dims: Sequence[Dims], factors: Factors, shapes: Sequence[tuple[int, ...]]) -> str:
    """Return the dims of several tensors as a pattern in the notation of rules."""
    texts = []
    for i, (dims, shape) in enumerate(zip(tensors_dims, shapes, strict=True)):
        words = [_dim_text(dim, size, factors) for dim, size in zip(dims, shape, strict=True)]
        mark = "+" if tensors_dims is factors.operands and i in factors.additive else ""
        texts.append(mark + (" ".join(words) or "·"))
    return ", ".join(texts)


def _dim_text(dim: tuple[str, ...], size: int, factors: Factors) -> str:
    """Return one tensor dim in the notation of rules, such as ``a``, ``[d]`` or ``(a b)``."""
    if any(name[0] == "@" for name in dim):
        return "{" + ", ".join(name.lstrip("@") for name in dim) + "}"
    names = [f"[{name}]" if name in factors.unsharded else name for name in dim]
    if not names:
        return "1" if size == 1 else "[]"
    return names[0] if len(names) == 1 else f"({' '.join(names)})"


def _partial_strategy_text(strategy: Strategy) -> str:
    """Return a strategy for partial operands as text, such as ``sum,R→sum``; "" if nothing is partial."""
    if not any(isinstance(spec, Partial) for spec in (*strategy.operands, *strategy.results)):
        return ""
    needs = dict(strategy.needs)
    operands = [needs.get(i) or _spec_text(spec) for i, spec in enumerate(strategy.operands)]
    return f"{','.join(operands)}→{','.join(map(_spec_text, strategy.results))}"


def _spec_text(spec: Spec) -> str:
    return str(spec.reduce_op) if isinstance(spec, Partial) else spec.factor.lstrip("@") if isinstance(spec, Along) else "R"


def _shorten_partials(passing: Sequence[str]) -> Iterator[str]:
    """Yield texts of strategies for partial operands: one with a single kind of placement as that kind, and twelve others."""
    others = []
    for text in dict.fromkeys(passing):
        kinds = set(re.split(r"[,→]", text))
        if len(kinds) == 1:
            yield kinds.pop()
        else:
            others.append(text)
    yield from others[:12]
    if len(others) > 12:
        yield f"and {len(others) - 12} more"
