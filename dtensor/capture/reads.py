"""Host reads: values of tensors that become Python values, which a replay would not see change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import CaptureError

_READS = ("tolist", "numpy", "__array__", "__dlpack__", "apply_", "map_")  # what no dispatch key sees
_MISSING = object()


def refuse(what: str, within: str = "") -> CaptureError:
    """The error for a read of values."""
    inside = f" (in {within})" if within and within != what else ""
    return CaptureError(
        f"capture: {what}{inside} reads a tensor's values into Python or lets them decide a shape, so its outcome would be "
        "frozen in the tape; return the tensor and read it outside of the captured function, or write the choice with "
        "torch.where and masks"
    )


@contextmanager
def refused(reading: Callable[[], str | None]) -> Iterator[None]:
    """Inside, reading values raises where ``reading()`` gives the name of the operation at work (None: allowed)."""
    before = {name: torch.Tensor.__dict__.get(name, _MISSING) for name in _READS}
    for name in _READS:
        setattr(torch.Tensor, name, _guarded(name, getattr(torch.Tensor, name), reading))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is _MISSING:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)


def _guarded(name: str, method: Any, reading: Callable[[], str | None]) -> Any:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        within = reading()
        if within is not None and self.device.type != "meta":
            raise refuse(f"Tensor.{name}()", within)
        return method(self, *args, **kwargs)

    return read
