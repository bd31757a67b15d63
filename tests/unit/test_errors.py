"""Errors: alike on all ranks, early, saying what is wrong and what to write instead; builtins that plain torch raises too."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.comm import events
from dtensor.errors import (
    ArgumentError,
    DTensorError,
    ImplicitCommunicationError,
    LayoutError,
    MeshError,
    MixedTensorError,
    PlacementError,
    UnsupportedOperationError,
)
from dtensor.testing import check

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning", "ignore:torch.quantize_per_tensor")

MESH = dt.init_device_mesh("cpu", (2,))
OTHER = dt.init_device_mesh("cpu", (3,))
MESH_22 = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
R = Replicate()


def make(*shape: int, mesh: dt.DeviceMesh = MESH, placements: Any = None, dtype: torch.dtype = torch.float32) -> DTensor:
    return dt.ones(*shape, device_mesh=mesh, placements=placements or [Shard(0)] * mesh.ndim, dtype=dtype)


# (what raises, which error, what it must say)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "two meshes in one op": (lambda: make(4) + make(4, mesh=OTHER), MeshError, r"different meshes.*redistribute"),
    "a mesh and its slice": (lambda: make(4, mesh=MESH_22) + make(4, mesh=MESH_22["tp"]), MeshError, "different meshes"),
    "two meshes in a list": (lambda: torch.cat([make(4), make(4, mesh=OTHER)]), MeshError, "different meshes"),
    "too few placements": (lambda: dt.distribute_tensor(torch.ones(4), MESH_22, [R]), PlacementError, "one per mesh dim"),
    "too many placements": (lambda: make(4).redistribute(placements=[R, R]), PlacementError, "one per mesh dim"),
    "a dim out of range": (lambda: dt.distribute_tensor(torch.ones(4), MESH, [Shard(1)]), PlacementError, "out of range"),
    "a negative dim out of range": (lambda: make(4).redistribute(placements=[Shard(-2)]), PlacementError, "out of range"),
    "sharding a number": (lambda: dt.distribute_tensor(torch.tensor(1.0), MESH, [Shard(0)]), PlacementError, "0-d tensor"),
    "no placement": (lambda: dt.distribute_tensor(torch.ones(4), MESH, [0]), PlacementError, "use Shard"),
    "sizes that do not sum up": (lambda: make(4).redistribute(placements=[Shard(0, sizes=(1, 1))]), PlacementError, "sizes"),
    "a plain tensor": (lambda: make(4) + torch.ones(4), MixedTensorError, r"argument 'other'.*implicit_replication"),
    "a plain tensor of two elements": (lambda: make(4) + torch.ones(2, 1), MixedTensorError, "implicit_replication"),
    "a write into a plain tensor": (lambda: torch.ones(4).add_(make(4)), MixedTensorError, "distribute_tensor"),
    "a result in a plain tensor": (lambda: torch.add(make(4), make(4), out=torch.ones(4)), MixedTensorError, "distribute_tensor"),
    "memory of a storage": (
        lambda: make(4).set_(torch.ones(4).untyped_storage(), 0, (4,)),
        UnsupportedOperationError,
        "takes a DTensor",
    ),
    "a collective of torch's": (
        lambda: torch.ops._c10d_functional.all_reduce(make(4), "sum", "0"),
        UnsupportedOperationError,
        r"redistribute.*to_local",
    ),
    "somebody else's placement": (
        lambda: dt.distribute_tensor(torch.ones(4), MESH, [type("Shard", (), {"dim": 0})()]),
        PlacementError,
        r"one of .*; use Shard\(dim\)",
    ),
    "pieces of wrong shapes": (
        lambda: DTensor.from_local(dt.per_rank([torch.ones(2, 3), torch.ones(2, 4)]), MESH, [Shard(0)]),
        LayoutError,
        r"rank 1 .*\(2, 4\)",
    ),
    "too few pieces": (lambda: DTensor.from_local(dt.per_rank([torch.ones(2)]), MESH, [R]), LayoutError, "which has 2 ranks"),
    "a DTensor as a piece": (lambda: DTensor.from_local(make(4), MESH, [R]), LayoutError, "to_local"),
    "the constructor": (lambda: DTensor(torch.ones(3)), DTensorError, "distribute_tensor"),
    "data of a plain tensor": (lambda: setattr(make(4), "data", torch.ones(4)), LayoutError, "distribute_tensor"),
    "in place with another shape": (lambda: make(1, 4).add_(make(3, 4)), RuntimeError, "shape"),
    "in place that grows": (lambda: make(1).add_(make(8)), RuntimeError, "shape"),
    "a source rank that is none": (
        lambda: dt.distribute_tensor(torch.ones(4), MESH, [R], src_data_rank=2),
        MeshError,
        "src_data_rank=2",
    ),
    "an average of integers": (
        lambda: DTensor.from_local(torch.ones(3, dtype=torch.int64), MESH, [Partial("avg")]).full_tensor(),
        LayoutError,
        r"average of.*Partial\('sum'\)",
    ),
    "a maximum of complex numbers": (
        lambda: DTensor.from_local(torch.ones(3, dtype=torch.complex64), MESH, [Partial("max")]).full_tensor(),
        LayoutError,
        "not ordered",
    ),
    "a sparse factory": (lambda: dt.zeros(3, device_mesh=MESH, layout=torch.sparse_coo), PlacementError, "strided"),
    "an option that is none": (lambda: dt.zeros(3, device_mesh=MESH, colour=1), TypeError, "colour"),
    "no mesh": (lambda: dt.zeros(3), MeshError, "no device mesh"),
}
NO_PLACEMENTS = (5, "R", {0: R}, {R}, [[Shard(0)]], [None], [Shard], [R, R])
for given in NO_PLACEMENTS:
    for what, wrong in {
        "distributed": lambda given=given: dt.distribute_tensor(torch.ones(4), MESH, given),
        "made": lambda given=given: dt.zeros(4, device_mesh=MESH, placements=given),
        "moved": lambda given=given: make(4).redistribute(placements=given),
        "many": lambda given=given: dt.redistribute_many([make(4)], given if isinstance(given, (int, str)) else [given]),
        "local": lambda given=given: DTensor.from_local(torch.ones(4), MESH, given),
        "grad of local": lambda given=given: make(4).to_local(grad_placements=given),
        "grad of full": lambda given=given: make(4).full_tensor(grad_placements=given),
        "explained": lambda given=given: make(4).explain_redistribute(given),
    }.items():
        CASES[f"placements {given}, {what}"] = (wrong, PlacementError, "placement")
for given in (None, "x", 3, [1.0, 2.0], torch.nn.Linear(2, 2)):
    CASES[f"no tensor: {given}"] = (lambda given=given: dt.distribute_tensor(given, MESH, [R]), ArgumentError, "torch.Tensor")
    CASES[f"no piece: {given}"] = (lambda given=given: DTensor.from_local(given, MESH, [R]), TypeError, "torch.Tensor")
ODD: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
}
for name, odd in ODD.items():
    for where in (R, Shard(0)):
        CASES[f"{name} {where}"] = (
            lambda odd=odd, where=where: dt.distribute_tensor(odd(), MESH, [where]),
            UnsupportedOperationError,
            "strided|dtype",
        )
        CASES[f"{name} piece {where}"] = (
            lambda odd=odd, where=where: DTensor.from_local(odd(), MESH, [where]),
            UnsupportedOperationError,
            "strided|dtype",
        )
for size in ("3", 3.0, None, True, ((3,), 4)):
    CASES[f"size {size}"] = (lambda size=size: dt.zeros(size, device_mesh=MESH), ArgumentError, "ints")
    CASES[f"random size {size}"] = (lambda size=size: dt.randn(size, device_mesh=MESH), ArgumentError, "ints")
for size in ((8, 3), "48", 8, (8.0,), (None,)):
    CASES[f"global shape {size}"] = (
        lambda size=size: DTensor.from_local(torch.ones(4), MESH, [Shard(0)], shape=size),
        DTensorError,
        "ints|local tensor of shape|numbers of dims",
    )
CASES |= {
    "a negative size": (lambda: dt.zeros(-1, device_mesh=MESH), RuntimeError, "non-negative"),
    "strides that go back": (
        lambda: DTensor.from_local(torch.ones(4), MESH, [Shard(0)], stride=(-1,)),
        LayoutError,
        "non-negative",
    ),
    "a dtype in quotes": (lambda: dt.zeros(3, device_mesh=MESH, dtype="float32"), TypeError, "dtype"),
    "a gradient's dtype in quotes": (lambda: make(4).redistribute(backward_dtype="float32"), ArgumentError, "torch.dtype"),
    "a device": (lambda: dt.zeros(3, device_mesh=MESH, device="cpu"), TypeError, "the device is that of the mesh"),
    "one tensor for many": (lambda: dt.redistribute_many(make(2, 2), [R]), DTensorError, "placements|DTensors"),
    "pieces too few": (lambda: DTensor.from_local(dt.per_rank([torch.ones(2)] * 3), MESH, [R]), LayoutError, "has 2 ranks"),
    "an output that is not a tensor": (lambda: dt.local_map(lambda x: 3, [R])(make(4)), PlacementError, "None in its place"),
    "an operator's name": (lambda: dt.register_sharding("aten.add"), DTensorError, "overload"),
    "no module": (lambda: dt.distribute_module(torch.ones(3), MESH), ArgumentError, "nn.Module"),
    "no function": (lambda: dt.distribute_module(torch.nn.ReLU(), MESH, input_fn="x"), ArgumentError, "input_fn"),
    "a function of too little": (
        lambda: dt.distribute_module(torch.nn.ReLU(), MESH, output_fn=lambda outputs: outputs),
        ArgumentError,
        "output_fn takes",
    ),
    "nothing to capture": (lambda: dt.capture("x"), ArgumentError, "function"),
    "nothing to show": (lambda: dt.debug.visualize_sharding(torch.ones(3)), ArgumentError, "DTensor"),
    "a seed's mesh": (lambda: dt.manual_seed(0, "cpu"), MeshError, "device mesh"),
    "a source rank in quotes": (
        lambda: dt.distribute_tensor(torch.ones(4), MESH, [R], src_data_rank="0"),
        ArgumentError,
        "ints",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_error(name: str) -> None:
    fn, kind, message = CASES[name]
    with pytest.raises(kind, match=f"(?s){message}"):
        fn()


@pytest.mark.parametrize("name", CASES)
def test_errors_come_before_any_communication(name: str) -> None:
    seen: list[events.Event] = []
    with events.listening(seen.append), pytest.raises(CASES[name][1]):
        CASES[name][0]()
    assert [event.kind for event in seen if event.kind != "all_gather_object"] == []


def test_every_error_is_a_dtensor_error_and_a_builtin() -> None:
    assert issubclass(PlacementError, (DTensorError, ValueError))
    assert issubclass(MixedTensorError, RuntimeError)
    assert issubclass(UnsupportedOperationError, NotImplementedError)
    assert issubclass(DTensorError, RuntimeError)


def backward_after_write(y: torch.Tensor) -> None:
    total = y.square().sum()
    y.add_(1)
    total.backward()


# --- the same errors as plain torch ---------------------------------------------------------------------------------
PLAIN_ERRORS: dict[str, Callable[..., Any]] = {
    "shapes that do not broadcast": lambda x: x + x[:2, :3],
    "shapes that do not multiply": lambda x: x @ x,
    "a view that does not fit": lambda x: x.view(7, 7),
    "a view of strides that do not fit": lambda x: x.t().view(30),
    "an expansion to fewer dims": lambda x: x.expand(()),
    "a dim out of range": lambda x: x.sum(5),
    "a select out of range": lambda x: x[7],
    "a narrow out of range": lambda x: x.narrow(0, 3, 5),
    "an index out of range": lambda x: x.index_select(0, (x[0] * 0 + 9).long()),
    "concatenation of different shapes": lambda x: torch.cat([x, x.t()]),
    "an in-place write to a leaf": lambda x: x.add_(1),
    "an in-place write to an expanded view": lambda x: x.detach().expand(2, 5, 6).add_(1),
    "an in-place change of dtype": lambda x: x.detach().long().add_(0.5),
    "a mean of integers": lambda x: x.long().mean(),
    "item of many": lambda x: x.item(),
    "truth of many": lambda x: bool(x),
    "a float as an index": lambda x: [1, 2][x[0, 0] * 0],
    "softmax of integers": lambda x: torch.softmax(x.long(), 0),
    "permute twice the same": lambda x: x.permute(0, 0),
    "a split that does not sum up": lambda x: x.split([1, 1], 0),
    "an unknown reduction": lambda x: torch.nn.functional.mse_loss(x, x, reduction="most"),
    "backward of many": lambda x: (x * 2).backward(),
    "backward without a graph": lambda x: x.detach().sum().backward(),
    "backward twice": lambda x: [y.backward() for y in [(x * x).sum()] * 2],
    "requires_grad of integers": lambda x: x.long().requires_grad_(),
    "no requires_grad for a result": lambda x: (x * 2).requires_grad_(False),
    "an in-place write to what backward needs": lambda x: backward_after_write(x * 2),
    "numpy of a leaf": lambda x: x.numpy(),
}


@pytest.mark.parametrize("placements", [[R], [Shard(0)], [Shard(1)]], ids=str)
@pytest.mark.parametrize("name", PLAIN_ERRORS)
def test_the_error_of_plain_torch(name: str, placements: list[Any]) -> None:
    x = torch.arange(30.0).reshape(5, 6)
    outcome = check(PLAIN_ERRORS[name], x, mesh=MESH, placements=[placements])
    assert outcome.same_error


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, i: x[i([0, 1]), i([0, 1, 2])],
        lambda x, i: x[:, i([True, False])],
        lambda x, i: x[i([[True] * 6, [False] * 6])],
        lambda x, i: torch.tensor_split(x, i(2.0)),
        lambda x, i: torch.tensor_split(x, i([[2]])),
        lambda x, i: torch.embedding_bag(x, i([[[0]]]), i([0])),
        lambda x, i: torch.embedding_bag(x[None], i([0]), i([0])),
    ],
)
def test_the_words_of_plain_torch(pick: Callable[..., Any]) -> None:
    x = torch.arange(30.0).reshape(5, 6)
    with pytest.raises((IndexError, RuntimeError)) as plain:
        pick(x, torch.tensor)
    with pytest.raises(plain.type, match=re.escape(str(plain.value))):
        pick(dt.distribute_tensor(x, MESH, [Shard(0)]), lambda i: dt.distribute_tensor(torch.tensor(i), MESH, [R]))


# --- what explicit() forbids ----------------------------------------------------------------------------------------
def test_explicit_names_the_redistribution_that_an_operation_needs() -> None:
    x, y = make(4, 6), make(4, 6, placements=[Shard(1)])
    with dt.explicit(), pytest.raises(ImplicitCommunicationError, match=r"(?s)add.*S\("):
        x + y
    with dt.explicit():
        assert torch.equal((x + y.redistribute(placements=[Shard(0)])).full_tensor(), torch.full((4, 6), 2.0))


def test_explicit_allows_what_needs_no_communication() -> None:
    with dt.explicit():
        x = make(4, 6)
        assert ((x * 2 + x).relu() @ make(6, 3, placements=[R])).placements == (Shard(0),)
        assert x.sum().placements == (Partial(),)


def test_explicit_forbids_fallbacks_and_kernels_that_talk() -> None:
    x = make(4, 6)
    for fn in (lambda: torch.linalg.svd(x), lambda: torch.softmax(x, 0), lambda: x.sum().item()):
        with dt.explicit(), pytest.raises(ImplicitCommunicationError):
            fn()


def test_explicit_allows_backward_of_a_redistribution() -> None:
    x = make(4, 6).requires_grad_()
    with dt.explicit():
        (x.redistribute(placements=[R]) * 2).sum().backward()
    assert x.grad is not None


def test_a_gather_is_announced_once() -> None:
    from dtensor.errors import GatherWarning

    torch.library.define("proof::unruly", "(Tensor x) -> Tensor")
    torch.library.impl("proof::unruly", "CompositeExplicitAutograd", lambda x: x.sort(0).values * 2)
    x = make(4, 4)
    with pytest.warns(GatherWarning, match=r"proof::unruly.*all-gathers.* B received per rank") as caught:
        first, second = torch.ops.proof.unruly(x), torch.ops.proof.unruly(x)
    assert len(caught) == 1
    assert torch.equal(first.full_tensor(), torch.full((4, 4), 2.0))
    assert second.placements == (R,)


def test_wrong_dims_raise_after_right_ones_of_larger_tensors() -> None:
    """What is known of an operator for all sizes is known for one number of dims."""
    mesh = dt.DeviceMesh("cpu", 2)
    for shape in ((2, 3, 4), (3, 4, 5)):
        x = dt.ones(*shape, device_mesh=mesh, placements=[dt.Shard(0)])
        assert x.sum(2).shape == shape[:2]
        assert x.softmax(2).shape == shape
    y = dt.ones(3, 4, device_mesh=mesh, placements=[dt.Shard(0)])
    for wrong in (lambda: y.sum(2), lambda: y.softmax(2)):
        with pytest.raises(IndexError):
            wrong()


@pytest.mark.parametrize(
    ("put_in", "shape"),
    [
        (lambda x: x.select_scatter(x, 0, 0), ()),
        (lambda x: x.slice_scatter(x, 0, 0, 1), ()),
        (lambda x: x.diagonal_scatter(x), ()),
        (lambda x: x.select_scatter(x[0], 0, 1), (1, 6)),
        (lambda x: x.select_scatter(x[0], 0, -3), (2, 6)),
    ],
)
def test_what_puts_into_a_dim_needs_it(put_in: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    for operand in (x, dt.distribute_tensor(x, dt.init_device_mesh("cpu", (2,)), [dt.Replicate()])):
        with pytest.raises(IndexError):
            put_in(operand)
