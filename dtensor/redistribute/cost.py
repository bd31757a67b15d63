"""What a step takes: seconds by an alpha-beta model, latency plus bytes over bandwidth.

The constants are orders of magnitude, which is what a choice between one collective and two, or between an all-reduce and
a reduce-scatter, depends on. Set ``LINKS[...]`` to measured ones for another cluster; every rank must set the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Link:
    """One backend's constants."""

    latency: float  # seconds per collective
    per_peer: float  # seconds more for each other rank in it
    bandwidth: float  # bytes per second into (and out of) one rank
    memory: float  # bytes per second of local copies


GLOO = Link(latency=100e-6, per_peer=20e-6, bandwidth=1e9, memory=4e9)
NCCL = Link(latency=15e-6, per_peer=1e-6, bandwidth=100e9, memory=1e12)

# One process plans like the process group that the same program would run on; a dry run stands for a cluster of GPUs.
LINKS = {"cpu": GLOO, "cuda": NCCL, "meta": NCCL}


def link_of(mesh: DeviceMesh) -> Link:
    """The constants for this mesh's device type."""
    return LINKS.get(mesh.device_type, NCCL)


def collective_seconds(mesh: DeviceMesh, size: int, nbytes: int, rounds: int = 1) -> float:
    """Time of a collective: ``size`` ranks, each meets each other ``rounds`` times, the busiest moves ``nbytes`` one way."""
    link = link_of(mesh)
    return link.latency + rounds * (size - 1) * link.per_peer + nbytes / link.bandwidth


def local_seconds(mesh: DeviceMesh, nbytes: int) -> float:
    """Time to write ``nbytes`` of new local memory."""
    return nbytes / link_of(mesh).memory
