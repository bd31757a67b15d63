"""What a load asks for, and what was read for it before anything is changed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import communicator_of
from ..layout.layout import Layout
from ..redistribute import redistribute_local
from ..tensor.dtensor import DTensor, wrap
from ..tensor.views.block_owners import Held, Stacked, locals_of, members_here, stack_of
from ..tensor.views.lazy_view import RemoteView
from .tree import Stored


@dataclass(eq=False, slots=True)
class Target(Stored):
    """A tensor to be filled.

    Attributes:
        like: a layout, that of the stack which the tensor is folded from, or the plain tensor's shape.
        device: where the values are wanted.
        asked: the tensor that was asked for, if one was, or the stack that it is folded from; its memory takes the values, unless
            it is on meta: then a new one does.
        shown: the tensor that was asked for, where it is folded from a stack.
    """

    name: str
    like: Layout | Stacked | tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    asked: Any = None
    shown: Any = None
    result: Any = None

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Target:
        """The target that ``tensor`` is; one on ``meta`` only says what is wanted."""
        if isinstance(tensor, DTensor):
            device = torch.device(tensor._layout.mesh.device_type) if tensor.is_meta else tensor.device
            if (found := stack_of(tensor)) is not None:
                return Target(name, found[1], tensor.dtype, device, found[0], tensor)
            return Target(name, tensor._layout, tensor.dtype, device, tensor)
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        return Target(name, tuple(tensor.shape), tensor.dtype, device, tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.like if isinstance(self.like, tuple) else tuple(self.like.shape)

    @property
    def layout(self) -> Layout | None:
        """Of what is filled, if that is distributed."""
        return self.like.layout if isinstance(self.like, Stacked) else self.like if isinstance(self.like, Layout) else None

    def buffers(self, dtype: torch.dtype) -> dict[int | None, torch.Tensor]:
        """New memory on the CPU for every piece that this process holds, as ``dtype``, in which it is stored."""
        if self.layout is None:
            return {None: torch.empty(self.shape, dtype=dtype, device="cpu")}
        layout = self.layout.reduced()
        coordinates = layout.mesh.coordinates
        return {m: torch.empty(layout.local_shape(coordinates[m]), dtype=dtype, device="cpu") for m in members_here(layout)}

    def block(self, buffers: dict[int | None, torch.Tensor], held: Held) -> torch.Tensor:
        """The memory of one block among the buffers."""
        own = buffers[held.member]
        return own.select(self.like.dim, held.part) if isinstance(self.like, Stacked) and held.part is not None else own

    @property
    def problem(self) -> str | None:
        """Why no values can be put there, if none can."""
        x = self.asked
        if x is None:
            return None
        if x.layout != torch.strided or x.is_quantized:
            return "is no strided tensor here: load it as such, then convert it"
        if _meets_itself(x) and (isinstance(x, DTensor) or not x.is_meta):
            return "has elements that share memory here, as expanded tensors have: load it into x.contiguous()"
        return None

    def finish(self, read: dict[int | None, torch.Tensor]) -> None:
        """Hand the values over: into the memory of what was asked, or as a new tensor."""
        value = self.assembled(read, self.device)
        if self.asked is None or self.asked.is_meta:
            self.result = value.flatten(self.like.dim, self.like.dim + 1) if isinstance(self.like, Stacked) else value
            return
        self.result = self.asked if self.shown is None else self.shown
        if isinstance(self.asked, RemoteView):  # its pieces are computed when they are read
            with torch.no_grad():
                self.asked.copy_(value)
            return
        with torch.no_grad(), torch.inference_mode() if self.asked.is_inference() else contextlib.nullcontext():
            for old, piece in zip(locals_of(self.asked), locals_of(value), strict=True):
                if piece.numel():
                    old.detach().copy_(piece)
        if isinstance(self.asked, DTensor) and not self.asked.is_inference():
            torch.autograd.graph.increment_version(self.asked)

    def assembled(self, read: dict[int | None, torch.Tensor], device: torch.device) -> Any:
        """What was read, as the tensor that was asked for. A partial one takes its terms, without communication."""
        if self.layout is None:
            return read[None].to(device)
        layout, reduced = self.layout.replace(dtype=self.dtype), self.layout.reduced().replace(dtype=self.dtype)
        mesh = layout.mesh
        if read:
            local: Any = communicator_of(mesh).map(lambda member: _strided(read[member], reduced, member, device))
        else:
            local = torch.zeros(reduced.local_shape(None), dtype=self.dtype, device=device)
        with torch.no_grad():
            return wrap(local if reduced is layout else redistribute_local(local, reduced, layout), layout)


def _strided(piece: torch.Tensor, layout: Layout, member: int | None, device: torch.device) -> torch.Tensor:
    stride = layout.local_stride(layout.mesh.coordinates[member or 0])
    if piece.stride() == stride or piece.numel() < 2:
        return piece.to(device)
    return torch.empty_strided(piece.shape, stride, dtype=piece.dtype, device=device).copy_(piece)


def _meets_itself(x: torch.Tensor) -> bool:
    """Whether two elements may have one place in memory: not if each stride leads beyond what smaller ones reach."""
    reach = 0
    for step, count in sorted((step, count) for count, step in zip(x.shape, x.stride(), strict=True) if count > 1):
        if step <= reach and x.numel():
            return True
        reach += step * (count - 1)
    return False


def described(like: Layout | Stacked | tuple[int, ...], dtype: torch.dtype) -> str:
    """A tensor in words: its dtype, shape and where it lies."""
    if isinstance(like, Stacked):
        return f"{like.parts} parts along dim {like.dim} of {described(like.layout, dtype)}"
    if isinstance(like, Layout):
        return repr(like.replace(dtype=dtype))
    return f"plain {str(dtype).removeprefix('torch.')}{list(like)}"
