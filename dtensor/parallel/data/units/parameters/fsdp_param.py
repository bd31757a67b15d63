"""FSDP parameter: one parameter under data parallelism, its layouts, and its value in the modules."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from .....comm import shards_of
from .....comm.map_ranks import communicator_of
from .....errors import DTensorError, MeshError, UnsupportedOperationError
from .....layout.layout import Layout
from .....state.functorch import has_tangent
from .....state.version_counters import VersionSnapshot, take_snapshot
from .....tensor.dtensor import DTensor, wrap
from .....tensor.local_tensors import local_tensors_of
from ...settings.dp_modes import MeshAxes

EXTENSION_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@dataclass(eq=False, slots=True)
class FSDPParam:
    """Parameter under data parallelism.

    Attributes:
        locations: the modules that have it, and its name in each.
        parameter: the sharded parameter (replicated under DDP), a DTensor, which the optimizer updates.
        stored_layout: layout of ``parameter`` over the data-parallel and the tensor-parallel mesh dims, by the mode of ``axes``.
        unsharded_layout: ``stored_layout``, replicated over the data-parallel mesh dims.
        tp_layout: layout on the tensor-parallel mesh alone; None: no tensor parallelism, modules see a plain tensor.
        shard_dim: tensor dim that data parallelism shards; None: every rank stores the full parameter.
        axes: mesh axes over which it is sharded and replicated.
        param_group: the group that gathers and reduces it.
        module_value: the value that the modules have now.
        tp_grads_checked: gradients were compared over tensor-parallel ranks, see ``gradients/tp_replicated_grad_check.py``.
        unshard_version: version of ``module_value`` when ``unshard()`` put it into the modules; None: ``unshard()`` did not.
    """

    locations: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    stored_layout: Layout
    unsharded_layout: Layout
    tp_layout: Layout | None
    shard_dim: int | None
    axes: MeshAxes
    param_group: Any = None
    module_value: Any = None
    tp_grads_checked: bool = False
    unshard_version: VersionSnapshot | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPParam:
        locations = [(copy.deepcopy(module, memo), name) for module, name in self.locations]
        parameter = copy.deepcopy(self.parameter, memo)
        parameter._data_parallel = self.parameter._data_parallel  # type: ignore[attr-defined]
        layouts = self.stored_layout, self.unsharded_layout, self.tp_layout
        return FSDPParam(locations, parameter, *layouts, self.shard_dim, self.axes)

    def describe(self, location: int = 0) -> str:
        """Return the name of the parameter at one location, for error messages: ``parameter 'weight' of Linear``."""
        module, name = self.locations[location]
        return f"parameter {name!r} of {type(module).__name__}"

    # --- what a program does to the parameter ------------------------------------------------------------------------
    def refresh(self) -> bool:
        """Adopt what the program did to the parameter (replaced it, set ``.data``); return True if it was replaced.

        Loading and materializing a module may replace the parameter. A parameter that was replaced, or assigned to by ``.data``,
        is redistributed to the placements of ``stored_layout``.

        Raises:
            MeshError: the parameter has another shape or mesh now, or is no DTensor.
        """
        if self.unshard_version is not None:
            self._copy_back_written_value()
        module, name = self.locations[0]
        current = module._parameters.get(name)
        if current is None:
            raise MeshError(f"{self.describe()} was removed; it was {self.stored_layout!r}")
        is_replaced = current is not self.parameter and current is not self.module_value
        if is_replaced:
            self._adopt_replacement(current)
        elif len(self.locations) > 1:
            self._check_tied(current)
        if self.parameter._layout is not self.stored_layout:  # type: ignore[attr-defined]  # a DTensor
            self._restore_placements()
            self._update_layout_dtypes()
        return is_replaced

    def _adopt_replacement(self, value: Any) -> None:
        """Use ``value``, which replaced the parameter in its module, as the parameter; raise if it does not fit."""
        module, name = self.locations[0]
        is_parameter = isinstance(value, nn.Parameter) and value.is_leaf  # not a value that another FSDP unit has gathered
        if torch.is_grad_enabled() and not is_parameter and (value.requires_grad or has_tangent(value)):
            raise UnsupportedOperationError(
                f"{name!r} of {type(module).__name__} is a parameter under data parallelism, and its gradient is "
                "reduced into .grad, so torch.func.functional_call cannot replace it with a value that requires "
                "grad; pass x.detach(), or use the module before fully_shard or replicate"
            )
        if not isinstance(value, DTensor):
            raise MeshError(
                f"{self.describe()} was replaced by a {type(value).__name__}; it was {self.stored_layout!r}. Replace it by "
                "nn.Parameter(dt.distribute_tensor(value, p.device_mesh, p.placements)), or write to it: p.copy_(value)"
            )
        self._check_layout(value._layout)
        self.parameter = cast(nn.Parameter, value)
        for other, name in self.locations:
            other._parameters[name] = self.parameter

    def _check_tied(self, value: Any) -> None:
        """Raise MeshError if a weight that several modules share was replaced in some of them only."""
        for k, (module, name) in enumerate(self.locations):
            if module._parameters.get(name) is not value:
                raise MeshError(
                    f"{self.describe(k)} was replaced, but {self.describe()} was not, and their unit keeps both as one weight. "
                    "Replace both by the same parameter, or untie them before fully_shard or replicate"
                )

    def _check_layout(self, layout: Layout) -> None:
        """Raise MeshError if ``layout`` has another mesh or shape than the parameter."""
        if layout.mesh != self.stored_layout.mesh or layout.shape != self.stored_layout.shape:
            same_mesh = layout.mesh == self.stored_layout.mesh
            found, expected = (x if same_mesh else x.mesh for x in (layout, self.stored_layout))
            raise MeshError(
                f"{self.describe()} was replaced by one of {found!r}; its unit gathers one of {expected!r}. Give it a value of "
                "that shape on that mesh, or change the module before fully_shard or replicate"
            )

    def _restore_placements(self) -> None:
        """Redistribute the parameter to its stored placements, if the program assigned ``.data`` with other ones."""
        layout = self.parameter._layout  # type: ignore[attr-defined]  # a DTensor
        self._check_layout(layout)
        if not layout.has_same_blocks(self.stored_layout):
            placements = self.stored_layout.placements
            with torch.inference_mode(False), torch.no_grad():
                self.parameter.data = self.parameter.data.redistribute(placements=placements)  # type: ignore[attr-defined]

    def _update_layout_dtypes(self) -> None:
        """Change the dtype of the recorded layouts to the parameter's, after ``module.double()`` and the like."""
        dtype = self.parameter._layout.dtype  # type: ignore[attr-defined]  # a DTensor
        if dtype is not self.stored_layout.dtype:
            self.stored_layout = self.stored_layout.replace(dtype=dtype)
            self.unsharded_layout = self.unsharded_layout.replace(dtype=dtype)
            self.tp_layout = None if self.tp_layout is None else self.tp_layout.replace(dtype=dtype)
            if self.param_group is not None:
                self.param_group.reshard()
                self.param_group.add_params([])  # sorts the parameters by item size again

    @torch.no_grad()
    def _copy_back_written_value(self) -> None:
        """Copy what a program wrote to the unsharded parameter into the sharded one, without communication.

        Raises:
            DTensorError: the value has another dtype or shape than the parameter, or ``fsdp_post_all_gather`` made it.
        """
        value, version, self.unshard_version = self.module_value, self.unshard_version, None
        if take_snapshot(value) == version:
            return
        local, layout = value._local if isinstance(value, DTensor) else value, self.unsharded_layout
        members = communicator_of(layout.mesh).held  # none on a rank outside the mesh, which has an empty local tensor
        pairs = zip(members, shards_of(local), strict=False)
        fits = all(x.shape == layout.shape_of(member) and x.dtype is layout.dtype for member, x in pairs)
        if not fits or any(map(is_extended, local_tensors_of(self.parameter))):
            raise DTensorError(
                f"{self.describe()} was written to while it was unsharded, and the sharded one cannot keep that: it is "
                f"{self.stored_layout!r}, and was gathered in another dtype (param_dtype, fsdp_pre_all_gather), or assigned "
                "another shape. Write to the sharded one after reshard(), under torch.no_grad(): "
                "p.copy_(dt.distribute_tensor(value, p.device_mesh, p.placements))"
            )
        self.parameter.copy_(wrap(local, layout).redistribute(placements=self.stored_layout.placements))

    # --- its value in the modules ------------------------------------------------------------------------------------
    def put_value(self, value: Any) -> None:
        """Put ``value``, unsharded or sharded, into the modules in place of the parameter."""
        self.module_value = value
        for module, name in self.locations:
            module._parameters[name] = value
            attributes = module.__dict__
            if "_flat_weights_names" in attributes:  # recurrent modules keep a list of their weights
                attributes["_flat_weights"] = [module._parameters.get(name) for name in attributes["_flat_weights_names"]]

    def restore_parameter(self) -> None:
        """Put the sharded parameter into the modules again, unless the program has replaced the unsharded one there."""
        module, name = self.locations[0]
        value = self.module_value
        if value is not None and value is not self.parameter and module._parameters.get(name) is value:
            if self.unshard_version is not None:
                self._copy_back_written_value()
            self.put_value(self.parameter)

    def tie_locations(self) -> None:
        """Put the first location's parameter into all modules that share it: loading and ``to_empty`` make several."""
        module, name = self.locations[0]
        for other, other_name in self.locations[1:]:
            other._parameters[other_name] = module._parameters[name]

    def gradient_layout(self) -> Layout:
        """Return the layout of ``.grad``: ``stored_layout`` in the parameter's ``grad_dtype``."""
        dtype = self.parameter.grad_dtype
        return (
            self.stored_layout if dtype is None or dtype is self.stored_layout.dtype else self.stored_layout.replace(dtype=dtype)
        )


def is_extended(x: Tensor) -> bool:
    """Return True if ``x`` defines the two methods of an all-gather extension.

    Raises:
        TypeError: it defines one of them.
    """
    defined = [] if type(x) is Tensor and not x.__dict__ else [name for name in EXTENSION_METHODS if hasattr(x, name)]
    if len(defined) == 1:
        raise TypeError(
            f"{type(x).__name__} has {defined[0]} only, but an all-gather extension needs both {' and '.join(EXTENSION_METHODS)}"
        )
    return bool(defined)
