"""``context_parallel``: attention of sequence shards equals attention of the full sequence, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_processes import run_gloo
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import Shard
from dtensor.debug import CommDebugMode
from dtensor.errors import LayoutError, MeshError, UnsupportedOperationError
from dtensor.experimental import context_parallel, context_parallel_unshard
from dtensor.parallel.tensor.cp_sequence_order import SequenceOrder
from dtensor.rules.aten.attention import blocks


def operands(length: int, heads: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, heads[0], length, 8), (2, heads[1], length, 8), (2, heads[1], length, 6)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run_plain(given: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    out = F.scaled_dot_product_attention(*leaves, **options)
    (out * output_weight(out)).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def output_weight(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)


def run_context_parallel(mesh: Any, given: list[Tensor], load_balance: bool = True, **options: Any) -> list[Tensor]:
    """Return the unsharded output and gradients of attention under ``context_parallel``."""
    buffers = [x.clone() for x in given]
    weight = output_weight(run_plain(given, **options)[0])
    with context_parallel(mesh, buffers=[*buffers, weight], buffer_seq_dims=[2] * 4, load_balance=load_balance):
        leaves = [x.clone().requires_grad_() for x in buffers]
        out = F.scaled_dot_product_attention(*leaves, **options)
        (out * weight).sum().backward()
    assert all(torch.equal(buffer, x) for buffer, x in zip(buffers, given, strict=True))
    parts = [out.detach(), *(x.grad for x in leaves)]
    return context_parallel_unshard(mesh, parts, [2] * 4, load_balance=load_balance)


def check(mesh: Any, length: int, heads: tuple[int, int] = (4, 4), **options: Any) -> None:
    given = operands(length, heads)
    plain = {name: value for name, value in options.items() if name != "load_balance"}
    for ours, theirs in zip(run_context_parallel(mesh, given, **options), run_plain(given, **plain), strict=True):
        for own in getattr(ours, "shards", [ours]):
            torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("load_balance", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("length", "ranks"), [(16, 4), (13, 3), (9, 4), (2, 3), (6, 1)])
def test_context_parallel_attention_of_any_length_equals_plain_torch(
    length: int, ranks: int, is_causal: bool, load_balance: bool
) -> None:
    check(dt.init_device_mesh("cpu", (ranks,)), length, is_causal=is_causal, load_balance=load_balance)


def test_context_parallel_with_grouped_heads_or_2d_mesh_equals_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    check(mesh["b"], 7, heads=(4, 2), is_causal=True, enable_gqa=True, scale=0.3)
    check(mesh, 11, is_causal=True)


def test_context_parallel_without_a_fused_kernel_equals_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the implementation that accelerators use."""
    monkeypatch.setattr(blocks, "has_fused_kernel", lambda query: False)
    for length, ranks in ((13, 3), (2, 3)):
        for is_causal in (True, False):
            check(dt.init_device_mesh("cpu", (ranks,)), length, is_causal=is_causal)
    test_context_parallel_with_grouped_heads_or_2d_mesh_equals_plain_torch()
    test_context_parallel_bfloat16_error_is_at_most_twice_that_of_torch()


def test_context_parallel_with_3d_and_5d_operands_equals_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    for shape in ((3, 8, 4), (2, 3, 2, 8, 4)):
        x = torch.randn(shape)
        whole = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[-2]):
            part = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        torch.testing.assert_close(context_parallel_unshard(mesh, [part], [-2])[0], whole)


def test_context_parallel_bfloat16_error_is_at_most_twice_that_of_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    given = operands(64, dtype=torch.bfloat16)
    exact = run_plain([x.double() for x in given], is_causal=True)
    for ours, plain, truth in zip(
        run_context_parallel(mesh, given, is_causal=True), run_plain(given, is_causal=True), exact, strict=True
    ):
        assert ours.dtype is torch.bfloat16
        assert (ours.double() - truth).abs().max() <= 2 * (plain.double() - truth).abs().max()


def test_load_balanced_sequence_order_gives_equal_work_to_all_ranks() -> None:
    order = SequenceOrder(24, 4, True)
    seen = [sum(sum(j <= i for j in range(24)) for piece in order.position_ranges(rank) for i in piece) for rank in range(4)]
    assert order.shard_sizes == (6,) * 4
    assert len(set(seen)) == 1  # pairs of query and key under a causal mask


