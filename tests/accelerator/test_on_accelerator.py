"""Programs on an accelerator, with all ranks on one device, or on the CPU if there is none.

    python -m pytest -m slow tests/accelerator

For single rules: ``python -m dtensor verify --device cuda``, ``python benchmarks/op_coverage.py --device cuda``.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.capture import capture
from dtensor.checkpoint import load, save
from dtensor.experimental import context_parallel, context_parallel_unshard
from dtensor.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
    replicate,
)

pytestmark = pytest.mark.slow

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
MESH_1D = dt.init_device_mesh(DEVICE, (4,), mesh_dim_names=("x",))
MESH_2D = dt.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
ROWS = ([S0], [S1], [R])
on_cuda = pytest.mark.skipif(not CUDA, reason="of CUDA")


def put(x: Tensor, *places: Any, mesh: Any = MESH_1D) -> Any:
    return dt.distribute_tensor(x, mesh, list(places))


def assert_close(ours: Any, plain: Tensor, tolerance: float | None = None) -> None:
    whole = ours.full_tensor() if isinstance(ours, dt.DTensor) else ours
    assert whole.device.type == DEVICE
    torch.testing.assert_close(whole, plain, rtol=tolerance, atol=tolerance)


# --- attention backends -------------------------------------------------------------------------------------------------
KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"masked": True},
    "grouped": {"is_causal": True, "enable_gqa": True},
}


def takes(backend: Any, kind: str) -> bool:
    return kind != {SDPBackend.FLASH_ATTENTION: "masked", SDPBackend.EFFICIENT_ATTENTION: "grouped"}.get(backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("places", [[S0], [S1], [S2], [R]], ids=str)
@pytest.mark.parametrize(
    "backend",
    [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    + [pytest.param(one, marks=on_cuda) for one in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)],
    ids=str,
)
def test_attention_backends_equal_plain_torch(backend: Any, places: list[Any], kind: str) -> None:
    options = dict(KINDS[kind])
    masked = options.pop("masked", False)
    if not takes(backend, kind):
        pytest.skip("torch does not take it")
    generator = torch.Generator(DEVICE).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    heads = 4 if kind == "grouped" else 8
    plain = [drawn(4, n, 64, 64).requires_grad_() for n in (8, heads, heads)]
    mask = drawn(4, 1, 64, 64) if masked else None
    own = [put(x.detach(), *places).requires_grad_() for x in plain]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*plain, attn_mask=mask, **options)
        weight = drawn(*out.shape)
        out.backward(weight)
        lying = None if mask is None else put(mask, R if places == [S1] else places[0])
        got = F.scaled_dot_product_attention(*own, attn_mask=lying, **options)
        got.backward(put(weight, *places))
    assert_close(got, out, 2e-2)
    for x, y in zip(own, plain, strict=True):
        assert y.grad is not None
        assert_close(x.grad, y.grad, 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ring_attention_equals_plain_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    given = [torch.randn(2, 4, 13, 8, generator=generator, device=DEVICE).to(dtype) for _ in range(3)]
    want = F.scaled_dot_product_attention(*given, is_causal=True)
    parts = [x.clone() for x in given]
    with context_parallel(MESH_1D, buffers=parts, buffer_seq_dims=[2] * 3):
        out = F.scaled_dot_product_attention(*parts, is_causal=True)
    (whole,) = context_parallel_unshard(MESH_1D, [out], [2])
    for own in getattr(whole, "shards", [whole]):
        assert_close(own, want, 1e-5 if dtype is torch.float32 else 2e-2)


# --- random numbers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("places", ROWS, ids=str)
def test_random_operators_equal_plain_torch(places: list[Any]) -> None:
    x = torch.ones(8, 12, device=DEVICE)
    programs: list[Callable[[Any], Any]] = [
        lambda x: F.dropout(x, 0.5),
        torch.rand_like,
        lambda x: x.clone().uniform_(),
        lambda x: torch.bernoulli(x * 0.5),
    ]
    torch.manual_seed(3)
    want = [program(x) for program in programs]
    torch.manual_seed(3)
    for program, plain in zip(programs, want, strict=True):
        assert_close(program(put(x, *places)), plain)


@pytest.mark.parametrize("places", ROWS, ids=str)
def test_counter_mode_draws_do_not_depend_on_placements(places: list[Any]) -> None:
    with dt.random_mode("counter"):
        torch.manual_seed(3)
        cut = dt.rand(8, 12, device_mesh=MESH_1D, placements=places)
        torch.manual_seed(3)
        assert_close(cut, dt.rand(8, 12, device_mesh=MESH_1D, placements=[R]).full_tensor())


# --- training -------------------------------------------------------------------------------------------------------------------
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(2))
        self.out = nn.Linear(32, 50)

    def forward(self, ids: Any) -> Any:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def net() -> Net:
    torch.default_generator.manual_seed(0)
    with torch.device("cpu"):
        return Net().to(DEVICE)


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(k)).to(DEVICE) for k in range(count)]


def distribute_batch(mesh: Any = MESH_1D) -> Callable[[Tensor], Any]:
    return lambda ids: put(ids, *[S0] * mesh.ndim, mesh=mesh)


Optimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def adamw(parameters: Iterable[Any], **how: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, **how)


def trained(
    model: nn.Module,
    given: Callable[[Tensor], Any],
    made: Optimizer = adamw,
    amp: torch.dtype | None = None,
    scaled: bool = False,
) -> list[float]:
    optimizer, losses = made(model.parameters()), []
    scaler = torch.amp.GradScaler(DEVICE, init_scale=128.0, enabled=scaled)
    for ids in map(given, batches()):
        with torch.autocast(DEVICE, amp, enabled=amp is not None):
            loss = F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_losses_close(losses: list[float], plain: list[float], tolerance: float = 2e-3) -> None:
    assert losses == pytest.approx(plain, rel=tolerance)


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_model_on_sharded_batch_trains_like_plain_model(how: dict[str, Any]) -> None:
    made: Optimizer = lambda parameters: adamw(parameters, **how)  # noqa: E731
    assert_losses_close(
        trained(dt.distribute_module(net(), MESH_1D), distribute_batch(), made), trained(net(), lambda x: x, made)
    )


@pytest.mark.parametrize("amp", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_and_grad_scaler_train_like_plain_model(amp: torch.dtype) -> None:
    assert_losses_close(
        trained(dt.distribute_module(net(), MESH_1D), distribute_batch(), adamw, amp, True),
        trained(net(), lambda x: x, adamw, amp, True),
        3e-2,
    )


@pytest.mark.parametrize("mesh", [MESH_1D, MESH_2D], ids=str)
@pytest.mark.parametrize("kind", ["plain", "mixed", pytest.param("offloaded", marks=on_cuda)])
def test_fully_sharded_model_trains_like_plain_model(kind: str, mesh: Any) -> None:
    options: dict[str, Any] = {
        "plain": {},
        "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=True)},
    }[kind]
    model = net()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    assert_losses_close(trained(model, distribute_batch(mesh)), trained(net(), lambda x: x), 5e-2 if kind == "mixed" else 2e-3)


def test_replicated_model_trains_like_plain_model() -> None:
    assert_losses_close(trained(replicate(net(), mesh=MESH_1D), distribute_batch()), trained(net(), lambda x: x))


def test_tensor_parallel_model_trains_like_plain_model() -> None:
    model = net()
    for layer in model.layers:
        parallelize_module(layer, MESH_1D, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
    made: Optimizer = lambda parameters: adamw(parameters, foreach=False)  # noqa: E731
    with dt.implicit_replication():
        assert_losses_close(trained(model, lambda ids: ids, made), trained(net(), lambda x: x, made))


def test_captured_step_trains_like_plain_model() -> None:
    model = dt.distribute_module(net(), MESH_1D)
    optimizer = adamw(model.parameters())

    @capture
    def step(ids: Any) -> Any:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(distribute_batch()(ids)).item() for ids in batches()]
    assert_losses_close(losses, trained(net(), lambda x: x))
    assert step.cache_info().recorded


def test_activation_checkpointing_with_dropout_equals_plain_torch() -> None:
    torch.default_generator.manual_seed(0)
    linear, x = nn.Linear(16, 16).to(DEVICE), torch.randn(8, 16, device=DEVICE, requires_grad=True)

    def program(linear: nn.Module, x: Any) -> Any:
        return checkpoint(lambda y: F.dropout(linear(y).relu(), 0.5), x, use_reentrant=False).square().sum()

    own, y = dt.distribute_module(copy.deepcopy(linear), MESH_1D), put(x.detach(), S0).requires_grad_()
    torch.manual_seed(1)
    program(linear, x).backward()
    torch.manual_seed(1)
    program(own, y).backward()
    assert x.grad is not None
    assert_close(y.grad, x.grad)


@pytest.mark.parametrize("in_background", [False, True])
def test_checkpoint_saves_and_loads_in_another_layout(in_background: bool) -> None:
    state = {"w": put(torch.randn(10, 6, device=DEVICE), S0), "b": torch.randn(3, device=DEVICE)}
    other = {"w": put(torch.zeros(10, 6, device=DEVICE), S1), "b": torch.zeros(3, device=DEVICE)}
    with tempfile.TemporaryDirectory() as folder:
        pending = save(state, Path(folder) / "step", async_op=in_background)
        if pending is not None:
            pending.wait()
        load(other, Path(folder) / "step")
    assert_close(other["w"], state["w"].full_tensor())
    assert_close(other["b"], state["b"])


def test_convolutional_model_gradients_equal_plain_torch() -> None:
    torch.default_generator.manual_seed(0)
    parts = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.MaxPool2d(2), nn.Flatten()]
    model, x = nn.Sequential(*parts, nn.Linear(128, 4)).to(DEVICE).double(), torch.randn(8, 3, 8, 8, device=DEVICE).double()
    own = dt.distribute_module(copy.deepcopy(model), MESH_1D)
    model(x).square().sum().backward()
    own(put(x, S0)).square().sum().backward()
    for p, q in zip(own.parameters(), model.parameters(), strict=True):
        assert q.grad is not None
        assert_close(p.grad, q.grad)


@pytest.mark.parametrize("name", ["nearest-exact", "bilinear", "bicubic", "area"])
def test_interpolate_with_an_empty_shard_equals_plain_torch(name: str) -> None:
    x = torch.randn(5, 3, 6, 6, device=DEVICE, dtype=torch.float64)
    own, plain = put(x, S0).requires_grad_(), x.clone().requires_grad_()
    options = {} if name in ("nearest-exact", "area") else {"antialias": True}
    for given in (own, plain):
        F.interpolate(given, size=(4, 9), mode=name, **options).square().sum().backward()
    assert plain.grad is not None
    assert_close(own.grad, plain.grad)


def gradients_agree(function: Callable[..., Tensor], places: list[Any], *tensors: Tensor) -> None:
    """Compare results and gradients with plain torch, with the operands distributed by ``places``."""
    own = [put(x, place).requires_grad_(x.is_floating_point()) for x, place in zip(tensors, places, strict=True)]
    plain = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    assert_close(function(*own), function(*plain), 1e-5)
    for given in (own, plain):
        function(*given).square().sum().backward()
    for x, y in zip(own, plain, strict=True):
        if y.grad is not None:
            assert_close(x.grad, y.grad, 1e-4)


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_norms_and_margin_losses_with_empty_shards_equal_plain_torch(batch: int) -> None:
    x, statistics = (
        torch.randn(batch, 6, 4, 4, device=DEVICE),
        (torch.randn(6, device=DEVICE), torch.rand(6, device=DEVICE) + 0.5),
    )
    with dt.implicit_replication():
        gradients_agree(lambda x: F.batch_norm(x, *statistics), [S0], x)
    gradients_agree(lambda x: F.batch_norm(x, None, None, training=True), [S0], x)
    gradients_agree(lambda x: F.group_norm(x, 2), [S0], x)
    scores, labels = x[..., 0, 0].contiguous(), torch.randint(6, (batch, 6), device=DEVICE)
    for reduction in ("sum", "mean", "none"):
        gradients_agree(lambda x, t: F.multilabel_margin_loss(x, t, reduction=reduction), [S0, S0], scores, labels)  # noqa: B023
        gradients_agree(lambda x, t: F.multi_margin_loss(x, t[:, 0], reduction=reduction), [S0, S0], scores, labels)  # noqa: B023


@pytest.mark.parametrize("place", [S0, S1, R], ids=str)
def test_indexing_by_cpu_tensors_equals_plain_torch(place: Any) -> None:
    x, i, mask = torch.randn(9, 7, 5, device=DEVICE), torch.tensor([8, 0, -3, 5]), torch.rand(9, 7) > 0.5
    with dt.implicit_replication():
        for index in (i, (i, i % 7), mask, mask[:, 0], (slice(None), i % 7)):
            assert_close(put(x, place)[index], x[index])
            own, plain = put(x, place), x.clone()
            own[index], plain[index] = 2.0, 2.0
            assert_close(own, plain)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_on_sharded_batch_equal_plain_torch(cell: Any, bias: bool) -> None:
    plain, x = cell(5, 7, bias=bias).to(DEVICE), torch.randn(6, 5, device=DEVICE)
    own = dt.distribute_module(copy.deepcopy(plain), MESH_1D)
    made, expected = own(put(x, S0)), plain(x)
    made, expected = (made[0], expected[0]) if cell is nn.LSTMCell else (made, expected)
    assert made.placements == (S0,)
    assert_close(made, expected, 1e-5)
    for out in (made, expected):
        out.square().sum().backward()
    for p, q in zip(own.parameters(), plain.parameters(), strict=True):
        assert q.grad is not None
        assert_close(p.grad, q.grad, 1e-4)


@pytest.mark.parametrize("places", [[S0, S0], [S0, R], [S1, R], [R, S0]], ids=str)
def test_grid_sample_equals_plain_torch(places: list[Any]) -> None:
    x, grid = torch.randn(4, 6, 8, 8, device=DEVICE), torch.rand(4, 5, 5, 2, device=DEVICE) * 2 - 1
    gradients_agree(lambda x, grid: F.grid_sample(x, grid, align_corners=True), places, x, grid)


@pytest.mark.parametrize("place", [S1, S2, R], ids=str)
def test_ctc_loss_equals_plain_torch(place: Any) -> None:
    x, targets = torch.randn(12, 4, 6, device=DEVICE).log_softmax(2), torch.randint(1, 6, (4, 5), device=DEVICE)
    lengths = torch.full((4,), 12), torch.full((4,), 5)
    with dt.implicit_replication():
        gradients_agree(lambda x: F.ctc_loss(x, targets, *lengths), [place], x)


# --- CUDA only ----------------------------------------------------------------------------------------------------------
@on_cuda
def test_redistribution_on_a_side_stream_equals_plain_torch() -> None:
    x, stream = put(torch.randn(512, 512, device=DEVICE), S0), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = (x @ x).redistribute(placements=[R])
    torch.cuda.current_stream().wait_stream(stream)
    assert_close(y, x.full_tensor() @ x.full_tensor(), 1e-3)


@on_cuda
def test_dtensor_operators_replayed_by_a_cuda_graph_equal_plain_torch() -> None:
    x, w = put(torch.randn(64, 64, device=DEVICE), S0), put(torch.randn(64, 64, device=DEVICE), R)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            (x @ w).relu().sum()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = (x @ w).relu().sum()
    graph.replay()
    assert_close(out, (x.full_tensor() @ w.full_tensor()).relu().sum(), 1e-3)
