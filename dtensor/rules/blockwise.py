"""What rules by pattern share: kernels that are the operator itself, results that were left out, rows for many operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from ..ranks.per_rank import ALONE, count_ranks, over_ranks
from .call import Call
from .kernels import plain_op
from .rule import Dims
from .verbs import blockwise

__all__ = ["asked_for", "blockwise", "in_first", "multilinear", "on_each_rank", "plain_op"]


def on_each_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as the ``local`` of a rule, though it reads shapes: it gets one rank's plain tensors at a time."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if ALONE.issuperset(map(type, args)) and not (kwargs and not ALONE.issuperset(map(type, kwargs.values()))):
            return function(*args, **kwargs)
        return over_ranks(function, args, kwargs) if count_ranks((args, kwargs)) else function(*args, **kwargs)

    setattr(run, "of_one_rank", function)  # noqa: B010  no attribute of functions that types know
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
