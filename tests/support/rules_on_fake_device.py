"""Rules on a fake device: run every rule where a tensor, mask or offset made on the CPU raises when combined with the device's.

    python tests/support/rules_on_fake_device.py PART PARTS CASES

CPU tensors that torch accepts (indices, index masks, numbers) must be accepted. Forward only: operators of backward passes have
rules too, and errors in torch's own engine on such a device end the process. A separate program, since torch registers the
additional device for the whole process.
"""

from __future__ import annotations

import itertools
import random
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import dtensor as dt
from dtensor.base.tensor_tree import tensor_leaves
from dtensor.placement import Placement
from dtensor.rules import rules
from dtensor.testing.call_variants import Variant
from dtensor.testing.placements import Combination
from dtensor.testing.samples import samples_of
from dtensor.testing.verify import MESHES, placed_cases

DEVICE = "pretended"
# Where torch's inference on such a device raises and its kernels do not: interpolation of empty tensors; a view of a term whose
# memory has another order than the global tensor's, which runs as a copy; gradients of group norm on a block without channels.
# Where its kernels raise and its inference does not: values on the CPU to be put.
PYTORCH_ERRORS = (
    "cond must be a bool",
    "Cannot view a tensor with shape",
    "integer division or modulo by zero",
    "device between self (pretended:0) and values (cpu)",
)


def make_fake_device_value(value: Any, device: str = DEVICE) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return torch.device(DEVICE) if isinstance(value, torch.device) else value


def get_device_types(x: torch.Tensor) -> set[str]:
    local = x._local if isinstance(x, dt.DTensor) else x
    return {piece.device.type for piece in getattr(local, "shards", [local])}


def find_rule_problems(name: str, cases: int) -> Iterator[str]:
    """Yield the problems of up to ``cases`` cases of a rule, each with all operands on the device or with one plain operand on
    the CPU.
    """
    rng = random.Random(zlib.crc32(name.encode()))
    for case in placed_cases(name, samples_of(name), MESHES, 200, cases, rng):
        variant, shape, placements = case.variant, case.mesh_shape, case.placements
        mesh = dt.init_device_mesh(DEVICE, shape)
        for on_cpu in (None, *range(1, len(placements))):
            yield from _find_case_problems(variant, mesh, placements, on_cpu)


def _find_case_problems(
    variant: Variant, mesh: dt.DeviceMesh, placements: Combination, on_cpu: int | None = None
) -> Iterator[str]:
    """Yield the error or the wrong result devices of one case. ``on_cpu`` is the number of the operand that is plain and on the
    CPU.
    """
    if not placements:
        return
    given = tuple(variant.sample.args), dict(variant.sample.kwargs)
    try:
        with FakeTensorMode():
            count = itertools.count()
            args, kwargs = tree_map(
                lambda x: make_fake_device_value(x, "cpu" if is_tensor_at_position(x, count, on_cpu) else DEVICE), given
            )
            expected = [get_device_types(result) for result in tensor_leaves(variant.call(*args, **kwargs))]
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, given)
        variant.call(*args, **kwargs)
    except Exception:  # torch refuses it, or cannot pretend
        return
    where, count = iter(placements), itertools.count()
    try:
        with FakeTensorMode(), dt.implicit_replication():
            args, kwargs = tree_map(
                lambda x: distribute_on_fake_device(x, mesh, where, is_tensor_at_position(x, count, on_cpu)), given
            )
            where_they_are = [get_device_types(result) for result in tensor_leaves(variant.call(*args, **kwargs))]
        if where_they_are != expected and any(found != {DEVICE} for found in where_they_are):
            yield f"{variant.name} {mesh.shape} {placements}: results on {where_they_are}"
    except (DataDependentOutputException, DynamicOutputShapeException):
        return
    except Exception as error:
        if any(said in str(error) for said in PYTORCH_ERRORS):
            return
        yield f"{variant.name} {mesh.shape} {placements} (on the CPU: {on_cpu}): {type(error).__name__}: {error}"


def is_tensor_at_position(value: Any, count: Iterator[int], place: int | None) -> bool:
    return isinstance(value, torch.Tensor) and next(count) == place


def distribute_on_fake_device(value: Any, mesh: dt.DeviceMesh, where: Iterator[tuple[Placement, ...]], on_cpu: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return make_fake_device_value(value)
    placements = next(where)
    return (
        make_fake_device_value(value, "cpu") if on_cpu else dt.distribute_tensor(make_fake_device_value(value), mesh, placements)
    )


def main(part: int, parts: int, cases: int) -> int:
    """Print the problems of every ``parts``-th rule from ``part`` on; return whether there are any."""
    warnings.simplefilter("ignore")
    _setup_privateuseone_for_python_backend(DEVICE)
    found = 0
    for name in sorted(rules())[part::parts]:
        for problem in find_rule_problems(name, cases):
            found += 1
            print(problem[:400])
    print(f"{found} problems")
    return found > 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
