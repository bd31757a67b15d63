"""Issues of pytorch/pytorch about making, moving, differentiating, drawing and training DTensors; with issue numbers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from case_lists import (
    S0,
    S1,
    CaseList,
    R,
    assert_full_value,
    distribute_values,
    get_line_mesh,
    get_square_mesh,
    local_tensors_by_rank,
    make_per_rank,
    make_values,
)
from compare_with_one_device import full_value
from torch import nn
from torch.nn import functional as F

import dtensor as dt
from dtensor import DTensor, Partial, Shard
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.testing import check

CASES = CaseList()
report = CASES.report


# --- uneven and nested shards -------------------------------------------------------------------------------------------
@report(103306)
def sharding_and_gathering_an_uneven_dim_keeps_its_size() -> None:
    x = make_values(5, 10)
    moved = distribute_values(x, R).redistribute(placements=[S0]).redistribute(placements=[R])
    assert all(piece.shape == (5, 10) for piece in local_tensors_by_rank(moved).values())
    assert_full_value(moved, x)


@report(144109)
def from_local_of_local_tensors_of_growing_size() -> None:
    whole, sizes = make_values(2, 14), (2, 3, 4, 5)
    local = make_per_rank(lambda rank: whole.split(sizes, 1)[rank].contiguous())
    for options in ({}, {"run_check": True}):
        made = DTensor.from_local(local, get_line_mesh(), [S1], **options)
        assert made.shape == (2, 14)
        assert made.stride() == (14, 1)
        assert_full_value(made, whole)


@report(110762)
def from_local_with_a_smaller_last_local_tensor() -> None:
    whole = make_values(10, 2)
    made = DTensor.from_local(make_per_rank(lambda rank: whole.split((3, 3, 3, 1))[rank]), get_line_mesh(), [S0])
    assert made.size() == (10, 2)


@report(115310)
def full_tensor_of_a_tensor_with_fewer_rows_than_ranks() -> None:
    for rows in (0, 1, 2, 3, 5):
        assert_full_value(distribute_values(make_values(rows, 3), S0), make_values(rows, 3))
        assert_full_value(distribute_values(make_values(rows, 3), S0, S0), make_values(rows, 3))


@report(161368)
def offsets_of_uneven_shards_on_a_2d_mesh() -> None:
    layout = distribute_values(torch.randn(2), S0, S0).layout
    blocks = [(layout.local_offset(c), layout.local_shape(c)) for c in layout.mesh.coordinates]
    assert blocks == [((0,), (1,)), ((1,), (0,)), ((1,), (1,)), ((2,), (0,))]


@report(168134)
def inner_first_nesting_of_five_elements() -> None:
    x = distribute_values(torch.arange(5.0), Shard(0, level=1), Shard(0, level=0))
    pieces = {rank: piece.tolist() for rank, piece in local_tensors_by_rank(x).items()}
    expected = {0: [0.0, 1.0], 1: [3.0], 2: [2.0], 3: [4.0]}
    assert pieces == {rank: expected[rank] for rank in pieces}
    assert_full_value(x, torch.arange(5.0))


@report(163843)
def inner_first_nesting_of_six_elements() -> None:
    x = torch.arange(6.0)
    for placements in ([S0, S0], [Shard(0, level=1), Shard(0, level=0)]):
        made = distribute_values(x, *placements)
        assert_full_value(made, x)
        assert_full_value(made.redistribute(placements=[S0, S0]), x)
        assert_full_value(made.redistribute(placements=[R, S0]) + made, x * 2)


@report(129206)
def full_tensor_of_a_weight_sharded_inner_dim_first() -> None:
    for shape in ((7, 6), (8, 8), (3, 5)):
        w = distribute_values(make_values(*shape), Shard(0, level=1), Shard(0, level=0))
        assert_full_value(w, make_values(*shape))


@report(118836)
def uneven_local_tensors_are_contiguous() -> None:
    for piece in local_tensors_by_rank(distribute_values(make_values(3, 9), S1)).values():
        assert piece.is_contiguous()


@report(172812)
def local_map_over_uneven_shards() -> None:
    doubled = dt.local_map(lambda x: x * 2, out_placements=[S0], in_placements=([S0],))
    x = distribute_values(make_values(5, 3), S0)
    assert doubled(x).shape == (5, 3)
    assert_full_value(doubled(x), make_values(5, 3) * 2)


@report(103106)
def torch_save_and_load_keep_the_value() -> None:
    x = distribute_values(make_values(5, 6), S0, S1)
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert_full_value(torch.load(file, weights_only=False), make_values(5, 6))


# --- gradients ----------------------------------------------------------------------------------------------------------
@report(172932)
def to_local_and_from_local_keep_the_gradient_of_a_partial_sum() -> None:
    x = distribute_values(torch.tensor([1.0, 2.0]), R).requires_grad_()
    y = distribute_values(torch.tensor([1.0, 2.0]), R).requires_grad_()
    direct = x.redistribute(placements=[Partial()]) * 3
    there = y.redistribute(placements=[Partial()])
    back = DTensor.from_local(there.to_local(), get_line_mesh(), [Partial()]) * 3
    for out in (direct, back):
        out.sum().backward()
    assert_full_value(x.grad, torch.tensor([3.0, 3.0]))
    assert_full_value(y.grad, torch.tensor([3.0, 3.0]))


@report(175867)
def from_local_with_a_stated_gradient_placement() -> None:
    pieces = make_per_rank(lambda rank: torch.ones(2))
    leaves = [piece.requires_grad_() for piece in local_tensors_by_rank(pieces).values()]
    local = dt.per_rank(leaves) if len(leaves) > 1 else leaves[0]
    made = DTensor.from_local(local, get_line_mesh(), [R], grad_placements=[Partial()])
    weight = distribute_values(torch.arange(8.0).reshape(4, 2), S0)
    plain_total = (made * weight).sum().full_tensor()
    (plain_total.shards[0] if isinstance(plain_total, dt.PerRank) else plain_total).backward()
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    if len(grads) == 4:  # in one process all terms are here
        assert torch.stack([g for g in grads if g is not None]).sum(0).tolist() == [12.0, 16.0]


@report(107661)
def gradient_of_the_sum_of_a_local_tensor() -> None:
    x = distribute_values(torch.ones(8, 8), S0).requires_grad_()
    x.to_local().sum().backward()
    assert_full_value(x.grad, torch.ones(8, 8))


@report(173865)
def backward_with_an_unused_output() -> None:
    def use(x: torch.Tensor) -> torch.Tensor:
        first, _, third = x.split([2, 2, 1])
        return first.sum() + third.sum()

    check(use, make_values(5, 6), mesh=get_line_mesh(), placements=[[S0]])
    x = distribute_values(make_values(5, 6), S0).requires_grad_()
    largest, _ = x.max(0)
    del _
    largest.sum().backward()
    assert x.grad is not None


@report(118600)
def a_permuted_layer_norm_and_its_gradients() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        out = F.layer_norm(x.permute(0, 2, 1).contiguous(), (4,), y, z).permute(0, 2, 1)
        return torch.matmul(out, x).permute(0, 2, 1)

    check(fn, make_values(4, 4, 4) / 4, make_values(4), make_values(4, seed=1), mesh=get_line_mesh(), placements=[[S1], [R], [R]])


@report(121474)
def gradients_accumulate_in_the_parameters_layout() -> None:
    w = distribute_values(make_values(4, 6) / 9, S0, S1).requires_grad_()
    for seed in range(3):
        (distribute_values(make_values(5, 6, seed=seed), S0, R) @ w.t()).sum().backward()
        assert isinstance(w.grad, DTensor)
        assert w.grad.placements == w.placements
    total = sum(make_values(5, 6, seed=seed).sum(0) for seed in range(3))
    assert_full_value(w.grad, torch.as_tensor(total).expand(4, 6))


# --- random numbers -----------------------------------------------------------------------------------------------------
@report(168058)
def randn_depends_on_the_seed_only() -> None:
    torch.manual_seed(5)
    expected = torch.randn(6, 7)
    for placements in ([S0], [S1], [R], [S0, S1], [S0, S0], [R, S1]):
        torch.manual_seed(5)
        mesh = get_line_mesh() if len(placements) == 1 else get_square_mesh()
        assert_full_value(dt.randn(6, 7, device_mesh=mesh, placements=placements), expected)


@report(146190)
def dropout_and_generator_state_equal_one_device() -> None:
    dropout = nn.Dropout()
    torch.manual_seed(42)
    x = torch.rand(10, 10)
    expected = [dropout(x).sum(), dropout(x).sum(), torch.rand(1)]
    torch.manual_seed(42)
    y = distribute_values(torch.rand(10, 10), S0)
    got = [dropout(y).sum(), dropout(y).sum(), torch.rand(1)]
    assert all(torch.allclose(full_value(own), want) for own, want in zip(got, expected, strict=True))


@report(160482)
def random_operators_advance_the_default_generator() -> None:
    own = torch.Generator().manual_seed(1)
    x = distribute_values(torch.zeros(5, 6), S0)
    x.uniform_(generator=own)
    assert_full_value(x, torch.zeros(5, 6).uniform_(generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    x.normal_()
    assert not torch.equal(state, torch.get_rng_state())


@report(180088)
def truncated_normals_terminate() -> None:
    torch.manual_seed(0)
    x = nn.init.trunc_normal_(distribute_values(torch.zeros(50, 4), S0), std=0.02, a=-0.01, b=0.01)
    torch.manual_seed(0)
    assert_full_value(x, nn.init.trunc_normal_(torch.zeros(50, 4), std=0.02, a=-0.01, b=0.01))


@report(141212)
def normal_in_place_on_a_mesh_of_two_dims() -> None:
    torch.manual_seed(2)
    x = distribute_values(torch.zeros(5, 6), S0, S0).normal_(1.0, 3.0)
    torch.manual_seed(2)
    assert_full_value(x, torch.zeros(5, 6).normal_(1.0, 3.0))


# --- lists, clipping, optimizers ----------------------------------------------------------------------------------------
@report(132016)
def foreach_mul_by_a_scalar_tensor() -> None:
    x = distribute_values(make_values(7, 3), S0)
    for scale in (2.0, torch.tensor(2.0).double()):
        assert_full_value(torch._foreach_mul([x], scale)[0], make_values(7, 3) * 2)
        assert_full_value(torch._foreach_div([x], scale)[0], make_values(7, 3) / 2)
        y = [x.clone()]
        torch._foreach_mul_(y, scale)
        assert_full_value(y[0], make_values(7, 3) * 2)


@report(170367)
def foreach_add_redistributes_a_list_in_one_collective() -> None:
    xs = [distribute_values(make_values(5, 6, seed=k), S0) for k in range(6)]
    ys = [distribute_values(make_values(5, 6, seed=k), S1) for k in range(6)]
    with CommDebugMode() as comm:
        out = torch._foreach_add(xs, ys)
    assert comm.get_total_counts() <= 1
    assert_full_value(out[5], make_values(5, 6, seed=5) * 2)


@report(180346)
def clipping_over_two_meshes() -> None:
    a, b = nn.Parameter(distribute_values(make_values(5, 6), S0)), nn.Parameter(distribute_values(make_values(4, 3), S0, S1))
    a.grad, b.grad = distribute_values(make_values(5, 6, seed=1), S0), distribute_values(make_values(4, 3, seed=2), S0, S1)
    norm = torch.cat([make_values(5, 6, seed=1).flatten(), make_values(4, 3, seed=2).flatten()]).norm()
    total = nn.utils.clip_grad_norm_([a, b], 1.0)
    assert abs(float(total) - norm.item()) < 1e-9
    assert_full_value(a.grad, make_values(5, 6, seed=1) / (norm + 1e-6))
    assert_full_value(b.grad, make_values(4, 3, seed=2) / (norm + 1e-6))


@report(120238)
def clipping_with_foreach_false() -> None:
    p = nn.Parameter(distribute_values(make_values(5, 6), S0))
    p.grad = distribute_values(make_values(5, 6, seed=1), S0)
    nn.utils.clip_grad_norm_([p], 1.0, foreach=False)
    assert_full_value(p.grad, make_values(5, 6, seed=1) / (make_values(5, 6, seed=1).norm() + 1e-6))


def _train_layer(make: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Train two parameters with AdamW for three steps and return their full values; ``make`` distributes them."""
    parameters = [nn.Parameter(make(make_values(5, 6).float())), nn.Parameter(make(make_values(7, 2, seed=1).float()))]
    optimizer = torch.optim.AdamW(parameters, **options)
    for seed in range(3):
        for p in parameters:
            p.grad = make(make_values(*p.shape, seed=seed + 2).float())
        optimizer.step()
    return [full_value(p) for p in parameters]


