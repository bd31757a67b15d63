"""Load targets: the tensors that a load fills, and the values that were read for them before anything is changed.

Tensors that share memory, as tied parameters do, must get consistent values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..base.tensor_text import tensor_text
from ..comm.flat_rows import flatten_to_bytes
from ..comm.map_ranks import communicator_of
from ..errors import CheckpointError
from ..layout.layout import Layout
from ..redistribute import redistribute_local
from ..tensor.dtensor import DTensor, wrap
from ..tensor.local_tensors import local_tensors_of
from ..tensor.views.lazy_view import LazyView
from .local_blocks import LocalBlock, StackedLayout, find_stack, local_members
from .tree import Stored


@dataclass(eq=False, slots=True)
class Target(Stored):
    """Requested tensor that a load fills; in a tree it takes the place of the tensor.

    Attributes:
        like: a layout, the layout of the stack that the tensor is a flattened view of, or the shape of a plain tensor.
        device: device of the values.
        requested: the requested tensor, if there is one, or the stack that it is a flattened view of. Its memory gets the values,
            unless it is on meta: then a new tensor does.
        requested_view: the requested tensor, if it is a flattened view of a stack.
    """

    name: str
    like: Layout | StackedLayout | tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requested: Any = None
    requested_view: Any = None
    result: Any = None

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Target:
        """Return the load target for the requested ``tensor``; one on ``meta`` only describes the tensor to be made."""
        if isinstance(tensor, DTensor):
            device = torch.device(tensor._layout.mesh.device_type) if tensor.is_meta else tensor.device
            if (stack := find_stack(tensor)) is not None:
                return Target(name, stack[1], tensor.dtype, device, stack[0], tensor)
            return Target(name, tensor._layout, tensor.dtype, device, tensor)
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        return Target(name, tuple(tensor.shape), tensor.dtype, device, tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.like if isinstance(self.like, tuple) else tuple(self.like.shape)

    @property
    def layout(self) -> Layout | None:
        """Return the layout of the filled tensor, or None for a plain tensor."""
        return self.like.layout if isinstance(self.like, StackedLayout) else self.like if isinstance(self.like, Layout) else None

    def allocate_buffers(self, dtype: torch.dtype) -> dict[int | None, torch.Tensor]:
        """Allocate CPU memory of ``dtype`` for the local tensors of this process, by member (None for a plain tensor)."""
        if self.layout is None:
            return {None: torch.empty(self.shape, dtype=dtype, device="cpu")}
        layout = self.layout.reduced()
        coordinates = layout.mesh.coordinates
        return {m: torch.empty(layout.local_shape(coordinates[m]), dtype=dtype, device="cpu") for m in local_members(layout)}

    def block_buffer(self, buffers: dict[int | None, torch.Tensor], held: LocalBlock) -> torch.Tensor:
        """Return the part of ``buffers`` that receives the block ``held``: the member's buffer, or one part of its stack."""
        own = buffers[held.member]
        return own.select(self.like.dim, held.part) if isinstance(self.like, StackedLayout) and held.part is not None else own

    @property
    def problem(self) -> str | None:
        """Return the reason why the requested tensor cannot be filled, such as overlapping elements; None if it can."""
        x = self.requested
        if x is None:
            return None
        if x.layout != torch.strided or x.is_quantized:
            return "is no strided tensor here: load it as such, then convert it"
        if _has_internal_overlap(x) and (isinstance(x, DTensor) or not x.is_meta):
            return "has elements that share memory here, as expanded tensors have: load it into x.contiguous()"
        return None

    def write_values(self, read: dict[int | None, torch.Tensor]) -> None:
        """Copy the read values into the requested tensor's memory, or make a new tensor; set ``result`` to it."""
        value = self.assemble_result(read, self.device)
        if self.requested is None or self.requested.is_meta:
            self.result = value.flatten(self.like.dim, self.like.dim + 1) if isinstance(self.like, StackedLayout) else value
            return
        self.result = self.requested if self.requested_view is None else self.requested_view
        if isinstance(self.requested, LazyView):  # its local tensors are computed when they are read
            with torch.no_grad():
                self.requested.copy_(value)
            return
        with torch.no_grad(), torch.inference_mode() if self.requested.is_inference() else contextlib.nullcontext():
            for old, shard in zip(local_tensors_of(self.requested), local_tensors_of(value), strict=True):
                if shard.numel():
                    old.detach().copy_(shard)
        if isinstance(self.requested, DTensor) and not self.requested.is_inference():
            torch.autograd.graph.increment_version(self.requested)

    def assemble_result(self, read: dict[int | None, torch.Tensor], device: torch.device) -> Any:
        """Return the read values as a tensor in the requested layout; a partial one gets its addends without communication."""
        if self.layout is None:
            return read[None].to(device)
        layout, reduced = self.layout.replace(dtype=self.dtype), self.layout.reduced().replace(dtype=self.dtype)
        mesh = layout.mesh
        if read:
            local: Any = communicator_of(mesh).map(lambda member: _with_layout_strides(read[member], reduced, member, device))
        else:
            local = torch.zeros(reduced.local_shape(None), dtype=self.dtype, device=device)
        with torch.no_grad():
            return wrap(local if reduced is layout else redistribute_local(local, reduced, layout), layout)


def _with_layout_strides(shard: torch.Tensor, layout: Layout, member: int | None, device: torch.device) -> torch.Tensor:
    """Return a shard that was read, on ``device``, with the strides that the layout gives the member's local tensor."""
    stride = layout.local_stride(layout.mesh.coordinates[member or 0])
    if shard.stride() == stride or shard.numel() < 2:
        return shard.to(device)
    return torch.empty_strided(shard.shape, stride, dtype=shard.dtype, device=device).copy_(shard)


