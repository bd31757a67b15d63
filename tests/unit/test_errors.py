"""Errors: raised before communication, with the class of plain torch and a text that says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.comm import events
from dtensor.errors import (
    ArgumentError,
    ContradictionError,
    DTensorError,
    ImplicitCommunicationError,
    LayoutError,
    MeshError,
    MixedTensorError,
    PlacementError,
    UnsupportedOperationError,
)
from dtensor.parallel import PrepareModuleInput, PrepareModuleOutput, fully_shard, replicate
from dtensor.testing import check

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning", "ignore:torch.quantize_per_tensor")

MESH = dt.init_device_mesh("cpu", (2,))
OTHER = dt.init_device_mesh("cpu", (3,))
MESH_22 = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
R = Replicate()


def make(*shape: int, mesh: dt.DeviceMesh = MESH, placements: Any = None, dtype: torch.dtype = torch.float32) -> DTensor:
    return dt.ones(*shape, device_mesh=mesh, placements=placements or [Shard(0)] * mesh.ndim, dtype=dtype)


# (program that raises, class of the error, pattern of its text)
CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "operands on two meshes": (lambda: make(4) + make(4, mesh=OTHER), MeshError, r"different meshes.*redistribute"),
    "operands on a mesh and its submesh": (
        lambda: make(4, mesh=MESH_22) + make(4, mesh=MESH_22["tp"]),
        MeshError,
        "different meshes",
    ),
    "list with two meshes": (lambda: torch.cat([make(4), make(4, mesh=OTHER)]), MeshError, "different meshes"),
    "too few placements": (lambda: dt.distribute_tensor(torch.ones(4), MESH_22, [R]), PlacementError, "one per mesh dim"),
    "too many placements": (lambda: make(4).redistribute(placements=[R, R]), PlacementError, "one per mesh dim"),
    "tensor dim out of range": (lambda: dt.distribute_tensor(torch.ones(4), MESH, [Shard(1)]), PlacementError, "out of range"),
    "negative tensor dim out of range": (lambda: make(4).redistribute(placements=[Shard(-2)]), PlacementError, "out of range"),
    "sharded 0-d tensor": (lambda: dt.distribute_tensor(torch.tensor(1.0), MESH, [Shard(0)]), PlacementError, "0-d tensor"),
    "int as a placement": (lambda: dt.distribute_tensor(torch.ones(4), MESH, [0]), PlacementError, "use Shard"),
    "shard sizes with a wrong sum": (lambda: make(4).redistribute(placements=[Shard(0, sizes=(1, 1))]), PlacementError, "sizes"),
    "plain operand": (lambda: make(4) + torch.ones(4), MixedTensorError, r"argument 'other'.*implicit_replication"),
    "plain operand of two elements": (lambda: make(4) + torch.ones(2, 1), MixedTensorError, "implicit_replication"),
    "write to a plain tensor": (lambda: torch.ones(4).add_(make(4)), MixedTensorError, "distribute_tensor"),
    "plain out argument": (lambda: torch.add(make(4), make(4), out=torch.ones(4)), MixedTensorError, "distribute_tensor"),
    "set_ of a storage": (
        lambda: make(4).set_(torch.ones(4).untyped_storage(), 0, (4,)),
        UnsupportedOperationError,
        "takes a DTensor",
    ),
    "functional collective of torch": (
        lambda: torch.ops._c10d_functional.all_reduce(make(4), "sum", "0"),
        UnsupportedOperationError,
        r"redistribute.*to_local",
    ),
    "placement of another library": (
        lambda: dt.distribute_tensor(torch.ones(4), MESH, [type("Shard", (), {"dim": 0})()]),
        PlacementError,
        r"one of .*; use Shard\(dim\)",
    ),
    "local tensors of mismatched shapes": (
        lambda: DTensor.from_local(dt.per_rank([torch.ones(2, 3), torch.ones(2, 4)]), MESH, [Shard(0)]),
        LayoutError,
        r"rank 1 .*\(2, 4\)",
    ),
    "too few local tensors": (
        lambda: DTensor.from_local(dt.per_rank([torch.ones(2)]), MESH, [R]),
        LayoutError,
        "which has 2 ranks",
    ),
    "DTensor as a local tensor": (lambda: DTensor.from_local(make(4), MESH, [R]), LayoutError, "to_local"),
    "DTensor constructor": (lambda: DTensor(torch.ones(3)), DTensorError, "distribute_tensor"),
    "plain tensor as data": (lambda: setattr(make(4), "data", torch.ones(4)), LayoutError, "distribute_tensor"),
    "in-place operator with another shape": (lambda: make(1, 4).add_(make(3, 4)), RuntimeError, "shape"),
    "in-place operator that needs a larger tensor": (lambda: make(1).add_(make(8)), RuntimeError, "shape"),
    "source rank outside of the mesh": (
        lambda: dt.distribute_tensor(torch.ones(4), MESH, [R], src_data_rank=2),
        MeshError,
        "src_data_rank=2",
    ),
    "average of integers": (
        lambda: DTensor.from_local(torch.ones(3, dtype=torch.int64), MESH, [Partial("avg")]).full_tensor(),
        LayoutError,
        r"average of.*Partial\('sum'\)",
    ),
    "maximum of complex numbers": (
        lambda: DTensor.from_local(torch.ones(3, dtype=torch.complex64), MESH, [Partial("max")]).full_tensor(),
        LayoutError,
        "not ordered",
    ),
    "sparse factory": (lambda: dt.zeros(3, device_mesh=MESH, layout=torch.sparse_coo), PlacementError, "strided"),
    "unknown option of a factory": (lambda: dt.zeros(3, device_mesh=MESH, colour=1), TypeError, "colour"),
    "factory without a mesh": (lambda: dt.zeros(3), MeshError, "no device mesh"),
}
INVALID_PLACEMENTS = (5, "R0", {0: R}, {R}, [[Shard(0)]], [None], [Shard], [R, R])
for value in INVALID_PLACEMENTS:
    for function, call in {
        "distribute_tensor": lambda value=value: dt.distribute_tensor(torch.ones(4), MESH, value),
        "zeros": lambda value=value: dt.zeros(4, device_mesh=MESH, placements=value),
        "redistribute": lambda value=value: make(4).redistribute(placements=value),
        "redistribute_many": lambda value=value: dt.redistribute_many(
            [make(4)], value if isinstance(value, (int, str)) else [value]
        ),
        "from_local": lambda value=value: DTensor.from_local(torch.ones(4), MESH, value),
        "grad_placements of to_local": lambda value=value: make(4).to_local(grad_placements=value),
        "grad_placements of full_tensor": lambda value=value: make(4).full_tensor(grad_placements=value),
        "explain_redistribute": lambda value=value: make(4).explain_redistribute(value),
    }.items():
        CASES[f"placements {value}, {function}"] = (call, PlacementError, "placement")
for value in (None, "x", 3, [1.0, 2.0], torch.nn.Linear(2, 2)):
    CASES[f"distribute_tensor of {value}"] = (
        lambda value=value: dt.distribute_tensor(value, MESH, [R]),
        ArgumentError,
        "torch.Tensor",
    )
    CASES[f"from_local of {value}"] = (lambda value=value: DTensor.from_local(value, MESH, [R]), TypeError, "torch.Tensor")
NON_STRIDED: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
}
for name, tensor in NON_STRIDED.items():
    for placement in (R, Shard(0)):
        CASES[f"distribute_tensor of a {name} tensor, {placement}"] = (
            lambda tensor=tensor, placement=placement: dt.distribute_tensor(tensor(), MESH, [placement]),
            UnsupportedOperationError,
            "strided|dtype",
        )
        CASES[f"from_local of a {name} tensor, {placement}"] = (
            lambda tensor=tensor, placement=placement: DTensor.from_local(tensor(), MESH, [placement]),
            UnsupportedOperationError,
            "strided|dtype",
        )
for size in ("3", 3.0, None, True, ((3,), 4)):
    CASES[f"zeros of size {size}"] = (lambda size=size: dt.zeros(size, device_mesh=MESH), ArgumentError, "ints")
    CASES[f"randn of size {size}"] = (lambda size=size: dt.randn(size, device_mesh=MESH), ArgumentError, "ints")
for size in ((8, 3), "48", 8, (8.0,), (None,)):
    CASES[f"from_local with global shape {size}"] = (
        lambda size=size: DTensor.from_local(torch.ones(4), MESH, [Shard(0)], shape=size),
        DTensorError,
        "ints|local tensor of shape|numbers of dims",
    )
CASES |= {
    "negative size": (lambda: dt.zeros(-1, device_mesh=MESH), RuntimeError, "non-negative"),
    "negative stride": (
        lambda: DTensor.from_local(torch.ones(4), MESH, [Shard(0)], stride=(-1,)),
        LayoutError,
        "non-negative",
    ),
    "str as dtype": (lambda: dt.zeros(3, device_mesh=MESH, dtype="float32"), TypeError, "dtype"),
    "str as backward_dtype": (lambda: make(4).redistribute(backward_dtype="float32"), ArgumentError, "torch.dtype"),
    "device of a factory call": (
        lambda: dt.zeros(3, device_mesh=MESH, device="cpu"),
        TypeError,
        "the device is that of the mesh",
    ),
    "redistribute_many of one tensor": (lambda: dt.redistribute_many(make(2, 2), [R]), DTensorError, "placements|DTensors"),
    "too many local tensors": (
        lambda: DTensor.from_local(dt.per_rank([torch.ones(2)] * 3), MESH, [R]),
        LayoutError,
        "has 2 ranks",
    ),
    "local_map with an output that is not a tensor": (
        lambda: dt.local_map(lambda x: 3, [R])(make(4)),
        PlacementError,
        "None in its place",
    ),
    "register_sharding of an operator name": (lambda: dt.register_sharding("aten.add"), DTensorError, "overload"),
    "distribute_module of a tensor": (lambda: dt.distribute_module(torch.ones(3), MESH), ArgumentError, "nn.Module"),
    "str as input_fn": (lambda: dt.distribute_module(torch.nn.ReLU(), MESH, input_fn="x"), ArgumentError, "input_fn"),
    "output_fn with too few parameters": (
        lambda: dt.distribute_module(torch.nn.ReLU(), MESH, output_fn=lambda outputs: outputs),
        ArgumentError,
        "output_fn takes",
    ),
    "capture of a str": (lambda: dt.capture("x"), ArgumentError, "function"),
    "visualize_sharding of a plain tensor": (lambda: dt.debug.visualize_sharding(torch.ones(3)), ArgumentError, "DTensor"),
    "str as the mesh of manual_seed": (lambda: dt.manual_seed(0, "cpu"), MeshError, "device mesh"),
    "str as src_data_rank": (
        lambda: dt.distribute_tensor(torch.ones(4), MESH, [R], src_data_rank="0"),
        ArgumentError,
        "ints",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_invalid_call_raises_the_expected_error_class_and_text(name: str) -> None:
    fn, kind, message = CASES[name]
    with pytest.raises(kind, match=f"(?s){message}"):
        fn()


@pytest.mark.parametrize("name", CASES)
def test_invalid_call_raises_before_any_collective(name: str) -> None:
    observed: list[events.Event] = []
    with events.listening(observed.append), pytest.raises(CASES[name][1]):
        CASES[name][0]()
    assert [event.kind for event in observed if event.kind != "all_gather_object"] == []


def test_error_classes_are_dtensor_errors_and_builtin_errors() -> None:
    assert issubclass(PlacementError, DTensorError)
    assert issubclass(PlacementError, ValueError)
    assert issubclass(MixedTensorError, RuntimeError)
    assert issubclass(UnsupportedOperationError, NotImplementedError)
    assert issubclass(DTensorError, RuntimeError)


def write_before_backward(y: torch.Tensor) -> None:
    total = y.square().sum()
    y.add_(1)
    total.backward()


# --- errors of plain torch ------------------------------------------------------------------------------------------
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
    "item of several elements": lambda x: x.item(),
    "bool of several elements": lambda x: bool(x),
    "a float as an index": lambda x: [1, 2][x[0, 0] * 0],
    "softmax of integers": lambda x: torch.softmax(x.long(), 0),
    "permute with a repeated dim": lambda x: x.permute(0, 0),
    "a split with a wrong sum": lambda x: x.split([1, 1], 0),
    "an unknown reduction": lambda x: torch.nn.functional.mse_loss(x, x, reduction="most"),
    "backward of several elements": lambda x: (x * 2).backward(),
    "backward without a graph": lambda x: x.detach().sum().backward(),
    "backward twice": lambda x: [y.backward() for y in [(x * x).sum()] * 2],
    "requires_grad of integers": lambda x: x.long().requires_grad_(),
    "no requires_grad for a result": lambda x: (x * 2).requires_grad_(False),
    "an in-place write to a tensor saved for backward": lambda x: write_before_backward(x * 2),
    "numpy of a leaf": lambda x: x.numpy(),
}


@pytest.mark.parametrize("placements", [[R], [Shard(0)], [Shard(1)]], ids=str)
@pytest.mark.parametrize("name", PLAIN_ERRORS)
def test_invalid_operator_call_raises_the_error_of_plain_torch(name: str, placements: list[Any]) -> None:
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
def test_invalid_indexing_raises_the_text_of_plain_torch(pick: Callable[..., Any]) -> None:
    x = torch.arange(30.0).reshape(5, 6)
    with pytest.raises((IndexError, RuntimeError)) as plain:
        pick(x, torch.tensor)
    with pytest.raises(plain.type, match=re.escape(str(plain.value))):
        pick(dt.distribute_tensor(x, MESH, [Shard(0)]), lambda i: dt.distribute_tensor(torch.tensor(i), MESH, [R]))


# --- errors of explicit() and the gather warning --------------------------------------------------------------------
def test_explicit_refuses_an_operator_that_needs_a_redistribution_and_names_it() -> None:
    x, y = make(4, 6), make(4, 6, placements=[Shard(1)])
    with dt.explicit(), pytest.raises(ImplicitCommunicationError, match=r"(?s)add.*S\("):
        x + y
    with dt.explicit():
        assert torch.equal((x + y.redistribute(placements=[Shard(0)])).full_tensor(), torch.full((4, 6), 2.0))


def test_explicit_allows_operators_without_communication() -> None:
    with dt.explicit():
        x = make(4, 6)
        assert ((x * 2 + x).relu() @ make(6, 3, placements=[R])).placements == (Shard(0),)
        assert x.sum().placements == (Partial(),)


def test_explicit_refuses_gather_fallbacks_and_kernels_with_collectives() -> None:
    x = make(4, 6)
    for fn in (lambda: torch.linalg.svd(x), lambda: torch.softmax(x, 0), lambda: x.sum().item()):
        with dt.explicit(), pytest.raises(ImplicitCommunicationError):
            fn()


def test_explicit_allows_the_backward_of_an_explicit_redistribution() -> None:
    x = make(4, 6).requires_grad_()
    with dt.explicit():
        (x.redistribute(placements=[R]) * 2).sum().backward()
    assert x.grad is not None


def test_gather_warning_is_raised_once_per_operator() -> None:
    from dtensor.errors import GatherWarning

    torch.library.define("proof::unruly", "(Tensor x) -> Tensor")
    torch.library.impl("proof::unruly", "CompositeExplicitAutograd", lambda x: x.sort(0).values * 2)
    x = make(4, 4)
    with pytest.warns(GatherWarning, match=r"proof::unruly.*all-gathers.* B received per rank") as caught:
        first, second = torch.ops.proof.unruly(x), torch.ops.proof.unruly(x)
    assert len(caught) == 1
    assert torch.equal(first.full_tensor(), torch.full((4, 4), 2.0))
    assert second.placements == (R,)


def test_dim_out_of_range_raises_after_a_call_with_a_tensor_of_more_dims() -> None:
    """Facts of an operator that hold for all sizes are cached for one number of dims only."""
    mesh = dt.DeviceMesh("cpu", 2)
    for shape in ((2, 3, 4), (3, 4, 5)):
        x = dt.ones(*shape, device_mesh=mesh, placements=[dt.Shard(0)])
        assert x.sum(2).shape == shape[:2]
        assert x.softmax(2).shape == shape
    y = dt.ones(3, 4, device_mesh=mesh, placements=[dt.Shard(0)])
    for call in (lambda: y.sum(2), lambda: y.softmax(2)):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize(
    ("scatter_into", "shape"),
    [
        (lambda x: x.select_scatter(x, 0, 0), ()),
        (lambda x: x.slice_scatter(x, 0, 0, 1), ()),
        (lambda x: x.diagonal_scatter(x), ()),
        (lambda x: x.select_scatter(x[0], 0, 1), (1, 6)),
        (lambda x: x.select_scatter(x[0], 0, -3), (2, 6)),
    ],
)
def test_scatter_operators_with_dim_or_index_out_of_range_raise_index_error(
    scatter_into: Callable[[Any], Any], shape: tuple[int, ...]
) -> None:
    x = torch.ones(shape)
    for operand in (x, dt.distribute_tensor(x, dt.init_device_mesh("cpu", (2,)), [dt.Replicate()])):
        with pytest.raises(IndexError):
            scatter_into(operand)


ROWS = dt.distribute_tensor(torch.ones(4, 2), MESH, [Shard(0)])
TWO_LAYOUTS: Any = (Replicate(), None)


def apply_twice(make: Callable[..., nn.Module]) -> None:
    model = make(nn.Linear(2, 2), mesh=MESH)
    make(model, mesh=MESH)


def run_local_map(function: Callable[..., Any], inputs: Any, outputs: Any) -> None:
    dt.local_map(function, out_placements=outputs, in_placements=inputs, device_mesh=MESH)(ROWS, ROWS)


CONTRADICTIONS: dict[str, Callable[[], Any]] = {
    "input layouts of different lengths": lambda: PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=TWO_LAYOUTS),
    "input layouts without desired ones": lambda: PrepareModuleInput(input_layouts=Shard(0)),
    "output layouts of different lengths": lambda: PrepareModuleOutput(
        output_layouts=Shard(0), desired_output_layouts=TWO_LAYOUTS
    ),
    "fully_shard twice": lambda: apply_twice(fully_shard),
    "replicate twice": lambda: apply_twice(replicate),
    "None as the placement of a DTensor": lambda: run_local_map(torch.add, ([Shard(0)], None), [Shard(0)]),
    "too few in_placements": lambda: run_local_map(torch.add, ([Shard(0)],), [Shard(0)]),
    "too many out_placements": lambda: run_local_map(torch.add, None, ([Shard(0)], [Shard(0)])),
    "placements for an output that is a number": lambda: run_local_map(lambda x, y: 3, None, ([Shard(0)],)),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictory_arguments_raise_contradiction_error_and_assertion_error(name: str) -> None:
    with pytest.raises(AssertionError) as caught:
        CONTRADICTIONS[name]()
    assert isinstance(caught.value, ContradictionError)


def test_local_map_requires_placements_for_each_dtensor_argument() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(torch.ones(4, 2), mesh, [dt.Shard(0)])
    with pytest.raises(dt.errors.PlacementError, match="argument 1 is a DTensor"):
        dt.local_map(torch.add, out_placements=[dt.Shard(0)], in_placements=([dt.Shard(0)], None))(x, x)
