"""Blocks of one global draw of random numbers, in one of two modes.

``"exact"``: every rank draws the whole tensor from the default generator and keeps its block: the values that one device gives
for the same seed, for every generator, at the cost of the whole tensor's time and transient memory on each rank.

``"counter"``: the generator gives one 64-bit key a call, and an element's value is a function of the key and its global index. A
rank draws its block only. Since the key comes from the generator, whatever saves, restores or replaces its state
(checkpointing, ``fork_rng``, ``generator=``) keeps working.

All ranks must draw alike, so on process groups the first draw on a mesh takes over the generator state of its first rank, and
ranks outside of the mesh that run the op draw too: their next draw is then that of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from types import FunctionType
from typing import Any

import torch

from ..base import tracing
from ..base.caches import nested_key, remembered
from ..base.generators import default_generator, go_to, state_now
from ..base.mode_stack import Scoped
from ..base.recorder_hooks import aside, site
from ..base.symbolic_sizes import settled
from ..base.torch_internals import tree_flatten, tree_unflatten
from ..comm import communicator_of
from ..comm.checked_collectives import draws
from ..comm.custom_ops import in_graph
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from .distributions import Arguments, Sampler, sample

MODES = ("exact", "counter")


class Drawing:
    """The mode: of the innermost block of ``random_mode``, else of the process, as the generators are.

    Attributes:
        whole: of the process.
        blocks: of ``random_mode``.
    """

    def __init__(self) -> None:
        self.whole = MODES[0]
        self.blocks: Scoped[str] = Scoped("random_mode")

    @property
    def mode(self) -> str:
        return self.blocks.last(self.whole) if self.blocks.held else self.whole

    def from_now_on(self, mode: str) -> None:
        """Until the innermost block ends; outside of blocks for the whole process."""
        if not self.blocks.assign(mode):
            self.whole = mode


DRAWING = Drawing()


def as_one_step(layouts: Sequence[Layout], make: Callable[..., Any], *given: Any) -> Any:
    """``make(layouts, *given)``, blocks of one draw that lie as the first layout says; where a program is traced, a step of its
    graph, which draws when that runs, for the sizes that it then has: ``make`` takes sizes from these layouts alone."""
    mesh = layouts[0].mesh
    if mesh.kind != "process_group" or not tracing.under_way():
        return make(layouts, *given)
    values, structure = tree_flatten(given)
    places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    parts = [values[i] for i in places]
    values = [None if isinstance(value, torch.Tensor) else settled(value) for value in values]
    manners = [(layout.mesh, layout.placements, layout.dtype, layout.ndim) for layout in layouts]

    def made(blocks: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
        filled, numbers = list(values), iter(sizes)
        for i, block in zip(places, blocks, strict=True):
            filled[i] = block
        laid = [
            Layout.of(mesh, placements, tuple(islice(numbers, ndim)), tuple(islice(numbers, ndim)), dtype)
            for mesh, placements, dtype, ndim in manners
        ]
        return make(laid, *tree_unflatten(filled, structure))

    sizes = [size for layout in layouts for size in (*layout.shape, *layout.stride)]
    coordinate = mesh.coordinate_of(mesh.current_member())
    shaped = layouts[0].local_shape(coordinate), layouts[0].local_stride(coordinate)
    name = tracing.kept(made, (nested_key([make, values], _told_of), str(structure), *manners))
    return in_graph("draw", name, parts, sizes, *shaped, layouts[0].dtype, torch.device(mesh.device_type))


def _told_of(value: Any) -> Any:
    """What is alike of functions that do the same, which are made anew each time, and of numbers; other values are themselves:
    who is kept holds them."""
    if isinstance(value, FunctionType) and value.__closure__:
        return value.__code__, nested_key([cell.cell_contents for cell in value.__closure__], _told_of)
    return type(value), value if isinstance(value, (int, float, complex, str)) else id(value)


def draw(layout: Layout, whole: Callable[[torch.device], torch.Tensor]) -> Any:
    """The local blocks of one global draw: ``whole(device)`` gives the whole tensor."""
    mesh = layout.mesh
    device = torch.device(mesh.device_type)
    synchronize(mesh)
    if device.type == "meta":
        return torch.empty(layout.local_shape(mesh.coordinates[0]), dtype=layout.dtype, device=device)
    drawn, comm = whole(device), communicator_of(mesh)
    if comm.holds_all:
        return comm.map(lambda member: block_of(drawn, layout, member))
    return comm.map_outside_too(lambda member: own_block_of(drawn, layout, member))


def from_one_state(mesh: DeviceMesh, generator: torch.Generator | None, one: Callable[..., Any], *locals_: Any) -> Any:
    """``one(member, *locals_)`` on every rank, from the same state of the generator, which advances once."""
    synchronize(mesh)
    comm = communicator_of(mesh)
    if not comm.holds_all:
        return comm.map_outside_too(one, *locals_)  # who is outside draws too
    source = generator_of(mesh) if generator is None else generator
    state = state_of(source)

    def from_start(member: int, *values: Any) -> Any:
        set_state(source, state)
        return one(member, *values)

    return comm.map(from_start, *locals_)


@site
def draw_counted(layout: Layout, sampler: Sampler, given: Arguments, generator: torch.Generator | None = None) -> Any:
    """The local blocks of one global draw, each made by itself."""
    mesh = layout.mesh
    device = torch.device(mesh.device_type)
    synchronize(mesh, "a draw by places")
    if device.type == "meta":
        return torch.empty(layout.local_shape(mesh.coordinates[0]), dtype=layout.dtype, device=device)
    key = next_key(generator_of(mesh) if generator is None else generator)

    def one(member: int | None) -> torch.Tensor:
        coordinate = mesh.coordinate_of(member)
        if coordinate is None:
            return torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=device)
        size = layout.local_shape(coordinate)
        made = sample(sampler, given, key, layout.shape, layout.local_offset(coordinate), size, (layout.dtype, device))
        return (
            made
            if layout.dense
            else torch.empty_strided(size, layout.local_stride(coordinate), dtype=layout.dtype, device=device).copy_(made)
        )

    return communicator_of(mesh).map_outside_too(one)


def next_key(generator: torch.Generator) -> int:
    """64 bits that are a function of the generator's state, which advances. On CUDA from seed and offset, without waiting."""
    if generator.device.type == "cpu":
        drawn = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device="cpu")
        return int(drawn) & (2**64 - 1)
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return (generator.initial_seed() * 0x9E3779B97F4A7C15 + offset) & (2**64 - 1)


