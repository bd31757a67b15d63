"""DTensor: creation, reads, redistribution, autograd, in-place writes, modules, copies, serialization and printing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.errors import LayoutError, MixedTensorError, UnsupportedOperationError
from dtensor.propagation.op_schema import operator_schema_of
from dtensor.testing import check, scatter

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")

MESH = dt.init_device_mesh("cpu", (2,))
MESH_3 = dt.init_device_mesh("cpu", (3,))
MESH_22 = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
R = Replicate()
PLACEMENTS: list[list[Any]] = [
    [R],
    [Shard(0)],
    [Shard(1)],
    [Shard(0, sizes=(1, 4))],
    [Partial()],
    [Partial("avg")],
    [Partial("max")],
]


def value(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def local_tensors(x: Any) -> list[torch.Tensor]:
    """Return the local tensors of all ranks."""
    return list(x._local.shards)


# --- distribute_tensor and full_tensor ------------------------------------------------------------------------------
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
def test_full_tensor_returns_the_distributed_value(placements: list[Any], dtype: torch.dtype) -> None:
    if dtype.is_complex and placements == [Partial("max")]:
        pytest.skip("complex numbers are not ordered")
    x = value(5, 6, dtype=dtype)
    distributed = dt.distribute_tensor(x, MESH, placements)
    assert torch.equal(distributed.full_tensor(), x)
    assert distributed.placements == tuple(placements)
    assert (distributed.shape, distributed.stride(), distributed.dtype) == (x.shape, x.stride(), x.dtype)


def test_shard_splits_a_tensor_dim_as_torch_chunk_does() -> None:
    x = value(5, 3)
    local = local_tensors(dt.distribute_tensor(x, MESH_3, [Shard(0)]))
    assert all(torch.equal(shard, chunk) for shard, chunk in zip(local, x.chunk(3), strict=True))


def test_distribute_tensor_copies_the_tensor_for_each_rank() -> None:
    x = value(4, 3)
    distributed = dt.distribute_tensor(x, MESH, [R])
    x.zero_()
    assert bool(distributed.full_tensor().any())
    assert local_tensors(distributed)[0].data_ptr() != local_tensors(distributed)[1].data_ptr()


def test_distribute_tensor_of_a_meta_tensor_gives_meta_local_tensors() -> None:
    result = dt.distribute_tensor(torch.empty(100_000, 88, device="meta"), MESH_22, [Shard(0), R])
    assert result.is_meta
    assert [tuple(shard.shape) for shard in local_tensors(result)] == [(50_000, 88)] * 4
    assert (result @ result.t()).shape == (100_000, 100_000)


def test_distribute_tensor_of_a_leaf_gives_a_leaf_with_equal_requires_grad() -> None:
    result = dt.distribute_tensor(value(4, 3).requires_grad_(), MESH, [Shard(0)])
    assert result.is_leaf
    assert result.requires_grad
    assert not dt.distribute_tensor(value(4, 3), MESH, [Shard(0)]).requires_grad


def test_distribute_tensor_refuses_a_tensor_with_a_grad_fn() -> None:
    with pytest.raises(LayoutError, match="leaf tensors"):
        dt.distribute_tensor(value(4).requires_grad_() * 2, MESH, [R])


def test_distribute_tensor_of_a_dtensor_redistributes_it() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)])
    assert torch.equal(dt.distribute_tensor(x, MESH, [Shard(1)]).full_tensor(), value(5, 6))
    assert torch.equal(dt.distribute_tensor(x, MESH, [Shard(0)]).zero_().full_tensor() + x.full_tensor(), value(5, 6))


# --- from_local and to_local ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_from_local_is_the_inverse_of_to_local(placements: list[Any]) -> None:
    x = scatter(value(5, 6), MESH, placements)
    again = DTensor.from_local(x.to_local(), MESH, placements if "sizes" not in str(placements) else [Shard(0)])
    assert again.layout is x.layout
    assert torch.equal(again.full_tensor(), value(5, 6))


def test_from_local_takes_uneven_local_tensors_on_two_mesh_dims() -> None:
    global_value = value(5, 6)
    rows, columns = global_value.split([1, 4]), [2, 4]
    x = DTensor.from_local(dt.per_rank([shard for row in rows for shard in row.split(columns, 1)]), MESH_22, [Shard(0), Shard(1)])
    assert torch.equal(x.full_tensor(), global_value)


def test_from_local_takes_a_plain_tensor_as_the_local_tensor_of_each_rank() -> None:
    x = DTensor.from_local(torch.arange(3.0), MESH, [Shard(0)])
    assert x.full_tensor().tolist() == [0, 1, 2, 0, 1, 2]
    assert DTensor.from_local(torch.arange(3.0), MESH, [Partial()]).full_tensor().tolist() == [0, 2, 4]


def test_from_local_raises_if_local_tensors_do_not_fit_the_shape_argument() -> None:
    with pytest.raises(LayoutError, match="rank 1 has a local tensor of shape"):
        DTensor.from_local(dt.per_rank([torch.ones(3), torch.ones(1)]), MESH, [Shard(0)], shape=(5,))
    result = DTensor.from_local(dt.per_rank([torch.ones(3), torch.ones(2)]), MESH, [Shard(0)], shape=(5,))
    assert result.shape == (5,)


def test_from_local_names_the_rank_with_a_mismatched_shape() -> None:
    with pytest.raises(LayoutError, match=r"rank 1 at \(1,\) has a local tensor of shape \(2, 4\)"):
        DTensor.from_local(dt.per_rank([torch.ones(3, 3), torch.ones(2, 4)]), MESH, [Shard(0)])


@pytest.mark.parametrize(
    ("local_values", "placements", "message"),
    [
        ([torch.ones(3), torch.zeros(3)], [R], "values of rank 1 differ from those of rank 0"),
        ([torch.ones(3), torch.ones(4)], [R], "rank 1"),
        (
            [torch.ones(3), torch.ones(3, dtype=torch.float64)],
            [Shard(0)],
            "torch.float64 on rank 1, torch.float32 on rank 0",
        ),
        ([torch.ones(3), torch.ones(4)], [Partial()], "rank 1"),
        ([torch.ones(2, 3), torch.ones(3, 2).t()], [Shard(0)], r"rank 1 has dims in the order \[1, 0\]"),
    ],
)
def test_from_local_with_run_check_raises_and_names_the_inconsistent_rank(
    local_values: list[torch.Tensor], placements: list[Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        DTensor.from_local(dt.per_rank(local_values), MESH, placements, run_check=True)


def test_a_plain_tensor_of_one_element_is_an_operand_like_a_number() -> None:
    x = dt.ones(4, 3, device_mesh=MESH, placements=[Shard(0)])
    assert torch.equal((torch.tensor([2]) + x).full_tensor(), torch.full((4, 3), 3.0))
    assert torch.equal((x * torch.full((1, 1, 1), 3.0)).full_tensor(), torch.full((1, 4, 3), 3.0))


def test_from_local_with_run_check_accepts_consistent_local_tensors() -> None:
    x = DTensor.from_local(dt.per_rank([torch.ones(2), torch.ones(1)] * 2), MESH_22, [R, Shard(0)], run_check=True)
    assert x.shape == (3,)


def test_from_local_refuses_a_dtensor() -> None:
    with pytest.raises(LayoutError, match="plain tensor"):
        DTensor.from_local(dt.zeros(3, device_mesh=MESH), MESH, [R])


def test_from_local_takes_the_global_stride() -> None:
    x = DTensor.from_local(torch.ones(3, 2), MESH, [Shard(0)], shape=(6, 2), stride=(1, 6))
    assert x.stride() == (1, 6)


# --- gradients of from_local, to_local and full_tensor --------------------------------------------------------------


def test_gradient_of_from_local_is_the_block_of_each_rank() -> None:
    local = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    weights = dt.distribute_tensor(torch.tensor([1.0, 2.0, 3.0]), MESH, [Shard(0)])
    (DTensor.from_local(dt.per_rank(local), MESH, [Shard(0)]) * weights).sum().full_tensor().backward()
    assert [x.grad.tolist() for x in local if x.grad is not None] == [[1, 2], [3]]


def test_gradient_of_to_local_of_a_replicated_tensor_is_that_of_one_rank() -> None:
    x = dt.distribute_tensor(torch.ones(3), MESH, [R]).requires_grad_()
    (x.to_local() * 5).sum().backward()
    assert x.grad.full_tensor().tolist() == [5, 5, 5]


def test_full_tensor_is_differentiable() -> None:
    for placements in ([R], [Shard(0)], [Partial()], [Partial("avg")]):
        x = scatter(value(5), MESH, placements).requires_grad_()
        (x.full_tensor() ** 2).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * value(5))


def test_backward_to_the_addends_of_a_partial_max_is_refused() -> None:
    local = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedOperationError, match="redistribute"):
        (DTensor.from_local(local, MESH, [Partial("max")]) * 1.0).full_tensor().sum().backward()


# --- redistribute ---------------------------------------------------------------------------------------------------
def test_redistribute_keeps_the_value_for_each_target_placement() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)])
    for placements in ([Shard(1)], [R], [Shard(0)], [Shard(0, sizes=(5, 0))]):
        x = x.redistribute(placements=placements)
        assert x.placements == tuple(placements)
        assert torch.equal(x.full_tensor(), value(5, 6))
    assert x.redistribute().placements == (R,)
    assert x.redistribute(placements=x.placements) is not x


def test_gradient_of_redistribute_has_the_source_placements() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    y = x * 2
    y.retain_grad()
    (y.redistribute(placements=[Shard(1)]) ** 2).sum().backward()
    assert y.grad.placements == (Shard(0),)
    assert torch.equal(x.grad.full_tensor(), 8 * value(5, 6))


def test_asynchronous_redistribute_completes_at_the_first_use() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[R], async_op=True)
    assert y.shape == (5, 6)
    assert y.placements == (R,)
    (y * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((5, 6), 2.0, dtype=torch.float64))
    assert torch.equal(x.detach().redistribute(placements=[Shard(1)], async_op=True).full_tensor(), value(5, 6))


def test_data_of_a_tensor_in_flight_can_be_assigned() -> None:
    x, other = (dt.distribute_tensor(value(5, 6) + k, MESH, [Shard(0)]) for k in range(2))
    y = x.redistribute(placements=[R], async_op=True)
    y.data = other
    assert type(y) is DTensor
    assert y.placements == (Shard(0),)
    assert torch.equal(y.full_tensor(), value(5, 6) + 1)


def test_redistribute_converts_to_forward_dtype_and_the_gradient_to_the_leaf_dtype() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[R], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float64


# --- autograd -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("placements", [[R], [Shard(0)], [Shard(1)], [Shard(0, sizes=(1, 4))]], ids=str)
def test_gradient_has_the_placements_of_its_leaf(placements: list[Any]) -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, placements).requires_grad_()
    w = dt.distribute_tensor(value(6, 3), MESH, [Shard(1)]).requires_grad_()
    for _ in range(2):  # the second backward accumulates
        (x @ w).square().mean().backward()
    for leaf in (x, w):
        assert leaf.grad.placements == leaf.placements


def test_second_derivative_by_autograd_grad_is_right() -> None:
    def cubes(x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return second

    x = dt.distribute_tensor(value(5), MESH, [Shard(0)]).requires_grad_()
    assert torch.equal(cubes(x).full_tensor(), 6 * value(5))


def test_tensor_hooks_receive_global_gradients() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    observed: list[Any] = []
    y = x * 2
    y.register_hook(lambda grad: observed.append(tuple(grad.shape)) or grad * 10)
    x.register_post_accumulate_grad_hook(lambda leaf: observed.append(leaf.grad.placements))
    y.sum().backward()
    assert observed == [(5, 6), (Shard(0),)]
    assert x.grad.full_tensor().unique().tolist() == [20]


class AddWithGradientForFirst(torch.autograd.Function):
    """Sum of two tensors with a gradient for the first one and None for the second one."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


