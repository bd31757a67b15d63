"""Fourier transforms: transformed dims are whole, all others are factors; transforms are linear over the reals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..declare import blockwise
from ..kernel_context import functional_of, on_each_rank
from ..partial_rules import linear


def transform(name: str, dtype_of: Any, size_of: Any) -> Any:
    """The operator on one rank's block; the FFT libraries refuse empty ones."""
    op = functional_of(name)

    def run(x: Tensor, dim: list[int], *args: Any, **kwargs: Any) -> Tensor:
        if x.numel() or not dim:
            return op(x, dim, *args, **kwargs)
        shape = list(x.shape)
        shape[dim[-1]] = size_of(shape[dim[-1]], *args)
        return kwargs["out"].resize_(shape) if "out" in kwargs else x.new_empty(shape, dtype=dtype_of(x.dtype))

    return on_each_rank(run)


def complex_of(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else dtype.to_complex()


LOCAL = {
    "_fft_r2c": transform("_fft_r2c", complex_of, lambda size, normalization, onesided: size // 2 + 1 if onesided else size),
    "_fft_c2r": transform("_fft_c2r", torch.dtype.to_real, lambda size, normalization, last_dim_size: last_dim_size),
    "_fft_c2c": transform("_fft_c2c", complex_of, lambda size, normalization, forward: size),
}
for _name, _local in LOCAL.items():
    blockwise(_name, "a* [@dim!] b* -> a* [@dim!] b*", partials=linear(), local=_local, kind="along")
