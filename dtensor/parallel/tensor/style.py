"""What a parallel style is, and the steps that styles are made of: lay a parameter out, place a value, hook a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from ...base.tensor_tree import like
from ...comm import shards_of
from ...dispatch.functorch import layout_of, placed_of
from ...errors import MeshError, PlacementError
from ...layout.on_other_mesh import cut_by, spelled_on
from ...mesh.device_mesh import DeviceMesh
from ...mesh.submesh import joined, picked, same_root
from ...placement import Placement, Replicate, Shard
from ...ranks.functorch import each_rank, seen
from ...tensor.autograd import as_local, laid
from ...tensor.distribute import distribute_at, replicate_own
from ...tensor.dtensor import DTensor
from .shared_input import crossed, given_away


class ParallelStyle(ABC):
    """How one module is made parallel. Subclass it and define ``_apply`` for styles of your own.

    Attributes:
        src_data_rank: set by :func:`parallelize_module`: whose parameters count, see :func:`distribute_tensor`.

    What it communicates is said by each style.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> class Rows(ParallelStyle):
    ...     def _apply(self, module, device_mesh):
    ...         module.weight = torch.nn.Parameter(dt.distribute_tensor(module.weight.detach(), device_mesh, [dt.Shard(0)]))
    ...         return module
    >>> parallelize_module(torch.nn.Linear(3, 4, bias=False), mesh, Rows()).weight.placements
    (Shard(dim=0),)

    Styles raise ``MeshError`` on meshes of several dims, ``PlacementError`` for layouts that are none.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """``module`` made parallel over ``device_mesh``, in place."""

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in vars(self).items() if name != "src_data_rank")
        return f"{type(self).__name__}({', '.join(shown)})"


def one_dim(mesh: DeviceMesh, style: ParallelStyle) -> DeviceMesh:
    """``mesh``, which must have one dim.

    Raises:
        MeshError: it has several.
    """
    if mesh.ndim != 1:
        name = (mesh.mesh_dim_names or ("tp",))[-1]
        raise MeshError(f"{type(style).__name__} takes a mesh of one dim, got {mesh!r}; pass one of its dims: mesh[{name!r}]")
    return mesh


def checked(given: Placement | None, default: Placement, name: str, style: ParallelStyle) -> Placement:
    """``given``, or ``default`` for None.

    Raises:
        PlacementError: it is no placement.
    """
    if given is not None and not isinstance(given, Placement):
        raise PlacementError(f"{type(style).__name__} takes {name}=Shard(dim) or Replicate(), one placement, got {given!r}")
    return default if given is None else given


