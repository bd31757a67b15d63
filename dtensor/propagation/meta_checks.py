"""What torch's kernels refuse and its inference without data lets pass: dtypes, and dims out of range.

Without a look at these a block would be computed with rounded indices, or every rank would raise another error than torch.
"""

from __future__ import annotations

from typing import Any

import torch

from ..layout.layout import Layout
from .schema import Operator

LONG, ANY = (torch.int64,), (torch.int32, torch.int64)
INDICES: dict[str, tuple[tuple[torch.dtype, ...], type[Exception]]] = {
    "aten::index_add": (ANY, RuntimeError),
    "aten::index_reduce": (ANY, RuntimeError),
    "aten::index_select": (ANY, RuntimeError),
    "aten::index_copy": (LONG, RuntimeError),
    "aten::index_fill": (LONG, IndexError),
    "aten::put": (LONG, RuntimeError),
}
ALIKE = {"aten::binary_cross_entropy": ("self", "target"), "aten::masked_scatter": ("self", "source")}  # of one dtype
ALONG = frozenset(  # a dim of ``self``, if any
    f"aten::{name}"
    for name in ("index_reduce", "slice_scatter", "select_scatter", "unique_dim", "unique_consecutive", "unique_dim_consecutive")
)


def refuse(operator: Operator, arguments: dict[str, Any]) -> None:
    """Raise what the operator's kernel would for these arguments, tensors as their layouts."""
    name = operator.func._schema.name.removesuffix("_")
    if name in INDICES:
        dtypes, error = INDICES[name]
        index = arguments["index"]
        if isinstance(index, Layout) and index.dtype not in dtypes:
            raise error(f"{operator.name}: expected indices of {' or '.join(map(str, dtypes))}, not {index.dtype}")
    if name in ALIKE:
        first, other = (arguments[argument] for argument in ALIKE[name])
        if first.dtype is not other.dtype:
            raise RuntimeError(f"{operator.name}: expected tensors of one dtype, not {first.dtype} and {other.dtype}")
    if name in ALONG and arguments["dim"] is not None:
        dim, ndim = arguments["dim"], max(1, arguments["self"].ndim)
        if not -ndim <= dim < ndim:
            raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
