"""Calibrate the cost model (``dtensor calibrate``): measure collectives and compute on this machine, and fit the constants.

Every collective runs through the library's own executor, so the measured algorithm is the one that is used later. The model
``latency + per_peer * other ranks + bytes / bandwidth`` is fitted to relative errors: small tensors count as much as large ones.
Compute is measured while all ranks compute: matrix products by kind of arithmetic, copies, and an operation on one number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ..base.units import seconds_text
from ..cost.device import DEFAULT_DEVICE, DEVICES, Device, nearest_device
from ..cost.profile import MEASURED_COLLECTIVES, Link, Profile, Rate, profile_path
from ..errors import MeshError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import backend_name
from ..placement import Partial, Placement, Replicate, Shard
from ..redistribute.executor import redistribution_between
from .progress import iterate_with_progress
from .spawn_ranks import spawn_ranks

_PLACEMENT_PAIRS: dict[str, tuple[Placement, Placement]] = {
    "exchange": (Shard(0), Shard(1)),
    "all_gather": (Shard(0), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_reduce": (Partial(), Replicate()),
}
assert tuple(_PLACEMENT_PAIRS) == MEASURED_COLLECTIVES
_MAX_SECONDS = 3600.0  # time limit of all measurements
_SIDES = (32, 128, 512, 2048)  # sides of square float32 tensors: 4 KB to 16 MB


class CollectiveSample(NamedTuple):
    """Measurement of one collective among ``size`` ranks: each received ``nbytes`` in ``seconds``."""

    kind: str
    size: int
    nbytes: int
    seconds: float


def fit_rate(samples: Sequence[CollectiveSample]) -> Rate:
    """Return the latency, seconds per rank and bandwidth that fit the samples with the least relative errors.

    No constant is negative.

    >>> made = Rate(1e-4, 2e-5, 1e9)
    >>> found = fit_rate([CollectiveSample("exchange", n, b, made.seconds(n, b)) for n in (2, 4) for b in (1 << 10, 1 << 20)])
    >>> round(found.latency * 1e6), round(found.per_peer * 1e6), round(found.bandwidth / 1e6)
    (100, 20, 1000)
    """
    seconds = np.asarray([sample.seconds for sample in samples])
    columns = np.asarray([(1.0, sample.size - 1, sample.nbytes) for sample in samples]) / seconds[:, None]
    scale = np.abs(columns).max(axis=0)  # columns of one size: bytes and ones differ by millions
    used = [0, 2] if len({sample.size for sample in samples}) == 1 else [0, 1, 2]
    constants = np.zeros(3)
    while used:
        part = np.linalg.lstsq(columns[:, used] / scale[used], np.ones(len(samples)), rcond=None)[0]
        if (part >= 0).all():
            constants[used] = part / scale[used]
            break
        used.remove(used[int(part.argmin())])
    return Rate(float(constants[0]), float(constants[1]), float(1 / max(constants[2], 1e-15)))


def measure_profile(device_type: str, seconds: float = 0.05) -> Profile:
    """Measure and return the cost-model profile of the world's backend, equal on all ranks. All ranks must call it.

    Args:
        seconds: how long each of about fifty measurements lasts.
    """
    ranks, world = range(dist.get_world_size()), dist.get_world_size()
    if world < 2:
        raise MeshError("calibration needs at least 2 ranks, this group has 1; run `python -m dtensor calibrate --ranks 4`")
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    backend = backend_name(dist.group.WORLD, device_type)
    links: dict[str, Link] = {}
    between: dict[str, Link] = {}
    sizes = sorted({n for n in (2, 4, 8, per_host) if 1 < n <= min(per_host, world)})
    if sizes:
        links[backend] = _measure_link([ranks[:n] for n in sizes], device_type, seconds)
    if per_host < world:
        heads = ranks[::per_host]
        groups = [heads[:n] for n in sorted({2, len(heads)}) if len(heads) >= n]
        between[backend] = _measure_link([*groups, ranks], device_type, seconds)
    devices = {device_type: _measure_device(device_type, seconds)}
    return Profile(links, between, per_host if per_host < world else 0, devices)


# --- computing ------------------------------------------------------------------------------------------------------------
_MATMUL_DTYPES = {"float64": torch.float64, "float32": torch.float32, "half": torch.bfloat16}
_MATRIX_SIDES = {"cpu": (128, 256, 512), "cuda": (1024, 4096, 8192)}


def _measure_device(device_type: str, seconds: float) -> Device:
    """Measure and return the compute rates of this machine, with built-in ones for integers and 8-bit dtypes."""
    name = "this CPU" if device_type == "cpu" else torch.cuda.get_device_name()
    built_in = DEVICES[DEFAULT_DEVICE[device_type] if device_type == "cpu" else nearest_device(name)]
    number = torch.ones((), device=device_type)
    rates = {kind: _measure_matmul_rate(dtype, device_type, seconds) for kind, dtype in _MATMUL_DTYPES.items()}
    memory = 2 * _measure_copy_rate(device_type, seconds)  # read and written
    return Device(
        name, {**built_in.flops, **rates}, memory, median_of_slowest_rank(lambda: number + number, seconds / 5, device_type)
    )


def _measure_matmul_rate(dtype: torch.dtype, device_type: str, seconds: float) -> float:
    """Return the measured FLOP per second of matrix products in ``dtype``: the best of several matrix sizes."""
    rates = []
    for side in _MATRIX_SIDES[device_type]:
        x = torch.ones(side, side, dtype=dtype, device=device_type)
        rates.append(2 * side**3 / median_of_slowest_rank(lambda x=x: x @ x, seconds / 5, device_type))  # type: ignore[misc]  # x of this iteration
    return max(rates)


def _measure_link(groups: Sequence[Sequence[int]], device_type: str, seconds: float) -> Link:
    """Measure the collectives of one backend in several groups, and return the rates that fit each kind."""
    memory = _measure_copy_rate(device_type, seconds)
    measurements = list(product(groups, MEASURED_COLLECTIVES, _SIDES))
    steps = iterate_with_progress(measurements, len(measurements), "calibrating") if dist.get_rank() == 0 else iter(measurements)
    results = [_measure_collective(kind, group, side, device_type, memory, seconds) for group, kind, side in steps]
    samples = [sample for sample in results if sample is not None]
    rates = {kind: fit_rate([sample for sample in samples if sample.kind == kind]) for kind in MEASURED_COLLECTIVES}
    return Link(**rates, memory=memory)


def _measure_copy_rate(device_type: str, seconds: float) -> float:
    """Return the measured bytes per second of local copies while all ranks copy."""
    x = torch.ones(_SIDES[-1], _SIDES[-1], device=device_type)
    return x.nbytes / median_of_slowest_rank(x.clone, seconds / 5, device_type)


def _measure_collective(
    kind: str, group: Sequence[int], side: int, device_type: str, memory: float, seconds: float
) -> CollectiveSample | None:
    """Return the measured time of one collective, less the modeled time of its copies; None on ranks outside of ``group``."""
    mesh = DeviceMesh(device_type, list(group))
    src, dst = (Layout.of(mesh, [placement], (side, side)) for placement in _PLACEMENT_PAIRS[kind])
    redistribution = redistribution_between(src, dst)
    assert redistribution.collectives == 1, f"{kind} is one collective, not {redistribution}"
    local = torch.ones(src.local_shape(mesh.get_coordinate()), device=device_type)
    members = () if mesh.current_member() is None else group
    elapsed = median_of_slowest_rank(lambda: redistribution_between(src, dst).run(local), seconds / 5, device_type, members)
    nbytes = redistribution.bytes
    copied_bytes = {"all_reduce": 0, "reduce_scatter": nbytes}.get(kind, dst.max_local_nbytes)
    return CollectiveSample(kind, len(group), nbytes, max(elapsed - copied_bytes / memory, elapsed / 4))


def median_of_slowest_rank(run: Callable[[], Any], seconds: float, device_type: str = "cpu", group: Sequence[int] = ()) -> float:
    """Return the median over rounds of the seconds of one call of ``run``, on the slowest rank of ``group``."""

    def time_calls(count: int) -> float:
        """Return the seconds per call of ``run`` on this rank, over ``count`` calls after a barrier."""
        dist.barrier()
        start = perf_counter()
        for _ in range(count):
            run()
        if device_type == "cuda":
            torch.cuda.synchronize()
        return (perf_counter() - start) / count

    def max_over_ranks(value: float) -> float:
        """Return the largest ``value`` over the ranks of the group (None: all ranks). All ranks of the world must call it."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return max(values[rank] for rank in group or range(len(values)))

    time_calls(2)
    count = int(max(1, min(10_000, seconds / max(1e-6, max_over_ranks(time_calls(2))))))
    return sorted(max_over_ranks(time_calls(count)) for _ in range(5))[2]