@report(126670)
def fused_steps_with_a_tensor_as_step_size() -> None:
    for lr in (0.1, torch.tensor(0.1)):
        wanted = _train_layer(torch.clone, lr=lr, fused=True)
        for own, like in zip(_train_layer(lambda x: distribute_values(x, S0), lr=lr, fused=True), wanted, strict=True):
            assert torch.allclose(own, like, atol=1e-5)


@report(124633)
def fused_steps_on_cpu() -> None:
    wanted = _train_layer(torch.clone, lr=0.1, fused=True, amsgrad=True)
    for own, like in zip(
        _train_layer(lambda x: distribute_values(x, S0, S1), lr=0.1, fused=True, amsgrad=True), wanted, strict=True
    ):
        assert torch.allclose(own, like, atol=1e-5)


# --- modules ------------------------------------------------------------------------------------------------------------
class Perceptron(nn.Module):
    """Two projections around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_in, self.act, self.proj_out = nn.Linear(6, 10), nn.GELU("tanh"), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.act(self.proj_in(x)))


@report(144359)
def a_colwise_then_rowwise_mlp_equals_one_device() -> None:
    torch.manual_seed(0)
    model = Perceptron().double()
    x = make_values(3, 5, 6) / 4
    wanted = model(x)
    cut = parallelize_module(copy.deepcopy(model), get_line_mesh(), {"proj_in": ColwiseParallel(), "proj_out": RowwiseParallel()})
    out = cut(make_per_rank(lambda rank: x))
    for piece in local_tensors_by_rank(out).values():
        assert torch.allclose(piece, wanted)


@report(139060)
def distribute_module_replicates_remaining_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    made = dt.distribute_module(copy.deepcopy(model), get_line_mesh())
    assert_full_value(made(distribute_values(torch.ones(8, 8), S0)), model(torch.ones(8, 8)).detach())


@report(160697)
def an_embedding_and_a_linear_share_their_weight() -> None:
    def tied(ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(F.embedding(ids, w), w)

    for where in ([S0], [S1], [R]):
        check(tied, torch.tensor([[1, 3], [0, 6]]), make_values(7, 3) / 9, mesh=get_line_mesh(), placements=[[R], where])


@report(120333)
def attention_over_sharded_heads_does_not_communicate() -> None:
    q = make_values(2, 4, 5, 8) / 9
    x = distribute_values(q, S1)
    with CommDebugMode() as comm:
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert not comm.get_total_counts()
    assert_full_value(out, F.scaled_dot_product_attention(q, q, q, is_causal=True))


@report(167106)
def a_matmul_of_sharded_rows_does_not_communicate() -> None:
    x, w = distribute_values(make_values(8, 16), S0), distribute_values(make_values(16, 4, seed=1), R)
    with CommDebugMode() as comm:
        out = (x @ w).relu().sum(1)
    assert not comm.get_total_counts()
    assert_full_value(out, (make_values(8, 16) @ make_values(16, 4, seed=1)).relu().sum(1))
