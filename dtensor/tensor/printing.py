"""Printing of a DTensor: the text of its local tensors, without communication.

Replicas with equal text print once. Of a tensor so large that torch prints its corners only, one local tensor is printed,
and the shapes of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm import shards_of
from ..comm.map_ranks import communicator_of
from ..layout.layout import Layout
from ..placement import Replicate
from ..state.functorch import below_transforms


def format_local_tensors(x: Any) -> str:
    """Return the text of the local tensors that this process has: a labeled block for each rank, or for equal replicas."""
    mesh, placements = x._layout.mesh, x._layout.placements
    if mesh.kind == "dry_run":
        return ""
    local_ranks = mesh.ranks if communicator_of(mesh).holds_all else [mesh.get_rank()]  # this rank may be outside the mesh
    coordinates = mesh.coordinates if len(local_ranks) > 1 else [()]
    split = [dim for dim, placement in enumerate(placements) if placement != Replicate()]  # sharded or partial
    blocks: dict[tuple[Any, ...], list[int]] = {}  # (coordinate over these mesh dims, text) -> ranks
    with below_transforms():
        for rank, coordinate, shard in zip(local_ranks, coordinates, shards_of(x._local), strict=True):
            blocks.setdefault((*(coordinate[dim : dim + 1] for dim in split), _tensor_text(shard)), []).append(rank)
    lines = ["\n" + _add_label(ranks, text) for (*_, text), ranks in blocks.items()]
    summary = next((line for line in lines if "..." in line), None)  # torch omits elements
    return "".join(lines) if summary is None else f"{summary}\n  shapes: {_format_shapes(x._layout)}"


def _format_shapes(layout: Layout) -> str:
    """Return the local shapes, ``ranks 0-2 [3, 4], rank 3 [1, 4]``."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in zip(layout.mesh.ranks, layout.mesh.coordinates, strict=True):
        ranks.setdefault(tuple(layout.local_shape(coordinate)), []).append(rank)
    return ", ".join(f"{_format_ranks(shape_ranks)} {list(shape)}" for shape, shape_ranks in ranks.items())


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {spans_of(sorted(ranks))}"


def spans_of(ranks: Sequence[int]) -> str:
    """Return sorted ``ranks`` as text, with consecutive ranks as spans: ``0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _tensor_text(shard: torch.Tensor) -> str:
    """Return what ``repr`` shows between the parentheses of ``tensor(...)``."""
    text = repr(shard.detach())
    return text[text.index("(") + 1 : text.rindex(")")]


def _add_label(ranks: Sequence[int], body: str) -> str:
    """Return ``body`` behind the label of its ranks, with its lines aligned."""
    label = f"  {_format_ranks(ranks)}: "
    return label + body.replace("\n" + " " * len("tensor("), "\n" + " " * len(label))
