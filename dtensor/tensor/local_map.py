"""``local_map``: run a function of local tensors on distributed ones, with the placements stated at its boundary."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.torch_internals import tree_flatten, tree_unflatten
from ..errors import ContradictionError, PlacementError
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..placement import Placement, normalize
from .distribute import own_tensors
from .dtensor import DTensor

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """``func``, written for this rank's local tensors, as a function of DTensors; differentiable.

    With all ranks in one process the locals are ``per_rank`` tensors, over which torch functions map.

    Args:
        out_placements: placements of the result; a tuple with one entry per flattened output if there are several (None for what
            is no tensor).
        in_placements: per flattened argument the placements it must have, None for one that is no DTensor; None checks nothing.
            For a module they are those of all its DTensor parameters and buffers, which are locals while ``func`` runs.
        in_grad_placements: per flattened argument the placements of its local gradient, see :meth:`DTensor.to_local`.
        device_mesh: of the results; default that of the first DTensor argument.
        redistribute_inputs: redistribute arguments that are placed otherwise instead of raising.

    Raises:
        PlacementError: an argument is not placed as ``in_placements`` says.
        ContradictionError: an argument is a DTensor where it says None, or arguments and outputs are other in number or kind than
            ``in_placements`` and ``out_placements`` say.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> w = dt.distribute_tensor(torch.ones(2, 4), mesh, [dt.Shard(1)])
    >>> x = dt.distribute_tensor(torch.ones(4, 3), mesh, [dt.Shard(0)])
    >>> product = dt.local_map(torch.mm, out_placements=[dt.Partial()], in_placements=([dt.Shard(1)], [dt.Shard(0)]))
    >>> product(w, x).full_tensor()
    tensor([[4., 4., 4.],
            [4., 4., 4.]])

    A call communicates what ``redistribute_inputs`` asks for, and what ``func`` does.
    """
    boundary = _Boundary(out_placements, in_placements, in_grad_placements, device_mesh, redistribute_inputs)
    return boundary.around if func is None else boundary.around(func)


@dataclass(frozen=True, slots=True)
class _Boundary:
    """What is stated of a function's arguments and results."""

    results: Any
    arguments: tuple[Placements, ...] | None
    gradients: tuple[Placements, ...] | None
    mesh: Any
    redistribute: bool

    def around(self, func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            flat, tree = tree_flatten(args)
            self._check_count(len(flat))
            mesh: DeviceMesh | None = None if self.mesh is None else as_mesh(self.mesh)
            meshes: list[DeviceMesh] = []
            with contextlib.ExitStack() as modules:
                locals_ = [self._local_of(i, value, meshes, modules) for i, value in enumerate(flat)]
                out = func(*tree_unflatten(locals_, tree), **kwargs)
            return _wrap_outputs(out, self.results, mesh or meshes[0]) if meshes else out

        return wrapped

    def _check_count(self, count: int) -> None:
        for name, given in (("in_placements", self.arguments), ("in_grad_placements", self.gradients)):
            if given is not None and len(given) != count:
                raise ContradictionError(f"local_map: {count} flattened arguments, but {name} has {len(given)} entries")

    def _local_of(self, i: int, value: Any, meshes: list[DeviceMesh], modules: contextlib.ExitStack) -> Any:
        """What the function gets for argument ``i``, whose meshes are noted; a module has locals until ``modules`` is left."""
        wanted = None if self.arguments is None else self.arguments[i]
        grad = None if self.gradients is None else self.gradients[i]
        localize = functools.partial(_localize, position=i, wanted=wanted, grad=grad, redistribute=self.redistribute)
        if isinstance(value, nn.Module) and wanted is not None:
            meshes += modules.enter_context(_with_locals(value, localize))
        elif isinstance(value, DTensor):
            meshes.append(value.device_mesh)
            if self.arguments is not None and wanted is None:
                raise ContradictionError(
                    f"local_map expects placements for argument {i}, a DTensor; in_placements has None for it"
                )
            return localize(value)
        return value


@contextlib.contextmanager
def _with_locals(module: nn.Module, localize: Callable[[DTensor], Any]) -> Iterator[list[DeviceMesh]]:
    """The module with locals in the places of its DTensors, whose meshes come back. One in several places has one local."""
    places: list[tuple[dict[str, Any], str, Any]] = [
        (held, name, value) for part in module.modules() for held, name, value in own_tensors(part) if isinstance(value, DTensor)
    ]
    distributed = {id(value): value for _, _, value in places}
    made = {key: localize(value) for key, value in distributed.items()}
    try:
        for held, name, value in places:
            held[name] = made[id(value)]
        yield [value.device_mesh for value in distributed.values()]
    finally:
        for held, name, value in places:
            held[name] = value


def _localize(value: DTensor, position: int, wanted: Placements, grad: Placements, redistribute: bool) -> Any:
    if wanted is not None:
        expected = normalize(wanted, value.device_mesh.ndim, value.ndim)
        if value.placements != expected:
            if not redistribute:
                raise PlacementError(
                    f"local_map: argument {position} has placements {value.placements}, but in_placements says "
                    f"{expected}; redistribute it first or set redistribute_inputs=True"
                )
            value = value.redistribute(placements=expected)
    return value.to_local(grad_placements=grad)


def _wrap_outputs(out: Any, out_placements: Any, mesh: DeviceMesh) -> Any:
    flat, tree = tree_flatten(out)
    several = isinstance(out_placements, tuple) and (len(flat) != 1 or not all(isinstance(p, Placement) for p in out_placements))
    wanted = list(out_placements) if several else [out_placements]
    if len(wanted) != len(flat):
        raise ContradictionError(f"local_map: {len(flat)} flattened outputs, but out_placements has {len(wanted)} entries")
    wrapped = []
    for value, placements in zip(flat, wanted, strict=True):
        if placements is None:
            wrapped.append(value)
        elif not isinstance(value, torch.Tensor):
            raise ContradictionError(
                f"local_map: out_placements has {placements} for an output that is not a tensor, {value!r}; write "
                "None in its place"
            )
        else:
            wrapped.append(DTensor.from_local(value, mesh, placements))
    return tree_unflatten(wrapped, tree)
