"""Host reads: values of tensors that become Python values, which a replay would not see change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from .graph import Step, Var
from .writes import tensors_in

_NAMES = ("tolist", "numpy", "__array__", "__dlpack__", "apply_", "map_")  # what no dispatch key sees
_DECIDING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_READS = frozenset(getattr(torch.Tensor, name) for name in _NAMES)


def decides(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether values become Python values or decide a shape. An index of integers has a shape that is known, one of bools not."""
    if not any(tag in func.tags for tag in _DECIDING):
        return False
    numbers = torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor
    return func not in numbers or any(x.dtype not in (torch.int64, torch.int32) for x in tensors_in(args[1]))


def refuse(what: str, within: str = "") -> CaptureError:
    """The error for a read of values."""
    inside = f" (in {within})" if within and within != what else ""
    return CaptureError(
        f"capture: {what}{inside} reads a tensor's values into Python or lets them decide a shape, so its outcome would be "
        "frozen in the tape; return the tensor and read it outside of the captured function, or write the choice with "
        "torch.where and masks"
    )


class Refusing(TorchFunctionMode):
    """In this thread reading values raises where ``reading()`` gives the name of the operation at work (None: allowed)."""

    def __init__(self, reading: Callable[[], str | None]) -> None:
        self._reading = reading

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and args[0].device.type != "meta" and (within := self._reading()) is not None:
            raise refuse(f"Tensor.{func.__name__}()", within)
        return func(*args, **(kwargs or {}))


class Unvarying:
    """Memory that holds the same at every replay, since it was made of Python values alone: reading it decides nothing anew."""

    def __init__(self) -> None:
        self._storages: set[int] = set()

    def holds(self, variables: Iterable[Var]) -> bool:
        """Whether all of these are such memory, and there are some."""
        found = {var.storage for var in variables}
        return bool(found) and found <= self._storages

    def made(self, var: Var) -> None:
        """A tensor made of Python numbers."""
        self._storages.add(var.storage)

    def after(self, step: Step) -> None:
        """What a step makes and writes to; what a site does with what it is given is its own affair."""
        given = {var.storage for var in step.inputs}
        if step.keep or step.site or not given <= self._storages:
            self._storages -= given if step.site else step.writes
        else:
            self._storages |= {var.storage for var in step.outputs}
