"""Clusters as stated, and ways to lay ranks out on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..cost.device import DEVICES, Device
from ..cost.profile import Link, Profile
from ..errors import PlanError
from ..mesh.create import dry_run_on
from ..mesh.device_mesh import DeviceMesh
from .model_sizes import Transformer

DIMS = ("dp", "pp", "ep", "cp", "tp")  # of a mesh, the outermost first: ranks of tp are neighbours
_LEAST, _RING = 1024, 16  # where ways are looked for: positions of a sequence that a rank has, ranks that it is cut over


@dataclass(frozen=True, slots=True, eq=False)
class Cluster:
    """Devices and links, as stated: nothing is measured.

    Attributes:
        profile: what operations and collectives take, inside of a node and between nodes.
        peak: FLOPs per second of the data sheet, dense bfloat16, by which MFU counts; the device has what products reach.
        memory: bytes of a device.

    Facts alone: it communicates nothing.

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
    """A cluster of nodes of so many ranks, with bytes per second into a rank, inside of a node and between nodes.

    Args:
        device: what products and memory reach, as ``dtensor.cost.device.DEVICES`` has it.
        peak: FLOPs per second of the data sheet, dense bfloat16.
        memory: bytes of a device.

    It communicates nothing, and raises nothing.

    >>> from dtensor.clusters import CLUSTERS
    >>> large = cluster(CLUSTERS["h100"].device, 9.89e14, 80e9, node=72, inside=3.6e11, between=4e10)
    >>> large.profile.ranks_per_host
    72
    """
    links = Link.uniform(1e-5, 1e-6, inside, device.memory), Link.uniform(2e-5, 2e-6, between, device.memory)
    return Cluster(Profile({"nccl": links[0]}, {"nccl": links[1]}, node, {"meta": device}), peak, memory)


# 80 % of what data sheets say of one direction: NVLink 3 and 4, InfiniBand of 200 and 400 Gb/s per GPU, two links of 90 GB/s for
# a ring on an axis of the torus; of the TPU 70 % of 459 TFLOP/s in bfloat16 and 90 % of its memory's 2.77 TB/s.
_TPU = Device("TPU v5p", {"float64": 1e12, "float32": 5.7e13, "half": 3.2e14, "other": 6.4e14}, 2.5e12, 2e-6)
CLUSTERS = {
    "a100": cluster(DEVICES["A100"], 3.12e14, 80e9, 8, 2.4e11, 2e10),
    "h100": cluster(DEVICES["H100"], 9.89e14, 80e9, 8, 3.6e11, 4e10),
    "tpu-v5p": cluster(_TPU, 4.59e14, 95e9, 8960, 1.44e11, 5e9),
}


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks along mesh dims: ``tp`` innermost, then ``cp``, ``pp``, ``dp``; ``ep`` of those of ``dp`` cut experts, and stand
    between ``cp`` and ``pp``.

    Numbers alone: they communicate nothing.

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
        """One rank of it, without data."""
        return dry_run_on(cluster.profile, (self.dp // self.ep, self.pp, self.ep, self.cp, self.tp), DIMS)

    def check(self, model: Transformer, sequence: int, batch: int) -> None:
        """Raises PlanError: these do not divide the model, the sequence or the batch."""
        if said := list(self.wrong(model, sequence, batch)):
            raise PlanError("; ".join(said))

    def wrong(self, model: Transformer, sequence: int, batch: int) -> Iterator[str]:
        """What these do not divide, in words."""
        cut = self.tp * self.cp * (2 if self.cp > 1 else 1)  # an early and a late piece of the sequence
        for name, count, whole, what in (
            ("tp", self.tp, model.kv_heads, "heads of keys and values"),
            ("cp and tp", cut, sequence, "positions"),
            ("dp", self.dp, batch, "sequences"),
            ("ep", self.ep, model.experts, "experts"),
            ("ep", self.ep, self.dp, "ranks of dp"),
        ):
            if whole % count:
                yield f"{name} {count} does not divide {whole} {what}"
        if self.pp > model.layers:
            yield f"pp {self.pp} is more than {model.layers} layers"

    def __str__(self) -> str:
        return f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp}" + (f" (ep {self.ep})" if self.ep > 1 else "")


def all_degrees(model: Transformer, ranks: int, node: int, sequence: int, batch: int) -> Iterator[Degrees]:
    """Powers of two along all dims but ``dp``, which takes the rest; ``tp`` within a node; experts cut as far as they can be."""
    twos = [2**k for k in range(ranks.bit_length()) if ranks % 2**k == 0]
    for tp in (size for size in twos if size <= node):
        for cp in (size for size in twos if size == 1 or (size * tp * _LEAST <= sequence and size <= _RING)):
            for pp in (size for size in twos if not ranks % (tp * cp * size)):
                dp = ranks // (tp * cp * pp)
                for ep in twos if model.experts > 1 else (1,):
                    degrees = Degrees(tp, cp, pp, dp, ep)
                    if not any(degrees.wrong(model, sequence, batch)):
                        yield degrees
