"""Random operations whose outcome depends on the values of an operand: ``bernoulli``, ``normal``, ``multinomial``, ``rrelu``.

How many numbers they draw does not, so every rank draws for a whole tensor that holds its own block, and arbitrary values
elsewhere, and keeps its block of the result: what one device gives, at the cost of the whole tensor's time and transient
memory on each rank (see ``draw``). ``rrelu`` draws for the elements that are not positive: the mask of these is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...base.memory_order import contiguous_stride
from ...comm import communicator_of
from ...layout.layout import Layout
from ...random.draw import block_of, default_generator, place_in, set_state, state_of, synchronize
from ..call import Call
from ..kernels import KernelContext
from ..registry import register
from ..rule import Dims, Factors, Rule
from ..verbs import broadcast_factors
from .views import own_factors


def around(block: torch.Tensor, layout: Layout, member: int | None, other: float) -> torch.Tensor:
    """A tensor of the global shape and strides that holds one member's block (None: no block), and ``other`` elsewhere."""
    whole = torch.empty_strided(layout.shape, layout.stride, dtype=block.dtype, device=block.device).fill_(other)
    if member is not None:
        place_in(whole, layout, layout.mesh.coordinates[member]).copy_(block)
    return whole


def drawn_alike(at: KernelContext, generator: Any, one: Callable[..., Any], *locals_: Any) -> Any:
    """``one(member, *locals_)`` on every rank, from the same state of the generator, which advances once."""
    mesh = at.call.mesh
    synchronize(mesh)
    source = generator or default_generator(mesh)
    state = state_of(source)

    def from_start(member: int | None, *values: Any) -> Any:
        set_state(source, state)
        return one(member, *values)

    if mesh.current_member() is None:  # it draws too, see ``draw``
        return from_start(None, *locals_)
    return communicator_of(mesh).map(from_start, *locals_)


def draw_around(other: float) -> Callable[..., Any]:
    """The op on whole tensors that hold one block each; ``other`` is a value that the op takes."""

    def run(at: KernelContext, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        result, layouts = at.results[0], at.operands
        assert result is not None
        op = at.call.func.overloadpacket
        tensors = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]

        def one(member: int | None, *values: Any) -> torch.Tensor:
            given = list(values)
            for layout, i in zip((layouts[k] for k in _tensor_operands(at.call)), tensors, strict=True):
                given[i] = around(values[i], layout, member, other)
            return block_of(op(*given, generator=generator), result, member)

        return drawn_alike(at, generator, one, *args)

    return run


def _tensor_operands(call: Call) -> list[int]:
    return [i for i, name in enumerate(call.names) if isinstance(call.arguments[name], Layout)]


def rows_drawn(call: Call) -> Factors:
    """Categories are whole."""
    lead: Dims = (("n",),) if len(call.shape(0)) == 2 else ()
    return Factors(((*lead, ()),), ((*lead, ()),), {"n": call.shape(0)[0]} if lead else {})


register("bernoulli", Rule(broadcast_factors, run=draw_around(0.5), kind="random", source="... -> ..."))
for _name in ("Tensor_float", "float_Tensor", "Tensor_Tensor"):
    register(f"normal.{_name}", Rule(broadcast_factors, run=draw_around(1.0), kind="random", source="..., ... -> ..."))
register("multinomial", Rule(rows_drawn, run=draw_around(1.0), kind="random", source="... [k] -> ... [n]"))


# --- rrelu ---
def rrelu_factors(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    if call["training"]:  # in row-major order, whatever the order in memory: the meta kernel does not know
        call.results = tuple(meta and replace(meta, stride=contiguous_stride(meta.shape)) for meta in call.results)
    return Factors((dims, dims), (dims,), sizes)


def leak(
    at: KernelContext, x: Any, noise: Any, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """Slopes where elements are not positive: one draw for each, in row-major order."""
    if not training or at.call.mesh.current_member() is None:  # a rank outside of the mesh cannot know how many are drawn
        return at.map(lambda _, block, own: torch.ops.aten.rrelu_with_noise(block, own, lower, upper, False), x, noise)
    layout, mesh = at.operands[0], at.call.mesh
    cut = tuple(sorted({mesh_dim for split in layout.splits if split is not None for mesh_dim in split.mesh_dims}))
    coordinates = mesh.coordinates
    signs = at.map(lambda _, block: block <= 0, x)
    masks = at.comm.all_gather(signs, cut, lambda member: layout.local_shape(coordinates[member])).wait() if cut else [signs]

    def one(member: int, block: torch.Tensor, own: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
        whole = torch.empty(layout.shape, dtype=block.dtype, device=block.device)
        group = mesh.members_of(cut, member) if cut else (member,)
        for peer, negative in zip(group, parts, strict=True):
            place, coordinate = whole, coordinates[peer]
            for d, (offset, size) in enumerate(zip(layout.local_offset(coordinate), layout.local_shape(coordinate), strict=True)):
                place = place.narrow(d, min(offset, place.shape[d] - size), size)
            place.copy_(1 - 2 * negative.to(block.dtype))
        slopes = torch.empty_like(whole)
        torch.ops.aten.rrelu_with_noise(whole, slopes, lower, upper, True, generator)
        own.copy_(block_of(slopes, layout, member))
        return block * own

    return drawn_alike(at, generator, one, x, noise, masks)


register("rrelu_with_noise", Rule(rrelu_factors, run=leak, kind="random", source="..., ... -> ..."))
