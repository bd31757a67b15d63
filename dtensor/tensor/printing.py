"""How the values of a DTensor print: piece by piece, and nothing is sent for it."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import communicator_of, shards_of


def pieces(x: Any) -> str:
    """Every piece that this process holds, one labelled line (or block) a rank."""
    mesh = x._layout.mesh
    if mesh.kind == "dry_run":
        return ""
    ranks = mesh.ranks if communicator_of(mesh).holds_all else [mesh.get_rank()]
    return "".join(f"\n  rank {rank}: {_indented(piece)}" for rank, piece in zip(ranks, shards_of(x._local), strict=True))


def _indented(piece: torch.Tensor) -> str:
    text = repr(piece.detach())
    body = text[text.index("(") + 1 : text.rindex(")")]
    return body.replace("\n" + " " * len("tensor("), "\n" + " " * len("  rank 0: "))
