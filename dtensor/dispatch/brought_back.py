"""Gradients of what was moved go back to where that lies."""

from __future__ import annotations

from typing import Any

from ..placement import Replicate, Shard


def bring_back(x: Any, part: bool) -> None:
    """Have the gradient of ``x``, which is moved, brought to where ``x`` lies once all of its terms are there: half of what
    adding them up everywhere moves, and the pass back meets what the pass forward left where that lies."""
    layout, known = x._layout, x.grad_fn.metadata  # of the node: what is written to in place has another
    key = "dtensor", x.output_nr
    if key in known or layout.reduced() is not layout or not any(layout.splits):
        return
    known[key] = True

    def bring(grad: Any) -> Any:
        have = getattr(grad, "_layout", None)
        if have is None or have.mesh != layout.mesh:
            return None
        pairs = list(zip(layout.placements, have.placements, strict=True))
        if any(isinstance(found, Shard) and not isinstance(own, Shard) for own, found in pairs):
            return None  # it is cut in smaller blocks
        if all(isinstance(found, Shard) and (part or found.dim == own.dim) for own, found in pairs if isinstance(own, Shard)):
            return None  # who puts parts' gradients together has them moved together; till then they stay as even as they are
        if all(found in (own, Replicate()) for own, found in pairs if isinstance(own, Shard)):
            return None
        wanted = have.replace(placements=[own if isinstance(own, Shard) else found for own, found in pairs])
        ragged = any(isinstance(own, Shard) and own.sizes is not None for own, _ in pairs)
        if ragged and wanted.max_local_nbytes > have.max_local_nbytes:
            return None  # somebody would have more of it
        return grad.redistribute(placements=wanted.placements)

    x.register_hook(bring)
