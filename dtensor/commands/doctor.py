"""Doctor (``dtensor doctor``): report versions, backends and patches on torch, and test communication between processes."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from ..cost.profile import PROFILE_FORMAT, is_calibrated
from ..errors import DTensorError
from ..interop.patch_catalog import PATCHES
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Replicate, Shard
from ..tensor.dtensor import DTensor
from .progress import report_periodically
from .spawn_ranks import spawn_ranks

RANKS = 2
_OPTIONAL = ("numpy", "scipy", "safetensors", "hypothesis", "transformers", "matplotlib", "rich", "tqdm")


def report_lines() -> Iterator[str]:
    """Yield the lines of the report on versions, the machine profile, backends, devices and patches on torch."""
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield f"dtensor {sys.modules['dtensor'].__version__}, torch {torch.__version__}"
    profile = "calibrated" if is_calibrated() else "built-in constants (dtensor calibrate measures this machine)"
    yield f"machine profile: {profile}, format {PROFILE_FORMAT}"
    yield "optional packages: " + ", ".join(f"{name} {_package_version(name)}" for name in _OPTIONAL)
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if _has_backend(name)]
    yield f"process groups: {', '.join(backends) or 'none'}"
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield f"accelerators: {', '.join(torch.cuda.get_device_name(i) for i in range(devices)) or 'none'}"
    active = [patch for patch in PATCHES if patch.in_force]
    yield f"active patches on torch ({len(active)} of {len(PATCHES)}):"
    yield from (f"  {patch.where}: {patch.why}" for patch in active)


def self_test(seconds: float = 60.0) -> str:
    """Test collectives between two new processes over gloo; return the problem as text, "" if there is none."""
    if not _has_backend("gloo"):
        return "this torch has no gloo, so communication cannot be tested"
    try:
        return "".join(spawn_ranks(RANKS, _check_collectives, seconds=seconds))
    except DTensorError as error:
        return str(error)


def _check_collectives() -> Iterator[str]:
    """Redistribute a partial tensor in each way on this rank, and raise if values are wrong; yield "" for correct ones."""
    mesh = DeviceMesh("cpu", RANKS)
    x = DTensor.from_local(torch.arange(6.0).view(2, 3) + mesh.get_rank(), mesh, [Partial()], shape=(2, 3), stride=(3, 1))
    expected = 2 * torch.arange(6.0).view(2, 3) + 1
    for kind in (Replicate(), Shard(0), Shard(1)):
        source = x.redistribute(placements=[kind])
        for target in (Replicate(), Shard(0), Shard(1)):
            if not torch.equal(source.redistribute(placements=[target]).full_tensor(), expected):
                raise DTensorError(f"redistribution from {kind} to {target} gives wrong values")
    yield ""


def _has_backend(backend: str) -> bool:
    return bool(getattr(dist, f"is_{backend}_available", lambda: backend == "gloo")())


def _package_version(name: str) -> str:
    """Return the version of an installed package, or "(not installed)"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def main() -> int:
    """Print the report and the test of collectives, and return the exit status: 1 if processes cannot communicate."""
    for line in report_lines():
        print(line)
    began = time.monotonic()
    with report_periodically(lambda: f"testing collectives on {RANKS} processes"):
        problem = self_test()
    print(f"collectives on {RANKS} processes over gloo: {problem or f'correct, {time.monotonic() - began:.1f} s'}", flush=True)
    return 1 if problem else 0
