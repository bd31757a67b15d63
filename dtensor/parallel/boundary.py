"""Styles that change only what goes into a module and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import PlacementError
from ..mesh import DeviceMesh
from ..placement import Placement
from ..tensor import DTensor
from .style import ParallelStyle, annotated, local_if, one_dim, placed
from .tensor_parallel import positive

Layouts = Placement | Sequence[Placement | None] | None


class PrepareModuleInput(ParallelStyle):
    """Makes a module's inputs DTensors and redistributes them before it runs.

    Args:
        input_layouts: per positional argument how a plain tensor lies; None leaves the argument alone.
        desired_input_layouts: per positional argument how it shall lie.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for keyword arguments, by name.
        use_local_output: hand the module this rank's pieces instead of DTensors.

    Raises:
        PlacementError: numbers of layouts that do not match each other, or the module's arguments.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts, self.desired_input_layouts = _matched(input_layouts, desired_input_layouts, "input")
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise PlacementError(
                f"input_kwarg_layouts names {sorted(self.input_kwarg_layouts)}, desired_input_kwarg_layouts "
                f"{sorted(self.desired_input_kwarg_layouts)}; give both for the same arguments"
            )
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dim(device_mesh, self)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            named = {
                name: _moved(
                    value,
                    mesh,
                    self.input_kwarg_layouts.get(name),
                    self.desired_input_kwarg_layouts.get(name),
                    self.use_local_output,
                )
                for name, value in kwargs.items()
            }
            if self.input_layouts is None or self.desired_input_layouts is None:
                return args, named
            _same_number(args, self.input_layouts, f"positional arguments of {type(module).__name__}")
            pairs = zip(args, self.input_layouts, self.desired_input_layouts, strict=True)
            return tuple(_moved(x, mesh, given, wanted, self.use_local_output) for x, given, wanted in pairs), named

        module.register_forward_pre_hook(hook, with_kwargs=True)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Makes a module's outputs DTensors and redistributes them.

    Args:
        output_layouts: per output how a plain tensor lies; None leaves the output alone.
        desired_output_layouts: per output how it shall lie.
        use_local_output: return this rank's pieces instead of DTensors.
    """

    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True) -> None:
        given, wanted = _matched(output_layouts, desired_output_layouts, "output")
        if given is None or wanted is None:
            raise PlacementError("PrepareModuleOutput needs output_layouts and desired_output_layouts")
        self.output_layouts, self.desired_output_layouts = given, wanted
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = one_dim(device_mesh, self)

        def hook(_: nn.Module, args: Any, outputs: Any) -> Any:
            single = not isinstance(outputs, tuple)
            values = (outputs,) if single else outputs
            _same_number(values, self.output_layouts, f"outputs of {type(module).__name__}")
            pairs = zip(values, self.output_layouts, self.desired_output_layouts, strict=True)
            moved = [_moved(x, mesh, given, wanted, self.use_local_output) for x, given, wanted in pairs]
            return moved[0] if single else type(outputs)(*moved) if hasattr(outputs, "_fields") else tuple(moved)

        module.register_forward_hook(hook)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one; ``use_local_input`` belongs to the former."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
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


def _moved(x: Any, mesh: DeviceMesh, given: Placement | None, wanted: Placement | None, use_local: bool) -> Any:
    if given is None or not isinstance(x, torch.Tensor):
        return x
    distributed: DTensor = annotated(x, mesh, given)
    if wanted is not None:
        distributed = placed(distributed, mesh, positive(wanted, distributed.ndim))
    return local_if(distributed, use_local)


def _matched(
    given: Layouts, wanted: Layouts, what: str
) -> tuple[tuple[Placement | None, ...] | None, tuple[Placement | None, ...] | None]:
    one, other = _as_tuple(given), _as_tuple(wanted)
    if (one is None) != (other is None) or (one is not None and other is not None and len(one) != len(other)):
        raise PlacementError(
            f"{what}_layouts {given} and desired_{what}_layouts {wanted} must have the same length: one entry per {what}"
        )
    return one, other


def _as_tuple(layouts: Layouts) -> tuple[Placement | None, ...] | None:
    if layouts is None or isinstance(layouts, Placement):
        return None if layouts is None else (layouts,)
    return tuple(layouts)


def _same_number(values: Sequence[Any], layouts: Sequence[Any], what: str) -> None:
    if len(values) != len(layouts):
        raise PlacementError(
            f"{len(values)} {what}, but {len(layouts)} layouts; give one for each, None for those to leave alone"
        )
