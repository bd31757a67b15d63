"""Parallelize a module: apply parallel styles to the submodules that a plan names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

from torch import nn

from ...comm.map_ranks import expect_locals
from ...errors import PlacementError
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...tensor.modules.stale_params import replacing_params
from .hf_styles import distribute_by_style_name, hook_modules_with_shared_parameters, make_style, mark_styled
from .shared_input import share_inputs_within
from .style import ParallelStyle

M = TypeVar("M", bound=nn.Module)
Plan = ParallelStyle | str | Mapping[str, Any]


def parallelize_module(
    module: M, device_mesh: Any = None, parallelize_plan: Plan | None = None, *, src_data_rank: int | None = 0
) -> M:
    """Apply the styles of a plan to ``module`` in place, and return it.

    Args:
        device_mesh: the mesh dim to be parallel over, for example ``mesh["tp"]``; default the mesh entered by ``with mesh:``.
        parallelize_plan: a style for ``module`` itself, or a mapping from submodule names to styles or nested plans. In a
            name such as ``"layers.*.attention.wq"`` each part is a glob; ``""`` is the module itself. Styles may be given by
            their Hugging Face names: ``model._tp_plan`` is a plan, and ``"auto"`` selects it.
        src_data_rank: the rank that provides the values of parameters, see :func:`distribute_tensor`.

    A parameter that several modules share stays shared; the first style that distributes it decides its placement.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    >>> mlp = parallelize_module(mlp, mesh, {"0": dt.parallel.ColwiseParallel(), "2": dt.parallel.RowwiseParallel()})
    >>> [tuple(p.placements) for p in mlp.parameters()]
    [(Shard(dim=0),), (Shard(dim=0),), (Shard(dim=1),), (Replicate(),)]

    Cost: the collectives of :func:`distribute_tensor` for the parameters.

    Raises:
        TypeError: the plan is neither a style nor a mapping to styles. Styles raise their own errors.
    """
    mesh = as_mesh(device_mesh)
    if parallelize_plan is None:
        warnings.warn(
            "parallelize_module without a parallelize_plan does nothing; pass a mapping from module names to styles", stacklevel=2
        )
        return module
    if parallelize_plan == "auto":
        parallelize_plan = getattr(module, "_tp_plan", None)
        if not parallelize_plan:
            raise PlacementError(
                f"{type(module).__name__} has no tensor-parallel plan (model._tp_plan); pass one: "
                'parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": '
                "RowwiseParallel()})"
            )
    expect_locals(mesh)
    with replacing_params(module.modules(), "parallelize_module"):
        parallelized = _apply_plan(module, mesh, parallelize_plan, src_data_rank, module)
    if mesh.ndim == 1:
        hook_modules_with_shared_parameters(parallelized, mesh)
    return cast(M, parallelized)


def _apply_plan(module: nn.Module, mesh: DeviceMesh, plan: Plan, source: int | None, root: nn.Module) -> nn.Module:
    """Apply ``plan`` to ``module``, recursively; ``root`` is the module that was passed to :func:`parallelize_module`."""
    if isinstance(plan, str):
        plan = make_style(plan, root)
    if isinstance(plan, ParallelStyle):
        plan.src_data_rank = source
        mark_styled(module)
        return plan._apply(module, mesh)
    if not isinstance(plan, Mapping):
        description = (
            f"the class {plan.__name__}, not an instance: write {plan.__name__}()"
            if isinstance(plan, type)
            else f"{plan!r} of {type(plan).__module__}"
        )
        raise TypeError(f"parallelize_plan takes a ParallelStyle, or a mapping from module names to styles, got {description}")
    for path, entry in plan.items():
        submodules = submodules_at(module, path)
        owners = [] if submodules or not isinstance(entry, str) else parameters_at(module, path)
        for owner, name in owners:
            distribute_by_style_name(owner, name, entry, mesh, source)
            mark_styled(owner)
        if not submodules and not owners:
            warnings.warn(
                f"the plan has {path!r}, but {type(module).__name__} has no such submodule, so the entry has no effect",
                stacklevel=3,
            )
        for submodule in submodules:
            _apply_plan(submodule, mesh, entry, source, root)
        for holder in modules_on_path(module, path):
            share_inputs_within(holder)
    return module


def modules_on_path(module: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules from ``module`` (included) down to the submodules that ``path`` names (excluded)."""
    patterns = path.split(".") if path else []
    return [holder for k in range(len(patterns)) for holder in submodules_at(module, ".".join(patterns[:k]))]


def submodules_at(module: nn.Module, path: str) -> list[nn.Module]:
    """Return the submodules that a dotted path of globs names; the empty path names ``module``."""
    submodules = [module]
    for pattern in path.split(".") if path else ():
        submodules = [child for parent in submodules for name, child in parent.named_children() if fnmatchcase(name, pattern)]
    return submodules


def parameters_at(module: nn.Module, path: str) -> list[tuple[nn.Module, str]]:
    """Return the parameters that a dotted path of globs names, as pairs of owner and name."""
    around, _, last = path.rpartition(".")
    owners = submodules_at(module, around)
    return [
        (owner, name) for owner in owners for name, x in owner._parameters.items() if x is not None and fnmatchcase(name, last)
    ]
