"""Support for ``torch.compile``: DTensors, and functions of this package, in compiled graphs.

Placements, layouts and meshes are constants of a graph, with guards: their methods are evaluated while the program is traced.
Methods of DTensors are calls in the graph. So is ``from_local`` if it needs no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from inspect import getattr_static
from types import FunctionType
from typing import Any, cast

import torch

from ..base import torch_internals
from ..base.modes import EXPLICIT, IMPLICIT_REPLICATION, explicit, implicit_replication, remember
from ..base.patches import patch_applied
from ..base.torch_internals import opaque_object
from ..base.tracing import is_traced, register_object, registered_object, unwrap_graph_constant
from ..comm import PerRank, shards_of
from ..layout.placement_forms import split_mesh_and_placements
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..placement import Partial, Partition, Placements, Replicate, Shard, partition
from ..ranks.per_rank_functorch import split_ranks, unwrap_functorch
from ..state.functorch import layout_of, mesh_and_placements_of
from ..tensor import create
from ..tensor.autograd import redistribute_if_needed, to_local_tensor
from ..tensor.compile_protocol import ALL_RANKS, plain_to_expected_tangent
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from ..tensor.local_layout import EqualLocalsCheck, exchanges_sizes
from ..tensor.modules.distribute_module import distribute_module
from ..tensor.overrides.register import keep_operators_with_rules
from .import_hooks import on_import

try:
    _register, _CONSTANT = opaque_object.register_custom_class, "constant"
except AttributeError:  # torch before 2.14
    _register, _CONSTANT = opaque_object.register_opaque_type, "value"


def register_constants(*kinds: type) -> None:
    """Register classes, such as layouts and meshes, so that their objects are constants of compiled graphs.

    Torch 2.11 takes only its own classes: there the graph breaks at them.
    """
    for kind in kinds:
        kind.__fx_repr__ = _fx_repr  # type: ignore[attr-defined]  # torch reads it from the class
        members = dict.fromkeys(_traceable_methods(kind), opaque_object.MemberType.USE_REAL)
        members |= dict.fromkeys(members.keys() & _GROUP_METHODS, opaque_object.MemberType.INLINED)
        try:
            _register(kind, typ=_CONSTANT, members=members)
        except TypeError:  # torch 2.11, at the first class
            return
    patch_applied("torch._library.opaque_object._OPAQUE_TYPES")


def _traceable_methods(kind: type) -> set[str]:
    """Return the names of the methods of a class that traced code may call, without properties that compute.

    Torch reads all of them from an object, so properties that compute are not included.
    """
    attributes = {name: getattr_static(kind, name) for name in dir(kind)}
    method_kinds = (FunctionType, staticmethod, classmethod, cached_property)
    return {
        name
        for name, value in attributes.items()
        if isinstance(value, method_kinds) and (name in _DUNDER_METHODS or not name.startswith("__"))
    }


_GROUP_METHODS = frozenset({"get_group", "get_all_groups"})  # inlined: process groups are inputs of a graph, not constants
_DUNDER_METHODS = frozenset({"__getitem__", "__repr__", "__str__"})


def _fx_repr(value: Any) -> tuple[str, dict[str, Any]]:
    """Return the source text of a constant in the code of a graph, and the names that the text uses.

    The text is an expression for a placement, else a registered object.

    Torch stores compiled programs on disk under this text. Programs of another process refer to process groups that do not exist
    here, so their text differs.
    """
    if isinstance(value, (Shard, Replicate)):
        return repr(value), {type(value).__name__: type(value)}
    if isinstance(value, Partial) and isinstance(value.reduce_op, str):
        return f"Partial({value.reduce_op!r})", {"Partial": Partial}
    if isinstance(value, Partition):
        return repr(value), {"partition": partition}
    return f"kept_object({register_object(value)!r})", {"kept_object": registered_object}


def _graph_break(msg: str) -> None:
    """Break the graph: replaced by the compiler's ``graph_break`` when Dynamo is imported."""


def install_substitutes() -> None:
    """Register substitutes for functions that Dynamo cannot trace, when Dynamo is imported."""
    on_import("torch._dynamo", _install_in_dynamo)


def _install_in_dynamo(module: Any) -> None:
    """Register substitutes and functions that stay in graphs with Dynamo, and patch the tangents of AOTAutograd."""
    global _graph_break
    _graph_break = torch_internals.graph_break
    for function in _ALLOWED_IN_GRAPH:
        module.allow_in_graph(function)
    for function, seen_as in _SUBSTITUTES.items():
        module.substitute_in_graph(function, skip_signature_check=True)(seen_as)
    patch_applied("torch._dynamo")
    keep_operators_with_rules()
    torch.Tensor.__coerce_same_metadata_as_tangent__ = plain_to_expected_tangent  # type: ignore[attr-defined]  # torch reads it
    patch_applied("torch.Tensor.__coerce_same_metadata_as_tangent__")


def _traced_unwrap(x: Any) -> Any:
    """Replace functorch unwrapping and ``split_ranks`` in traced code: return ``x``; a PerRank tensor breaks the graph."""
    if isinstance(x, PerRank):
        _graph_break(msg=ALL_RANKS)
    return x


def _traced_shards_of(x: Any) -> Any:
    """Replace ``shards_of`` in traced code: return ``(x,)``; a PerRank tensor breaks the graph."""
    if isinstance(x, PerRank):
        _graph_break(msg=ALL_RANKS)
    return (x,)


def _from_local_in_graph(
    local: torch.Tensor, mesh: DeviceMesh, placements: Any, shape: Any, stride: Any, grad_placements: Any
) -> Any:
    """Return ``DTensor.from_local`` of the arguments as an operation of a graph, after a check that ranks agree."""
    if shape is None and not is_traced(local) and exchanges_sizes(mesh, placements):  # the graph assumes equal shapes
        EqualLocalsCheck(mesh, local.dtype, str(placements))((*local.shape, *local.stride()))
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride, grad_placements=grad_placements)