def _has_internal_overlap(x: torch.Tensor) -> bool:
    """Return True if two elements of ``x`` may share memory: a stride does not exceed the reach of all smaller ones."""
    reach = 0
    for step, count in sorted((step, count) for count, step in zip(x.shape, x.stride(), strict=True) if count > 1):
        if step <= reach and x.numel():
            return True
        reach += step * (count - 1)
    return False


def describe_load_target(like: Layout | StackedLayout | tuple[int, ...], dtype: torch.dtype) -> str:
    """Return text with the dtype, shape and placements of a tensor, to compare across ranks."""
    if isinstance(like, StackedLayout):
        return f"{like.parts} parts along dim {like.dim} of {describe_load_target(like.layout, dtype)}"
    if isinstance(like, Layout):
        return repr(like.replace(dtype=dtype))
    return f"plain {tensor_text(dtype, like)}"


# --- tensors that share memory ---------------------------------------------------------------------------------------------
Read = Mapping[str, dict[int | None, torch.Tensor]]
_MAX_ELEMENT_BYTES = 16  # bytes of the largest element


class _MemorySpan(NamedTuple):
    """Address range of one local tensor of a target: its address space, first byte and end."""

    space: tuple[object, ...]
    begin: int
    end: int
    target: Target
    number: int


def check_shared_memory(targets: Iterable[Target], read: Read) -> None:
    """Raise if targets that share memory were read with different values, so that the last write would win.

    Args:
        read: name -> values that were read for the local tensors.

    Raises:
        CheckpointError: the values are inconsistent.
    """
    for group in _overlapping_spans(targets):
        named = {span.target.name: span.target for span in group}
        values = {
            name: local_tensors_of(target.assemble_result(read[name], torch.device("cpu"))) for name, target in named.items()
        }
        if not _have_consistent_values(group, [values[span.target.name][span.number] for span in group]):
            raise CheckpointError(
                f"{' and '.join(map(repr, list(named)[:6]))} share memory here but have different values in the "
                "checkpoint; give each its own tensor (x.clone())"
            )


def write_all_targets(targets: Iterable[Target], read: dict[str, dict[int | None, torch.Tensor]]) -> None:
    """Write the read values into all targets; targets of one tied meta tensor get one new tensor."""
    first_targets: dict[object, Target] = {}
    for target in targets:
        first = first_targets.setdefault(_meta_identity(target), target)
        values = read.pop(target.name)
        if first is target:
            target.write_values(values)
        else:
            target.result = first.result


def _meta_identity(target: Target) -> object:
    """Return a key that is equal for targets of one tied meta tensor; the target itself if it is not on meta."""
    x = target.requested
    if x is None or not x.is_meta:
        return target
    return target.like, x.dtype, tuple((_memory_position(shard), shard.shape, shard.stride()) for shard in local_tensors_of(x))


def _memory_position(shard: torch.Tensor) -> tuple[tuple[object, ...], int]:
    """Return the address space of a local tensor and its first byte in it; each meta storage is its own space."""
    if shard.is_meta:
        return ("meta", shard.untyped_storage()._cdata), int(shard.storage_offset()) * shard.element_size()
    return (shard.device,), shard.data_ptr()


def _overlapping_spans(targets: Iterable[Target]) -> Iterator[list[_MemorySpan]]:
    """Yield groups of local tensors of the targets that overlap in memory."""
    spans: dict[tuple[object, ...], list[_MemorySpan]] = {}
    for target in targets:
        for number, shard in enumerate(local_tensors_of(target.requested) if target.requested is not None else ()):
            if shard.numel():
                space, begin = _memory_position(shard)
                last = sum((n - 1) * step for n, step in zip(shard.shape, shard.stride(), strict=True))
                span = _MemorySpan(space, begin, begin + (last + 1) * shard.element_size(), target, number)
                spans.setdefault(space, []).append(span)
    for space_spans in spans.values():
        group: list[_MemorySpan] = []
        for span in sorted(space_spans, key=lambda span: span[1:3]):
            if group and span.begin >= max(each.end for each in group):
                yield from [group] if len(group) > 1 else []
                group = []
            group.append(span)
        yield from [group] if len(group) > 1 else []


def _have_consistent_values(group: list[_MemorySpan], values: list[torch.Tensor]) -> bool:
    """Return True if, after all values were written to a copy of the shared memory, each can be read back."""
    start = group[0].begin // _MAX_ELEMENT_BYTES * _MAX_ELEMENT_BYTES
    memory = torch.zeros(
        math.ceil((max(span.end for span in group) - start) / _MAX_ELEMENT_BYTES) * _MAX_ELEMENT_BYTES,
        dtype=torch.uint8,
        device="cpu",
    )
    views = []
    for span, value in zip(group, values, strict=True):
        shard = local_tensors_of(span.target.requested)[span.number]
        at = (span.begin - start) // shard.element_size()
        view = torch.empty(0, dtype=shard.dtype, device="cpu").set_(memory.untyped_storage(), at, shard.shape, shard.stride())
        stored = value.conj().resolve_conj() if shard.is_conj() else value
        view.copy_(-stored if shard.is_neg() else stored)
        views.append((view, stored))
    return all(torch.equal(flatten_to_bytes(view.contiguous()), flatten_to_bytes(stored.contiguous())) for view, stored in views)
