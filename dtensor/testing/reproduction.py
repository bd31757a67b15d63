"""Reproduction: Python source that runs a case again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Placement, Replicate, Shard
from .scatter import FARTHEST

HEADER = """\
import torch, dtensor as dt
from torch import tensor
from dtensor import Partial, Replicate, Shard
from dtensor.testing import FARTHEST, check, forced
"""


def oracle_program(fn: str, args: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Any], options: dict[str, Any]) -> str:
    """Return the source of a program that calls the oracle with these arguments."""
    given = ", ".join([fn, *(python_source(arg) for arg in args)])
    further = "".join(f", {name}={python_source(value)}" for name, value in options.items())
    return (
        f"{HEADER}check({given},\n"
        f'      mesh=dt.init_device_mesh("{mesh.device_type}", {mesh.shape}), '
        f"placements={python_source(list(placements))}{further})"
    )


def python_source(value: Any) -> str:
    """Return a Python expression that evaluates to ``value``, for a reproduction."""
    match value:
        case torch.Tensor():
            return _tensor_source(value)
        case Partial(op):
            return "Partial(FARTHEST)" if op == FARTHEST else f"Partial({op!r})"
        case Shard() | Replicate():
            return repr(value)
        case list():
            return f"[{', '.join(map(python_source, value))}]"
        case tuple():
            return f"({', '.join(map(python_source, value))}{',' if len(value) == 1 else ''})"
        case dict():
            return "{" + ", ".join(f"{key!r}: {python_source(item)}" for key, item in value.items()) + "}"
        case _:
            return (
                repr(value).replace("nan", "float('nan')").replace("inf", "float('inf')")
                if isinstance(value, float)
                else repr(value)
            )


def _tensor_source(x: torch.Tensor) -> str:
    """Return the source text that makes a tensor with these values and strides."""
    if x.numel() == 0:
        return f"torch.empty({tuple(x.shape)}, dtype={x.dtype})"
    values = str(x.tolist()).replace("nan", "float('nan')").replace("inf", "float('inf')")
    made = f"tensor({values}, dtype={x.dtype})"
    if x.is_contiguous():
        return made
    order = sorted(range(x.ndim), key=x.stride, reverse=True)
    back = [order.index(d) for d in range(x.ndim)]
    return f"{made}.permute({order}).contiguous().permute({back})"


def placement_text(placements: Sequence[Placement]) -> str:
    """Return the text of placements, such as ``"S(0),P(sum)"``."""
    return ",".join(map(str, placements))
