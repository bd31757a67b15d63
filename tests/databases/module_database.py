"""Module database of PyTorch: modules with randomly placed parameters, buffers and inputs equal plain ones. A case is one module
input of the database. It runs the module's own ``forward`` on a distributed copy. Results, gradients of parameters and inputs,
and buffers are compared.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from typing import Any

import torch
from op_database import Setting, draw_placements, exact, rng_of
from torch import nn

import dtensor as dt
from dtensor.base.tensor_tree import fill_tensors, tensor_leaves
from dtensor.placement import Partial, Replicate
from dtensor.testing import scatter
from dtensor.testing.compare import CompareOptions, find_differences

# Behavior of torch's modules that DTensors cannot follow, with the reason.
ACCEPTED: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """Case of one input of one module."""

    name: str
    position: int
    training: bool
    info: Any
    module_input: Any


def entries(pattern: str = "*") -> list[Any]:
    """Return the entries of the database whose names match (importing it takes seconds)."""
    from torch.testing._internal.common_modules import module_db

    return [info for info in module_db if any(fnmatch(info.formatted_name, p) for p in pattern.split(","))]


def cases_of(info: Any, samples: int) -> Iterator[Case]:
    """Yield the first ``samples`` inputs of the entry, in training and in evaluation if they differ."""
    modes = (True, False) if info.train_and_eval_differ else (True,)
    for training in modes:
        torch.default_generator.manual_seed(0)
        given = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=training)
        for position, module_input in enumerate(islice(given, samples)):
            yield Case(info.formatted_name, position, training, info, module_input)


def problems_of(case: Case, setting: Setting) -> list[str]:
    """Return the differences between the plain and the distributed module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(setting.seed)
        constructor, forward = case.module_input.constructor_input, case.module_input.forward_input
        if forward is None:
            return []
        plain = case.info.module_cls(*constructor.args, **constructor.kwargs).to(torch.float64).train(case.training)
        given = (forward.args, dict(forward.kwargs))
        if any(isinstance(p, nn.UninitializedParameter) for p in plain.parameters()):
            plain(*given[0], **given[1])  # lazy modules take their shapes from the first input
        rng = rng_of(case.name, setting, case.position, case.training)
        mesh = dt.init_device_mesh("cpu", setting.mesh)
        inputs = tensor_leaves(given)
        where = [draw_placements(x, setting, rng) for x in inputs]
        inputs = [exact(x.detach(), each) for x, each in zip(inputs, where, strict=True)]
        made = [scatter(x, mesh, each, seed=k) for k, (x, each) in enumerate(zip(inputs, where, strict=True))]
        distributed = distribute(copy.deepcopy(plain), mesh, setting, rng)
        runs = [_Run(module, given, leaves, setting.seed) for module, leaves in ((plain, inputs), (distributed, made))]
        return _compare(*runs, mesh)


def distribute(module: nn.Module, mesh: dt.DeviceMesh, setting: Setting, rng: Any) -> nn.Module:
    """Replace each parameter and buffer of ``module`` by a distributed one with random placements (never partial)."""
    for owner in module.modules():
        for name, value in [*owner._parameters.items(), *owner._buffers.items()]:
            if value is None:
                continue
            where = [Replicate() if isinstance(p, Partial) else p for p in draw_placements(value, setting, rng)]
            made: torch.Tensor = dt.distribute_tensor(value.detach(), mesh, where)
            if name in owner._parameters:
                made = nn.Parameter(made, requires_grad=value.requires_grad)
            setattr(owner, name, made)
    return module


class _Run:
    """Forward and backward pass of a module, with its results, gradients and buffers."""

    def __init__(self, module: nn.Module, given: Any, leaves: list[torch.Tensor], seed: int) -> None:
        self.module = module
        self.leaves = [x.clone().requires_grad_() if x.is_floating_point() and type(x) is torch.Tensor else x for x in leaves]
        for x in self.leaves:
            if x.is_floating_point():
                x.requires_grad_()
        args, kwargs = fill_tensors(given, self.leaves)
        self.results: list[torch.Tensor] = []
        self.error: Exception | None = None
        torch.default_generator.manual_seed(seed)
        try:
            self.results = tensor_leaves(_plain_structure(module(*args, **kwargs)))
        except Exception as error:  # compared with the other run's
            self.error = error

    def backward(self, mesh: dt.DeviceMesh) -> None:
        outputs = [x for x in self.results if x.requires_grad]
        cotangents: list[torch.Tensor] = []
        for k, x in enumerate(outputs):
            drawn = torch.randint(-3, 4, x.shape, generator=torch.Generator().manual_seed(k)).to(x.dtype)
            cotangents.append(scatter(drawn, mesh, [Replicate()] * mesh.ndim) if isinstance(x, dt.DTensor) else drawn)
        if outputs:
            torch.autograd.backward(outputs, cotangents)

    def left(self) -> Iterator[tuple[str, Any]]:
        """Yield gradients and buffers by name."""
        for name, p in self.module.named_parameters():
            yield f"gradient of {name}", p.grad
        for name, b in self.module.named_buffers():
            yield f"buffer {name}", b
        for k, x in enumerate(self.leaves):
            yield f"gradient of input {k}", x.grad


def _plain_structure(value: Any) -> Any:
    """Convert packed sequences and named tuples to tuples."""
    return tuple(value) if isinstance(value, tuple) else value


def _compare(plain: _Run, own: _Run, mesh: dt.DeviceMesh) -> list[str]:
    if plain.error is not None or own.error is not None:
        if type(plain.error) is type(own.error):
            return []
        return [f"raises {type(own.error).__name__}: {own.error}; plain torch raises {plain.error!r}"]
    if len(plain.results) != len(own.results):
        return [f"{len(own.results)} results, not {len(plain.results)}"]
    found = []
    for i, (got, expected) in enumerate(zip(own.results, plain.results, strict=True)):
        found += [f"result {i}: {problem}" for problem in find_differences(got, expected)]
    if found:
        return found
    plain.backward(mesh)
    try:
        own.backward(mesh)
    except Exception as error:
        return [f"backward raises {type(error).__name__}: {error}"]
    for (name, expected), (_, got) in zip(plain.left(), own.left(), strict=True):
        if expected is None or got is None:
            found += [] if expected is got else [f"{name}: {got!r}, not {expected!r}"]
        else:
            found += [f"{name}: {problem}" for problem in find_differences(got, expected, CompareOptions(strides=False))]
    return found + _misplaced(own.module)


def _misplaced(module: nn.Module) -> list[str]:
    return [
        f"gradient of {name} is placed {p.grad.placements}, the parameter {p.placements}"
        for name, p in module.named_parameters()
        if isinstance(p, dt.DTensor) and isinstance(p.grad, dt.DTensor) and p.grad.placements != p.placements
    ]
