"""The database's samples with a plain tensor in every place, beside DTensors: refused alike on all ranks, or right.

A *place* is the position of a tensor among a sample's arguments. The law is written in ``docs/architecture.md``.
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

# Where no operator joins the plain tensor's values with a DTensor: what each rank has is its own affair.
NOT_JOINED = {
    "broadcast_tensors": "each result is of one tensor",
    "meshgrid": "each result is of one tensor",
    "reshape_as": "only the shape is read",
    "view_as": "only the shape is read",
    "narrow": "read into Python",
    "tensor_split": "read into Python",
    "tensordot": "dims that have one element in the other tensor are summed before the two meet: what is left may be a number",
}


def cases_of(entry: Any, setting: db.Setting) -> Iterator[db.Case]:
    """Every sample with each of its tensors plain, the others distributed."""
    for position, sample in db.samples_of(entry, setting):
        count = len(tensor_leaves(sample.given))
        for place in range(count if count > 1 else 0):
            yield db.run_case(entry.formatted_name, setting, position, sample, plain_at(place))


def plain_at(place: int) -> db.Draw:
    """Leaves the tensor at ``place`` plain; to be used for one case."""
    following = iter(range(1 << 30))

    def draw(x: torch.Tensor, setting: db.Setting, rng: random.Random) -> tuple[Placement, ...] | None:
        drawn = db.draw_placements(x, setting, rng)
        return None if next(following) == place else drawn

    return draw


def fits(case: db.Case) -> bool:
    """Right, or refused for mixing."""
    return case.status in ("pass", "void", "accepted") or (case.status == "refused" and "MixedTensorError" in case.problem)


# --- on processes ----------------------------------------------------------------------------------------------------------
def on_processes(pattern: str, samples: int) -> list[str]:
    """What breaks the law where each rank is a process: with the same plain tensor everywhere, and with one of its own."""
    setting = db.Setting((dist.get_world_size(),), samples=samples, draw="shard")
    problems = []
    for entry in db.entries(pattern):
        for position, sample in db.samples_of(entry, setting):
            given = tensor_leaves(sample.given)
            for place, x in enumerate(given if len(given) > 1 else ()):
                if can_differ(x):
                    told = with_own(sample, place, setting)
                    everybody: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(everybody, told)
                    alike = everybody == [told] * len(everybody)
                    if not alike or (told is None and entry.name not in NOT_JOINED):
                        problems.append(f"{entry.formatted_name} {position}, a tensor of each rank's own at {place}: {everybody}")
        problems += [str(case) for case in cases_of(entry, setting) if not fits(case)]
    return problems


def can_differ(x: torch.Tensor) -> bool:
    """Whether the other way round it is another tensor (kernels to turn it lack for floats of 8 bits)."""
    turnable = x.layout is torch.strided and not (x.dtype.is_floating_point and x.dtype.itemsize == 1)
    return turnable and not is_number(x) and not torch.equal(x, x.flip(0))


def with_own(sample: db.Sample, place: int, setting: db.Setting) -> str | None:
    """What the call raises, if anything, where odd ranks have the plain tensor the other way round."""
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
