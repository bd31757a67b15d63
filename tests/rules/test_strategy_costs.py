"""Costs of strategies: which valid strategy the cost model chooses, and how many bytes it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard

MESH = dt.init_device_mesh("cpu", (4,))


def shard(x: torch.Tensor) -> dt.DTensor:
    return dt.distribute_tensor(x, MESH, [Shard(0)])


def replicate(x: torch.Tensor) -> dt.DTensor:
    return dt.distribute_tensor(x, MESH, [Replicate()])


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def run_and_count_bytes(fn: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    with dt.debug.CommDebugMode() as comm:
        made = fn(*args)
    return made, sum(event.bytes for event in comm.events)


def test_embedding_gathers_a_small_sharded_table() -> None:
    table, ids = numbers(16, 64), torch.arange(4800).remainder(16).view(8, 600)
    made, nbytes = run_and_count_bytes(F.embedding, replicate(ids), shard(table))
    assert made.placements == (Replicate(),)
    assert nbytes == 3 * table.nbytes // 4
    torch.testing.assert_close(made.full_tensor(), F.embedding(ids, table))


def test_embedding_of_large_sharded_table_gives_a_partial_result() -> None:
    table, ids = numbers(4800, 64), torch.arange(4800).view(8, 600)
    made, nbytes = run_and_count_bytes(F.embedding, replicate(ids), shard(table))
    assert made.placements == (Partial(),)
    assert nbytes == 0


def test_grouped_mm_gathers_tokens_instead_of_experts() -> None:
    x, weight, ends = numbers(256, 64), numbers(4, 64, 1024), torch.tensor([50, 100, 200, 256], dtype=torch.int32)
    made, nbytes = run_and_count_bytes(lambda a, b, offs: F.grouped_mm(a, b, offs=offs), shard(x), shard(weight), replicate(ends))
    assert made.placements == (Partial(),)  # each row is its expert's
    assert nbytes == 3 * x.nbytes // 4
    torch.testing.assert_close(made.full_tensor(), F.grouped_mm(x, weight, offs=ends), atol=1e-4, rtol=1e-4)


def test_batch_norm_keeps_the_batch_sharding_with_sharded_scales() -> None:
    """Check that a small sharded operand does not force a redistribution of the batch."""
    x, scales = numbers(8, 16, 28, 28), numbers(16)
    norm = torch.nn.BatchNorm2d(16)
    expected = F.batch_norm(x, None, None, scales, scales, training=True)
    whole_statistics = [replicate(t) for t in (norm.running_mean, norm.running_var)]
    made, nbytes = run_and_count_bytes(
        lambda *args: F.batch_norm(args[0], *whole_statistics, args[1], args[1], training=True), shard(x), shard(scales)
    )
    assert made.placements == (Shard(0),)
    assert nbytes < 1000
    torch.testing.assert_close(made.full_tensor(), expected, atol=1e-4, rtol=1e-4)


def test_partial_operand_is_reduced_once_for_several_uses() -> None:
    """Check a hand-written norm: the mean of a partial tensor is partial, and the tensor itself is used twice."""
    a, b = numbers(512, 64), numbers(64, 512)
    x = dt.distribute_tensor(a, MESH, [Shard(1)]) @ shard(b)

    def normed(x: Any) -> Any:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5)

    made, nbytes = run_and_count_bytes(normed, x)
    assert nbytes < 1.6 * 512 * 512 * 4  # once, not twice
    torch.testing.assert_close(made.full_tensor(), normed(a @ b), atol=1e-4, rtol=1e-4)


def test_training_step_of_a_norm_with_std_reduces_its_operand_once() -> None:
    """Check the discount for reductions that an earlier operator deferred: without it the step has one more collective."""
    a = dt.distribute_tensor(numbers(8, 64), MESH, [Shard(1)]).requires_grad_()
    b = shard(numbers(64, 64)).requires_grad_()
    with dt.debug.CommDebugMode() as comm:
        x = a @ b
        y = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
        y.redistribute(placements=[Replicate()]).square().sum().full_tensor().backward()
    assert comm.get_total_counts() == 2


def test_mlp_of_sharded_batch_and_weights_gathers_the_weights() -> None:
    """Check two sharded linear layers with as many tokens as columns: the weights are gathered, not the activations."""
    x, up, down = numbers(512, 128), numbers(512, 128), numbers(128, 512)
    biases = numbers(512), numbers(128)
    given = [shard(t).requires_grad_() for t in (x, up, biases[0], down, biases[1])]

    def layers(x: Any, up: Any, first: Any, down: Any, second: Any) -> Any:
        return F.linear(F.gelu(F.linear(x, up, first)), down, second)

    made, nbytes = run_and_count_bytes(layers, *given)
    assert made.placements == (Shard(0),)
    assert nbytes < 1.6 * 3 / 4 * (up.nbytes + x.nbytes + down.nbytes)  # 2.5 where the larger activations are gathered
    torch.testing.assert_close(made.full_tensor(), layers(x, up, biases[0], down, biases[1]), atol=1e-3, rtol=1e-4)


def test_operand_on_few_ranks_is_sharded_evenly_before_a_larger_result() -> None:
    """Check the keys of a fused projection, which only two ranks have: a larger result is sharded over all ranks."""
    x = numbers(2, 8, 3 * 64)
    keys = dt.distribute_tensor(x, MESH, [Shard(2)]).chunk(3, -1)[1]

    def widths(y: Any) -> list[int]:
        return [piece.shape[-1] for piece in y.to_local().shards]

    def outer(a: Any) -> Any:
        return a.unsqueeze(1) * a.unsqueeze(2)

    assert widths(keys) == [0, 32, 32, 0]
    made, nbytes = run_and_count_bytes(outer, keys)
    assert widths(made) == [16] * 4
    assert nbytes <= keys.nbytes // 2
    torch.testing.assert_close(made.full_tensor(), outer(x.chunk(3, -1)[1]))

    def spread(a: Any, left_out: Any) -> Any:  # the size of an expanded tensor is that of its memory
        return a.unsqueeze(1).expand(2, 8, 8, 64).masked_fill(left_out, 0)

    left_out = numbers(8, 8, 1) > 0
    made, nbytes = run_and_count_bytes(spread, keys, replicate(left_out))
    assert widths(made) == [16] * 4
    assert nbytes <= keys.nbytes // 2
    torch.testing.assert_close(made.full_tensor(), spread(x.chunk(3, -1)[1], left_out))


def test_index_select_with_sharded_indices_within_shards_sends_only_indices() -> None:
    """Check reordering of beams within each sequence of a batch: only indices are gathered, not the cache."""
    cache, beams = numbers(24, 8, 64, 64), torch.arange(24).view(8, 3).flip(1).reshape(-1)
    made, nbytes = run_and_count_bytes(lambda x, i: x.index_select(0, i), shard(cache), shard(beams))
    assert made.placements == (Shard(0),)
    assert nbytes == 3 * beams.nbytes // 4
    assert torch.equal(made.full_tensor(), cache.index_select(0, beams))


def test_index_with_sharded_indices_sends_only_requested_rows() -> None:
    x, places = numbers(3, 22, 4000), torch.tensor([-1, 0, 21, 21, 5, 7, -22, 12, 3, 3, 3])
    made, nbytes = run_and_count_bytes(lambda x, i: x[:, i], dt.distribute_tensor(x, MESH, [Shard(1)]), shard(places))
    assert made.placements == (Shard(1),)
    row = 3 * 4000 * 4  # shards of 6 and 4 rows; one rank asks three times for a row of the first
    assert row <= nbytes - 2 * 3 * 8 <= 3 * row + 64
    assert torch.equal(made.full_tensor(), x[:, places])
    with pytest.raises(IndexError, match="out of range"):
        dt.distribute_tensor(x, MESH, [Shard(1)])[:, shard(places + 5)]


def test_convolution_with_sharded_channels_moves_to_batch_sharding() -> None:
    """Check a convolution with one group, whose input and weight are sharded along channels."""
    x, weight, bias = numbers(8, 32, 40, 40), numbers(32, 32, 3, 3), numbers(32)
    images = dt.distribute_tensor(x, MESH, [Shard(1)])
    made, nbytes = run_and_count_bytes(F.conv2d, images, shard(weight), shard(bias))
    assert made.placements == (Shard(0),)
    assert nbytes == 3 * (x.nbytes // 4 + weight.nbytes + bias.nbytes) // 4
    torch.testing.assert_close(made.full_tensor(), F.conv2d(x, weight, bias), atol=1e-4, rtol=1e-4)


def pieces_of(parts: int, x: torch.Tensor) -> tuple[dt.DTensor, ...]:
    """Return the parts of a fused projection, each on few ranks."""
    return dt.distribute_tensor(x, MESH, [Shard(-1)]).chunk(parts, -1)


@pytest.mark.parametrize("part", range(6))
def test_product_with_operand_on_few_ranks_keeps_the_batch_sharding(part: int) -> None:
    """Check a product of a sharded batch and a scale that one or two ranks have."""
    x, fused = numbers(8, 32, 64), numbers(8, 32, 6 * 64)
    scales = pieces_of(6, fused)[part]
    made, nbytes = run_and_count_bytes(lambda a, b: a * (1 + b), shard(x), scales)
    assert made.placements == (Shard(0),)
    assert nbytes <= 3 * x.nbytes // 4
    torch.testing.assert_close(made.full_tensor(), x * (1 + fused.chunk(6, -1)[part]))


def test_parts_of_unflattened_projection_are_redistributed_to_the_batch_sharding() -> None:
    x, fused = numbers(4, 128, 24), numbers(4, 128, 6 * 24)

    def modulated(x: Any, fused: Any) -> Any:
        parts = [piece.squeeze(2) for piece in fused.unflatten(2, (6, 24)).chunk(6, dim=2)]
        return x * (1 + parts[4]) + parts[3]

    made = modulated(shard(x), dt.distribute_tensor(fused, MESH, [Shard(2)]))
    assert made.placements == (Shard(0),)
    torch.testing.assert_close(made.full_tensor(), modulated(x, fused))


def test_depthwise_convolution_of_empty_shards_shards_its_channels_evenly() -> None:
    """Check a part of a fused projection before a depthwise convolution: a shard can have no group."""
    a, weight = numbers(8, 64, 64), numbers(96, 64)
    part = F.linear(replicate(a), shard(weight))[..., 32:].transpose(1, 2)
    assert 0 in part.layout.splits[1].sizes
    kernels = numbers(64, 1, 4)
    made, nbytes = run_and_count_bytes(lambda x, w: F.conv1d(x, w, groups=64), part, replicate(kernels))
    assert made.placements == (Shard(1),)
    assert nbytes == part.nbytes // 4
    torch.testing.assert_close(
        made.full_tensor(), F.conv1d(F.linear(a, weight)[..., 32:].transpose(1, 2), kernels, groups=64), atol=1e-4, rtol=1e-4
    )


def test_mm_of_small_contracted_dim_gathers_operands_instead_of_partial_result() -> None:
    """Check a product with a small contracted dim: its addends would be larger than the operands."""
    a, b = numbers(1024, 8), numbers(8, 1024)
    x, y = dt.distribute_tensor(a, MESH, [Shard(1)]), shard(b)
    made, nbytes = run_and_count_bytes(torch.mm, x, y)
    assert not any(spot.is_partial() for spot in made.placements)
    assert nbytes <= 3 * (a.nbytes + b.nbytes) // 4
    torch.testing.assert_close(made.full_tensor(), a @ b, atol=1e-4, rtol=1e-4)


def test_writes_to_slices_of_a_sharded_dim_do_not_communicate() -> None:
    a = numbers(8, 6, 5)
    x, target = shard(a), shard(a.clone())

    def step() -> None:
        target[3, :4].copy_(x[3, :4])
        target[6] += x[6].square()

    _, nbytes = run_and_count_bytes(step)
    assert nbytes == 0
    assert x[3].placements == (Shard(0, sizes=(0, 6, 0, 0)),)
    expected = a.clone()
    expected[6] += a[6].square()
    torch.testing.assert_close(target.full_tensor(), expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_loop_over_slices_of_a_sharded_dim_does_not_communicate(dim: int) -> None:
    a = numbers(8, 6, 5)

    def looped(x: Any) -> Any:
        return torch.stack([x.select(dim, k).square() * k for k in range(x.shape[dim])], dim)

    x, plain = dt.distribute_tensor(a, MESH, [Shard(dim)]).requires_grad_(), a.clone().requires_grad_()
    made, nbytes = run_and_count_bytes(looped, x)
    assert (made.placements, nbytes) == ((Shard(dim),), 0)
    _, nbytes = run_and_count_bytes(lambda: made.backward(torch.ones_like(made)))
    assert nbytes == 0
    looped(plain).backward(torch.ones_like(plain))
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
