"""What a load asks for, and what was read for it before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..comm import PerRank
from ..layout import Layout
from ..redistribute import redistribute_local
from ..tensor import DTensor, wrap
from .held import members_here


@dataclass(eq=False, slots=True)
class Target:
    """A tensor to be filled.

    Attributes:
        like: a layout, or the plain tensor's shape.
        device: where the values are wanted.
        dest: the tensor whose memory takes the values; None: a new one does.
    """

    name: str
    like: Layout | tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    dest: Any = None
    result: Any = None

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Target:
        """The target that ``tensor`` is; one on ``meta`` only says what is wanted."""
        tensor = tensor.detach()
        dest = None if tensor.is_meta else tensor
        if isinstance(tensor, DTensor):
            device = torch.device(tensor._layout.mesh.device_type) if tensor.is_meta else tensor.device
            return Target(name, tensor._layout, tensor.dtype, device, dest)
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        return Target(name, tuple(tensor.shape), tensor.dtype, device, dest)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape) if isinstance(self.like, Layout) else self.like

    def buffers(self) -> dict[int | None, torch.Tensor]:
        """New memory on the CPU for every piece that this process holds."""
        if not isinstance(self.like, Layout):
            return {None: torch.empty(self.like, dtype=self.dtype)}
        layout = self.like.reduced()
        coordinates = layout.mesh.coordinates
        return {m: torch.empty(layout.local_shape(coordinates[m]), dtype=self.dtype) for m in members_here(layout)}

    def finish(self, read: dict[int | None, torch.Tensor]) -> None:
        """Hand the values over: into ``dest``, or as a new tensor. A partial target takes its terms, without communication."""
        with torch.no_grad():
            value = self._assembled(read)
            if self.dest is None:
                self.result = value
                return
            self.result = self.dest
            if not isinstance(value, DTensor):
                self.dest.copy_(value)
                return
            local, new = self.dest._local, value._local
            for old, piece in zip(_pieces(local), _pieces(new), strict=True):
                if piece.numel():
                    old.copy_(piece)
            torch.autograd.graph.increment_version(self.dest)

    def _assembled(self, read: dict[int | None, torch.Tensor]) -> Any:
        if not isinstance(self.like, Layout):
            return read[None].to(self.device)
        layout, reduced = self.like.replace(dtype=self.dtype), self.like.reduced().replace(dtype=self.dtype)
        mesh = layout.mesh
        if mesh.kind == "in_process":
            local: Any = PerRank([self._strided(read[m], reduced, m) for m in mesh.members])
        elif read:
            ((member, piece),) = read.items()
            local = self._strided(piece, reduced, member)
        else:
            local = torch.zeros(reduced.local_shape(None), dtype=self.dtype, device=self.device)
        return wrap(local if reduced is layout else redistribute_local(local, reduced, layout), layout)

    def _strided(self, piece: torch.Tensor, layout: Layout, member: int | None) -> torch.Tensor:
        coordinate = layout.mesh.coordinates[member or 0]
        stride = layout.local_stride(coordinate)
        if piece.stride() == stride or piece.numel() < 2:
            return piece.to(self.device)
        return torch.empty_strided(piece.shape, stride, dtype=piece.dtype, device=self.device).copy_(piece)


def _pieces(local: Any) -> tuple[torch.Tensor, ...]:
    return local.shards if isinstance(local, PerRank) else (local,)
