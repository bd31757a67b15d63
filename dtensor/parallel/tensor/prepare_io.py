"""Prepare module inputs and outputs: styles that only redistribute what enters and leaves a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.tensor_tree import rebuild_sequence
from ...errors import ContradictionError, PlacementError
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...placement import Partition, Placement
from .colwise_rowwise import with_positive_dim
from .style import ParallelStyle, StylePlacement, as_dtensor, make_shared_input, placement_over, require_one_dim, to_local_if

NestedLayouts = StylePlacement | Sequence[Any] | Mapping[str, Any] | None  # nested as the values are


class PrepareModuleInput(ParallelStyle):
    """Convert a module's inputs to DTensors and redistribute them before it runs.

    Args:
        input_layouts: per positional argument, the placement of a plain tensor; None leaves the argument unchanged. For a
            tuple, list or dict of tensors the entry has the same nesting: ``((Shard(0), None), Replicate())``. A placement is
            a ``Placement``, text, a ``Partition``, or for a tensor a mapping with the name of the mesh dim.
        desired_input_layouts: per positional argument, the placement to redistribute to, with the same nesting.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same two for keyword arguments, by name.
        use_local_output: pass the module this rank's local tensors instead of DTensors.

    Raises:
        ContradictionError: the numbers of current and desired layouts differ.
        PlacementError: the layouts do not match the module's arguments.

    Cost: the redistributions that the layouts ask for, at each call.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> into = PrepareModuleInput(input_layouts=(dt.Shard(0),), desired_input_layouts=(dt.Replicate(),))
    >>> parallelize_module(torch.nn.Identity(), mesh, into)(torch.ones(2, 3)).layout  # each rank's two rows
    float32[4, 3] on (0=R)
    """

    def __init__(
        self,
        *,
        input_layouts: NestedLayouts = None,
        desired_input_layouts: NestedLayouts = None,
        input_kwarg_layouts: dict[str, Any] | None = None,
        desired_input_kwarg_layouts: dict[str, Any] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts, self.desired_input_layouts = _match_layouts(input_layouts, desired_input_layouts, "input")
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        if not _have_same_nesting(self.input_kwarg_layouts, self.desired_input_kwarg_layouts):
            raise PlacementError(
                f"input_kwarg_layouts has {sorted(self.input_kwarg_layouts)}, desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}; pass both for the same arguments, with the same "
                "nesting"
            )
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register the hook that redistributes the inputs."""
        mesh = require_one_dim(device_mesh, self)

        def redistribute_inputs(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return self._prepare_input_kwarg_fn(args, kwargs, mesh)

        module.register_forward_pre_hook(redistribute_inputs, with_kwargs=True)
        return module

    # --- named and called as in PyTorch, for subclasses --------------------------------------------------------------
    def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Placement | None, desired_layout: Placement | None) -> Any:
        """Redistribute one tensor argument to ``desired_layout``. A plain tensor has the placement ``input_layout``."""
        return _redistribute_value(input, as_mesh(mesh), input_layout, desired_layout, self.use_local_output)

    def _prepare_input_fn(self, inputs: Any, device_mesh: Any) -> Any:
        """Redistribute the positional arguments to ``desired_input_layouts``."""
        if self.input_layouts is None or self.desired_input_layouts is None:
            return inputs
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        _check_same_count(args, self.input_layouts, f"positional arguments of a module with {self!r}", "input")
        pairs = zip(args, self.input_layouts, self.desired_input_layouts, strict=True)
        return tuple(_map_nested(x, device_mesh, current, desired, self._prepare_input_arg) for x, current, desired in pairs)

    def _prepare_input_kwarg_fn(self, inputs: Any, kwarg_inputs: dict[str, Any], device_mesh: Any) -> Any:
        """Redistribute the positional and the keyword arguments to the desired layouts."""
        layouts = (
            (name, self.input_kwarg_layouts.get(name), self.desired_input_kwarg_layouts.get(name)) for name in kwarg_inputs
        )
        named = {
            name: _map_nested(kwarg_inputs[name], device_mesh, current, desired, self._prepare_input_arg)
            for name, current, desired in layouts
        }
        return self._prepare_input_fn(inputs, device_mesh), named


