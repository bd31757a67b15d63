"""Parallel styles: the base class, and the steps that styles share.

The steps distribute a parameter, redistribute a value at a module's boundary, and register hooks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from ...base.tensor_tree import rebuild_sequence
from ...comm import shards_of
from ...errors import MeshError, PlacementError
from ...layout.on_other_mesh import layout_on_larger_mesh, shard_further
from ...layout.placement_forms import is_placement_form, read_placements
from ...mesh.device_mesh import DeviceMesh
from ...mesh.submesh import have_same_root, join_dims, select_dims
from ...placement import NamedPlacements, Placement, Replicate, Shard
from ...ranks.per_rank_functorch import split_ranks, unwrap_functorch
from ...state.functorch import layout_of, mesh_and_placements_of
from ...tensor.autograd import redistribute_if_needed, to_local_tensor
from ...tensor.dtensor import DTensor
from ...tensor.modules.distribute_module import distribute_at, replicate_own_tensors
from .shared_input import donate_local, share_input


class ParallelStyle(ABC):
    """Abstract base class: one way to parallelize a module. Subclass it and define ``_apply`` for your own styles.

    Attributes:
        src_data_rank: set by :func:`parallelize_module`: the rank that provides parameter values, see
            :func:`distribute_tensor`.

    Each style documents its own communication.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> class Rows(ParallelStyle):
    ...     def _apply(self, module, device_mesh):
    ...         module.weight = torch.nn.Parameter(dt.distribute_tensor(module.weight.detach(), device_mesh, [dt.Shard(0)]))
    ...         return module
    >>> parallelize_module(torch.nn.Linear(3, 4, bias=False), mesh, Rows()).weight.placements
    (Shard(dim=0),)

    Styles raise ``MeshError`` for meshes of several dims and ``PlacementError`` for layouts that are not placements.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Parallelize ``module`` over ``device_mesh`` in place, and return it."""

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in vars(self).items() if name != "src_data_rank")
        return f"{type(self).__name__}({', '.join(shown)})"


def require_one_dim(mesh: DeviceMesh, style: ParallelStyle) -> DeviceMesh:
    """Return ``mesh``, or raise MeshError if a style over one mesh dim got a mesh with several.

    Raises:
        MeshError: the mesh has several dims.
    """
    if mesh.ndim != 1:
        name = (mesh.mesh_dim_names or ("tp",))[-1]
        raise MeshError(f"{type(style).__name__} takes a mesh of one dim, got {mesh!r}; pass one of its dims: mesh[{name!r}]")
    return mesh


StylePlacement: TypeAlias = Placement | NamedPlacements
"""The placement over the one mesh dim of a style, in any form but a list."""


def placement_or_default(given: StylePlacement | None, default: Placement, name: str, style: ParallelStyle) -> StylePlacement:
    """Return the placement argument ``given`` of a style, or ``default`` for None; raise if it is no placement.

    Raises:
        PlacementError: it is no form of one placement.
    """
    if given is not None and (isinstance(given, (list, tuple)) or not is_placement_form(given)):
        raise PlacementError(f"{type(style).__name__} takes {name}=Shard(dim) or Replicate(), one placement, got {given!r}")
    return default if given is None else given


def placement_over(mesh: DeviceMesh, given: StylePlacement) -> Placement:
    """Return the placement along the one dim of ``mesh``. Its tensor dim may be negative.

    Raises:
        PlacementError: a form that does not fit the mesh.
    """
    if isinstance(given, Placement):
        return given
    placements = read_placements(given, mesh)
    if len(placements) != 1 or not isinstance(placements[0], Placement):
        raise PlacementError(f"{given!r} is not one placement along the mesh dim of {mesh!r}; write S(0) or {{name: Shard(0)}}")
    return placements[0]


def distribute_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Replace the parameter ``name`` of ``module`` by a DTensor of the same value under ``placement``.

    If a parametrization (such as weight norm) computes it from other parameters, those that have the sharded dim are sharded
    along it, and the others are replicated. Sharding propagation then gives the placement of the computed value.
    """
    target = tensor_of(module, name)
    for owner, key in source_parameters_of(module, name):
        parameter = owner._parameters[key]
        assert parameter is not None
        own_placement = placement if parameter is target or _has_dim(parameter, target, placement) else Replicate()
        if isinstance(parameter, DTensor) and parameter.placements == (own_placement,):
            continue
        distribute_at(owner._parameters, key, mesh, [own_placement], source)


def tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return the parameter ``name`` of ``module``, or the tensor that a parametrization computes under that name.

    Return None if there is neither.
    """
    value: Any = module._parameters.get(name)
    if value is None and is_parametrized(module, name):
        value = _compute_parametrized(module, name)
    elif value is None and source_parameters_of(module, name):
        value = getattr(module, name, None)
    return value if isinstance(value, torch.Tensor) else None


def _compute_parametrized(module: nn.Module, name: str) -> Any:
    """Return the value of a parametrized tensor, computed in evaluation mode, so that no state of it advances."""
    training_parts = [part for part in _original_tensors_of(module, name).modules() if part.training]
    for part in training_parts:
        part.training = False
    try:
        with torch.no_grad():
            return getattr(module, name)
    finally:
        for part in training_parts:
            part.training = True


def _original_tensors_of(module: nn.Module, name: str) -> nn.Module:
    return module.parametrizations[name]  # type: ignore[index,return-value]  # a dict of modules


def source_parameters_of(module: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """Return the parameters behind ``name``, itself or those of its parametrization, as pairs of owner and name.

    If a parametrization computes it, return the parameters that it computes it from.
    """
    if module._parameters.get(name) is not None:
        return [(module, name)]
    if is_parametrized(module, name):
        originals = _original_tensors_of(module, name)
        return [(originals, key) for key, x in originals._parameters.items() if x is not None]
    # of weight_norm and spectral_norm in torch.nn.utils, which came before parametrizations: weight_g, weight_v, weight_orig
    return [(module, key) for key, x in module._parameters.items() if x is not None and key.startswith(f"{name}_")]


def _has_dim(parameter: torch.Tensor, target: torch.Tensor | None, placement: Placement) -> bool:
    """Return True if ``parameter`` has the same size as ``target`` along the dim that ``placement`` shards."""
    if target is None or not isinstance(placement, Shard):
        return True
    return parameter.ndim == target.ndim and parameter.shape[placement.dim] == target.shape[placement.dim]


def replicate_rest(module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
    """Replicate the plain parameters and buffers of ``module`` and all its submodules."""
    for submodule in module.modules():
        replicate_own_tensors(submodule, mesh, source)


# --- values that cross a module's boundary ---------------------------------------------------------------------------
def redistribute_over(x: DTensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Redistribute ``x`` to ``placement`` along the one dim of ``mesh``.

    Its placements along the other dims of its own mesh stay. So a style over ``mesh["tp"]`` also accepts tensors on
    ``mesh["dp", "tp"]``.

    Raises:
        MeshError: the mesh of ``x`` does not have that dim.
    """
    own_mesh, placements = mesh_and_placements_of(x)
    if own_mesh == mesh:
        desired: tuple[Placement, ...] = (placement,)
    else:
        desired = tuple(placement if i == mesh_dim_of(own_mesh, mesh) else p for i, p in enumerate(placements))
    return redistribute_if_needed(x, desired)


def make_shared_input(
    x: Any, mesh: DeviceMesh, input_placement: Placement, desired: Placement, global_size: int | None = None
) -> DTensor:
    """Return ``x`` redistributed to ``desired``, as one DTensor for all modules that request it.

    A plain ``x`` has the placement ``input_placement``.
    """
    return share_input(
        x,
        (mesh, input_placement, desired, global_size),
        lambda: redistribute_over(as_dtensor(x, mesh, input_placement, global_size), mesh, desired),
    )


def mesh_dim_of(mesh: DeviceMesh, submesh: DeviceMesh) -> int:
    """Return the index in ``mesh`` of the one dim of ``submesh``."""
    if have_same_root(mesh, submesh) and submesh._dims[0] in mesh._dims:
        return mesh._dims.index(submesh._dims[0])
    raise MeshError(
        f"a module that is parallel over {submesh!r} got a tensor on {mesh!r}, which does not have that mesh dim; pass the local "
        "tensor, or a DTensor on a mesh with that dim, such as their root mesh"
    )


def as_dtensor(x: Any, mesh: DeviceMesh, placement: Placement, global_size: int | None = None) -> DTensor:
    """Return ``x`` as a DTensor over ``mesh``: a plain ``x`` is a local tensor, a DTensor on other mesh dims is extended.

    Args:
        global_size: the global size of the dim that ``placement`` shards, if known; otherwise ranks exchange their sizes.
    """
    if isinstance(unwrap_functorch(x), DTensor):  # a transform of torch.func may wrap a DTensor
        return _extend_to_mesh(x, mesh, placement, global_size)
    shape = None
    dim = getattr(placement, "dim", None)
    if global_size is not None and dim is not None:
        x = split_ranks(x)
        shape = list(shards_of(x)[0].shape)
        shape[dim] = global_size
    return DTensor.from_local(x, mesh, [placement], shape=shape)


