"""``parallelize_module``: styles applied to the modules that a plan names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...comm import expect_locals
from ...errors import PlacementError
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...tensor.stale_params import replacing
from .hf_styles import cut_named, run_along, style_named, styled
from .shared_input import shared_within
from .style import ParallelStyle

Plan = ParallelStyle | str | Mapping[str, Any]


def parallelize_module(
    module: nn.Module, device_mesh: Any = None, parallelize_plan: Plan | None = None, *, src_data_rank: int | None = 0
) -> nn.Module:
    """``module`` with the styles of a plan applied, in place.

    Args:
        device_mesh: the mesh dim to be parallel over, for example ``mesh["tp"]``; default the mesh entered by ``with mesh:``.
        parallelize_plan: a style for ``module`` itself, or a mapping from names of submodules (``"layers.*.attention.wq"``, each
            part a glob, ``""`` the module itself) to a style or, again, a plan. Styles may be given by the names that Hugging
            Face models have for them: ``model._tp_plan`` is a plan, and so is ``"auto"``, which means it.
        src_data_rank: whose parameters count, see :func:`distribute_tensor`.

    A parameter that several modules share stays shared: the first style that lays it out decides.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    >>> mlp = parallelize_module(mlp, mesh, {"0": dt.parallel.ColwiseParallel(), "2": dt.parallel.RowwiseParallel()})
    >>> [tuple(p.placements) for p in mlp.parameters()]
    [(Shard(dim=0),), (Shard(dim=0),), (Shard(dim=1),), (Replicate(),)]

    Parameters are brought from ``src_data_rank``, by the collectives of :func:`distribute_tensor`.

    Raises:
        TypeError: the plan is no style and no mapping to styles. What styles raise.
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
    with replacing(module.modules(), "parallelize_module"):
        made = _apply(module, mesh, parallelize_plan, src_data_rank, module)
    if mesh.ndim == 1:
        run_along(made, mesh)
    return made


def _apply(module: nn.Module, mesh: DeviceMesh, plan: Plan, source: int | None, root: nn.Module) -> nn.Module:
    if isinstance(plan, str):
        plan = style_named(plan, root)
    if isinstance(plan, ParallelStyle):
        plan.src_data_rank = source
        styled(module)
        return plan._apply(module, mesh)
    if not isinstance(plan, Mapping):
        given = (
            f"the class {plan.__name__}, not an instance: write {plan.__name__}()"
            if isinstance(plan, type)
            else f"{plan!r} of {type(plan).__module__}"
        )
        raise TypeError(f"parallelize_plan takes a ParallelStyle, or a mapping from module names to styles, got {given}")
    for path, inner in plan.items():
        found = submodules_at(module, path)
        owners = [] if found or not isinstance(inner, str) else parameters_at(module, path)
        for owner, name in owners:
            cut_named(owner, name, inner, mesh, source)
            styled(owner)
        if not found and not owners:
            warnings.warn(
                f"the plan has {path!r}, but {type(module).__name__} has no such submodule, so the entry has no effect",
                stacklevel=3,
            )
        for submodule in found:
            _apply(submodule, mesh, inner, source, root)
        for holder in holders_of(module, path):
            shared_within(holder)
    return module


def holders_of(module: nn.Module, path: str) -> list[nn.Module]:
    """The modules on the way from ``module``, which is one, to the submodules that a path names."""
    tokens = path.split(".") if path else []
    return [holder for k in range(len(tokens)) for holder in submodules_at(module, ".".join(tokens[:k]))]


def submodules_at(module: nn.Module, path: str) -> list[nn.Module]:
    """The submodules that a dotted path of globs names; ``module`` itself for the empty path."""
    found = [module]
    for token in path.split(".") if path else ():
        found = [child for parent in found for name, child in parent.named_children() if fnmatchcase(name, token)]
    return found


def parameters_at(module: nn.Module, path: str) -> list[tuple[nn.Module, str]]:
    """The parameters that a dotted path of globs names, each with the module that has it."""
    around, _, last = path.rpartition(".")
    owners = submodules_at(module, around)
    return [
        (owner, name) for owner in owners for name, x in owner._parameters.items() if x is not None and fnmatchcase(name, last)
    ]
