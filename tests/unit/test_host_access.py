"""What Python and other libraries read through a DTensor is its global value; its own storage holds nothing."""

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
EVERYWHERE = pytest.mark.parametrize("where", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)


@EVERYWHERE
def test_other_libraries_see_the_whole(where: Any) -> None:
    x = scatter(X, LINE, [where])
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


@EVERYWHERE
def test_a_format_of_several_numbers_is_refused_as_torch_refuses_it(where: Any) -> None:
    x = scatter(X, LINE, [where])
    assert f"{x.sum():.2f}" == f"{X.sum():.2f}"
    assert f"{x}" == repr(x)
    for y in (X, x, x[:1, :1]):
        with pytest.raises(TypeError, match=r"^unsupported format string passed to Tensor.__format__$"):
            f"{y:.3f}"


def test_the_older_way_to_give_memory_away_asks_too() -> None:
    """It took the wrapper's null pointer, and who read the capsule ended the process."""
    plain, x = X.clone(), scatter(X, LINE, [Shard(0)])
    assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)), X)
    assert torch.equal(torch.from_dlpack(torch.to_dlpack(x)), X)
    with pytest.raises(dt.errors.LayoutError, match="shards"):
        torch.utils.dlpack.to_dlpack(x.to_local())
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(plain)).data_ptr() == plain.data_ptr()
    with pytest.raises(dt.errors.CaptureError, match="dlpack"):
        dt.capture(lambda x, y: x + torch.from_dlpack(torch.to_dlpack(y)).sum())(x, plain)


@EVERYWHERE
def test_apply_writes_every_element_once(where: Any) -> None:
    for like in (X.clone(), X.t().clone(memory_format=torch.preserve_format)):
        x, seen = scatter(like, LINE, [where]), []
        made = x.apply_(lambda v, seen=seen: seen.append(v) or v * 2)
        assert made is x
        assert x.placements == (where,)
        assert x.stride() == like.stride()
        assert torch.equal(x.full_tensor(), like * 2)
        assert sorted(seen) == sorted(like.flatten().tolist())
    with pytest.raises(RuntimeError, match="detach"):
        scatter(X, LINE, [where]).requires_grad_().apply_(abs)


def test_sharing_memory_shares_the_pieces() -> None:
    layer = dt.distribute_module(nn.Linear(6, 5), LINE)
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert layer.weight.is_shared()
    assert layer(dt.distribute_tensor(X, LINE, [Shard(0)])).shape == (5, 5)


def test_the_old_way_to_make_a_tensor_of_a_shape_gives_a_distributed_one() -> None:
    x = dt.distribute_tensor(torch.rand(5, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])
    for made, shape in ((x.new(2, 3), (2, 3)), (x.new(x.shape), (5, 3)), (x.new(size=(4, 1)), (4, 1)), (x.int().new(), (0,))):
        assert isinstance(made, dt.DTensor)
        assert made.shape == shape
    assert x.new([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert torch.equal((x.new(x.shape).zero_() + x).full_tensor(), x.full_tensor())
    assert torch.distributions.Exponential(x + 1).sample().shape == (5, 3)  # draws into such a tensor
    assert torch.distributions.Multinomial(4, probs=x + 1).sample().sum().item() == 20
