"""Blocks of one global draw of random numbers.

Every rank draws the whole tensor from the default generator and keeps its block: the values that one device gives for
the same seed, exactly and for every generator, at the cost of the whole tensor's time and transient memory on each rank.
All ranks must draw alike, so on process groups the first draw on a mesh takes over the generator state of its first rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm import communicator_of
from ..layout import Layout
from ..mesh import DeviceMesh


def draw(layout: Layout, sample: Callable[[torch.device], torch.Tensor]) -> Any:
    """The local blocks of one global draw: ``sample(device)`` gives the whole tensor."""
    mesh = layout.mesh
    device = torch.device(mesh.device_type)
    synchronize(mesh)
    if mesh.kind == "dry_run":
        return torch.empty(layout.local_shape(mesh.coordinates[0]), dtype=layout.dtype, device=device)
    whole = sample(device)
    return communicator_of(mesh).map(lambda member: block_of(whole, layout, member))


def block_of(whole: torch.Tensor, layout: Layout, member: int | None) -> torch.Tensor:
    """One member's block of a whole tensor, as its own memory."""
    coordinate = None if member is None else layout.mesh.coordinates[member]
    if coordinate is None:
        return whole.new_empty(layout.local_shape(None))
    block = whole
    for d, (offset, size) in enumerate(zip(layout.local_offset(coordinate), layout.local_shape(coordinate), strict=True)):
        if size != block.shape[d]:
            block = block.narrow(d, offset, size)
    return block.clone()


def synchronize(mesh: DeviceMesh) -> None:
    """On process groups, once per mesh: all ranks take over the first rank's generator state."""
    root = mesh._root
    if root.kind != "process_group" or root.seeded:
        return
    root.seeded = True
    if mesh.current_member() is None:
        return
    generator = default_generator(mesh)
    state = generator.get_state()
    comm = communicator_of(mesh)
    received = comm.broadcast(state.to(mesh.device_type), tuple(range(mesh.ndim)), 0)
    generator.set_state(received.cpu())


def default_generator(mesh: DeviceMesh) -> torch.Generator:
    """The generator that ops without ``generator=`` draw from on the mesh's device."""
    if mesh.device_type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator
