"""Styles that change only what goes into a module and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...base.tensor_tree import like
from ...errors import ContradictionError, PlacementError
from ...mesh.device_mesh import DeviceMesh, as_mesh
from ...placement import Placement
from .colwise_rowwise import positive
from .style import ParallelStyle, annotated, brought, local_if, one_dim

Layouts = Placement | Sequence[Any] | Mapping[str, Any] | None  # nested as the values are


class PrepareModuleInput(ParallelStyle):
    """Makes a module's inputs DTensors and redistributes them before it runs.

    Args:
        input_layouts: per positional argument how a plain tensor lies; None leaves the argument alone. For an argument that is
            a tuple, list or dict of tensors the entry is one of layouts: ``((Shard(0), None), Replicate())``.
        desired_input_layouts: per positional argument how it shall lie, in the same structure.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for keyword arguments, by name.
        use_local_output: hand the module this rank's pieces instead of DTensors.

    Raises:
        ContradictionError: numbers of layouts that do not match each other.
        PlacementError: or that do not match the module's arguments.

    A call costs the redistributions that the layouts ask for.

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
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Any] | None = None,
        desired_input_kwarg_layouts: dict[str, Any] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts, self.desired_input_layouts = _matched(input_layouts, desired_input_layouts, "input")
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        if not _alike(self.input_kwarg_layouts, self.desired_input_kwarg_layouts):
            raise PlacementError(
                f"input_kwarg_layouts has {sorted(self.input_kwarg_layouts)}, desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}; pass both for the same arguments, with the same "
                "nesting"
            )
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dim(device_mesh, self)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return self._prepare_input_kwarg_fn(args, kwargs, mesh)

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module

    # --- named and called as in PyTorch, for subclasses ---------------------------------------------------------------
    def _prepare_input_arg(self, input: Any, mesh: Any, input_layout: Placement | None, desired_layout: Placement | None) -> Any:
        """Return one tensor argument under ``desired_layout``. A plain tensor has the placement ``input_layout``."""
        return _placed_value(input, as_mesh(mesh), input_layout, desired_layout, self.use_local_output)

    def _prepare_input_fn(self, inputs: Any, device_mesh: Any) -> Any:
        """Return the positional arguments as ``desired_input_layouts`` asks for."""
        if self.input_layouts is None or self.desired_input_layouts is None:
            return inputs
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        _same_number(args, self.input_layouts, f"positional arguments of a module with {self!r}", "input")
        pairs = zip(args, self.input_layouts, self.desired_input_layouts, strict=True)
        return tuple(_moved(x, device_mesh, given, wanted, self._prepare_input_arg) for x, given, wanted in pairs)

    def _prepare_input_kwarg_fn(self, inputs: Any, kwarg_inputs: dict[str, Any], device_mesh: Any) -> Any:
        """Return the positional and the keyword arguments as the desired layouts ask for."""
        layouts = (
            (name, self.input_kwarg_layouts.get(name), self.desired_input_kwarg_layouts.get(name)) for name in kwarg_inputs
        )
        named = {
            name: _moved(kwarg_inputs[name], device_mesh, given, wanted, self._prepare_input_arg)
            for name, given, wanted in layouts
        }
        return self._prepare_input_fn(inputs, device_mesh), named


class PrepareModuleOutput(ParallelStyle):
    """Makes a module's outputs DTensors and redistributes them.

    Args:
        output_layouts: per output how a plain tensor lies; None leaves the output alone; nested where the output is.
        desired_output_layouts: per output how it shall lie, in the same structure.
        use_local_output: return this rank's pieces instead of DTensors.

    A call costs the redistributions that the layouts ask for.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import parallelize_module
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> out = PrepareModuleOutput(
    ...     output_layouts=dt.Replicate(), desired_output_layouts=dt.Shard(0), use_local_output=False
    ... )
    >>> parallelize_module(torch.nn.Identity(), mesh, out)(torch.ones(4, 3)).layout
    float32[4, 3] on (0=S(0))

    Raises:
        ContradictionError: numbers of layouts that do not match each other.
        PlacementError: or that do not match what the module gives.
    """

    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True) -> None:
        given, wanted = _matched(output_layouts, desired_output_layouts, "output")
        if given is None or wanted is None:
            raise PlacementError(
                "PrepareModuleOutput needs output_layouts and desired_output_layouts, one entry per output: "
                "PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())"
            )
        self.output_layouts, self.desired_output_layouts = given, wanted
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dim(device_mesh, self)

        module.register_forward_hook(lambda _, args, outputs: self._prepare_out_fn(outputs, mesh))
        return module

    # --- named and called as in PyTorch, for subclasses ---------------------------------------------------------------
    def _prepare_out_fn(self, outputs: Any, device_mesh: Any) -> Any:
        """Return the outputs as ``desired_output_layouts`` asks for."""

        def prepare(x: Any, mesh: Any, given: Placement | None, wanted: Placement | None) -> Any:
            return _placed_value(x, as_mesh(mesh), given, wanted, self.use_local_output)

        single = not isinstance(outputs, (tuple, list))
        values = (outputs,) if single else outputs
        _same_number(values, self.output_layouts, f"outputs of a module with {self!r}", "output")
        pairs = zip(values, self.output_layouts, self.desired_output_layouts, strict=True)
        moved = [_moved(x, device_mesh, given, wanted, prepare) for x, given, wanted in pairs]
        return moved[0] if single else like(outputs, moved)


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one; ``use_local_input`` belongs to the former.

    A call costs the redistributions that the layouts ask for; both say what they raise.

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
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Any] | None = None,
        desired_input_kwarg_layouts: dict[str, Any] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
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


