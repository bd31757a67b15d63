"""Hypothesis strategies for meshes, placements, shapes, layouts and distributed tensors, for your own property tests.

They are search strategies of hypothesis, which draw examples, and not sharding strategies of rules.

>>> import math
>>> from hypothesis import given
>>> from dtensor.testing import strategies
>>> @given(strategies.layouts())
... def test_blocks_cover_the_tensor(layout):
...     assert sum(math.prod(layout.local_shape(c)) for c in set(layout.mesh.coordinates)) >= layout.numel
>>> test_blocks_cover_the_tensor()

Examples shrink towards small meshes, small shapes and ``Replicate``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh, init_device_mesh
from ..placement import Placement
from ..tensor.dtensor import DTensor
from .placements import choose_placements, placement_kinds
from .samples.schema_samples import make_tensor
from .scatter import can_be_partial, scatter

__all__ = ["dtensors", "layouts", "meshes", "placements", "plain_tensors", "shapes"]


def meshes(max_ndim: int = 3, max_ranks: int = 8, named: bool | None = None) -> st.SearchStrategy[DeviceMesh]:
    """Draw in-process meshes of up to ``max_ndim`` dims (some of size one) and ``max_ranks`` ranks, with or without names."""

    def make_mesh(shape: list[int], with_names: bool) -> DeviceMesh:
        return init_device_mesh("cpu", tuple(shape), mesh_dim_names="abcdefgh"[: len(shape)] if with_names else None)

    sizes = st.lists(st.integers(1, 4), min_size=1, max_size=max_ndim).filter(lambda shape: math.prod(shape) <= max_ranks)
    return st.builds(make_mesh, sizes, st.booleans() if named is None else st.just(named))


def shapes(min_ndim: int = 0, max_ndim: int = 3, min_size: int = 0, max_size: int = 7) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes, including empty dims and dims of size one."""
    return st.lists(st.integers(min_size, max_size), min_size=min_ndim, max_size=max_ndim).map(tuple)


@st.composite
def placements(
    draw: st.DrawFn,
    mesh: DeviceMesh,
    shape: Sequence[int],
    *,
    partials: Sequence[str] = ("sum", "avg", "max", "min", "product"),
    ragged: bool = True,
    reordered: bool = True,
) -> tuple[Placement, ...]:
    """Draw one placement per mesh dim for a tensor of ``shape``: replicated, sharded or partial.

    Args:
        partials: the reductions to draw from; () for none.
        ragged: also ``Shard(dim, sizes=...)``.
        reordered: also shard orders other than that of the mesh dims.
    """
    rng = draw(st.randoms(use_true_random=False))  # shrinks as what is drawn from it
    return choose_placements(
        shape, mesh.shape, placement_kinds(shape, partials), rng, ragged=0.5 * ragged, reordered=0.5 * reordered
    )


@st.composite
def layouts(
    draw: st.DrawFn,
    mesh: DeviceMesh | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    partials: Sequence[str] = ("sum", "avg", "max", "min", "product"),
) -> Layout:
    """Draw layouts of every kind, contiguous and with dims in another memory order."""
    mesh = draw(meshes()) if mesh is None else mesh
    shape = draw(shapes()) if shape is None else tuple(shape)
    order = draw(st.permutations(range(len(shape))))
    stride = torch.empty([shape[d] for d in order], device="meta").permute([order.index(d) for d in range(len(shape))]).stride()
    allowed = [op for op in partials if can_be_partial(dtype, op)]
    return Layout.of(mesh, draw(placements(mesh, shape, partials=allowed)), shape, stride, dtype)


@st.composite
def plain_tensors(draw: st.DrawFn, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Draw tensors of small values with few binary digits, so that sums are equal in any order."""
    return make_tensor(draw(shapes()) if shape is None else tuple(shape), dtype, draw(st.integers(0, 1000)))


@st.composite
def dtensors(
    draw: st.DrawFn, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float64
) -> tuple[DTensor, torch.Tensor]:
    """Draw a DTensor with any layout, with nontrivial partial addends, and the plain tensor with its global value."""
    layout = draw(layouts(mesh, shape, dtype))
    value = make_tensor(tuple(layout.shape), dtype, draw(st.integers(0, 1000)))
    return scatter(value, layout.mesh, layout.placements, seed=draw(st.integers(0, 1000))), value