def _traced_from_local(
    local_tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Placements | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
    grad_placements: Placements | None = None,
) -> DTensor:
    """Replace ``DTensor.from_local`` in traced code; checks between ranks run at every call, outside of the graph."""
    device_mesh, placements = split_mesh_and_placements(device_mesh, placements)
    if not _is_on_processes(device_mesh):
        _graph_break(msg=ALL_RANKS)
    if device_mesh is None:
        _graph_break(msg="DTensor.from_local without device_mesh= reads the mesh of the `with mesh:` block; pass device_mesh=")
    if EXPLICIT.held or IMPLICIT_REPLICATION.held:  # for other inputs of a graph, guards of their layouts include the modes
        _graph_break(msg="from_local under explicit() or implicit_replication() breaks graphs; pass DTensors instead")
    if run_check:
        _graph_break(msg="DTensor.from_local(run_check=True) compares values of ranks; call it outside of the graph")
    return _from_local_in_graph(local_tensor, device_mesh, placements, shape, stride, grad_placements)


def _make_factory_pair(function: Any) -> tuple[Any, Any]:
    """Return a factory such as ``zeros`` as an operation of a graph, and the function that replaces it in traced code."""

    def factory(*size: Any, **options: Any) -> Any:
        return function(*size, **options)

    def traced_factory(*size: Any, **options: Any) -> Any:
        """Break the graph unless the call names a mesh on processes; else call the factory in the graph."""
        if not _is_on_processes(options.get("device_mesh")):
            _graph_break(msg=ALL_RANKS)
        if options.get("device_mesh") is None:
            _graph_break(msg="a DTensor made without device_mesh= is on the mesh of the `with mesh:` block; pass device_mesh=")
        return factory(*size, **options)

    return factory, traced_factory


def _traced_distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Replace ``distribute_tensor`` in traced code; break the graph where it would need more than a graph has."""
    device_mesh, placements = split_mesh_and_placements(device_mesh, placements)
    if not _is_on_processes(device_mesh):
        _graph_break(msg=ALL_RANKS)
    if device_mesh is None:
        _graph_break(msg="distribute_tensor without device_mesh= reads the mesh of the `with mesh:` block; pass device_mesh=")
    if tensor.requires_grad and not tensor.is_leaf and not isinstance(tensor, DTensor):
        _graph_break(
            msg="distribute_tensor takes leaf tensors; for a computed value use DTensor.from_local(value, mesh, placements)"
        )
    with torch.enable_grad():  # a leaf requires grad also under no_grad()
        return _distribute_in_graph(tensor, device_mesh, placements, src_data_rank)


def _traced_distribute_module(*args: Any, **options: Any) -> None:
    _graph_break(msg="distribute_module makes parameters, which are inputs of graphs; call it before the compiled function")


def _refuse_mode(*args: Any, **options: Any) -> None:
    _graph_break(msg="modes are guards of a graph; enter the mode around the call of the compiled function")


def _traced_as_mesh(mesh: Any = None) -> DeviceMesh:
    """Replace ``as_mesh`` in traced code: return ``mesh``; break the graph for other values than meshes of this package."""
    if not isinstance(mesh, DeviceMesh):
        _graph_break(msg="a missing mesh, or a mesh of torch, is looked up; pass a mesh of this package")
    return mesh


def _distribute_in_graph(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any, source: int | None) -> DTensor:
    """Return ``distribute_tensor`` of the arguments as an operation of a graph; no gradient flows back to a plain leaf."""
    if isinstance(tensor, DTensor) or not tensor.requires_grad:
        return distribute_tensor(tensor, mesh, placements, src_data_rank=source)
    return cast(DTensor, _DistributeLeaf.apply(tensor, mesh, placements, source))


class _DistributeLeaf(torch.autograd.Function):
    """``distribute_tensor`` of a tensor that requires grad.

    A graph makes no leaves, so no gradient flows back to the plain tensor.
    """

    @staticmethod
    def forward(_: Any, tensor: torch.Tensor, mesh: DeviceMesh, placements: Any, source: int | None) -> DTensor:
        return distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=source)

    @staticmethod
    def backward(_: Any, *__: Any) -> tuple[None, ...]:
        return (None,) * 4


def _is_on_processes(mesh: Any) -> bool:
    return not isinstance(mesh, DeviceMesh) or mesh.kind == "process_group"


_FACTORIES = (create.zeros, create.ones, create.empty, create.full, create.linspace, create.logspace, create.rand, create.randn)
_FACTORY_PAIRS = {function: _make_factory_pair(function) for function in _FACTORIES}
_ALLOWED_IN_GRAPH: tuple[Any, ...] = (
    _from_local_in_graph,
    _distribute_in_graph,
    redistribute_if_needed,
    to_local_tensor,
    *[factory for factory, _ in _FACTORY_PAIRS.values()],
)
_SUBSTITUTES: dict[Any, Any] = {
    **{function: seen_as for function, (_, seen_as) in _FACTORY_PAIRS.items()},
    as_mesh: _traced_as_mesh,
    unwrap_graph_constant: lambda x: x,
    distribute_tensor: _traced_distribute_tensor,
    distribute_module: _traced_distribute_module,
    DTensor.from_local: _traced_from_local,
    **dict.fromkeys((explicit, implicit_replication, remember), _refuse_mode),
    unwrap_functorch: _traced_unwrap,
    mesh_and_placements_of: lambda x: x._placed,
    layout_of: lambda x: x._layout,
    split_ranks: _traced_unwrap,
    shards_of: _traced_shards_of,
}