# --- layouts, one value's or nested as the value is --------------------------------------------------------------------
def _moved(x: Any, mesh: Any, given: Layouts, wanted: Layouts, prepare: Callable[[Any, Any, Any, Any], Any]) -> Any:
    """Return ``x`` with ``prepare`` applied to its tensors; ``given`` and ``wanted`` are nested as ``x``, down to the Placements.

    Args:
        prepare: a function of (tensor, mesh, given placement, wanted placement).
    """
    if given is None or x is None:
        return x
    if isinstance(given, Mapping):
        if not isinstance(x, Mapping) or not given.keys() <= x.keys():
            raise PlacementError(f"layouts for the keys {sorted(given)}, but the argument is {_shown(x)}")
        named = {key: _moved(value, mesh, given.get(key), _part(wanted, key), prepare) for key, value in x.items()}
        return named if type(x) is dict else like(x, named)
    if not isinstance(given, Placement):
        if not isinstance(x, (tuple, list)):
            raise PlacementError(f"layouts for {len(given)} values, but the argument is {_shown(x)}")
        _same_number(x, given, f"items of a {type(x).__name__}")
        moved = [_moved(item, mesh, one, _part(wanted, k), prepare) for k, (item, one) in enumerate(zip(x, given, strict=True))]
        return like(x, moved)
    if not isinstance(x, torch.Tensor):
        raise PlacementError(
            f"the layout {given} is given for {_shown(x)}, which is not a tensor; pass None for it, or nested layouts"
        )
    return prepare(x, mesh, given, wanted)


def _placed_value(x: Any, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None, use_local: bool) -> Any:
    """Return the tensor ``x``, which has the placement ``given`` if it is plain, under ``wanted`` (None: as it is)."""
    if given is None:
        return x
    distributed = annotated(x, mesh, given) if wanted is None else brought(x, mesh, given, positive(wanted, x.ndim))
    return local_if(distributed, use_local, mesh)


def _part(layouts: Any, key: Any) -> Any:
    return None if layouts is None else layouts.get(key) if isinstance(layouts, Mapping) else layouts[key]


def _shown(x: Any) -> str:
    return f"a dict with the keys {sorted(x)}" if isinstance(x, dict) else f"a {type(x).__name__}"


def _matched(given: Layouts, wanted: Layouts, what: str) -> tuple[tuple[Layouts, ...] | None, tuple[Layouts, ...] | None]:
    one, other = _as_tuple(given), _as_tuple(wanted)
    same = (one is None) == (other is None)
    if not same or (one is not None and other is not None and not (len(one) == len(other) and _alike(one, other))):
        raise ContradictionError(
            f"{what}_layouts {given} and desired_{what}_layouts {wanted} must have the same length: one entry "
            f"per {what}, a Placement, None, or for a nested value a tuple or dict of them"
        )
    return one, other


def _as_tuple(layouts: Layouts) -> tuple[Layouts, ...] | None:
    return None if layouts is None else tuple(layouts) if isinstance(layouts, (tuple, list)) else (layouts,)


def _alike(given: Any, wanted: Any) -> bool:
    """Whether ``wanted`` is nested as ``given`` is, down to Placements; None anywhere: leave it alone."""
    if given is None or wanted is None:
        return True
    if isinstance(given, Mapping):
        return isinstance(wanted, Mapping) and given.keys() == wanted.keys() and all(_alike(given[k], wanted[k]) for k in given)
    if isinstance(given, (tuple, list)):
        pairs = isinstance(wanted, (tuple, list)) and len(given) == len(wanted)
        return pairs and all(_alike(one, other) for one, other in zip(given, wanted, strict=True))
    for layout in (given, wanted):
        if not isinstance(layout, Placement):
            raise PlacementError(f"a layout is a Placement such as Shard(0) or Replicate(), got {layout!r}")
    return True


def _same_number(values: Sequence[Any], layouts: Sequence[Any], what: str, side: str | None = None) -> None:
    if len(values) != len(layouts):
        law = "give one for each;" if side is None else f"{side}_layouts takes as many as the module has {side}s;"
        raise PlacementError(f"{len(values)} {what}, but {len(layouts)} layouts: {law} Use None for those that stay as they are")
