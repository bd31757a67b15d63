"""Where elements are: results whose size the data decide. They are whole on every rank.

Each rank lists those of its own block, and only the lists are gathered: their lengths, then the rows.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call import Call
from ..kernels import At, KernelContext
from ..rule import Factors, Kernel, own_factors
from ..verbs import kernel_rule

aten = torch.ops.aten


def gathered_rows(at: KernelContext, rows: Any) -> list[Any]:
    """Every group position's rows, each rank having its own number of them."""
    counts = at.all_gather(at.map(lambda _, own: torch.tensor([own.shape[0]], device=own.device), rows))
    lengths = dict(_by_member(at, counts).items())
    shape = tuple(rows.shape[1:]) if not hasattr(rows, "shards") else tuple(rows.shards[0].shape[1:])
    return at.all_gather(rows, lambda member: (lengths[member], *shape))


def _by_member(at: KernelContext, counts: list[Any]) -> dict[int, int]:
    """How many rows each member of the mesh has, those held here and their groups."""
    found: dict[int, int] = {}

    def note(here: At, own: list[torch.Tensor]) -> torch.Tensor:
        group = at.call.mesh.members_of(at.mesh_dims, here.member)
        found.update(zip(group, (int(count.item()) for count in own), strict=True))
        return own[0]

    at.map(note, counts)
    return found


def nonzero_of_blocks(at: KernelContext, x: Any) -> Any:
    """Positions in the whole, in row-major order."""
    layout = at.operands[0]
    shape, coordinates = tuple(layout.shape), at.call.mesh.coordinates

    def own(here: At, block: torch.Tensor) -> torch.Tensor:
        offset = torch.tensor(layout.local_offset(coordinates[here.member]), device=block.device, dtype=torch.int64)
        return torch.nonzero(block) + offset

    def ordered(_: Any, parts: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.cat(parts)
        flat = torch.zeros_like(rows[:, 0])
        for d, size in enumerate(shape):
            flat = flat * size + rows[:, d]
        return torch.empty_like(rows.t().contiguous()).t().copy_(rows[flat.argsort()])  # the strides that torch gives

    return at.map(ordered, gathered_rows(at, at.map(own, x)))


def everywhere(call: Call) -> Factors:
    """Each dim may be sharded, several at once."""
    dims, sizes = own_factors(call)
    return Factors((dims,), (), sizes, kernels=dict.fromkeys(sizes, Kernel(nonzero_of_blocks, collectives=2, joint=True)))


kernel_rule("nonzero", everywhere, measured=True)


# --- values that occur ---
def nothing_cut(call: Call) -> Factors:
    """Every rank needs all of it: counts, whose places follow from those before them."""
    known = tuple(((),) * len(meta.shape) for meta in call.results if meta is not None)
    return Factors((((),) * len(call.shape(0)),), known, {})


kernel_rule("repeat_interleave.Tensor", nothing_cut, measured=True)
