"""Gradients that wait for a later backward, as programs see them: what there is, cleared, or reduced now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .grad_accumulation import clear
from .unit import Unit, unit_of


class WaitingGradients:
    """What a module of units can be asked about gradients that ``.grad`` does not show yet: those of passes under
    ``set_requires_gradient_sync(False)`` or ``set_requires_all_reduce(False)``.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = fully_shard(torch.nn.Linear(3, 1, bias=False), mesh=mesh)
    >>> model.set_requires_gradient_sync(False)
    >>> batch = dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])
    >>> model(batch).sum().backward()
    >>> model.weight.grad, [unreduced.shards for unreduced, _ in model.get_pending_gradients().values()]
    (None, [(tensor([[1., 1., 1.]]), tensor([[0., 0., 0.]]))])
    >>> model.synchronize_gradients()
    >>> model.weight.grad.full_tensor(), model.get_pending_gradients()
    (tensor([[0.5000, 0.5000, 0.5000]]), {})
    """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module, and what waits is cleared too. No communication. (``optimizer.zero_grad()`` does the same.)"""
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the module's own class
        clear({id(parameter) for parameter in self.parameters()}, set_to_none)  # type: ignore[attr-defined]  # a module

    def get_pending_gradients(self, *, recurse: bool = True) -> dict[nn.Parameter, tuple[Tensor | None, Tensor | None]]:
        """By parameter what waits: this rank's own gradient of the whole, and what has been reduce-scattered but not summed over
        replicas, of this rank's block; None where there is none. No communication.

        Tensors are those that wait: what is written to them in place counts. With tensor parallelism the first is a DTensor on
        its mesh, with all ranks in one process both are ``PerRank``.
        """
        return {p: found for unit in units_of(self, recurse) for p, found in unit.unreduced.waiting().items()}

    def synchronize_gradients(self, *, recurse: bool = True) -> None:
        """Reduce what waits now, without another backward, and add it to ``.grad``; all ranks call it. One reduction for each
        unit that has something waiting (with ``replicate``, and where ranks may not have reached the same units, for each).
        """
        for unit in units_of(self, recurse):
            if unit.schedule is not None:
                unit.unreduced.reduce(unit.schedule)


def units_of(module: Any, recurse: bool) -> Iterable[Unit]:
    """The units of ``module`` itself and, if asked, of all modules below it."""
    found = (unit_of(submodule) for submodule in (module.modules() if recurse else [module]))
    return list(dict.fromkeys(unit for unit in found if unit is not None))
