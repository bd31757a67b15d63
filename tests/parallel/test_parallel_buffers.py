"""Buffers under data parallelism: written in training, of several dtypes, and read again by activation checkpointing."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare_with_one_device import full_value
from gloo_processes import run_gloo
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.testing._internal.two_tensor import TwoTensor

import dtensor as dt
from dtensor import DTensor, Shard
from dtensor.errors import UnsupportedOperationError
from dtensor.parallel import fully_shard, replicate


class Layer(nn.Module):
    """Layer with a factor that backward saves, a counter that each pass writes, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.arange(1.0, 7.0))
        self.register_buffer("quantized", torch.arange(-3, 3, dtype=torch.int8))
        self.register_buffer("passes", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.norm(self.linear(x) * self.scale + self.quantized * x).relu()


_checkpointed = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def _checkpoint_layers(model: nn.Sequential) -> None:
    for k in range(2):
        model[k] = _checkpointed(model[k])


def _check(how: str, recomputed: str) -> None:
    torch.manual_seed(0)
    mesh = dt.init_device_mesh("cpu", (2,))
    model = nn.Sequential(Layer(), Layer(), nn.Linear(6, 3).double())
    ranks = [copy.deepcopy(model) for _ in range(2)]
    if recomputed == "inside":
        _checkpoint_layers(model)
    if how == "fully_shard":
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        replicate(model, mesh)
    for alone in (*ranks, model) if recomputed == "outside" else ranks if recomputed else []:
        _checkpoint_layers(alone)
    batch = torch.randn(8, 6, dtype=torch.float64)
    own = dt.distribute_tensor(batch, mesh, [Shard(0)]).to_local()
    for _ in range(2):
        model(own).square().mean().backward()
        for alone, part in zip(ranks, batch.chunk(2), strict=True):
            alone(part).square().mean().backward()
        for p, *pair in zip(model.parameters(), *(alone.parameters() for alone in ranks), strict=True):
            torch.testing.assert_close(full_value(p.grad), (pair[0].grad + pair[1].grad) / 2)
        for b, first, second in zip(model.buffers(), *(alone.buffers() for alone in ranks), strict=True):
            assert isinstance(b, DTensor)
            torch.testing.assert_close(full_value(b), first)
            second.copy_(first)


CASES = [(how, recomputed) for how in ("fully_shard", "replicate") for recomputed in ("", "inside", "outside")]


@pytest.mark.parametrize(("how", "recomputed"), CASES)
def test_buffers_of_units_equal_those_of_the_first_rank(how: str, recomputed: str) -> None:
    _check(how, recomputed)


@pytest.mark.parametrize("make", [fully_shard, replicate])
def test_wrapper_subclass_parameters_raise(make: Any) -> None:
    """Check that wrapper subclasses raise, because gathering would lose their inner tensors."""
    mesh, layer = dt.init_device_mesh("cpu", (2,)), nn.Linear(4, 3)
    layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach() * 2))
    ignoring = copy.deepcopy(layer)
    make(layer, mesh=mesh)
    with pytest.raises(UnsupportedOperationError, match="TwoTensor"):
        layer(torch.ones(2, 4))
    make(ignoring, mesh=mesh, ignored_params={ignoring.weight})


def _check_all() -> None:
    for case in CASES:
        _check(*case)


@pytest.mark.gloo
def test_buffers_of_units_equal_those_of_the_first_rank_on_process_groups() -> None:
    run_gloo(_check_all, 2)


class ReadsOtherBuffers(nn.Module):
    """Model that reads another module's buffer, with a norm that two layers share and both update."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Layer(), Layer(), Layer()
        self.first.norm = self.second.norm = nn.BatchNorm1d(6, affine=False).double()

    def forward(self, x: Tensor) -> Tensor:
        factor = self.second.scale * 2
        return self.third(self.second(self.first(x) * factor)) + self.third.scale


@pytest.mark.parametrize("root", [True, False])
def test_buffers_shared_or_read_by_several_units_equal_plain_model(root: bool) -> None:
    torch.manual_seed(0)
    mesh, alone = dt.init_device_mesh("cpu", (2,)), ReadsOtherBuffers()
    model = copy.deepcopy(alone)
    layers = [model.first, model.second, model.third]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    if root:
        fully_shard(model, mesh=mesh)
    x = torch.randn(5, 6, dtype=torch.float64)
    for training in (True, True, False):
        outputs = []
        for one in (alone, model):
            one.train(training)
            parts = (one.first, one.second, one.third)
            outputs.append(one(x) if root else parts[2](parts[1](parts[0](x))))
            outputs[-1].square().mean().backward()
        torch.testing.assert_close(outputs[1].shards[1], outputs[0])
        for ours, theirs in zip(model.buffers(), alone.buffers(), strict=True):
            assert isinstance(ours, DTensor)
            torch.testing.assert_close(full_value(ours), theirs)
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(full_value(ours.grad), theirs.grad)


def _check_broadcast() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    fully_shard(model, mesh=mesh)
    running = model[0].running_mean
    assert isinstance(running, dt.DTensor)
    running.to_local().fill_(float(dist.get_rank()) + 2)
    dist.broadcast(running, src=1)  # as in programs that load on one rank
    if dist.get_rank() == 1:  # this rank has no values to load, and allocates memory
        model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, {"1.bias": torch.ones(3)} if dist.get_rank() == 0 else {}, options=options)
    assert model[1].bias.full_tensor().tolist() == [1.0, 1.0, 1.0]
    running.to_local().fill_(float(dist.get_rank()) + 2)
    dist.broadcast(running, src=1)
    assert running.full_tensor().tolist() == [3.0, 3.0, 3.0]
    assert running.to_local().tolist() == [3.0, 3.0, 3.0]
    for refused in (model[1].weight.detach(), dt.DTensor.from_local(torch.ones(2), mesh, [dt.Partial()])):
        with pytest.raises(UnsupportedOperationError, match="take local tensors"):
            dist.broadcast(refused, src=0)
    with pytest.raises(UnsupportedOperationError, match="take local tensors"):
        dist.all_reduce(running)


@pytest.mark.gloo
def test_dist_broadcast_takes_only_replicated_buffers_on_process_groups() -> None:
    run_gloo(_check_broadcast, 2)