def lay_out(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Replace the parameter ``name`` of ``module`` by the same value under ``placement``.

    Where it is computed from others (weight norm and the like), those that have the dim to be cut are cut like it, and the rest
    is replicated: what is computed from them is then laid out as its own rules say.
    """
    whole = tensor_of(module, name)
    for owner, key in behind(module, name):
        parameter = owner._parameters[key]
        assert parameter is not None
        where = placement if parameter is whole or _has_dim(parameter, whole, placement) else Replicate()
        if isinstance(parameter, DTensor) and parameter.placements == (where,):
            continue
        distribute_at(owner._parameters, key, mesh, [where], source)


def tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter ``name`` of ``module``, or what it computes and calls so; None if it has neither."""
    found: Any = module._parameters.get(name)
    if found is None and is_parametrized(module, name):
        found = _computed(module, name)
    elif found is None and behind(module, name):
        found = getattr(module, name, None)
    return found if isinstance(found, torch.Tensor) else None


def _computed(module: nn.Module, name: str) -> Any:
    """What a parametrization computes, as it does in evaluation: in training, a spectral norm goes on with its iteration."""
    parts = [part for part in _originals(module, name).modules() if part.training]
    for part in parts:
        part.training = False
    try:
        with torch.no_grad():
            return getattr(module, name)
    finally:
        for part in parts:
            part.training = True


def _originals(module: nn.Module, name: str) -> nn.Module:
    return module.parametrizations[name]  # type: ignore[index,return-value]  # a dict of modules


def behind(module: nn.Module, name: str) -> list[tuple[nn.Module, str]]:
    """The parameter ``name`` of ``module`` and where it stands; or those from which a parametrization computes it."""
    if module._parameters.get(name) is not None:
        return [(module, name)]
    if is_parametrized(module, name):
        originals = _originals(module, name)
        return [(originals, key) for key, x in originals._parameters.items() if x is not None]
    # of weight_norm and spectral_norm in torch.nn.utils, which came before parametrizations: weight_g, weight_v, weight_orig
    return [(module, key) for key, x in module._parameters.items() if x is not None and key.startswith(f"{name}_")]


def _has_dim(part: torch.Tensor, whole: torch.Tensor | None, placement: Placement) -> bool:
    if whole is None or not isinstance(placement, Shard):
        return True
    return part.ndim == whole.ndim and part.shape[placement.dim] == whole.shape[placement.dim]


def replicate_rest(module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
    """Replicate what is still plain: parameters and buffers of ``module`` and all its submodules."""
    for submodule in module.modules():
        replicate_own(submodule, mesh, source)


# --- values that cross a module's boundary -------------------------------------------------------------------------
def placed(x: DTensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """``x`` under ``placement`` along the dim of ``mesh``; along the other dims of its own mesh it stays as it is.

    So a style over ``mesh["tp"]`` takes tensors that live on ``mesh["dp", "tp"]`` too.

    Raises:
        MeshError: the mesh of ``x`` does not have that dim.
    """
    own, placements = placed_of(x)
    if own == mesh:
        wanted: tuple[Placement, ...] = (placement,)
    else:
        wanted = tuple(placement if i == dim_of(own, mesh) else p for i, p in enumerate(placements))
    return laid(x, wanted)


def brought(x: Any, mesh: DeviceMesh, given: Placement, wanted: Placement, whole: int | None = None) -> DTensor:
    """``x``, whose pieces lie as ``given`` if it is plain, under ``wanted``: one DTensor for all modules that are given it."""
    return crossed(x, (mesh, given, wanted, whole), lambda: placed(annotated(x, mesh, given, whole), mesh, wanted))


def dim_of(mesh: DeviceMesh, part: DeviceMesh) -> int:
    """Which dim of ``mesh`` is the one dim of ``part``."""
    if same_root(mesh, part) and part._dims[0] in mesh._dims:
        return mesh._dims.index(part._dims[0])
    raise MeshError(f"a module that is parallel over {part!r} got a tensor on {mesh!r}, which does not have that mesh dim")


def annotated(x: Any, mesh: DeviceMesh, placement: Placement, whole: int | None = None) -> DTensor:
    """``x`` itself if distributed, else the DTensor whose pieces are ``x``; over other dims of the mesh only: both.

    Args:
        whole: the global size of the dim that ``placement`` shards, where known; otherwise ranks exchange their sizes.
    """
    if isinstance(seen(x), DTensor):  # a transform of torch.func may hide that it is one
        return _pieces_over(x, mesh, placement, whole)
    shape = None
    dim = getattr(placement, "dim", None)
    if whole is not None and dim is not None:
        x = each_rank(x)
        shape = list(shards_of(x)[0].shape)
        shape[dim] = whole
    return DTensor.from_local(x, mesh, [placement], shape=shape)


def _pieces_over(x: Any, mesh: DeviceMesh, placement: Placement, whole: int | None) -> DTensor:
    """``x``, which may be distributed over other dims of the same mesh: what it has there are pieces over ``mesh`` too."""
    own, further = placed_of(x)[0], mesh._dims[0]
    used = {d for dims in own._dims for d in dims}
    if further in own._dims or not same_root(own, mesh) or used & set(further):
        return x
    layout = layout_of(x)
    both = spelled_on(own._derive(*joined(own, mesh)), layout)
    at, shape = both.mesh._dims.index(further), None
    where = list(both.placements)
    if isinstance(placement, Shard):
        dim = placement.dim % len(layout.shape)
        where = cut_by(both, dim, [at])
        shape = None if whole is None else [whole if d == dim else n for d, n in enumerate(layout.shape)]
    else:
        where[at], shape = placement, list(layout.shape)
    return DTensor.from_local(as_local(x), both.mesh, where, shape=shape)


def local_if(x: Any, use_local: bool, mesh: DeviceMesh, new: bool = False) -> Any:
    """The pieces of a distributed ``x`` over ``mesh`` where ``use_local`` asks for them; over other dims it stays distributed.

    Args:
        new: nobody else has the memory of ``x``, nor was it saved for a backward pass.
    """
    if not use_local or not isinstance(seen(x), DTensor):
        return x
    own, local = placed_of(x)[0], given_away(x) if new else as_local(x)
    rest = [i for i, dims in enumerate(own._dims) if dims not in mesh._dims]
    if not rest:
        return local
    layout = layout_of(x)
    outer = own._derive(*picked(own, rest))
    cut = {d: {i in rest for i in split.mesh_dims} for d, split in enumerate(layout.splits) if split is not None}
    mixed = any(len(kinds) > 1 for kinds in cut.values())  # sizes there are told by the pieces themselves
    sizes = shards_of(local)[0].shape
    shape = None if mixed else [sizes[d] if cut.get(d) == {False} else n for d, n in enumerate(layout.shape)]
    kept = [layout.placements[i] for i in rest]
    where = [Shard(p.dim, None if mixed else p.sizes) if isinstance(p, Shard) else p for p in kept]
    return DTensor.from_local(local, outer, where, shape=shape)


# --- hooks -----------------------------------------------------------------------------------------------------------
def _tensor(x: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"expected a tensor at the boundary of a parallel module, got {type(x).__name__}")
    return x


def before_forward(module: nn.Module, prepare: Callable[[Any], Any]) -> None:
    """Have ``prepare`` change the first tensor that ``module`` is called with, positional or by keyword."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (prepare(_tensor(args[0])), *args[1:]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor):
                return args, {**kwargs, name: prepare(value)}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def after_forward(module: nn.Module, prepare: Callable[[Any], Any]) -> RemovableHandle:
    """Have ``prepare`` change what ``module`` returns: the tensor, or the first item of a tuple."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple) and output:
            return like(output, (prepare(_tensor(output[0])), *output[1:]))
        return prepare(_tensor(output))

    return module.register_forward_hook(hook)