def block_of(whole: torch.Tensor, layout: Layout, member: int | None) -> torch.Tensor:
    """One member's block of a whole tensor, as its own memory."""
    coordinate = layout.mesh.coordinate_of(member)
    if coordinate is None:
        return whole.new_zeros(layout.local_shape(None))
    return place_in(whole, layout, coordinate).clone()


def own_block_of(whole: torch.Tensor, layout: Layout, member: int | None) -> torch.Tensor:
    """The same of a tensor that nobody else has: itself, where that is all of it."""
    return block_of(whole, layout, member) if member is None or _region(layout, layout.mesh.coordinates[member]) else whole


def place_in(whole: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Where one member's block stands in a whole tensor: a view."""
    return whole[_region(layout, coordinate)]


@remembered(4096)
def _region(layout: Layout, coordinate: tuple[int, ...]) -> tuple[slice, ...]:
    """Up to the last dim that is cut: nothing where the block is the whole."""
    count = max((d + 1 for d, split in enumerate(layout.splits) if split is not None), default=0)
    starts = zip(layout.local_offset(coordinate)[:count], layout.local_shape(coordinate)[:count], strict=True)
    return tuple([slice(start, start + size) for start, size in starts])


def synchronize(mesh: DeviceMesh, how: str = "a draw") -> None:
    """On process groups, once for all ranks that share a draw: they take over the first one's generator state."""
    if communicator_of(mesh).talks or tracing.under_way():
        _synchronize(mesh, how)


@aside
def _synchronize(mesh: DeviceMesh, how: str) -> None:
    if tracing.under_way() and mesh.kind == "process_group":
        raise UnsupportedOperationError(
            "this random operator on a DTensor is not supported inside torch.compile: a graph has no "
            "operator that generates its shards. Generate the numbers outside, or allow a graph break "
            "(fullgraph=False)"
        )
    comm = communicator_of(mesh)
    if not comm.talks:
        return
    seeded, dims, generator = mesh._root.seeded, mesh.group_id(range(mesh.ndim)), generator_of(mesh)
    if not seeded.issuperset(dims):
        seeded.update(dims)
        state = state_now(generator)
        received = comm.broadcast(state.to(mesh.device_type), tuple(range(mesh.ndim)), 0).wait()
        go_to(generator, received.cpu())
    draws(mesh, generator, how)


@site
def state_of(generator: torch.Generator) -> torch.Tensor:
    """Where the generator is."""
    return state_now(generator)


@site
def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Bring the generator to a state."""
    go_to(generator, state)


def generator_of(mesh: DeviceMesh) -> torch.Generator:
    """The generator that operations without ``generator=`` draw from on the mesh's device."""
    return default_generator(torch.device(mesh.device_type))
