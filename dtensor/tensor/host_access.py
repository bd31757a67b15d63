"""What Python and other libraries read of a DTensor: the global value, on every rank. Each costs what ``full_tensor`` does.

The wrapper's own storage is a null pointer: what torch would read through it (DLPack, ``apply_``) is read from the whole value
here, and what concerns memory (``share_memory_``) is done to the local.
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
from ..dispatch.functorch import below_transforms


def whole_of(x: Any) -> Tensor:
    """The global value as a plain tensor outside of autograd."""
    with below_transforms():
        whole: Tensor = x.detach().full_tensor()
    return whole


def tolist(self: Any) -> Any:
    """The global value as nested lists, on every rank."""
    return whole_of(self).tolist()


def numpy(self: Any, *, force: bool = False) -> Any:
    """The global value as an array, on every rank."""
    if self.requires_grad and not force:
        raise RuntimeError("Can't call numpy() on a DTensor that requires grad. Use x.detach().numpy() instead.")
    return whole_of(self).numpy(force=force)


def array(self: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """What NumPy makes of it; as NumPy asks, ``copy=False`` raises where a copy is needed, as it is here."""
    if copy is False:
        raise ValueError("the array of a DTensor is always a copy: leave out copy=False")
    whole = self.numpy()
    return whole if dtype is None else whole.astype(dtype)


def dlpack(self: Any, **options: Any) -> Any:
    """A DLPack capsule of a copy of the global value."""
    if self.requires_grad:
        raise BufferError("Can't export DTensors that require gradient, use x.detach()")
    return whole_of(self).clone().__dlpack__(**options)


def text(self: Any, spec: str) -> str:
    if self.ndim == 0:
        return format(self.item(), spec)
    if spec:
        raise TypeError("unsupported format string passed to Tensor.__format__")  # as torch raises it
    return repr(self)


def share_memory_(self: Any) -> Any:
    """Move the local into shared memory."""
    self._local.share_memory_()
    return self


def is_shared(self: Any) -> bool:
    """Whether the local is in shared memory."""
    return bool(self._local.is_shared())


def new(self: Any, *args: Any, size: Any = None, **options: Any) -> Any:
    """As ``torch.Tensor.new`` of a shape: not initialised, of this dtype, replicated as ``new_empty`` gives it. Data are plain,
    as those of ``new_tensor``."""
    shape = size
    if size is None and all(isinstance(n, (int, SymInt)) for n in args):
        shape = args or (0,)
    elif size is None and isinstance(args[0], Size):
        (shape,) = args
    return Tensor.new(self, *args, **options) if shape is None else self.new_empty(shape, **options)


def apply_(self: Any, callable: Callable[..., Any]) -> Any:
    """``callable`` of each element in its place. Every rank calls it for all elements, in the order of the global tensor."""
    if self.requires_grad:
        raise RuntimeError("Can't call apply_() on a DTensor that requires grad. Use x.detach().apply_(...) instead.")
    whole = whole_of(self).clone().apply_(callable)
    made = type(self).from_local(whole, self.device_mesh, shape=self.shape, stride=whole.stride())
    return self.copy_(made)


def is_pinned(self: Any, device: Any = None) -> bool:
    """Whether the local is in pinned memory. (Asked through the operator it would be about a gathered copy.)"""
    return bool(self._local.is_pinned())


def pin_memory(self: Any, device: Any = None) -> Any:
    """The same tensor with its local in pinned memory."""
    if self.is_pinned():
        return self
    options = {"shape": self.shape, "stride": self.stride()}
    return type(self).from_local(self.to_local().pin_memory(), self.device_mesh, self.placements, **options)


# --- conversions ------------------------------------------------------------------------------------------------------
_excluded = is_key_excluded
_PYTHON = DispatchKey.Python
_SNAPSHOT = DispatchKey.PythonTLSSnapshot  # what takes a subclass to Python looks for the state it keeps


def subclasses_included(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``convert`` of a tensor, also where torch converts the items of a list.

    ``torch.tensor([x.max(), 3])`` calls ``__index__``, ``__float__`` and so on of the items, and ``__iter__``, while the thread's
    dispatcher leaves tensor subclasses out: an operator would then look for memory that a DTensor does not have.
    """

    @functools.wraps(convert)
    def converted(x: Any) -> Any:
        if not _excluded(_PYTHON):
            return convert(x)
        included, excluded = included_keys(), excluded_keys()
        with ForceDispatchKeyGuard(included, excluded.remove(_PYTHON).remove(_SNAPSHOT)):
            return convert(x)

    return converted


truth, integer, index = (subclasses_included(convert) for convert in (Tensor.__bool__, Tensor.__int__, Tensor.__index__))
real, complex_number = subclasses_included(Tensor.__float__), subclasses_included(Tensor.__complex__)
rows = subclasses_included(Tensor.__iter__)
