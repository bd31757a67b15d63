"""Communicator cases: requirements of every communicator, as functions of a mesh that run in one process and on every gloo rank.

A case makes each member's data from its number, runs a collective and checks, at each member held here, against the same
thing computed directly from the data of all members.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from case_lists import CaseList
from torch import Tensor

import dtensor as dt
from dtensor.comm import Communicator, Pending, events
from dtensor.comm.map_ranks import communicator_of
from dtensor.comm.processes import torch_backends
from dtensor.errors import LayoutError, MeshError, UnsupportedOperationError
from dtensor.mesh import process_groups
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Monoid

Dims = tuple[int, ...]
OPS = ("sum", "avg", "max", "min", "product")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
CASES = CaseList()
case = CASES.case
DTYPES = (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128, torch.complex32)


def make_member_values(member: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, salt: int = 0) -> Tensor:
    """Return random values of one member of a mesh, equal in every process."""
    generator = torch.Generator().manual_seed(1000 * salt + member)
    if dtype.is_complex:
        return torch.randn(*shape, 2, generator=generator, dtype=torch.float64).to(torch.float32)[..., 0].to(dtype) * (1 + 2j)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 120, shape, generator=generator).to(dtype)


def assert_bitwise_equal(got: Tensor, expected: Tensor) -> None:
    """Assert equal bits, shape and dtype, and that ``got`` is row-major and without autograd history."""
    assert (tuple(got.shape), got.dtype) == (tuple(expected.shape), expected.dtype)
    assert got.is_contiguous()
    assert not got.requires_grad
    assert view_as_bits(got) == view_as_bits(expected)


def view_as_bits(x: Tensor) -> list[int]:
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return x.reshape(-1).view(torch.uint8).tolist()


# --- the reference: all members' terms, folded in group order ----------------------------------------------------------
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


def reduce_in_order(terms: list[Tensor], op: str) -> Tensor:
    """Return the reference result of a reduction: the members' values combined in order, in the dtype that communicators compute
    in.
    """
    dtype = terms[0].dtype
    if dtype is torch.bool:
        stacked = torch.stack(terms)
        return stacked.any(0) if op in ("sum", "max") else stacked.all(0)
    wide = dtype
    if dtype.is_complex:
        wide = torch.complex64 if dtype is torch.complex32 else dtype
    elif dtype.is_floating_point:
        wide = dtype if dtype.itemsize >= 4 else torch.float32
    else:
        wide = torch.int64  # exact below 2**63; the cast back wraps around
    total = functools.reduce(_COMBINE[op], [term.to(wide) for term in terms])
    if op != "avg":
        return total.to(dtype)
    parts = torch.view_as_real(total) / len(terms) if dtype.is_complex else total / len(terms)
    return (torch.view_as_complex(parts) if dtype.is_complex else parts).to(dtype)


def has_value(op: str, dtype: torch.dtype) -> bool:
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op in ("max", "min"))


def list_mesh_dim_choices(mesh: DeviceMesh) -> Iterator[Dims]:
    """Return choices of mesh dims to communicate over: one, several and all, in every order."""
    for count in range(1, mesh.ndim + 1):
        yield from itertools.permutations(range(mesh.ndim), count)


def _at(mesh: DeviceMesh, dims: Dims, member: int) -> tuple[tuple[int, ...], int]:
    group = mesh.members_of(dims, member)
    return group, group.index(member)


# --- cases ---------------------------------------------------------------------------------------------------------------
@case
def all_reduce_reduces_in_rank_order(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    for dtype, op in itertools.product(DTYPES, OPS):
        if not has_value(op, dtype):
            continue
        x = comm.map(lambda member, dtype=dtype: make_member_values(member, (3, 2), dtype))
        got = comm.all_reduce(x, dims, op).wait()

        def check(member: int, got: Tensor, dtype: torch.dtype = dtype, op: str = op) -> None:
            assert_bitwise_equal(
                got, reduce_in_order([make_member_values(m, (3, 2), dtype) for m in mesh.members_of(dims, member)], op)
            )

        comm.map(check, got)


@case
def all_reduce_of_any_shape(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    big = (7, 5001)  # past the size at which gloo reduces in two rounds
    for shape, dtype, op in [
        ((), torch.float32, "sum"),
        ((0, 3), torch.float64, "max"),
        ((1, 1), torch.bfloat16, "avg"),
        (big, torch.float32, "sum"),
        (big, torch.bfloat16, "avg"),
        (big, torch.int16, "product"),
        (big, torch.bool, "sum"),
    ]:
        x = comm.map(lambda member, shape=shape, dtype=dtype: make_member_values(member, shape, dtype))
        got = comm.all_reduce(x, dims, op).wait()

        def check(member: int, got: Tensor, shape: Any = shape, dtype: torch.dtype = dtype, op: str = op) -> None:
            assert_bitwise_equal(
                got, reduce_in_order([make_member_values(m, shape, dtype) for m in mesh.members_of(dims, member)], op)
            )

        comm.map(check, got)


def _last_nonzero(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b != 0, b, a)


@case
def monoids_fold_in_group_order(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    op = Monoid("last", _last_nonzero, torch.zeros_like, lambda x: x * 2)

    def term(member: int) -> Tensor:
        return make_member_values(member, (4, 6), torch.int64) % 3

    def check(member: int, got: Tensor) -> None:
        assert_bitwise_equal(got, functools.reduce(_last_nonzero, [term(m) for m in mesh.members_of(dims, member)]) * 2)

    comm.map(check, comm.all_reduce(comm.map(term), dims, op).wait())


def _ragged(member: int) -> tuple[int, int]:
    return (member * 2) % 5, 3  # 0, 2, 4, 1, 3, 0, ...


@case
def all_gather_of_ragged_pieces(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    for dtype in DTYPES:
        got = comm.all_gather(
            comm.map(lambda member, dtype=dtype: make_member_values(member, _ragged(member), dtype)), dims, _ragged
        ).wait()

        def check(member: int, got: list[Tensor], dtype: torch.dtype = dtype) -> None:
            for piece, m in zip(got, mesh.members_of(dims, member), strict=True):
                assert_bitwise_equal(piece, make_member_values(m, _ragged(m), dtype))

        comm.map(check, got)


@case
def all_gather_of_equal_shapes(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    for shape in ((2, 3), (), (0, 3), (5,)):
        got = comm.all_gather(
            comm.map(lambda member, shape=shape: make_member_values(member, shape)), dims, lambda _, shape=shape: shape
        ).wait()

        def check(member: int, got: list[Tensor], shape: tuple[int, ...] = shape) -> None:
            for piece, m in zip(got, mesh.members_of(dims, member), strict=True):
                assert_bitwise_equal(piece, make_member_values(m, shape))

        comm.map(check, got)


@case
def reduce_scatter_of_uneven_chunks(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    n = comm.group_size(dims)
    shapes = [((k * 2 + 1) % 4, 2) for k in range(n)]  # 1, 3, 1, ... rows
    shapes[-1] = (0, 2)
    for even, dtype, op in itertools.product((True, False), (torch.float32, torch.bfloat16, torch.int64, torch.bool), OPS):
        if not has_value(op, dtype):
            continue
        sizes = [(2, 2)] * n if even else shapes

        def chunks(member: int, sizes: Any = sizes, dtype: torch.dtype = dtype) -> list[Tensor]:
            return [make_member_values(member, size, dtype, salt=k) for k, size in enumerate(sizes)]

        def check(member: int, got: Tensor, chunks: Any = chunks, op: str = op) -> None:
            group, k = _at(mesh, dims, member)
            assert_bitwise_equal(got, reduce_in_order([chunks(m)[k] for m in group], op))

        comm.map(check, comm.reduce_scatter(comm.map(chunks), dims, op).wait())


@case
def large_blocks_are_sent_as_separate_messages(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    """Exchange blocks above the size from which gloo sends them one by one, with empty and small ones, none aliasing the
    sender's."""
    size = comm.group_size(dims)
    sizes = [((1 << 16) + 3, 0, 5, 1 << 16)[k % 4] for k in range(size)]

    def piece(member: int) -> Tensor:
        return make_member_values(member, (sizes[_at(mesh, dims, member)[1]],), torch.float64)

    sent = comm.map(piece)
    gathered = comm.all_gather(sent, dims, lambda member: (sizes[_at(mesh, dims, member)[1]],)).wait()

    def check(member: int, got: list[Tensor], own: Tensor) -> None:
        for row, other in zip(got, mesh.members_of(dims, member), strict=True):
            assert torch.equal(row, piece(other))
        got[_at(mesh, dims, member)[1]].fill_(0)
        assert torch.equal(own, piece(member))

    comm.map(check, gathered, sent)

    def chunks(member: int) -> list[Tensor]:
        return [make_member_values(member, (n,), torch.float64, salt=k) for k, n in enumerate(sizes)]

    def check_reduced(member: int, got: Tensor) -> None:
        k = _at(mesh, dims, member)[1]
        assert torch.equal(got, reduce_in_order([chunks(other)[k] for other in mesh.members_of(dims, member)], "sum"))

    comm.map(check_reduced, comm.reduce_scatter(comm.map(chunks), dims, "sum").wait())


