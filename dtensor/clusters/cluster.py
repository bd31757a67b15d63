"""Cluster description, and degrees of parallelism on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..cost.device import DEVICES, Device
from ..cost.profile import Link, Profile
from ..errors import PlanError
from ..mesh.create_mesh import dry_run_of_profile
from ..mesh.device_mesh import DeviceMesh
from .model_sizes import Transformer

MESH_DIMS = ("dp", "pp", "ep", "cp", "tp")  # mesh dims, outermost first: ranks along tp are adjacent
# limits of the search: fewest positions of a sequence per rank, most ranks that shard a sequence
_MIN_POSITIONS = 1024
_MAX_RING = 16


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Devices and links of a cluster. The numbers are given, not measured.

    Attributes:
        profile: cost constants, inside of a node and between nodes.
        peak: FLOPs per second in the data sheet, dense bfloat16, for MFU. The device has the rate that matrix products reach.
        memory: bytes of a device.

    Facts only: no communication.

    >>> from dtensor.clusters import CLUSTERS
    >>> print(CLUSTERS["h100"])
    H100: 690 of 989 TFLOP/s, 80 GB at 3000 GB/s; nodes of 8: inside 360 GB/s, between 40 GB/s
    """

    profile: Profile
    peak: float
    memory: float

    @property
    def device(self) -> Device:
        return self.profile.devices["meta"]

    def __str__(self) -> str:
        links = (("inside", self.profile.links["nccl"]), ("between", self.profile.between_hosts["nccl"]))
        rates = ", ".join(f"{name} {link.all_gather.bandwidth / 1e9:.0f} GB/s" for name, link in links)
        return (
            f"{self.device.name}: {self.device.flops['half'] / 1e12:.0f} of {self.peak / 1e12:.0f} TFLOP/s, "
            f"{self.memory / 1e9:.0f} GB at {self.device.memory / 1e9:.0f} GB/s; nodes of {self.profile.ranks_per_host}: {rates}"
        )


def cluster(device: Device, peak: float, memory: float, node: int, inside: float, between: float) -> Cluster:
    """Return a cluster of nodes with ``node`` ranks; a rank receives ``inside`` or ``between`` nodes these bytes per second.

    Args:
        device: the rates of matrix products and memory, as in ``dtensor.cost.device.DEVICES``.
        peak: FLOPs per second in the data sheet, dense bfloat16.
        memory: bytes of a device.

    No communication, and no errors.

    >>> from dtensor.clusters import CLUSTERS
    >>> large = cluster(CLUSTERS["h100"].device, 9.89e14, 80e9, node=72, inside=3.6e11, between=4e10)
    >>> large.profile.ranks_per_host
    72
    """
    links = Link.uniform(1e-5, 1e-6, inside, device.memory), Link.uniform(2e-5, 2e-6, between, device.memory)
    return Cluster(Profile({"nccl": links[0]}, {"nccl": links[1]}, node, {"meta": device}), peak, memory)


# 80 % of one direction in the data sheets: NVLink 3 and 4, InfiniBand of 200 and 400 Gb/s per GPU, and two links of 90 GB/s for a
# ring on an axis of the torus. TPU: 70 % of 459 TFLOP/s in bfloat16, and 90 % of the memory bandwidth of 2.77 TB/s.
_TPU = Device("TPU v5p", {"float64": 1e12, "float32": 5.7e13, "half": 3.2e14, "other": 6.4e14}, 2.5e12, 2e-6)
CLUSTERS = {
    "a100": cluster(DEVICES["A100"], 3.12e14, 80e9, 8, 2.4e11, 2e10),
    "h100": cluster(DEVICES["H100"], 9.89e14, 80e9, 8, 3.6e11, 4e10),
    "tpu-v5p": cluster(_TPU, 4.59e14, 95e9, 8960, 1.44e11, 5e9),
}


@dataclass(frozen=True, slots=True)
class Degrees:
    """Number of ranks along each mesh dim: ``tp`` innermost, then ``cp``, ``pp``, ``dp``.

    ``ep`` ranks of ``dp`` shard experts, between ``cp`` and ``pp``.

    Numbers only: no communication.

    >>> print(Degrees(tp=8, pp=16, dp=128), Degrees(tp=8, pp=16, dp=128).ranks)
    tp 8 x cp 1 x pp 16 x dp 128 16384
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def mesh(self, cluster: Cluster) -> DeviceMesh:
        """Return the dry-run mesh, of one representative rank, with these degrees on the cluster."""
        return dry_run_of_profile(cluster.profile, (self.dp // self.ep, self.pp, self.ep, self.cp, self.tp), MESH_DIMS)

    def check(self, model: Transformer, sequence: int, batch: int) -> None:
        """Raise a PlanError if these degrees do not divide the model, the sequence or the batch."""
        if problems := list(self.iter_problems(model, sequence, batch)):
            raise PlanError("; ".join(problems))

    def iter_problems(self, model: Transformer, sequence: int, batch: int) -> Iterator[str]:
        """Yield a text for each size of the model, sequence or batch that these degrees do not divide."""
        chunks = self.tp * self.cp * (2 if self.cp > 1 else 1)  # with cp, a rank has an early and a late chunk of the sequence
        for name, count, size, what in (
            ("tp", self.tp, model.kv_heads, "heads of keys and values"),
            ("cp and tp", chunks, sequence, "positions"),
            ("dp", self.dp, batch, "sequences"),
            ("ep", self.ep, model.experts, "experts"),
            ("ep", self.ep, self.dp, "ranks of dp"),
        ):
            if size % count:
                yield f"{name} {count} does not divide {size} {what}"
        if self.pp > model.layers:
            yield f"pp {self.pp} is more than {model.layers} layers"

    def __str__(self) -> str:
        return f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp}" + (f" (ep {self.ep})" if self.ep > 1 else "")


def iter_degrees(model: Transformer, ranks: int, node: int, sequence: int, batch: int) -> Iterator[Degrees]:
    """Yield possible degrees for ``ranks``: powers of two for all but ``dp``, ``tp`` within a node, ``ep`` for experts."""
    twos = [2**k for k in range(ranks.bit_length()) if ranks % 2**k == 0]
    for tp in (size for size in twos if size <= node):
        for cp in (size for size in twos if size == 1 or (size * tp * _MIN_POSITIONS <= sequence and size <= _MAX_RING)):
            for pp in (size for size in twos if not ranks % (tp * cp * size)):
                dp = ranks // (tp * cp * pp)
                for ep in twos if model.experts > 1 else (1,):
                    degrees = Degrees(tp, cp, pp, dp, ep)
                    if not any(degrees.iter_problems(model, sequence, batch)):
                        yield degrees