def test_a_none_gradient_of_a_redistributed_tensor_leaves_grad_of_its_source_none() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, leaf = (dt.distribute_tensor(torch.ones(4, 3), mesh, [dt.Shard(0)]).requires_grad_() for _ in range(2))
    shard = torch.ones(4, 3, requires_grad=True)
    for y in (leaf.redistribute(placements=[dt.Replicate()]), dt.DTensor.from_local(shard, mesh, [dt.Replicate()])):
        AddWithGradientForFirst.apply(x, y).sum().backward()
    assert leaf.grad is None
    assert shard.grad is None
    assert x.grad is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.prod(0),
        torch.fft.rfft,
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    ],
    ids=["prod", "rfft", "attention"],
)
def test_a_none_gradient_of_an_operator_result_leaves_grad_of_its_input_none(make: Callable[[Any], Any]) -> None:
    leaf = dt.distribute_tensor(torch.rand(4, 4), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)]).requires_grad_()
    result = make(leaf)
    AddWithGradientForFirst.apply(torch.zeros_like(result).requires_grad_(), result).abs().sum().backward()
    assert leaf.grad is None


def test_operator_schema_requires_the_output_gradient_but_not_optional_sequence_lengths() -> None:
    attention = operator_schema_of(torch.ops.aten._scaled_dot_product_flash_attention_backward.default)
    bound = attention.bind([torch.ones(1), *[torch.ones(1)] * 5, None, None, 8, 8, 0.0, False, None, None], {})
    assert not attention.lacks_first_tensor(bound)
    assert attention.lacks_first_tensor({**bound, "grad_out": None})


