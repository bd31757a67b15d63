"""Fused weights: a parameter that concatenates equal matrices is stored as their stack, and each matrix is sharded.

Gate and up projections are often one matrix of ``2 n`` rows. If that matrix is sharded directly, some ranks have the gate and
others the up projection, and the values must be exchanged to combine them. The blocks that each rank needs are blocks of the
stack ``(2, n, k)``, sharded along ``n``. The stack becomes the stored parameter. The module sees the matrix, computed by a
parametrization (``torch.nn.utils.parametrize``) as a view of the stack. Its flattened dim need not be read in order, and its
halves are entries of the stack (``tensor/views/flattened_sharded_dims.py``, ``tensor/overrides/chunk_of_stack.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from ...errors import StyleError
from ...mesh.device_mesh import DeviceMesh
from ...placement import Shard
from ...tensor.distribute import distribute_tensor
from ...tensor.dtensor import DTensor
from ...tensor.modules.distribute_module import distribute_at
from ...tensor.modules.stale_params import ParamAttributes, note_replaced
from ...tensor.overrides.table import install_stack_overrides


class _StackParametrization(nn.Module):
    """Parametrization that computes a parameter from the stack of its parts."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.dim, self.parts = dim, parts

    def forward(self, stack: Tensor) -> Tensor:
        return stack.flatten(self.dim, self.dim + 1)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.unflatten(self.dim, (self.parts, -1))


def distribute_fused_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int, parts: int, source: int | None) -> None:
    """Store the parameter ``name`` of ``module`` as a stack of ``parts`` along ``dim``, each part sharded along that dim.

    ``state_dict`` contains the fused parameter under its own name and shape.

    Raises:
        StyleError: it is not a plain parameter, or its size is not a multiple of ``parts``.
    """
    parameter = module._parameters.get(name)
    if parameter is None or isinstance(parameter, DTensor) or is_parametrized(module, name):
        raise StyleError(
            f"{name!r} of {type(module).__name__} is parametrized or distributed already, but parts= needs a "
            "plain parameter; apply this style first"
        )
    if parameter.shape[dim] % parts:
        raise StyleError(
            f"{name!r} of {type(module).__name__} has size {parameter.shape[dim]} along dim {dim}, which is not "
            f"divisible into {parts} parts; give the number of equal matrices that it concatenates"
        )
    install_stack_overrides()
    value = nn.Parameter(parameter.detach(), parameter.requires_grad)  # register_parametrization sets its data to the stack
    module._parameters[name] = value
    ParamAttributes.of(parameter).set_on(value)
    register_parametrization(module, name, _StackParametrization(dim, parts))
    parametrization: Any = module.parametrizations[name]  # type: ignore[index]  # a dict of modules
    distribute_at(parametrization._parameters, "original", mesh, [Shard(dim + 1)], source)
    note_replaced(parameter, "parallelize_module")
    if len(_stacked_parameters_of(module, "")) == 1:  # the hooks handle all stacked parameters of the module
        module.register_state_dict_post_hook(_merge_stacks)
        module.register_load_state_dict_pre_hook(_split_into_stacks)


def _stacked_parameters_of(module: nn.Module, prefix: str) -> list[tuple[str, str, _StackParametrization]]:
    """Return for each fused parameter that is stored as a stack its name, the stack's name, and the parametrization."""
    by_name: Any = getattr(module, "parametrizations", {})
    return [
        (f"{prefix}{name}", f"{prefix}parametrizations.{name}.original", chain[0])
        for name, chain in by_name.items()
        if isinstance(chain[0], _StackParametrization)
    ]


def _merge_stacks(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace each stack in a state dict by the fused parameter."""
    for name, stack, parametrization in _stacked_parameters_of(module, prefix):
        if stack in state:
            state[name] = parametrization(state.pop(stack))


def _split_into_stacks(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace each fused parameter in a state dict by its stack.

    A plain value is equal on all ranks: ``set_model_state_dict`` passes full values by the names of parameters.
    """
    for name, stack, parametrization in _stacked_parameters_of(module, prefix):
        x = state.get(name)
        if (
            not isinstance(x, torch.Tensor)
            or x.ndim <= parametrization.dim
            or x.shape[parametrization.dim] % parametrization.parts
        ):
            continue  # load_state_dict reports the mismatch
        parameter = module.get_parameter(stack.removeprefix(prefix))
        value: Any = parametrization.right_inverse(state.pop(name))
        if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        elif isinstance(parameter, DTensor) and value.device_mesh == parameter.device_mesh:
            value = value.redistribute(placements=parameter.placements)  # it may replace a parameter on meta
        state[stack] = value
