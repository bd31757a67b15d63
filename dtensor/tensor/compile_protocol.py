"""Compile protocol: ``torch.compile``'s subclass protocol (``__tensor_flatten__`` and its relatives) for DTensors.

A compiled program sees the local tensor. The layout is a constant of the program and part of its guards. A DTensor flattens only
on a mesh of processes. With all ranks in this process, and in a dry run, it does not, and the graph breaks.
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
from ..base.memory_order import dense_stride
from ..base.modes import EXPLICIT, IMPLICIT_REPLICATION
from ..base.symbolic_sizes import hashable_sizes, recompile_for_sizes, recompile_if_specialized, recompile_unless_derivable
from ..base.torch_internals import FakeTensor, graph_task
from ..base.tracing import has_data_mutation, has_no_values, is_analysis_local, register_object, swap_analysis_local
from ..errors import DTensorError, UnsupportedOperationError
from ..layout.layout import Layout
from ..state import wrap
from ..state.wrap import wrap_local
from .autograd import grad_layout, redistribute_no_grad, to_dtensor_grad, to_full_tensor


class FlattenMethod:
    """Descriptor of ``__tensor_flatten__``, which raises for DTensors that ``torch.compile`` does not support.

    Torch checks whether an instance has the attribute, so the answer can differ by mesh.
    """

    def __init__(self, flatten: Callable[..., Any], inner_name: str = "_local") -> None:
        self.flatten, self.inner_name = flatten, inner_name

    def __get__(self, x: Any, kind: type) -> Callable[..., Any]:
        if x is None:
            return self.flatten
        if is_exporting() and torch_internals.export_trace._EXPORT_MODULE_HIERARCHY is not None:
            raise UnsupportedOperationError(
                "torch.export does not support DTensors; export the model before its parameters are distributed, "
                "or use torch.compile"
            )
        getattr(x, self.inner_name)  # wait for a pending tensor
        if x._layout.mesh.kind != "process_group":
            if torch_internals.TracingContext.try_get() is not None:
                _warn_all_ranks_once()
                raise torch_internals.Unsupported(ALL_RANKS)
            raise AttributeError(
                f"a DTensor on {x._layout.mesh!r} has several local tensors in this process, which torch.compile "
                "does not support; compile with one process per rank, or use dtensor.capture"
            )
        return MethodType(self.flatten, x)


ALL_RANKS = (
    "torch.compile needs one process per rank: with all ranks in this process, and in a dry run, the "
    "graph breaks at each operator on a DTensor. Start the program with torchrun, or use "
    "dtensor.capture"
)


@cache
def _warn_all_ranks_once() -> None:
    warnings.warn(ALL_RANKS, stacklevel=2)


class DynamicMarks:
    """Descriptor that turns ``torch._dynamo.mark_dynamic`` of a tensor into ``maybe_mark_dynamic``.

    A plan may be right for one size only. Then the program is compiled again for the next size, where torch would raise.
    """

    def __get__(self, x: Any, kind: type) -> Any:
        return self if x is None else _MarkSet.of(x)

    def __set__(self, x: Any, value: Any) -> None:
        pass


class _MarkSet(set[int]):
    """An empty set of strict marks. Marks that are added to it become weak marks of the tensor."""

    x: Any

    @staticmethod
    def of(x: Any) -> _MarkSet:
        """Return an empty set of marks of the tensor ``x``."""
        marks = _MarkSet()
        marks.x = x
        return marks

    def add(self, mark: Any) -> None:
        if isinstance(mark, int):  # else a range
            _add_weak_marks(self.x, {mark})


def _add_weak_marks(x: Any, marks: set[int]) -> None:
    x.__dict__.setdefault("_dynamo_weak_dynamic_indices", set()).update(marks)


GraphConstants = tuple[tuple[Any, ...], bool, bool, bool]


def flatten_dtensor(x: Any) -> tuple[list[str], GraphConstants]:
    """Return, as ``__tensor_flatten__``, the name of the inner tensor, and the constants on which graphs are guarded.

    The constants are the layout without its sizes, the modes that plans depend on, and ``requires_grad``. Guards call this twice
    for each argument of each call, so it must be fast.
    """
    layout, local = x._layout, x._local
    local_attributes = vars(local)
    if layout.has_symbols:
        recompile_if_specialized((*layout.shape, *layout.stride))
        if type(local) is FakeTensor and x._base is not None:
            recompile_unless_derivable((*layout.shape, *layout.stride), (*local.shape, *local.stride(), local.storage_offset()))
        if x.requires_grad and _IS_PROGRAM_INPUT in local_attributes and has_data_mutation(local):
            recompile_for_sizes((*layout.shape, *layout.stride))  # torch 2.13 ignores the symbols of such a result
    if "_dynamo_dynamic_indices" in local_attributes:  # torch marks inner tensors, too: see DynamicMarks
        _add_weak_marks(local, local_attributes.pop("_dynamo_dynamic_indices"))
    if (task := graph_task()) >= 0:
        _record_memory(local, task)
    # torch marks the sizes of parameters static, but not those of their inner tensors
    if "_dynamo_static_indices" not in local_attributes and isinstance(x, Parameter):
        local._dynamo_static_indices = set(range(local.ndim))
    if EXPLICIT.held or IMPLICIT_REPLICATION.held:
        return ["_local"], (layout.sizeless_key, bool(EXPLICIT), bool(IMPLICIT_REPLICATION), x.requires_grad)
    return ["_local"], (layout.sizeless_key, False, False, x.requires_grad)


def unflatten_dtensor(
    inner_tensors: dict[str, torch.Tensor], constants: GraphConstants, size: Sequence[int], stride: Sequence[int]
) -> Any:
    """Return, as ``__tensor_unflatten__``, the DTensor with the local tensor ``inner_tensors["_local"]``.

    Sizes may be symbols. Then it becomes a guard that the local tensor has the local sizes of this rank.
    """
    local, (mesh, placements, dtype, _) = inner_tensors["_local"], constants[0]
    layout = Layout.of(mesh, placements, size, stride, dtype)
    if constants[3] and is_analysis_local(local):
        previous_local = swap_analysis_local(local)
        vars(local)[_IS_PROGRAM_INPUT] = True
        if previous_local is not None and has_data_mutation(previous_local):
            local.requires_grad_()  # then torch counts it among the results, like the DTensor
    if has_no_values(local) and not _matches_local_shape(layout, hashable_sizes(local.shape)):
        raise DTensorError(f"a local tensor of shape {tuple(local.shape)} does not fit {layout!r}")
    return wrap_local(local if (task := graph_task()) < 0 else _unshare_gradient(local, task), layout)


_IS_PROGRAM_INPUT = "_given"  # attribute of local tensors that are inputs of a program


def _matches_local_shape(layout: Layout, local_shape: tuple[int, ...]) -> bool:
    """Return True if this rank's local tensor under ``layout`` has the shape ``local_shape``, which may be symbolic.

    For even shards the global size is compared with a multiple of the local size, so that torch derives one symbol from the
    other.
    """
    member, even = layout.mesh.current_member(), [(d, split) for d, split in enumerate(layout.splits) if split and split.is_even]
    if member is None:
        return True
    is_multiple = all(layout.shape[d] == local_shape[d] * len(split.sizes) for d, split in even)
    return is_multiple and local_shape == layout.local_shape(layout.mesh.coordinates[member])


def _unshare_gradient(local: torch.Tensor, task: int) -> torch.Tensor:
    """Return the local gradient of a compiled backward pass, cloned if another gradient of the pass shares its memory.

    A graph may return one tensor for several gradients (of ``x + y``), or an input. Autograd takes each wrapper for a tensor that
    it alone holds, and writes to it.
    """
    has_overlap = 0 in local.stride() and local.numel() > 1
    if has_overlap or _record_memory(local, task):
        return local.clone(memory_format=torch.contiguous_format if has_overlap else torch.preserve_format)
    return local


def _record_memory(local: torch.Tensor, task: int) -> bool:
    """Record the address of ``local`` for this backward pass. Return True if it was recorded before."""
    if type(local) is not torch.Tensor:  # a fake tensor
        return False
    addresses_by_task = vars(_BACKWARD).setdefault("seen", {})
    if task not in addresses_by_task:
        addresses_by_task.clear()
        addresses_by_task[task] = set()
    address = local.untyped_storage().data_ptr()
    is_known = address in addresses_by_task[task]
    addresses_by_task[task].add(address)
    return is_known


_BACKWARD = threading.local()


def to_tangent_layout(x: Any) -> Any:
    """Redistribute a traced program's result to the layout that its gradient will be expected to have."""
    layout = grad_layout(x._layout, None)
    return x if layout is x._layout else redistribute_no_grad(x, layout)


