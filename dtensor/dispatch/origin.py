"""Whose a plain tensor is that an operator meets beside DTensors: the user's, autograd's, or one that torch made on the way.

A user's plain tensor is an error, since a rank cannot see whether the others hold the same. But ``one_hot``, ``istft``,
``quantile``, an LSTM without a state or an index written as a list make constants inside torch, which no user can distribute. Two
facts tell them apart: no Python code refers to what C++ made, and torch's Python functions keep what they made in frames whose
arguments lack it. A copy of a user's tensor looks the same, so across processes values are compared first (:func:`agree`).
"""

from __future__ import annotations

import dis
import sys
import zlib
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch

from ..base.caches import remembered
from ..base.modes import MODES
from ..base.recording import aside
from ..comm import communicator_of
from ..comm.backends import flat_bytes
from ..errors import ImplicitCommunicationError, MixedTensorError
from ..mesh.device_mesh import DeviceMesh

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parents[1])
_STAND_INS = (str(Path(__file__).parents[1] / "tensor" / "composites"),)  # for torch's own code


class Origin(IntEnum):
    """Who made a plain tensor."""

    USER = 0
    AUTOGRAD = 1  # constants of its formulas (zeros to scatter into), the same on all ranks, as 0-d ones count to be
    TORCH = 2
    TARGET = 3  # the user's, inside of loss_parallel(): a loss may count it as replicated, nobody else


class _Probed(Exception):
    def __init__(self, references: int) -> None:
        self.references = references


_probing: set[int] = set()  # threads


def origin_of(value: torch.Tensor) -> Origin:
    """Who made ``value``, an argument of the call that dispatch is at."""
    if torch._C._current_graph_task_id() != -1:
        return Origin.AUTOGRAD
    references = sys.getrefcount(value)
    if _probing and get_ident() in _probing:
        if type(value) is _Probe:
            return Origin.USER
        raise _Probed(references)
    if references <= references_of_dispatch():
        return Origin.TORCH
    if _made_in_torch(value):
        return Origin.TORCH
    return Origin.TARGET if MODES.plain_targets else Origin.USER


class _Probe(torch.Tensor):
    """Goes through dispatch as a DTensor does."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in tensor.py


@cache
def references_of_dispatch() -> int:
    """How many references dispatch itself has to a tensor that C++ made, seen on a call that is known to make one."""
    from .dispatcher import _MAKE, dispatch  # the way there is what is measured

    _Probe.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]  # the stub's has other names
    _probing.add(get_ident())
    try:
        _MAKE(_Probe, (2,))[[0],]  # a list as an index becomes a tensor
    except _Probed as seen:
        return seen.references
    finally:
        _probing.discard(get_ident())
    return 0


def _made_in_torch(value: torch.Tensor) -> bool:
    """Whether one of torch's Python functions is running and its caller neither gave it ``value`` nor has it in a variable."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    outermost = None
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, *_STAND_INS)):
        outermost, frame = outermost if frame.f_code.co_filename.startswith(_STAND_INS) else frame, frame.f_back
    if outermost is None or outermost.f_code.co_filename.endswith("_tensor.py"):  # operators of Tensor: `plain - x`
        return False
    address = value.untyped_storage().data_ptr()
    known = _arguments(outermost) + ([] if frame is None else list(frame.f_locals.values()))
    return not address or all(given.untyped_storage().data_ptr() != address for given in _tensors(known))


def _arguments(frame: FrameType) -> list[Any]:
    held = frame.f_locals
    return [held.get(name) for name in _kept_parameters(frame.f_code)]


@remembered(4096)
def _kept_parameters(code: CodeType) -> tuple[str, ...]:
    """The parameters that a function never assigns: others may hold what it made itself (``offsets`` of ``embedding_bag``)."""
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)
    assigned = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname.startswith("STORE_FAST")}
    return tuple(name for name in code.co_varnames[:count] if name not in assigned)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        while torch._C._functorch.is_functorch_wrapped_tensor(value):  # under vmap or grad: what it stands for has the memory
            value = torch._C._functorch.get_unwrapped(value)
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from (t for t in (*value.parameters(), *value.buffers()) if type(t) in (torch.Tensor, torch.nn.Parameter))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


@aside
def agree(value: torch.Tensor, mesh: DeviceMesh, what: str) -> None:
    """Check that all ranks hold the same ``value``. One small all-gather of objects.

    Raises:
        MixedTensorError: they do not (on all ranks alike).
    """
    if mesh.kind != "process_group" or mesh.current_member() is None or isinstance(value, torch._subclasses.FakeTensor):
        return
    if MODES.explicit:
        raise ImplicitCommunicationError(f"{what} would compare a plain tensor between ranks under explicit()")
    content = flat_bytes(value).cpu().numpy().tobytes()
    sums = communicator_of(mesh).all_gather_object(zlib.crc32(content), tuple(range(mesh.ndim)))
    if len(set(sums)) > 1:
        raise MixedTensorError(
            f"{what} mixes DTensors with a plain tensor of shape {tuple(value.shape)} that differs between ranks; "
            "distribute what it was made from with distribute_tensor(t, mesh, placements)"
        )
