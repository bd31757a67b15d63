"""What ``torch.compile`` asks of a tensor: the piece that it holds, and the layout under which that is the whole.

Compiled programs see the piece; the layout is a constant of theirs, on which they are guarded. Only this rank's piece of a mesh
of processes is such a tensor: with all ranks in this process, and in a dry run, a DTensor does not flatten, and the graph breaks.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch.compiler import is_exporting
from torch.nn import Parameter

from ..base import torch_internals
from ..base.memory_order import dense_in
from ..base.modes import EXPLICIT, IMPLICIT_REPLICATION
from ..base.symbolic_sizes import for_one_size, only_told, sizes, still_open
from ..base.torch_internals import FakeTensor, graph_task
from ..base.tracing import counted_before, has_no_values, is_counted, is_written, kept
from ..dispatch import wrap
from ..dispatch.wrap import wrap_local
from ..errors import DTensorError, UnsupportedOperationError
from ..layout.layout import Layout
from .autograd import distributed, grad_layout, move, to_whole


class Flatten:
    """``__tensor_flatten__``: torch asks an instance whether it has one."""

    def __init__(self, flatten: Callable[..., Any], piece: str = "_local") -> None:
        self.flatten, self.piece = flatten, piece

    def __get__(self, x: Any, kind: type) -> Callable[..., Any]:
        if x is None:
            return self.flatten
        if is_exporting() and torch_internals.export_trace._EXPORT_MODULE_HIERARCHY is not None:
            raise UnsupportedOperationError(
                "torch.export does not support DTensors; export the model before its parameters are distributed, "
                "or use torch.compile"
            )
        getattr(x, self.piece)  # one that is under way arrives
        if x._layout.mesh.kind != "process_group":
            if torch_internals.TracingContext.try_get() is not None:
                _say_once()
                raise torch_internals.Unsupported(ALL_RANKS)
            raise AttributeError(
                f"a DTensor on {x._layout.mesh!r} has several local tensors in this process, which torch.compile does not support"
            )
        return MethodType(self.flatten, x)


ALL_RANKS = (
    "torch.compile needs one process per rank: with all ranks in this process, and in a dry run, the "
    "graph breaks at each operator on a DTensor. Start the program with torchrun, or use "
    "dtensor.capture"
)


@cache
def _say_once() -> None:
    warnings.warn(ALL_RANKS, stacklevel=2)


class Marked:
    """What ``torch._dynamo.mark_dynamic`` writes to a tensor: taken as ``maybe_mark_dynamic`` says it, since a plan may be right
    for one size alone, and is then made anew for the next, where torch would refuse the graph."""

    def __get__(self, x: Any, kind: type) -> Any:
        return self if x is None else _Marks.of(x)

    def __set__(self, x: Any, value: Any) -> None:
        pass


class _Marks(set[int]):
    """None that must be kept; those that are added are noted as wishes."""

    x: Any

    @staticmethod
    def of(x: Any) -> _Marks:
        made = _Marks()
        made.x = x
        return made

    def add(self, mark: Any) -> None:
        if isinstance(mark, int):  # else a range
            _wish(self.x, {mark})


def _wish(x: Any, marks: set[int]) -> None:
    x.__dict__.setdefault("_dynamo_weak_dynamic_indices", set()).update(marks)


Constants = tuple[tuple[Any, ...], bool, bool, bool]


def flatten(x: Any) -> tuple[list[str], Constants]:
    """The piece, and what graphs are guarded on: how it lies, whatever its sizes; and the modes, which plans go by.

    Guards ask twice for each argument of each call.
    """
    layout, piece = x._layout, x._local
    known = vars(piece)
    if layout.sized:
        still_open((*layout.shape, *layout.stride))
        if type(piece) is FakeTensor and x._base is not None:
            only_told((*layout.shape, *layout.stride), (*piece.shape, *piece.stride(), piece.storage_offset()))
        if x.requires_grad and _GIVEN in known and is_written(piece):
            for_one_size((*layout.shape, *layout.stride))  # torch 2.13 does not count the symbols that come with such a result
    if "_dynamo_dynamic_indices" in known:  # torch marks pieces, too: see Marked
        _wish(piece, known.pop("_dynamo_dynamic_indices"))
    if (task := graph_task()) >= 0:
        _taken(piece, task)
    if "_dynamo_static_indices" not in known and isinstance(x, Parameter):  # as torch takes parameters, not what they hold
        piece._dynamo_static_indices = set(range(piece.ndim))
    if EXPLICIT.held or IMPLICIT_REPLICATION.held:
        return ["_local"], (layout.manner, bool(EXPLICIT), bool(IMPLICIT_REPLICATION), x.requires_grad)
    return ["_local"], (layout.manner, False, False, x.requires_grad)


def unflatten(pieces: dict[str, torch.Tensor], constants: Constants, size: Sequence[int], stride: Sequence[int]) -> Any:
    """The DTensor with this piece. Sizes may be symbols: that the piece has those that a tensor of them leaves to this rank is a
    guard."""
    local, (mesh, placements, dtype, _) = pieces["_local"], constants[0]
    layout = Layout.of(mesh, placements, size, stride, dtype)
    if constants[3] and is_counted(local):
        before = counted_before(local)
        vars(local)[_GIVEN] = True
        if before is not None and is_written(before):
            local.requires_grad_()  # then torch counts it among the results, as what it is a piece of
    if has_no_values(local) and not _fits(layout, sizes(local.shape)):
        raise DTensorError(f"a local tensor of shape {tuple(local.shape)} does not fit {layout!r}")
    return wrap_local(local if (task := graph_task()) < 0 else _own(local, task), layout)


_GIVEN = "_given"  # the attribute of the pieces that a program is given


def _fits(layout: Layout, piece: tuple[int, ...]) -> bool:
    """Whether this rank's piece may have these sizes: said so that torch finds one symbol by the other, where blocks are even."""
    member, even = layout.mesh.current_member(), [(d, split) for d, split in enumerate(layout.splits) if split and split.even]
    if member is None:
        return True
    whole = all(layout.shape[d] == piece[d] * len(split.sizes) for d, split in even)
    return whole and piece == layout.local_shape(layout.mesh.coordinates[member])


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
    if "_origin" in vars(x):
        x = wrap_local(x._local, x._layout)
    mesh, placements, dtype, order = constants[0]
    stride = x._layout.stride if order is None else dense_in(x._layout.shape, order)
    layout = Layout.of(mesh, placements, x._layout.shape, stride, dtype)
    if x._layout is layout:
        return x
    moved = move(x, layout)
    if moved._layout.stride == layout.stride:
        return moved
    return wrap_local(layout.block_beside(moved._local, layout.mesh.current_member()).copy_(moved._local), layout)


def plain_as_tangent(x: Any, constants: Constants | None, expected: type | None = None) -> Any:
    """``as_tangent`` of a plain tensor, which all ranks hold alike, as without a compiler: torch makes one of zeros for each
    result that is asked for no gradient. None, which torch refuses, where no gradient of a DTensor is expected."""
    if type(x) is not torch.Tensor or expected is not wrap.TENSOR or constants is None:
        return None
    mesh, placements, *_ = constants[0]
    return as_tangent(distributed(x, Layout.replicated(mesh, x.shape, x.stride(), x.dtype), placements), constants)


def told_apart(x: Any) -> str:
    """What torch keeps compiled programs under, on disk too: those of another process name process groups that are not here."""
    local, layout = x._local, x._layout
    return f"{kept(layout.manner)} {tuple(layout.shape)} {layout.stride} {tuple(local.shape)} {local.stride()} {x.requires_grad}"
