"""Activation checkpoint cases: policies see collectives of DTensors, and both passes see and save the same operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from case_lists import S0, S1, CaseList, R, assert_full_value, distribute_values, get_line_mesh, get_square_mesh, make_values
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dtensor as dt
from dtensor import Partial
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

CASES = CaseList()
case = CASES.case
X, W = make_values(6, 8) / 8, make_values(8, 8, seed=1) / 8
FUNCTIONAL = torch.ops._c10d_functional
GATHER, SCATTER = FUNCTIONAL.all_gather_into_tensor.default, FUNCTIONAL.reduce_scatter_tensor.default
REDUCE, EXCHANGE = FUNCTIONAL.all_reduce.default, FUNCTIONAL.all_to_all_single.default


class SavePolicy:
    """Checkpoint policy that saves the results of the given operators; ``seen`` has all operators that it was called with."""

    def __init__(self, *saved: Any) -> None:
        self.saved, self.seen = saved, list[Any]()

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        self.seen.append(op)
        return CheckpointPolicy.MUST_SAVE if op in self.saved else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts(self) -> Any:
        return create_selective_checkpoint_contexts(self)


def count_collectives_of_step(block: Callable[..., Any], x: torch.Tensor, policy: SavePolicy | None) -> tuple[int, torch.Tensor]:
    """Run forward and backward of a checkpointed block; return the number of collectives and the gradient."""
    x = x.detach().requires_grad_()
    with dt.debug.CommDebugMode() as mode:
        y = block(x) if policy is None else checkpoint(block, x, use_reentrant=False, context_fn=policy.contexts)
        y.sum().backward()
    return mode.get_total_counts(), x.grad


def redistributions(*placements: Any, **options: Any) -> Callable[[Any], Any]:
    def block(x: Any) -> Any:
        for where in placements:
            x = x.sin().redistribute(placements=where, **options)
        return x.exp()

    return block


@case
def collectives_saved_by_a_policy_are_not_issued_again_in_recomputation() -> None:
    for op, start, *placements in (
        (GATHER, [S0], [R]),
        (EXCHANGE, [S0], [S1]),
        (SCATTER, [S0], [S1], [R], [S0]),
        (GATHER, [S0, R], [R, R]),
    ):
        saved = (op, GATHER, EXCHANGE)
        for options in ({}, {"async_op": True}):
            block, policy = redistributions(*placements, **options), SavePolicy(*saved)
            plain, gradient = count_collectives_of_step(block, distribute_values(X, *start), None)
            kept, same = count_collectives_of_step(block, distribute_values(X, *start), policy)
            assert kept == plain, (op, options)
            again, also = count_collectives_of_step(block, distribute_values(X, *start), SavePolicy())
            assert again > plain, (op, options)
            for found in (same, also):
                assert_full_value(
                    found, gradient.full_tensor() if not isinstance(whole := gradient.full_tensor(), dt.PerRank) else whole[0]
                )


@case
def a_policy_gets_the_functional_collective_of_each_redistribution() -> None:
    found = {}
    for name, start, target in (("gather", S0, R), ("exchange", S0, S1), ("scatter", Partial(), S0), ("reduce", Partial(), R)):
        policy = SavePolicy()
        count_collectives_of_step(lambda x, to=target: x.redistribute(placements=[to]), distribute_values(X, start), policy)
        found[name] = [op for op in policy.seen if op.namespace == "_c10d_functional"]
        assert all(op.namespace == "_c10d_functional" for op in policy.seen), policy.seen
    assert found == {"gather": [GATHER], "exchange": [EXCHANGE], "scatter": [SCATTER], "reduce": [REDUCE]}


@case
def backward_after_a_write_to_a_saved_collective_raises() -> None:
    def block(x: Any) -> Any:
        y = x.redistribute(placements=[R])
        z = y * 2
        return z.sin() + y.mul_(3).detach()

    x = distribute_values(X, S0).requires_grad_()
    y = checkpoint(block, x, use_reentrant=False, context_fn=SavePolicy(GATHER).contexts)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "mutated" in str(error), error  # noqa: PT017  on four processes there is no pytest.raises of each rank
    else:
        raise AssertionError("a saved value that was written to was used")


# --- both passes see the same operators ---------------------------------------------------------------------------------
class LogOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(make_values(4, 8, 12) / 16), nn.Parameter(make_values(4, 12, 8, seed=1) / 16)

    def forward(self, x: Any) -> Any:
        return torch.bmm(torch.bmm(x.unsqueeze(0).expand(4, -1, -1), self.w1).relu(), self.w2).sum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.experts = nn.Linear(8, 8).double(), nn.LayerNorm(8).double(), Experts()

    def forward(self, x: Any) -> Any:
        return x + self.experts(self.norm(self.a(x).relu()))


def make_expert_blocks(checkpointed: Callable[[nn.Module], nn.Module], mesh: Any, **options: Any) -> nn.Module:
    """Return three blocks with experts, each block wrapped by ``checkpointed``; blocks and experts are FSDP units."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(3)))
    for i, block in enumerate(net):
        net[i] = checkpointed(block)
        fully_shard(block.experts, mesh=mesh, shard_placement_fn=lambda p: S1, **options)
        fully_shard(net[i], mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def train_two_steps(net: nn.Module, mesh: Any) -> list[Any]:
    """Train a network for two steps on distributed batches and return its full parameters."""
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for seed in range(2):
        x = dt.distribute_tensor(make_values(8, 8, seed=seed) / 8, mesh, [R] * (mesh.ndim - 1) + [S0])
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in net.parameters()]


