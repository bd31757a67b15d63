"""Local map (``local_map``): run a function of local tensors on DTensors, with placements given for its arguments and results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import nn

from ..base.tensor_tree import own_tensors
from ..base.torch_internals import tree_flatten, tree_unflatten
from ..errors import ContradictionError, PlacementError
from ..layout.placement_forms import resolve_placements
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..placement import Partition, Placement, Placements
from .dtensor import DTensor

P = ParamSpec("P")
R = TypeVar("R")


class DTensorFunction(Protocol[P]):
    """The type of a mapped function with one tensor as its result.

    A class, because mypy takes a function that returns Any for an untyped one if both overloads of ``local_map`` return a
    ``Callable``.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> DTensor: ...


class LocalMapDecorator(Protocol):
    """The type of ``local_map(out_placements=...)`` without a function."""

    @overload
    def __call__(self, func: Callable[P, torch.Tensor], /) -> DTensorFunction[P]: ...
    @overload
    def __call__(self, func: Callable[P, R], /) -> Callable[P, R]: ...


@overload
def local_map(
    func: Callable[P, torch.Tensor],
    out_placements: Placements,
    in_placements: tuple[Placements | None, ...] | None = None,
    in_grad_placements: tuple[Placements | None, ...] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> DTensorFunction[P]: ...
@overload
def local_map(
    func: Callable[P, R],
    out_placements: Any = None,
    in_placements: tuple[Placements | None, ...] | None = None,
    in_grad_placements: tuple[Placements | None, ...] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[P, R]: ...
@overload
def local_map(
    func: None = None,
    out_placements: Any = None,
    in_placements: tuple[Placements | None, ...] | None = None,
    in_grad_placements: tuple[Placements | None, ...] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> LocalMapDecorator: ...
def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: tuple[Placements | None, ...] | None = None,
    in_grad_placements: tuple[Placements | None, ...] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return ``func``, written for this rank's local tensors, as a function of DTensors; differentiable.

    With all ranks in one process the local tensors are ``per_rank`` tensors, over which torch functions map.

    Args:
        out_placements: placements of the result, in any form (``Placements``); a tuple with one entry per flattened output if
            there are several (None for an output that is no tensor).
        in_placements: per flattened argument the placements it must have, None for one that is no DTensor; None checks nothing.
            For a module they are those of all its DTensor parameters and buffers, which are local tensors while ``func`` runs.
        in_grad_placements: per flattened argument the placements of its local gradient, see :meth:`DTensor.to_local`.
        device_mesh: of the results; default that of the first DTensor argument.
        redistribute_inputs: redistribute arguments that have other placements instead of raising.

    Raises:
        PlacementError: an argument does not have its ``in_placements``.
        ContradictionError: ``in_placements`` has None for a DTensor, or the number or kind of arguments and outputs is not that
            of ``in_placements`` and ``out_placements``.

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
    return boundary.wrap_function if func is None else boundary.wrap_function(func)


@dataclass(frozen=True, slots=True)
class _Boundary:
    """Placements of the arguments and results of a ``local_map`` function."""

    results: Any
    arguments: tuple[Placements | None, ...] | None
    gradients: tuple[Placements | None, ...] | None
    mesh: Any
    redistribute: bool

    def wrap_function(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``func`` as a function of DTensors: it gets their local tensors, and its outputs become DTensors."""

        @functools.wraps(func)
        def call_with_local_tensors(*args: Any, **kwargs: Any) -> Any:
            """Call ``func`` with the local tensors of its arguments, and wrap its outputs."""
            flat, tree = tree_flatten(args)
            self._check_count(len(flat))
            mesh: DeviceMesh | None = None if self.mesh is None else as_mesh(self.mesh)
            meshes: list[DeviceMesh] = []
            with contextlib.ExitStack() as modules:
                locals_ = [self._localize_argument(i, value, meshes, modules) for i, value in enumerate(flat)]
                out = func(*tree_unflatten(locals_, tree), **kwargs)
            return _wrap_outputs(out, self.results, mesh or meshes[0]) if meshes else out

        return call_with_local_tensors

    def _check_count(self, count: int) -> None:
        """Raise if the placements are not one for each flattened argument."""
        for name, entries in (("in_placements", self.arguments), ("in_grad_placements", self.gradients)):
            if isinstance(entries, (str, Mapping, Partition)):
                raise ContradictionError(f"local_map: {name} takes a tuple with an entry for each argument; write ({entries!r},)")
            if entries is not None and len(entries) != count:
                raise ContradictionError(
                    f"local_map: {count} flattened arguments, but {name} has {len(entries)} entries; "
                    "give one entry for each argument (None: not a DTensor)"
                )

    def _localize_argument(self, i: int, value: Any, meshes: list[DeviceMesh], modules: contextlib.ExitStack) -> Any:
        """Return the local value that the function gets for argument ``i``, and add its meshes to ``meshes``.

        The DTensors of a module are replaced by local tensors until ``modules`` closes.
        """
        placements = None if self.arguments is None else self.arguments[i]
        grad_placements = None if self.gradients is None else self.gradients[i]
        localize = functools.partial(
            _localize, position=i, wanted=placements, grad=grad_placements, redistribute=self.redistribute
        )
        if isinstance(value, nn.Module) and placements is not None:
            meshes += modules.enter_context(_swap_in_local_tensors(value, localize))
        elif isinstance(value, DTensor):
            meshes.append(value.device_mesh)
            if self.arguments is not None and placements is None:
                raise ContradictionError(
                    f"local_map: argument {i} is a DTensor, but in_placements has None for it; give its placements there"
                )
            return localize(value)
        return value


@contextlib.contextmanager
def _swap_in_local_tensors(module: nn.Module, localize: Callable[[DTensor], Any]) -> Iterator[list[DeviceMesh]]:
    """Replace a module's parameters and buffers that are DTensors by local tensors in this context; yield their meshes.

    A DTensor that is used in several places has one local tensor.
    """
    places: list[tuple[dict[str, Any], str, Any]] = [
        (holder, name, value)
        for part in module.modules()
        for holder, name, value in own_tensors(part)
        if isinstance(value, DTensor)
    ]
    distributed = {id(value): value for _, _, value in places}
    locals_by_id = {key: localize(value) for key, value in distributed.items()}
    try:
        for holder, name, value in places:
            holder[name] = locals_by_id[id(value)]
        yield [value.device_mesh for value in distributed.values()]
    finally:
        for holder, name, value in places:
            holder[name] = value


def _localize(value: DTensor, position: int, wanted: Placements | None, grad: Placements | None, redistribute: bool) -> Any:
    """Return the local tensor of argument ``position``; redistribute to ``wanted`` first, or raise if that is not allowed.

    Raises:
        PlacementError: it has other placements.
    """
    if wanted is not None:
        expected = resolve_placements(wanted, value.device_mesh, value.ndim)
        if value.placements != expected:
            if not redistribute:
                raise PlacementError(
                    f"local_map: argument {position} has placements {value.placements}, but in_placements says "
                    f"{expected}; redistribute it first or set redistribute_inputs=True"
                )
            value = value.redistribute(placements=expected)
    return value.to_local(grad_placements=grad)


def _wrap_outputs(out: Any, out_placements: Any, mesh: DeviceMesh) -> Any:
    """Return the outputs of the function as DTensors with ``out_placements``."""
    flat, tree = tree_flatten(out)
    has_several = isinstance(out_placements, tuple) and (
        len(flat) != 1 or not all(isinstance(p, Placement) for p in out_placements)
    )
    placements_by_output = list(out_placements) if has_several else [out_placements]
    if len(placements_by_output) != len(flat):
        raise ContradictionError(
            f"local_map: {len(flat)} flattened outputs, but out_placements has {len(placements_by_output)} entries; "
            "give one entry for each output (None: not a tensor)"
        )
    wrapped = []
    for value, placements in zip(flat, placements_by_output, strict=True):
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
