"""Managed parameter: one parameter under data parallelism, where modules have it, and what programs may do to it there."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...comm import communicator_of, shards_of
from ...dispatch.functorch import has_tangent
from ...dispatch.version_counters import Stamp, stamp
from ...errors import DTensorError, MeshError, UnsupportedOperationError
from ...layout.layout import Layout
from ...tensor.dtensor import DTensor, wrap
from ...tensor.views.block_owners import locals_of
from .dp_modes import Axes

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@dataclass(eq=False, slots=True)
class Managed:
    """One parameter under data parallelism.

    Attributes:
        places: the modules and names where it stands.
        parameter: the DTensor that the optimizer sees.
        stored: its layout, over the data-parallel and the tensor-parallel mesh dims, as the row of ``layouts.WAYS`` has it.
        compute: the same with the data-parallel cut undone.
        inside: the layout on the tensor-parallel mesh alone; None where there is none: a plain tensor.
        cut: the tensor dim that data parallelism cuts; None: every rank holds it all.
        axes: what it is cut and copied over.
        seen_alike: its gradient was looked at, see :mod:`.tp_replicated_grad_check`.
        unsharded: the version of ``placed`` when ``unshard()`` put it into the modules; None: ``unshard()`` did not.
    """

    places: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    stored: Layout
    compute: Layout
    inside: Layout | None
    cut: int | None
    axes: Axes
    owner: Any = None  # the group that gathers and reduces it
    placed: Any = None  # what stands in its places now
    seen_alike: bool = False
    unsharded: Stamp | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Managed:
        places = [(copy.deepcopy(module, memo), name) for module, name in self.places]
        parameter = copy.deepcopy(self.parameter, memo)
        parameter._data_parallel = self.parameter._data_parallel  # type: ignore[attr-defined]
        return Managed(places, parameter, self.stored, self.compute, self.inside, self.cut, self.axes)

    def described(self, place: int = 0) -> str:
        """Return the words for this parameter in messages."""
        module, name = self.places[place]
        return f"parameter {name!r} of {type(module).__name__}"

    def refresh(self) -> bool:
        """Return True if the module has another parameter now: loading and materializing a module may put one there.

        A parameter that was replaced, or assigned to by ``.data``, gets the placements of ``stored`` again.

        Raises:
            MeshError: the parameter has another shape or mesh now, or is no DTensor.
        """
        if self.unsharded is not None:
            self._keep_written()
        module, name = self.places[0]
        found = module._parameters.get(name)
        if found is None:
            raise MeshError(f"{self.described()} was removed; it was {self.stored!r}")
        replaced = found is not self.parameter and found is not self.placed
        if replaced:
            self._replace(found)
        elif len(self.places) > 1:
            self._check_tied(found)
        if self.parameter._layout is not self.stored:  # type: ignore[attr-defined]  # a DTensor
            self._restore_placements()
            self._follow_dtype()
        return replaced

    def _replace(self, found: Any) -> None:
        module, name = self.places[0]
        is_parameter = isinstance(found, nn.Parameter) and found.is_leaf  # not one that another unit has gathered
        if torch.is_grad_enabled() and not is_parameter and _followed(found):
            raise UnsupportedOperationError(
                f"{name!r} of {type(module).__name__} is a parameter under data parallelism, and its gradient is "
                "reduced into .grad, so torch.func.functional_call cannot replace it with a value that requires "
                "grad; pass x.detach(), or use the module before fully_shard or replicate"
            )
        if not isinstance(found, DTensor):
            raise MeshError(
                f"{self.described()} was replaced by a {type(found).__name__}; it was {self.stored!r}. Replace it by "
                "nn.Parameter(dt.distribute_tensor(value, p.device_mesh, p.placements)), or write to it: p.copy_(value)"
            )
        self._check_layout(found._layout)
        self.parameter = cast(nn.Parameter, found)
        for other, name in self.places:
            other._parameters[name] = self.parameter

    def _check_tied(self, found: Any) -> None:
        """Raise MeshError if a weight that several modules have in common was replaced in one of them only."""
        for k, (module, name) in enumerate(self.places):
            if module._parameters.get(name) is not found:
                raise MeshError(
                    f"{self.described(k)} was replaced, but {self.described()} was not, and their unit keeps both as one weight. "
                    "Replace both by the same parameter, or untie them before fully_shard or replicate"
                )

    def _check_layout(self, layout: Layout) -> None:
        if layout.mesh != self.stored.mesh or layout.shape != self.stored.shape:
            found, own = (x.mesh if layout.mesh != self.stored.mesh else x for x in (layout, self.stored))
            raise MeshError(
                f"{self.described()} was replaced by one of {found!r}; its unit gathers one of {own!r}. Give it a value of "
                "that shape on that mesh, or change the module before fully_shard or replicate"
            )

    def _restore_placements(self) -> None:
        """Redistribute a value that was assigned with other placements (``torch.nn.utils.vector_to_parameters`` does so)."""
        layout = self.parameter._layout  # type: ignore[attr-defined]  # a DTensor
        self._check_layout(layout)
        if not layout.same_data(self.stored):
            with torch.inference_mode(False), torch.no_grad():
                self.parameter.data = self.parameter.data.redistribute(placements=self.stored.placements)  # type: ignore[attr-defined]

    def _follow_dtype(self) -> None:
        """``module.double()`` and the like change parameters in place, or put others there."""
        dtype = self.parameter._layout.dtype  # type: ignore[attr-defined]  # a DTensor
        if dtype is not self.stored.dtype:
            self.stored, self.compute = self.stored.replace(dtype=dtype), self.compute.replace(dtype=dtype)
            self.inside = None if self.inside is None else self.inside.replace(dtype=dtype)
            if self.owner is not None:
                self.owner.free()
                self.owner.add([])  # whose parameters are ordered by their size

    def gradient_layout(self) -> Layout:
        """Return the layout of ``.grad``: that of the parameter, in its ``grad_dtype``."""
        wanted = self.parameter.grad_dtype
        return self.stored if wanted is None or wanted is self.stored.dtype else self.stored.replace(dtype=wanted)

    def tie(self) -> None:
        """Loading and ``to_empty`` put another tensor in each of the places: the first one's is everybody's."""
        module, name = self.places[0]
        for other, other_name in self.places[1:]:
            other._parameters[other_name] = module._parameters[name]

    def take_back(self) -> None:
        """The parameter in its places again, where what was put there still stands: loading may have put another one there."""
        module, name = self.places[0]
        if self.placed is not None and self.placed is not self.parameter and module._parameters.get(name) is self.placed:
            if self.unsharded is not None:
                self._keep_written()
            self.put(self.parameter)

    @torch.no_grad()
    def _keep_written(self) -> None:
        """Write what a program wrote to the unsharded parameter into the sharded one: each rank its own block. No communication.

        Raises:
            DTensorError: the value has another dtype or shape than the parameter, or is made by ``fsdp_post_all_gather``.
        """
        value, before, self.unsharded = self.placed, self.unsharded, None
        if stamp(value) == before:
            return
        local, whole = value._local if isinstance(value, DTensor) else value, self.compute
        held = communicator_of(whole.mesh).held  # none on a rank outside the mesh, which has an empty piece
        pieces = zip(held, shards_of(local), strict=False)
        fits = all(x.shape == whole.shape_of(member) and x.dtype is whole.dtype for member, x in pieces)
        if not fits or any(map(is_extended, locals_of(self.parameter))):
            raise DTensorError(
                f"{self.described()} was written to while it was unsharded, and the sharded one cannot keep that: it is "
                f"{self.stored!r}, and was gathered in another dtype (param_dtype, fsdp_pre_all_gather), or assigned another "
                "shape. Write to the sharded one after reshard(), under torch.no_grad(): "
                "p.copy_(dt.distribute_tensor(value, p.device_mesh, p.placements))"
            )
        self.parameter.copy_(wrap(local, whole).redistribute(placements=self.stored.placements))

    def put(self, value: Any) -> None:
        """``value`` where the parameter stands."""
        self.placed = value
        for module, name in self.places:
            module._parameters[name] = value
            attributes = module.__dict__
            if "_flat_weights_names" in attributes:  # recurrent modules keep a list of their weights
                attributes["_flat_weights"] = [module._parameters.get(name) for name in attributes["_flat_weights_names"]]


def _followed(x: Tensor) -> bool:
    """Whether autograd records what becomes of ``x``, in one mode or the other."""
    return x.requires_grad or has_tangent(x)


def is_extended(x: Tensor) -> bool:
    """Whether a tensor has the two methods.

    Raises:
        TypeError: it has one of them.
    """
    found = [] if type(x) is Tensor and not x.__dict__ else [name for name in HOOKS if hasattr(x, name)]
    if len(found) == 1:
        raise TypeError(f"{type(x).__name__} has {found[0]} only, but an all-gather extension needs both {' and '.join(HOOKS)}")
    return bool(found)
