"""How the values of a DTensor print: piece by piece, and nothing is sent for it."""

from __future__ import annotations

from typing import Any

import torch

from ..comm import PerRank


def pieces(x: Any) -> str:
    """Every piece that this process holds, one labelled line (or block) a rank."""
    mesh = x._layout.mesh
    local = x._local
    if mesh.kind == "dry_run":
        return ""
    if isinstance(local, PerRank):
        shown = list(zip(mesh.ranks, local.shards, strict=True))
    else:
        shown = [(mesh.get_rank(), local)]
    return "".join(f"\n  rank {rank}: {_indented(piece)}" for rank, piece in shown)


def _indented(piece: torch.Tensor) -> str:
    text = repr(piece.detach())
    body = text[text.index("(") + 1 : text.rindex(")")]
    return body.replace("\n" + " " * len("tensor("), "\n" + " " * len("  rank 0: "))
