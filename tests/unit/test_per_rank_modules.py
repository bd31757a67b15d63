"""Modules of torch with per-rank tensors: SyncBatchNorm and TransformerEncoder give the results of separate processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.errors import LayoutError
from dtensor.ranks.joint_modules import patch_modules, unpatch_modules

MESH = dt.init_device_mesh("cpu", (3,))
SIZES = [3, 4, 0]
BATCH = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make_batches() -> Any:
    return dt.per_rank([part.clone() for part in BATCH.split(SIZES)])


# --- SyncBatchNorm --------------------------------------------------------------------------------------------------
def make_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()


def test_sync_batch_norm_uses_the_statistics_of_all_ranks() -> None:
    expected, model = nn.BatchNorm1d(3).double(), nn.SyncBatchNorm(3).double()
    x, batch = make_batches().requires_grad_(), BATCH.clone().requires_grad_()
    weights = torch.arange(21.0, dtype=torch.float64).reshape(7, 3)
    found, result = model(x), expected(batch)
    torch.testing.assert_close(torch.cat(found.shards), result)
    torch.testing.assert_close([*model.buffers()], [*expected.buffers()])
    (dx,) = torch.autograd.grad((found * dt.per_rank(weights.split(SIZES))).sum(), x)
    (expected_dx,) = torch.autograd.grad((result * weights).sum(), batch)
    torch.testing.assert_close(torch.cat(dx.shards), expected_dx)


@pytest.mark.parametrize("parallelize", [dt.parallel.replicate, dt.parallel.fully_shard])
def test_sync_batch_norm_under_data_parallelism_equals_batch_norm_of_the_global_batch(parallelize: Any) -> None:
    expected = make_norm()
    model = parallelize(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(expected)), mesh=MESH)
    result, found = expected(BATCH), model(make_batches())
    torch.testing.assert_close(torch.cat(found.shards), result)
    found.square().mul(0.5).sum().backward()
    result.square().mul(0.5 / 3).sum().backward()  # data parallelism takes the mean over ranks
    for mine, parameter in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), parameter.grad)
    for mine, buffer in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(mine.full_tensor() if isinstance(mine, dt.DTensor) else mine, buffer)


def test_sync_batch_norm_in_eval_uses_running_statistics() -> None:
    expected, model = nn.BatchNorm1d(3).double().eval(), nn.SyncBatchNorm(3).double().eval()
    torch.testing.assert_close(torch.cat(model(make_batches()).shards), expected(BATCH))


def test_sync_batch_norm_with_a_process_group_raises() -> None:
    model = nn.SyncBatchNorm(3, process_group=object()).double()
    with pytest.raises(LayoutError, match="process_group"):
        model(make_batches())


# --- TransformerEncoder ---------------------------------------------------------------------------------------------
PADDED = torch.tensor([[False, False, True, True], [False, False, False, True]])
TOKENS = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))


def make_encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, **options).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("own_mask", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_transformer_encoder_gives_zeros_for_padded_rows(own_mask: bool, frozen: bool) -> None:
    model = make_encoder().requires_grad_(not frozen)
    mask = dt.per_rank([PADDED] * 3) if own_mask else PADDED
    with torch.set_grad_enabled(frozen):
        found = model(dt.per_rank([TOKENS + k for k in range(3)]), src_key_padding_mask=mask)
        for k, shard in enumerate(found.shards):
            torch.testing.assert_close(shard, model(TOKENS + k, src_key_padding_mask=PADDED))
            assert not shard[PADDED].any()


def test_transformer_encoder_with_padding_has_the_gradients_of_one_rank() -> None:
    model, expected = make_encoder(), make_encoder()
    model(dt.per_rank([TOKENS] * 3), src_key_padding_mask=PADDED).square().sum().backward()
    expected(TOKENS, src_key_padding_mask=PADDED).square().sum().backward()
    for mine, parameter in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, parameter.grad)


def test_transformer_encoder_with_padding_and_per_rank_parameters_raises() -> None:
    x = dt.per_rank([TOKENS] * 3)
    with torch.no_grad():
        with pytest.raises(LayoutError, match="enable_nested_tensor=False"):
            dt.parallel.replicate(make_encoder(), mesh=MESH)(x, src_key_padding_mask=PADDED)
        model = make_encoder(enable_nested_tensor=False)
        expected = model(TOKENS, src_key_padding_mask=PADDED)
        found = dt.parallel.replicate(model, mesh=MESH)(x, src_key_padding_mask=PADDED)
    torch.testing.assert_close(found.shards[2], expected)


def test_unpatch_modules_restores_the_forward_of_torch_modules() -> None:
    patch_modules()
    for kind in (nn.SyncBatchNorm, nn.TransformerEncoder):
        assert hasattr(kind.forward, "__wrapped__")
    unpatch_modules()
    for kind in (nn.SyncBatchNorm, nn.TransformerEncoder):
        assert not hasattr(kind.forward, "__wrapped__")
    patch_modules()