def _extend_to_mesh(x: Any, mesh: DeviceMesh, placement: Placement, global_size: int | None) -> DTensor:
    """Return the DTensor ``x`` on a mesh with the further dim ``mesh``, along which its local tensors have ``placement``.

    Return ``x`` if it is on that mesh dim already.
    """
    own_mesh, mesh_dim = mesh_and_placements_of(x)[0], mesh._dims[0]
    used = {d for dims in own_mesh._dims for d in dims}
    if mesh_dim in own_mesh._dims or not have_same_root(own_mesh, mesh) or used & set(mesh_dim):
        return x
    layout = layout_of(x)
    combined = layout_on_larger_mesh(own_mesh._derive(*join_dims(own_mesh, mesh)), layout)
    at, shape = combined.mesh._dims.index(mesh_dim), None
    placements = list(combined.placements)
    if isinstance(placement, Shard):
        dim = placement.dim % len(layout.shape)
        placements = shard_further(combined, dim, [at])
        shape = None if global_size is None else [global_size if d == dim else n for d, n in enumerate(layout.shape)]
    else:
        placements[at], shape = placement, list(layout.shape)
    return DTensor.from_local(to_local_tensor(x), combined.mesh, placements, shape=shape)


def to_local_if(x: Any, use_local: bool, mesh: DeviceMesh, new: bool = False) -> Any:
    """Return the local tensor of the DTensor ``x`` over the mesh dim of ``mesh`` if ``use_local``, else ``x``.

    Over other mesh dims the result stays a DTensor.

    Args:
        new: no other code uses the memory of ``x``, and autograd did not save it.
    """
    if not use_local or not isinstance(unwrap_functorch(x), DTensor):
        return x
    own_mesh, local = mesh_and_placements_of(x)[0], donate_local(x) if new else to_local_tensor(x)
    other_dims = [i for i, dims in enumerate(own_mesh._dims) if dims not in mesh._dims]
    if not other_dims:
        return local
    layout = layout_of(x)
    outer = own_mesh._derive(*select_dims(own_mesh, other_dims))
    shard_kinds = {d: {i in other_dims for i in split.mesh_dims} for d, split in enumerate(layout.splits) if split is not None}
    is_mixed = any(len(kinds) > 1 for kinds in shard_kinds.values())  # the local tensors have the sizes
    sizes = shards_of(local)[0].shape
    shape = None if is_mixed else [sizes[d] if shard_kinds.get(d) == {False} else n for d, n in enumerate(layout.shape)]
    outer_placements = [layout.placements[i] for i in other_dims]
    placements = [Shard(p.dim, None if is_mixed else p.sizes) if isinstance(p, Shard) else p for p in outer_placements]
    return DTensor.from_local(local, outer, placements, shape=shape)


# --- hooks -----------------------------------------------------------------------------------------------------------
def _require_tensor(x: Any) -> torch.Tensor:
    """Return ``x``; raise TypeError if a module's input or output is no tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"expected a tensor at the boundary of a parallel module, got {type(x).__name__}")
    return x


def hook_first_input(module: nn.Module, prepare: Callable[[Any], Any]) -> None:
    """Register a hook that applies ``prepare`` to the first tensor argument of ``module``, positional or by keyword."""

    def prepare_first_input(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the first tensor argument of the module by ``prepare`` of it."""
        if args:
            return (prepare(_require_tensor(args[0])), *args[1:]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                return args, {**kwargs, name: prepare(value)}
        return args, kwargs

    module.register_forward_pre_hook(prepare_first_input, with_kwargs=True)


def hook_first_output(module: nn.Module, prepare: Callable[[Any], Any]) -> RemovableHandle:
    """Register a hook that applies ``prepare`` to the output of ``module``: the tensor, or the first item of a tuple."""

    def prepare_first_output(_: nn.Module, args: Any, output: Any) -> Any:
        """Replace the output tensor, or the first item of an output tuple, by ``prepare`` of it."""
        if isinstance(output, tuple) and output:
            return rebuild_sequence(output, (prepare(_require_tensor(output[0])), *output[1:]))
        return prepare(_require_tensor(output))

    return module.register_forward_hook(prepare_first_output)
