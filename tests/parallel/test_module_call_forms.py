"""Call forms of modules under data parallelism: inputs, outputs, and the order of calls."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from compare_with_one_device import (
    assert_same_gradients,
    assert_same_parameters_and_gradients,
    make_dp_mesh,
    step_and_clear_gradients,
)
from gloo_processes import run_gloo
from torch import Tensor, nn

import dtensor as dt
from dtensor.comm import Communicator, Pending
from dtensor.comm.communicator import BoundReduction
from dtensor.errors import MeshError
from dtensor.parallel import RowwiseParallel, fully_shard, parallelize_module, replicate

Make = Callable[[nn.Module, dt.DeviceMesh], Any]


def sharded(model: nn.Module, mesh: dt.DeviceMesh) -> Any:
    for child in model.children():
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hybrid(model: nn.Module, mesh: dt.DeviceMesh) -> Any:
    two = mesh.unflatten(0, (1, 2), ("replica", "part"))
    for child in model.children():
        fully_shard(child, mesh=two)
    return fully_shard(model, mesh=two)


MAKES = [sharded, hybrid, replicate]
parts = pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)


def models(module: type[nn.Module], make: Make) -> tuple[Any, Any]:
    torch.manual_seed(0)
    alone = module().double()
    return make(copy.deepcopy(alone), make_dp_mesh()), alone


def batch(count: int = 1) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(2)] for _ in range(count)]


def own(given: list[Tensor]) -> Any:
    return dt.per_rank([x.clone() for x in given])


def both_backward(model: nn.Module, alone: nn.Module, given: list[Tensor]) -> None:
    """Run backward of both models on the mean loss of the ranks."""
    model(own(given)).square().mean().backward()
    torch.stack([alone(x).square().mean() for x in given]).mean().backward()


# --- inputs and outputs -------------------------------------------------------------------------------------------------
class Named(NamedTuple):
    out: Tensor
    note: str


@dataclass
class Record:
    """Output class that is not a pytree node."""

    out: Tensor
    aux: Tensor


class Nested(nn.Module):
    """Module with keyword arguments and nested outputs, of which one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, more: dict[str, list[Tensor]], scale: float = 1.0) -> dict[str, Any]:
        out = self.first(x) + self.second(more["x"][0]) * scale
        return {"out": Named(out, "kept"), "unused": [self.unused(x), None, 3]}


@parts
def test_nested_inputs_and_outputs_equal_plain_model(make: Make) -> None:
    model, alone = models(Nested, make)
    for given in batch(2):
        made = model(own(given), more={"x": [own(given)]}, scale=0.5)
        assert made["out"].note == "kept"
        assert made["unused"][1:] == [None, 3]
        made["out"].out.square().mean().backward()
        torch.stack([alone(x, more={"x": [x]}, scale=0.5)["out"].out.square().mean() for x in given]).mean().backward()
        assert_same_parameters_and_gradients(model, alone)


class Recording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.side = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Record:
        return Record(self.body(x), self.side(x))


@parts
def test_outputs_in_a_dataclass_equal_plain_model(make: Make) -> None:
    model, alone = models(Recording, make)
    for given in batch(2):
        made = model(own(given))
        (made.out.square().mean() + made.aux.mean()).backward()
        found = [alone(x) for x in given]
        torch.stack([r.out.square().mean() + r.aux.mean() for r in found]).mean().backward()
        assert_same_parameters_and_gradients(model, alone)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@parts
def test_two_forward_passes_before_their_backwards_equal_plain_model(make: Make) -> None:
    model, alone = models(Chain, make)
    first, second = batch(2)
    outs = [model(own(given)).square().mean() for given in (first, second)]
    for out in outs:
        out.backward()
    for given in (first, second):
        torch.stack([alone(x).square().mean() for x in given]).mean().backward()
    assert_same_parameters_and_gradients(model, alone)


@parts
def test_input_gradients_of_data_parallel_units_equal_plain_model(make: Make) -> None:
    model, alone = models(Chain, make)
    (given,) = batch()
    inputs = [x.clone().requires_grad_() for x in given]
    model(dt.per_rank(inputs)).square().mean().backward()
    for ours, x in zip(inputs, given, strict=True):
        theirs = x.clone().requires_grad_()
        alone(theirs).square().mean().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


# --- the order of calls --------------------------------------------------------------------------------------------------
@parts
def test_evaluation_between_training_steps_equals_plain_model(make: Make) -> None:
    model, alone = models(Chain, make)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for given in batch(3):
        with torch.inference_mode():  # before training steps, which use the buffers allocated here
            model(own(given))
        with torch.no_grad():
            torch.testing.assert_close(model(own(given)).shards[0], alone(given[0]))
        model(own(given)).square().mean().backward()
        with torch.inference_mode():
            model(own(given))
        torch.stack([alone(x).square().mean() for x in given]).mean().backward()
        assert_same_parameters_and_gradients(model, alone)
        step_and_clear_gradients(*optimizers)


