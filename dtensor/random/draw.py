"""Draw blocks of one global random tensor, in one of two modes.

``"exact"``: every rank generates the complete tensor with the default generator and keeps its block. The values are those of
one device with the same seed, for every generator. Each rank pays the time and the transient memory of the complete tensor.

``"counter"``: the generator gives one 64-bit key per call, and an element is a function of the key and its global index. A rank
generates only its block. The key comes from the generator, so everything that saves, restores or replaces its state
(checkpointing, ``fork_rng``, ``generator=``) keeps working.

All ranks must have the same generator state. So on process groups, the first random operator on a mesh broadcasts the state of
the mesh's first rank. Ranks outside of the mesh that run the operator generate too: their next numbers are then those of one
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from types import FunctionType
from typing import Any

import torch

from ..base import tracing
from ..base.caches import memoize, nested_key
from ..base.generators import default_generator, get_generator_state, set_generator_state
from ..base.graph_operators import GraphOperator
from ..base.mode_stack import ModeStack
from ..base.recorder_hooks import recorded_op, untracked
from ..base.symbolic_sizes import specialize_symbols
from ..base.torch_internals import tree_flatten, tree_unflatten
from ..comm.compared_operations import compare_generator_state
from ..comm.map_ranks import communicator_of
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from .distributions import Arguments, Sampler, sample_block

MODE_NAMES = ("exact", "counter")


class RandomMode:
    """Random mode: that of the innermost block of ``random_mode``, else that of the process.

    Attributes:
        process_mode: mode outside of blocks.
        blocks: stack of ``random_mode`` blocks.
    """

    def __init__(self) -> None:
        self.process_mode = MODE_NAMES[0]
        self.blocks: ModeStack[str] = ModeStack("random_mode")

    @property
    def mode(self) -> str:
        return self.blocks.last(self.process_mode) if self.blocks.held else self.process_mode

    def set_mode(self, mode: str) -> None:
        """Set the mode until the innermost ``random_mode`` block ends; outside of blocks, for the process."""
        if not self.blocks.assign(mode):
            self.process_mode = mode


RANDOM_MODE = RandomMode()


def run_as_graph_op(layouts: Sequence[Layout], make: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``make(layouts, *arguments)``, which generates random blocks; while tracing, insert it as one graph operator.

    While a program is traced this is one operator of its graph. It generates when the graph runs, for the sizes of that run:
    ``make`` must take sizes from ``layouts`` only.
    """
    mesh = layouts[0].mesh
    if mesh.kind != "process_group" or not tracing.is_tracing():
        return make(layouts, *arguments)
    values, structure = tree_flatten(arguments)
    tensor_places = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
    tensors = [values[i] for i in tensor_places]
    values = [None if isinstance(value, torch.Tensor) else specialize_symbols(value) for value in values]
    formats = [(layout.mesh, layout.placements, layout.dtype, layout.ndim) for layout in layouts]

    def run_make(blocks: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
        """Rebuild layouts and arguments from the operator's flat inputs, and call ``make``."""
        filled, numbers = list(values), iter(sizes)
        for i, block in zip(tensor_places, blocks, strict=True):
            filled[i] = block
        run_layouts = [
            Layout.of(mesh, placements, tuple(islice(numbers, ndim)), tuple(islice(numbers, ndim)), dtype)
            for mesh, placements, dtype, ndim in formats
        ]
        return make(run_layouts, *tree_unflatten(filled, structure))

    sizes = [size for layout in layouts for size in (*layout.shape, *layout.stride)]
    coordinate = mesh.coordinate_of(mesh.current_member())
    local_geometry = layouts[0].local_shape(coordinate), layouts[0].local_stride(coordinate)
    name = tracing.register_object(run_make, (nested_key([make, values], _closure_key), str(structure), *formats))
    return _DRAW.add_to_graph(name, tensors, sizes, *local_geometry, layouts[0].dtype, torch.device(mesh.device_type))


def _run_draw(
    make: str,
    given: list[torch.Tensor],
    sizes: list[int],
    size: list[int],
    stride: list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Run the random draw that is registered as ``make``, and return it with the traced size and stride."""
    drawn: torch.Tensor = tracing.registered_object(make)(given, sizes)
    if list(drawn.stride()) == stride:
        return drawn
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(drawn)


_DRAW = GraphOperator(
    "draw",
    "str make, Tensor[] given, SymInt[] sizes, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device",
    _run_draw,
    lambda make, given, sizes, size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype, device=device),
)


def _closure_key(value: Any) -> Any:
    """Return a cache key of one value that is equal for closures of equal code and captured values.

    Closures are keyed by code object and captured values, because they are made anew at each call. Numbers and strings are
    keyed by value, everything else by identity: the cached function keeps it alive.
    """
    if isinstance(value, FunctionType) and value.__closure__:
        return value.__code__, nested_key([cell.cell_contents for cell in value.__closure__], _closure_key)
    return type(value), value if isinstance(value, (int, float, complex, str)) else id(value)


def draw(layout: Layout, sample: Callable[[torch.device], torch.Tensor]) -> Any:
    """Generate one global random tensor by ``sample(device)``, and return its local blocks in ``layout`` (exact mode)."""
    mesh = layout.mesh
    device = torch.device(mesh.device_type)
    synchronize(mesh)
    if device.type == "meta":
        return torch.empty(layout.local_shape(mesh.coordinates[0]), dtype=layout.dtype, device=device)
    full, comm = sample(device), communicator_of(mesh)
    if comm.holds_all:
        return comm.map(lambda member: clone_block(full, layout, member))
    return comm.map_outside_too(lambda member: take_block(full, layout, member))


def map_from_one_state(mesh: DeviceMesh, generator: torch.Generator | None, run_member: Callable[..., Any], *locals_: Any) -> Any:
    """Call ``run_member(member, *locals_)`` for each rank from the same generator state, so that the generator advances once."""
    synchronize(mesh)
    comm = communicator_of(mesh)
    if not comm.holds_all:
        return comm.map_outside_too(run_member, *locals_)  # ranks outside of the mesh generate too
    source = mesh_generator(mesh) if generator is None else generator
    state = read_state(source)

    def from_start(member: int, *values: Any) -> Any:
        """Reset the generator to the saved state, and call ``run_member`` for one rank."""
        write_state(source, state)
        return run_member(member, *values)

    return comm.map(from_start, *locals_)


@recorded_op
def draw_counted(layout: Layout, sampler: Sampler, arguments: Arguments, generator: torch.Generator | None = None) -> Any:
    """Generate the local blocks of one global random tensor in counter mode: each rank generates its block only."""
    mesh = layout.mesh
    device = torch.device(mesh.device_type)
    synchronize(mesh, "a draw by places")
    if device.type == "meta":
        return torch.empty(layout.local_shape(mesh.coordinates[0]), dtype=layout.dtype, device=device)
    key = advance_key(mesh_generator(mesh) if generator is None else generator)

    def sample_member(member: int | None) -> torch.Tensor:
        """Generate one rank's block in the strides of the layout; zeros for a rank outside of the mesh."""
        coordinate = mesh.coordinate_of(member)
        if coordinate is None:
            return torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=device)
        size = layout.local_shape(coordinate)
        block = sample_block(sampler, arguments, key, layout.shape, layout.local_offset(coordinate), size, (layout.dtype, device))
        if layout.dense:
            return block
        return torch.empty_strided(size, layout.local_stride(coordinate), dtype=layout.dtype, device=device).copy_(block)

    return communicator_of(mesh).map_outside_too(sample_member)


def advance_key(generator: torch.Generator) -> int:
    """Take a 64-bit key from the generator and advance its state; on CUDA from seed and offset, without synchronization."""
    if generator.device.type == "cpu":
        bits = torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device="cpu")
        return int(bits) & (2**64 - 1)
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return (generator.initial_seed() * 0x9E3779B97F4A7C15 + offset) & (2**64 - 1)


