"""What a row's price counts: which of several right choices moves less for who comes after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard

MESH = dt.init_device_mesh("cpu", (4,))


def cut(x: torch.Tensor) -> dt.DTensor:
    return dt.distribute_tensor(x, MESH, [Shard(0)])


def whole(x: torch.Tensor) -> dt.DTensor:
    return dt.distribute_tensor(x, MESH, [Replicate()])


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def received(fn: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    with dt.debug.CommDebugMode() as comm:
        made = fn(*args)
    return made, sum(event.bytes for event in comm.events)


def test_a_cut_table_is_gathered_before_it_grows() -> None:
    table, ids = numbers(16, 64), torch.arange(4800).remainder(16).view(8, 600)
    made, nbytes = received(F.embedding, whole(ids), cut(table))
    assert made.placements == (Replicate(),)
    assert nbytes == 3 * table.nbytes // 4
    torch.testing.assert_close(made.full_tensor(), F.embedding(ids, table))


def test_a_table_as_large_as_what_is_read_of_it_leaves_terms() -> None:
    table, ids = numbers(4800, 64), torch.arange(4800).view(8, 600)
    made, nbytes = received(F.embedding, whole(ids), cut(table))
    assert made.placements == (Partial(),)
    assert nbytes == 0


def test_tokens_go_to_experts_rather_than_experts_to_tokens() -> None:
    x, weight, ends = numbers(256, 64), numbers(4, 64, 1024), torch.tensor([50, 100, 200, 256], dtype=torch.int32)
    made, nbytes = received(lambda a, b, offs: F.grouped_mm(a, b, offs=offs), cut(x), cut(weight), whole(ends))
    assert made.placements == (Partial(),)  # each row is its expert's
    assert nbytes == 3 * x.nbytes // 4
    torch.testing.assert_close(made.full_tensor(), F.grouped_mm(x, weight, offs=ends), atol=1e-4, rtol=1e-4)


def test_a_batch_stays_where_it_lies_though_what_scales_it_is_cut() -> None:
    """The cut of a few numbers is no reason to bring all the others there."""
    x, scales = numbers(8, 16, 28, 28), numbers(16)
    norm = torch.nn.BatchNorm2d(16)
    expected = F.batch_norm(x, None, None, scales, scales, training=True)
    whole_statistics = [whole(t) for t in (norm.running_mean, norm.running_var)]
    made, nbytes = received(
        lambda *args: F.batch_norm(args[0], *whole_statistics, args[1], args[1], training=True), cut(x), cut(scales)
    )
    assert made.placements == (Shard(0),)
    assert nbytes < 1000
    torch.testing.assert_close(made.full_tensor(), expected, atol=1e-4, rtol=1e-4)


def test_terms_that_were_passed_on_are_added_up_when_they_are_met_again() -> None:
    """A norm written out: the mean of terms is in terms, and what it is subtracted from is asked for twice."""
    a, b = numbers(512, 64), numbers(64, 512)
    x = dt.distribute_tensor(a, MESH, [Shard(1)]) @ cut(b)

    def normed(x: Any) -> Any:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + 1e-5)

    made, nbytes = received(normed, x)
    assert nbytes < 1.6 * 512 * 512 * 4  # once, not twice
    torch.testing.assert_close(made.full_tensor(), normed(a @ b), atol=1e-4, rtol=1e-4)


def test_of_two_operands_as_large_the_first_keeps_its_cut() -> None:
    """Two layers of a perceptron cut by rows, batch and matrices, as many tokens as the first has columns: matrices travel."""
    x, up, down = numbers(512, 128), numbers(512, 128), numbers(128, 512)
    biases = numbers(512), numbers(128)
    given = [cut(t).requires_grad_() for t in (x, up, biases[0], down, biases[1])]

    def layers(x: Any, up: Any, first: Any, down: Any, second: Any) -> Any:
        return F.linear(F.gelu(F.linear(x, up, first)), down, second)

    made, nbytes = received(layers, *given)
    assert made.placements == (Shard(0),)
    assert nbytes < 1.6 * 3 / 4 * (up.nbytes + x.nbytes + down.nbytes)  # 2.5 where the larger activations are gathered
    torch.testing.assert_close(made.full_tensor(), layers(x, up, biases[0], down, biases[1]), atol=1e-3, rtol=1e-4)


def test_what_few_ranks_have_is_dealt_out_before_it_grows() -> None:
    """The keys of a fused projection, which two ranks have, are not left to these in what is larger than they are."""
    x = numbers(2, 8, 3 * 64)
    keys = dt.distribute_tensor(x, MESH, [Shard(2)]).chunk(3, -1)[1]

    def widths(y: Any) -> list[int]:
        return [piece.shape[-1] for piece in y.to_local().shards]

    def outer(a: Any) -> Any:
        return a.unsqueeze(1) * a.unsqueeze(2)

    assert widths(keys) == [0, 32, 32, 0]
    made, nbytes = received(outer, keys)
    assert widths(made) == [16] * 4
    assert nbytes <= keys.nbytes // 2
    torch.testing.assert_close(made.full_tensor(), outer(x.chunk(3, -1)[1]))

    def spread(a: Any, left_out: Any) -> Any:  # an expanded tensor is no larger than memory has of it
        return a.unsqueeze(1).expand(2, 8, 8, 64).masked_fill(left_out, 0)

    left_out = numbers(8, 8, 1) > 0
    made, nbytes = received(spread, keys, whole(left_out))
    assert widths(made) == [16] * 4
    assert nbytes <= keys.nbytes // 2
    torch.testing.assert_close(made.full_tensor(), spread(x.chunk(3, -1)[1], left_out))


def test_rows_that_a_cut_vector_names_come_from_who_has_them() -> None:
    """Beams are put in another order within each sequence of a batch: nothing but positions travels, and no cache."""
    cache, beams = numbers(24, 8, 64, 64), torch.arange(24).view(8, 3).flip(1).reshape(-1)
    made, nbytes = received(lambda x, i: x.index_select(0, i), cut(cache), cut(beams))
    assert made.placements == (Shard(0),)
    assert nbytes == 3 * beams.nbytes // 4
    assert torch.equal(made.full_tensor(), cache.index_select(0, beams))


def test_rows_go_to_who_asks_for_them() -> None:
    x, places = numbers(3, 22, 4000), torch.tensor([-1, 0, 21, 21, 5, 7, -22, 12, 3, 3, 3])
    made, nbytes = received(lambda x, i: x[:, i], dt.distribute_tensor(x, MESH, [Shard(1)]), cut(places))
    assert made.placements == (Shard(1),)
    row = 3 * 4000 * 4  # blocks of 6 and 4 rows; the last but one asks for three times the row that the first has
    assert row <= nbytes - 2 * 3 * 8 <= 3 * row + 64
    assert torch.equal(made.full_tensor(), x[:, places])
    with pytest.raises(IndexError, match="out of range"):
        dt.distribute_tensor(x, MESH, [Shard(1)])[:, cut(places + 5)]


def test_terms_of_a_convolution_are_a_debt_though_its_one_group_could_be_cut() -> None:
    """Both its input and its weights are cut as groups would be, of which it has one."""
    x, weight, bias = numbers(8, 32, 40, 40), numbers(32, 32, 3, 3), numbers(32)
    images = dt.distribute_tensor(x, MESH, [Shard(1)])
    made, nbytes = received(F.conv2d, images, cut(weight), cut(bias))
    assert made.placements == (Shard(0),)
    assert nbytes == 3 * (x.nbytes // 4 + weight.nbytes + bias.nbytes) // 4
    torch.testing.assert_close(made.full_tensor(), F.conv2d(x, weight, bias), atol=1e-4, rtol=1e-4)


def pieces_of(parts: int, x: torch.Tensor) -> tuple[dt.DTensor, ...]:
    """Parts of a fused projection, each of which few ranks have."""
    return dt.distribute_tensor(x, MESH, [Shard(-1)]).chunk(parts, -1)


@pytest.mark.parametrize("part", range(6))
def test_of_two_as_large_the_one_that_lies_in_smaller_blocks_stays(part: int) -> None:
    """A modulation that one or two ranks have is no reason to bring a batch to these."""
    x, fused = numbers(8, 32, 64), numbers(8, 32, 6 * 64)
    scales = pieces_of(6, fused)[part]
    made, nbytes = received(lambda a, b: a * (1 + b), cut(x), scales)
    assert made.placements == (Shard(0),)
    assert nbytes <= 3 * x.nbytes // 4
    torch.testing.assert_close(made.full_tensor(), x * (1 + fused.chunk(6, -1)[part]))


def test_parts_of_an_unflattened_projection_are_brought_to_the_batch() -> None:
    x, fused = numbers(4, 128, 24), numbers(4, 128, 6 * 24)

    def modulated(x: Any, fused: Any) -> Any:
        parts = [piece.squeeze(2) for piece in fused.unflatten(2, (6, 24)).chunk(6, dim=2)]
        return x * (1 + parts[4]) + parts[3]

    made = modulated(cut(x), dt.distribute_tensor(fused, MESH, [Shard(2)]))
    assert made.placements == (Shard(0),)
    torch.testing.assert_close(made.full_tensor(), modulated(x, fused))


def test_groups_of_which_a_rank_has_none_are_dealt_out() -> None:
    """A part of a fused projection before a convolution by channels: a block may have no group."""
    a, weight = numbers(8, 64, 64), numbers(96, 64)
    part = F.linear(whole(a), cut(weight))[..., 32:].transpose(1, 2)
    assert 0 in part.layout.splits[1].sizes
    kernels = numbers(64, 1, 4)
    made, nbytes = received(lambda x, w: F.conv1d(x, w, groups=64), part, whole(kernels))
    assert made.placements == (Shard(1),)
    assert nbytes == part.nbytes // 4
    torch.testing.assert_close(
        made.full_tensor(), F.conv1d(F.linear(a, weight)[..., 32:].transpose(1, 2), kernels, groups=64), atol=1e-4, rtol=1e-4
    )


def test_what_is_cut_inside_a_product_is_gathered_before_it_grows() -> None:
    """Scores of a few channels, which ranks share: their terms would be larger than all that they are made of."""
    a, b = numbers(1024, 8), numbers(8, 1024)
    x, y = dt.distribute_tensor(a, MESH, [Shard(1)]), cut(b)
    made, nbytes = received(torch.mm, x, y)
    assert not any(spot.is_partial() for spot in made.placements)
    assert nbytes <= 3 * (a.nbytes + b.nbytes) // 4
    torch.testing.assert_close(made.full_tensor(), a @ b, atol=1e-4, rtol=1e-4)


def test_a_position_of_a_cut_dim_is_its_owners() -> None:
    a = numbers(8, 6, 5)
    x, target = cut(a), cut(a.clone())

    def step() -> None:
        target[3, :4].copy_(x[3, :4])
        target[6] += x[6].square()

    _, nbytes = received(step)
    assert nbytes == 0
    assert x[3].placements == (Shard(0, sizes=(0, 6, 0, 0)),)
    expected = a.clone()
    expected[6] += a[6].square()
    torch.testing.assert_close(target.full_tensor(), expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_loop_over_the_positions_of_a_cut_dim_moves_nothing(dim: int) -> None:
    a = numbers(8, 6, 5)

    def looped(x: Any) -> Any:
        return torch.stack([x.select(dim, k).square() * k for k in range(x.shape[dim])], dim)

    x, plain = dt.distribute_tensor(a, MESH, [Shard(dim)]).requires_grad_(), a.clone().requires_grad_()
    made, nbytes = received(looped, x)
    assert (made.placements, nbytes) == ((Shard(dim),), 0)
    _, nbytes = received(lambda: made.backward(torch.ones_like(made)))
    assert nbytes == 0
    looped(plain).backward(torch.ones_like(plain))
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