@parts
def test_units_in_another_order_in_each_step_equal_plain_model(make: Make) -> None:
    class Either(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else self.c(x) + self.c(self.b(self.a(x)))

    model, alone = models(Either, make)
    for step, given in enumerate(batch(4)):
        for each in (model, alone):
            each.train(step % 2 == 0)
        both_backward(model, alone, given)
        assert_same_parameters_and_gradients(model, alone)


def test_call_of_an_inner_unit_before_the_outer_unit_equals_plain_model() -> None:
    model, alone = models(Chain, sharded)
    for given in batch(2):
        model.a(own(given)).square().mean().backward()
        model(own(given)).square().mean().backward()
        torch.stack([alone.a(x).square().mean() for x in given]).mean().backward()
        torch.stack([alone(x).square().mean() for x in given]).mean().backward()
        assert_same_parameters_and_gradients(model, alone)


@parts
def test_init_and_load_state_dict_after_wrapping_equal_plain_model(make: Make) -> None:
    model, alone = models(Chain, make)
    for each in (model, alone):
        each.apply(lambda module: nn.init.constant_(module.weight, 0.25) if isinstance(module, nn.Linear) else None)
    assert_same_parameters_and_gradients(model, alone)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    alone.load_state_dict({name: value + 1 for name, value in alone.state_dict().items()})
    (given,) = batch()
    both_backward(model, alone, given)
    assert_same_parameters_and_gradients(model, alone)


@parts
def test_units_with_empty_parameters_equal_plain_model(make: Make) -> None:
    class Empty(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.nothing = nn.Tanh(), nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.none(x) + x[:, :0] @ self.nothing)

    model, alone = models(Empty, make)
    for given in batch(2):
        both_backward(model, alone, given)
        assert_same_parameters_and_gradients(model, alone)


@parts
def test_requires_grad_changes_between_steps_equal_plain_model(make: Make) -> None:
    model, alone = models(Chain, make)
    for step, given in enumerate(batch(4)):
        for each in (model, alone):
            each.b.requires_grad_(step % 2 == 0)
            each.a.weight.requires_grad_(step != 1)
            each.zero_grad()
        both_backward(model, alone, given)
        assert_same_parameters_and_gradients(model, alone)


# --- overlap ------------------------------------------------------------------------------------------------------------
def _all_reduces_and_backwards(layers: int = 4) -> list[str]:
    """Return the order of events in a backward with replicas: layers computed, all-reduces started and waited for."""
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    model = nn.Sequential(*(nn.Linear(4, 4).double() for _ in range(layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found: list[str] = []
    plain = Communicator.bind_all_reduce

    def bind_all_reduce(self: Any, mesh_dims: Any, op: Any, dtype: Any) -> BoundReduction:
        run = plain(self, mesh_dims, op, dtype).run

        def told(x: Any) -> Pending[Any]:
            number = sum(what.startswith("started") for what in found)
            found.append(f"started {number}")
            pending = run(x)

            def wait() -> Any:
                found.append(f"waited {number}")
                return pending.wait()

            return Pending(wait)

        return BoundReduction(told)

    x = dt.map_ranks(lambda at: torch.ones(2, 4, dtype=torch.float64, requires_grad=True), mesh=mesh)
    for k, layer in enumerate(model):  # backward hooks run for the last layer first
        layer.register_full_backward_hook(lambda *_, k=k: found.append(f"layer {k}"))
    out = model(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "bind_all_reduce", bind_all_reduce)
        out.sum().backward()
    assert sorted(what for what in found if "waited" in what) == [f"waited {k}" for k in range(layers)]
    return found


def _layers_during_all_reduce(found: list[str], number: int) -> list[str]:
    return [what for what in found[found.index(f"started {number}") : found.index(f"waited {number}")] if "layer" in what]


def test_hsdp_all_reduce_overlaps_with_backward_of_the_next_unit() -> None:
    found = _all_reduces_and_backwards()
    assert all(_layers_during_all_reduce(found, number) for number in range(2)), found


@pytest.mark.gloo
def test_hsdp_all_reduce_overlaps_with_backward_on_process_groups() -> None:
    for found in run_gloo(_all_reduces_and_backwards, 4):
        assert all(_layers_during_all_reduce(found, number) for number in range(2)), found


# --- a batch on the data-parallel dim or on the full mesh ---------------------------------------------------------------
@pytest.mark.parametrize("make", [fully_shard, replicate])
@pytest.mark.parametrize("whole", [False, True], ids=["batch on dp", "batch on dp and tp"])
def test_batch_on_dp_mesh_or_full_mesh_of_partly_styled_module_equals_plain(make: Any, whole: bool) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    model, x = copy.deepcopy(alone), torch.randn(7, 4, dtype=torch.float64)
    style = RowwiseParallel(input_layouts=dt.Replicate(), use_local_output=not whole)
    make(parallelize_module(model, mesh["tp"], {"0": style}), mesh=mesh["dp"])
    batch = dt.distribute_tensor(x, mesh if whole else mesh["dp"], [dt.Shard(0)] + [dt.Replicate()] * whole)
    for one, given in ((model, batch), (alone, x)):
        (one(given) ** 2).sum().backward()
    assert_same_gradients(model, alone)


def test_batch_on_full_mesh_with_local_output_style_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    fully_shard(parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(input_layouts=dt.Replicate())}), mesh=mesh["dp"])
    with pytest.raises(MeshError, match="different meshes"):
        model(dt.distribute_tensor(torch.ones(4, 4), mesh, [dt.Shard(0), dt.Replicate()]))
