"""What ``torch.compile`` asks of a tensor: the piece that it holds, and the layout under which that is the whole.

Compiled programs see the piece; the layout is a constant of theirs, on which they are guarded. Only this rank's piece of a mesh
of processes is such a tensor: with all ranks in this process, and in a dry run, a DTensor does not flatten, and the graph breaks.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.compiler import is_exporting

from ..base import torch_internals
from ..base.modes import MODES
from ..base.torch_internals import graph_task
from ..base.tracing import kept
from ..dispatch.wrapping import wrap_local
from ..errors import DTensorError, UnsupportedOperationError
from ..layout.layout import Layout
from .autograd import grad_layout, move, to_whole


class Flatten:
    """``__tensor_flatten__``: torch asks an instance whether it has one."""

    def __init__(self, flatten: Callable[..., Any], piece: str = "_local") -> None:
        self.flatten, self.piece = flatten, piece

    def __get__(self, x: Any, kind: type) -> Callable[..., Any]:
        if x is None:
            return self.flatten
        if is_exporting() and torch_internals.export_trace._EXPORT_MODULE_HIERARCHY is not None:
            raise UnsupportedOperationError(
                "torch.export of a model of DTensors: an exported program has no form for them; export it before its parameters "
                "are distributed, or use torch.compile"
            )
        getattr(x, self.piece)  # one that is on its way arrives, and is a DTensor from now on
        if x._layout.mesh.kind != "process_group":
            if torch_internals.TracingContext.try_get() is not None:
                _say_once()
                raise torch_internals.Unsupported(ALL_RANKS)
            raise AttributeError(f"a tensor on {x._layout.mesh!r} is not one piece: torch.compile does not look into it")
        return partial(self.flatten, x)


ALL_RANKS = (
    "with all ranks in this process, and in a dry run, DTensors are not compiled: the graph breaks at each operation on them; "
    "start a process for each rank, or use dtensor.capture"
)


@cache
def _say_once() -> None:
    warnings.warn(f"torch.compile: {ALL_RANKS}", stacklevel=2)


class Dropped:
    """What ``torch._dynamo.mark_dynamic`` writes to a tensor. A layout has sizes, and a graph is for one layout: where a mark
    were kept torch would refuse such a graph, instead of making one for each size."""

    def __get__(self, x: Any, kind: type) -> Any:
        return self if x is None else set()

    def __set__(self, x: Any, value: Any) -> None:
        pass


Constants = tuple[Layout, bool, bool]


def flatten(x: Any) -> tuple[list[str], Constants]:
    """The piece, and what graphs are guarded on: the layout and the modes, under which another program might be right."""
    marks = vars(x._local)
    if marks.pop("_dynamo_dynamic_indices", None) is not None:  # torch marks pieces, too: see Dropped
        marks.pop("_has_dynamo_dim_marking", None)
    if (task := graph_task()) >= 0:
        _taken(x._local, task)
    return ["_local"], (x._layout, MODES.explicit, MODES.implicit_replication)


def unflatten(pieces: dict[str, torch.Tensor], constants: Constants, size: Sequence[int], stride: Sequence[int]) -> Any:
    """The DTensor with this piece; sizes that are symbols are looked at, so that the graph is one for these sizes."""
    layout, shape, steps = constants[0], tuple(map(int, size)), tuple(map(int, stride))
    if shape != tuple(layout.shape) or steps != tuple(layout.stride):
        layout = layout.replace(shape=shape, stride=steps)
    local = pieces["_local"]
    return wrap_local(local if (task := graph_task()) < 0 else _own(local, task), layout)


def _own(local: torch.Tensor, task: int) -> torch.Tensor:
    """A gradient that a compiled backward pass gives, in memory that no other of the pass has: a graph gives one tensor for
    several (of ``x + y``), or what it was given, and autograd takes each wrapper for one that nobody else has."""
    repeated = 0 in local.stride() and local.numel() > 1
    if repeated or _taken(local, task):
        return local.clone(memory_format=torch.contiguous_format if repeated else torch.preserve_format)
    return local


def _taken(local: torch.Tensor, task: int) -> bool:
    """Whether the memory of ``local`` was in a gradient of this pass before; it is from now on."""
    if type(local) is not torch.Tensor:  # a stand-in
        return False
    seen = vars(_PASS).setdefault("seen", {})
    if task not in seen:
        seen.clear()
        seen[task] = set()
    where = local.untyped_storage().data_ptr()
    known = where in seen[task]
    seen[task].add(where)
    return known


_PASS = threading.local()


def as_any_tangent(x: Any) -> Any:
    """A result as its gradient is laid while the backward pass is traced."""
    layout = grad_layout(x._layout, None)
    return x if layout is x._layout else move(x, layout)


def as_tangent(x: Any, constants: Constants | None, expected: type | None = None) -> Any:
    """A gradient as it was laid when the backward pass was traced."""
    if constants is None:
        return x if expected is None else to_whole(x, None)
    layout = constants[0]
    if "_origin" in vars(x):
        x = wrap_local(x._local, x._layout)
    if x._layout is layout:
        return x
    if x._layout.mesh != layout.mesh or x._layout.shape != layout.shape:
        raise DTensorError(f"a gradient of {x._layout!r} for a compiled result of {layout!r}")
    moved = move(x, layout)
    if moved._layout.stride == layout.stride:
        return moved
    return wrap_local(layout.block_beside(moved._local, layout.mesh.current_member()).copy_(moved._local), layout)


def told_apart(x: Any) -> str:
    """What torch keeps compiled programs under, on disk too: those of another process name process groups that are not here."""
    local = x._local
    return f"{kept(x._layout)} {tuple(local.shape)} {local.stride()} {x.requires_grad}"
