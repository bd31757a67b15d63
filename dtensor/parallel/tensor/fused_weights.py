"""Parameters that are several of one size put together along a dim, each of which is to be cut by itself.

Gate and up projection are often one matrix of ``2 n`` rows; cut as these lie, some ranks have the gate and others the up
projection, and what meets behind it moves. By hand each rank gets its part of both. Such blocks are no blocks of the matrix but
of the stack ``(2, n, k)``, which becomes the parameter that is kept, cut along ``n``. The module sees the matrix, computed from
it as parametrizations compute theirs (``torch.nn.utils.parametrize``): a view, whose folded dim nobody needs to read in its
order, and whose halves are positions of the stack (``tensor/views/flattened_sharded_dims.py``,
``tensor/overrides/chunk_of_stack.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization

from ...errors import StyleError
from ...mesh.device_mesh import DeviceMesh
from ...placement import Shard
from ...tensor.distribute import distribute_at, distribute_tensor
from ...tensor.dtensor import DTensor
from ...tensor.overrides.table import install_stack_overrides
from ...tensor.stale_params import Attributes, note_replaced


class _Stacked(nn.Module):
    """A parameter, computed from the stack of its parts."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.dim, self.parts = dim, parts

    def forward(self, stack: Tensor) -> Tensor:
        return stack.flatten(self.dim, self.dim + 1)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.unflatten(self.dim, (self.parts, -1))


def lay_out_parts(module: nn.Module, name: str, mesh: DeviceMesh, dim: int, parts: int, source: int | None) -> None:
    """Keep the parameter ``name`` of ``module`` as a stack of ``parts`` along ``dim``, each cut along that dim.

    In ``state_dict`` it is what it was, of its name and shape.

    Raises:
        StyleError: it is no plain parameter, or not of so many parts of one size.
    """
    own = module._parameters.get(name)
    if own is None or isinstance(own, DTensor) or is_parametrized(module, name):
        raise StyleError(
            f"{name!r} of {type(module).__name__} is parametrized or distributed already, but parts= needs a "
            "plain parameter; apply this style first"
        )
    if own.shape[dim] % parts:
        raise StyleError(
            f"{name!r} of {type(module).__name__} has size {own.shape[dim]} along dim {dim}, which is not "
            f"divisible into {parts} parts"
        )
    install_stack_overrides()
    module._parameters[name] = made = nn.Parameter(own.detach(), own.requires_grad)  # torch sets it to the stack
    Attributes.of(own).set_on(made)
    register_parametrization(module, name, _Stacked(dim, parts))
    held: Any = module.parametrizations[name]  # type: ignore[index]  # a dict of modules
    distribute_at(held._parameters, "original", mesh, [Shard(dim + 1)], source)
    note_replaced(own, "parallelize_module")
    if len(_stacks(module, "")) == 1:  # they look after all that it has
        module.register_state_dict_post_hook(_as_one)
        module.register_load_state_dict_pre_hook(_in_parts)


def _stacks(module: nn.Module, prefix: str) -> list[tuple[str, str, _Stacked]]:
    """Of each parameter that is kept so the name, the name of its stack, and what it is."""
    found: Any = getattr(module, "parametrizations", {})
    return [
        (f"{prefix}{name}", f"{prefix}parametrizations.{name}.original", each[0])
        for name, each in found.items()
        if isinstance(each[0], _Stacked)
    ]


def _as_one(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, stack, kept in _stacks(module, prefix):
        if stack in state:
            state[name] = kept(state.pop(stack))


def _in_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A plain value is the same on all ranks: ``set_model_state_dict`` hands full ones on, going by names of parameters."""
    for name, stack, kept in _stacks(module, prefix):
        x = state.get(name)
        if not isinstance(x, torch.Tensor) or x.ndim <= kept.dim or x.shape[kept.dim] % kept.parts:
            continue  # torch says what does not fit
        own = module.get_parameter(stack.removeprefix(prefix))
        made: Any = kept.right_inverse(state.pop(name))
        if isinstance(own, DTensor) and not isinstance(made, DTensor):
            made = distribute_tensor(made, own.device_mesh, own.placements, src_data_rank=None)
        elif isinstance(own, DTensor) and made.device_mesh == own.device_mesh:
            made = made.redistribute(placements=own.placements)  # it may take the place of what is on meta
        state[stack] = made
