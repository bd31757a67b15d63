"""Random operators: numbers are sharded as the operand that they fill, without communication, and do not depend on the layout.

If values of an operand decide what is generated, results are those of one device in both modes. ``rrelu`` generates numbers for
the elements that are not positive: the mask of these is gathered.
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
from ...random.draw import RANDOM_MODE, draw, draw_counted, map_from_one_state, run_as_graph_op, take_block, view_block
from ..call import Call
from ..declare import POINTWISE
from ..kernel_context import KernelContext
from ..kernels.random_ops import random_operator
from ..partial_rules import forgets
from ..rule import Factors

random_operator(
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
random_operator("bernoulli", around=0.5)
random_operator("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", "each: ... -> ...", around=1.0)
random_operator("multinomial", "n* [] -> n* []", around=1.0)  # categories are unsharded


def dropout_of_blocks(at: KernelContext, x: Any, p: float, train: bool | None) -> Any:
    """Return the operand times a random mask, and the mask, for each rank's block (a kernel)."""
    layout, mask_layout = at.operands[0], at.results[1]
    assert mask_layout is not None

    def generate_mask(layouts: Sequence[Layout]) -> Any:
        """Generate each rank's block of the global dropout mask, in the random mode that is set."""
        mask_layout, like = layouts

        def sample_mask(device: torch.device) -> Tensor:
            """Generate the global dropout mask: that of a dropout of ones."""
            ones = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device).fill_(1)
            return torch.native_dropout(ones, p, train)[1]

        counted = RANDOM_MODE.mode == "counter" and train is not False
        return draw_counted(mask_layout, SAMPLERS["bernoulli"], {"p": 1 - p}) if counted else draw(mask_layout, sample_mask)

    mask = run_as_graph_op((mask_layout, layout), generate_mask)
    scale = 1.0 if train is False or p == 1 else 1 / (1 - p)
    out = at.map(lambda _, block, kept: block * kept * scale if train is not False else block.clone(), x, mask)
    return out, mask


# linear in the operand, because all addends have the same mask
random_operator("native_dropout", "... -> each: ...", run=dropout_of_blocks, partials=("sum -> sum,R", "avg -> avg,R"))


# --- rrelu ---
def rrelu_factors(call: Call) -> Factors | None:
    """Return elementwise factors for ``rrelu_with_noise``. In training its results are row-major."""
    if call["training"]:  # row-major for any memory order, which the meta kernel does not know
        call.results = tuple(meta and replace(meta, stride=contiguous_stride(meta.shape)) for meta in call.results)
    return POINTWISE(call)


def rrelu_of_blocks(
    at: KernelContext, x: Any, noise: Any, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """Compute ``rrelu`` on each rank's block, with one random slope per non-positive global element (a kernel)."""
    if not training or not at.comm.held:  # a rank outside of the mesh does not know how many numbers are generated
        return at.map(lambda _, block, own: torch.ops.aten.rrelu_with_noise(block, own, lower, upper, False), x, noise)
    layout, mesh = at.operands[0], at.call.mesh
    sharded_mesh_dims = tuple(sorted({mesh_dim for split in layout.splits if split is not None for mesh_dim in split.mesh_dims}))
    coordinates = mesh.coordinates
    signs = at.map(lambda _, block: block <= 0, x)
    masks = (
        at.comm.all_gather(signs, sharded_mesh_dims, lambda member: layout.local_shape(coordinates[member])).wait()
        if sharded_mesh_dims
        else [signs]
    )

    def slopes_of_rank(layout: Layout, member: int, own: Tensor, parts: list[Tensor]) -> Tensor:
        """Generate the slopes of the global tensor from the signs of all elements, and return one rank's block of them."""
        signs_of_all = torch.empty(layout.shape, dtype=own.dtype, device=own.device)
        group = mesh.members_of(sharded_mesh_dims, member) if sharded_mesh_dims else (member,)
        for peer, negative in zip(group, parts, strict=True):
            view_block(signs_of_all, layout, coordinates[peer]).fill_(1).masked_fill_(negative, -1)
        noise_of_all = torch.empty_like(signs_of_all)
        torch.ops.aten.rrelu_with_noise(signs_of_all, noise_of_all, lower, upper, True, generator)
        return take_block(noise_of_all, layout, member)

    def generate_slopes(layouts: Sequence[Layout], *given: Any) -> Any:
        return map_from_one_state(mesh, generator, partial(slopes_of_rank, layouts[0]), *given)

    slopes = run_as_graph_op((layout,), generate_slopes, noise, masks)
    return at.map(lambda _, block, own, slope: block * own.copy_(slope), x, noise, slopes)


random_operator("rrelu_with_noise", factors=rrelu_factors, run=rrelu_of_blocks)
