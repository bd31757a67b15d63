"""What is known of operators beside their rules: where torch says otherwise without data than its kernels do, or has other words.

Declared in ``rules/aten/`` with :func:`fact`, by the names that rules are declared by, and asked for by the engine with
:func:`facts_of`: it knows no operator by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

from ..base.caches import remembered
from ..errors import RuleError
from .call import Meta
from .registry import read_all
from .rule import Rule

Given = dict[str, Any]  # arguments by name, as tensors without data
Ask = Callable[..., Any]  # the operator itself (or the function that follows) on these
Law = Callable[[Meta, Given], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one operator.

    Attributes:
        strides: of a new result, where inference is not what the kernels do.
        infer: results without data, where the operator's own inference is not asked as it is: ``infer(ask, given, device)``.
        by_device: strides or auxiliary shapes follow the library that computes (LAPACK, MKL or cuSOLVER, cuFFT, oneDNN or cuDNN).
        refuses: each raises what the kernel does and inference lets pass, given the name and the arguments, tensors as layouts.
        is_view: a result is a view of an argument, which the schema does not say.
        shows: the elements that a view shows: a row or slice of a dim (``"slice"``), all in their order (``"all"``), or
            the mirror image of each (``"mirror"``: what is done to every element is its own inverse).
        needs_strides: a view that the strides of a block may not allow, where those of the whole do.
        spelled: the function to call on locals; None, the operator itself, where torch's of that name takes other arguments.
        takes_tensors: a list operator that makes a tensor of each number, converted to the dtype of its element.
        per_element: it works on each element of its lists by itself.
        each: the operator whose rule each element follows, where it has none of its own.
        flat: it reads its lists as flat memory, in the strides of the first.
        joins: its result has its operands side by side: more of what the largest is.
        touches: the memory that it reads and writes: of operands too, of results alone, or none (what is made and left as it is).
        stores: autograd calls it when it stores a gradient, or does not where nobody else holds a reference: ranks may differ.
        accumulates: torch adds gradients up with it, in an order that may differ between ranks (pipelines keep them in sets).
    """

    strides: Law | None = None
    infer: Callable[[Ask, Given, str], Any] | None = None
    by_device: bool = False
    refuses: tuple[Callable[[str, dict[str, Any]], None], ...] = ()
    is_view: bool = False
    shows: Literal["slice", "all", "mirror"] | None = None
    needs_strides: bool = False
    spelled: Callable[..., Any] | bool | None = False
    takes_tensors: bool = False
    per_element: bool = False
    each: str | None = None
    flat: bool = False
    joins: bool = False
    touches: Literal["all", "results", "nothing"] = "all"
    stores: bool = False
    accumulates: bool = False


_FACTS: dict[str, Facts] = {}
_LISTS: list[str] = []  # how the names of list operators begin that are called as what they do to each element
_NOTHING = Facts()


def fact(names: str, **known: Any) -> None:
    """Declare what is known of operators (``"op"``: of all overloads; ``"op.overload"``; ``"op.default"``, that without a name).

    Raises:
        RuleError: something is known of one of them already, which stands elsewhere.
    """
    for name in names.split():
        if f"aten::{name}" in _FACTS:
            raise RuleError(f"the traits of aten::{name} are declared twice; declare them once")
        _FACTS[f"aten::{name}"] = Facts(**known)


def lists(prefix: str) -> None:
    """Declare that operators with this prefix do to each element of their lists what the rest of their name says."""
    _LISTS.append(prefix)


def list_forms(name: str) -> list[str]:
    """The names that list forms of ``"mul"`` may have."""
    read_all()
    return [prefix + name for prefix in _LISTS]


def rule_of_each(func: Any) -> Rule | None:
    """The rule that each element of a list operator follows."""
    each = facts_of(func).each
    return None if each is None else read_all().get(each)


@remembered(8192)
def facts_of(func: Any) -> Facts:
    """What is known of an overload: its own, its operator's, or that of the operator it is an in-place variant of."""
    read_all()
    schema = func._schema
    names = (f"{schema.name}.{schema.overload_name or 'default'}", schema.name, schema.name.removesuffix("_"))
    found = [_FACTS[name] for name in dict.fromkeys(names) if name in _FACTS]
    namespace, _, own = schema.name.partition("::")
    for prefix in _LISTS:
        if own.startswith(prefix):
            each = own.removeprefix(prefix).removesuffix("_")
            found.append(Facts(per_element=True, each=f"{namespace}::{each}"))
    return found[0] if len(found) == 1 else _merged(found) if found else _NOTHING


@remembered(8192)
def shows_memory(func: Any) -> bool:
    """Whether some result of an overload is memory of an argument, not written to."""
    schema = func._schema
    written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    shown = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return shown or (facts_of(func).is_view and not written)


def _merged(found: list[Facts]) -> Facts:
    """What the first of them says, and beside it what the others say."""
    said = [{f.name: getattr(each, f.name) for f in fields(each) if getattr(each, f.name) != f.default} for each in found]
    return Facts(**{name: value for each in reversed(said) for name, value in each.items()})
