"""Rules of attention: all shardings give the values and gradients of plain torch, and sharded batch or heads need no
communication."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.rules.aten.attention import blocks
from dtensor.testing import check

R, S0, S1, S2, SUM = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
MESHES = {shape: dt.init_device_mesh("cpu", shape) for shape in ((2,), (3,), (2, 2))}
sdpa = F.scaled_dot_product_attention


def x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(batch: int = 2, heads: int = 4, queries: int = 5, keys: int = 7, key_heads: int | None = None) -> list[torch.Tensor]:
    return [x(batch, heads, queries, 3), *(x(batch, key_heads or heads, keys, 3, seed=seed) for seed in (1, 2))]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, is_causal=True)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, enable_gqa=True)


def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, mask, scale=0.3)


# name, function, tensors, placements of queries, of keys and values, of the result, collectives of the forward pass
COSTS: list[tuple[str, Any, list[torch.Tensor], Any, Any, Any, int]] = [
    ("batch", sdpa, qkv(), S0, S0, S0, 0),
    ("heads", sdpa, qkv(), S1, S1, S1, 0),
    ("grouped heads", grouped, qkv(key_heads=2), S1, S1, S1, 0),
    ("one key head", grouped, qkv(key_heads=1), S1, R, S1, 0),
    ("queries", sdpa, qkv(), S2, R, S2, 0),
    ("causal heads", causal, qkv(), S1, S1, S1, 0),
    ("causal queries", causal, qkv(), S2, R, S2, 0),
    ("keys", sdpa, qkv(queries=2), R, S2, R, 2),
    ("causal keys", causal, qkv(queries=2), R, S2, R, 2),
]


@pytest.mark.parametrize(
    ("name", "fn", "tensors", "queries", "keys", "result", "collectives"), COSTS, ids=[case[0] for case in COSTS]
)
def test_attention_communicates_only_for_sharded_keys(
    name: str, fn: Any, tensors: Any, queries: Any, keys: Any, result: Any, collectives: int
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no sharding rule.*")
        outcome = check(fn, *tensors, mesh=MESHES[2,], placements=[[queries], [keys], [keys]])
    assert outcome.layouts[0].placements == (result,)
    assert len(outcome.events) == collectives


FUNCTIONS: list[tuple[str, Any, list[torch.Tensor]]] = [
    ("plain", sdpa, qkv()),
    ("causal", causal, qkv()),
    ("causal, more queries", causal, qkv(queries=7, keys=5)),
    ("grouped", grouped, qkv(key_heads=2)),
    ("one key head", grouped, qkv(key_heads=1)),
    ("float32", sdpa, [t.float() for t in qkv()]),
]
PLACED = ([S0], [S1], [S2], [Shard(-1)], [SUM])
PAIRS = ([S0, S1], [S1, S1], [S2, S1], [S0, S2], [S2, S2], [SUM, S2])


@pytest.mark.parametrize(("name", "fn", "tensors"), FUNCTIONS, ids=[case[0] for case in FUNCTIONS])
def test_attention_values_and_gradients_equal_plain_torch(name: str, fn: Any, tensors: Any) -> None:
    for placements in PLACED:
        for shape in ((2,), (3,)):
            check(fn, *tensors, mesh=MESHES[shape], placements=[placements] * 3)
    for placements in PAIRS:
        check(fn, *tensors, mesh=MESHES[2, 2], placements=[placements] * 3)
    check(fn, *tensors, mesh=MESHES[3,], placements=[[R], [Shard(-2)], [Shard(-2)]])
    check(fn, *tensors, mesh=MESHES[3,], placements=[[Shard(-2)], [Shard(-3)], [R]])


@pytest.mark.parametrize(
    "tensors",
    [[t[0] for t in qkv()], [x(2, 4, 5, 3), x(2, 4, 7, 3, seed=1), x(2, 4, 7, 6, seed=2)]],
    ids=["three dims", "value size"],
)
def test_attention_of_3d_operands_or_other_value_size_equals_plain_torch(tensors: Any) -> None:
    for placements in ([S0], [S1], [SUM]):
        check(sdpa, *tensors, mesh=MESHES[2,], placements=[placements] * 3)
    check(sdpa, *tensors, mesh=MESHES[2, 2], placements=[[S0, S1]] * 3)


@pytest.mark.parametrize(("name", "fn", "tensors"), FUNCTIONS, ids=[case[0] for case in FUNCTIONS])
def test_attention_without_a_fused_kernel_equals_plain_torch(
    name: str, fn: Any, tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the implementation that accelerators use, under all placements."""
    monkeypatch.setattr(blocks, "has_fused_kernel", lambda query: False)
    test_attention_values_and_gradients_equal_plain_torch(name, fn, tensors)


