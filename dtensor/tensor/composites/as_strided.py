"""``as_strided`` by views of which rules know more: windows over windows of runs of dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..dtensor import DTensor
from .above_autograd import GOES_ON, recomposed

Run = tuple[int, ...]  # dims that lie in memory as one would


def strided(x: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """What ``stft`` and attention in bands read: windows of runs of dims, and windows of these, shown by slices and ``unfold``.
    So what reads cut dims whole stays with them, and so do gradients, which ``as_strided`` itself counts from the beginning of
    the memory. What is nothing of the kind is ``as_strided`` as it stands.
    """
    runs = _runs(x)
    read = _read_of(x, runs, size, stride) if offset is None or offset == x.storage_offset() else None
    if read is None:
        return NotImplemented
    made = x.permute([d for run in runs for d in run])
    if len(runs) < x.ndim:
        made = made.view([math.prod(x.shape[d] for d in run) for run in runs])
    shown: list[Any] = [*runs]  # what each dim is: a run that is still to be read, or a dim of the result
    for run, dims in zip(runs, read, strict=True):
        if not dims:
            made = made.select(shown.index(run), 0)
            shown.remove(run)
        unit = x.stride(run[-1])
        for place, d in enumerate(dims, 1):
            at, n, step = shown.index(run), size[d], stride[d] // unit
            width = _reach(dims[place:], size, stride, unit)
            made = made.narrow(at, 0, (n - 1) * step + width)
            if place < len(dims):
                made = made.unfold(at, width, step)
                shown.append(run)
            elif step > 1:
                made = made[(slice(None),) * at + (slice(None, None, step),)]
            shown[at] = d
    return made.permute([shown.index(d) for d in range(len(size))])


def _runs(x: DTensor) -> list[Run]:
    """The dims of ``x`` by how far apart their elements lie, farthest first; a cut one is a run of its own."""
    runs: list[Run] = []
    cut = [split is not None for split in x._layout.splits]
    for d in sorted(range(x.ndim), key=x.stride, reverse=True):
        before = runs[-1][-1] if runs else None
        if before is None or cut[d] or cut[before] or x.stride(before) != x.stride(d) * x.shape[d]:
            runs.append((d,))
        else:
            runs[-1] = (*runs[-1], d)
    return runs


def _read_of(x: DTensor, runs: Sequence[Run], size: Sequence[int], stride: Sequence[int]) -> list[list[int]] | None:
    """For each run the dims of the result that step along it, in order; None if a step goes along none."""
    if min((*size, *stride, *x.shape, *x.stride()), default=0) < 1:
        return None
    read: list[list[int]] = [[] for _ in runs]
    cut = [x._layout.splits[run[0]] is not None for run in runs]

    def fits(k: int, d: int) -> bool:
        unit, count = x.stride(runs[k][-1]), math.prod(x.shape[e] for e in runs[k])
        return stride[d] % unit == 0 and _reach([*read[k], d], size, stride, unit) <= count

    left = sorted(range(len(size)), key=lambda d: -stride[d])
    for k in (k for k in range(len(runs)) if cut[k]):
        whole = next((d for d in left if (size[d], stride[d]) == (x.shape[runs[k][0]], x.stride(runs[k][0]))), None)
        if whole is not None:
            left.remove(whole)
            read[k] = [whole]
    for d in left:
        along = next((k for k in sorted(range(len(runs)), key=cut.__getitem__) if fits(k, d)), None)
        if along is None:
            return None
        read[along].append(d)
    return read


def _reach(dims: Sequence[int], size: Sequence[int], stride: Sequence[int], unit: int) -> int:
    """How many elements, each ``unit`` after the one before, lie from the first that these dims show to the last."""
    return 1 + sum((size[d] - 1) * stride[d] for d in dims) // unit


if GOES_ON:
    recomposed("aten::as_strided", strided)
