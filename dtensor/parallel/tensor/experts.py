"""Expert modules of a mixture: the styles that plans of Hugging Face models name for modules with stacked expert matrices."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...base.modes import implicit_replication
from ...mesh.device_mesh import DeviceMesh
from ...placement import Partial, Replicate
from ...ranks.per_rank_functorch import unwrap_functorch
from ...tensor.dtensor import DTensor
from .style import ParallelStyle, as_dtensor, hook_first_output, redistribute_over, require_one_dim, to_local_if

GROUPED_MM_ALIGNMENT = 16  # bytes: grouped matmuls require rows of a multiple of it


class ReplicatedInputs(ParallelStyle):
    """Style that runs a module on DTensors, with replicated inputs, and returns its outputs as local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.register_hooks(module, require_one_dim(device_mesh, self))
        return module

    @staticmethod
    def register_hooks(module: nn.Module, mesh: DeviceMesh) -> list[RemovableHandle]:
        """Register the hooks that replicate the inputs and localize the output of ``module``, and return their handles."""
        running: list[ExitStack] = []

        def enter_module(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            """Replicate the module's inputs, and treat plain tensors inside it as replicated until it returns."""
            running.append(ExitStack())
            running[-1].enter_context(implicit_replication())  # tensors that it makes from shapes alone are equal on all ranks
            return _map_arguments(_as_replicated, mesh, args, kwargs)

        def leave_module(*_: Any) -> None:
            running.pop().close()

        return [
            module.register_forward_pre_hook(enter_module, with_kwargs=True),
            module.register_forward_hook(leave_module, always_call=True),
            hook_first_output(module, lambda x: _reduce_to_local(x, mesh)),
        ]


class ShardedExperts(ParallelStyle):
    """Style that runs a module on each rank's shard of every expert, and sums the outputs over ranks.

    Rows of experts are weighted and added per token before communication. So each token is reduced once, for any number of
    experts per token. With DTensors, partial rows would be reduced before the weights (which may be infinite) multiply them.
    A module computes on DTensors with replicated inputs instead if it has parameters that are not inner-sharded stacks
    (unsharded experts, biases), or shards whose rows are not aligned for grouped matmuls.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register hooks that run the module on local expert weights, and reduce its output."""
        mesh, running = require_one_dim(device_mesh, self), list[tuple[ExitStack, bool]]()

        def enter_module(
            running_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            """Put local expert weights in place for plain inputs; else replicate the inputs."""
            has_dtensors = any(isinstance(unwrap_functorch(x), DTensor) for x in (*args, *kwargs.values()))
            sharded_stacks = None if has_dtensors else _sharded_stacks_of(running_module, mesh)
            stack = ExitStack()
            running.append((stack, sharded_stacks is not None))
            if sharded_stacks is None:
                stack.enter_context(implicit_replication())
                return _map_arguments(_as_replicated, mesh, args, kwargs)
            for (owner, name), parameter in sharded_stacks.items():
                parameters: dict[str, Any] = owner._parameters
                stack.callback(parameters.__setitem__, name, parameter)
                parameters[name] = parameter.to_local()
            return _map_arguments(_with_partial_grad, mesh, args, kwargs)

        def leave_module(*_: Any) -> None:
            running.pop()[0].close()

        module.register_forward_pre_hook(enter_module, with_kwargs=True)
        hook_first_output(module, lambda x: _reduce_to_local(as_dtensor(x, mesh, Partial()) if running[-1][1] else x, mesh))
        module.register_forward_hook(leave_module, always_call=True)
        return module


class DividedInput(ParallelStyle):
    """Style that divides a module's first plain input by the number of ranks, if the output will be summed over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register the hook that divides a plain input by the number of ranks."""
        ranks = require_one_dim(device_mesh, self).size()

        def enter_module(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return args if isinstance(unwrap_functorch(args[0]), DTensor) else (args[0] / ranks, *args[1:])

        module.register_forward_pre_hook(enter_module)
        return module


def _sharded_stacks_of(module: nn.Module, mesh: DeviceMesh) -> dict[tuple[nn.Module, str], DTensor] | None:
    """Return all parameters of a module, by owner and name, if all are stacks of matrices sharded within each; else None.

    Each rank must have a non-empty shard of each matrix.
    """
    found: dict[tuple[nn.Module, str], DTensor] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh or parameter.ndim < 3:
                return None
            splits = parameter.layout.splits
            sizes = [n for split in splits if split is not None for n in split.sizes]
            if (
                splits[0] is not None
                or not sizes
                or 0 in sizes
                or any(n * parameter.dtype.itemsize % GROUPED_MM_ALIGNMENT for n in sizes)
            ):
                return None
            found[owner, name] = parameter
    return found or None


def _map_arguments(
    change: Any, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments, each replaced by ``change(argument, mesh)``."""
    return tuple([change(x, mesh) for x in args]), {name: change(x, mesh) for name, x in kwargs.items()}


def _as_replicated(x: Any, mesh: DeviceMesh) -> Any:
    return as_dtensor(x, mesh, Replicate()) if isinstance(x, torch.Tensor) else x


def _with_partial_grad(x: Any, mesh: DeviceMesh) -> Any:
    """Return the replicated local tensor ``x`` with a gradient that is partial over ranks."""
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return DTensor.from_local(x, mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def _reduce_to_local(x: Any, mesh: DeviceMesh) -> Any:
    return to_local_if(redistribute_over(x, mesh, Replicate()), True, mesh) if isinstance(x, DTensor) else x
