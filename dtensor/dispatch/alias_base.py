"""Keepers: find the tensor that keeps the versions and the cached copies of the memory that another tensor is a view of."""

from __future__ import annotations

from typing import Any

import torch

from ..base.memory_order import memory_order, outermost_first
from ..base.reenable_autograd import seen_by_autograd
from ..base.torch_internals import CreationMeta, creation_meta
from ..base.tracing import any_number_is_open, has_no_values
from .version_counters import counting

PARTS = "_parts"  # the attribute of a tensor that has the forms of its parts


def home_of(x: Any) -> Any:
    """Whose counter tells of writes to the memory of ``x``."""
    root = x if x._base is None else x._base
    found = counting(root)
    return root if found is None else found


def keeper_of(x: Any, home: Any) -> tuple[Any, Any]:
    """The tensor that has what is remembered of the memory that ``x`` shows, and which part of its own that is (None: all).

    Views of one part, in whatever order of dims, are one value. Their base has it, since how long a view lives is no fact of the
    program: one rank may keep it to look at, or have it in a circle that its collector has not found.
    """
    if _same_memory(x, home):
        return home, None
    part = _part(x) if home is x._base else None
    return (x, None) if part is None else (home, part)


def recorded(x: Any) -> bool:
    """Whether autograd saw ``x`` made of others (it refuses to tell of views that it did not)."""
    if x._base is None:
        return x.grad_fn is not None
    if creation_meta(x) in (CreationMeta.NO_GRAD_MODE, CreationMeta.INFERENCE_MODE):
        return False
    with seen_by_autograd():  # of a view whose base has been written to torch makes the view anew, and its node with it
        return x.grad_fn is not None


def _part(x: Any) -> Any:
    """What tells the elements of its base that ``x`` shows from others; None if that is not known."""
    layout, offset = x._layout, offset_in(x._base, x)
    if offset is None or layout.dtype is not x._base._layout.dtype or layout.is_complex:
        return None
    order = outermost_first(layout.stride)
    return offset, *[(layout.shape[d], layout.stride[d]) for d in order]


def _same_memory(x: Any, home: Any) -> bool:
    """Whether ``x`` shows each element of ``home``, as it is: then its layout says all that there is to say of it."""
    seen, whole = x._layout, home._layout
    return x is home or (
        seen.dtype is whole.dtype
        and not seen.is_complex
        and seen.numel == whole.numel
        and all(memory_order(layout.shape, layout.stride) is not None for layout in (seen, whole))
    )


def offset_in(root: Any, view: Any) -> int | None:
    """Where plain torch would have ``view`` begin in the memory of ``root``; None where autograd cannot tell."""
    shown = shown_in(root, view)
    return None if shown is None else int(shown.storage_offset())


def shown_in(root: Any, view: Any) -> torch.Tensor | None:
    """What plain torch would have ``view`` be in the memory of ``root``, without data; None where autograd cannot tell.

    It did not see the view made, ``root`` has come to be seen in another way, or one of the two has other memory by now.
    """
    if "_left" in root.__dict__ or (
        creation_meta(view) == CreationMeta.MULTI_OUTPUT_NODE and any_number_is_open() and has_no_values(root._local)
    ):
        return None  # torch 2.13 has moved a split's size, if it is a symbol, into the first of its views
    like = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta")
    try:
        shown = view._view_func_unsafe(like)
    except (RuntimeError, IndexError):
        return None
    alike = shown is not None and shown.shape == view.shape and shown.stride() == view.stride()
    return shown if alike else None