def test_forward_ad_gives_zeros_for_local_tensors_without_a_tangent() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    shards = [torch.ones(2, 3), torch.ones(1, 3)]
    with torch.autograd.forward_ad.dual_level():
        ones = torch.autograd.forward_ad.make_dual(shards[0], torch.ones(2, 3))
        x = dt.DTensor.from_local(dt.per_rank([ones, shards[1]]), mesh, [dt.Shard(0)], shape=(3, 3))
        tangent = torch.autograd.forward_ad.unpack_dual(x * 2).tangent
        assert torch.equal(tangent.full_tensor(), torch.tensor([2.0, 2.0, 0.0]).unsqueeze(1).expand(3, 3))


def test_operators_and_writes_run_under_no_grad_and_inference_mode() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    with torch.no_grad():
        assert not (x * 2).requires_grad
        x.add_(1)
    assert torch.equal(x.detach().full_tensor(), value(5, 6) + 1)
    with torch.inference_mode():
        y = (x * 2).sum(1)
        assert y.is_inference()
        y.mul_(2)
        y[1:3] = 0
        assert torch.equal(y.full_tensor()[3:], (value(5, 6) + 1).sum(1)[3:] * 4)


def test_requires_grad_can_be_set_and_unset() -> None:
    x = dt.zeros(4, device_mesh=MESH, placements=[Shard(0)])
    x.requires_grad = True
    assert x.requires_grad
    assert x.requires_grad_(False) is x
    assert not x.requires_grad
    assert not x.to_local().requires_grad


