"""Styles by the names that Hugging Face models have for them in ``model._tp_plan``.

Inside of such a model tensors are local: between a column-wise and a row-wise matrix each rank has some of the heads. What stands
there with parameters that all ranks share, or with parameters of its own that are cut, gets them as local tensors, and their
gradients are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...base.group_by import by_key
from ...errors import PlacementError
from ...mesh.device_mesh import DeviceMesh
from ...placement import Partial, Replicate, Shard
from ...tensor.dtensor import DTensor
from .colwise_rowwise import ColwiseParallel, RowwiseParallel, SequenceParallel
from .experts import Divided, InParts, OnTheWhole
from .fused_weights import lay_out_parts
from .style import ParallelStyle, after_forward, annotated, lay_out, local_if, one_dim, placed


class _Nothing(ParallelStyle):
    """The module is the same on all ranks, and is left to be so."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class _LocalParameters(ParallelStyle):
    """The module sees its own parameters as local tensors; of replicated ones each rank gives a term of the gradient."""

    def __init__(self, replicated: bool) -> None:
        self.replicated = replicated

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dim(device_mesh, self)
        if self.replicated:
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    lay_out(module, name, mesh, Replicate(), self.src_data_rank)
        kept: list[dict[str, Any]] = []

        def enter(running: nn.Module, *_: Any) -> None:  # the module, or a copy of it
            kept.append(dict(running._parameters))
            for name, own in kept[-1].items():
                if isinstance(own, DTensor):
                    terms = [Partial() if placement.is_replicate() else placement for placement in own.placements]
                    running._parameters[name] = own.to_local(grad_placements=terms)  # type: ignore[assignment]  # no parameter

        def leave(running: nn.Module, *_: Any) -> None:
            running._parameters.update(kept.pop())

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


class _Terms(ParallelStyle):
    """Each rank's output is a term of it; of a module that has cut parameters itself it is known by computing with DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dim(device_mesh, self)
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            return OnTheWhole()._apply(module, mesh)
        after_forward(module, lambda x: local_if(placed(annotated(x, mesh, Partial()), mesh, Replicate()), True, mesh, new=True))
        return module


class _SharedTail(ParallelStyle):
    """The last ``width`` features of the output go to all heads, of which each rank has some: they bring terms of a gradient."""

    def __init__(self, width: int) -> None:
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dim(device_mesh, self)

        def parted(x: torch.Tensor) -> torch.Tensor:
            head, tail = x.split([x.size(-1) - self.width, self.width], -1)
            shared = DTensor.from_local(tail, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
            return torch.cat([head, shared], -1)

        after_forward(module, parted)
        return module


def _shared_tail(root: nn.Module) -> ParallelStyle:
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
    "replicate": lambda _: _Nothing(),
    "replicated_with_grad_allreduce": lambda _: _LocalParameters(replicated=True),
    "local_params": lambda _: _LocalParameters(replicated=False),
    "moe_tp_experts": lambda _: InParts(),
    "moe_identity_expert": lambda _: Divided(),
    "ep_dispatch_experts": lambda _: OnTheWhole(),
    "all_reduce": lambda _: _Terms(),
    "mla_kv_a_proj": _shared_tail,
}
_CUTS = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1, "embedding_rowwise": 0, "embedding_colwise": 1}
_CUTS |= {"grouped_gemm": 0}  # whole experts on each rank


def style_named(name: str, root: nn.Module) -> ParallelStyle:
    """The style of a module that a plan for ``root`` calls so.

    Raises:
        PlacementError: no style has that name.
    """
    if name not in STYLES:
        raise PlacementError(f"{name!r} is not a style; known names are {', '.join(sorted(STYLES))}")
    return STYLES[name](root)


def styled(module: nn.Module) -> None:
    """Note that ``module`` is given a style: what was done for the parameters that it shared goes."""
    for handle in module.__dict__.get("_runs_along", ()):
        handle.remove()
    module.__dict__["_runs_along"] = ()


def run_along(root: nn.Module, mesh: DeviceMesh) -> None:
    """Modules without a style that share a parameter with one that has take and give tensors that all ranks have alike."""
    standing = [(parameter, module) for module in root.modules() for parameter in module._parameters.values()]
    for modules in by_key(pair for pair in standing if isinstance(pair[0], DTensor)).values():
        bare = [module for module in modules if "_runs_along" not in module.__dict__]
        for module in bare if len(bare) < len(modules) else ():
            module.__dict__["_runs_along"] = OnTheWhole.around(module, mesh)


def cut_named(module: nn.Module, parameter: str, name: str, mesh: DeviceMesh, source: int | None) -> None:
    """Lays out one parameter as a plan says that names it by itself.

    Raises:
        PlacementError: no cut has that name.
    """
    if name not in _CUTS and name != "replicate":
        raise PlacementError(f"{name!r} is not a way to shard a parameter; known names are {', '.join(sorted(_CUTS))}, replicate")
    own = module._parameters[parameter]
    assert own is not None
    dim = _CUTS.get(name)
    whole = dim is None or (own.ndim == 1 and name in ("rowwise", "packed_rowwise"))  # of a row-wise matrix: its bias
    if whole or dim is None:
        lay_out(module, parameter, mesh, Replicate(), source)
    elif name.startswith("packed_"):
        lay_out_parts(module, parameter, mesh, max(dim, -own.ndim) % own.ndim, 2, source)
    else:
        lay_out(module, parameter, mesh, Shard(max(dim, -own.ndim) % own.ndim), source)