def test_reference_attention_keeps_nan_rows_and_gives_zero_for_masked_rows() -> None:
    q, k, v = qkv()
    q[0, 1, 2] = torch.nan
    hidden = torch.zeros(5, 7, dtype=torch.bool)
    hidden[1] = True
    mask = torch.zeros(5, 7, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    out, _ = blocks.attention_reference(q, k, v, attn_mask=mask)
    assert out[0, 1, 2].isnan().all()
    assert not out[:, :, 1].any()  # this query attends to no key
    torch.testing.assert_close(out[1], sdpa(q, k, v, mask).nan_to_num()[1])


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 5, 7), (1, 4, 1, 7), (2, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_attention_with_masks_of_every_broadcast_shape_equals_plain_torch(shape: tuple[int, ...], kind: str) -> None:
    hidden = x(*shape, seed=5) > 0.3
    mask = hidden.logical_not() if kind == "bool" else torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    fn = scaled if kind == "bool" else lambda q, k, v, m: scaled(q, k, v, m.detach())
    last = Shard(len(shape) - 1)
    for own in ([S0, S0, R], [S1, S1, R], [S2, R, R], [R, S2, last], [S0, S2, R]):
        check(fn, *qkv(), mask, mesh=MESHES[3,], placements=[[own[0]], [own[1]], [own[1]], [own[2]]])


def test_attention_with_fully_masked_queries_on_some_ranks_equals_plain_torch() -> None:
    mask = torch.ones(5, 7, dtype=torch.bool).tril()
    mask[1] = False
    check(scaled, *qkv(), mask, mesh=MESHES[3,], placements=[[R], [S2], [S2], [S1]])


def test_attention_with_mask_that_requires_grad_equals_plain_torch() -> None:
    check(scaled, *qkv(), x(5, 7), mesh=MESHES[2,], placements=[[S0], [S0], [S0], [R]])


def test_attention_dropout_equals_plain_torch() -> None:
    check(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), *qkv(), mesh=MESHES[2,], placements=[[S0]] * 3)


def test_fused_sdp_choice_of_dtensors_equals_plain_torch() -> None:
    q, k, v = (dt.distribute_tensor(t, MESHES[2,], [S0]) for t in qkv())
    assert torch._fused_sdp_choice(q, k, v) == torch._fused_sdp_choice(*qkv())
    assert torch._fused_sdp_choice(q, k, v, dropout_p=0.5) == torch._fused_sdp_choice(*qkv(), dropout_p=0.5)


