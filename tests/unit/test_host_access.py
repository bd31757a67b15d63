"""Host access: NumPy, DLPack, format and apply_ of a DTensor read and write its global value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import scatter
from dtensor.testing.placements import get_or_make_mesh

LINE = get_or_make_mesh((4,))
X = torch.arange(30.0).reshape(5, 6)
EACH_PLACEMENT = pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)


@EACH_PLACEMENT
def test_numpy_and_dlpack_read_the_global_value(placement: Any) -> None:
    x = scatter(X, LINE, [placement])
    assert np.array_equal(np.from_dlpack(x), X.numpy())
    assert torch.equal(torch.from_dlpack(x), X)
    assert np.array_equal(np.asarray(x), X.numpy())
    assert np.array_equal(np.array(x), X.numpy())
    assert np.array(x, dtype=np.float64, copy=True).dtype == np.float64
    with pytest.raises(ValueError, match="copy=False"):
        np.array(x, copy=False)
    assert x.tolist() == X.tolist()
    torch.from_dlpack(x).zero_()  # a copy
    assert torch.equal(torch.from_dlpack(x), X)
    with pytest.raises(BufferError, match="detach"):
        torch.from_dlpack(x.detach().requires_grad_())


@EACH_PLACEMENT
def test_format_of_several_elements_raises_as_in_plain_torch(placement: Any) -> None:
    x = scatter(X, LINE, [placement])
    assert f"{x.sum():.2f}" == f"{X.sum():.2f}"
    assert f"{x}" == repr(x)
    for y in (X, x, x[:1, :1]):
        with pytest.raises(TypeError, match=r"^unsupported format string passed to Tensor.__format__$"):
            f"{y:.3f}"


def test_to_dlpack_gives_the_global_value() -> None:
    """Without the patch, the capsule had a null pointer, and reading it crashed the process."""
    plain, x = X.clone(), scatter(X, LINE, [Shard(0)])
    assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)), X)
    assert torch.equal(torch.from_dlpack(torch.to_dlpack(x)), X)
    with pytest.raises(dt.errors.LayoutError, match="shards"):
        torch.utils.dlpack.to_dlpack(x.to_local())
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(plain)).data_ptr() == plain.data_ptr()
    with pytest.raises(dt.errors.CaptureError, match="dlpack"):
        dt.capture(lambda x, y: x + torch.from_dlpack(torch.to_dlpack(y)).sum())(x, plain)


@EACH_PLACEMENT
def test_apply_calls_the_function_once_for_each_element(placement: Any) -> None:
    for plain in (X.clone(), X.t().clone(memory_format=torch.preserve_format)):
        x, calls = scatter(plain, LINE, [placement]), []
        result = x.apply_(lambda v, calls=calls: calls.append(v) or v * 2)
        assert result is x
        assert x.placements == (placement,)
        assert x.stride() == plain.stride()
        assert torch.equal(x.full_tensor(), plain * 2)
        assert sorted(calls) == sorted(plain.flatten().tolist())
    with pytest.raises(RuntimeError, match="detach"):
        scatter(X, LINE, [placement]).requires_grad_().apply_(abs)


def test_share_memory_shares_the_local_tensors() -> None:
    layer = dt.distribute_module(nn.Linear(6, 5), LINE)
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert layer(dt.distribute_tensor(X, LINE, [Shard(0)])).shape == (5, 5)


def test_new_of_a_dtensor_gives_a_dtensor() -> None:
    x = dt.distribute_tensor(torch.rand(5, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])
    for result, shape in ((x.new(2, 3), (2, 3)), (x.new(x.shape), (5, 3)), (x.new(size=(4, 1)), (4, 1)), (x.int().new(), (0,))):
        assert isinstance(result, dt.DTensor)
        assert result.shape == shape
    assert x.new([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert torch.equal((x.new(x.shape).zero_() + x).full_tensor(), x.full_tensor())
    assert torch.distributions.Exponential(x + 1).sample().shape == (5, 3)  # torch draws into a tensor of x.new
    assert torch.distributions.Multinomial(4, probs=x + 1).sample().sum().item() == 20