@case
def all_to_all_of_ragged_chunks(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    def shape_of(source: int, target: int) -> tuple[int, int]:
        return (source * 3 + target * 2) % 4, 2

    for dtype in (torch.float32, torch.float16, torch.bool, torch.complex64, torch.int16):

        def chunks(member: int, dtype: torch.dtype = dtype) -> list[Tensor]:
            return [make_member_values(member, shape_of(member, to), dtype, salt=to) for to in mesh.members_of(dims, member)]

        def check(member: int, got: list[Tensor], dtype: torch.dtype = dtype) -> None:
            for piece, m in zip(got, mesh.members_of(dims, member), strict=True):
                assert_bitwise_equal(piece, make_member_values(m, shape_of(m, member), dtype, salt=member))

        comm.map(check, comm.all_to_all(comm.map(chunks), dims, shape_of).wait())


@case
def broadcast_from_each_position(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    for source, dtype in itertools.product(range(comm.group_size(dims)), (torch.float32, torch.bool, torch.complex64)):
        got = comm.broadcast(comm.map(lambda member, dtype=dtype: make_member_values(member, (2, 3), dtype)), dims, source).wait()

        def check(member: int, got: Tensor, source: int = source, dtype: torch.dtype = dtype) -> None:
            assert_bitwise_equal(got, make_member_values(mesh.members_of(dims, member)[source], (2, 3), dtype))

        comm.map(check, got)


@case
def collectives_accept_views_conjugates_and_results_with_grad(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    def odd(member: int) -> list[Tensor]:
        strided = make_member_values(member, (4, 6))[::2, 1::2].t()
        return [
            strided,
            make_member_values(member, (3, 2)).requires_grad_() * 2,
            make_member_values(member, (3, 2), torch.complex64).conj(),
            make_member_values(member, (3, 2), torch.complex64).conj().imag,  # a lazily negated view
            make_member_values(member, (1, 1)).expand(3, 2),
        ]

    n = comm.group_size(dims)
    for i in range(5):
        x = comm.map(lambda member, i=i: odd(member)[i])
        results = [
            comm.all_reduce(x, dims, "sum").wait(),
            comm.all_gather(x, dims, lambda _: (3, 2)).wait(),
            comm.reduce_scatter([x] * n, dims, "sum").wait(),
            comm.all_to_all([x] * n, dims, lambda source, target: (3, 2)).wait(),
            comm.broadcast(x, dims, n - 1).wait(),
        ]

        def check(member: int, results: list[Any], x: Tensor, i: int = i) -> None:
            terms = [odd(m)[i].detach() for m in mesh.members_of(dims, member)]
            assert_bitwise_equal(results[0], reduce_in_order(terms, "sum").contiguous())
            assert_bitwise_equal(results[2], reduce_in_order(terms, "sum").contiguous())
            assert_bitwise_equal(results[4], terms[-1])
            for got, term in zip([*results[1], *results[3]], [*terms, *terms], strict=True):
                assert_bitwise_equal(got, term)

        comm.map(check, results, x)


@case
def results_do_not_alias_inputs_or_each_other(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    n = comm.group_size(dims)
    x = comm.map(lambda member: make_member_values(member, (2, 3)))
    results = [
        comm.all_reduce(x, dims, "sum").wait(),
        comm.all_reduce(x, dims, Monoid("last", lambda a, b: b, torch.zeros_like)).wait(),
        *comm.all_gather(x, dims, lambda _: (2, 3)).wait(),
        comm.reduce_scatter([x] * n, dims, "max").wait(),
        *comm.all_to_all([x] * n, dims, lambda source, target: (2, 3)).wait(),
        comm.broadcast(x, dims).wait(),
    ]
    for result in results:
        comm.map(lambda member, y: y.fill_(member), result)  # into every rank's own memory
    for result in results:
        comm.map(lambda member, y: assert_bitwise_equal(y, torch.full((2, 3), float(member))), result)
    comm.map(lambda member, y: assert_bitwise_equal(y, make_member_values(member, (2, 3))), x)


@case
def collectives_in_flight_may_be_waited_for_in_any_order(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    n, big = comm.group_size(dims), (7, 5001)
    x, y = comm.map(lambda member: make_member_values(member, (2, 3))), comm.map(lambda member: make_member_values(member, big))
    pending: list[Pending[Any]] = [
        comm.all_reduce(x, dims, "sum"),
        comm.all_gather(x, dims, lambda _: (2, 3)),
        comm.all_reduce(y, dims, "sum"),
        comm.reduce_scatter([x] * n, dims, "avg"),
        comm.all_to_all([x] * n, dims, lambda source, target: (2, 3)),
        comm.broadcast(x, dims, n - 1),
    ]
    expected = [
        comm.all_reduce(x, dims, "sum").wait(),
        comm.all_gather(x, dims, lambda _: (2, 3)).wait(),
        comm.all_reduce(y, dims, "sum").wait(),
        comm.reduce_scatter([x] * n, dims, "avg").wait(),
        comm.all_to_all([x] * n, dims, lambda source, target: (2, 3)).wait(),
        comm.broadcast(x, dims, n - 1).wait(),
    ]

    def check(member: int, got: Any, want: Any) -> None:
        pairs = zip(got, want, strict=True) if isinstance(got, list) else [(got, want)]
        for a, b in pairs:
            assert_bitwise_equal(a, b)

    for under_way, want in reversed(list(zip(pending, expected, strict=True))):
        got = under_way.wait()
        assert under_way.wait() is got
        comm.map(check, got, want)


@case
def all_gather_object_returns_objects_in_rank_order(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    names = comm.map(lambda member: f"member {member}")
    got = comm.all_gather_object(names, dims)
    comm.map(lambda member, *told: _equal(list(told), [f"member {m}" for m in mesh.members_of(dims, member)]), *got)


def _equal(a: Any, b: Any) -> None:
    assert a == b


@case
def events_report_the_bytes_that_a_rank_receives(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    n = comm.group_size(dims)
    x = comm.map(lambda member: make_member_values(member, (2, 3)))
    seen: list[events.Event] = []
    with events.listening(seen.append):
        comm.all_reduce(x, dims, "sum").wait()
        comm.all_gather(x, dims, lambda _: (2, 3)).wait()
        comm.reduce_scatter([x] * n, dims, "sum").wait()
        comm.all_to_all([x] * n, dims, lambda source, target: (2, 3)).wait()
        comm.broadcast(x, dims).wait()
    size = 2 * 3 * 4
    received = {
        "all_reduce": -(-2 * (n - 1) * size // n),
        "all_gather": (n - 1) * size,
        "reduce_scatter": (n - 1) * size,
        "all_to_all": (n - 1) * size,
        "broadcast": size,
    }
    expected = [events.Event(kind, dims, n, nbytes, mesh) for kind, nbytes in received.items()]
    assert seen == (expected if n > 1 and mesh.current_member() is not None else [])


@case
def invalid_calls_raise_on_every_communicator(mesh: DeviceMesh, comm: Communicator, dims: Dims) -> None:
    n = comm.group_size(dims)
    if mesh.current_member() is None:
        return
    refused: list[tuple[type[Exception], Callable[[], Any]]] = [
        (UnsupportedOperationError, lambda: comm.all_reduce(torch.ones(2, dtype=torch.int64), dims, "avg").wait()),
        (UnsupportedOperationError, lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64), dims, "max").wait()),
        (UnsupportedOperationError, lambda: comm.all_reduce(torch.ones(2), dims, "median").wait()),
        (LayoutError, lambda: comm.reduce_scatter([torch.ones(2)] * (n + 1), dims, "sum").wait()),
        (MeshError, lambda: comm.broadcast(torch.ones(2), dims, n).wait()),
    ]
    if n > 1:
        refused.append((LayoutError, lambda: comm.all_gather(torch.ones(2), dims, lambda _: (3,)).wait()))
    for error, call in refused:
        try:
            call()
        except error:
            continue
        raise AssertionError(f"no {error.__name__}")


def run_case(name: str, mesh: DeviceMesh) -> None:
    """Run one case for every choice of mesh dims."""
    for dims in list_mesh_dim_choices(mesh):
        CASES[name](mesh, communicator_of(mesh), dims)


# --- on process groups -----------------------------------------------------------------------------------------------------
def make_meshes_of_four() -> dict[str, DeviceMesh]:
    """Return meshes over a world of 4: of all ranks, reordered, of some ranks, and overlapping."""
    square = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
    return {
        "line": DeviceMesh("cpu", [2, 0, 3, 1]),
        "square": square,
        "tp": square["tp"],
        "reordered": square["tp", "dp"],
        "pair": DeviceMesh("cpu", [1, 0]),
        "three, sharing a rank with the pair": DeviceMesh("cpu", [3, 1, 2]),
        "two, one in each": DeviceMesh("cpu", [0, 3]),
    }


def main() -> list[str]:
    """Run every case on every mesh, on this rank of a world of 4; return the names of the cases."""
    ran = []
    for label, mesh in make_meshes_of_four().items():
        comm = communicator_of(mesh)
        if mesh.current_member() is None:
            _check_communicator_outside_mesh(mesh, comm)
        else:
            for name in CASES:
                run_case(name, mesh)
            assert get_timeout(comm.process_group((0,))) == get_timeout(dist.group.WORLD)
        ran.append(label)
    _check_user_groups()
    _check_flattened_groups()
    _check_native_collectives()
    _check_groups_split_from_world()
    return ran


def get_timeout(group: Any) -> Any:
    return group._get_backend(torch.device("cpu")).options._timeout


def _check_communicator_outside_mesh(mesh: DeviceMesh, comm: Communicator) -> None:
    """Check that a rank outside the mesh gets its inputs back from collectives, and an error for the process group."""
    x, dims = torch.ones(2), tuple(range(mesh.ndim))
    n = comm.group_size(dims)
    assert comm.all_reduce(x, dims, "sum").wait() is x
    assert comm.broadcast(x, dims).wait() is x
    assert comm.reduce_scatter([x] * n, dims).wait() is x
    assert all(piece is x for piece in comm.all_gather(x, dims, lambda _: (2,)).wait())
    assert all(piece is x for piece in comm.all_to_all([x] * n, dims, lambda source, target: (2,)).wait())
    try:
        comm.process_group(dims)
    except MeshError:
        return
    raise AssertionError("a group for a rank outside the mesh")


def _check_user_groups() -> None:
    """Check that groups made by the user are used and returned."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = DeviceMesh.from_group([columns[rank % 2], rows[rank // 2]], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert mesh.get_group("tp") is rows[rank // 2]
    assert mesh["dp"].get_group() is columns[rank % 2]
    assert communicator_of(mesh).process_group((1, 0)) is dist.group.WORLD
    run_case("all_reduce_reduces_in_rank_order", mesh)


def _check_flattened_groups() -> None:
    """Check that a flattened dim is found by its name, also if torch flattened it."""
    rank = dist.get_rank()
    ours = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours["tp", "dp"].flatten("turned")
    theirs = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = theirs._flatten("both")
    for mesh, name, at in ((ours, "turned", (0, 2, 1, 3)), (DeviceMesh.from_torch(theirs), "both", (0, 1, 2, 3))):
        for part in (mesh, mesh["tp"]):
            assert dist.get_process_group_ranks(part.get_group(name)) == [0, 1, 2, 3]
            assert (part.get_local_rank(name), part.size(name)) == (at.index(rank), 4)
        assert mesh[name].get_group() is mesh.get_group(name)
        x = dt.distribute_tensor(torch.arange(7.0), mesh[name], [dt.Shard(0)])
        assert x.to_local().tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0]][at.index(rank)]
    assert DeviceMesh.from_torch(theirs).get_group("both") is flat.get_group()
    whole, *slices = (DeviceMesh.from_torch(each) for each in (theirs, theirs["dp"], theirs["tp"], flat))
    assert slices == [whole["dp"], whole["tp"], whole["both"]]
    assert slices[0].get_group() is theirs["dp"].get_group()
    layer = dt.parallel.parallelize_module(torch.nn.Linear(3, 8), theirs["tp"], dt.parallel.ColwiseParallel())
    dt.parallel.fully_shard(layer, mesh=theirs["dp"])
    assert layer.weight.device_mesh == whole
    for accepted in (flat, theirs["dp"]):
        assert dt.distribute_tensor(torch.arange(7.0), accepted, [dt.Shard(0)]).full_tensor().tolist() == list(range(7))


def _check_native_collectives() -> None:
    """Run NCCL's path, on which the backend itself reduces and gathers, for the calls that gloo supports."""
    ours = torch_backends._TRAITS["gloo"]
    torch_backends._TRAITS["gloo"] = torch_backends.BackendTraits(reduces=True, sends_lists=False)
    try:
        for mesh in (DeviceMesh("cpu", [2, 0, 3, 1]), DeviceMesh("cpu", [[3, 1], [0, 2]])):
            comm = communicator_of(mesh)
            for dims in list_mesh_dim_choices(mesh):
                all_gather_of_equal_shapes(mesh, comm, dims)
                all_gather_of_ragged_pieces(mesh, comm, dims)
                for dtype, op in itertools.product((torch.int64, torch.uint8, torch.bool, torch.int16), OPS):
                    if has_value(op, dtype):
                        _check_native_reduction(mesh, comm, dims, dtype, op)
            _check_complex_sum(mesh, comm)
    finally:
        torch_backends._TRAITS["gloo"] = ours


def _check_native_reduction(mesh: DeviceMesh, comm: Communicator, dims: Dims, dtype: torch.dtype, op: str) -> None:
    """Check all-reduce and reduce-scatter of one dtype and operation against the reference."""
    n = comm.group_size(dims)

    def chunks(member: int) -> list[Tensor]:
        return [make_member_values(member, (2, 3), dtype, salt=k) for k in range(n)]

    def check(member: int, whole: Tensor, own: Tensor) -> None:
        group, k = _at(mesh, dims, member)
        assert_bitwise_equal(whole, reduce_in_order([chunks(m)[0] for m in group], op))
        assert_bitwise_equal(own, reduce_in_order([chunks(m)[k] for m in group], op))

    whole = comm.all_reduce(comm.map(lambda member: chunks(member)[0]), dims, op).wait()
    own = comm.reduce_scatter(comm.map(chunks), dims, op).wait()
    comm.map(check, whole, own)


def _check_complex_sum(mesh: DeviceMesh, comm: Communicator) -> None:
    dims = tuple(range(mesh.ndim))
    got = comm.all_reduce(torch.full((2,), 1 + 2j), dims, "sum").wait()
    assert_bitwise_equal(got, torch.full((2,), 4 + 8j))
    assert_bitwise_equal(comm.reduce_scatter([torch.full((2,), 1 + 2j)] * 4, dims, "avg").wait(), torch.full((2,), 1 + 2j))


def _check_groups_split_from_world() -> None:
    """Run an all-gather on groups that are split from the world's communicator, as NCCL does; gloo is patched to do so."""
    splits = process_groups._splits_world
    process_groups._splits_world = lambda world: True
    try:
        mesh = DeviceMesh("cpu", [[0, 3], [1, 2]])
        run_case("all_gather_of_ragged_pieces", mesh)
        assert process_groups.get_group(mesh, (0,)).handle is not dist.group.WORLD
    finally:
        process_groups._splits_world = splits
