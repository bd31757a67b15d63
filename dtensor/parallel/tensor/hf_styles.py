"""Hugging Face styles: parallel styles by the names that models use in ``model._tp_plan``.

Tensors inside such a model are local: between a column-wise and a row-wise matrix each rank has some of the heads. A module
there gets its replicated or sharded parameters as local tensors, and gradients of replicated ones are summed over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...base.group_by import group_by_key
from ...errors import PlacementError
from ...mesh.device_mesh import DeviceMesh
from ...placement import Partial, Replicate, Shard
from ...tensor.dtensor import DTensor
from .colwise_rowwise import ColwiseParallel, RowwiseParallel, SequenceParallel
from .experts import DividedInput, ReplicatedInputs, ShardedExperts
from .fused_weights import distribute_fused_parameter
from .style import (
    ParallelStyle,
    as_dtensor,
    distribute_parameter,
    hook_first_output,
    redistribute_over,
    require_one_dim,
    to_local_if,
)


class _UnchangedModule(ParallelStyle):
    """Style that leaves a replicated module unchanged."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class _LocalParameters(ParallelStyle):
    """Style that runs a module with its parameters as local tensors; gradients of replicated ones are partial over ranks."""

    def __init__(self, replicate: bool) -> None:
        self.replicate = replicate

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Replicate the parameters if asked to, and register the hooks that replace them by local tensors."""
        mesh = require_one_dim(device_mesh, self)
        if self.replicate:
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    distribute_parameter(module, name, mesh, Replicate(), self.src_data_rank)
        kept: list[dict[str, Any]] = []

        def put_local_parameters(running: nn.Module, *_: Any) -> None:  # the module or a copy of it
            """Put local tensors in place of the DTensor parameters while the module runs."""
            kept.append(dict(running._parameters))
            for name, value in kept[-1].items():
                if isinstance(value, DTensor):
                    grad_placements = [Partial() if placement.is_replicate() else placement for placement in value.placements]
                    running._parameters[name] = value.to_local(grad_placements=grad_placements)  # type: ignore[assignment]

        def restore_parameters(running: nn.Module, *_: Any) -> None:
            running._parameters.update(kept.pop())

        module.register_forward_pre_hook(put_local_parameters)
        module.register_forward_hook(restore_parameters, always_call=True)
        return module


class _PartialOutput(ParallelStyle):
    """Style that sums a module's output over ranks.

    A module with sharded parameters of its own computes on DTensors, which know which outputs are partial. The plain output
    of any other module is taken as one addend per rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register the hooks that sum the output over ranks; with DTensor parameters the module computes on DTensors."""
        mesh = require_one_dim(device_mesh, self)
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            return ReplicatedInputs()._apply(module, mesh)
        hook_first_output(
            module,
            lambda x: to_local_if(redistribute_over(as_dtensor(x, mesh, Partial()), mesh, Replicate()), True, mesh, new=True),
        )
        return module


class _SharedTail(ParallelStyle):
    """Style that sums, over ranks, the gradient of the last ``width`` output features of a module.

    All heads use these features, and each rank has some of the heads.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register the hook that sums the gradient of the shared features."""
        mesh = require_one_dim(device_mesh, self)

        def split_tail(x: torch.Tensor) -> torch.Tensor:
            """Return ``x`` with a gradient that is summed over ranks for its last ``width`` features."""
            head, tail = x.split([x.size(-1) - self.width, self.width], -1)
            shared = DTensor.from_local(tail, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
            return torch.cat([head, shared], -1)

        hook_first_output(module, split_tail)
        return module


def _make_shared_tail(root: nn.Module) -> ParallelStyle:
    """Return the style ``mla_kv_a_proj``, with the width of the shared features from the model's config."""
    config: Any = getattr(root, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(text, "qk_rope_head_dim"):
        raise PlacementError("the style 'mla_kv_a_proj' needs model.config.qk_rope_head_dim, which says how the output is split")
    return _SharedTail(text.qk_rope_head_dim)


STYLES: dict[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": lambda _: ColwiseParallel(),
    "colwise_gather_output": lambda _: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda _: ColwiseParallel(output_layouts=Replicate()),
    "packed_colwise": lambda _: ColwiseParallel(parts=2),
    "rowwise": lambda _: RowwiseParallel(),
    "rowwise_split_input": lambda _: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda _: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda _: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda _: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": lambda _: SequenceParallel(use_local_output=True),
    "replicate": lambda _: _UnchangedModule(),
    "replicated_with_grad_allreduce": lambda _: _LocalParameters(replicate=True),
    "local_params": lambda _: _LocalParameters(replicate=False),
    "moe_tp_experts": lambda _: ShardedExperts(),
    "moe_identity_expert": lambda _: DividedInput(),
    "ep_dispatch_experts": lambda _: ReplicatedInputs(),
    "all_reduce": lambda _: _PartialOutput(),
    "mla_kv_a_proj": _make_shared_tail,
}
_SHARD_DIMS = {
    "colwise": -2,
    "packed_colwise": -2,
    "rowwise": -1,
    "packed_rowwise": -1,
    "embedding_rowwise": 0,
    "embedding_colwise": 1,
}
_SHARD_DIMS |= {"grouped_gemm": 0}  # complete experts on each rank


def make_style(name: str, root: nn.Module) -> ParallelStyle:
    """Return the style that a plan for ``root`` calls ``name``.

    Raises:
        PlacementError: no style has that name.
    """
    if name not in STYLES:
        raise PlacementError(f"{name!r} is not a style; known names are {', '.join(sorted(STYLES))}")
    return STYLES[name](root)


def mark_styled(module: nn.Module) -> None:
    """Record that a plan gave ``module`` a style, and remove the hooks for modules without style."""
    for handle in module.__dict__.get("_replicated_input_hooks", ()):
        handle.remove()
    module.__dict__["_replicated_input_hooks"] = ()


def hook_modules_with_shared_parameters(root: nn.Module, mesh: DeviceMesh) -> None:
    """Make modules without style that share a parameter with a styled module run on replicated DTensor inputs."""
    parameters = [(parameter, module) for module in root.modules() for parameter in module._parameters.values()]
    for modules in group_by_key(pair for pair in parameters if isinstance(pair[0], DTensor)).values():
        unstyled = [module for module in modules if "_replicated_input_hooks" not in module.__dict__]
        for module in unstyled if len(unstyled) < len(modules) else ():
            module.__dict__["_replicated_input_hooks"] = ReplicatedInputs.register_hooks(module, mesh)


def distribute_by_style_name(module: nn.Module, parameter: str, name: str, mesh: DeviceMesh, source: int | None) -> None:
    """Distribute one parameter that a plan names directly, sharded as the style name ``name`` says.

    Raises:
        PlacementError: ``name`` is not a way to shard a parameter.
    """
    if name not in _SHARD_DIMS and name != "replicate":
        raise PlacementError(
            f"{name!r} is not a way to shard a parameter; known names are {', '.join(sorted(_SHARD_DIMS))}, replicate"
        )
    value = module._parameters[parameter]
    assert value is not None
    dim = _SHARD_DIMS.get(name)
    is_replicated = dim is None or (value.ndim == 1 and name in ("rowwise", "packed_rowwise"))  # the bias of a row-wise matrix
    if is_replicated or dim is None:
        distribute_parameter(module, parameter, mesh, Replicate(), source)
    elif name.startswith("packed_"):
        distribute_fused_parameter(module, parameter, mesh, max(dim, -value.ndim) % value.ndim, 2, source)
    else:
        distribute_parameter(module, parameter, mesh, Shard(max(dim, -value.ndim) % value.ndim), source)
