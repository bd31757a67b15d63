"""Copies of DTensors: deepcopy, pickle, torch.save, and multiprocessing queues."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.comm import PerRank
from dtensor.errors import DTensorError
from dtensor.tensor.copies import restore_tensor
from dtensor.testing import scatter

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")

MESH = dt.init_device_mesh("cpu", (2,))
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


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_deepcopy_copies_the_local_tensors(placements: list[Any]) -> None:
    x = scatter(value(5, 6), MESH, placements)
    other = copy.deepcopy(x)
    assert other.layout is x.layout
    x.zero_()
    assert torch.equal(other.full_tensor(), value(5, 6))


def test_deepcopy_keeps_a_gradient_of_another_dtype() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    weight = nn.Parameter(dt.distribute_tensor(torch.ones(4, dtype=torch.bfloat16), mesh, [dt.Shard(0)]))
    weight.grad_dtype = torch.float32
    (weight.float() * 1.001).sum().backward()
    result = copy.deepcopy(weight)
    assert result.grad is not None
    assert result.grad.dtype == torch.float32
    assert torch.equal(result.grad.full_tensor(), weight.grad.full_tensor())


def test_deepcopy_of_a_module_keeps_parameters_ties_and_gradients() -> None:
    module = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    module[1].weight = module[0].weight
    dt.distribute_module(module, MESH)
    module[1].weight = module[0].weight
    module[0].weight.sum().backward()
    other = copy.deepcopy(module)
    assert other[0].weight is other[1].weight
    assert isinstance(other[0].weight, nn.Parameter)
    assert other[0].weight.grad.full_tensor().unique().tolist() == [1]


def test_deepcopy_of_a_computed_tensor_raises_as_in_plain_torch() -> None:
    x = dt.ones(3, device_mesh=MESH, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"detach"):
        copy.deepcopy(x)


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_deepcopy_and_pickle_keep_user_attributes_of_a_tensor(placements: list[Any]) -> None:
    x = dt.distribute_tensor(value(5, 6), MESH, placements).requires_grad_()
    x.mark = {"group": ["a"]}
    result = copy.deepcopy(x)
    assert result.mark == {"group": ["a"]}
    assert result.mark is not x.mark
    (result * 2).sum().backward()
    assert pickle.loads(pickle.dumps(x)).mark == {"group": ["a"]}


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_pickle_round_trip_keeps_value_placements_and_mesh(placements: list[Any]) -> None:
    x = scatter(value(5, 6), MESH, placements).requires_grad_()
    other = pickle.loads(pickle.dumps(x))
    assert other.requires_grad
    assert other.placements == x.placements
    assert other.device_mesh == MESH
    assert torch.equal(other.detach().full_tensor(), value(5, 6))


# --- processes ------------------------------------------------------------------------------------------------------
X = torch.arange(30.0).reshape(5, 6)
VIEWS = [lambda x: x, lambda x: x[1:4], lambda x: x[2], lambda x: x.t(), lambda x: x.view(-1)]


def _double_in_process(tensors: Any, answers: Any) -> None:
    for _ in VIEWS:
        x = tensors.get(timeout=60)
        with torch.no_grad():
            x.mul_(2)
        answers.put((type(x).__name__, x.detach().full_tensor().tolist()))


def test_tensors_sent_through_a_queue_share_memory() -> None:
    context = mp.get_context("fork")  # starts no new interpreter
    tensors, answers = context.Queue(), context.Queue()
    process = context.Process(target=_double_in_process, args=(tensors, answers), daemon=True)
    process.start()
    mesh = dt.init_device_mesh("cpu", (2,))
    try:
        for view in VIEWS:
            x = view(scatter(X, mesh, [Shard(0)]))
            tensors.put(x)
            kind, value = answers.get(timeout=60)  # torch requires that the sender lives until now
            assert kind == "DTensor"
            assert value == (view(X) * 2).tolist()
            assert x.is_shared() or not x._local_tensor.numel()
    finally:
        process.join(10)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_copied_pickled_and_sent_views_keep_values_and_layouts(placement: Any) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    for view in VIEWS:
        x = view(scatter(X, mesh, [placement, Shard(0)]))
        sent = pickle.loads(bytes(ForkingPickler.dumps(x)))
        for other in (sent, pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
            assert isinstance(other, DTensor)
            assert other.layout == x.layout
            assert torch.equal(other.full_tensor(), view(X))
        leaf = x.detach().requires_grad_()
        leaf.mark = "mine"
        assert copy.copy(leaf).requires_grad
        assert copy.copy(leaf).mark == "mine"


def test_restoring_one_local_tensor_without_a_process_group_raises() -> None:
    layout = scatter(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)]).layout
    with pytest.raises(DTensorError, match=r"one rank's local tensor.*full_tensor"):
        restore_tensor(X[:3], layout, False, False)
    assert restore_tensor(PerRank([X[:3], X[3:]]), layout, False, False).shape == (5, 6)
