"""Operations on the positions of images and sequences: pooling, resampling, padding, unfolding. Only positions are whole.

Blocks of channels must not be empty, which most of these operators refuse (an empty batch they take).
"""

from __future__ import annotations

from typing import Any

import torch

from ..blockwise import Partials, blockwise, in_first
from ..call import Call
from ..registry import register
from ..rule import ANY_PARTIAL, Choice, Dims, Factors, LocalView, Rule

LINEAR = in_first


def weighted(call: Call) -> tuple[str, ...]:
    """Weighted sums of one operand's elements: integers are rounded, and the rounded sum is not the sum of what is rounded."""
    dtype = call.operands[0].dtype
    return in_first(call) if dtype.is_floating_point or dtype.is_complex else ()


def leading(call: Call, positions: int) -> Factors | None:
    """All dims but the last ``positions`` are factors, the same ones in all operands and results."""
    shapes = [call.shape(i) for i in range(len(call.operands))] + [meta.shape for meta in call.results if meta is not None]
    lead = len(shapes[0]) - positions
    if lead < 0 or any(len(shape) != len(shapes[0]) or shape[:lead] != shapes[0][:lead] for shape in shapes):
        return None
    dims: Dims = (*((f"b{d}",) for d in range(lead)), *((),) * positions)
    sizes = {f"b{d}": size for d, size in enumerate(shapes[0][:lead])}
    return Factors((dims,) * len(call.operands), (dims,) * (len(shapes) - len(call.operands)), sizes)


def no_empty_channels(choice: Choice) -> bool:
    """Every rank has channels; only the first of two leading dims, the batch, may have empty blocks."""
    batch = "b0" if "b1" in choice.factors.sizes else ""
    return all(min(choice.sizes(name)) > 0 for name in choice.splits if name != batch)


def on_positions(names: str, count: int, *, partials: Partials = (), **options: Any) -> None:
    """Declare operators that work on the last ``count`` dims, each image by itself."""
    register(
        names,
        Rule(
            lambda call: leading(call, count),
            partials,
            no_empty_channels,
            kind="positions",
            source=f"... [{count}] -> ... [{count}]",
            **options,
        ),
    )


def densely(op: Any) -> Any:
    """``op`` on contiguous blocks: the kernels that take indices read them as if they were, without looking."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)

    return run


# --- pooling: indices are positions inside one image ----------------------------------------------------------------
on_positions("max_pool2d_with_indices adaptive_max_pool2d", 2)
on_positions("max_pool3d_with_indices adaptive_max_pool3d", 3, as_laid_out=True)
on_positions("max_pool2d_with_indices_backward", 2, partials=LINEAR)
on_positions("max_pool3d_with_indices_backward", 3, partials=LINEAR, as_laid_out=True)
on_positions("avg_pool2d _adaptive_avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d_backward", 2, partials=weighted)
on_positions("avg_pool3d _adaptive_avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d_backward", 3, partials=weighted)
for _count in (2, 3):
    for _name in (f"adaptive_max_pool{_count}d_backward", f"fractional_max_pool{_count}d_backward", f"max_unpool{_count}d"):
        on_positions(_name, _count, partials=LINEAR, local=densely(getattr(torch.ops.aten, _name)))
blockwise(
    "fractional_max_pool2d",
    "n c [h] [w], n c [t] -> n c [h] [w], n c [h] [w]",
    when=lambda choice: min(choice.sizes("c")) > 0,
    plain=("random_samples",),
)
blockwise(
    "fractional_max_pool3d",
    "n c [d] [h] [w], n c [t] -> n c [d] [h] [w], n c [d] [h] [w]",
    when=lambda choice: min(choice.sizes("c")) > 0,
    plain=("random_samples",),
)


# --- resampling -----------------------------------------------------------------------------------------------------
def local_input_size(call: Call, at: LocalView) -> dict[str, Any]:
    return {"input_size": at.results[0]}


_MODES = {
    1: "upsample_linear1d",
    2: "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa",
    3: "upsample_trilinear3d",
}
for _count, _names in _MODES.items():
    _copies = f"upsample_nearest{_count}d _upsample_nearest_exact{_count}d"
    on_positions(_names, _count, partials=weighted, floats_matter=True)
    on_positions(_copies, _count, partials=ANY_PARTIAL, floats_matter=True)
    _backward = " ".join(f"{name}_backward" for name in f"{_names} {_copies}".split())
    on_positions(_backward, _count, partials=LINEAR, local_args=local_input_size, floats_matter=True)

# an output position takes its own grid entry from the whole image
GRIDS = {2: ("[y] [x]", "h w"), 3: ("[z] [y] [x]", "d h w")}
for _count, (_image, _grid) in GRIDS.items():
    blockwise(f"grid_sampler_{_count}d", f"n c {_image}, n {_grid} [t] -> n c {_grid}", partials=in_first)
    blockwise(
        f"grid_sampler_{_count}d_backward",
        f"n c {_grid}, n c {_image}, n {_grid} [t] -> n c {_image}, n {_grid} [t]",
        sums=f"c {_grid}",
    )


def local_size_of_grid(call: Call, at: LocalView) -> dict[str, Any]:
    return {"size": (at.operands[0][0], *call["size"][1:])}


def grid_factors(call: Call) -> Factors:
    result = call.results[0]
    assert result is not None
    return Factors(((("n",), (), ()),), ((("n",), *((),) * (len(result.shape) - 1)),), {"n": call.shape(0)[0]})


register(
    "affine_grid_generator",
    Rule(grid_factors, in_first, local_args=local_size_of_grid, kind="positions", source="n [i] [j] -> n [h] [w] [t]"),
)


# --- padding: each element is a copy of one, and its gradient a sum of some -----------------------------------------
for _count in (1, 2, 3):
    on_positions(f"reflection_pad{_count}d replication_pad{_count}d", _count, partials=ANY_PARTIAL)
    on_positions(f"reflection_pad{_count}d_backward replication_pad{_count}d_backward", _count, partials=LINEAR)


# --- windows as columns: ``n c h w`` as ``n (c k) positions`` -------------------------------------------------------
def columns(call: Call, image: int, channels: int) -> Factors:
    """Factors of an image of ``image`` dims (3 without a batch) and of its columns."""
    kernel = call["kernel_size"]
    lead: Dims = (("b0",),) if image == 4 else ()
    sizes = {"b0": call.shape(0)[0]} if lead else {}
    sizes |= {"b1": channels, "k": kernel[0] * kernel[-1]}
    dims = ((*lead, ("b1",), (), ()), (*lead, ("b1", "k"), ()))
    own, other = dims if len(call.shape(0)) == image and call.func._schema.name == "aten::im2col" else dims[::-1]
    return Factors((own,), (other,), sizes)


def im2col_factors(call: Call) -> Factors:
    return columns(call, len(call.shape(0)), call.shape(0)[-3])


def col2im_factors(call: Call) -> Factors:
    kernel = call["kernel_size"]
    return columns(call, len(call.shape(0)) + 1, call.shape(0)[-2] // (kernel[0] * kernel[-1]))


register("im2col", Rule(im2col_factors, in_first, no_empty_channels, kind="positions", source="n c [h] [w] -> n (c k) [p]"))
register("col2im", Rule(col2im_factors, in_first, no_empty_channels, kind="positions", source="n (c k) [p] -> n c [h] [w]"))