@case
def gathers_of_a_nested_unit_are_not_seen_by_policies() -> None:
    aten = torch.ops.aten
    movers = [aten.cat.default, aten.view.default, aten.as_strided.default, aten.copy_.default, aten.clone.default]
    for mesh, reshard in ((get_line_mesh(), True), (get_line_mesh(), False), (get_square_mesh(), True)):
        wanted = train_two_steps(make_expert_blocks(lambda block: block, mesh, reshard_after_forward=reshard), mesh)
        for saved in ([aten.addmm.default, aten.bmm.default], movers):
            policy = SavePolicy(*saved)
            wrap = partial(checkpoint_wrapper, context_fn=policy.contexts, preserve_rng_state=False)
            found = train_two_steps(make_expert_blocks(wrap, mesh, reshard_after_forward=reshard), mesh)
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
            assert aten.cat.default not in policy.seen
            assert aten.bmm.default in policy.seen


class GatedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(8, 8).double() for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.o(self.q(x) * self.k(x))


@case
def a_checkpointed_module_with_shared_inputs_has_the_same_gradients() -> None:
    torch.manual_seed(0)
    net = GatedModule()
    into = partial(ColwiseParallel, input_layouts=S0)
    parallelize_module(
        net, get_line_mesh(), {"q": into(), "k": into(), "o": RowwiseParallel(output_layouts=S0, use_local_output=False)}
    )
    wanted = None
    for checkpointed in (False, True):
        x = distribute_values(make_values(8, 8) / 8, S0).requires_grad_()
        y = checkpoint(net, x, use_reentrant=False, context_fn=SavePolicy(GATHER).contexts) if checkpointed else net(x)
        y.sum().backward()
        wanted = x.grad if wanted is None else wanted
        assert torch.equal(x.grad, wanted)
    # a part of the module that shares: what crossed before it is not remembered inside of it
    parts = GatedModule()
    parallelize_module(parts, get_line_mesh(), {"q": into(), "k": into()})
    inner = parts.k.forward
    parts.k.forward = lambda x: checkpoint(inner, x, use_reentrant=False, context_fn=SavePolicy(GATHER).contexts)
    x = distribute_values(make_values(8, 8) / 8, S0).requires_grad_()
    (parts.q(x) * parts.k(x)).sum().backward()


# --- a mode around one of the passes ------------------------------------------------------------------------------------
WEIGHTS: dict[str, Callable[..., Any]] = {
    "linear": lambda x, w: F.linear(x, w).relu(),
    "linear with a bias": lambda x, w: F.linear(x, w, w[0]).relu(),
    "matmul": lambda x, w: (x @ w).sin(),
    "matmul of stacks": lambda x, w: (x.view(2, 3, 8) @ w.expand(2, 8, 8)).sin(),
    "linear of a stack": lambda x, w: F.linear(x.view(2, 3, 8), w).sin(),
}


@case
def a_dispatch_mode_around_one_pass_does_not_change_checkpointed_gradients() -> None:
    for name, fn in WEIGHTS.items():
        gradients = []
        for forward, backward in (
            (nullcontext, nullcontext),
            (nullcontext, LogOperators),
            (LogOperators, nullcontext),
            (LogOperators, LogOperators),
        ):
            x, w = distribute_values(X, S0).requires_grad_(), distribute_values(W, S1).requires_grad_()
            with forward():
                y = checkpoint(fn, x, w, use_reentrant=False).sum()
            with backward():
                y.backward()
            gradients.append((x.grad, w.grad))
        for found in gradients[1:]:
            assert all(torch.allclose(a, b) for a, b in zip(found, gradients[0], strict=True)), name


@case
def second_derivatives_inside_a_dispatch_mode_are_unchanged() -> None:
    for fn in WEIGHTS.values():
        found = []
        for mode in (nullcontext, LogOperators):
            x, w = distribute_values(X, S0).requires_grad_(), distribute_values(W, S1).requires_grad_()
            with mode():
                (first,) = torch.autograd.grad(fn(x, w).square().sum(), x, create_graph=True)
                found.append(torch.autograd.grad(first.square().sum(), (x, w)))
        assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))
