"""Units chosen by size."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


def units_by_size(
    module: nn.Module, min_num_params: int, never: Collection[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict)
) -> list[nn.Module]:
    """The modules to make units of, inner ones first, ``module`` itself last: each has ``min_num_params`` that no unit below has.

    Args:
        never: types that are no units themselves, since nobody calls them.

    >>> model = nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(2, 2), nn.Linear(9, 8)), nn.Linear(3, 3))
    >>> [type(unit).__name__ for unit in units_by_size(model, 75)]
    ['Linear', 'Linear', 'Sequential']

    Looks only: no communication, no errors.
    """
    found: list[nn.Module] = []
    seen: set[nn.Parameter] = set()

    def visit(inner: nn.Module) -> list[nn.Parameter]:
        """The parameters below ``inner`` that belong to no unit yet."""
        free = [p for p in inner._parameters.values() if p is not None and p not in seen]
        seen.update(free)
        for child in inner.children():
            free += visit(child)
        if inner is not module and not isinstance(inner, tuple(never)) and sum(p.numel() for p in free) >= min_num_params:
            found.append(inner)
            return []
        return free

    visit(module)
    return [*found, module]