def test_detach_shares_memory() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    x.detach().zero_()
    assert not bool(x.detach().full_tensor().any())
    x.data.fill_(3)
    assert x.detach().full_tensor().unique().tolist() == [3]


def test_activation_checkpointing_gives_the_gradient_of_plain_torch() -> None:
    from torch.utils.checkpoint import checkpoint

    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    checkpoint(lambda t: torch.tanh(t).square(), x, use_reentrant=False).sum().backward()
    expected = value(5, 6).requires_grad_()
    torch.tanh(expected).square().sum().backward()
    assert torch.allclose(x.grad.full_tensor(), expected.grad)


# --- writing --------------------------------------------------------------------------------------------------------
def write_through_views(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1:3] = 7
    y[:, 0].mul_(2)
    y.t()[4] += 1
    y.view(-1)[3:9].zero_()
    return y


def read_views_after_writes(x: torch.Tensor) -> list[torch.Tensor]:
    y = x.clone()
    row, column, flat = y[2], y[:, 1:4], y.view(-1)
    y.mul_(2)
    row.add_(5)
    column.neg_()
    return [y, row, column, flat]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
@pytest.mark.parametrize("fn", [write_through_views, read_views_after_writes])
def test_writes_reach_views_and_their_base(fn: Any, placements: list[Any]) -> None:
    check(fn, value(5, 6), mesh=MESH, placements=[placements])


def test_in_place_operators_keep_the_object_its_placements_and_its_memory() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)])
    before, pointers = x, [shard.data_ptr() for shard in local_tensors(x)]
    x += 1
    x.mul_(dt.distribute_tensor(value(6), MESH, [R]))
    assert x is before
    assert x.placements == (Shard(0),)
    assert [shard.data_ptr() for shard in local_tensors(x)] == pointers


def test_in_place_operators_redistribute_the_operand_to_the_placements_of_the_written_tensor() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)])
    x.add_(dt.distribute_tensor(value(5, 6, seed=1), MESH, [Shard(1)]))
    assert x.placements == (Shard(0),)
    assert torch.equal(x.full_tensor(), value(5, 6) + value(5, 6, seed=1))