def test_fused_sdp_choice_does_not_allocate_the_global_shape() -> None:
    mesh, shape = MESHES[2,], (1 << 12, 64, 1 << 14, 128)  # 2 TB each
    pieces = dt.map_ranks(lambda coordinate: torch.zeros(128).expand(shape[0] // 2, *shape[1:]), mesh=mesh)
    dense = torch.empty(shape, device="meta")
    q = dt.DTensor.from_local(pieces, mesh, [S0], shape=dense.shape, stride=dense.stride())
    assert torch._fused_sdp_choice(q, q, q) == torch._fused_sdp_choice(*qkv())
    across = dt.DTensor.from_local(pieces, mesh, [S0], shape=dense.shape, stride=(dense.stride(0), 1, 64, 1 << 20))
    assert torch._fused_sdp_choice(across, across, across) == torch._fused_sdp_choice(*(t.mT.contiguous().mT for t in qkv()))


def test_attention_with_empty_shards_equals_plain_torch() -> None:
    for placement in (S0, S1, S2):
        check(sdpa, *qkv(batch=2, heads=2, queries=2, keys=2), mesh=MESHES[3,], placements=[[placement]] * 3)


@pytest.mark.parametrize("mask_type", [None, 0, 1])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention_module_in_eval_mode_equals_plain_torch(mask_type: int | None, need_weights: bool) -> None:
    module = torch.nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64).eval()
    own, masks = x(2, 5, 8), {None: {}, 0: {"attn_mask": x(5, 5) > 0.7}, 1: {"key_padding_mask": x(2, 5) > 0.7}}
    mesh, mask = MESHES[2, 2], masks[mask_type]
    with torch.no_grad():
        expected = module(own, own, own, need_weights=need_weights, **mask)
        for placement in (R, S0, S1):
            spread = dt.distribute_module(torch.nn.MultiheadAttention(8, 4, batch_first=True, dtype=torch.float64).eval(), mesh)
            spread.load_state_dict({k: dt.distribute_tensor(v, mesh, [R, R]) for k, v in module.state_dict().items()})
            source = dt.distribute_tensor(own, mesh, [placement, R])
            given = {k: dt.distribute_tensor(v, mesh, [R, R]) for k, v in mask.items()}
            got = spread(source, source, source, need_weights=need_weights, **given)
            assert torch.allclose(got[0].full_tensor(), expected[0])
            assert not need_weights or torch.allclose(got[1].full_tensor(), expected[1])


@pytest.mark.parametrize("places", [([R], [R], [R]), ([S1], [R], [R]), ([R], [S0], [S0]), ([R], [R], [Partial()])], ids=str)
def test_attention_of_query_expanded_over_the_batch_equals_plain_torch(places: Any) -> None:
    """Check an expanded query, as in attention pooling: its strides of 0 give no memory order."""

    def program(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = [t.view(3, -1, 4, 8).transpose(1, 2) for t in (query.expand(3, -1, -1), key, value)]
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads)[0]

    given = [x(*shape, 32) for shape in ((1, 1), (3, 16), (3, 16))]
    check(program, *given, mesh=dt.init_device_mesh("cpu", (2,)), placements=places, strides=False)


@pytest.mark.parametrize("cut", [S0, S1, R], ids=str)
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_cuda_attention_operators_keep_batch_and_heads_sharded(kind: str, cut: Any) -> None:
    """Check CUDA operators in a dry run: the log-sum-exp for the backward has the placements of the output."""
    mesh = dt.init_device_mesh("meta", (4,))
    q, k, v = (dt.empty(4, 8, 64, 64, dtype=torch.bfloat16, device_mesh=mesh, placements=[cut]) for _ in range(3))
    run = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    out, rows, *more = run(q, k, v, *((0.0, True) if kind == "flash" else (None, True)))
    assert out.placements == rows.placements == (cut,)
    assert more[2:4] == [64, 64] or kind == "efficient"  # the longest sequences
    tail = {
        "flash": (out, rows, *more[:4], 0.0, True, *more[4:6]),
        "efficient": (None, out, rows, *more, 0.0, [True, True, True, False]),
        "cudnn": (out, rows, *more[4:6], None, *more[:4], 0.0, True),
    }[kind]
    gradients = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward")(out, q, k, v, *tail)
    assert [x.placements for x in gradients if x is not None] == [(cut,)] * 3


MASKS: dict[str, torch.Tensor] = {
    "float mask": x(5, 5, seed=8),
    "mask of one column": x(5, 1, seed=8),
    "mask of one row": x(1, 5, seed=8),
    "mask per sample": x(2, 1, 5, 5, seed=8),
    "mask with a query without keys": torch.eye(5) < 1,
}


@pytest.mark.parametrize("placements", [[S2] * 3, [S2, R, R], [R, S2, S2], [R] * 3, [S1] * 3], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_with_both_mask_and_is_causal_equals_plain_torch(mask: torch.Tensor, placements: list[Any]) -> None:
    for of_mask in [R] if 1 in mask.shape[-2:] or mask.ndim == 4 else [R, S0, S1]:
        check(
            lambda q, k, v, mask: sdpa(q, k, v, mask, is_causal=True),
            *qkv(keys=5),
            mask,
            mesh=MESHES[3,],
            placements=[[where] for where in (*placements, of_mask)],
        )
