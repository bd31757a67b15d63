"""Calibration (``dtensor calibrate``): measure collectives and compute on this machine, and fit the constants of the cost model.

Every collective runs through the engine's own executor (which is handed in: it plans by what is measured here), so what is
measured is the algorithm that will be used. The model,
``latency + per_peer * other ranks + bytes / bandwidth``, is fitted to relative errors: small tensors count as much as large ones.
Computing is measured while all ranks compute: products of matrices by kind of arithmetic, copies, and an operation on one number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ..base.progress import progress
from ..base.spawn_ranks import on_ranks
from ..base.units import seconds_text
from ..errors import MeshError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import backend_of
from ..placement import Partial, Placement, Replicate, Shard
from .device import DEVICES, STANDS_FOR, Device, named
from .profile import COLLECTIVES, Link, Profile, Rate, profile_path

_PAIRS: dict[str, tuple[Placement, Placement]] = {
    "exchange": (Shard(0), Shard(1)),
    "all_gather": (Shard(0), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_reduce": (Partial(), Replicate()),
}
assert tuple(_PAIRS) == COLLECTIVES
_LONGEST = 3600.0  # seconds that all processes together may take
_SIDES = (32, 128, 512, 2048)  # of square float32 tensors: 4 KB to 16 MB


class Move(Protocol):
    """A redistribution as it will run: of how many collectives, which bring ``bytes`` to a rank."""

    @property
    def collectives(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    def run(self, local: torch.Tensor) -> Any: ...


Moves = Callable[[Layout, Layout], Move]


class Sample(NamedTuple):
    """One measurement: a collective among ``size`` ranks that brings ``nbytes`` to each took ``seconds``."""

    kind: str
    size: int
    nbytes: int
    seconds: float


def fit(samples: Sequence[Sample]) -> Rate:
    """The rate with the least squares of relative errors; no constant is negative.

    >>> made = Rate(1e-4, 2e-5, 1e9)
    >>> found = fit([Sample("exchange", n, b, made.seconds(n, b)) for n in (2, 4) for b in (1 << 10, 1 << 20)])
    >>> round(found.latency * 1e6), round(found.per_peer * 1e6), round(found.bandwidth / 1e6)
    (100, 20, 1000)
    """
    seconds = np.asarray([sample.seconds for sample in samples])
    columns = np.asarray([(1.0, sample.size - 1, sample.nbytes) for sample in samples]) / seconds[:, None]
    scale = np.abs(columns).max(axis=0)  # columns of one size: bytes and ones differ by millions
    used = [0, 2] if len({sample.size for sample in samples}) == 1 else [0, 1, 2]
    found = np.zeros(3)
    while used:
        part = np.linalg.lstsq(columns[:, used] / scale[used], np.ones(len(samples)), rcond=None)[0]
        if (part >= 0).all():
            found[used] = part / scale[used]
            break
        used.remove(used[int(part.argmin())])
    return Rate(float(found[0]), float(found[1]), float(1 / max(found[2], 1e-15)))


def measure(moves: Moves, device_type: str, seconds: float = 0.05) -> Profile:
    """The constants of the world's backend, on all its ranks alike; all of them must call it.

    Args:
        seconds: how long each of about fifty measurements lasts.
    """
    ranks, world = range(dist.get_world_size()), dist.get_world_size()
    if world < 2:
        raise MeshError("calibration needs at least 2 ranks, this group has 1; run `python -m dtensor calibrate --ranks 4`")
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    backend = backend_of(dist.group.WORLD, device_type)
    links: dict[str, Link] = {}
    between: dict[str, Link] = {}
    sizes = sorted({n for n in (2, 4, 8, per_host) if 1 < n <= min(per_host, world)})
    if sizes:
        links[backend] = _link(moves, [ranks[:n] for n in sizes], device_type, seconds)
    if per_host < world:
        heads = ranks[::per_host]
        groups = [heads[:n] for n in sorted({2, len(heads)}) if len(heads) >= n]
        between[backend] = _link(moves, [*groups, ranks], device_type, seconds)
    devices = {device_type: _computing(device_type, seconds)}
    return Profile(links, between, per_host if per_host < world else 0, devices)


# --- computing ------------------------------------------------------------------------------------------------------------
_MULTIPLIED = {"float64": torch.float64, "float32": torch.float32, "half": torch.bfloat16}
_MATRICES = {"cpu": (128, 256, 512), "cuda": (1024, 4096, 8192)}


def _computing(device_type: str, seconds: float) -> Device:
    """What this machine gets; of 8-bit numbers and integers what is built in for devices of its kind."""
    name = "this CPU" if device_type == "cpu" else torch.cuda.get_device_name()
    built_in = DEVICES[STANDS_FOR[device_type] if device_type == "cpu" else named(name)]
    number = torch.ones((), device=device_type)
    rates = {kind: _multiplied(dtype, device_type, seconds) for kind, dtype in _MULTIPLIED.items()}
    memory = 2 * _measure_copy_rate(device_type, seconds)  # read and written
    return Device(name, {**built_in.flops, **rates}, memory, slowest(lambda: number + number, seconds / 5, device_type))


def _multiplied(dtype: torch.dtype, device_type: str, seconds: float) -> float:
    """FLOPs per second of the size of matrices that suits best."""
    rates = []
    for side in _MATRICES[device_type]:
        x = torch.ones(side, side, dtype=dtype, device=device_type)
        rates.append(2 * side**3 / slowest(lambda x=x: x @ x, seconds / 5, device_type))  # type: ignore[misc]  # of this turn
    return max(rates)


def _link(moves: Moves, groups: Sequence[Sequence[int]], device_type: str, seconds: float) -> Link:
    memory = _measure_copy_rate(device_type, seconds)
    asked = list(product(groups, COLLECTIVES, _SIDES))
    shown = progress(asked, len(asked), "calibrating") if dist.get_rank() == 0 else iter(asked)
    taken = [_sample(moves, kind, group, side, device_type, memory, seconds) for group, kind, side in shown]
    samples = [sample for sample in taken if sample is not None]
    rates = {kind: fit([sample for sample in samples if sample.kind == kind]) for kind in COLLECTIVES}
    return Link(**rates, memory=memory)


def _measure_copy_rate(device_type: str, seconds: float) -> float:
    """Return the bytes per second of local copies while all ranks copy."""
    x = torch.ones(_SIDES[-1], _SIDES[-1], device=device_type)
    return x.nbytes / slowest(x.clone, seconds / 5, device_type)


def _sample(
    moves: Moves, kind: str, group: Sequence[int], side: int, device_type: str, memory: float, seconds: float
) -> Sample | None:
    """One measurement; what the local part takes by the model is taken off. None where another rank's cannot be."""
    mesh = DeviceMesh(device_type, list(group))
    src, dst = (Layout.of(mesh, [placement], (side, side)) for placement in _PAIRS[kind])
    move = moves(src, dst)
    assert move.collectives == 1, f"{kind} is one collective, not {move}"
    local = torch.ones(src.local_shape(mesh.get_coordinate()), device=device_type)
    own = () if mesh.current_member() is None else group
    taken = slowest(lambda: moves(src, dst).run(local), seconds / 5, device_type, own)
    nbytes = move.bytes
    copied = {"all_reduce": 0, "reduce_scatter": nbytes}.get(kind, dst.max_local_nbytes)
    return Sample(kind, len(group), nbytes, max(taken - copied / memory, taken / 4))


