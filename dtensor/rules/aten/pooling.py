"""Pooling and other operations on positions of images and sequences: resampling, padding, unfolding. Positions are unsharded.

Blocks of channels must not be empty, because most of these operators refuse them. Empty batches are accepted.
"""

from __future__ import annotations

import math
from typing import Any

from ..call import Call
from ..declare import blockwise, kernel_rule, local_size
from ..kernel_context import functional_operator, on_contiguous
from ..partial_rules import copies, linear, on_floats
from ..rule import Dims, Factors, LocalView

POSITIONS = {1: "[x]", 2: "[y] [x]", 3: "[z] [y] [x]"}
GRADIENT_PARTIALS = linear("grad_output")
# weighted sums of integers are rounded, and rounding the sum differs from rounding the addends
WEIGHTED_PARTIALS = on_floats("sum -> sum", "avg -> avg")


def declare_on_positions(names: str, count: int, **options: Any) -> None:
    """Declare operators on the last ``count`` dims, which are unsharded: each image or sequence is computed by itself."""
    pattern = f"each: n* c {POSITIONS[count]} -> each: n* c {POSITIONS[count]}"
    blockwise(names, pattern, nonempty="c", kind="positions", **options)


# --- pooling: indices are positions inside one image ----------------------------------------------------------------
declare_on_positions("max_pool2d_with_indices adaptive_max_pool2d", 2)
declare_on_positions("max_pool3d_with_indices adaptive_max_pool3d", 3, as_laid_out=True)
declare_on_positions("max_pool2d_with_indices_backward", 2, partials=GRADIENT_PARTIALS)
declare_on_positions("max_pool3d_with_indices_backward", 3, partials=GRADIENT_PARTIALS, as_laid_out=True)
declare_on_positions("avg_pool2d _adaptive_avg_pool2d", 2, partials=WEIGHTED_PARTIALS)
declare_on_positions("avg_pool2d_backward _adaptive_avg_pool2d_backward", 2, partials=GRADIENT_PARTIALS)
declare_on_positions("avg_pool3d _adaptive_avg_pool3d", 3, partials=WEIGHTED_PARTIALS)
declare_on_positions("avg_pool3d_backward _adaptive_avg_pool3d_backward", 3, partials=GRADIENT_PARTIALS)
for _count in (2, 3):  # kernels with index operands read their operands as contiguous
    for _name in (f"adaptive_max_pool{_count}d_backward", f"fractional_max_pool{_count}d_backward"):
        declare_on_positions(_name, _count, partials=GRADIENT_PARTIALS, local=on_contiguous(functional_operator(_name)))
    _name = f"max_unpool{_count}d"
    declare_on_positions(_name, _count, partials=linear("self"), local=on_contiguous(functional_operator(_name)))
    _image = f"n c {POSITIONS[_count]}"
    _pattern = f"{_image}, n c [t] -> {_image}, {_image}"
    blockwise(f"fractional_max_pool{_count}d", _pattern, nonempty="c", plain=("random_samples",))


# --- resampling -----------------------------------------------------------------------------------------------------
_MODES = {
    1: "upsample_linear1d",
    2: "upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa",
    3: "upsample_trilinear3d",
}
for _count, _names in _MODES.items():
    _copies = f"upsample_nearest{_count}d _upsample_nearest_exact{_count}d"
    declare_on_positions(_names, _count, partials=WEIGHTED_PARTIALS, floats_matter=True)
    declare_on_positions(_copies, _count, partials=copies, floats_matter=True)
    _backward = " ".join(f"{name}_backward" for name in f"{_names} {_copies}".split())
    declare_on_positions(_backward, _count, partials=GRADIENT_PARTIALS, local_args=local_size("input_size"), floats_matter=True)

# an output position reads the unsharded image at its own grid entry
for _count, _grid in {2: "h w", 3: "d h w"}.items():
    _image = POSITIONS[_count]
    blockwise(f"grid_sampler_{_count}d", f"n c {_image}, n {_grid} [t] -> n c {_grid}", partials=linear("input"))
    _pattern = f"n c {_grid}, n c {_image}, n {_grid} [t] -> n c {_image}, n {_grid} [t]"
    # a few neighbors of each position are read and written, not the complete image
    blockwise(f"grid_sampler_{_count}d_backward", _pattern, sums=f"c {_grid}", flops=lambda call: 0)
blockwise("cudnn_grid_sampler", "n c [] [], n h w [t] -> n c h w", partials=linear("self"))
blockwise(
    "cudnn_grid_sampler_backward", "n c [] [], n h w [t], n c h w -> n c [] [], n h w [t]", sums="c h w", flops=lambda call: 0
)


def local_grid_args(call: Call, at: LocalView) -> dict[str, Any]:
    return {"size": (at.operands[0][0], *call["size"][1:])}


GRIDS = "n [] [] -> n [] [] [] | n [] [] -> n [] [] [] []"
blockwise("affine_grid_generator", GRIDS, partials=linear("theta"), local_args=local_grid_args)


# --- padding: elements are copies, and gradients are sums -----------------------------------------------------------
for _count in (1, 2, 3):
    declare_on_positions(f"reflection_pad{_count}d replication_pad{_count}d", _count, partials=copies)
    declare_on_positions(
        f"reflection_pad{_count}d_backward replication_pad{_count}d_backward", _count, partials=GRADIENT_PARTIALS
    )


# --- windows as columns: ``n c h w`` as ``n (c k) positions`` -------------------------------------------------------
def window_size(call: Call) -> int:
    return math.prod(call["kernel_size"])


def im2col_factors(call: Call) -> Factors:
    """Return the factors of ``im2col``: batch and channels. Each result channel is a product of channel and window position."""
    shape = call.shape(0)
    lead: Dims = tuple((f"n.{d}",) for d in range(len(shape) - 3))
    sizes = {f"n.{d}": shape[d] for d in range(len(lead))} | {"c": shape[-3], "k": window_size(call)}
    return Factors(((*lead, ("c",), (), ()),), ((*lead, ("c", "k"), ()),), sizes)


kernel_rule("im2col", im2col_factors, partials=linear("self"), nonempty="c")
blockwise("col2im", "n* (c k) [] -> n* c [] []", sizes={"k": window_size}, partials=linear("self"), nonempty="c")
