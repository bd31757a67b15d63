"""Process cases: programs that give the same results in one process and on four; ``local_tensors_by_rank`` gives the local
tensors.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from case_lists import (
    CaseList,
    assert_full_value,
    assert_raises,
    distribute_values,
    local_tensors_by_rank,
    make_per_rank,
    make_values,
)
from random_programs_runner import compare_program, make_random_case
from torch import nn

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.comm.events import listening
from dtensor.debug import CommDebugMode
from dtensor.errors import LayoutError, MeshError, MixedTensorError, PlacementError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate
from dtensor.rules import rules
from dtensor.testing import check, scatter, verify_rule
from dtensor.testing.placements import get_or_make_mesh
from dtensor.testing.samples import samples_of
from dtensor.watchdog.collective_hooks import get_or_make_log

R = Replicate()
CASES = CaseList()
case = CASES.case


def get_named_square_mesh() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


# --- made and moved ------------------------------------------------------------
@case
def a_matrix_round_trips_under_every_layout() -> None:
    mesh = get_named_square_mesh()
    choices = [R, Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")]
    for x in (make_values(5, 6), make_values(6, 5).t(), make_values(2, 3)):
        for first in choices:
            for second in choices:
                made = scatter(x, mesh, [first, second])
                assert_full_value(made, x)
                assert made.stride() == x.stride()
                assert_full_value(dt.distribute_tensor(x, mesh, [first, second]), x)


@case
def lazy_conjugates_with_an_empty_shard_are_gathered() -> None:
    x = torch.complex(make_values(5, 3), make_values(5, 3) + 1)  # of four ranks the last has nothing
    cut = dt.distribute_tensor(x, dt.init_device_mesh("cpu", (4,)), [Shard(0)])
    assert_full_value(cut.conj(), x.conj().resolve_conj())
    assert_full_value(cut.conj().redistribute(placements=[Shard(1)]), x.conj().resolve_conj())
    assert_full_value(cut.conj().imag, x.conj().imag.resolve_neg())


@case
def distribute_tensor_sends_small_tensors_in_one_collective() -> None:
    given = [
        make_values(5, 6),
        make_values(6, 5).t(),
        make_values(5, 6)[:, :1].expand(5, 6),
        make_values(0, 3),
        make_values(5, 6) > 0,
        make_values(5, 6).half(),
    ]
    given += [torch.complex(make_values(5, 6), make_values(5, 6) + 1).conj(), make_values(200, 15)]
    for x in given:
        _check_sent_from_last_rank(x, 1 if x.numel() < 2000 else 2)
    with mock.patch("dtensor.tensor.distribute.payload_bytes", return_value=-1):  # as large ones do
        for x in given:
            _check_sent_from_last_rank(x, 2)


def _check_sent_from_last_rank(x: torch.Tensor, collectives: int) -> None:
    """Distribute a tensor of the last rank under several placements, and check its values, strides and number of collectives."""
    mesh, processes = get_named_square_mesh(), dist.is_initialized()
    own = x if not processes or dist.get_rank() == 3 else torch.zeros_like(x)
    chain = get_or_make_log(range(4), dist.group.WORLD, "gloo") if processes else None
    for placements in ([R, R], [Shard(0), R], [Shard(1), Shard(0)], [Partial("max"), Shard(1)]):
        if x.is_complex() and placements[0] == Partial("max"):
            continue
        before = chain.count if chain is not None else 0
        with CommDebugMode() as comm:
            made = dt.distribute_tensor(own, mesh, placements, src_data_rank=1)
        if chain is not None:
            assert chain.count - before == collectives
            assert comm.get_comm_counts() == {"broadcast" if placements == [R, R] else "scatter": 1}
        assert_full_value(made, x.resolve_conj())
        for rank, piece in local_tensors_by_rank(made).items():
            wanted = made.layout.local_stride(mesh.coordinates[rank])
            assert all(a == b for a, b, size in zip(piece.stride(), wanted, piece.shape, strict=True) if size > 1)
            assert piece.untyped_storage().nbytes() == piece.numel() * piece.dtype.itemsize


@case
def non_contiguous_tensors_keep_their_strides_on_every_rank() -> None:
    for placements in ([R, R], [Shard(0), R], [Shard(1), Shard(0)], [R, Shard(1)]):
        made = dt.distribute_tensor(make_values(6, 5).t(), get_named_square_mesh(), placements)
        for rank, piece in local_tensors_by_rank(made).items():
            assert piece.stride() == made.layout.local_stride(made.device_mesh.coordinates[rank]), placements
        assert_full_value(made.t().contiguous().view(-1), make_values(6, 5).reshape(-1))


@case
def distribute_tensor_uses_the_values_of_the_source_rank() -> None:
    mesh = get_or_make_mesh((4,))
    for source in (0, 3):
        for placements in ([R], [Shard(0)], [Shard(1)], [Partial()]):
            made = dt.distribute_tensor(
                make_per_rank(lambda rank: make_values(5, 6, seed=rank)), mesh, placements, src_data_rank=source
            )
            assert_full_value(made, make_values(5, 6, seed=source))


@case
def tensors_without_elements_are_distributed() -> None:
    for placements in ([R], [Shard(0)], [Shard(1)], [Partial()]):
        for shape in ((0, 4), (4, 0)):
            assert_full_value(
                dt.distribute_tensor(torch.ones(shape), dt.init_device_mesh("cpu", (4,)), placements), torch.ones(shape)
            )


@case
def without_src_data_rank_each_rank_shards_its_own_tensor() -> None:
    made = dt.distribute_tensor(
        make_per_rank(lambda rank: torch.full((4,), float(rank))), get_or_make_mesh((4,)), [Shard(0)], src_data_rank=None
    )
    assert_full_value(made, torch.arange(4.0))


@case
def uneven_local_tensors_give_the_global_shape() -> None:
    sizes = (3, 0, 1, 2)
    whole = make_values(6, 5)
    made = DTensor.from_local(make_per_rank(lambda rank: whole.split(sizes)[rank]), get_or_make_mesh((4,)), [Shard(0)])
    assert made.placements == (Shard(0, sizes=sizes),)
    assert_full_value(made, whole)
    assert_full_value((made * 2).sum(0), whole.sum(0) * 2)


@case
def from_local_of_mismatched_tensors_raises_on_every_rank_with_the_rank() -> None:
    mesh = get_or_make_mesh((4,))
    odd = make_per_rank(lambda rank: torch.ones(2, 4 if rank == 2 else 3))
    assert_raises(LayoutError, "rank 2", lambda: DTensor.from_local(odd, mesh, [Shard(0)]))
    assert_raises(LayoutError, "rank 2", lambda: DTensor.from_local(odd, mesh, [R], run_check=True))
    other = make_per_rank(lambda rank: torch.full((3,), float(rank == 1)))
    assert_raises(
        LayoutError, "values of rank 1 differ from those of", lambda: DTensor.from_local(other, mesh, [R], run_check=True)
    )
    dtypes = make_per_rank(lambda rank: torch.ones(3, dtype=torch.float64 if rank == 3 else torch.float32))
    assert_raises(
        LayoutError,
        r"torch.float64.* on rank 3, torch.float32.* on rank 0",
        lambda: DTensor.from_local(dtypes, mesh, [Shard(0)], run_check=True),
    )
    flat = make_per_rank(lambda rank: torch.ones(2) if rank == 1 else torch.ones(2, 3))
    assert_raises(
        LayoutError, "different numbers of dims", lambda: DTensor.from_local(flat, dt.init_device_mesh("cpu", (4,)), [Shard(1)])
    )
    short = make_per_rank(lambda rank: torch.ones(2 if rank else 1))
    assert_raises(
        LayoutError,
        "rank 0",
        lambda: DTensor.from_local(short, dt.init_device_mesh("cpu", (4,)), [Shard(0)], shape=(8,), stride=(1,), run_check=True),
    )


@case
def different_arguments_raise_on_every_rank_and_the_next_call_works() -> None:
    if not dist.is_initialized():
        return
    mesh, odd = get_or_make_mesh((4,)), dist.get_rank() == 2
    whole = torch.ones(4, 3)
    for make in (
        lambda: dt.distribute_tensor(torch.ones(3, 4) if odd else whole, mesh, [R]),
        lambda: dt.distribute_tensor(torch.ones(4, 3, dtype=torch.int32) if odd else whole, mesh, [R]),
        lambda: dt.distribute_tensor(torch.ones(3) if odd else whole, mesh, [Shard(0)]),
        lambda: dt.distribute_tensor(whole, mesh, [Shard(0) if odd else R]),
        lambda: dt.distribute_tensor(whole, mesh, [Shard(2 if odd else 0)]),
        lambda: dt.distribute_tensor(whole, mesh, [R], src_data_rank=int(odd)),
        lambda: dt.distribute_tensor(None if odd else whole, mesh, [R]),
        lambda: DTensor.from_local(torch.ones(4, 3, dtype=torch.int32) if odd else whole, mesh, [Shard(0)]),
        lambda: DTensor.from_local(whole, mesh, [Shard(2 if odd else 0)]),
    ):
        assert_raises(LayoutError, "on rank 2, .* on rank 0; pass the same", make)
    with pytest.raises(PlacementError, match="out of range"):  # wrong, but alike
        dt.distribute_tensor(whole, mesh, [Shard(2)])
    assert_full_value(dt.distribute_tensor(whole, mesh, [Shard(0)]), whole)


@case
def distribute_tensor_uses_the_strides_of_the_source_rank() -> None:
    if dist.is_initialized():
        mine = make_values(6, 5).t() if dist.get_rank() == 0 else torch.empty(5, 6, dtype=torch.float64)
        x = dt.distribute_tensor(mine, get_or_make_mesh((4,)), [Shard(0)])
        assert x.stride() == (1, 5)
        assert_full_value(x, make_values(6, 5).t())
        assert x.t().view(-1).shape == (30,)


@case
def local_tensors_of_one_column_do_not_decide_the_strides() -> None:
    """A local tensor of one column is contiguous with any stride; all ranks must choose the same stride."""
    whole = make_values(5, 3)
    pieces = make_per_rank(
        lambda rank: whole.chunk(4)[rank].t().contiguous() if rank < 3 else torch.empty(3, 0, dtype=whole.dtype)
    )
    for placements in ([Shard(1)], [Shard(1, sizes=(2, 2, 1, 0))]):
        x = DTensor.from_local(pieces, get_or_make_mesh((4,)), placements)
        assert x.stride() == (5, 1)
        assert_full_value(x.view(-1), whole.t().reshape(-1))


@case
def synchronous_and_asynchronous_redistribution_keep_values() -> None:
    x = dt.distribute_tensor(make_values(5, 6), get_named_square_mesh(), [Shard(0), Shard(1)])
    for placements in (
        [Shard(1), Shard(0)],
        [Shard(0), Shard(0)],
        [Shard(0, level=1), Shard(0, level=0)],
        [R, Shard(1)],
        [Partial(), R],
    ):
        assert_full_value(x.redistribute(placements=placements), make_values(5, 6))
        assert_full_value(x.redistribute(placements=placements, async_op=True) * 2, make_values(5, 6) * 2)


@case
def shards_of_one_element_with_any_stride_keep_values() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.complex64):
        x = make_values(7, dtype=dtype)
        y = dt.distribute_tensor(x, mesh, [Shard(0, sizes=(1, 3, 2, 1))])[::2]
        assert_full_value(y, x[::2])
        assert_full_value(y.redistribute(placements=[Shard(0)]), x[::2])
        assert_full_value(torch.cat([y.clone(), y]), torch.cat([x[::2], x[::2]]))
        assert_full_value(torch.cat([dt.distribute_tensor(x, mesh, [Shard(0)]), y]), torch.cat([x, x[::2]]))


@case
def item_and_tolist_give_global_values() -> None:
    x = dt.distribute_tensor(make_values(5, 6), get_named_square_mesh(), [Shard(0), Partial()])
    assert x.sum().item() == make_values(5, 6).sum().item()
    assert x.tolist() == make_values(5, 6).tolist()
    assert bool((x > 100).any()) is False
    assert x[3, 4].item() == make_values(5, 6)[3, 4].item()


@case
def experts_run_on_the_ranks_that_own_them_without_communication() -> None:
    mesh, ends = get_named_square_mesh(), torch.tensor([2, 2, 6], dtype=torch.int32)
    plain = [make_values(6, 8).float(), make_values(3, 8, 16).float() / 100, make_values(3, 8, 4).float() / 100]
    given = [dt.distribute_tensor(x, mesh, [R, p]).requires_grad_() for x, p in zip(plain, (R, Shard(0), Shard(0)), strict=True)]
    plain = [x.requires_grad_() for x in plain]

    def expert(x: Any, up: Any, down: Any, ends: Any) -> Any:
        gate, h = nn.functional.grouped_mm(x, up, offs=ends).chunk(2, dim=-1)
        return nn.functional.grouped_mm(torch.exp(-gate) * h, down, offs=ends)

    whole = dt.distribute_tensor(ends, mesh, [R, R])
    with CommDebugMode() as comm:
        made = expert(*given, whole)
    assert comm.get_total_counts() == 0
    expected = expert(*plain, ends)
    torch.testing.assert_close(made.full_tensor(), expected, rtol=1e-4, atol=1e-4)
    (made * made).sum().backward()
    (expected * expected).sum().backward()
    for own, other in zip(given, plain, strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)


# --- differentiated and written to ------------------------------------------------------------
@case
def a_plain_gradient_of_a_leaf_is_copied_and_placed_as_the_leaf() -> None:
    for where in ([R, R], [Shard(0), R], [Shard(1), Shard(0)], [Shard(0), Partial()]):
        x = dt.distribute_tensor(make_values(5, 6), get_named_square_mesh(), where).requires_grad_()
        given = make_values(5, 6, seed=1)
        x.backward(given)
        given.zero_()
        assert_full_value(x.grad, make_values(5, 6, seed=1))
        assert x.grad.placements == tuple(R if isinstance(p, Partial) else p for p in where)
        x.grad = None
        torch.sgn(x).sum().backward()  # torch's zeros without memory, which can be written to here
        x.grad.add_(1)
        assert_full_value(x.grad, torch.ones(5, 6, dtype=torch.float64))


@case
def layer_values_and_gradients_equal_one_device() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(x @ w.t() + b)
        return torch.log_softmax(hidden, -1).square().mean()

    for where in ([R, Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        check(
            layer,
            make_values(5, 6),
            make_values(7, 6, seed=1) / 9,
            make_values(7, seed=2),
            mesh=get_named_square_mesh(),
            placements=[[Shard(0), R], where, [R, Shard(0)]],
        )


@case
def writes_through_views() -> None:
    def write(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone()
        row, column = y[2], y[:, 1:4]
        y[1:3] = 7
        column.mul_(2)
        row.add_(1)
        y.t()[0].zero_()
        return [y, row, column]

    for where in ([Shard(0), R], [Shard(0), Shard(1)], [R, Partial()]):
        check(write, make_values(5, 6), mesh=get_named_square_mesh(), placements=[where])


@case
def gradients_to_local_tensors_of_from_local() -> None:
    for placements, share in (([R], 1.0), ([Partial()], 1.0), ([Partial("avg")], 0.25), ([Shard(0)], 1.0)):
        leaves = make_per_rank(lambda rank: torch.ones(2, dtype=torch.float64))
        pieces = [piece.requires_grad_() for piece in local_tensors_by_rank(leaves).values()]
        local = dt.per_rank(pieces) if len(pieces) > 1 else pieces[0]
        total = (DTensor.from_local(local, get_or_make_mesh((4,)), placements) * 3).sum().full_tensor()
        (total.shards[0] if isinstance(total, dt.PerRank) else total).backward()
        for piece in pieces:
            assert piece.grad.tolist() == [3 * share] * 2, placements


@case
def to_local_grads_that_differ_are_summed_with_partial_grad_placements() -> None:
    x = dt.distribute_tensor(torch.ones(3), get_or_make_mesh((4,)), [R]).requires_grad_()
    weights = make_per_rank(lambda rank: torch.tensor(10.0**rank))
    (x.to_local(grad_placements=[Partial()]) * weights).sum().backward()
    assert_full_value(x.grad, torch.full((3,), 1111.0))
    assert x.grad.placements == (R,)


@case
def functions_of_map_ranks_have_separate_gradients_and_generators() -> None:
    mesh, w = get_or_make_mesh((4,)), torch.ones(3, requires_grad=True)
    dt.map_ranks(lambda at, x: (x * w).sum(), make_per_rank(lambda rank: torch.arange(3.0)), mesh=mesh).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [0.0, 1.0, 2.0]
    torch.manual_seed(5)
    expected = torch.rand(2), torch.rand(1)
    torch.manual_seed(5)
    for drawn in local_tensors_by_rank(dt.map_ranks(lambda at: torch.rand(2), mesh=mesh)).values():
        assert torch.equal(drawn, expected[0])
    assert torch.equal(torch.rand(1), expected[1])


DIFFERING = r"the gradient of a tensor of shape \(4,\) that all ranks have differs between ranks"


@case
def full_tensor_grads_that_differ_are_summed_with_partial_grad_placements() -> None:
    weights = make_per_rank(lambda rank: torch.full((4,), 10.0**rank))
    for placements in ([Shard(0)], [R]):
        x = dt.distribute_tensor(torch.ones(4), get_or_make_mesh((4,)), placements).requires_grad_()
        (x.full_tensor(grad_placements=[Partial()]) * weights).sum().backward()
        assert_full_value(x.grad, torch.full((4,), 1111.0))
        x.full_tensor(grad_placements=[Partial()]).sum().backward()
        assert_full_value(x.grad, torch.full((4,), 1115.0))


@case
def gradients_of_replicated_tensors_that_differ_between_ranks_raise() -> None:
    weights = make_per_rank(lambda rank: torch.full((4,), 1.0 + rank))
    many = make_per_rank(lambda rank: torch.ones(1 << 17) * (1 + rank % 2))
    multiply = dt.local_map(torch.mul, [Shard(0)])
    uses = (
        lambda x: x.to_local() * weights,
        lambda x: x.full_tensor() * weights,
        lambda x: multiply(x, DTensor.from_local(weights, get_or_make_mesh((4,)), [Shard(0)], shape=(16,))).to_local(),
    )
    for use in uses:
        x = dt.distribute_tensor(torch.ones(4), get_or_make_mesh((4,)), [R]).requires_grad_()
        assert_raises(LayoutError, DIFFERING, lambda: use(x).sum().backward())  # noqa: B023 - called at once
    x = dt.distribute_tensor(torch.ones(1 << 17), get_or_make_mesh((4,)), [R]).requires_grad_()
    assert_raises(LayoutError, "differs between ranks", lambda: (x.to_local() * many).sum().backward())
    x = dt.distribute_tensor(torch.ones(6, 4), get_or_make_mesh((2, 2)), [Shard(0), R]).requires_grad_()
    other = make_per_rank(
        lambda rank: torch.ones(3, 4) * (2 if rank == 3 else 1)
    )  # one group of replicas agrees, the other does not
    assert_raises(LayoutError, r"of shape \(3, 4\)", lambda: (x.to_local() * other).sum().backward())


@case
def gradients_equal_on_all_ranks_are_accepted() -> None:
    noise = make_per_rank(lambda rank: torch.full((4,), 1.0 + 1e-6 * rank))  # as by other orders of summation
    many = make_per_rank(lambda rank: torch.ones(3 << 16) * (1 + 1e-6 * rank))
    for values in (noise, many):
        x = dt.distribute_tensor(torch.ones(values.shape), get_or_make_mesh((4,)), [R]).requires_grad_()
        for _ in range(2):
            (x.to_local() * values).sum().backward()
            (x.full_tensor() * values.sign()).sum().backward()
    x = dt.distribute_tensor(torch.ones(4), get_or_make_mesh((4,)), [Shard(0)]).requires_grad_()
    (x.to_local() * make_per_rank(lambda rank: torch.tensor([1.0 + rank]))).sum().backward()
    assert_full_value(x.grad, torch.arange(1.0, 5.0))


# --- drawn ------------------------------------------------------------
@case
def random_numbers_are_those_of_one_device() -> None:
    torch.manual_seed(11)
    expected = [torch.randn(5, 6), torch.rand(5, 6), torch.nn.functional.dropout(torch.ones(5, 6))]
    for placements in ([R, R], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        torch.manual_seed(11)
        ones = dt.ones(5, 6, device_mesh=get_named_square_mesh(), placements=placements)
        made = [
            dt.randn(5, 6, device_mesh=get_named_square_mesh(), placements=placements),
            torch.rand_like(ones),
            torch.nn.functional.dropout(ones),
        ]
        for got, want in zip(made, expected, strict=True):
            assert_full_value(got, want)


# --- modules, files ------------------------------------------------------------
@case
def a_module_trains_as_on_one_device() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).double()

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            where = [R, Shard(0)] if name == "0" else [R, Shard(1)]
            module.weight = nn.Parameter(dt.distribute_tensor(module.weight.detach(), mesh, where))

    plain, distributed = build(), dt.distribute_module(build(), get_named_square_mesh(), shard)
    steps = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, distributed)]
    for k in range(3):
        x = make_values(5, 6, seed=k)
        losses = [
            m(batch).square().mean()
            for m, batch in ((plain, x), (distributed, dt.distribute_tensor(x, get_named_square_mesh(), [Shard(0), R])))
        ]
        for loss, step in zip(losses, steps, strict=True):
            step.zero_grad()
            loss.backward()
            step.step()
        assert abs(losses[0].item() - losses[1].item()) < 1e-9
    for p, q in zip(plain.parameters(), distributed.parameters(), strict=True):
        assert_full_value(q.detach(), p.detach())


@case
def hsdp_all_reduce_overlaps_with_backward() -> None:
    torch.manual_seed(0)
    plain, mesh, x = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double(), get_named_square_mesh(), make_values(8, 6)
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trail: list[tuple[str, bool]] = []

    def listen(event: Any) -> Any:
        def around(fn: Callable[[], Any], sent: Any = None) -> Any:
            trail.append((event.kind, sent is not None))
            return fn()

        return around

    with listening(listen):
        model(dt.distribute_tensor(x, mesh, [Shard(0), Shard(0)])).square().sum().backward()
    plain(x).square().sum().backward()
    for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert_full_value(own.grad, wanted.grad)
    assert trail.count(("all_reduce", True)) >= len(model)
    if mesh.kind == "process_group":  # in one process a collective has ended when it has begun
        begun, ended = trail.index(("all_reduce", True)), trail.index(("all_reduce", False))
        assert ("reduce_scatter", True) in trail[begun:ended], trail


@case
def deepcopy_pickle_and_torch_save_keep_values_and_placements() -> None:
    x = dt.distribute_tensor(make_values(5, 6), get_named_square_mesh(), [Shard(0), Shard(0)]).requires_grad_()
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert other.placements == x.placements
        assert other.requires_grad
        assert_full_value(other.detach(), make_values(5, 6))
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    assert_full_value(torch.load(file, weights_only=True)["x"].detach() + x.detach(), make_values(5, 6) * 2)


@case
def views_stay_views_after_their_base_is_transposed_in_place() -> None:
    for placements in ([Shard(0), Shard(0)], [Shard(1), R], [Partial(), Shard(1)]):
        x, plain = scatter(make_values(5, 6), get_named_square_mesh(), placements), make_values(5, 6)
        for t in (x, plain):
            row, flat, column = t[2], t.view(-1), t[:, 3]
            t.t_()
            t.mul_(2)
            row.add_(1)
            flat[3:9].zero_()
            column.unsqueeze_(0)[0, 1:].mul_(3)
            t[1:].fill_diagonal_(7)
            t.squeeze_().resize_(5, 6)
        assert_full_value(x, plain)


# --- meshes ------------------------------------------------------------
@case
def submeshes_communicate_within_their_groups() -> None:
    for name, groups in (("tp", ((0, 1), (2, 3))), ("dp", ((0, 2), (1, 3)))):
        local = make_per_rank(lambda rank: torch.full((2,), float(rank + 1)))
        total = DTensor.from_local(local, get_named_square_mesh()[name], [Partial()]).full_tensor()
        for rank, piece in local_tensors_by_rank(total).items():
            (group,) = (g for g in groups if rank in g)
            assert piece.tolist() == [float(sum(r + 1 for r in group))] * 2


@case
def operations_on_a_mesh_of_some_ranks_run_on_all_ranks() -> None:
    mesh = dt.DeviceMesh("cpu", [2, 0])
    x = dt.distribute_tensor(make_values(5, 6), mesh, [Shard(0)])
    y = (x * 2 + 1).sum(0)
    if dist.is_initialized() and dist.get_rank() in (1, 3):
        assert x.to_local().numel() == 0
        assert y.shape == (6,)
        assert x.equal(x)
    else:
        assert_full_value(y, (make_values(5, 6) * 2 + 1).sum(0))


@case
def a_rank_outside_a_mesh_has_empty_local_tensors() -> None:
    local = torch.ones(3, 4, requires_grad=True)
    x = DTensor.from_local(local, dt.DeviceMesh("cpu", [0, 2]), [Shard(0)])
    total = (x + 2).sum()
    parts = [
        x,
        x.redistribute(placements=[R]),
        x.redistribute(placements=[R]).redistribute(placements=[Shard(1)]),
        *x.split(2, dim=1),
    ]
    total.backward()
    assert local.grad is not None
    if dist.is_initialized() and dist.get_rank() in (1, 3):
        assert [tuple(part.to_local().shape) for part in parts] == [(0, 4), (0, 4), (0, 4), (0, 2), (0, 2)]
        assert total.to_local().shape == ()
        assert total.to_local() == 0
        assert local.grad.tolist() == torch.zeros(3, 4).tolist()
    else:
        assert total.shape == ()
        assert_full_value(total.detach(), torch.tensor(72.0))
        assert local.grad.unique().tolist() == [1.0 if dist.is_initialized() else 2.0]


@case
def training_calls_run_on_ranks_outside_a_mesh() -> None:
    """Check that forward, backward, clipping and steps make the same calls on every rank; local tensors outside are empty."""
    mesh, outside = dt.DeviceMesh("cpu", [0, 2]), dist.is_initialized() and dist.get_rank() in (1, 3)
    w = nn.Parameter(dt.distribute_tensor(make_values(6, 5), mesh, [Shard(0)]))
    b = nn.Parameter(dt.distribute_tensor(make_values(6), mesh, [R]))
    optimizer = torch.optim.AdamW([w, b], lr=0.1)
    for _ in range(2):
        x = dt.distribute_tensor(make_values(4, 5), mesh, [R])
        loss = nn.functional.mse_loss(nn.functional.linear(x, w, b), dt.distribute_tensor(make_values(4, 6), mesh, [R]))
        loss.backward()
        norm = nn.utils.clip_grad_norm_([w, b], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    numbers = {"loss": loss, "norm": norm, "count": (x > 0).sum(), "any": x.any(), "first": x[0, 0], "index": x.argmax()}
    for name, number in numbers.items():
        own = number.to_local()
        pieces = getattr(own, "shards", (own,))
        assert all(piece.shape == () and piece.dtype == number.dtype for piece in pieces), name
        assert number.numel() == 1
        assert number.full_tensor().shape == ()
        assert not outside or not own.detach(), name
        assert repr(number)
    for tensor in (x, w.detach(), w.grad, x.sum(0), x.t(), x[1:3], x.unsqueeze(0)):
        assert tensor.numel() == tensor.shape.numel()
        if outside:
            assert tensor.to_local().shape == (0, *tensor.shape[1:])
            assert tensor.full_tensor().shape == (0, *tensor.shape[1:])
            assert tensor.to_local().sum(-1).ndim == tensor.ndim - 1
    assert torch.isfinite(w.detach().to_local()).all()


@case
def data_dependent_values_raise_on_ranks_outside_a_mesh() -> None:
    x = dt.distribute_tensor(make_values(5), dt.DeviceMesh("cpu", [2, 0]), [Shard(0)])
    for read, expected in (
        (lambda: x.nonzero().shape, make_values(5).nonzero().shape),
        (lambda: x[x > 0].shape, make_values(5)[make_values(5) > 0].shape),
        (lambda: x.sum().item(), make_values(5).sum().item()),
    ):
        if dist.is_initialized() and dist.get_rank() in (1, 3):
            assert_raises(NotImplementedError, "not part of DeviceMesh", read)
        else:
            assert read() == expected


@case
def norms_along_a_dim_of_one_column() -> None:
    whole = make_values(5, 1)
    for mesh, placements in ((get_or_make_mesh((4,)), [Shard(0)]), (get_named_square_mesh(), [Shard(0), R])):
        x = dt.distribute_tensor(whole, mesh, placements)
        assert_full_value(torch.linalg.vector_norm(x, dim=0), torch.linalg.vector_norm(whole, dim=0))
        assert_full_value(torch.renorm(x, 2, 1, 1.0), torch.renorm(whole, 2, 1, 1.0))


@case
def in_place_reshapes_change_shapes_on_ranks_outside_a_mesh() -> None:
    mesh = dt.DeviceMesh("cpu", [2, 0])
    x = dt.distribute_tensor(make_values(1, 5), mesh, [Shard(1)])
    w = dt.distribute_tensor(make_values(4, 5), mesh, [Shard(1)])
    assert nn.functional.linear(x[0], w).shape == (4,)
    for change, shape in (
        (lambda x: x.unsqueeze_(0), (1, 1, 5)),
        (lambda x: x.squeeze_(0), (5,)),
        (lambda x: x.t_(), (5, 1)),
        (lambda x: x.transpose_(0, 1), (5, 1)),
        (lambda x: torch.add(w, 1, out=x), (4, 5)),
    ):
        changed = x.clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of an output that is resized
            change(changed)
        assert changed.shape == shape
        expected = make_values(1, 5).reshape(shape) if shape != (4, 5) else make_values(4, 5) + 1
        assert_full_value(changed.redistribute(get_or_make_mesh((4,)), [R]), expected)


@case
def functional_collectives_of_torch_accept_a_mesh() -> None:
    if dist.is_initialized():
        rank = torch.tensor([float(dist.get_rank())])
        assert functional.all_reduce(rank, "sum", get_or_make_mesh((4,))).tolist() == [6.0]
        assert functional.all_reduce(rank, "max", (get_named_square_mesh(), 0)).tolist() == [rank.item() % 2 + 2]
        assert functional.all_reduce(rank, "max", get_named_square_mesh()["tp"]).tolist() == [rank.item() // 2 * 2 + 1]


@case
def functional_collectives_of_torch_are_counted() -> None:
    if dist.is_initialized():
        with CommDebugMode() as outer:
            with CommDebugMode() as comm, torch.inference_mode():
                functional.all_reduce(torch.ones(3), "sum", get_or_make_mesh((4,))).tolist()
                functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, (get_named_square_mesh(), 1)).tolist()
            functional.all_reduce(torch.ones(3), "sum", get_or_make_mesh((4,))).tolist()
        functional.all_reduce(torch.ones(3), "sum", get_or_make_mesh((4,))).tolist()
        assert comm.get_comm_counts() == {"all_reduce": 1, "reduce_scatter": 1}
        assert comm.get_comm_bytes() == {"all_reduce": 18, "reduce_scatter": 8}
        assert outer.get_total_counts() == 3


@case
def data_parallelism_without_a_mesh_uses_all_ranks() -> None:
    if not dist.is_initialized():
        assert_raises(MeshError, "no device mesh", lambda: fully_shard(nn.Linear(3, 4)))
        return
    torch.manual_seed(dist.get_rank())
    cut, copied = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), replicate(nn.Linear(3, 4))
    for module in (*cut, cut):
        fully_shard(module)
    batch = torch.full((2, 3), float(dist.get_rank()))
    cut(batch).sum().backward()
    copied(batch).sum().backward()
    assert cut[0].weight.device_mesh == cut[1].bias.device_mesh
    assert cut[0].weight.placements == (Shard(0),)
    assert copied.weight.grad.placements == (R,)
    assert_full_value(copied.weight.grad, torch.full((4, 3), 3.0))


@case
def torch_func_transforms_of_parallel_modules_equal_one_device() -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x, t = make_values(3, 5), make_values(3, 5, seed=1)
    wanted = [*torch.func.jvp(alone, (x,), (t,)), *torch.func.vjp(alone, x)[1](x[:, :3]), torch.func.vmap(alone)(x)]
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ways: list[Callable[[Any], Any]] = [
        lambda m: fully_shard(m, mesh=get_named_square_mesh()),
        lambda m: replicate(m, get_named_square_mesh()),
        lambda m: fully_shard(parallelize_module(m, get_named_square_mesh()["tp"], plan), mesh=get_named_square_mesh()["dp"]),
    ]
    for way in ways:
        model = way(copy.deepcopy(alone))
        given, tangent, cotangent = (make_per_rank(lambda rank, v=v: v.clone()) for v in (x, t, x[:, :3]))
        found = [*torch.func.jvp(model, (given,), (tangent,)), *torch.func.vjp(model, given)[1](cotangent)]
        found.append(torch.func.vmap(model)(given))
        for ours, theirs in zip(found, wanted, strict=False):
            assert all(torch.allclose(piece, theirs) for piece in local_tensors_by_rank(ours).values())
    leaf, batch = (
        dt.distribute_tensor(x, get_named_square_mesh(), [Shard(0), Shard(1)]).requires_grad_(),
        make_values(4, 3, 5, seed=2),
    )
    assert_full_value(torch.autograd.grad(leaf.full_tensor(), leaf, batch, is_grads_batched=True)[0], batch)
    inside = torch.func.grad(
        lambda x: (
            x
            * distribute_values(t * 1, Shard(1), R, mesh=get_named_square_mesh())
            * dt.ones(5, device_mesh=get_named_square_mesh(), dtype=x.dtype)
        ).sum()
    )
    assert_full_value(inside(leaf.detach()), t)


@case
def rows_of_dtypes_without_fill_are_indexed() -> None:
    rows = torch.tensor([4, 0, 6, 4, 1])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64):
        whole = make_values(7, 3).abs().to(dtype)
        for where in (Shard(0), Shard(1)):
            found = distribute_values(whole, where)[rows].full_tensor()
            assert torch.equal(found.view(torch.uint8), whole[rows].view(torch.uint8))


@case
def groups_that_do_not_match_a_mesh_raise() -> None:
    if dist.is_initialized():
        world = dist.group.WORLD
        assert_raises(MeshError, "Invalid mesh", lambda: dt.DeviceMesh.from_group(world, "cpu", [0, 1]))
        assert_raises(MeshError, "one group per mesh dim", lambda: dt.DeviceMesh.from_group(world, "cpu", [[0, 1], [2, 3]]))


@case
def a_mesh_smaller_than_the_world_has_the_first_ranks() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    assert mesh.mesh.tolist() == [0, 1]
    with CommDebugMode() as comm:
        x = dt.distribute_tensor(make_values(5), mesh, [Shard(0)])
    if dist.is_initialized() and dist.get_rank() > 1:
        assert x.to_local().shape == (0,)
    else:
        assert_full_value(x, make_values(5))
        assert comm.get_comm_counts() == ({"scatter": 1} if dist.is_initialized() else {})
    if dist.is_initialized():
        assert_raises(MeshError, "the world has 4 ranks", lambda: dt.init_device_mesh("cpu", (8,)))


@case
def meta_local_tensors_give_the_global_shape() -> None:
    x = DTensor.from_local(torch.empty(2, 3, device="meta"), get_or_make_mesh((4,)), [Shard(0)])
    assert x.shape == (8, 3)
    made = torch.empty_like(x, device="cpu").fill_(2.0)
    assert_full_value(made, torch.full((8, 3), 2.0))


@case
def errors_are_raised_by_every_rank() -> None:
    x = dt.distribute_tensor(make_values(5, 6), get_named_square_mesh(), [Shard(0), R])
    other = dt.distribute_tensor(make_values(5, 6), get_or_make_mesh((4,)), [Shard(0)])
    assert_raises(MeshError, "different meshes", lambda: x + other)
    assert_raises(MixedTensorError, "implicit_replication", lambda: x + make_values(5, 6))
    assert_raises(PlacementError, "out of range", lambda: x.redistribute(placements=[Shard(2), R]))
    assert_raises(RuntimeError, "must match the size", lambda: x + x[:, :4])
    gradient = make_values(5, 6).requires_grad_(not dist.is_initialized() or dist.get_rank() != 1)
    if dist.is_initialized():
        assert_raises(
            ValueError,
            "requiring gradients",
            lambda: DTensor.from_local(gradient, get_or_make_mesh((4,)), [Shard(0)], run_check=True),
        )
    assert_raises(RuntimeError, "7, 7", lambda: x.view(7, 7))


# --- at random ------------------------------------------------------------
@case
def random_programs() -> None:
    for seed in range(400, 440):
        program, mesh_shape, placements = make_random_case(seed, meshes=((4,), (2, 2)))
        outcome = compare_program(program, mesh_shape, placements)
        assert not outcome.problems, f"seed {seed} on {mesh_shape}\n{program}\n{placements}\n{outcome.problems}"


@CASES.on_processes
def rules_of_every_kind() -> None:
    """Verify some rows of rules of every kind; in one process ``rules/test_verify_rules.py`` verifies all rules and more rows."""
    for name in [name for name in sorted(rules()) if samples_of(name)][::3]:
        report = verify_rule(name, meshes=((4,), (2, 2)), budget=2, stop_after=1)
        assert not report.wrong, str(report)
