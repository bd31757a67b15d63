"""In-place view operators (``t_``, ``squeeze_``): the tensor gets another shape, and earlier views keep shape and gradients.

After a base was written to, autograd makes the gradient functions of its views again. For a tensor subclass it repeats the view
operations on the base, which is right only if the base has its old shape. So the old tensor stays the base of its views, and the
Python object becomes a view of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...base.recorder_hooks import ACTIVE_RECORDERS
from ...base.torch_internals import CreationMeta, creation_meta, swap_impl
from ...errors import UnsupportedOperationError
from ...state.shared_memory import move_memory_state
from ..dtensor import DTensor, wrap
from ..tensor_state import OF_MEMORY
from .lazy_view import LazyView, copy_view

_INPLACE_METHODS = ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_")


def _make_method(name: str) -> Callable[..., Any]:
    """Return the in-place method ``name`` of DTensor, which makes the tensor a view of its old memory."""
    write, view = getattr(torch.Tensor, name), getattr(torch.Tensor, name.removesuffix("_"))

    def apply_inplace_view(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        """Make the tensor a view of itself, or write in place if it may not become one."""
        if self.requires_grad and (self.retains_grad or not torch.is_grad_enabled()):
            raise _make_error(self, name, args, kwargs)
        if not _may_become_a_view(self):
            return write(self, *args, **kwargs)
        with torch.enable_grad():  # also under no_grad(): the tensor may get a history later
            result = view(self, *args, **kwargs)
        _become_view(self, result)
        torch.autograd.graph.increment_version(self)  # a backward pass that saved it raises, as in plain torch
        return self

    apply_inplace_view.__name__, apply_inplace_view.__doc__ = name, write.__doc__
    return apply_inplace_view


def _may_become_a_view(x: DTensor) -> bool:
    """Return True if ``x`` may become a view of itself.

    Leaves may not, because gradients arrive in them. Tensors that torch refuses to change may not either: torch raises.
    """
    if ACTIVE_RECORDERS or x.is_inference() or torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
        return False
    if not x.requires_grad:
        return x.grad is None
    if x.is_leaf:
        return False
    return x._base is None or (creation_meta(x) == CreationMeta.DEFAULT and not x._base.is_leaf)


def _make_error(x: DTensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnsupportedOperationError:
    """Return the error for an in-place view of a tensor that retains its gradient, or requires one under ``no_grad()``."""
    arguments = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
    instead = f"{name.removesuffix('_')}({arguments})"
    cause, remedy = ("retains its", f"x = x.{instead}") if x.retains_grad else ("requires", f"x.data = x.data.{instead}")
    context = "" if x.retains_grad else " under no_grad()"
    return UnsupportedOperationError(
        f"x.{name}({arguments}) of a DTensor that {cause} grad{context} is not supported: earlier views of it "
        f"would get gradients of other elements; write `{remedy}`"
    )


def _become_view(x: DTensor, view: DTensor) -> None:
    """Give the Python object ``x`` the tensor ``view``, and ``view`` the old tensor, with which earlier views of ``x`` go.

    The old tensor moves to the other Python object, with all views of it.
    """
    old = copy_view(x) if isinstance(x, LazyView) else wrap(x._local, x._layout)
    swap_impl(x, view)
    view._assign_memory_to(x)
    old._assign_memory_to(view)
    for name in OF_MEMORY:
        if name in x.__dict__:
            view.__dict__[name] = x.__dict__.pop(name)
    move_memory_state(x, view)


def install_inplace_view_methods() -> None:
    """Define the methods of ``_INPLACE_METHODS`` on DTensor."""
    for name in _INPLACE_METHODS:
        setattr(DTensor, name, _make_method(name))
