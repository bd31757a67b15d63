"""Optimizer database of PyTorch: steps on distributed parameters equal those on plain ones. A case is one input of the database
(a learning rate, weight decay, ``amsgrad``, ...) in one implementation. Parameters of several shapes have random placements on
one or two meshes. After five steps, with a round trip of the state in between, parameters and state equal those of the plain run.
"""

from __future__ import annotations

import copy
import random
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from op_database import Setting, draw_placements
from torch import nn

import dtensor as dt
from dtensor.placement import Partial, Replicate
from dtensor.testing.compare import CompareOptions, find_differences

SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (6,), (3, 4, 2), (1,), (2, 9))
STEPS, RELOAD_AFTER = 5, 3
MESHES: dict[str, tuple[tuple[int, ...], ...]] = {"4": ((4,),), "2x2": ((2, 2),), "4 and 2x2": ((4,), (2, 2))}
# Muon orthogonalizes in bfloat16, where the order of additions matters
TOLERANCES = {"Muon": (5e-2, 2e-2)}


@dataclass(frozen=True, slots=True)
class Case:
    """Case of one optimizer with options, and meshes that its parameters use in turn."""

    optimizer: Any
    implementation: str
    options: str  # text of the database
    kwargs: dict[str, Any]
    meshes: tuple[tuple[int, ...], ...]
    seed: int
    dtype: torch.dtype = torch.float64

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(s for s in SHAPES if len(s) == 2) if self.optimizer.__name__ == "Muon" else SHAPES

    def __str__(self) -> str:
        return (
            f"{self.optimizer.__name__} {self.implementation} ({self.options}) on {self.meshes}, seed {self.seed}, {self.dtype}"
        )


def entries(pattern: str = "*") -> list[Any]:
    """Return the entries whose class names match, without those for sparse gradients only."""
    from torch.testing._internal.common_optimizers import optim_db

    names = [(info, info.optim_cls.__name__) for info in optim_db if not info.only_supports_sparse_grads]
    return [info for info, name in names if any(fnmatch(name, p) for p in pattern.split(","))]


def cases_of(info: Any, meshes: tuple[tuple[int, ...], ...], seed: int) -> Iterator[Case]:
    """Yield each input in each implementation for CPU; complex parameters in for-loop and foreach."""
    flags: dict[str, dict[str, Any]] = {"for-loop": {}}
    if "foreach" in info.supported_impls:
        flags = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}}
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        flags["fused"] = {"fused": True}
    if info.has_capturable_arg:
        flags["capturable"] = {"capturable": True}  # plain torch raises on CPU, and so must we
    if info.optim_cls is torch.optim.LBFGS:
        meshes = meshes[:1]  # it concatenates all gradients, and an operation's operands share one mesh
    for given in info.optim_inputs_func(device="cpu"):
        for name, more in flags.items():
            yield Case(info.optim_cls, name, given.desc, given.kwargs | more, meshes, seed)
            if info.supports_complex and name in ("for-loop", "foreach"):
                yield Case(info.optim_cls, name, given.desc, given.kwargs | more, meshes, seed, torch.complex128)


def problems_of(case: Case) -> list[str]:
    """Return the differences between the runs on plain and on distributed parameters."""
    rng = random.Random(zlib.crc32(str(case).encode()))
    values = [
        torch.randn(shape, generator=torch.Generator().manual_seed(k), dtype=case.dtype) for k, shape in enumerate(case.shapes)
    ]
    runs = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [_placed(x, case.meshes[k % len(case.meshes)], case.seed, rng) for k, x in enumerate(values)]
        for parameters in ([x.clone() for x in values], made):
            try:
                runs.append(_run(case, [nn.Parameter(x) for x in parameters]))
            except Exception as error:  # compared with the other run's
                runs.append(error)
    expected, got = runs
    if isinstance(expected, Exception) or isinstance(got, Exception):
        return [] if type(expected) is type(got) else [f"{got!r}, plain torch: {expected!r}"]
    options = CompareOptions(tolerance=TOLERANCES.get(case.optimizer.__name__), strides=False)
    found = [] if expected.keys() == got.keys() else [f"{got.keys() ^ expected.keys()}"]
    return found + [
        f"{name}: {problem}" for name, x in expected.items() for problem in find_differences(got.get(name), x, options)
    ]


def _placed(x: torch.Tensor, mesh: tuple[int, ...], seed: int, rng: random.Random) -> dt.DTensor:
    where = draw_placements(x, Setting(mesh=mesh, seed=seed), rng)
    where = tuple(Replicate() if isinstance(p, Partial) else p for p in where)
    return dt.distribute_tensor(x, dt.init_device_mesh("cpu", mesh), where)


def _run(case: Case, parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Return parameters and state by name after all steps, with two groups of different learning rates (unless lr is a
    tensor)."""
    lr = case.kwargs.get("lr", 1e-2)
    second = {"params": parameters[2:]} | ({} if isinstance(lr, torch.Tensor) else {"lr": lr * 0.5})
    lbfgs = case.optimizer is torch.optim.LBFGS  # takes one group
    groups: list[Any] = parameters if lbfgs else [{"params": parameters[:2]}, second]
    kwargs = copy.deepcopy(case.kwargs)
    optimizer = case.optimizer(groups, **kwargs)
    sign = -1 if kwargs.get("maximize") else 1  # the maximized function must have a maximum, or LBFGS would diverge

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses = [sign * _loss(k, p) for k, p in enumerate(parameters)]
        torch.autograd.backward(losses)
        return sum(float(loss) for loss in losses)

    for step in range(STEPS):
        optimizer.step(closure)
        if step == RELOAD_AFTER:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = case.optimizer(groups if lbfgs else [dict(group) for group in _bare(groups)], **kwargs)
            optimizer.load_state_dict(state)
    found: dict[str, Any] = {f"parameter {k}": p.detach() for k, p in enumerate(parameters)}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{name} of {number}": value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return found


def _bare(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: group[key] for key in ("params", "lr") if key in group} for group in groups]


def _loss(k: int, p: torch.Tensor) -> torch.Tensor:
    """Return a smooth function of a parameter whose minimum is elsewhere."""
    shifted = (p - (0.3 + 0.1 * k)) * (1.0 + 0.5 * k)
    return (shifted * shifted.conj()).real.sum() if p.is_complex() else (shifted.square() + shifted.cos()).sum()


# --- gradients through a step ---------------------------------------------------------------------------------------------
def differentiable_problems(info: Any, mesh: tuple[int, ...], seed: int) -> list[str]:
    """Return the differences of gradients through a step of a differentiable optimizer, by parameter and gradient."""
    if "differentiable" not in info.supported_impls:
        return []
    found = []
    for given in info.optim_inputs_func(device="cpu"):
        rng = random.Random(zlib.crc32(repr((given.desc, mesh, seed)).encode()))
        value = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.1
        plain = [(value * scale).requires_grad_() for scale in (1.0, 0.7)]
        own = [_placed(x.detach(), mesh, seed, rng).requires_grad_() for x in plain]
        for start, gradient in (plain, own):
            parameter = start * 1.0
            parameter.grad = gradient * 2.0
            info.optim_cls([parameter], **(copy.deepcopy(given.kwargs) | {"differentiable": True})).step()
            parameter.square().sum().backward()
        for name, x, expected in zip(("parameter", "gradient"), own, plain, strict=True):
            problems = find_differences(x.grad, expected.grad, CompareOptions(strides=False))
            found += [f"{info.optim_cls.__name__} ({given.desc}), {name}: {problem}" for problem in problems]
    return found
