"""Idle ranks: ranks whose results have no elements compute nothing, and raise what ranks with elements raise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..base.tensor_tree import tensors
from ..base.torch_internals import tree_map
from ..comm import communicator_of
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.op_schema import Operator
from ..propagation.propagate import Plan


@dataclass(frozen=True, slots=True)
class Idle:
    """Ranks held here whose results have no elements: many a kernel of accelerators does not start for none, nor need it.

    Attributes:
        members: which they are.
        mesh: theirs.
        layouts: of the results, None of those that nobody asked for.
        outs: the names of those that the user gives.
    """

    members: frozenset[int]
    mesh: DeviceMesh
    layouts: tuple[Layout | None, ...]
    outs: tuple[str, ...]

    def results(self, member: int, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Beside its operands, where they are."""
        beside = next(iter(tensors((args, given))), None)
        beside = torch.empty(0, device=self.mesh.device_type) if beside is None else beside
        blocks = [given[out] for out in self.outs if out in given] or [
            None if x is None else x.block_beside(beside, member) for x in self.layouts
        ]
        return blocks[0] if len(blocks) == 1 else tuple(blocks)

    def or_nothing(self, one: Callable[..., Any]) -> Callable[..., Any]:
        """``one(member, *locals)``, which a rank with something to compute runs."""

        def run(member: int, *args: Any, **kwargs: Any) -> Any:
            made = self.results(member, args, kwargs) if member in self.members else one(member, *args, **kwargs)
            return tuple(made) if isinstance(made, tuple) else made  # all alike, without torch's names

        return run

    def without(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """``func``, of one rank's locals, for all ranks that are here but these."""
        one = self.or_nothing(lambda member, *args, **kwargs: func(*args, **kwargs))
        comm = communicator_of(self.mesh)
        return partial(comm.map, one) if comm.holds_all else partial(one, *self.members)


def idle_of(plan: Plan, operator: Operator) -> Idle | None:
    """Who has nothing to compute, where it is known what comes out."""
    if plan.chosen is None or operator.is_view or operator.seeded or operator.mutated.difference(operator.outs):
        return None
    if "device" in operator.names:  # it makes what is on another one than the mesh's, as forward mode asks
        return None
    mesh, results, returns = plan.call.mesh, plan.chosen.results, operator.func._schema.returns
    layouts = [x for x in results if x is not None]
    if len(results) != len(returns) or any(not _some_empty(x) or x.sized for x in layouts):
        return None
    if any(str(given.type) != "Tensor" for given in returns) or not any(x.numel for x in layouts):  # all are
        return None
    held = communicator_of(mesh).held
    members = frozenset(m for m in held if not any(math.prod(x.shape_of(m)) for x in layouts))
    return Idle(members, mesh, results, operator.outs) if members else None


def _some_empty(layout: Layout) -> bool:
    """Whether some rank's block has no elements, or may have none: of sizes that are symbols."""
    return layout.sized or not layout.numel or any(split is not None and 0 in split.sizes for split in layout.splits)


def as_all_ranks_do(plan: Plan, operator: Operator, func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` for ranks some of whose blocks may be empty.

    One with nothing to compute (:class:`Idle`) does without it. One with an empty operand asks it once for one element in place
    of none: kernels refuse a dtype only where they have something to do, and what ranks with elements raise, all raise.
    """
    nothing = idle_of(plan, operator)
    computing = func if nothing is None else nothing.without(func)
    comm, operands = communicator_of(plan.call.mesh), plan.call.operands if plan.chosen is None else plan.chosen.operands
    asks_nothing = operator.is_view or operator.mutated or operator.seeded
    if asks_nothing or comm.holds_all or not any(map(_some_empty, operands)) or not all(x.numel for x in operands):
        return computing
    coordinate = plan.call.mesh.coordinates[comm.held[0]]
    if all(math.prod(x.local_shape(coordinate)) for x in operands):
        return computing

    def with_elements(x: Any) -> Any:
        empty = isinstance(x, torch.Tensor) and not x.numel()
        return torch.ones([n or 1 for n in x.shape], dtype=x.dtype, device=x.device) if empty else x

    asked = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        if not asked:
            try:
                func(*tree_map(with_elements, args), **tree_map(with_elements, kwargs))
            except NotImplementedError:
                raise
            except Exception:  # of the ones, which are not this rank's values
                pass
            asked = True
        return computing(*args, **kwargs)

    return run