class PrepareModuleOutput(ParallelStyle):
    """Convert a module's outputs to DTensors and redistribute them.

    Args:
        output_layouts: per output, the placement of a plain tensor; None leaves the output unchanged; nested as the output.
        desired_output_layouts: per output, the placement to redistribute to, with the same nesting.
        use_local_output: return this rank's local tensors instead of DTensors.

    Cost: the redistributions that the layouts ask for, at each call.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> out = PrepareModuleOutput(
    ...     output_layouts=dt.Replicate(), desired_output_layouts=dt.Shard(0), use_local_output=False
    ... )
    >>> parallelize_module(torch.nn.Identity(), mesh, out)(torch.ones(4, 3)).layout
    float32[4, 3] on (0=S(0))

    Raises:
        ContradictionError: the numbers of current and desired layouts differ.
        PlacementError: the layouts do not match the module's outputs.
    """

    def __init__(
        self, *, output_layouts: NestedLayouts, desired_output_layouts: NestedLayouts, use_local_output: bool = True
    ) -> None:
        current, desired = _match_layouts(output_layouts, desired_output_layouts, "output")
        if current is None or desired is None:
            raise PlacementError(
                "PrepareModuleOutput needs output_layouts and desired_output_layouts, one entry per output: "
                "PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())"
            )
        self.output_layouts, self.desired_output_layouts = current, desired
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Register the hook that redistributes the outputs."""
        mesh = require_one_dim(device_mesh, self)

        module.register_forward_hook(lambda _, args, outputs: self._prepare_out_fn(outputs, mesh))
        return module

    # --- named and called as in PyTorch, for subclasses --------------------------------------------------------------
    def _prepare_out_fn(self, outputs: Any, device_mesh: Any) -> Any:
        """Redistribute the outputs to ``desired_output_layouts``."""

        def prepare(x: Any, mesh: Any, current: Placement | None, desired: Placement | None) -> Any:
            return _redistribute_value(x, as_mesh(mesh), current, desired, self.use_local_output)

        single = not isinstance(outputs, (tuple, list))
        values = (outputs,) if single else outputs
        _check_same_count(values, self.output_layouts, f"outputs of a module with {self!r}", "output")
        pairs = zip(values, self.output_layouts, self.desired_output_layouts, strict=True)
        redistributed = [_map_nested(x, device_mesh, current, desired, prepare) for x, current, desired in pairs]
        return redistributed[0] if single else rebuild_sequence(outputs, redistributed)


class PrepareModuleInputOutput(ParallelStyle):
    """Combine :class:`PrepareModuleInput` and :class:`PrepareModuleOutput`.

    ``use_local_input`` is ``use_local_output`` of the former. Cost and errors are those of the two styles.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> both = PrepareModuleInputOutput(
    ...     input_layouts=(dt.Shard(0),), desired_input_layouts=(dt.Replicate(),),
    ...     output_layouts=dt.Replicate(), desired_output_layouts=dt.Shard(1), use_local_output=False,
    ... )
    >>> parallelize_module(torch.nn.Identity(), mesh, both)(torch.ones(2, 4)).layout
    float32[4, 4] on (0=S(1))
    """

    def __init__(
        self,
        *,
        input_layouts: NestedLayouts = None,
        desired_input_layouts: NestedLayouts = None,
        input_kwarg_layouts: dict[str, Any] | None = None,
        desired_input_kwarg_layouts: dict[str, Any] | None = None,
        use_local_input: bool = False,
        output_layouts: NestedLayouts,
        desired_output_layouts: NestedLayouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts, use_local_output=use_local_output
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)


# --- layouts: of one value, or nested as the value -------------------------------------------------------------------
def _map_nested(
    x: Any, mesh: Any, current: NestedLayouts, desired: NestedLayouts, prepare: Callable[[Any, Any, Any, Any], Any]
) -> Any:
    """Apply ``prepare`` to each tensor in the nested value ``x``, with its current and desired placement.

    Args:
        current, desired: a mapping for a tensor has the placement of the mesh dim by name.
        prepare: a function of (tensor, mesh, current placement, desired placement).
    """
    if current is None or x is None:
        return x
    if isinstance(current, Mapping) and not (isinstance(x, torch.Tensor) and current.keys() <= {*as_mesh(mesh).named((0,))}):
        if not isinstance(x, Mapping) or not current.keys() <= x.keys():
            raise PlacementError(
                f"layouts for the keys {sorted(current)}, but the argument is {_describe_type(x)}; pass a mapping with these keys"
            )
        named = {
            key: _map_nested(value, mesh, current.get(key), _nested_entry(desired, key), prepare) for key, value in x.items()
        }
        return named if type(x) is dict else rebuild_sequence(x, named)
    if isinstance(current, (tuple, list)):
        if not isinstance(x, (tuple, list)):
            raise PlacementError(
                f"layouts for {len(current)} values, but the argument is {_describe_type(x)}; "
                f"pass a tuple or list of {len(current)} values, or give one layout"
            )
        _check_same_count(x, current, f"items of a {type(x).__name__}")
        redistributed = [
            _map_nested(item, mesh, one, _nested_entry(desired, k), prepare)
            for k, (item, one) in enumerate(zip(x, current, strict=True))
        ]
        return rebuild_sequence(x, redistributed)
    if not isinstance(x, torch.Tensor):
        raise PlacementError(
            f"the layout {current} is given for {_describe_type(x)}, which is not a tensor; pass None for it, or nested layouts"
        )
    forms: tuple[Any, Any] = (current, desired)
    return prepare(x, mesh, *(None if form is None else placement_over(as_mesh(mesh), form) for form in forms))


def _redistribute_value(x: Any, mesh: DeviceMesh, current: Placement | None, desired: Placement | None, use_local: bool) -> Any:
    """Redistribute the tensor ``x`` to ``desired`` (None: keep its placement). A plain ``x`` has the placement ``current``."""
    if current is None:
        return x
    distributed = (
        as_dtensor(x, mesh, current)
        if desired is None
        else make_shared_input(x, mesh, current, with_positive_dim(desired, x.ndim))
    )
    return to_local_if(distributed, use_local, mesh)


def _nested_entry(layouts: Any, key: Any) -> Any:
    return None if layouts is None else layouts.get(key) if isinstance(layouts, Mapping) else layouts[key]


def _describe_type(x: Any) -> str:
    return f"a dict with the keys {sorted(x)}" if isinstance(x, dict) else f"a {type(x).__name__}"


def _match_layouts(
    current: NestedLayouts, desired: NestedLayouts, what: str
) -> tuple[tuple[NestedLayouts, ...] | None, tuple[NestedLayouts, ...] | None]:
    """Return current and desired layouts as tuples of one entry per input or output; raise if they differ in nesting.

    Raises:
        ContradictionError: the two do not have the same length and nesting.
    """
    first, second = _as_tuple(current), _as_tuple(desired)
    same = (first is None) == (second is None)
    if not same or (
        first is not None and second is not None and not (len(first) == len(second) and _have_same_nesting(first, second))
    ):
        raise ContradictionError(
            f"{what}_layouts {current} and desired_{what}_layouts {desired} must have the same length: one entry "
            f"per {what}, a Placement, None, or for a nested value a tuple or dict of them"
        )
    return first, second


def _as_tuple(layouts: NestedLayouts) -> tuple[NestedLayouts, ...] | None:
    return None if layouts is None else tuple(layouts) if isinstance(layouts, (tuple, list)) else (layouts,)


def _have_same_nesting(current: Any, desired: Any) -> bool:
    """Return True if ``current`` and ``desired`` are tuples or dicts of the same nesting; None matches anything.

    Raises:
        PlacementError: an entry is not a placement.
    """
    if current is None or desired is None:
        return True
    if isinstance(current, Mapping):
        return (
            isinstance(desired, Mapping)
            and current.keys() == desired.keys()
            and all(_have_same_nesting(current[k], desired[k]) for k in current)
        )
    if isinstance(current, (tuple, list)):
        pairs = isinstance(desired, (tuple, list)) and len(current) == len(desired)
        return pairs and all(_have_same_nesting(one, other) for one, other in zip(current, desired, strict=True))
    for layout in (current, desired):
        if not isinstance(layout, (Placement, str, Partition)):
            raise PlacementError(f"a layout is a Placement such as Shard(0) or Replicate(), got {layout!r}")
    return True


def _check_same_count(values: Sequence[Any], layouts: Sequence[Any], what: str, side: str | None = None) -> None:
    """Raise if the module has not as many inputs or outputs, ``values``, as there are layouts."""
    if len(values) != len(layouts):
        advice = "give one for each;" if side is None else f"{side}_layouts takes as many as the module has {side}s;"
        raise PlacementError(
            f"{len(values)} {what}, but {len(layouts)} layouts: {advice} Use None for those that stay as they are"
        )