def test_out_arguments_keep_their_placements() -> None:
    a, b = (dt.distribute_tensor(value(5, 6, seed=k), MESH, [Shard(0)]) for k in range(2))
    out = dt.zeros(5, 6, device_mesh=MESH, placements=[Shard(1)], dtype=torch.float64)
    assert torch.add(a, b, out=out) is out
    assert out.placements == (Shard(1),)
    assert torch.equal(out.full_tensor(), value(5, 6) + value(5, 6, seed=1))


def test_assigning_a_dtensor_to_data_takes_its_placements() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    x.data = dt.distribute_tensor(value(5, 6, seed=1), MESH, [Shard(1)])
    assert x.placements == (Shard(1),)
    assert x.requires_grad
    (x * 2).sum().backward()
    assert x.grad.placements == (Shard(1),)


def test_assigning_a_plain_tensor_to_data_needs_implicit_replication() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_()
    with pytest.raises(LayoutError, match="implicit_replication"):
        x.data = value(7, 6)
    with dt.implicit_replication():
        x.data = value(7, 6)
    assert torch.equal(x.detach().full_tensor(), value(7, 6))
    (x * 2).sum().backward()
    assert x.grad is not None
    assert (x.grad.shape, x.placements) == ((7, 6), (Shard(0),))


# --- reading --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("placements", [[R], [Partial()], [Partial("avg")], [Partial("max")]], ids=str)
def test_item_and_conversions_to_python_numbers_read_the_global_value(placements: list[Any]) -> None:
    x = scatter(torch.tensor(6.0), MESH, placements)
    assert x.item() == 6
    assert float(x) == 6
    assert int(x) == 6
    assert bool(x > 5)
    assert f"{x:.1f}" == "6.0"
    assert [1, 2, 3, 4, 5, 6, 7][scatter(torch.tensor(6), MESH, placements if placements != [Partial("avg")] else [R])] == 7


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_tolist_numpy_iteration_and_len_read_the_global_value(placements: list[Any]) -> None:
    x = scatter(value(5, 6), MESH, placements)
    assert x.tolist() == value(5, 6).tolist()
    assert (x.numpy() == value(5, 6).numpy()).all()
    assert [row.sum().item() for row in x] == value(5, 6).sum(1).tolist()
    assert len(x) == 5
    assert x[1, 2].item() == value(5, 6)[1, 2].item()


def test_bool_of_several_elements_raises_as_in_plain_torch() -> None:
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(dt.ones(3, device_mesh=MESH, placements=[Shard(0)]))


# --- plain tensors as operands --------------------------------------------------------------------------------------
def test_numbers_and_plain_0d_tensors_are_operands() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)])
    assert torch.equal((x * torch.tensor(2.0) + 1).full_tensor(), value(5, 6) * 2 + 1)
    assert torch.equal((torch.tensor(3, dtype=torch.int64) - x).full_tensor(), 3 - value(5, 6))
    assert torch.where(x > 0, x, torch.tensor(0.0, dtype=torch.float64)).full_tensor().min() == 0


@pytest.mark.parametrize(
    "fn", [lambda x, p: x + p, lambda x, p: p * x, lambda x, p: x @ p.t(), lambda x, p: p.add_(x), lambda x, p: torch.cat([x, p])]
)
def test_plain_tensors_with_dims_as_operands_raise_and_name_implicit_replication(fn: Any) -> None:
    x, plain = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]), value(5, 6)
    with pytest.raises(MixedTensorError, match=r"implicit_replication|distribute_tensor"):
        fn(x, plain)


def test_implicit_replication_accepts_plain_tensors_as_operands() -> None:
    x, plain = dt.distribute_tensor(value(5, 6), MESH, [Shard(0)]).requires_grad_(), value(5, 6, seed=1)
    with dt.implicit_replication():
        y = x + plain
        assert torch.equal(y.detach().full_tensor(), value(5, 6) + plain)
        (x @ plain.t()).sum().backward()
    assert x.grad is not None
    with pytest.raises(MixedTensorError):
        x + plain