def to_expected_tangent(x: Any, constants: GraphConstants | None, expected: type | None = None) -> Any:
    """Redistribute a gradient, at run time, to the layout that was assumed when the backward pass was traced.

    ``constants`` None: a plain gradient was expected. Then the full tensor is returned, or ``x`` if no class was expected.
    """
    if constants is None:
        return x if expected is None else to_full_tensor(x, None)
    if "_origin" in vars(x):
        x = wrap_local(x._local, x._layout)
    mesh, placements, dtype, order = constants[0]
    stride = x._layout.stride if order is None else dense_stride(x._layout.shape, order)
    layout = Layout.of(mesh, placements, x._layout.shape, stride, dtype)
    if x._layout is layout:
        return x
    redistributed = redistribute_no_grad(x, layout)
    if redistributed._layout.stride == layout.stride:
        return redistributed
    return wrap_local(
        layout.new_local_like(redistributed._local, layout.mesh.current_member()).copy_(redistributed._local), layout
    )


def plain_to_expected_tangent(x: Any, constants: GraphConstants | None, expected: type | None = None) -> Any:
    """Return a plain gradient, equal on all ranks, as the DTensor that the compiled backward pass expects.

    Torch makes plain zeros for results that need no gradient. Returns None, which torch refuses, if it expects no DTensor.
    """
    if type(x) is not torch.Tensor or expected is not wrap.TENSOR or constants is None:
        return None
    mesh, placements, *_ = constants[0]
    return to_expected_tangent(to_dtensor_grad(x, Layout.replicated(mesh, x.shape, x.stride(), x.dtype), placements), constants)


def make_cache_text(x: Any) -> str:
    """Return the text that identifies the argument ``x`` in the key of torch's cache of compiled programs.

    It names this process, because a program of another process refers to process groups that do not exist here.
    """
    local, layout = x._local, x._layout
    sizes = f"{tuple(layout.shape)} {layout.stride} {tuple(local.shape)} {local.stride()}"
    return f"{register_object(layout.sizeless_key)} {sizes} {x.requires_grad}"
