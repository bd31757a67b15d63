"""Unit arguments: checks of the arguments of ``fully_shard`` and ``replicate``, and the class that a unit gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from ...errors import ContradictionError, UnitError
from .settings.policy import MixedPrecisionPolicy, OffloadPolicy
from .units.unit import unit_of

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])  # the first argument, the type of which is returned
DEFAULT_PRECISION = MixedPrecisionPolicy()
DEFAULT_OFFLOAD = OffloadPolicy()


def outermost_modules(module: Any, name: str) -> list[nn.Module]:
    """Return the modules that are not inside another given one. The others run with these.

    Raises:
        TypeError, UnitError, ContradictionError: a module cannot be made a unit.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for one in modules:
        check_can_be_unit(one, name)
    inner = {below for one in modules for below in one.modules() if below is not one}
    return [one for one in dict.fromkeys(modules) if one not in inner]


def check_mp_policy(mp_policy: Any) -> None:
    """Raise TypeError unless ``mp_policy`` is a policy."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        found = f"{mp_policy!r} of {type(mp_policy).__module__}"
        raise TypeError(f"mp_policy takes a MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...), got {found}")


def check_offload_policy(offload_policy: Any) -> None:
    """Raise TypeError unless ``offload_policy`` is a policy."""
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy takes CPUOffloadPolicy() or OffloadPolicy(), got {offload_policy!r}")


def check_can_be_unit(module: Any, name: str) -> None:
    """Raise if ``fully_shard`` or ``replicate`` cannot make ``module`` a unit.

    Raises:
        TypeError: it is not a module.
        UnitError: it is a container without forward.
        ContradictionError: it is a unit already.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} takes a module, got {type(module).__name__}")
    has_forward = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward:
        raise UnitError(
            f"{name} of a {type(module).__name__}: it is a container without a forward of its own, so its "
            f"parameters would never be gathered; apply {name} to each of its modules: for block in blocks: "
            f"{name}(block, mesh=mesh)"
        )
    if unit_of(module) is not None:
        raise ContradictionError(
            f"this {type(module).__name__} is data-parallel already; call {name} once per module, inner ones first"
        )


def mix_in_methods(module: nn.Module, methods: type, prefix: str) -> None:
    """Make ``module`` an instance of ``methods`` too."""
    cls = type(module)
    if not issubclass(cls, methods):
        module.__class__ = type(f"{prefix}{cls.__name__}", (methods, cls), {"__module__": cls.__module__})
