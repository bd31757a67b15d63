"""Host access: reads of a DTensor by Python and other libraries, which give the global value on every rank.

A read costs as much as ``full_tensor``. The storage of the wrapper is a null pointer. Functions that torch would compute through
it (DLPack, ``apply_``) use the full tensor instead. Functions about memory (``share_memory_``) act on the local tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Size, SymInt, Tensor

from ..base.torch_internals import (
    DispatchKey,
    ForceDispatchKeyGuard,
    excluded_keys,
    included_keys,
    is_key_excluded,
)
from ..state.functorch import below_transforms


def full_value(x: Any) -> Tensor:
    """Return the global value of ``x`` as a plain tensor, gathered without autograd."""
    with below_transforms():
        value: Tensor = x.detach().full_tensor()
    return value


def to_list(self: Any) -> Any:
    """Return the global value as nested lists, on every rank."""
    return full_value(self).tolist()


def to_numpy(self: Any, *, force: bool = False) -> Any:
    """Return the global value as an array, on every rank."""
    if self.requires_grad and not force:
        raise RuntimeError("Can't call numpy() on a DTensor that requires grad. Use x.detach().numpy() instead.")
    return full_value(self).numpy(force=force)


def to_array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """Return the global value as a NumPy array, for ``__array__``; raise for ``copy=False``, because it is a copy."""
    if copy is False:
        raise ValueError("the array of a DTensor is always a copy: leave out copy=False")
    value = self.numpy()
    return value if dtype is None else value.astype(dtype)


def to_dlpack_capsule(self: Any, **options: Any) -> Any:
    """Return a DLPack capsule of a copy of the global value."""
    if self.requires_grad:
        raise BufferError("Can't export DTensors that require gradient, use x.detach()")
    return full_value(self).clone().__dlpack__(**options)


def format_text(self: Any, spec: str) -> str:
    """Return ``format(x, spec)``: of the number if ``x`` has no dims, else its ``repr``."""
    if self.ndim == 0:
        return format(self.item(), spec)
    if spec:
        raise TypeError("unsupported format string passed to Tensor.__format__")  # torch's own message
    return repr(self)


def share_memory_(self: Any) -> Any:
    """Move the local tensor into shared memory."""
    self._local.share_memory_()
    return self


def is_shared(self: Any) -> bool:
    """Return True if the local tensor is in shared memory."""
    return bool(self._local.is_shared())


def new_of_shape(self: Any, *args: Any, size: Any = None, **options: Any) -> Any:
    """Return an uninitialized replicated tensor of this dtype (``torch.Tensor.new`` of a shape).

    For data: a plain tensor of them.
    """
    shape = size
    if size is None and all(isinstance(n, (int, SymInt)) for n in args):
        shape = args or (0,)
    elif size is None and isinstance(args[0], Size):
        (shape,) = args
    return Tensor.new(self, *args, **options) if shape is None else self.new_empty(shape, **options)


def apply_(self: Any, callable: Callable[..., Any]) -> Any:
    """Replace each element by ``callable(element)``. Every rank calls it for all elements, in the order of the global tensor."""
    if self.requires_grad:
        raise RuntimeError("Can't call apply_() on a DTensor that requires grad. Use x.detach().apply_(...) instead.")
    value = full_value(self).clone().apply_(callable)
    result = type(self).from_local(value, self.device_mesh, shape=self.shape, stride=value.stride())
    return self.copy_(result)


def is_pinned(self: Any, device: Any = None) -> bool:
    """Return True if the local tensor is in pinned memory. (The operator would gather it, and answer for the copy.)"""
    return bool(self._local.is_pinned())


def pin_memory(self: Any, device: Any = None) -> Any:
    """Return the tensor with its local tensor in pinned memory."""
    if self.is_pinned():
        return self
    options = {"shape": self.shape, "stride": self.stride()}
    return type(self).from_local(self.to_local().pin_memory(), self.device_mesh, self.placements, **options)


# --- conversions ------------------------------------------------------------------------------------------------------
_PYTHON = DispatchKey.Python
_SNAPSHOT = DispatchKey.PythonTLSSnapshot  # torch reads the thread-local state that it stores


def with_subclass_dispatch(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``convert`` with dispatch to tensor subclasses enabled, also inside ``torch.tensor([...])``.

    ``torch.tensor([x.max(), 3])`` calls ``__index__``, ``__float__`` and others of the items, and ``__iter__``, while the
    dispatch key of tensor subclasses is excluded. An operator would then read memory that a DTensor does not have.
    """

    @functools.wraps(convert)
    def convert_with_dispatch(x: Any) -> Any:
        """Call ``convert`` with the Python dispatch keys enabled, which ``torch.tensor([...])`` disables."""
        if not is_key_excluded(_PYTHON):
            return convert(x)
        included, excluded = included_keys(), excluded_keys()
        with ForceDispatchKeyGuard(included, excluded.remove(_PYTHON).remove(_SNAPSHOT)):
            return convert(x)

    return convert_with_dispatch


to_bool, to_int, to_index = (with_subclass_dispatch(convert) for convert in (Tensor.__bool__, Tensor.__int__, Tensor.__index__))
to_float, to_complex = with_subclass_dispatch(Tensor.__float__), with_subclass_dispatch(Tensor.__complex__)
iterate_rows = with_subclass_dispatch(Tensor.__iter__)
