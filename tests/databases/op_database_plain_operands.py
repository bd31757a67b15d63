"""Plain operands in the samples of the operator database, one at a time next to DTensors: refused equally on all ranks, or right.
A *place* is the position of a tensor among a sample's arguments. ``docs/architecture.md`` has the rules.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import op_database as db
import torch
import torch.distributed as dist

import dtensor as dt
from dtensor.base.tensor_tree import map_tensors, tensor_leaves
from dtensor.dispatch.plain_tensor_args import is_number
from dtensor.placement import Placement

# Operators that do not combine the plain tensor's values with a DTensor: ranks may have different values.
NOT_COMBINED = {
    "broadcast_tensors": "each result is of one tensor",
    "meshgrid": "each result is of one tensor",
    "reshape_as": "only the shape is read",
    "view_as": "only the shape is read",
    "narrow": "read into Python",
    "tensor_split": "read into Python",
    "tensordot": "dims that have one element in the other tensor are summed before the two meet: what is left may be a number",
}


def cases_of(entry: Any, setting: db.Setting) -> Iterator[db.Case]:
    """Yield cases in which one tensor of a sample is plain and the others are distributed."""
    for position, sample in db.samples_of(entry, setting):
        count = len(tensor_leaves(sample.given))
        for place in range(count if count > 1 else 0):
            yield db.run_case(entry.formatted_name, setting, position, sample, plain_at(place))


def plain_at(place: int) -> db.Draw:
    """Return a draw function for one case that leaves the tensor at ``place`` plain."""
    following = iter(range(1 << 30))

    def draw(x: torch.Tensor, setting: db.Setting, rng: random.Random) -> tuple[Placement, ...] | None:
        drawn = db.draw_placements(x, setting, rng)
        return None if next(following) == place else drawn

    return draw


def fits(case: db.Case) -> bool:
    """Return True if the case is right, or refused because of mixed operands."""
    return case.status in ("pass", "void", "accepted") or (case.status == "refused" and "MixedTensorError" in case.problem)


# --- on processes ----------------------------------------------------------------------------------------------------------
def on_processes(pattern: str, samples: int) -> list[str]:
    """Return the violations on processes, with equal plain tensors on all ranks and with different ones."""
    setting = db.Setting((dist.get_world_size(),), samples=samples, draw="shard")
    problems = []
    for entry in db.entries(pattern):
        for position, sample in db.samples_of(entry, setting):
            given = tensor_leaves(sample.given)
            for place, x in enumerate(given if len(given) > 1 else ()):
                if can_differ(x):
                    told = error_with_different_tensors(sample, place, setting)
                    everybody: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(everybody, told)
                    alike = everybody == [told] * len(everybody)
                    if not alike or (told is None and entry.name not in NOT_COMBINED):
                        problems.append(f"{entry.formatted_name} {position}, a tensor of each rank's own at {place}: {everybody}")
        problems += [str(case) for case in cases_of(entry, setting) if not fits(case)]
    return problems


def can_differ(x: torch.Tensor) -> bool:
    """Return True if the flipped tensor differs (8-bit floats cannot be flipped)."""
    turnable = x.layout is torch.strided and not (x.dtype.is_floating_point and x.dtype.itemsize == 1)
    return turnable and not is_number(x) and not torch.equal(x, x.flip(0))


def error_with_different_tensors(sample: db.Sample, place: int, setting: db.Setting) -> str | None:
    """Return the error of the call, or None, if odd ranks have the plain tensor flipped."""
    mesh = dt.init_device_mesh("cpu", setting.mesh)
    rng, following = db.rng_of("own", setting, place), iter(range(1 << 30))

    def made(x: torch.Tensor) -> torch.Tensor:
        where = db.draw_placements(x, setting, rng)
        if next(following) == place:
            return x.detach().flip(0) if dist.get_rank() % 2 else x.detach()
        return dt.distribute_tensor(x.detach(), mesh, where)

    try:
        with db.quiet():
            args, kwargs = map_tensors(made, sample.given)
            sample.fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