# --- processes ------------------------------------------------------------------------------------------------------------
def run_calibration(ranks: int, device_type: str, path: Path | None, seconds: float) -> tuple[Path, Profile]:
    """Measure the profile and write it to a file, on ``ranks`` new processes unless torchrun has started some.

    Returns:
        Path of the written profile (on each host, under torchrun), and the profile.
    """
    path = path or profile_path()
    if path is None:
        raise MeshError("DTENSOR_PROFILE is off, so no path is known; run `python -m dtensor calibrate --output FILE`")
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        os.environ["DTENSOR_PROFILE"] = "off"  # measure with plans of the built-in constants
        try:
            profile = measure_profile(device_type, seconds)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _write_profile(path, profile)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        return path, profile
    (text,) = spawn_ranks(ranks, _measure_profile_json, device_type, seconds, seconds=_MAX_SECONDS, device_type=device_type)
    profile = Profile.loads(text)
    _write_profile(path, profile)
    return path, profile


def _write_profile(path: Path, profile: Profile) -> None:
    """Write the profile atomically to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(profile.dumps())
    temporary.replace(path)  # atomic: a reader sees the old file or the new file


def _measure_profile_json(device_type: str, seconds: float) -> Iterator[str]:
    """Yield the profile that this rank and the others measure, as JSON."""
    torch.set_num_threads(1)
    os.environ["DTENSOR_PROFILE"] = "off"
    yield measure_profile(device_type, seconds).dumps()


def report_tables(profile: Profile, backend: str) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield titles and tables of a profile: each link of one backend, then each device."""
    for where, links in (("", profile.links), (" between hosts", profile.between_hosts)):
        link = links.get(backend)
        if link is not None:
            rows = [
                (kind, seconds_text(rate.latency), seconds_text(rate.per_peer), f"{rate.bandwidth / 1e9:.2f} GB/s")
                for kind in MEASURED_COLLECTIVES
                for rate in [getattr(link, kind)]
            ]
            title = f"{backend}{where}; local copies {link.memory / 1e9:.2f} GB/s"
            yield title, [("collective", "latency", "per other rank", "bandwidth"), *rows]
    for device in profile.devices.values():
        rates = [(f"{kind} matrix products", f"{rate / 1e9:,.4g} GFLOP/s") for kind, rate in device.flops.items()]
        rest = [("memory", f"{device.memory / 1e9:,.4g} GB/s"), ("kernel launch", seconds_text(device.launch))]
        yield device.name, [("", "measured"), *rates, *rest]
