"""FLOPs and bytes of operators: FLOPs as torch counts them, bytes from shapes, and how strategies divide both among ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

import dtensor as dt
from dtensor.base.tensor_tree import map_tensors
from dtensor.cost.device import DEVICES, Device
from dtensor.layout.layout import Layout
from dtensor.propagation.flops import OperatorWork, divide_by_other_mesh_dims, strategy_compute_seconds, work_of
from dtensor.propagation.make_call import make_call
from dtensor.propagation.op_schema import operator_schema_of
from dtensor.rules.call import Call, Meta
from dtensor.rules.registry import lookup
from dtensor.rules.rule import Along, Strategy, strategies_of_factors

aten = torch.ops.aten
R = dt.Replicate()
MESH = dt.init_device_mesh("meta", (4,))
UNIT = Device("unit", dict.fromkeys(("float64", "float32", "half", "other"), 1.0), 1e30, 0.0)  # seconds are FLOPs
MEMORY = Device("memory", dict.fromkeys(("float64", "float32", "half", "other"), 1e30), 1.0, 0.0)  # seconds are bytes


def f(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def call_of(op: Any, *args: Any, mesh: dt.DeviceMesh = MESH, placements: Any = None, **given: Any) -> Call:
    operator = operator_schema_of(op)
    metas = [op(*args, **given)]
    wanted = placements or [R] * mesh.ndim

    def laid(x: Any) -> Any:
        return map_tensors(lambda t: Layout.of(mesh, wanted, tuple(t.shape), dtype=t.dtype), x)

    bound = {name: laid(value) for name, value in operator.bind(args, given).items()}
    call, _ = make_call(operator, mesh, bound)
    made = metas[0] if isinstance(metas[0], (tuple, list)) else metas
    call.results = tuple(Meta(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else None for x in made)
    return call


def work_of_call(call: Call) -> OperatorWork:
    rule = lookup(call.func)
    return work_of(rule, None if rule is None else rule.factors(call), call)


def convolution_args(x: torch.Tensor, weight: torch.Tensor, transposed: bool, groups: int) -> tuple[Any, ...]:
    return (x, weight, None, [2, 1], [0, 1], [1, 1], transposed, [0, 0], groups)


def convolution_backward_args(x: torch.Tensor, weight: torch.Tensor, transposed: bool, mask: list[bool]) -> tuple[Any, ...]:
    forward = convolution_args(x, weight, transposed, 1)
    return (aten.convolution.default(*forward), x, weight, None, *forward[3:], mask)


CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mm.default, (f(5, 6), f(6, 7))),
    (aten.addmm.default, (f(7), f(5, 6), f(6, 7))),
    (aten.bmm.default, (f(3, 5, 6), f(3, 6, 7))),
    (aten.baddbmm.default, (f(3, 5, 7), f(3, 5, 6), f(3, 6, 7))),
    (aten.convolution.default, convolution_args(f(2, 6, 9, 8), f(5, 6, 3, 2), False, 1)),
    (aten.convolution.default, convolution_args(f(2, 6, 9, 8), f(4, 3, 3, 2), False, 2)),
    (aten.convolution.default, convolution_args(f(2, 6, 9, 8), f(6, 5, 3, 2), True, 1)),
    *(
        (aten.convolution_backward.default, convolution_backward_args(f(2, 6, 9, 8), weight, transposed, mask))
        for transposed, weight in ((False, f(5, 6, 3, 2)), (True, f(6, 5, 3, 2)))
        for mask in ([True, True, False], [False, True, False], [True, False, False])
    ),
]

HALF = f(2, 6, 8, 16).to(torch.bfloat16)
SEED = torch.empty((), dtype=torch.int64, device="meta")
SUMS = f(2, 6, 8)
CALLS += [
    (aten._scaled_dot_product_efficient_attention.default, (HALF, HALF, HALF, None, True)),
    (aten._scaled_dot_product_flash_attention.default, (HALF, HALF, HALF)),
    (aten._scaled_dot_product_cudnn_attention.default, (HALF, HALF, HALF, None, True)),
    (
        aten._scaled_dot_product_efficient_attention_backward.default,
        (HALF, HALF, HALF, HALF, HALF, HALF, SUMS, SEED, SEED, 0.0, [True, True, True, False]),
    ),
    (
        aten._scaled_dot_product_flash_attention_backward.default,
        (HALF, HALF, HALF, HALF, HALF, SUMS, SEED, SEED, 8, 8, 0.0, False, SEED, SEED),
    ),
    (
        aten._scaled_dot_product_cudnn_attention_backward.default,
        (HALF, HALF, HALF, HALF, HALF, SUMS, SEED, SEED, HALF, SEED, SEED, 8, 8, 0.0, False),
    ),
    (aten._scaled_mm.default, (f(32, 48).to(torch.float8_e4m3fn), f(64, 48).to(torch.float8_e4m3fn).t(), f(1), f(1))),
]


@pytest.mark.parametrize(("op", "args"), CALLS, ids=lambda value: str(value) if not isinstance(value, tuple) else "")
def test_flops_equal_those_of_torch_flop_counter(op: Any, args: tuple[Any, ...]) -> None:
    made = op(*args)
    assert work_of_call(call_of(op, *args)).flops == flop_registry[op.overloadpacket](*args, out_val=made) > 0


def test_every_operator_of_torch_flop_registry_is_tested() -> None:
    counted = {packet.__name__ for packet in flop_registry if hasattr(packet, "overloads") and lookup_of(packet) is not None}
    tried = {op.overloadpacket.__name__ for op, _ in CALLS}
    assert tried == counted


def lookup_of(packet: Any) -> Any:
    return lookup(getattr(packet, packet.overloads()[0]))


def test_flops_of_linear_matmul_einsum_and_cpu_attention_equal_the_formula() -> None:
    x, weight = f(3, 5, 6), f(7, 6)
    assert work_of_call(call_of(aten.linear.default, x, weight, f(7))).flops == 2 * 15 * 6 * 7
    assert work_of_call(call_of(aten.matmul.default, f(4, 1, 5, 6), f(3, 6, 7))).flops == 2 * 12 * 5 * 6 * 7
    assert work_of_call(call_of(aten.einsum.default, "bik,bkj->bij", [f(2, 3, 4), f(2, 4, 5)])).flops == 2 * 2 * 3 * 4 * 5
    query = f(2, 6, 5, 8)
    call = call_of(aten._scaled_dot_product_flash_attention_for_cpu.default, query, f(2, 3, 7, 8), f(2, 3, 7, 8))
    assert work_of_call(call).flops == 2 * 2 * 6 * 5 * 7 * 16


CALLS_WITHOUT_CONTRACTION: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.mul.Tensor, (f(5, 6), f(5, 6))),
    (aten.sum.dim_IntList, (f(5, 6), [0])),
    (aten.native_layer_norm_backward.default, (f(5, 6), f(5, 6), [6], f(5, 1), f(5, 1), f(6), f(6), [True] * 3)),
    (aten.index_add.default, (f(50, 6), 0, SEED.expand(7), f(7, 6))),
    (aten.scatter_add.default, (f(50, 6), 0, SEED.expand(7, 6), f(7, 6))),
    (aten.scatter.src, (f(50, 6), 0, SEED.expand(7, 6), f(7, 6))),
    (aten.embedding_dense_backward.default, (f(5, 6), SEED.expand(5), 50, -1, False)),
    (aten.grid_sampler_2d_backward.default, (f(5, 4, 3, 2), f(5, 4, 6, 7), f(5, 3, 2, 2), 0, 0, False, [True, True])),
]


@pytest.mark.parametrize(
    ("op", "args"), CALLS_WITHOUT_CONTRACTION, ids=lambda value: str(value) if not isinstance(value, tuple) else ""
)
def test_operators_without_contraction_have_few_flops_and_some_bytes(op: Any, args: tuple[Any, ...]) -> None:
    found = work_of_call(call_of(op, *args))
    assert found.flops <= 2 * max(x.numel() for x in args if isinstance(x, torch.Tensor))
    assert found.nbytes > 0


def test_operators_read_and_write_each_byte_once_and_views_are_free() -> None:
    x, half = f(5, 6), f(6, 7).to(torch.bfloat16)
    assert work_of_call(call_of(aten.add.Tensor, x, x)).nbytes == 3 * 30 * 4
    assert work_of_call(call_of(aten._to_copy.default, half, dtype=torch.float32)).nbytes == 42 * (2 + 4)
    assert work_of_call(call_of(aten.mm.default, half.t().contiguous(), half)).nbytes == 2 * (42 + 42 + 49)
    assert not work_of_call(call_of(aten.cat.default, [x, x])).free
    for op, args in (
        (aten.t.default, (x,)),
        (aten.view.default, (x, [30])),
        (aten._unsafe_view.default, (x, [30])),
        (aten.t_.default, (x,)),
    ):
        found = work_of_call(call_of(op, *args))
        assert found.free
        assert strategy_compute_seconds(DEVICES["CPU"], found, Strategy((R,), (R,)), 4, {}) == 0


def flop_shares_by_strategy(call: Call) -> dict[str, float]:
    """Return the share of the FLOPs that one rank computes, by strategy (named by its factor, or else by its operands)."""
    rule = lookup(call.func)
    factors = rule.factors(call)
    assert factors is not None
    done = work_of(rule, factors, call)
    partials = tuple(rule.partials(call) if callable(rule.partials) else rule.partials)
    return {
        row.factor or ",".join(map(str, row.operands)): strategy_compute_seconds(
            UNIT, divide_by_other_mesh_dims(done, call, 0), row, call.mesh.shape[0], factors.sizes
        )
        / strategy_compute_seconds(UNIT, done, Strategy((R, R), (R,)), 1, factors.sizes)
        for row in strategies_of_factors(factors, partials)
    }


def test_sharded_factor_divides_flops_and_partial_strategy_does_not() -> None:
    found = flop_shares_by_strategy(call_of(aten.mm.default, f(16, 8), f(8, 6)))
    assert (found["m"], found["k"]) == (1 / 4, 1 / 4)
    assert found["n"] == 1 / 3  # 6 over 4 ranks: the busiest has 2
    assert {share for name, share in found.items() if len(name) > 1} == {1}


def test_attention_flops_are_divided_by_at_most_the_number_of_heads() -> None:
    mesh = dt.init_device_mesh("meta", (512,))
    q, k = f(2, 64, 16, 8), f(2, 8, 16, 8)
    found = flop_shares_by_strategy(call_of(aten._scaled_dot_product_flash_attention_for_cpu.default, q, k, k, mesh=mesh))
    assert found["h"] == 1 / 8


def test_flops_are_divided_by_sizes_of_other_mesh_dims_that_shard_operands() -> None:
    mesh = dt.init_device_mesh("meta", (4, 8))
    x, weight = f(64, 16), f(16, 16)
    unsharded = call_of(aten.mm.default, x, weight, mesh=mesh)
    sharded = call_of(aten.mm.default, x, weight, mesh=mesh)
    sharded.operands = (Layout.of(mesh, [R, dt.Shard(0)], (64, 16)), sharded.operands[1])
    assert divide_by_other_mesh_dims(work_of_call(unsharded), unsharded, 0) == work_of_call(unsharded)
    assert divide_by_other_mesh_dims(work_of_call(sharded), sharded, 0).flops == work_of_call(sharded).flops / 8
    assert divide_by_other_mesh_dims(work_of_call(sharded), sharded, 1) == work_of_call(sharded)


def test_only_bytes_of_tensors_with_the_sharded_factor_are_divided() -> None:
    call = call_of(aten.mm.default, f(16, 8), f(8, 4))
    row = Strategy((Along("m"), R), (Along("m"),), "m")
    assert strategy_compute_seconds(MEMORY, work_of_call(call), row, 4, {"m": 16, "k": 8, "n": 4}) == 4 * (
        16 * 8 / 4 + 8 * 4 + 16 * 4 / 4
    )


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_estimated_seconds_are_launch_plus_larger_of_flop_and_memory_time(device: Device) -> None:
    assert device.seconds(0, 0, torch.float32) == device.launch
    assert device.seconds(1e15, 1, torch.float32) == 1e15 / device.flops["float32"] + device.launch
    assert device.seconds(1, 1e12, torch.float32) == 1e12 / device.memory + device.launch
    assert device.rate(torch.complex64) == device.rate(torch.float32) / 4
    assert device.rate(torch.bfloat16) == device.rate(torch.float16)
    assert device.rate(torch.int64) == device.flops["other"]
    assert math.isfinite(device.seconds(1, 1, torch.bool))
