"""What communication and computing take on a machine: built-in constants, or those that ``python -m dtensor calibrate`` measured.

A profile is a small JSON file, ``$DTENSOR_PROFILE`` or ``~/.cache/dtensor/profile.json`` (``$XDG_CACHE_HOME`` is respected);
``DTENSOR_PROFILE=off`` means the built-in constants. Plans follow from it, so all ranks must go by the same one: the first
rank of a world that asks leaves its profile in the world's store, and everybody takes that, whatever lies on its own disk.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import settled_by_first
from .device import Device, parsed, positive

FORMAT = 1
COLLECTIVES = ("exchange", "all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Rate:
    """Seconds of one collective: ``latency + per_peer * other ranks + bytes / bandwidth``."""

    latency: float  # seconds per collective
    per_peer: float  # seconds more for each other rank in it
    bandwidth: float  # bytes per second into (and out of) one rank

    def seconds(self, size: int, nbytes: float) -> float:
        """Time among ``size`` ranks, of which the busiest moves ``nbytes`` one way."""
        return self.latency + (size - 1) * self.per_peer + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Link:
    """One backend's constants."""

    exchange: Rate
    all_gather: Rate
    reduce_scatter: Rate
    all_reduce: Rate
    memory: float  # bytes per second of local copies

    @classmethod
    def uniform(cls, latency: float, per_peer: float, bandwidth: float, memory: float) -> Link:
        """All collectives alike; an all-reduce meets each other rank twice."""
        once, twice = Rate(latency, per_peer, bandwidth), Rate(latency, 2 * per_peer, bandwidth)
        return cls(once, once, once, twice, memory)

    def rate(self, kind: str) -> Rate:
        """Of a kind of collective; of those that were not measured an exchange's."""
        found: Rate = getattr(self, kind if kind in COLLECTIVES else "exchange")
        return found


# Orders of magnitude, which is what a choice between one collective and two, or between an all-reduce and a reduce-scatter,
# depends on.
_GLOO = Link.uniform(latency=100e-6, per_peer=20e-6, bandwidth=1e9, memory=4e9)
_NCCL = Link.uniform(latency=15e-6, per_peer=1e-6, bandwidth=100e9, memory=1e12)
_NCCL_BETWEEN_HOSTS = Link.uniform(latency=25e-6, per_peer=2e-6, bandwidth=25e9, memory=1e12)


@dataclass(frozen=True, slots=True)
class Profile:
    """The constants of a machine.

    Attributes:
        links: backend -> constants among ranks of one host.
        between_hosts: the same for groups that reach over several hosts, where they differ.
        ranks_per_host: consecutive ranks that share a host; 0 if all do.
        devices: torch's type of device -> what was measured of computing on it.
    """

    links: Mapping[str, Link] = field(default_factory=dict)
    between_hosts: Mapping[str, Link] = field(default_factory=dict)
    ranks_per_host: int = 0
    devices: Mapping[str, Device] = field(default_factory=dict)

    def link(self, backend: str, between_hosts: bool = False) -> Link:
        """The constants for a group; those of NCCL for a backend that nobody measured."""
        if between_hosts and backend in self.between_hosts:
            return self.between_hosts[backend]
        return self.links.get(backend, BUILT_IN.links.get(backend, _NCCL))

    def dumps(self) -> str:
        """The profile as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def loads(cls, text: str) -> Profile:
        """The profile in ``text``; what it does not name is built in.

        Raises:
            ValueError: it is no profile, or has constants that no machine has.
        """
        read = json.loads(text)
        if not isinstance(read, dict) or read.get("format") != FORMAT:
            raise ValueError(f"not a profile of format {FORMAT}")
        links, between = (_links(read.get(key, {})) for key in ("links", "between_hosts"))
        ranks_per_host = read.get("ranks_per_host", 0)
        if not isinstance(ranks_per_host, int) or ranks_per_host < 0:
            raise ValueError(f"ranks_per_host must be a count, got {ranks_per_host!r}")
        devices = parsed(read.get("devices", {}))
        return cls({**BUILT_IN.links, **links}, {**BUILT_IN.between_hosts, **between}, ranks_per_host, devices)


BUILT_IN = Profile({"gloo": _GLOO, "nccl": _NCCL}, {"nccl": _NCCL_BETWEEN_HOSTS})


def _links(read: Any) -> dict[str, Link]:
    if not isinstance(read, dict):
        raise ValueError(f"links by backend are expected, got {type(read).__name__}")
    try:
        return {
            backend: Link(**{kind: _rate(given[kind]) for kind in COLLECTIVES}, memory=positive(given["memory"]))
            for backend, given in read.items()
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"a link needs {', '.join(COLLECTIVES)} and memory: {error!r}") from None


def _rate(given: Any) -> Rate:
    return Rate(_latency(given["latency"]), _latency(given["per_peer"]), positive(given["bandwidth"]))


def _latency(value: Any) -> float:
    return 0.0 if value == 0 else positive(value)


# --- which one holds ------------------------------------------------------------------------------------------------------
def profile_path() -> Path | None:
    """Return the path of this machine's profile; None if ``DTENSOR_PROFILE`` is ``off``."""
    given = os.environ.get("DTENSOR_PROFILE")
    if given is not None:
        return None if given in ("", "off") else Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dtensor" / "profile.json"


def is_calibrated() -> bool:
    """Return True if ``dtensor calibrate`` has measured this machine and the result is used."""
    path = profile_path()
    return path is not None and path.is_file()


def read_profile() -> Profile:
    """Return this machine's profile. Warns and returns the built-in one if the file cannot be read."""
    path = profile_path()
    if path is None or not path.is_file():
        return BUILT_IN
    try:
        return Profile.loads(path.read_text())
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the machine profile {path} cannot be read ({error}), so costs are estimated with built-in constants; "
            "run `python -m dtensor calibrate` to measure this machine again",
            stacklevel=2,
        )
        return BUILT_IN


@functools.cache
def _of_this_process() -> Profile:
    return read_profile()


_settled: list[tuple[Any, Profile]] = []  # the last world, and what holds in it


def _of_world(world: Any) -> Profile:
    if not _settled or _settled[0][0] is not world:
        mine, per_host = _of_this_process(), os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun's
        if not mine.ranks_per_host and per_host.isdigit():
            mine = replace(mine, ranks_per_host=int(per_host))
        text = settled_by_first(world, "dtensor/profile", mine.dumps())
        _settled[:] = [(world, BUILT_IN if text is None else Profile.loads(text))]
    return _settled[0][1]


_DRY_RUN_HOST = 8  # ranks on one host, of a cluster that is only imagined


def profile_of(mesh: DeviceMesh) -> Profile:
    """The profile that all ranks of ``mesh`` go by."""
    if mesh.kind == "process_group":
        return _of_world(mesh._root.world)
    if mesh._root.profile is not None:
        given: Profile = mesh._root.profile
        return given
    found = _of_this_process()
    if mesh.kind == "dry_run" and not found.ranks_per_host:
        return replace(found, ranks_per_host=_DRY_RUN_HOST)
    return found
