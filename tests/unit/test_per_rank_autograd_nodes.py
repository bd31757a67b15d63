"""Autograd nodes of per-rank tensors: their attributes, edges and hooks, and torch's tools that use them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import dtensor as dt
from dtensor.comm import PerRank, RankValues
from dtensor.errors import LayoutError
from dtensor.ranks.joint_functions import RankNodes, patch_hooks, unpatch_hooks


def leaves() -> PerRank:
    return dt.per_rank([torch.arange(3.0) + rank for rank in range(2)]).requires_grad_()


def lists(x: Any) -> list[Any]:
    assert isinstance(x, PerRank)
    return [shard.tolist() for shard in x.shards]


# --- nodes ---------------------------------------------------------------------------------------------------------------------
def test_a_graph_is_walked_from_the_result_to_the_leaves() -> None:
    x = leaves()
    node = (x * 2).sum().grad_fn
    assert isinstance(node, RankNodes)
    assert node.name() == "SumBackward0"
    ((product, number),) = node.next_functions
    assert number == 0
    (leaf, _), nothing = product.next_functions
    assert nothing == (None, 0)
    assert all(variable is shard for variable, shard in zip(leaf.variable.shards, x.shards, strict=True))


def test_attributes_of_nodes_are_each_ranks_own() -> None:
    x = dt.per_rank([torch.ones(2, 3), torch.ones(4, 3) * 2]).requires_grad_()
    node = x.square().sum(0).grad_fn
    assert node._saved_dim == (0,)
    rows, columns = node._saved_self_sym_sizes
    assert (rows.values, columns) == ((2, 4), 3)
    assert lists(node.next_functions[0][0]._saved_self) == lists(x)
    with pytest.raises(AttributeError, match="nothing"):
        node.nothing  # noqa: B018


def test_a_shared_plain_tensor_has_one_node() -> None:
    w = torch.ones(3, requires_grad=True)
    product = (leaves() * w).grad_fn.next_functions
    shared, position = product[1]
    assert shared.name() == "ReplicateToRanksBackward"
    assert position.values == (0, 1)
    assert shared.next_functions[0][0].variable is w


def test_ranks_with_other_graphs() -> None:
    x = dt.per_rank([torch.ones(2, requires_grad=True) * 2, torch.ones(2, requires_grad=True).exp()])
    assert isinstance(x.grad_fn, RankNodes)
    with pytest.raises(LayoutError, match="differs between ranks"):
        x.grad_fn.name()
    assert isinstance(x.grad_fn.next_functions, RankValues)


def test_hooks_of_nodes_run_on_each_rank() -> None:
    seen: list[Tensor] = []
    y = leaves() * 2
    handles = y.grad_fn.register_hook(lambda into, out: seen.append(into[0]))
    y.sum().backward(retain_graph=True)
    assert [grad.tolist() for grad in seen] == [[2.0] * 3] * 2
    handles.remove()
    y.sum().backward()
    assert len(seen) == 2


def test_gradients_at_an_edge() -> None:
    x = leaves()
    y = x * 2
    z = (y * y).sum()
    (at_leaf,) = torch.autograd.grad(z, get_gradient_edge(x), retain_graph=True)
    assert lists(at_leaf) == lists(8 * x)
    at_edges = torch.autograd.grad(z, [get_gradient_edge(y), x], retain_graph=True)
    assert [lists(grad) for grad in at_edges] == [lists(2 * y), lists(8 * x)]
    z.backward(inputs=[get_gradient_edge(x)])
    assert lists(x.grad) == lists(8 * x)


# --- hooks over several tensors ------------------------------------------------------------------------------------------------
def test_a_hook_over_tensors_gets_all_ranks_gradients_once() -> None:
    seen: list[Any] = []
    x, w = leaves(), torch.ones(3, requires_grad=True)
    y = x * w
    unused = leaves()
    handle = torch.autograd.graph.register_multi_grad_hook([x, y, w, unused], seen.append)
    (y * 2).sum().backward(retain_graph=True, inputs=[x, *y.shards])
    ((dx, dy, dw, nothing),) = seen
    assert (lists(dx), lists(dy), dw, nothing) == ([[2.0] * 3] * 2, [[2.0] * 3] * 2, None, None)
    handle.remove()
    (y * 2).sum().backward(inputs=[x])
    assert len(seen) == 1


def test_a_hook_over_plain_tensors_is_torchs() -> None:
    seen: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    torch.autograd.graph.register_multi_grad_hook([x], seen.append, mode="any")
    x.sum().backward()
    assert [grad.tolist() for grad in seen] == [[1.0] * 3]


def test_modules_are_tracked_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def tracked(model: nn.Module, x: Any) -> list[set[str]]:
        seen: list[set[str]] = []
        with ModuleTracker() as tracker:
            model[0].register_full_backward_hook(lambda *_: seen.append(set(tracker.parents)))
            model[1].register_forward_hook(lambda *_: seen.append(set(tracker.parents)))
            model(x).sum().backward()
            seen.append(set(tracker.parents))
        return seen

    seen = tracked(model, dt.per_rank([torch.arange(3.0) for _ in range(2)]).requires_grad_())
    assert seen == tracked(plain, torch.arange(3.0).requires_grad_())
    assert "Sequential" in seen[0]


def test_flops_are_those_of_all_ranks() -> None:
    def flops(x: Any) -> int:
        torch.manual_seed(0)
        with FlopCounterMode(display=False) as counter:
            nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))(x).square().sum().backward()
        return counter.get_total_flops()

    x = torch.arange(12.0).reshape(4, 3)
    assert flops(dt.per_rank([x, x]).requires_grad_()) == 2 * flops(x.clone().requires_grad_())


def test_torch_gets_its_own_function_again() -> None:
    patch_hooks()
    ours = torch.autograd.graph.register_multi_grad_hook
    unpatch_hooks()
    assert torch.autograd.graph.register_multi_grad_hook is not ours
    patch_hooks()
    assert torch.autograd.graph.register_multi_grad_hook is ours
