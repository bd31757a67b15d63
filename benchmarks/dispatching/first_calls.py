"""First calls: the rows of ``dispatch.py`` on new shapes. A case takes a size not used before, makes its tensors and returns the
function whose first call is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Run = Callable[[], object]
ColdCase = Callable[[Any, int], Run]


def on_new_row_counts(op: Callable[..., object], *, operands: int = 1) -> ColdCase:
    """Return a case that applies ``op`` to tensors sharded along dim 0, with ``n`` rows per rank."""

    def case(side: Any, n: int) -> Run:
        given = [side.shard(0, n, 8) for _ in range(operands)]
        return lambda: op(*given)

    return case


def on_new_2d_row_counts(op: Callable[..., object], *, operands: int = 1) -> ColdCase:
    """Return a case that applies ``op`` to tensors that a 2-D mesh shards along both dims, with ``n`` rows per rank."""

    def case(side: Any, n: int) -> Run:
        given = [side.tiles(n, 8) for _ in range(operands)]
        return lambda: op(*given)

    return case


def mm(side: Any, n: int) -> Run:
    x, w = side.shard(0, n, 8), side.replicate(8, 8)
    return lambda: torch.mm(x, w)


def mm_2d(side: Any, n: int) -> Run:
    x, w = side.rows(n, 8), side.columns(8, 8)
    return lambda: torch.mm(x, w)


def linear(side: Any, n: int) -> Run:
    x, weight, bias = side.shard(0, n, 4, 8), side.replicate(8, 8), side.replicate(8)
    return lambda: F.linear(x, weight, bias)


def layer_norm(side: Any, n: int) -> Run:
    x, weight, bias = side.shard(0, n, 8), side.replicate(8), side.replicate(8)
    return lambda: F.layer_norm(x, (8,), weight, bias)


def view(side: Any, n: int) -> Run:
    x, total = side.shard(0, n, 8), side.ranks * n
    return lambda: x.view(total, 2, 4)


def view_2d(side: Any, n: int) -> Run:
    x, total, columns = side.tiles(n, 8), side.grid[0] * n, side.grid[1] * 4
    return lambda: x.view(total, columns, 2)


def slice_sharded(side: Any, n: int) -> Run:
    x, total = side.shard(0, n, 8), side.ranks * n
    return lambda: x[: total // 2]


def embedding(side: Any, n: int) -> Run:
    ids, weight = side.ids(n, 16), side.replicate(16, 8)
    return lambda: F.embedding(ids, weight)


def to_replicate(side: Any, n: int) -> Run:
    x = side.shard(0, n, 8)
    return lambda: side.to_replicate(x)


COLD: dict[str, ColdCase] = {
    "add": on_new_row_counts(torch.add, operands=2),
    "mul scalar": on_new_row_counts(lambda x: x * 1.5),
    "mm": mm,
    "sum": on_new_row_counts(torch.sum),
    "sum, dim": on_new_row_counts(lambda x: x.sum(1)),
    "t": on_new_row_counts(torch.t),
    "softmax": on_new_row_counts(lambda x: torch.softmax(x, -1)),
    "layer_norm": layer_norm,
    "gelu": on_new_row_counts(F.gelu),
    "view": view,
    "slice": on_new_row_counts(lambda x: x[:, 1:5]),
    "slice, sharded dim": slice_sharded,
    "split": on_new_row_counts(lambda x: x.split(4, dim=1)),
    "cat": on_new_row_counts(lambda x, y: torch.cat([x, y], dim=1), operands=2),
    "linear, 3-D": linear,
    "embedding": embedding,
    "redistribute S -> R": to_replicate,
    "add, 2-D mesh": on_new_2d_row_counts(torch.add, operands=2),
    "mm, 2-D mesh": mm_2d,
    "sum, 2-D mesh": on_new_2d_row_counts(torch.sum),
    "view, 2-D mesh": view_2d,
    "gelu, 2-D mesh": on_new_2d_row_counts(F.gelu),
    "cat, 2-D mesh": on_new_2d_row_counts(lambda x, y: torch.cat([x, y], dim=0), operands=2),
}
COLD = {f"cold {name}": case for name, case in COLD.items()}
BOUND = 0.2  # of the overhead ratio
