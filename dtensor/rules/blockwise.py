"""Declarations for operations that work block by block: a pattern says which dims are factors, the caller which are summed.

Unlike ``einsum``, nothing is taken to be linear: a letter absent on the right must be whole unless it is named in ``sums``, and
partial values pass only where ``partials`` says so. Results that the operator was told to leave out (None, or an empty
marker of shape ``(0,)``) are left out of the pattern too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

from ..ranks.per_rank import count_ranks, over_ranks
from .call import Call, Meta
from .kernels import KernelContext
from .notation import Pattern, Term, parse
from .registry import register
from .rule import Dims, Factors, Kernel, Rule
from .verbs import bind

Partials = tuple[str, ...] | Callable[[Call], tuple[str, ...]]


def blockwise(
    names: str,
    pattern: str,
    *,
    sums: str = "",
    kernels: Mapping[str, Kernel] | None = None,
    partials: Partials = (),
    **options: Any,
) -> Rule:
    """A rule by pattern. ``sums``: letters whose blocks give terms of the results that lack them."""
    parsed = parse(pattern)

    def factors(call: Call) -> Factors | None:
        return bound(parsed, call, sums.split(), kernels or {})

    return register(names, Rule(factors, partials, kind="blockwise", source=pattern, **options))


def bound(pattern: Pattern, call: Call, sums: list[str], kernels: Mapping[str, Kernel]) -> Factors | None:
    """The factors of a call under a pattern; None if the number of dims does not fit."""
    kept = [(term, meta) for term, meta in zip(pattern.results, call.results, strict=True) if meta is not None]
    made = [(term, meta) for term, meta in kept if not _left_out(term, meta)]
    asked = replace(pattern, results=tuple(term for term, _ in made))
    factors = bind(asked, replace(call, results=tuple(meta for _, meta in made)), None)
    if factors is None:
        return None
    following = iter(factors.results)
    results = tuple(((),) if _left_out(term, meta) else next(following) for term, meta in kept)
    if len(made) < len(kept):  # the empty markers lack every factor, and are the same on all ranks
        kernels = {name: Kernel(plain_op) for name in factors.sizes if name not in factors.whole} | dict(kernels)
    reduced = dict.fromkeys(sums, "sum")
    return replace(factors, results=results, reduced=reduced, kernels=kernels)


def _left_out(term: Term, meta: Meta) -> bool:
    return meta.shape == (0,) and len(term.dims) != 1


def plain_op(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """The operator itself: a kernel only in that its results without the factor are whole instead of terms."""
    return at.call.func.overloadpacket(*args, **kwargs)  # the overload without `out=`, which kernels do not get


def on_each_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as the ``local`` of a rule, though it reads shapes: it gets one rank's plain tensors at a time."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return over_ranks(function, args, kwargs) if count_ranks((args, kwargs)) else function(*args, **kwargs)

    return run


def asked_for(call: Call, results: Sequence[Dims]) -> tuple[Dims, ...]:
    """Those of ``results`` that ``output_mask`` asks for; the others are None, which not all of torch's meta kernels tell."""
    wanted = call["output_mask"]
    call.results = tuple(meta if asked else None for meta, asked in zip(call.results, wanted, strict=True))
    return tuple(dims for dims, asked in zip(results, wanted, strict=True) if asked)


# --- partial rows that depend on how many operands and results there are --------------------------------------------
def in_first(call: Call) -> tuple[str, ...]:
    """Linear in the first operand; whatever the others hold, they multiply it by nothing infinite."""
    rest = ",R" * (len(call.operands) - 1)
    return f"sum{rest} -> sum", f"avg{rest} -> avg"


def multilinear(call: Call) -> tuple[str, ...]:
    """Linear in each operand, the others fixed and finite."""
    count = len(call.operands)
    return tuple(
        f"{','.join(op if i == k else 'finite' for k in range(count))} -> {op}" for i in range(count) for op in ("sum", "avg")
    )
