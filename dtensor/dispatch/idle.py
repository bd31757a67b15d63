"""Ranks whose blocks are empty: what ranks with elements raise, they raise; what has no elements is not computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..base.torch_internals import tree_map
from ..comm import communicator_of
from ..propagation.propagate import Plan
from ..propagation.schema import Operator


def as_all_ranks_do(plan: Plan, operator: Operator, func: Callable[..., Any]) -> Callable[..., Any]:
    """``func`` for ranks some of whose blocks may be empty.

    One whose results have no elements does without it. One with an empty operand asks it once for one element in place of none:
    kernels refuse a dtype only where they have something to do, and what ranks with elements raise, all raise.
    """
    computing = _but_for_nothing(plan, operator, func)
    comm, operands = communicator_of(plan.call.mesh), plan.call.operands if plan.chosen is None else plan.chosen.operands
    if comm.holds_all or operator.is_view or operator.mutated or operator.seeded or not all(x.numel for x in operands):
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


def _but_for_nothing(plan: Plan, operator: Operator, func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``; a rank whose results have no elements makes those without it: many a kernel of accelerators does not start for
    none, nor need it."""
    results = () if plan.chosen is None else plan.chosen.results
    if operator.is_view or operator.seeded or operator.mutated.difference(operator.outs):
        return func
    layouts = [x for x in results if x is not None]
    if not layouts or len(layouts) != len(operator.returns) or any(x.sized or not x.numel for x in layouts):
        return func
    mesh, comm = plan.call.mesh, communicator_of(plan.call.mesh)
    idle = {m for m in comm.held if not any(math.prod(x.local_shape(mesh.coordinates[m])) for x in layouts)}
    if not idle:
        return func

    def one(member: int, *args: Any, **kwargs: Any) -> Any:
        if member not in idle:
            made = func(*args, **kwargs)
            return tuple(made) if isinstance(made, tuple) else made  # as those of idle ranks, without torch's names
        beside = torch.empty(0, device=mesh.device_type)
        blocks = [kwargs[out] for out in operator.outs] or [x.block_beside(beside, member) for x in layouts]
        return blocks[0] if len(blocks) == 1 else tuple(blocks)

    return partial(comm.map, one) if comm.holds_all else partial(one, *idle)