# --- factories ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "placements", [None, [R, R], [Shard(0), R], [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Partial(), Shard(1)]], ids=str
)
def test_zeros_ones_full_and_empty_have_the_global_shape_value_and_dtype(placements: Any) -> None:
    options: dict[str, Any] = {"device_mesh": MESH_22, "placements": placements}
    assert torch.equal(dt.zeros(5, 6, **options).full_tensor(), torch.zeros(5, 6))
    assert torch.equal(dt.ones((5, 6), **options).full_tensor(), torch.ones(5, 6))
    assert torch.equal(dt.full((5, 6), 2.5, **options).full_tensor(), torch.full((5, 6), 2.5))
    assert dt.empty(5, 6, **options).shape == (5, 6)
    assert dt.full((5, 6), 2, **options).dtype == torch.int64
    assert dt.ones(5, dtype=torch.bool, device_mesh=MESH_22).dtype == torch.bool
    assert dt.zeros(5, 6, requires_grad=True, **options).requires_grad


@pytest.mark.parametrize("placements", [None, [Shard(0), R], [Shard(0), Shard(0)], [Partial(), Shard(0)]], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 3, 37])
def test_linspace_and_logspace_equal_those_of_one_device_bit_for_bit(placements: Any, steps: int) -> None:
    options: dict[str, Any] = {"device_mesh": MESH_22, "placements": placements}
    for start, end, dtype in ((-1.5, 7, None), (2, 9, torch.int64), (1 + 1j, 2, None), (torch.tensor(0.1), 3, torch.float64)):
        assert torch.equal(
            dt.linspace(start, end, steps, dtype=dtype, **options).full_tensor(), torch.linspace(start, end, steps, dtype=dtype)
        )
        theirs = torch.logspace(start, end, steps, base=2, dtype=dtype)
        assert torch.equal(dt.logspace(start, end, steps, base=2, dtype=dtype, **options).full_tensor(), theirs)
    shards = dt.linspace(0, 1, 5, device_mesh=MESH_22).to_local().shards
    assert len({shard.data_ptr() for shard in shards}) == len(shards)
    start_value = dt.distribute_tensor(torch.tensor(2.0), MESH_22)
    assert dt.linspace(start_value, 3, steps, requires_grad=True, **options).requires_grad
    with pytest.raises(dt.errors.ArgumentError):
        dt.linspace(0, 1, steps, out=None, **options)


@pytest.mark.parametrize(
    "placements", [[R, R], [Shard(0), R], [Shard(0), Shard(1)], [Shard(1), Shard(1)], [Partial(), Shard(0)]], ids=str
)
def test_rand_and_randn_equal_those_of_one_device(placements: Any) -> None:
    torch.manual_seed(5)
    expected = [torch.rand(5, 6), torch.randn(5, 6)]
    torch.manual_seed(5)
    result = [
        dt.rand(5, 6, device_mesh=MESH_22, placements=placements),
        dt.randn(5, 6, device_mesh=MESH_22, placements=placements),
    ]
    for got, want in zip(result, expected, strict=True):
        assert torch.allclose(got.full_tensor(), want)


def test_like_factories_keep_the_placements_of_their_input() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, [Shard(0, sizes=(1, 4))])
    for result in (
        torch.zeros_like(x),
        torch.ones_like(x),
        x.clone(),
        torch.full_like(x, 2),
        torch.empty_like(x),
        torch.rand_like(x),
    ):
        assert result.placements == x.placements
    torch.manual_seed(1)
    expected = torch.rand_like(value(5, 6))
    torch.manual_seed(1)
    assert torch.equal(torch.rand_like(x).full_tensor(), expected)


# --- prints ---------------------------------------------------------------------------------------------------------
def test_repr_shows_the_local_tensor_of_each_rank() -> None:
    x = dt.distribute_tensor(torch.arange(6).reshape(2, 3), MESH_22, [Shard(0), Shard(1)])
    assert repr(x) == (
        "DTensor(int64[2, 3] on (dp=S(0), tp=S(1))\n  rank 0: [[0, 1]]\n  rank 1: [[2]]\n  rank 2: [[3, 4]]\n  rank 3: [[5]])"
    )
    assert str(x) == repr(x) == f"{x}"


def test_repr_shows_equal_replicas_once() -> None:
    rows = dt.distribute_tensor(torch.arange(3), MESH_22, [Shard(0), R])
    assert repr(rows) == "DTensor(int64[3] on (dp=S(0), tp=R)\n  ranks 0-1: [0, 1]\n  ranks 2-3: [2])"
    columns = dt.distribute_tensor(torch.arange(6).reshape(2, 3), MESH_22, [R, Shard(1)])
    assert repr(columns) == (
        "DTensor(int64[2, 3] on (dp=R, tp=S(1))\n  ranks 0, 2: [[0, 1],\n               [3, 4]]\n  ranks 1, 3: [[2],\n"
        "               [5]])"
    )