def test_ring_attention_issues_n_minus_1_exchanges_forward() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    q, k, v = (x.requires_grad_() for x in operands(16))
    with context_parallel(mesh, buffers=(own := [x.detach().clone() for x in (q, k, v)]), buffer_seq_dims=[2] * 3):
        leaves = [x.clone().requires_grad_() for x in own]
        with CommDebugMode() as forward:
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        with CommDebugMode() as backward:
            out.sum().backward()
    assert dict(forward.get_comm_counts()) == {"all_to_all": 3}
    assert dict(backward.get_comm_counts()) == {"all_to_all": 6}


class Decoder(nn.Module):
    """One decoder layer with a position table, so that a wrong order of positions changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(13, 8), nn.Linear(8, 24), nn.Linear(8, 13)
        self.register_buffer("positions", torch.randn(1, 10, 8, generator=torch.Generator().manual_seed(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def train_step(mesh: Any) -> tuple[float, list[Tensor]]:
    """Return the loss and gradients of one step, fully sharded over the ranks that share the sequence, or on one device."""
    torch.manual_seed(0)
    model = Decoder()
    tokens, labels = torch.randint(13, (2, 3, 10), generator=torch.Generator().manual_seed(1))
    if mesh is None:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.item(), [p.grad for p in model.parameters()]
    model = dt.fsdp.fully_shard(model, mesh=mesh)
    with context_parallel(mesh, buffers=[tokens, labels, model.positions], buffer_seq_dims=[1, 1, 1]):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
    value = dt.DTensor.from_local(loss.detach(), mesh, [dt.Partial("avg")]).item()
    assert model.positions.to_local().shape == (1, 10, 8)
    return value, [p.grad.full_tensor() for p in model.parameters()]


def test_context_parallel_model_trains_like_plain_model() -> None:
    loss, grads = train_step(dt.init_device_mesh("cpu", (2,)))
    expected, theirs = train_step(None)
    assert abs(loss - expected) < 1e-6
    for own, other in zip(grads, theirs, strict=True):
        torch.testing.assert_close(own, other)


def _check_on_processes() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    check(mesh, 9, is_causal=True)
    train_step(dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])  # two groups in parallel
    x = torch.randn(1, 2, 8, 4, requires_grad=True)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        out = F.scaled_dot_product_attention(x, x, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # autograd saved the buffer, which has been restored


@pytest.mark.gloo
def test_context_parallel_equals_plain_torch_on_process_groups() -> None:
    run_gloo(_check_on_processes, 4)


def test_context_parallel_takes_head_shards_and_rejects_sequence_shards() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    given = operands(8)
    expected = F.scaled_dot_product_attention(*given, is_causal=True)
    with context_parallel(mesh["cp"], buffers=given, buffer_seq_dims=[2] * 3):
        halves = [dt.map_ranks(lambda at, x: x.chunk(2, 1)[at[0]], x, mesh=mesh["tp"]) for x in given]
        cut = [dt.DTensor.from_local(x, mesh["tp"], [Shard(1)]) for x in halves]
        out = F.scaled_dot_product_attention(*cut, is_causal=True)
        assert out.placements == (Shard(1),)
        local = out.full_tensor()
        with pytest.raises(LayoutError, match="batch or heads"):
            F.scaled_dot_product_attention(*(x.redistribute(placements=[Shard(2)]) for x in cut))
    whole = context_parallel_unshard(mesh["cp"], [local], [2])[0]
    for own in getattr(whole, "shards", [whole]):
        torch.testing.assert_close(own, expected)


def test_invalid_context_parallel_calls_raise_with_remedy() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = torch.randn(1, 2, 8, 4)
    with pytest.raises(LayoutError, match="buffers"), context_parallel(mesh):
        pass
    with (
        pytest.raises(LayoutError, match="must be equal"),
        context_parallel(mesh, buffers=[x, x.clone()], buffer_seq_dims=[2, 1]),
    ):
        pass
    with pytest.raises(LayoutError, match="twice"), context_parallel(mesh, buffers=[x, x], buffer_seq_dims=[2, 2]):
        pass
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2]):
        with pytest.raises(UnsupportedOperationError, match="not attn_mask"):
            F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(8, 8))
        with pytest.raises(LayoutError, match="has 4 of 8 positions"):
            F.scaled_dot_product_attention(*[torch.randn(1, 2, 8, 4)] * 3)
        with pytest.raises(UnsupportedOperationError, match="scaled_dot_product_attention"):
            nn.MultiheadAttention(4, 2)(*[x[:, 0]] * 3)
        with pytest.raises(MeshError, match="other dims"):
            F.scaled_dot_product_attention(*[dt.distribute_tensor(torch.randn(1, 2, 8, 4), mesh, [Shard(2)])] * 3)
    assert x.shape == (1, 2, 8, 4)


def test_buffers_in_no_restore_buffers_stay_sharded_after_context_parallel() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, y = torch.arange(8), torch.arange(8)
    with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[0, 0], no_restore_buffers={y}):
        pass
    assert x.tolist() == list(range(8))
    assert [own.tolist() for own in y.shards] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_context_parallel_takes_head_shards_on_an_equal_second_mesh() -> None:
    given = operands(8)
    expected = run_plain(given, is_causal=True)[0]
    meshes = [dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")) for _ in range(2)]
    buffers = [x.clone() for x in given]
    with context_parallel(meshes[0]["cp"], buffers=buffers, buffer_seq_dims=[2] * 3):
        heads = [dt.distribute_tensor(x, meshes[1]["tp"], [Shard(1)]) for x in buffers]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
    (whole,) = context_parallel_unshard(meshes[0]["cp"], [out.full_tensor()], [2])
    for own in whole.shards:
        torch.testing.assert_close(own, expected)


def checkpointed_gradients(mesh: Any, reentrant: bool, by: str, own_of: Any = None) -> list[Tensor]:
    """Return the gradients of input and weight of a block with activation checkpointing."""
    length, width, heads = 10, 8, 2
    generator = torch.Generator().manual_seed(4)
    x, target = (torch.randn(3, length, width, generator=generator, dtype=torch.float64) for _ in range(2))
    made = torch.randn(3 * width, width, generator=generator, dtype=torch.float64)
    weight = (own_of(made) if mesh is not None else made).requires_grad_()

    def block(x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in F.linear(x, weight).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).tanh()

    def grads(x: Tensor, target: Tensor) -> list[Tensor]:
        own = x.clone().requires_grad_()
        loss = (checkpoint(block, own, use_reentrant=reentrant) * target).sum()
        if by == "grad":
            return list(torch.autograd.grad(loss, [own, weight]))
        loss.backward() if by == "method" else torch.autograd.backward([loss])
        return [own.grad, weight.grad]

    if mesh is None:
        return grads(x, target)
    with context_parallel(mesh, buffers=[x, target], buffer_seq_dims=[1, 1]):
        ours, of_weight = grads(x, target)
        assert len(_get_current_function_mode_stack()) == 1
    (ours,) = context_parallel_unshard(mesh, [ours], [1])
    return [ours, of_weight]


def check_checkpointed(mesh: Any, own_of: Any, summed: Any) -> None:
    for reentrant, by in ((False, "method"), (False, "grad"), (False, "function"), (True, "method"), (True, "function")):
        ours, of_weight = checkpointed_gradients(mesh, reentrant, by, own_of)
        x, weight = checkpointed_gradients(None, reentrant, by)
        for own in getattr(ours, "shards", [ours]):
            torch.testing.assert_close(own, x)
        torch.testing.assert_close(summed(of_weight), weight)


def test_checkpointed_context_parallel_gradients_equal_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    check_checkpointed(mesh, lambda x: dt.per_rank([x.clone(), x.clone()]), lambda grad: sum(grad.shards))


def _check_checkpointed_on_processes() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    check_checkpointed(mesh, lambda x: x, lambda grad: dt.DTensor.from_local(grad, mesh, [dt.Partial()]).full_tensor())


@pytest.mark.gloo
def test_checkpointed_context_parallel_equals_plain_torch_on_process_groups() -> None:
    run_gloo(_check_checkpointed_on_processes, 2)