def slowest(run: Callable[[], Any], seconds: float, device_type: str = "cpu", group: Sequence[int] = ()) -> float:
    """Median over rounds of ``seconds`` of one call, on the slowest of the ranks that take part; () stands for all or, outside a
    group, for none."""

    def timed(count: int) -> float:
        dist.barrier()
        start = perf_counter()
        for _ in range(count):
            run()
        if device_type == "cuda":
            torch.cuda.synchronize()
        return (perf_counter() - start) / count

    def everybodys(value: float) -> float:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return max(found[rank] for rank in group or range(len(found)))

    timed(2)
    count = int(max(1, min(10_000, seconds / max(1e-6, everybodys(timed(2))))))
    return sorted(everybodys(timed(count)) for _ in range(5))[2]


# --- processes ------------------------------------------------------------------------------------------------------------
def run(moves: Moves, ranks: int, device_type: str, path: Path | None, seconds: float) -> tuple[Path, Profile]:
    """Measures and writes the profile; starts ``ranks`` processes of its own, unless torchrun has.

    Returns:
        Where the profile was written (on each host, under torchrun), and the profile.
    """
    path = path or profile_path()
    if path is None:
        raise MeshError("DTENSOR_PROFILE is off, so no path is known; run `python -m dtensor calibrate --output FILE`")
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        os.environ["DTENSOR_PROFILE"] = "off"  # measured under built-in plans, whatever was there before
        try:
            found = measure(moves, device_type, seconds)
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _write(path, found)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        return path, found
    (told,) = on_ranks(ranks, _told, moves, device_type, seconds, seconds=_LONGEST, device_type=device_type)
    found = Profile.loads(told)
    _write(path, found)
    return path, found


def _write(path: Path, profile: Profile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    half.write_text(profile.dumps())
    half.replace(path)  # a reader sees the old one or the new one


def _told(moves: Moves, device_type: str, seconds: float) -> Iterator[str]:
    """On each rank: the profile as it is written."""
    torch.set_num_threads(1)
    os.environ["DTENSOR_PROFILE"] = "off"
    yield measure(moves, device_type, seconds).dumps()


def report(profile: Profile, backend: str) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield titles and tables of a profile: each link of one backend, then each device."""
    for where, links in (("", profile.links), (" between hosts", profile.between_hosts)):
        link = links.get(backend)
        if link is not None:
            rows = [
                (kind, seconds_text(rate.latency), seconds_text(rate.per_peer), f"{rate.bandwidth / 1e9:.2f} GB/s")
                for kind in COLLECTIVES
                for rate in [getattr(link, kind)]
            ]
            title = f"{backend}{where}; local copies {link.memory / 1e9:.2f} GB/s"
            yield title, [("collective", "latency", "per other rank", "bandwidth"), *rows]
    for device in profile.devices.values():
        rates = [(f"{kind} matrix products", f"{rate / 1e9:,.4g} GFLOP/s") for kind, rate in device.flops.items()]
        rest = [("memory", f"{device.memory / 1e9:,.4g} GB/s"), ("kernel launch", seconds_text(device.launch))]
        yield device.name, [("", "measured"), *rates, *rest]
