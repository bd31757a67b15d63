"""Operator traits: facts of operators beside their rules, such as strides and refusals that torch's inference does not know.

``rules/aten/`` declares them with :func:`declare_traits`, by operator names. The engine reads them with :func:`traits_of`, and
knows no operator by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..base.caches import memoize
from ..errors import RuleError
from .call import Meta
from .registry import load_rules
from .rule import Rule

MetaArguments = dict[str, Any]  # arguments by name, with meta tensors
RunInference = Callable[..., Any]  # ``default(arguments, func)`` runs the operator (or ``func``) on meta tensors
StrideFunction = Callable[[Meta, MetaArguments], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class OperatorTraits:
    """The traits of one operator.

    Attributes:
        strides: the strides of a new result, if inference differs from the kernels.
        infer: ``infer(default, arguments, device)`` returns results without data, instead of the operator's own inference.
        by_device: strides or auxiliary shapes depend on the library that computes (LAPACK, MKL or cuSOLVER, cuFFT, oneDNN or
            cuDNN).
        checks: checks that raise what the kernel raises and inference does not. They get the name and the arguments, tensors as
            layouts.
        is_view: a result is a view of an argument, which the schema does not state.
        view_kind: the elements that a view has: a row or slice of a dim (``"slice"``), all in their order (``"all"``), or all
            negated or conjugated (``"mirror"``: the operation is its own inverse).
        needs_strides: a view that the strides of a block may not allow though those of the global tensor do.
        local_function: the function to call on local tensors. None: the operator itself, because torch's function of that name
            takes other arguments.
        takes_tensors: a list operator that makes a tensor of each number, converted to the dtype of its element.
        per_element: it computes each element of its lists by itself.
        element_operator: the operator with the rule that each element follows, if the list operator has none.
        reads_flat: it reads its lists as flat memory, in the strides of the first.
        concatenates: its result concatenates its operands, and is preferred in the layout of the largest.
        memory_use: the memory that it reads and writes: operands and results, results alone, or nothing (uninitialized results).
        stores_gradient: autograd calls it when it stores a gradient, unless no other reference exists. So ranks may differ.
        accumulates_gradient: torch accumulates gradients with it, in an order that may differ between ranks (pipelines keep them
            in sets).
    """

    strides: StrideFunction | None = None
    infer: Callable[[RunInference, MetaArguments, str], Any] | None = None
    by_device: bool = False
    checks: tuple[Callable[[str, dict[str, Any]], None], ...] = ()
    is_view: bool = False
    view_kind: Literal["slice", "all", "mirror"] | None = None
    needs_strides: bool = False
    local_function: Callable[..., Any] | bool | None = False
    takes_tensors: bool = False
    per_element: bool = False
    element_operator: str | None = None
    reads_flat: bool = False
    concatenates: bool = False
    memory_use: Literal["all", "results", "nothing"] = "all"
    stores_gradient: bool = False
    accumulates_gradient: bool = False


_TRAITS: dict[str, OperatorTraits] = {}
_LIST_PREFIXES: list[str] = []  # prefixes of list operators that apply the operator named by the rest to each element
_NO_TRAITS = OperatorTraits()


def declare_traits(names: str, **traits: Any) -> None:
    """Declare traits of operators by name.

    ``"op"`` is all overloads, ``"op.overload"`` is one, and ``"op.default"`` is the unnamed one.

    Raises:
        RuleError: the traits of one of them are declared already.
    """
    for name in names.split():
        if f"aten::{name}" in _TRAITS:
            raise RuleError(f"the traits of aten::{name} are declared twice; declare them once")
        _TRAITS[f"aten::{name}"] = OperatorTraits(**traits)


def declare_list_prefix(prefix: str) -> None:
    """Declare a prefix of list operators (``_foreach_``), which apply the operator named by the rest to each element."""
    _LIST_PREFIXES.append(prefix)


def list_operator_names(name: str) -> list[str]:
    """Return ``name`` with each declared prefix of list operators: ``_foreach_mul`` for ``mul``."""
    load_rules()
    return [prefix + name for prefix in _LIST_PREFIXES]


def element_rule_of(func: Any) -> Rule | None:
    """Return the rule of the operator that a list operator applies to each element, or None."""
    each = traits_of(func).element_operator
    return None if each is None else load_rules().get(each)


@memoize(8192)
def traits_of(func: Any) -> OperatorTraits:
    """Return the traits of an overload, merged with those of its operator and of the out-of-place variant."""
    load_rules()
    schema = func._schema
    names = (f"{schema.name}.{schema.overload_name or 'default'}", schema.name, schema.name.removesuffix("_"))
    declared = [_TRAITS[name] for name in dict.fromkeys(names) if name in _TRAITS]
    namespace, _, operator_name = schema.name.partition("::")
    for prefix in _LIST_PREFIXES:
        if operator_name.startswith(prefix):
            element_operator = operator_name.removeprefix(prefix).removesuffix("_")
            declared.append(OperatorTraits(per_element=True, element_operator=f"{namespace}::{element_operator}"))
    return declared[0] if len(declared) == 1 else _merge_traits(declared) if declared else _NO_TRAITS


@memoize(8192)
def returns_view(func: Any) -> bool:
    """Return True if some result of an overload is a view of an argument and is not written to."""
    schema = func._schema
    mutates = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return aliases or (traits_of(func).is_view and not mutates)


def _merge_traits(traits: list[OperatorTraits]) -> OperatorTraits:
    """Merge traits into one: the value of each field is from the first in the list that declares it."""
    declared = [{f.name: getattr(each, f.name) for f in fields(each) if getattr(each, f.name) != f.default} for each in traits]
    return OperatorTraits(**{name: value for each in reversed(declared) for name, value in each.items()})
