"""Writes of distributed values into plain tensors, under ``implicit_replication()``.

A plain tensor counts as the same value on every rank, so after a write it must be the same again: the operation runs on a
replicated copy, and every rank takes over the whole result. Outside this mode such a write is refused (see ``dispatch``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..base.modes import MODES
from ..comm import PerRank, communicator_of
from ..errors import LayoutError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.schema import Operator
from .compiled import Runner
from .execute import Wrap


def plainly_written(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], tensor_type: type[Any]) -> tuple[str, ...]:
    """The arguments that a call writes to and that are plain tensors (``out=`` arguments have their own way)."""
    if not operator.mutated or operator.per_element:
        return ()
    bound = operator.bind(args, kwargs)
    names = (name for name in operator.names if name in operator.mutated and name not in operator.outs)
    return tuple(name for name in names if isinstance(bound.get(name), torch.Tensor) and not isinstance(bound[name], tensor_type))


def through_copies(operator: Operator, names: tuple[str, ...], tensor_type: type[Any], wrap: Wrap) -> Runner:
    """Run the operator on replicated copies of the arguments ``names``, then bring the values back into them."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], local_args: list[Any], local_kwargs: dict[str, Any]) -> Any:
        bound = operator.bind(args, kwargs)
        given = {name: bound[name] for name in names}
        mesh = next(_meshes(list(bound.values()), tensor_type))
        bound.update({name: replicated(value, mesh, wrap) for name, value in given.items()})
        result = operator.call(bound)
        for name, value in given.items():
            written = bound[name]._local
            if mesh.current_member() is not None:
                value.copy_(written.shards[0] if isinstance(written, PerRank) else written)
        if len(operator.returns) == 1:
            return given.get(operator.returns[0] or "", result)
        results = zip(operator.returns, result or (), strict=True)
        return tuple(given.get(owner or "", made) for owner, made in results) if operator.returns else None

    return run


def replicated(value: torch.Tensor, mesh: DeviceMesh, wrap: Callable[[Any, Layout], Any]) -> Any:
    """A copy of ``value`` on every rank."""
    copy = value.detach().clone()
    layout = Layout.replicated(mesh, copy.shape, copy.stride(), copy.dtype)
    return wrap(communicator_of(mesh).map(lambda member: copy.clone()), layout)


def laid_out_alike(value: torch.Tensor, x: Any, wrap: Callable[[Any, Layout], Any]) -> Any:
    """A plain ``value``, the same on every rank, under the placements of ``x``, which is to have it as its ``data``.

    Raises:
        LayoutError: nobody said that it is the same.
    """
    if not MODES.implicit_replication or isinstance(value, PerRank):
        raise LayoutError(
            "x.data = ... of a DTensor takes a DTensor; use distribute_tensor(t, x.device_mesh, x.placements), or, "
            "where t is the same on every rank, `with dtensor.implicit_replication():`"
        )
    with torch.no_grad():
        return replicated(value, x._layout.mesh, wrap).redistribute(placements=x.placements)


def _meshes(values: Any, tensor_type: type[Any]) -> Iterator[DeviceMesh]:
    for value in values:
        if isinstance(value, tensor_type):
            yield value._layout.mesh
        elif isinstance(value, (list, tuple)):
            yield from _meshes(value, tensor_type)
