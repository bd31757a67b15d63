"""What torch's ``Function.apply`` is told, so that a user's function takes tensors of all ranks; it runs in :func:`joint`.

Where the arguments are plain and the function makes tensors of all ranks inside, torch runs it as it is, and the graph that it
gave to their wrapper is handed on to them.

Torch asks nobody there, but it looks up what it calls: the class's ``forward``. From the first tensors of all ranks that a
program is given, or that require gradients (:func:`handed_out`), or modules that will make some (:func:`expected`), and not for
DTensors alone, the type of those classes is told to give one that asks first. So it holds for methods that a program keeps,
``scaled = Scaled.apply``, from before any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import local
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionMeta

from ..base.patches import changed, restored
from ..base.torch_internals import DisableTorchFunctionSubclass
from ..errors import LayoutError
from .joint_function import as_tuple, joint, sets_up
from .per_rank import _BEFORE, _JOINT, PerRank, over_ranks
from .rank_runs import function_arguments

_SIZE = torch.ops.aten.sym_size.default
_WHERE = "torch.autograd.function.FunctionMeta.__getattribute__"


def watch_functions() -> None:
    """Have ``Function.apply`` take ``PerRank`` arguments, in whatever program holds it."""
    if "__getattribute__" not in vars(FunctionMeta):
        FunctionMeta.__getattribute__ = _looked_up  # type: ignore[method-assign]  # what is told
        changed(_WHERE)


def leave_functions() -> None:
    """Torch's classes as they were."""
    if "__getattribute__" in vars(FunctionMeta):
        del FunctionMeta.__getattribute__
        restored(_WHERE)


class _Applied(local):
    """How far torch's ``apply`` is in this thread."""

    looked_up: Any = None  # the class whose ``apply`` was looked up since
    begun: Any = None  # the class whose node torch has made
    joint: Any = None  # the class that ran for all ranks
    noted: Sequence[int] = ()  # whose sizes torch asks; no reference, not even a weak one: tensors that have some are not swapped


_APPLIED = _Applied()


def _looked_up(cls: Any, name: str) -> Any:
    found = type.__getattribute__(cls, name)
    match name:
        case "apply":
            return partial(_apply, cls, found)
        case "_backward_cls":  # torch makes a node, and calls ``forward`` next
            _APPLIED.begun, _APPLIED.looked_up = (cls, _APPLIED.looked_up is cls, torch.is_grad_enabled()), None
        case "forward" if _APPLIED.begun and _APPLIED.begun[0] is cls and cls not in _AS_THEY_ARE:
            begun, _APPLIED.begun = _APPLIED.begun, None
            return partial(_forward, found, *begun)
        case "setup_context" if _APPLIED.joint is cls:
            _APPLIED.joint = None
            return _leave_out
    return found


def _apply(cls: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _APPLIED.looked_up = cls
    found = plain(*function_arguments(cls, args), **kwargs)
    return tuple(map(_apart, found)) if type(found) is tuple else _apart(found)


def _apart(found: Any) -> Any:
    """A result of plain arguments; where the function met tensors of all ranks inside they get the graph of their wrapper."""
    if type(found) is not PerRank:
        return found
    with DisableTorchFunctionSubclass():
        given = found.requires_grad
    return PerRank(_Apart.apply(found)) if given else found


def _forward(plain: Callable[..., Any], cls: Any, looked_up: bool, gradients: bool, *args: Any) -> Any:
    """What torch calls: the class's own, or all ranks' with a graph of their own, which torch's node has no part in."""
    later = sets_up(cls)
    of_ranks = any(type(arg) is PerRank for arg in args)
    if of_ranks:
        with torch.set_grad_enabled(gradients):
            found = joint(cls, args if later else args[1:])
    else:
        found = plain(*args)
    ranks = [x for x in (*args, *as_tuple(found)) if type(x) is PerRank]
    if not ranks:
        return found
    _APPLIED.noted = [*map(id, ranks)]
    if not of_ranks and not looked_up and gradients and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise LayoutError(
            f"{cls.__name__}.apply was read before PerRank tensors were in use, and does not support them; "
            f"read it again at the call: {cls.__name__}.apply(x)"
        )
    if of_ranks and later:
        _APPLIED.joint = cls
    elif of_ranks:
        _leave_out(args[0], args, found)
    return found


def _leave_out(context: Any, inputs: Any, found: Any) -> None:
    context.mark_non_differentiable(*(x for x in as_tuple(found) if isinstance(x, Tensor)))


def _size(x: PerRank) -> Any:
    """Torch's node has no part in it, and notes sizes of arguments and results all the same: it is told the first rank's."""
    return x.shards[0].shape if id(x) in _APPLIED.noted else over_ranks(_SIZE, (x,), {})


class _Apart(Function):
    """All ranks' tensors as one, which torch gave a graph -> the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, found: PerRank) -> tuple[Tensor, ...]:
        return tuple(shard.detach() for shard in found.shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = PerRank(grads)
        _APPLIED.noted = [id(grad)]
        return grad


_AS_THEY_ARE = {_Apart, getattr(torch.utils.checkpoint, "_NoopSaveInputs", _Apart)}  # the other: torch 2.11's, never run backward

_BEFORE.append(watch_functions)
_JOINT[_SIZE] = _size