def clone_block(full: torch.Tensor, layout: Layout, member: int | None) -> torch.Tensor:
    """Copy one rank's block of a complete tensor; zeros in its shape for a rank outside of the mesh."""
    coordinate = layout.mesh.coordinate_of(member)
    if coordinate is None:
        return full.new_zeros(layout.local_shape(None))
    return view_block(full, layout, coordinate).clone()


def take_block(full: torch.Tensor, layout: Layout, member: int | None) -> torch.Tensor:
    """Return one rank's block of a tensor that has no other user: a copy, or the tensor itself if the block is all of it."""
    return clone_block(full, layout, member) if member is None or _block_slices(layout, layout.mesh.coordinates[member]) else full


def view_block(full: torch.Tensor, layout: Layout, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Return a view of one rank's block in a complete tensor."""
    return full[_block_slices(layout, coordinate)]


@memoize(4096)
def _block_slices(layout: Layout, coordinate: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of a rank's block in the global tensor, up to the last sharded dim; () if the block is all of it."""
    count = max((d + 1 for d, split in enumerate(layout.splits) if split is not None), default=0)
    starts = zip(layout.local_offset(coordinate)[:count], layout.local_shape(coordinate)[:count], strict=True)
    return tuple([slice(start, start + size) for start, size in starts])


def synchronize(mesh: DeviceMesh, how: str = "a draw") -> None:
    """Broadcast the generator state of the first rank, once for all ranks that generate together on process groups."""
    if communicator_of(mesh).has_other_processes or tracing.is_tracing():
        _broadcast_state(mesh, how)


@untracked
def _broadcast_state(mesh: DeviceMesh, how: str) -> None:
    """Broadcast the generator state of the mesh's first rank at the first use of the mesh, and compare states between ranks."""
    if tracing.is_tracing() and mesh.kind == "process_group":
        raise UnsupportedOperationError(
            "this random operator on a DTensor is not supported inside torch.compile: a graph has no "
            "operator that generates its shards. Generate the numbers outside, or allow a graph break "
            "(fullgraph=False)"
        )
    comm = communicator_of(mesh)
    if not comm.has_other_processes:
        return
    seeded, dims, generator = mesh._root.seeded, mesh.group_id(range(mesh.ndim)), mesh_generator(mesh)
    if not seeded.issuperset(dims):
        seeded.update(dims)
        state = get_generator_state(generator)
        received = comm.broadcast(state.to(mesh.device_type), tuple(range(mesh.ndim)), 0).wait()
        set_generator_state(generator, received.cpu())
    compare_generator_state(mesh, generator, how)


@recorded_op
def read_state(generator: torch.Generator) -> torch.Tensor:
    """Return the state of the generator (recorded, so that a replay reads it again)."""
    return get_generator_state(generator)


@recorded_op
def write_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set the state of the generator (recorded, so that a replay sets it again)."""
    set_generator_state(generator, state)


def mesh_generator(mesh: DeviceMesh) -> torch.Generator:
    """Return the generator that operators without ``generator=`` use on the mesh's device."""
    return default_generator(torch.device(mesh.device_type))
