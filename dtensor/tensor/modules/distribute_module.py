"""Distribute module: ``distribute_module`` and its parts, which replace the tensors of a module by distributed ones."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from ...base.tensor_tree import own_tensors
from ...errors import ArgumentError
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...placement import Placements, Replicate
from ..distribute import distribute_tensor
from ..dtensor import DTensor
from .stale_params import ParamAttributes, replacing_params

M = TypeVar("M", bound=nn.Module)


def distribute_module(
    module: M,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> M:
    """Return ``module`` after its parameters and buffers were replaced by DTensors.

    Args:
        partition_fn: ``(name, submodule, mesh)``, called for every submodule; replaces parameters by DTensors
            (``submodule.register_parameter(name, nn.Parameter(distribute_tensor(...)))``). All others are replicated.
        input_fn: ``(module, inputs, mesh) -> inputs``, run before forward.
        output_fn: ``(module, outputs, mesh) -> outputs``, run after forward.

    Replicated parameters and buffers are broadcast from rank 0, like in :func:`distribute_tensor`.

    Raises:
        MeshError: no mesh is given and none is entered.

    >>> import torch, dtensor as dt
    >>> def rows(name, part, mesh):
    ...     if isinstance(part, torch.nn.Linear):
    ...         part.weight = torch.nn.Parameter(dt.distribute_tensor(part.weight.detach(), mesh, [dt.Shard(0)]))
    >>> model = dt.distribute_module(torch.nn.Linear(3, 4), dt.init_device_mesh("cpu", (2,)), rows)
    >>> model.weight.placements, model.bias.placements
    ((Shard(dim=0),), (Replicate(),))
    """
    mesh = as_mesh(device_mesh)
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            f"distribute_module takes an nn.Module, got {type(module).__name__}; for a tensor use distribute_tensor"
        )
    for function, name_ in ((partition_fn, "partition_fn"), (input_fn, "input_fn"), (output_fn, "output_fn")):
        if function is not None and not callable(function):
            raise ArgumentError(f"distribute_module: {name_} takes a function, got {function!r}")
    wrapped_input_fn = None if input_fn is None else _accept_old_signature(input_fn, "input_fn")
    wrapped_output_fn = None if output_fn is None else _accept_old_signature(output_fn, "output_fn")
    with replacing_params(module.modules(), "distribute_module"):
        for name, submodule in list(module.named_modules()):
            if partition_fn is not None:
                partition_fn(name, submodule, mesh)
            replicate_own_tensors(submodule, mesh)
    if wrapped_input_fn is not None:
        module.register_forward_pre_hook(lambda mod, inputs: wrapped_input_fn(mod, inputs, mesh))
    if wrapped_output_fn is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: wrapped_output_fn(mod, outputs, mesh))
    return module


def _accept_old_signature(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``fn`` as a function of (module, values, mesh). Older programs pass a function of (values, mesh)."""
    try:
        inspect.signature(fn).bind(None, None, None)
    except TypeError:
        try:
            inspect.signature(fn).bind(None, None)
        except TypeError:
            raise ArgumentError(f"{name} takes (module, values, mesh), not {inspect.signature(fn)}") from None
        warnings.warn(
            f"{name}(values, mesh) is deprecated; write a function of (module, values, mesh)", FutureWarning, stacklevel=3
        )
        return lambda _, values, mesh: fn(values, mesh)
    except ValueError:  # the function has no signature
        pass
    return fn


def distribute_at(held: dict[str, Any], name: str, mesh: DeviceMesh, placements: Placements, source: int | None = 0) -> None:
    """Replace a plain tensor of a module by a DTensor of the same value. A parameter becomes a parameter."""
    old = held[name]
    distributed = distribute_tensor(old.detach(), mesh, placements, src_data_rank=source)
    is_parameter = isinstance(old, nn.Parameter)
    held[name] = nn.Parameter(distributed, old.requires_grad) if is_parameter else distributed.requires_grad_(old.requires_grad)
    ParamAttributes.of(old).set_on(held[name])


def replicate_own_tensors(module: nn.Module, mesh: DeviceMesh, source: int | None = 0) -> None:
    """Replicate the parameters and buffers of ``module`` itself that are still plain."""
    for holder, name, x in own_tensors(module):
        if not isinstance(x, DTensor):
            distribute_at(holder, name, mesh, [Replicate()] * mesh.ndim, source)
