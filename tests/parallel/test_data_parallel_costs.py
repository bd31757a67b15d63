"""Communication of unchanged modules on a sharded batch: gradients of parameters are reduced once, and nothing else is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_with_one_device import assert_same_gradients
from torch import Tensor, nn
from torch.nn import functional as F
from torch_version_marks import mark_undecomposed_linear

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode

N, BATCH = 4, 8
MESH = dt.init_device_mesh("cpu", (N,))


class Spectral(nn.Module):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3, dtype=torch.complex64))
        self.beside = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft2(x)[..., :3, :3]
        mixed = torch.einsum("bixy,ioxy->boxy", modes, self.weight)
        return F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + self.beside(x))


class ConvolutionalNet(nn.Module):
    """Convolutional network with a downsampling path, an upsampling path and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 4, 2, 1)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.silu(self.norm(self.down(x))))
        return self.out(torch.cat([y, F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode="bilinear")], 1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        steps, (last, _) = self.layers(x)
        return self.out(steps) + self.out(last[-2:].transpose(0, 1).flatten(1))[:, None]


class RecurrentOutputs(nn.Module):
    """Module that returns the outputs of recurrent layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


class UnrolledCell(nn.Module):
    """Module that runs a recurrent cell step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0])
        return torch.stack(outputs, 1)


class Queries(nn.Module):
    """Attention of learned queries to a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.queries = nn.MultiheadAttention(16, 4, batch_first=True), nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.queries.expand(x.shape[0], -1, -1), x, x)[0]


class Experts(nn.Module):
    """Mixture of experts that computes all four experts and uses two for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        best = torch.zeros_like(share).scatter(-1, share.topk(2, -1).indices, 1) * share
        return torch.stack([best[..., k : k + 1] * expert(x) for k, expert in enumerate(self.experts)]).sum(0)


def sequence() -> Tensor:
    return torch.randn(BATCH, 6, 16)


def longer_sequence() -> Tensor:
    """Return a batch that is larger than the fused projection's parameters, so that gathering it is never cheaper."""
    return torch.randn(BATCH, 7, 16)


