"""Memory order: the order of tensor dims in memory, and the dense strides of an order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .caches import memoize

Stride = tuple[int, ...]


@memoize(4096)
def contiguous_stride(shape: tuple[int, ...]) -> Stride:
    """Return the strides of a row-major tensor of ``shape``."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def dims_outermost_first(stride: Sequence[int], dims: Iterable[int] | None = None) -> list[int]:
    """Return all dims, or ``dims``, sorted by stride, the largest first. Dims of stride 0 keep their position, as in torch.

    >>> dims_outermost_first((0, 1, 4)), dims_outermost_first((4, 0, 1))
    ([0, 2, 1], [0, 1, 2])
    """
    selected = range(len(stride)) if dims is None else list(dims)
    ordered = sorted([d for d in selected if stride[d]], key=lambda d: -stride[d])
    if len(ordered) == len(selected):
        return ordered
    in_order = iter(ordered)
    return [next(in_order) if stride[d] else d for d in selected]


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> Stride:
    """Return dense strides for dims in the memory order ``order``, outermost first. ``()`` means row-major.

    >>> dense_stride((2, 3), (1, 0))
    (1, 2)
    """
    if not order:
        return contiguous_stride(tuple(shape))
    stride = [0] * len(shape)
    for d, step in zip(order, contiguous_stride(tuple([shape[d] for d in order])), strict=True):
        stride[d] = step
    return tuple(stride)


def stride_like(shape: Sequence[int], like: Sequence[int]) -> Stride:
    """Return dense strides for ``shape`` with the dims in the memory order of the strides ``like``."""
    return dense_stride(shape, dims_outermost_first(like))


@memoize(4096)
def memory_order(shape: tuple[int, ...], stride: Stride) -> tuple[int, ...] | None:
    """Return the dims of a dense tensor, outermost in memory first: ``()`` if row-major; None if it is not dense.

    >>> memory_order((2, 3), (3, 1)), memory_order((2, 3), (1, 2)), memory_order((2, 3), (0, 1))
    ((), (1, 0), None)
    """
    if stride == contiguous_stride(shape):
        return ()
    order = tuple(dims_outermost_first(stride))
    return order if dense_stride(shape, order) == stride else None


def has_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if elements of the tensor may share memory, as those of sliding windows do.

    >>> has_overlap((4, 2), (1, 1)), has_overlap((2, 3), (1, 2)), has_overlap((2, 3), (0, 1))
    (True, False, True)
    """
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
