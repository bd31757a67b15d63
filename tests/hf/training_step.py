"""Compare one training step of an unmodified model with distributed parameters with the step on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from family import Family, Inputs
from torch import Tensor, nn

import dtensor as dt
from dtensor import Placement, Replicate, Shard

R = Replicate()
Plan = Callable[[int, Tensor], list[Placement]]


class Different(AssertionError):
    """A value, a loss or a gradient differs from that of one device."""


# --- how parameters are placed on ("dp", "tp") ----------------------------------------------------------------------
def replicated(k: int, p: Tensor) -> list[Placement]:
    return [R, R]


def alternating(k: int, p: Tensor) -> list[Placement]:
    """Shard one parameter after the other along dim 0, dim 1, ... over tp."""
    return [R, Shard(k % min(p.ndim, 2)) if p.ndim else R]


def everywhere(k: int, p: Tensor) -> list[Placement]:
    """Shard over both mesh dims: dim 0 twice, then dim 0 and the last dim."""
    if not p.ndim:
        return [R, R]
    return [Shard(0), Shard(0 if k % 2 else p.ndim - 1)]


PLANS: dict[str, Plan] = {plan.__name__: plan for plan in (replicated, alternating, everywhere)}


def spread(module: nn.Module, mesh: dt.DeviceMesh, plan: Plan) -> nn.Module:
    """Return a copy with parameters placed by ``plan`` and replicated buffers; tied parameters stay tied."""
    module, seen = copy.deepcopy(module), {}
    for own in module.modules():
        for name, p in list(own.named_parameters(recurse=False)):
            made = seen.get(p)
            if made is None:
                local = dt.distribute_tensor(p.detach(), mesh, plan(len(seen), p))
                made = seen[p] = nn.Parameter(local, requires_grad=p.requires_grad)
            own._parameters[name] = made
        for name, buffer in list(own.named_buffers(recurse=False)):
            own._buffers[name] = dt.distribute_tensor(buffer, mesh, [R] * mesh.ndim)
    return module


def distributed(inputs: Inputs, mesh: dt.DeviceMesh) -> Inputs:
    """Distribute tensors, sharded along the batch over dp."""
    placements = [Shard(0), *[R] * (mesh.ndim - 1)]
    return {k: dt.distribute_tensor(v, mesh, placements) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def on_device(inputs: Inputs, device: str) -> Inputs:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def floating(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Return the floating tensors in a model's output by name, without caches."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield path, value
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in ("past_key_values", "mems", "cache_params", "state"):
                yield from floating(item, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from floating(item, f"{path}[{i}]")


def full(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, dt.DTensor) else x


def loss_of(outputs: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss, or else one that depends on every element of every output."""
    if ".loss" in outputs:
        return outputs[".loss"].mean()
    return sum((out.double().tanh() ** 2).mean() for out in outputs.values() if out.requires_grad)


def magnitude(x: Tensor) -> float:
    """Return the largest finite absolute value."""
    finite = x.detach()[x.detach().isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def compare(got: Any, expected: Tensor, what: str, scale: float | None = None, rounding: float = 3e-5) -> None:
    """Raise unless equal up to rounding (models compute some parts in float32)."""
    got, expected = full(got).detach(), expected.detach()
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise Different(f"{what}: {got.dtype}{tuple(got.shape)} instead of {expected.dtype}{tuple(expected.shape)}")
    finite = expected.isfinite()
    if not torch.equal(got[~finite].nan_to_num(7.0), expected[~finite].nan_to_num(7.0)):
        raise Different(f"{what}: other values are infinite or NaN")
    if not expected.is_floating_point():
        if not torch.equal(got, expected):
            raise Different(f"{what}: other values")
        return
    size = magnitude(expected) if scale is None else scale
    error = (got[finite] - expected[finite]).abs().max().item() if finite.any() else 0.0
    if not error <= rounding * size + 1e-6:
        raise Different(f"{what}: differs by {error:.3g} where values are up to {size:.3g}")


def step(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Tensor], Tensor]:
    """Return outputs and loss of one forward and backward pass in training mode, with dropout."""
    torch.manual_seed(3)
    np.random.seed(3)  # masks of spectrograms
    outputs = dict(floating(model(**inputs)))
    loss = loss_of(outputs)
    loss.backward()
    return outputs, loss


def check(
    family: Family,
    plan: Plan,
    mesh: dt.DeviceMesh,
    prepare: Callable[[Any], object] = lambda model: None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    rounding: float = 3e-5,
) -> None:
    """Check that outputs, loss and all gradients of a step are those of one device.

    Args:
        prepare: changes the model before it is distributed.
        around: the context manager around both steps.
        rounding: the largest allowed difference, relative to the largest value of a tensor.

    Raises:
        Different: a result differs; the first one found.
    """
    plain, inputs = family.build().train().to(mesh.device_type), on_device(family.call(), mesh.device_type)
    prepare(plain)
    model = spread(plain, mesh, plan)
    with around():
        expected, wanted = step(plain, inputs)
    with dt.implicit_replication(), around():
        outputs, loss = step(model, distributed(inputs, mesh))
    if list(outputs) != list(expected):
        raise Different(f"outputs {list(outputs)} instead of {list(expected)}")
    for name in expected:
        compare(outputs[name], expected[name], f"output {name}", rounding=rounding)
    compare(loss, wanted, "loss", rounding=rounding)
    grads = [(name, p, q) for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)]
    largest = max((magnitude(q.grad) for _, _, q in grads if q.grad is not None), default=0.0)
    for name, p, q in grads:
        if (p.grad is None) != (q.grad is None):
            raise Different(f"gradient of {name}: {'missing' if p.grad is None else 'not on one device'}")
        if q.grad is None:
            continue
        if p.grad.placements != p.placements:
            raise Different(f"gradient of {name}: placed as {p.grad.placements}, its parameter as {p.placements}")
        compare(p.grad, q.grad, f"gradient of {name}", max(magnitude(q.grad), 1e-2 * largest), rounding)
    for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
        compare(b, c, f"buffer {name}", rounding=rounding)
