"""How the values of a DTensor print: piece by piece, and nothing is sent for it.

Where torch would print corners only, one piece's are enough: of the others the shapes are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm import communicator_of, shards_of
from ..dispatch.transformed import below_transforms
from ..layout.layout import Layout


def pieces(x: Any) -> str:
    """Every piece that this process holds, one labelled line (or block) a rank; of large ones the first, and all shapes."""
    mesh = x._layout.mesh
    if mesh.kind == "dry_run":
        return ""
    ranks = mesh.ranks if communicator_of(mesh).holds_all else [mesh.get_rank()]
    with below_transforms():
        lines = [f"\n  rank {rank}: {_indented(piece)}" for rank, piece in zip(ranks, shards_of(x._local), strict=True)]
    summary = next((line for line in lines if "..." in line), None)  # torch leaves elements out
    return "".join(lines) if summary is None else f"{summary}\n  pieces: {_shapes(x._layout)}"


def _shapes(layout: Layout) -> str:
    """``ranks 0-2 [3, 4], rank 3 [1, 4]``."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in zip(layout.mesh.ranks, layout.mesh.coordinates, strict=True):
        ranks.setdefault(tuple(layout.local_shape(coordinate)), []).append(rank)
    spans = {shape: f"rank{'' if len(held) == 1 else 's'} {spans_of(sorted(held))}" for shape, held in ranks.items()}
    return ", ".join(f"{held} {list(shape)}" for shape, held in spans.items())


def spans_of(ranks: Sequence[int]) -> str:
    """Ranks in order, runs of them as ``0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _indented(piece: torch.Tensor) -> str:
    text = repr(piece.detach())
    body = text[text.index("(") + 1 : text.rindex(")")]
    return body.replace("\n" + " " * len("tensor("), "\n" + " " * len("  rank 0: "))