def test_repr_shows_different_replicas_separately() -> None:
    drifted = DTensor.from_local(dt.per_rank([torch.ones(1), torch.zeros(1)]), MESH, [R])
    assert repr(drifted) == "DTensor(float32[1] on (0=R)\n  rank 0: [1.]\n  rank 1: [0.])"


def test_repr_shows_each_shard_and_addend_even_if_equal() -> None:
    for placement in (Shard(0), Partial()):
        equal = DTensor.from_local(dt.per_rank([torch.ones(1), torch.ones(1)]), MESH, [placement])
        assert repr(equal).count("\n  rank ") == 2


def test_repr_of_a_large_tensor_shows_one_local_tensor_and_all_local_shapes() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    x = dt.distribute_tensor(torch.arange(90.0 * 50).view(90, 50), mesh, [Shard(0), Shard(0)])
    text = repr(x)
    assert text.count("...") <= 3 + 4  # of one local tensor
    assert text.startswith("DTensor(float32[90, 50] on (0=S(0), 1=S(0))\n  rank 0: [[")
    assert text.endswith("\n  shapes: ranks 0, 2 [23, 50], ranks 1, 3 [22, 50])")
    assert "rank 1:" not in text
    assert len(text) < 800
    small = dt.distribute_tensor(torch.arange(6.0), mesh, [Shard(0), R])
    assert "ranks 0-1: [0., 1., 2.]" in repr(small)
    assert "ranks 2-3: [3., 4., 5.]" in repr(small)
    assert "shapes" not in repr(small)
    equal_replicas = dt.ones(2000, device_mesh=dt.init_device_mesh("cpu", (4,)), placements=[R])
    assert repr(equal_replicas).endswith("shapes: ranks 0-3 [2000])")


def test_repr_shows_requires_grad_and_grad_fn() -> None:
    x = dt.ones(2, device_mesh=MESH, requires_grad=True)
    assert "requires_grad=True" in repr(x)
    assert "grad_fn=<MulBackward0>" in repr(x * 2)


# --- submeshes ------------------------------------------------------------------------------------------------------
def test_a_tensor_on_a_submesh_has_a_copy_for_each_index_of_the_other_mesh_dims() -> None:
    x = dt.distribute_tensor(torch.arange(3.0), MESH_22["tp"], [Shard(0)])
    assert [shard.tolist() for shard in local_tensors(x)] == [[0, 1], [2], [0, 1], [2]]
    assert (x * 2).sum().item() == 6
    assert torch.equal(dt.per_rank([torch.arange(3.0)] * 4).shards[0], x.full_tensor().shards[3])


def test_gradient_on_a_submesh_has_the_placements_of_its_leaf() -> None:
    x = dt.distribute_tensor(value(5, 6), MESH_22["dp"], [Shard(0)]).requires_grad_()
    (x @ dt.distribute_tensor(value(6, 3), MESH_22["dp"], [R])).sum().backward()
    assert x.grad.placements == (Shard(0),)


def test_mm_on_a_mesh_of_arbitrary_ranks_equals_plain_torch() -> None:
    mesh = dt.DeviceMesh("cpu", [5, 2, 7])
    check(torch.mm, value(5, 6), value(6, 7), mesh=mesh, placements=[[Shard(1)], [Shard(0)]])


# --- memory ---------------------------------------------------------------------------------------------------------
def test_a_leaf_is_freed_after_backward_and_del() -> None:
    x = dt.ones(4, device_mesh=MESH, placements=[Shard(0)], requires_grad=True)
    (x * 2).sum().backward()
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


