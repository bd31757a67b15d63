"""Autograd nodes of per-rank tensors: their attributes, edges and hooks, and the torch tools that use them."""

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


def make_leaf() -> PerRank:
    return dt.per_rank([torch.arange(3.0) + rank for rank in range(2)]).requires_grad_()


def lists(x: Any) -> list[Any]:
    assert isinstance(x, PerRank)
    return [shard.tolist() for shard in x.shards]


# --- nodes ----------------------------------------------------------------------------------------------------------
def test_next_functions_of_nodes_lead_to_the_leaves() -> None:
    x = make_leaf()
    node = (x * 2).sum().grad_fn
    assert isinstance(node, RankNodes)
    assert node.name() == "SumBackward0"
    ((product, number),) = node.next_functions
    assert number == 0
    (leaf, _), unused_grad = product.next_functions
    assert unused_grad == (None, 0)
    assert all(variable is shard for variable, shard in zip(leaf.variable.shards, x.shards, strict=True))


def test_saved_attributes_of_nodes_are_per_rank() -> None:
    x = dt.per_rank([torch.ones(2, 3), torch.ones(4, 3) * 2]).requires_grad_()
    node = x.square().sum(0).grad_fn
    assert node._saved_dim == (0,)
    rows, columns = node._saved_self_sym_sizes
    assert (rows.values, columns) == ((2, 4), 3)
    assert lists(node.next_functions[0][0]._saved_self) == lists(x)
    with pytest.raises(AttributeError, match="nothing"):
        node.nothing  # noqa: B018


def test_a_plain_operand_has_one_node_for_all_ranks() -> None:
    w = torch.ones(3, requires_grad=True)
    product = (make_leaf() * w).grad_fn.next_functions
    shared, position = product[1]
    assert shared.name() == "ReplicateToRanksBackward"
    assert position.values == (0, 1)
    assert shared.next_functions[0][0].variable is w


def test_node_names_raise_if_ranks_have_different_graphs() -> None:
    x = dt.per_rank([torch.ones(2, requires_grad=True) * 2, torch.ones(2, requires_grad=True).exp()])
    assert isinstance(x.grad_fn, RankNodes)
    with pytest.raises(LayoutError, match="differs between ranks"):
        x.grad_fn.name()
    assert isinstance(x.grad_fn.next_functions, RankValues)


def test_hooks_of_nodes_run_for_each_rank() -> None:
    observed: list[Tensor] = []
    y = make_leaf() * 2
    handles = y.grad_fn.register_hook(lambda into, out: observed.append(into[0]))
    y.sum().backward(retain_graph=True)
    assert [grad.tolist() for grad in observed] == [[2.0] * 3] * 2
    handles.remove()
    y.sum().backward()
    assert len(observed) == 2


def test_gradients_at_a_gradient_edge_are_per_rank() -> None:
    x = make_leaf()
    y = x * 2
    z = (y * y).sum()
    (at_leaf,) = torch.autograd.grad(z, get_gradient_edge(x), retain_graph=True)
    assert lists(at_leaf) == lists(8 * x)
    at_edges = torch.autograd.grad(z, [get_gradient_edge(y), x], retain_graph=True)
    assert [lists(grad) for grad in at_edges] == [lists(2 * y), lists(8 * x)]
    z.backward(inputs=[get_gradient_edge(x)])
    assert lists(x.grad) == lists(8 * x)


# --- hooks over several tensors -------------------------------------------------------------------------------------
def test_a_multi_grad_hook_gets_the_gradients_of_all_ranks_once() -> None:
    observed: list[Any] = []
    x, w = make_leaf(), torch.ones(3, requires_grad=True)
    y = x * w
    unused = make_leaf()
    handle = torch.autograd.graph.register_multi_grad_hook([x, y, w, unused], observed.append)
    (y * 2).sum().backward(retain_graph=True, inputs=[x, *y.shards])
    ((dx, dy, dw, unused_grad),) = observed
    assert (lists(dx), lists(dy), dw, unused_grad) == ([[2.0] * 3] * 2, [[2.0] * 3] * 2, None, None)
    handle.remove()
    (y * 2).sum().backward(inputs=[x])
    assert len(observed) == 1


def test_a_multi_grad_hook_over_plain_tensors_is_unchanged() -> None:
    observed: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    torch.autograd.graph.register_multi_grad_hook([x], observed.append, mode="any")
    x.sum().backward()
    assert [grad.tolist() for grad in observed] == [[1.0] * 3]


def test_module_tracker_tracks_modules_with_per_rank_inputs() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def track_parents(model: nn.Module, x: Any) -> list[set[str]]:
        observed: list[set[str]] = []
        with ModuleTracker() as tracker:
            model[0].register_full_backward_hook(lambda *_: observed.append(set(tracker.parents)))
            model[1].register_forward_hook(lambda *_: observed.append(set(tracker.parents)))
            model(x).sum().backward()
            observed.append(set(tracker.parents))
        return observed

    observed = track_parents(model, dt.per_rank([torch.arange(3.0) for _ in range(2)]).requires_grad_())
    assert observed == track_parents(plain, torch.arange(3.0).requires_grad_())
    assert "Sequential" in observed[0]


def test_flop_counter_counts_all_ranks() -> None:
    def count_flops(x: Any) -> int:
        torch.manual_seed(0)
        with FlopCounterMode(display=False) as counter:
            nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))(x).square().sum().backward()
        return counter.get_total_flops()

    x = torch.arange(12.0).reshape(4, 3)
    assert count_flops(dt.per_rank([x, x]).requires_grad_()) == 2 * count_flops(x.clone().requires_grad_())


def test_unpatch_hooks_restores_register_multi_grad_hook() -> None:
    patch_hooks()
    patched = torch.autograd.graph.register_multi_grad_hook
    unpatch_hooks()
    assert torch.autograd.graph.register_multi_grad_hook is not patched
    patch_hooks()
    assert torch.autograd.graph.register_multi_grad_hook is patched
