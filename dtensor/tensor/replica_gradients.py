"""Replica gradients: check that ranks compute equal gradients for a replicated value.

By default the gradient of a replicated local tensor is the one that each rank computes. Ranks that use the value for different
batches compute different ones, and would continue with different values. In process, all gradients are compared each time.
Processes exchange a summary of them. To keep backward passes cheap, they do so at the first, second, fourth, eighth ... pass that
reaches a line.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..base.caches import BoundedDict
from ..base.recorder_hooks import untracked
from ..base.torch_internals import graph_task, is_legacy_batched
from ..base.tracing import has_no_values
from ..base.user_frames import find_user_frame
from ..comm.cross_rank_check import gather_summaries, payload_bytes
from ..comm.map_ranks import communicator_of
from ..errors import LayoutError
from ..layout.layout import Layout
from ..placement import Replicate
from ..ranks.per_rank_functorch import unwrap_functorch
from ..ranks.plain_tensors import check_equal_gradients, gradient_difference_text
from ..watchdog.levels import CheckLevel

LocalUse = tuple[str, int, Layout]


class _BackwardPass(threading.local):
    """The backward pass of this thread, and the number of gradients of each use in it."""

    task = -1
    counts: dict[LocalUse, int]


_PASS = _BackwardPass()
_PASSES: BoundedDict[tuple[LocalUse, int], int] = BoundedDict(
    4096, "replica_gradients.passes"
)  # (use, count in its pass) -> passes


def find_use(layout: Layout) -> LocalUse | None:
    """Return the user's line that makes local tensors of ``layout``; None if their gradients need no comparison."""
    if (
        CheckLevel.now == "off"
        or not _replicated_dims(layout)
        or not communicator_of(layout.mesh).has_other_processes
        or layout.mesh.current_member() is None
    ):
        return None
    frame = find_user_frame(sys._getframe(1))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, layout)


def compare_replicas(layout: Layout, grads: Sequence[torch.Tensor], use: LocalUse | None) -> None:
    """Raise if ranks have different gradients for local tensors that are replicas; ``use`` is the line that made these.

    On process groups it costs one exchange of 64 KiB in all, at the first, second, fourth, eighth ... pass that reaches the use.
    ``check_ranks("off")`` turns it off.

    Raises:
        LayoutError: ranks along a replicated mesh dim have different gradients; on all ranks of the mesh.
    """
    dims = _replicated_dims(layout)
    if not dims or is_legacy_batched(grads[0]):  # under the old vmap each element of a batch would be compared
        return
    if len(grads) > 1:
        for members in {layout.mesh.members_of(dims, member) for member in layout.mesh.members}:
            check_equal_gradients(*[unwrap_functorch(grads[member].detach()) for member in members])
    elif use is not None:
        grad = unwrap_functorch(grads[0].detach())
        if not has_no_values(grad) and _is_due(use):
            _compare_on_processes(layout, dims, grad)


def _replicated_dims(layout: Layout) -> list[int]:
    """Return the mesh dims along which ranks have copies."""
    return [i for i, p in enumerate(layout.placements) if isinstance(p, Replicate) and layout.mesh.shape[i] > 1]


def _is_due(use: LocalUse) -> bool:
    """Count a gradient of ``use`` in this backward pass. Return True if 1, 2, 4, 8 ... passes have reached it."""
    task = graph_task()
    if task != _PASS.task:
        _PASS.task, _PASS.counts = task, {}
    count = _PASS.counts[use] = _PASS.counts.get(use, 0) + 1
    passes = _PASSES.keep((use, count), (_PASSES.get((use, count)) or 0) + 1)
    return passes & (passes - 1) == 0


@untracked
def _compare_on_processes(layout: Layout, dims: Sequence[int], grad: torch.Tensor) -> None:
    """Exchange a summary of ``grad`` over all ranks of the mesh, and raise on all if replicas differ."""
    mesh, size = layout.mesh, payload_bytes(layout.mesh)
    numbers, scale = _summarize(grad, size // 8 - 2)
    payload = torch.cat([numbers.new_tensor([len(numbers), scale]), numbers]).numpy().tobytes()
    rows = (
        gather_summaries(mesh, "the gradient of a replicated tensor", (), payload, size)
        .payloads.cpu()
        .contiguous()
        .view(torch.float64)
    )
    order = mesh.members_of(range(mesh.ndim), mesh.current_member() or 0)
    tolerance = torch.finfo(grad.dtype).eps ** 0.5
    for members in dict.fromkeys(mesh.members_of(dims, member) for member in order):
        first, *others = (rows[order.index(member)] for member in members)
        length = 2 + int(first[0])
        for other in others:
            if not torch.allclose(other[2:length], first[2:length], tolerance, tolerance * first[1].item(), equal_nan=True):
                raise LayoutError(gradient_difference_text(layout.local_shape(mesh.coordinates[members[0]])))


def _summarize(grad: torch.Tensor, count: int) -> tuple[torch.Tensor, float]:
    """Return at most ``count`` sums of neighboring elements of a gradient, and the scale of their rounding errors."""
    flat = (torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad).reshape(-1).cpu().double()
    chunk_length = max(1, -(-flat.numel() // max(count, 1)))
    finite = flat[flat.isfinite()]
    sums = F.pad(flat, (0, -flat.numel() % chunk_length)).view(-1, chunk_length).sum(1)
    return sums, float(finite.abs().max()) * chunk_length**0.5 if finite.numel() else 0.0