def picture() -> Tensor:
    return torch.randn(BATCH, 4, 8, 8)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), sequence),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), longer_sequence),
    "encoder, norm first": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True), longer_sequence),
    "decoder": (lambda: nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), sequence),
    "queries": (Queries, sequence),
    "recurrent": (Recurrent, sequence),
    "gru": (lambda: RecurrentOutputs(nn.GRU(16, 8, 2, batch_first=True, bidirectional=True)), sequence),
    "cell": (lambda: UnrolledCell(nn.LSTMCell(16, 16)), sequence),
    "experts": (Experts, sequence),
    "spectral": (Spectral, picture),
    "net": (ConvolutionalNet, picture),
    "convolution in 3-d": (lambda: nn.Conv3d(4, 4, 3, padding=1), lambda: torch.randn(BATCH, 4, 3, 4, 4)),
    "pooled": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)), picture),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 8)), sequence),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 8)),
        lambda: torch.arange(48).view(8, 6) % 32,
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_on_sharded_batch_all_reduce_only_parameter_gradients(name: str) -> None:
    torch.manual_seed(0)
    make, batch = MODULES[name]
    one, x = make(), batch()
    model = dt.distribute_module(copy.deepcopy(one), MESH)
    given = dt.distribute_tensor(x, MESH, [Shard(0)])

    def step(model: Any, x: Any) -> Any:
        x = x.detach().requires_grad_(x.is_floating_point())
        torch.manual_seed(1)  # for equal dropout
        loss = (model(x, x.detach()) if name == "decoder" else model(x)).square().mean()
        loss.backward()
        return loss, x.grad

    with CommDebugMode() as comm:
        loss, of_input = step(model, given)
    expected, of_plain = step(one, x)
    torch.testing.assert_close(loss.full_tensor(), expected)
    if of_plain is not None:
        assert of_input.placements == (Shard(0),)
        torch.testing.assert_close(of_input.full_tensor(), of_plain)
    grads = [p.grad for p in model.parameters()]
    for got, plain in zip(grads, one.parameters(), strict=True):
        assert isinstance(got, dt.DTensor)
        assert got.placements == (Replicate(),)
        torch.testing.assert_close(got.full_tensor(), plain.grad, rtol=1e-4, atol=1e-6)
    assert sum(comm.get_comm_bytes().values()) <= sum(2 * (N - 1) * p.numel() * p.element_size() // N for p in one.parameters())
    assert set(comm.get_comm_counts()) == {"all_reduce"}


# --- functions of a batch ---------------------------------------------------------------------------------------------------
def gather_indices() -> Tensor:
    return torch.randint(0, 4, (BATCH, 4, 3, 8))


def banded_attention(x: Tensor) -> Tensor:
    """Compute banded attention scores as in Longformer: overlapping chunks of positions by ``as_strided``."""
    rows = x.transpose(0, 1).contiguous().transpose(0, 1).transpose(1, 2).reshape(-1, 8, 8)
    chunks = rows.view(-1, 2, 4, 8)
    stride = chunks.stride()
    queries = chunks.as_strided((chunks.shape[0], 3, 4, 8), (stride[0], stride[1] // 2, *stride[2:]))
    return (queries @ queries.transpose(-1, -2)).view(BATCH, 4, 3, 4, 4)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circular padding": lambda x, at: F.pad(x, (1, 2, 1, 1), mode="circular"),
    "gather": lambda x, at: x.gather(2, at),
    "topk and amax": lambda x, at: x.topk(3, -1).values + x.amax(-1, keepdim=True),
    "index of columns": lambda x, at: x[:, [1, 0, 1]] + x.index_select(1, torch.tensor([0, 2, 3])),
    "copy into new_zeros": lambda x, at: x.new_zeros(x.shape[0], 2).copy_(x.mean((2, 3))[:, :2]),
    "grid_sample": lambda x, at: F.grid_sample(x, x[:, :2, :4].permute(0, 2, 3, 1), align_corners=False),
    "unfold and fold": lambda x, at: F.fold(F.unfold(x, 3, padding=1), (8, 8), 3, padding=1),
    "max_unpool": lambda x, at: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "stft": lambda x, at: torch.stft(x.flatten(1), 16, 4, window=at.new_ones(16, dtype=x.dtype), return_complex=True).abs(),
    "as_strided windows": lambda x, at: x.as_strided((8, 4, 8, 3, 4), (256, 64, 8, 2, 1)) * 2,
    "banded attention": lambda x, at: banded_attention(x.transpose(1, 2).reshape(BATCH, 8, 4, 8)),
    "cdist": lambda x, at: torch.cdist(x, x[:, :, :3]),
}


@pytest.mark.parametrize("name", mark_undecomposed_linear(FUNCTIONS, ("stft", "as_strided windows", "banded attention")))
def test_functions_of_sharded_batch_do_not_communicate(name: str) -> None:
    torch.manual_seed(0)
    plain, at = picture().requires_grad_(), gather_indices()
    x, index = (dt.distribute_tensor(t.detach(), MESH, [Shard(0)]) for t in (plain, at))
    expected = FUNCTIONS[name](plain, at)
    expected.sum().backward()
    with CommDebugMode() as comm:
        found = FUNCTIONS[name](x.requires_grad_(), index)
        found.sum().backward()
    assert not comm.get_comm_counts()
    assert found.placements == x.grad.placements == (Shard(0),)
    torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@pytest.mark.parametrize("shape", [(8, 3), (8, 4, 5, 8), (8,), (3, 4), (2, 8, 8, 8)])
def test_new_full_shards_dims_of_the_size_of_the_source(shape: tuple[int, ...]) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    x = dt.distribute_tensor(picture(), mesh, [Shard(0), Shard(2)])
    made = x.new_full(shape, 3.0)
    cut = [Shard(d) if shape[d:] and shape[d] == 8 else Replicate() for d in (0, 2)]
    assert made.placements == tuple(cut)
    assert torch.equal(made.full_tensor(), torch.full(shape, 3.0))
    strides = (1, *(shape[0] for _ in shape[1:])) if len(shape) == 2 else torch.empty(shape).stride()
    assert x.new_empty_strided(shape, strides).stride() == strides


# --- sharded parameters -------------------------------------------------------------------------------------------------
def test_sharded_parameters_are_gathered_twice_and_gradients_scattered_once() -> None:
    """Check a batch larger than the parameters: only parameters and their gradients are communicated."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0, norm_first=True)
    one = nn.Sequential(nn.Embedding(256, 64), nn.LayerNorm(64), layer, nn.Linear(64, 256))
    words = torch.randint(0, 256, (32, 64))

    def cut(name: str, module: nn.Module, mesh: dt.DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(dt.distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    model = dt.distribute_module(copy.deepcopy(one), MESH, cut)
    given = dt.distribute_tensor(words, MESH, [Shard(0)])
    with CommDebugMode() as comm:
        loss = F.cross_entropy(model(given).view(-1, 256), given.view(-1))
        loss.backward()
    expected = F.cross_entropy(one(words).view(-1, 256), words.view(-1))
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    assert_same_gradients(model, one, rtol=1e-3, atol=1e-5)
    parameters = sum(p.numel() * p.element_size() for p in one.parameters())
    assert sum(comm.get_comm_bytes().values()) <= 3 * (N - 1) * parameters // N + 16
    assert set(comm.get_comm_counts()) <= {"all_gather", "reduce_scatter", "all_reduce"}


SMALL = ["mlp", "encoder", "encoder, norm first", "experts", "weight norm", "embedding", "convolution in 3-d"]


@pytest.mark.parametrize("name", SMALL)
def test_modules_with_small_sharded_parameters_gather_only_parameters(name: str) -> None:
    """Check small parameters: weight and bias are gathered in one collective, which is not slower than moving activations."""
    torch.manual_seed(0)
    make, batch = MODULES[name]
    one, x = make(), batch()

    def cut(name: str, module: nn.Module, mesh: dt.DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(dt.distribute_tensor(parameter.detach(), mesh, [Shard(0)])))

    model = dt.distribute_module(copy.deepcopy(one), MESH, cut)
    torch.manual_seed(1)
    with CommDebugMode() as comm:
        model(dt.distribute_tensor(x, MESH, [Shard(0)])).square().mean().backward()
    torch.manual_seed(1)
    one(x).square().mean().backward()
    assert_same_gradients(model, one, rtol=1e-4, atol=1e-6)
    parameters = sum(p.numel() * p.element_size() for p in one.parameters())
    assert sum(comm.get_comm_bytes().values()) <= 3 * (N - 1) * parameters // N + 16
