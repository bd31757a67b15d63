"""``as_strided`` of DTensors, computed by slices and ``unfold``, which have rules that keep shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..dtensor import DTensor

DimRun = tuple[int, ...]  # consecutive dims that are contiguous in memory, as if they were one dim


def as_strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Compute ``x.as_strided`` by slices and ``unfold``, for windows over dims (``stft``, banded attention) and over these.

    A window that covers a sharded dim completely keeps it sharded. Gradients go through the slices. Torch's gradient of
    ``as_strided`` addresses the memory from its start instead. Returns NotImplemented for all other strides.
    """
    runs = _dim_runs(x)
    windows = _windows(x, runs, size, stride) if offset is None or offset == x.storage_offset() else None
    if windows is None:
        return NotImplemented
    view = x.permute([d for run in runs for d in run])
    if len(runs) < x.ndim:
        view = view.view([math.prod(x.shape[d] for d in run) for run in runs])
    dims_of_view: list[Any] = [*runs]  # for each dim of the view: a run that is not read yet, or a dim of the result
    for run, result_dims in zip(runs, windows, strict=True):
        if not result_dims:
            view = view.select(dims_of_view.index(run), 0)
            dims_of_view.remove(run)
        unit = x.stride(run[-1])
        for position, d in enumerate(result_dims, 1):
            at, n, step = dims_of_view.index(run), size[d], stride[d] // unit
            width = _window_length(result_dims[position:], size, stride, unit)
            view = view.narrow(at, 0, (n - 1) * step + width)
            if position < len(result_dims):
                view = view.unfold(at, width, step)
                dims_of_view.append(run)
            elif step > 1:
                view = view[(slice(None),) * at + (slice(None, None, step),)]
            dims_of_view[at] = d
    return view.permute([dims_of_view.index(d) for d in range(len(size))])


def _dim_runs(x: DTensor) -> list[DimRun]:
    """Group the dims of ``x``, largest stride first, into runs that are contiguous in memory; a sharded dim is one run."""
    runs: list[DimRun] = []
    is_sharded = [split is not None for split in x._layout.splits]
    for d in sorted(range(x.ndim), key=x.stride, reverse=True):
        before = runs[-1][-1] if runs else None
        if before is None or is_sharded[d] or is_sharded[before] or x.stride(before) != x.stride(d) * x.shape[d]:
            runs.append((d,))
        else:
            runs[-1] = (*runs[-1], d)
    return runs


def _windows(x: DTensor, runs: Sequence[DimRun], size: Sequence[int], stride: Sequence[int]) -> list[list[int]] | None:
    """Return for each run of dims the result dims that step along it; None if some result dim fits no run."""
    if min((*size, *stride, *x.shape, *x.stride()), default=0) < 1:
        return None
    windows: list[list[int]] = [[] for _ in runs]
    is_sharded = [x._layout.splits[run[0]] is not None for run in runs]

    def fits(k: int, d: int) -> bool:
        unit, count = x.stride(runs[k][-1]), math.prod(x.shape[e] for e in runs[k])
        return stride[d] % unit == 0 and _window_length([*windows[k], d], size, stride, unit) <= count

    unread = sorted(range(len(size)), key=lambda d: -stride[d])
    for k in (k for k in range(len(runs)) if is_sharded[k]):
        full_dim = next((d for d in unread if (size[d], stride[d]) == (x.shape[runs[k][0]], x.stride(runs[k][0]))), None)
        if full_dim is not None:
            unread.remove(full_dim)
            windows[k] = [full_dim]
    for d in unread:
        run_index = next((k for k in sorted(range(len(runs)), key=is_sharded.__getitem__) if fits(k, d)), None)
        if run_index is None:
            return None
        windows[run_index].append(d)
    return windows


def _window_length(dims: Sequence[int], size: Sequence[int], stride: Sequence[int], unit: int) -> int:
    """Return the number of elements, ``unit`` apart in memory, that a window over the result dims ``dims`` spans."""
    return 1 + sum((size[d] - 1) * stride[d] for d in dims) // unit
