"""Operands of which one rank has all: it does what is to be done with them, and has what comes of it. Pure.

One position of a cut dim (the matrix of an expert, of a stack that is cut) is all its owner's. What such a matrix gives is, too,
and lies along the columns; the next matrix lies along its own. By rows one of the two would move, though the owner has both: it
computes with them as they are, others have nothing to do (``dispatch/local_call.py``). What is less than these, and cut
otherwise, goes there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout.layout import Layout
from ..layout.splits import Split
from ..rules.call import Call, Meta
from ..rules.op_traits import facts_of, shows_memory
from ..rules.rule import Choice, Factors, R, Row, Rule
from .strategy_choice import Chosen


def by_owner(rule: Rule, factors: Factors, call: Call) -> Chosen | None:
    """The choice with operands and results as they have to lie, if one rank has all of several operands, and others are less."""
    if any(layout.is_partial or layout.sized for layout in call.operands) or not _gives_tensors(rule, call):
        return None
    owners = [owner_of(layout) for layout in call.operands]
    owner = max(owners, key=lambda each: (each is not None and owners.count(each), each or ()))
    if owner is None or owners.count(owner) < 2 or any(not meta or not meta.shape or 0 in meta.shape for meta in call.results):
        return None
    owned = [layout for layout, each in zip(call.operands, owners, strict=True) if each == owner]
    if 2 * sum([layout.nbytes for layout in owned]) < sum([layout.nbytes for layout in call.operands]):
        return None
    row = Row((R,) * len(call.operands), (R,) * len(factors.results))
    choice = Choice(call, factors, (row,) * call.mesh.ndim, {})
    if not rule.allows(choice):
        return None
    operands = [_there(x, owner) if any(x.splits) and each != owner else x for x, each in zip(call.operands, owners, strict=True)]
    if None in operands:
        return None
    results = [_owned(*owner, meta, owned) for meta in call.results if meta is not None]
    return Chosen(choice, tuple([x for x in operands if x is not None]), tuple(results))


def _there(layout: Layout, owner: tuple[int, int]) -> Layout | None:
    """The layout of an operand that is cut along the same mesh dim only, once it has come to the owner."""
    mesh_dim, rank = owner
    dims = [d for d, split in enumerate(layout.splits) if split is not None]
    split = layout.splits[dims[0]]
    if len(dims) > 1 or split is None or split.mesh_dims != (mesh_dim,) or 0 in layout.shape:
        return None
    return _at(layout, layout, dims[0], mesh_dim, rank)


def owner_of(layout: Layout) -> tuple[int, int] | None:
    """The mesh dim along which one rank has all of a tensor, and which rank; None if none has, or others do not have copies."""
    splits = [split for split in layout.splits if split is not None]
    if len(splits) != 1 or len(splits[0].mesh_dims) != 1 or splits[0].sizes.count(0) != len(splits[0].sizes) - 1:
        return None
    (mesh_dim,) = splits[0].mesh_dims
    return mesh_dim, next(k for k, n in enumerate(splits[0].sizes) if n)


def _owned(mesh_dim: int, rank: int, meta: Meta, like: Sequence[Layout]) -> Layout:
    """All of a result, there: along the dim of an operand of its shape, else along its first of several positions."""
    alike = next((layout for layout in like if layout.shape == meta.shape), None)
    dims = [d for d, n in enumerate(meta.shape) if (n > 1 if alike is None else alike.splits[d] is not None)]
    at = dims[0] if dims else 0
    return _at(like[0], meta, at, mesh_dim, rank)


def _at(near: Layout, meta: Meta | Layout, at: int, mesh_dim: int, rank: int) -> Layout:
    mesh = near.mesh
    sizes = tuple([meta.shape[at] if k == rank else 0 for k in range(mesh.shape[mesh_dim])])
    splits = [Split((mesh_dim,), sizes) if d == at else None for d in range(len(meta.shape))]
    return Layout.from_splits(mesh, splits, (None,) * mesh.ndim, meta.shape, meta.stride, meta.dtype)


def _gives_tensors(rule: Rule, call: Call) -> bool:
    """Whether it computes tensors of tensors, and nothing else: no views, no writes, nothing drawn, the same on each rank."""
    schema, known = call.func._schema, facts_of(call.func)
    if schema.is_mutable or shows_memory(call.func) or known.flat or known.per_element or known.touches != "all":
        return False
    if torch.Tag.nondeterministic_seeded in call.func.tags or any(str(given.type) != "Tensor" for given in schema.returns):
        return False
    if len(call.results) != len(schema.returns) or any(argument.name == "device" for argument in schema.arguments):
        return False
    return rule.run is None and rule.local_args is None and rule.writes is None and not rule.measured
