"""Torch's own way from a kernel of ours on, before torch 2.13.

Where a tensor enters that is taken to Python (a subclass; under a mode any), torch takes down the thread's state, and looks for
it there. A kernel that stands there in its place takes down nothing: so another operator is entered first, in which the first one
goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import local as per_thread
from typing import Any

import torch
from torch import Tensor

from ...base.patches import changed
from ...base.tensor_tree import tensors
from ...base.torch_internals import count_dispatch_modes


class _Waiting(per_thread):
    """What goes on inside of the operator that is entered, and what has come of it, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.results: list[Any] = []


_WAITING = _Waiting()
_LIBRARY: list[torch.library.Library] = []  # what it declares lasts as long as it does


def entered(going_on: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``going_on(*args, **kwargs)`` gives, inside of an operator on one of their tensors that is taken to Python."""
    mode, own = count_dispatch_modes() > 0, Tensor.__torch_dispatch__
    taken = next((x for x in tensors([args, kwargs]) if mode or type(x).__torch_dispatch__ is not own), None)
    if taken is None:
        return going_on(*args, **kwargs)
    if not _LIBRARY:
        library = torch.library.Library("dtensor", "FRAGMENT")
        library.define("enter(Tensor x) -> ()")
        for key in ("CompositeImplicitAutograd", "Python"):  # the second in inference mode
            library.impl("enter", _go_on, key)
        _LIBRARY.append(library)
        changed("torch.ops.dtensor")
    _WAITING.calls.append(partial(going_on, *args, **kwargs))
    torch.ops.dtensor.enter(taken)
    return _WAITING.results.pop()


def _go_on(x: Tensor) -> None:
    _WAITING.results.append(_WAITING.calls.pop()())
