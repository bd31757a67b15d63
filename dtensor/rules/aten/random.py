"""Random operations. What is drawn is cut like the operand it fills: without communication, in the current mode (see ``draw``).

Where the values of an operand decide what is drawn, results are those of one device in both modes. ``rrelu`` draws for the
elements that are not positive: the mask of these is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...base.memory_order import contiguous_stride
from ...layout.layout import Layout
from ...random.distributions import SAMPLERS
from ...random.draw import DRAWING, as_one_step, draw, draw_counted, from_one_state, own_block_of, place_in
from ..call import Call
from ..declare import POINTWISE
from ..kernel_context import KernelContext
from ..partial_rules import forgets
from ..random_ops import drawn
from ..rule import Factors

drawn(
    """
    rand_like
    randn_like
    randint_like
    bernoulli.p
    bernoulli_.float
    normal_
    uniform
    uniform_
    exponential
    exponential_
    random
    random_
    cauchy
    cauchy_
    log_normal
    log_normal_
    geometric
    geometric_
    """,
    partials=forgets,
)
drawn("bernoulli", around=0.5)
drawn("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", "each: ... -> ...", around=1.0)
drawn("multinomial", "n* [] -> n* []", around=1.0)  # categories are whole


def drop(at: KernelContext, x: Any, p: float, train: bool | None) -> Any:
    """Every element kept is scaled alike, so what dropout makes of ones is what it multiplies by."""
    layout, mask_layout = at.operands[0], at.results[1]
    assert mask_layout is not None

    def kept(layouts: Sequence[Layout]) -> Any:
        drawn, like = layouts

        def sample(device: torch.device) -> Tensor:
            ones = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device).fill_(1)
            return torch.native_dropout(ones, p, train)[1]

        counted = DRAWING.mode == "counter" and train is not False
        return draw_counted(drawn, SAMPLERS["bernoulli"], {"p": 1 - p}) if counted else draw(drawn, sample)

    mask = as_one_step((mask_layout, layout), kept)
    scale = 1.0 if train is False or p == 1 else 1 / (1 - p)
    return at.map(lambda _, block, kept: block * kept * scale if train is not False else block.clone(), x, mask), mask


# linear in the operand, the mask being the same for all terms
drawn("native_dropout", "... -> each: ...", run=drop, partials=("sum -> sum,R", "avg -> avg,R"))


# --- rrelu ---
def rrelu_factors(call: Call) -> Factors | None:
    if call["training"]:  # in row-major order, whatever the order in memory: the meta kernel does not know
        call.results = tuple(meta and replace(meta, stride=contiguous_stride(meta.shape)) for meta in call.results)
    return POINTWISE(call)


def leak(
    at: KernelContext, x: Any, noise: Any, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """Slopes where elements are not positive: one draw for each, in row-major order."""
    if not training or not at.comm.held:  # a rank outside of the mesh cannot know how many are drawn
        return at.map(lambda _, block, own: torch.ops.aten.rrelu_with_noise(block, own, lower, upper, False), x, noise)
    layout, mesh = at.operands[0], at.call.mesh
    cut = tuple(sorted({mesh_dim for split in layout.splits if split is not None for mesh_dim in split.mesh_dims}))
    coordinates = mesh.coordinates
    signs = at.map(lambda _, block: block <= 0, x)
    masks = at.comm.all_gather(signs, cut, lambda member: layout.local_shape(coordinates[member])).wait() if cut else [signs]

    def one(layout: Layout, member: int, own: Tensor, parts: list[Tensor]) -> Tensor:
        whole = torch.empty(layout.shape, dtype=own.dtype, device=own.device)
        group = mesh.members_of(cut, member) if cut else (member,)
        for peer, negative in zip(group, parts, strict=True):
            place_in(whole, layout, coordinates[peer]).fill_(1).masked_fill_(negative, -1)
        made = torch.empty_like(whole)
        torch.ops.aten.rrelu_with_noise(whole, made, lower, upper, True, generator)
        return own_block_of(made, layout, member)

    def slopes(layouts: Sequence[Layout], *given: Any) -> Any:
        return from_one_state(mesh, generator, partial(one, layouts[0]), *given)

    drawn = as_one_step((layout,), slopes, noise, masks)
    return at.map(lambda _, block, own, slope: block * own.copy_(slope), x, noise, drawn)


drawn("rrelu_with_noise", factors=rrelu_factors, run=leak)
