"""Divergent parallelism: FSDP units, tensor-parallel plans and attention with different settings on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from divergent_programs import ACTIONS, Program, R, Scene, Shard, dt, trained
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recomputed

from dtensor.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    SequenceParallel,
    ZeroRedundancyOptimizer,
    context_parallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
    replicate,
)

Action = Callable[[Scene], Any]
WIDTH = 6


def nothing(*_: Any) -> None:
    pass


class Blocks(nn.Module):
    def __init__(self, recompute: Any = None, act: Callable[[], Any] = nothing, order: int = 1, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute, self.act, self.order, self.times = recompute, act, order, 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if tied:
            self.layers[2].weight = self.layers[0].weight

    def _layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.act()
        return layer(x).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[:: self.order]:
            x = (
                self._layer(layer, x)
                if self.recompute is None
                else recomputed(self._layer, layer, x, use_reentrant=self.recompute)
            )
        return x


def fsdp(
    change: Callable[[Scene, Any, int], Any] = nothing,
    wrapped: tuple[int, ...] = (0, 1, 2),
    policy: Any = None,
    reshard: bool = True,
    of: Callable[[], nn.Module] = Blocks,
    rows: Callable[[Scene], int] = lambda at: 2,
) -> Action:
    """Return a program of three steps of a fully sharded model, with ``change`` called before each."""

    def run(at: Scene) -> Any:
        model: Any = of()
        options = {"mesh": at.mesh, "reshard_after_forward": reshard} | ({} if policy is None else {"mp_policy": policy})
        for k in wrapped:
            fully_shard(model.layers[k], **options)
        fully_shard(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(3):
            change(at, model, number)
            model(torch.ones(rows(at), WIDTH).requires_grad_()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [float(parameter.detach().sum()) for parameter in model.parameters()]

    return run


def _with(
    options: Callable[[Scene, Any], dict[str, Any]], mesh: Callable[[Scene], Any] = lambda at: at.mesh, of: Any = None
) -> Action:
    """Return a program of two steps of a model in one unit with these options."""

    def run(at: Scene) -> Any:
        model = Blocks()
        fully_shard(model, mesh=mesh(at), **options(at, model))
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if of is None else of(model)
        return trained(model, optimizer, torch.ones(2, WIDTH))

    return run


def _hybrid(change: Callable[[Scene, Any, int], Any] = nothing) -> Action:
    """Return a program of HSDP on four ranks, else FSDP."""

    def run(at: Scene) -> Any:
        size = dist.get_world_size()
        mesh = at.mesh if size % 2 else dt.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("r", "s"))
        model = fully_shard(Blocks(), mesh=mesh)
        for number in range(3):
            change(at, model, number)
            model(torch.ones(2, WIDTH)).square().mean().backward()
        return [float(parameter.grad.detach().sum()) for parameter in model.parameters()]

    return run


def _zero(of: Any = torch.optim.AdamW, **options: Any) -> Action:
    def run(at: Scene) -> Any:
        model = replicate(Blocks(), at.mesh)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), of, lr=0.1, **options)
        return trained(model, optimizer, torch.ones(2, WIDTH))

    return run


def _backward(how: Callable[[Any, Any], Any]) -> Action:
    def run(at: Scene) -> Any:
        model: Any = Blocks()
        for layer in model.layers:
            fully_shard(layer, mesh=at.mesh)
        how(model(torch.ones(2, WIDTH)).square().mean(), list(model.parameters()))
        return float(at.x.sum())

    return run


def second(act: Callable[[Scene, Any], Any]) -> Callable[[Scene, Any, int], Any]:
    return lambda at, model, number: act(at, model) if number == 1 else None


def _parallel(plan: Any, x: Any = lambda at: torch.ones(2, 3, WIDTH), around: Any = nullcontext) -> Action:
    def run(at: Scene) -> Any:
        model = parallelize_module(Blocks(), at.mesh, plan)
        with around():
            out = model(x(at))
            out.square().mean().backward()
        return [float(parameter.grad.sum()) for parameter in model.parameters()]

    return run


def scores(parallel: bool) -> Action:
    def run(at: Scene) -> Any:
        scores = at.of(torch.arange(36.0).reshape(3, 12), Shard(1)).requires_grad_()
        with loss_parallel() if parallel else nullcontext():
            loss = F.cross_entropy(scores, torch.tensor([0, 5, 11]))
            loss.backward()
        return float(loss.detach())

    return run


def _attention(causal: bool = False, backend: Any = None, width: int = 4) -> Action:
    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        q, k, v = (at.of(torch.rand(1, 2, 12, width), Shard(2)).requires_grad_() for _ in range(3))
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out.sum().backward()
        return float(q.grad.sum())

    return run


def _context(causal: bool = False, scale: float | None = None) -> Action:
    """Return a program of context parallelism with plain tensors."""

    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        size = dist.get_world_size()
        q, k, v = (torch.rand(1, 2, 4 * size, 4) for _ in range(3))
        with context_parallel(at.mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return float(at.x.sum()) + 0 * float(out.sum())

    return run


def _plainly(at: Scene, model: Any) -> dict[str, Any]:
    return {}


_PAIRS: dict[str, tuple[Action, Action]] = {
    "other units": (fsdp(), fsdp(wrapped=(0, 1))),
    "no units inside": (fsdp(), fsdp(wrapped=())),
    "units in another order": (fsdp(), fsdp(wrapped=(2, 1, 0))),
    "kept gathered": (fsdp(), fsdp(reshard=False)),
    "another precision": (fsdp(), fsdp(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
    "gradients in another precision": (
        fsdp(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        fsdp(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    ),
    "prefetched": (fsdp(), fsdp(second(lambda at, model: model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])))),
    "prefetched backward": (
        fsdp(),
        fsdp(second(lambda at, model: model.layers[2].set_modules_to_backward_prefetch([model.layers[0]]))),
    ),
    "unsharded": (fsdp(), fsdp(second(lambda at, model: model.layers[1].unshard()))),
    "unsharded and left": (fsdp(), fsdp(second(lambda at, model: model.layers[1].unshard(async_op=True)))),
    "another divisor of gradients": (fsdp(), fsdp(second(lambda at, model: model.layers[1].set_gradient_divide_factor(7.0)))),
    "other divisors of gradients": (
        fsdp(second(lambda at, model: model.layers[1].set_gradient_divide_factor(5.0))),
        fsdp(second(lambda at, model: model.layers[1].set_gradient_divide_factor(7.0))),
    ),
    "a parameter that is ignored": (_with(_plainly), _with(lambda at, model: {"ignored_params": {model.layers[1].bias}})),
    "cut by columns": (_with(_plainly), _with(lambda at, model: {"shard_placement_fn": lambda p: Shard(p.ndim - 1)})),
    "outputs in another precision": (
        _with(_plainly),
        _with(lambda at, model: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)}),
    ),
    "a fused optimizer": (
        _with(_plainly, of=lambda model: torch.optim.AdamW(model.parameters())),
        _with(_plainly, of=lambda model: torch.optim.AdamW(model.parameters(), fused=True)),
    ),
    "an optimizer of fewer parameters": (
        _with(_plainly),
        _with(_plainly, of=lambda model: torch.optim.SGD(list(model.parameters())[1:], 0.1)),
    ),
    "replicas that wait": (_hybrid(), _hybrid(lambda at, model, number: model.set_requires_gradient_sync(number != 1))),
    "replicas that are not summed": (
        _hybrid(),
        _hybrid(
            lambda at, model, number: model.set_requires_all_reduce(number != 1) or model.set_requires_gradient_sync(number != 0)
        ),
    ),
    "state of an optimizer in parts": (_zero(), _zero(torch.optim.SGD)),
    "another decay of it": (_zero(weight_decay=0.1), _zero(weight_decay=0.2)),
    "gradients of some": (
        _backward(lambda loss, parameters: torch.autograd.grad(loss, parameters)),
        _backward(lambda loss, parameters: torch.autograd.grad(loss, parameters[:2])),
    ),
    "no backward": (_backward(lambda loss, _: loss.backward()), _backward(lambda loss, _: loss)),
    "backward twice": (
        _backward(lambda loss, _: loss.backward()),
        _backward(lambda loss, _: (loss.backward(retain_graph=True), loss.backward())),
    ),
    "layers in another order": (fsdp(), fsdp(of=partial(Blocks, order=-1))),
    "tied on one": (fsdp(wrapped=()), fsdp(wrapped=(), of=partial(Blocks, tied=True))),
    "another type of model": (
        fsdp(),
        fsdp(of=lambda: Blocks().bfloat16(), policy=MixedPrecisionPolicy(param_dtype=torch.float32)),
    ),
    "a layer that needs no gradient": (fsdp(), fsdp(lambda at, model, number: model.layers[1].requires_grad_(False))),
    "another plan": (
        _parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}),
        _parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel(), "layers.2": SequenceParallel()}),
    ),
    "columns instead of rows": (
        _parallel({"layers.0": ColwiseParallel(output_layouts=R)}),
        _parallel({"layers.0": RowwiseParallel(input_layouts=R)}),
    ),
    "another layout of an output": (
        _parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}),
        _parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel(output_layouts=Shard(1))}),
    ),
    "no plan": (_parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}), _parallel({})),
    "causal": (_attention(), _attention(True)),
    "another kernel": (_attention(True), _attention(True, SDPBackend.MATH)),
    "causal context": (_context(), _context(True)),
    "another scale of a context": (_context(scale=0.5), _context(scale=0.7)),
    "no context": (_context(), ACTIONS["item"]),
}
DIFFERENT = {f"units/{name}": Program(usual, other, k % 3) for k, (name, (usual, other)) in enumerate(_PAIRS.items())}
