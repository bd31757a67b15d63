"""Profile of a machine: cost constants of communication and compute, built in or measured by ``python -m dtensor calibrate``.

A profile is a small JSON file, ``$DTENSOR_PROFILE`` or ``~/.cache/dtensor/profile.json`` (``$XDG_CACHE_HOME`` is respected).
``DTENSOR_PROFILE=off`` selects the built-in constants. Plans depend on the profile, so all ranks must use the same one: the
first rank of a world that needs it writes its profile to the world's store, and all ranks use that one instead of their own
file.
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
from ..mesh.process_groups import elect_value
from .device import Device, parse_devices, parse_positive

PROFILE_FORMAT = 1
MEASURED_COLLECTIVES = ("exchange", "all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Rate:
    """Seconds of one collective: ``latency + per_peer * other ranks + bytes / bandwidth``."""

    latency: float  # seconds per collective
    per_peer: float  # seconds more for each other rank in it
    bandwidth: float  # bytes per second into (and out of) one rank

    def seconds(self, size: int, nbytes: float) -> float:
        """Return the seconds of one collective among ``size`` ranks if the busiest sends or receives ``nbytes``."""
        return self.latency + (size - 1) * self.per_peer + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Link:
    """Cost constants of one backend."""

    exchange: Rate
    all_gather: Rate
    reduce_scatter: Rate
    all_reduce: Rate
    memory: float  # bytes per second of local copies

    @classmethod
    def uniform(cls, latency: float, per_peer: float, bandwidth: float, memory: float) -> Link:
        """Return a link with equal constants for all collectives. An all-reduce exchanges twice with each other rank."""
        once, twice = Rate(latency, per_peer, bandwidth), Rate(latency, 2 * per_peer, bandwidth)
        return cls(once, once, once, twice, memory)

    def rate(self, kind: str) -> Rate:
        """Return the rate of a kind of collective; kinds that are not measured have the rate of an exchange."""
        rate: Rate = getattr(self, kind if kind in MEASURED_COLLECTIVES else "exchange")
        return rate


# Orders of magnitude. They are enough to choose between one collective and two, or between an all-reduce and a reduce-scatter.
_GLOO = Link.uniform(latency=100e-6, per_peer=20e-6, bandwidth=1e9, memory=4e9)
_NCCL = Link.uniform(latency=15e-6, per_peer=1e-6, bandwidth=100e9, memory=1e12)
_NCCL_BETWEEN_HOSTS = Link.uniform(latency=25e-6, per_peer=2e-6, bandwidth=25e9, memory=1e12)


@dataclass(frozen=True, slots=True)
class Profile:
    """Cost constants of a machine.

    Attributes:
        links: backend -> constants among ranks of one host.
        between_hosts: backend -> constants for groups over several hosts, if they differ.
        ranks_per_host: number of consecutive ranks on one host; 0 if all ranks share a host.
        devices: torch's device type -> measured device constants.
    """

    links: Mapping[str, Link] = field(default_factory=dict)
    between_hosts: Mapping[str, Link] = field(default_factory=dict)
    ranks_per_host: int = 0
    devices: Mapping[str, Device] = field(default_factory=dict)

    def link(self, backend: str, between_hosts: bool = False) -> Link:
        """Return the constants of a backend in one host or between hosts, built in if not measured (NCCL's if unknown)."""
        if between_hosts and backend in self.between_hosts:
            return self.between_hosts[backend]
        return self.links.get(backend, BUILT_IN_PROFILE.links.get(backend, _NCCL))

    def dumps(self) -> str:
        """Return the profile as JSON."""
        return json.dumps({"format": PROFILE_FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def loads(cls, text: str) -> Profile:
        """Return the profile in ``text``, a JSON object. Entries that are missing are built in.

        Raises:
            ValueError: the text is not a profile, or a constant is not a possible one.
        """
        read = json.loads(text)
        if not isinstance(read, dict) or read.get("format") != PROFILE_FORMAT:
            raise ValueError(f"not a profile of format {PROFILE_FORMAT}")
        links, between = (_parse_links(read.get(key, {})) for key in ("links", "between_hosts"))
        ranks_per_host = read.get("ranks_per_host", 0)
        if not isinstance(ranks_per_host, int) or ranks_per_host < 0:
            raise ValueError(f"ranks_per_host is an int of at least 0 (0: all ranks share a host), got {ranks_per_host!r}")
        devices = parse_devices(read.get("devices", {}))
        return cls({**BUILT_IN_PROFILE.links, **links}, {**BUILT_IN_PROFILE.between_hosts, **between}, ranks_per_host, devices)


BUILT_IN_PROFILE = Profile({"gloo": _GLOO, "nccl": _NCCL}, {"nccl": _NCCL_BETWEEN_HOSTS})


def _parse_links(read: Any) -> dict[str, Link]:
    """Return the link constants of a profile read from JSON, by backend; raise if one is missing or not a number."""
    if not isinstance(read, dict):
        raise ValueError(f"links by backend are expected, got {type(read).__name__}")
    try:
        return {
            backend: Link(
                **{kind: _parse_rate(entry[kind]) for kind in MEASURED_COLLECTIVES}, memory=parse_positive(entry["memory"])
            )
            for backend, entry in read.items()
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"a link needs {', '.join(MEASURED_COLLECTIVES)} and memory: {error!r}") from None


def _parse_rate(entry: Any) -> Rate:
    return Rate(_parse_latency(entry["latency"]), _parse_latency(entry["per_peer"]), parse_positive(entry["bandwidth"]))


def _parse_latency(value: Any) -> float:
    return 0.0 if value == 0 else parse_positive(value)


# --- the profile in use ---------------------------------------------------------------------------------------------------
def profile_path() -> Path | None:
    """Return the path of this machine's profile; None if ``DTENSOR_PROFILE`` is ``off``."""
    setting = os.environ.get("DTENSOR_PROFILE")
    if setting is not None:
        return None if setting in ("", "off") else Path(setting)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dtensor" / "profile.json"


def is_calibrated() -> bool:
    """Return True if this machine has a profile file, as ``dtensor calibrate`` writes it, and it is in use."""
    path = profile_path()
    return path is not None and path.is_file()


def read_profile() -> Profile:
    """Return this machine's profile. Warns and returns the built-in one if the file cannot be read."""
    path = profile_path()
    if path is None or not path.is_file():
        return BUILT_IN_PROFILE
    try:
        return Profile.loads(path.read_text())
    except (OSError, ValueError) as error:
        warnings.warn(
            f"the machine profile {path} cannot be read ({error}), so costs are estimated with built-in constants; "
            "run `python -m dtensor calibrate` to measure this machine again",
            stacklevel=2,
        )
        return BUILT_IN_PROFILE


@functools.cache
def _process_profile() -> Profile:
    return read_profile()


_elected_profile: list[tuple[Any, Profile]] = []  # the last world, and the profile that its ranks agreed on


def _world_profile(world: Any) -> Profile:
    """Return the machine profile that all ranks of the process group use: that of the rank which asked first."""
    if not _elected_profile or _elected_profile[0][0] is not world:
        own, per_host = _process_profile(), os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
        if not own.ranks_per_host and per_host.isdigit():
            own = replace(own, ranks_per_host=int(per_host))
        text = elect_value(world, "dtensor/profile", own.dumps())
        _elected_profile[:] = [(world, BUILT_IN_PROFILE if text is None else Profile.loads(text))]
    return _elected_profile[0][1]


_DRY_RUN_RANKS_PER_HOST = 8  # ranks per host of a dry run


def get_profile(mesh: DeviceMesh) -> Profile:
    """Return the profile that all ranks of ``mesh`` use: elected between processes, set for the mesh, or this machine's."""
    if mesh.kind == "process_group":
        return _world_profile(mesh._root.world)
    if mesh._root.profile is not None:
        own: Profile = mesh._root.profile
        return own
    profile = _process_profile()
    if mesh.kind == "dry_run" and not profile.ranks_per_host:
        return replace(profile, ranks_per_host=_DRY_RUN_RANKS_PER_HOST)
    return profile
