"""Parameters that modules have in common: which of them a unit below has already, and which nobody may have; what loading does
with those of a unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from ...errors import UnitError
from ...tensor.stale_params import not_alone, replacement_of

M = TypeVar("M")  # a managed parameter, see ``managed_param.py``, which stands on this module


def around_units(modules: Sequence[nn.Module]) -> set[nn.Module]:
    """What runs while no unit below does: what is reached without going through one."""
    found: set[nn.Module] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += [child for child in module.children() if "_data_parallel_unit" not in child.__dict__]
    return found


def managed_by(module: nn.Module) -> list[Any]:
    """What the unit whose module this is manages."""
    unit: Any = module.__dict__.get("_data_parallel_unit")
    managed: list[Any] = [] if unit is None else [m for group in unit.groups for m in group.managed]
    for m in managed:
        m.refresh()
    return managed


def follow_state_dicts(module: nn.Module) -> None:
    """Have what saves and loads a unit's module see its sharded parameters, and leave weights in common one."""
    module.register_state_dict_pre_hook(_show_parameters)
    module.register_load_state_dict_pre_hook(_show_parameters)
    module.register_load_state_dict_post_hook(_tie)


def _show_parameters(module: nn.Module, *_: Any) -> None:
    unit: Any = module.__dict__.get("_data_parallel_unit")
    if unit is not None and (unit.schedule is None or not unit.schedule.depth):  # else forward runs, and needs the gathered ones
        unit.put_parameters()


def _tie(module: nn.Module, keys: Any) -> None:
    unit: Any = module.__dict__.get("_data_parallel_unit")
    if unit is not None:
        unit.tie()


def shared_with(parameter: nn.Parameter, below: Mapping[int, M], module: nn.Module, name: str, by: str) -> M | None:
    """A parameter that a unit below has already.

    Raises:
        UnitError: it is distributed already, but not there.
    """
    was = replacement_of(parameter)
    known: Any = below.get(id(parameter)) if was is None else was.what
    if known is not None and below.get(id(known.parameter)) is known:
        return cast(M, known)
    if was is None and not getattr(parameter, "_data_parallel", False):
        return None
    raise UnitError(not_alone(module, name, by, was))
