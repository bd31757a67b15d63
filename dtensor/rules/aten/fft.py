"""FFT (Fourier transforms): transformed dims are unsharded, all others are factors. Transforms are linear over the reals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..declare import blockwise
from ..kernel_context import functional_operator, on_each_rank
from ..partial_rules import linear


def make_local_transform(name: str, dtype_of: Any, size_of: Any) -> Any:
    """Return a Fourier transform for one rank's block that accepts empty blocks, which FFT libraries refuse."""
    op = functional_operator(name)

    def transform_block(x: Tensor, dim: list[int], *args: Any, **kwargs: Any) -> Tensor:
        """Transform a block. For an empty one return an empty tensor of the result shape."""
        if x.numel() or not dim:
            return op(x, dim, *args, **kwargs)
        shape = list(x.shape)
        shape[dim[-1]] = size_of(shape[dim[-1]], *args)
        return kwargs["out"].resize_(shape) if "out" in kwargs else x.new_empty(shape, dtype=dtype_of(x.dtype))

    return on_each_rank(transform_block)


def to_complex_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else dtype.to_complex()


LOCAL_TRANSFORMS = {
    "_fft_r2c": make_local_transform(
        "_fft_r2c", to_complex_dtype, lambda size, normalization, onesided: size // 2 + 1 if onesided else size
    ),
    "_fft_c2r": make_local_transform("_fft_c2r", torch.dtype.to_real, lambda size, normalization, last_dim_size: last_dim_size),
    "_fft_c2c": make_local_transform("_fft_c2c", to_complex_dtype, lambda size, normalization, forward: size),
}
for _name, _local in LOCAL_TRANSFORMS.items():
    blockwise(_name, "a* [@dim!] b* -> a* [@dim!] b*", partials=linear(), local=_local, kind="along")
