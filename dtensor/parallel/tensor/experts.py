"""The experts of a mixture under the styles that plans have for them by name: how a module with stacks of matrices computes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...base.modes import implicit_replication
from ...mesh.device_mesh import DeviceMesh
from ...placement import Partial, Replicate
from ...ranks.functorch import seen
from ...tensor.dtensor import DTensor
from .style import ParallelStyle, after_forward, annotated, local_if, one_dim, placed

ALIGNED = 16  # bytes: products of groups refuse matrices whose rows are no multiple


class OnTheWhole(ParallelStyle):
    """The module computes with DTensors, the tokens the same on all ranks, and gives local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.around(module, one_dim(device_mesh, self))
        return module

    @staticmethod
    def around(module: nn.Module, mesh: DeviceMesh) -> list[RemovableHandle]:
        """The hooks that do so."""
        running: list[ExitStack] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            running.append(ExitStack())
            running[-1].enter_context(implicit_replication())  # what it makes of shapes alone is the same on all ranks
            return _each(_whole, mesh, args, kwargs)

        def leave(*_: Any) -> None:
            running.pop().close()

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
            after_forward(module, lambda x: _added(x, mesh)),
        ]


class InParts(ParallelStyle):
    """Each rank computes with its part of every expert, as the style says of the module: what comes of that is a term.

    So rows of experts are weighed, and those of one token added, before anything moves, and as many tokens are reduced as there
    are, however many experts each has; by DTensors terms would be added up before they meet weights that may be infinite. Where
    the module has something else than stacks that are cut inside (whole experts, biases), or blocks whose rows products of groups
    refuse, it computes on the whole.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh, running = one_dim(device_mesh, self), list[tuple[ExitStack, bool]]()

        def enter(own: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            stacks = None if any(isinstance(seen(x), DTensor) for x in (*args, *kwargs.values())) else _stacks(own, mesh)
            stack = ExitStack()
            running.append((stack, stacks is not None))
            if stacks is None:
                stack.enter_context(implicit_replication())
                return _each(_whole, mesh, args, kwargs)
            for (owner, name), parameter in stacks.items():
                places: dict[str, Any] = owner._parameters
                stack.callback(places.__setitem__, name, parameter)
                places[name] = parameter.to_local()
            return _each(_shared, mesh, args, kwargs)

        def leave(*_: Any) -> None:
            running.pop()[0].close()

        module.register_forward_pre_hook(enter, with_kwargs=True)
        after_forward(module, lambda x: _added(annotated(x, mesh, Partial()) if running[-1][1] else x, mesh))
        module.register_forward_hook(leave, always_call=True)
        return module


class Divided(ParallelStyle):
    """The module gives what it is given: in the middle of terms, each rank a part of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = one_dim(device_mesh, self).size()

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return args if isinstance(seen(args[0]), DTensor) else (args[0] / ranks, *args[1:])

        module.register_forward_pre_hook(enter)
        return module


def _stacks(module: nn.Module, mesh: DeviceMesh) -> dict[tuple[nn.Module, str], DTensor] | None:
    """All parameters of a module, if they are stacks of matrices of which every rank has a part of each; else None."""
    found: dict[tuple[nn.Module, str], DTensor] = {}
    for owner in module.modules():
        for name, own in owner._parameters.items():
            if own is None:
                continue
            if not isinstance(own, DTensor) or own.device_mesh != mesh or own.ndim < 3:
                return None
            splits = own.layout.splits
            sizes = [n for split in splits if split is not None for n in split.sizes]
            if splits[0] is not None or not sizes or 0 in sizes or any(n * own.dtype.itemsize % ALIGNED for n in sizes):
                return None
            found[owner, name] = own
    return found or None


def _each(change: Any, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple([change(x, mesh) for x in args]), {name: change(x, mesh) for name, x in kwargs.items()}


def _whole(x: Any, mesh: DeviceMesh) -> Any:
    return annotated(x, mesh, Replicate()) if isinstance(x, torch.Tensor) else x


def _shared(x: Any, mesh: DeviceMesh) -> Any:
    """A local tensor that all ranks have alike, and of whose gradient each gives a term."""
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def _added(x: Any, mesh: DeviceMesh) -> Any:
    return local_if(placed(x, mesh, Replicate()), True, mesh) if isinstance(x, DTensor) else x