# --- conversions, plain indices and vmap ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "global_value", [torch.arange(5), torch.arange(5.0), torch.arange(5) > 2, torch.arange(5).to(torch.complex64)]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.tensor([x[0], x[4], 1]),
        lambda x: torch.tensor([x.sum(), 2.0]),
        lambda x: torch.tensor((x[1:2], x[4:])),
        lambda x: torch.tensor([list(x), list(x)]),
        lambda x: torch.as_tensor([x.sum()]),
    ],
)
def test_torch_tensor_of_a_list_of_dtensors_is_a_plain_tensor_of_their_values(
    global_value: torch.Tensor, make: Callable[[Any], torch.Tensor]
) -> None:
    expected = make(global_value)
    for placement in (R, Shard(0)):
        result = make(dt.distribute_tensor(global_value, MESH, [placement]))
        assert type(result) is torch.Tensor
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.filterwarnings("ignore:.*in beta.*:UserWarning")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.take(i),
        lambda x, i: x.put(i, x[0, :3]),
        lambda x, i: x.index_add(0, i, x[:3]),
        lambda x, i: x.index_reduce(0, i, x[:3], "prod"),
    ],
)
def test_plain_index_tensors_are_operands_of_indexing_operators(fn: Any) -> None:
    global_value, index = value(5, 6), torch.tensor([4, 0, 2])
    for placement in (R, Shard(0), Shard(1)):
        assert torch.equal(
            fn(dt.distribute_tensor(global_value, MESH, [placement]), index).full_tensor(), fn(global_value, index)
        )


def test_plain_index_tensors_under_vmap_index_a_dtensor_with_implicit_replication() -> None:
    global_value, rows, columns = value(5, 6), torch.arange(4), torch.arange(3)
    x = dt.distribute_tensor(global_value, MESH, [Shard(0)])

    def pick(table: Any) -> Any:
        return torch.vmap(torch.vmap(lambda i, j: table[i, j], (None, 0)), (0, None))(rows, columns)

    with dt.implicit_replication():
        assert torch.equal(pick(x).full_tensor(), pick(global_value))


@pytest.mark.skipif(not hasattr(torch._C, "_get_dtensor_allow_implicit_replication"), reason="torch does not say so")
@pytest.mark.parametrize("table", [Shard(0), Shard(1), Shard(2), R])
@pytest.mark.parametrize("rows", [Shard(0), Shard(1), R])
def test_embedding_under_vmap_accepts_tensors_that_vmap_creates_and_refuses_those_of_the_caller(
    table: dt.Placement, rows: dt.Placement
) -> None:
    weight, indices = value(3, 5, 6), torch.arange(21).reshape(3, 7) % 5
    found = torch.vmap(torch.nn.functional.embedding)(
        dt.distribute_tensor(indices, MESH, [rows]), dt.distribute_tensor(weight, MESH, [table])
    )
    assert torch.equal(found.full_tensor(), torch.vmap(torch.nn.functional.embedding)(indices, weight))
    with pytest.raises(MixedTensorError):  # the function itself creates this plain tensor
        torch.vmap(lambda x: x + torch.ones(6))(dt.distribute_tensor(weight, MESH, [table]))


def test_results_follow_a_change_of_the_default_dtype() -> None:
    x = dt.distribute_tensor(torch.arange(6), dt.DeviceMesh("cpu", 2), [dt.Shard(0)])
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            for y in (x / 2, x * 1.5, x.sin(), x + 0.5):
                assert y.dtype is dtype
                assert y.to_local().dtype is dtype
        finally:
            torch.set_default_dtype(torch.float32)


def test_gradient_of_a_partial_leaf_on_a_mesh_of_one_rank_is_replicated() -> None:
    leaf = dt.distribute_tensor(torch.ones(3), dt.init_device_mesh("cpu", (1,)), [dt.Partial()]).requires_grad_()
    (leaf * 2).sum().backward()
    assert leaf.grad.placements == (dt.Replicate(),)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("shape", [(), (1,)])
def test_backward_of_a_scalar_supports_create_graph_and_raises_as_plain_torch(shape: tuple[int, ...]) -> None:
    x = dt.ones(3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]).requires_grad_()
    loss: Any = (x**3).sum().reshape(shape)
    loss.backward(retain_graph=True, create_graph=True)
    assert torch.equal(x.grad.full_tensor().detach(), torch.full((3,), 3.0))
    (again,) = torch.autograd.grad(x.grad.sum(), x)
    assert torch.equal(again.full_tensor().detach(), torch.full((3,), 6.0))
    x.grad = None
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        x.detach().sum().backward()
    with pytest.raises(RuntimeError, match="scalar"):
        (x * 2).backward()


def test_torch_function_modes_observe_backward_of_a_scalar() -> None:
    observed: list[Any] = []

    class Recorder(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            observed.append(func)
            return func(*args, **(kwargs or {}))

    x = dt.ones(3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]).requires_grad_()
    loss = x.sum()
    with Recorder():
        loss.backward()
    assert torch.Tensor.backward in observed
