"""Device constants of the cost model: FLOPs per second by dtype, memory bytes per second, seconds of a kernel launch.

The built-in numbers are orders of magnitude for one rank. GPUs: 70 % of the peak of dense products and 90 % of the memory
bandwidth in NVIDIA's data sheets (A100 80GB SXM, H100 SXM, H200 SXM); ``float32`` without TF32, which is torch's default. CPU:
one core with AVX2, because ``torchrun`` gives each rank one thread. ``python -m dtensor calibrate`` measures these numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

ARITHMETIC_KINDS = ("float64", "float32", "half", "other")  # kinds of arithmetic; half: 16 bits; other: integers and 8 bits

# dtype -> kind of arithmetic, and number of products of that kind in one product of the dtype
_ARITHMETIC = {
    torch.float64: ("float64", 1),
    torch.float32: ("float32", 1),
    torch.float16: ("half", 1),
    torch.bfloat16: ("half", 1),
    torch.complex128: ("float64", 4),
    torch.complex64: ("float32", 4),
    torch.complex32: ("half", 4),
}


@dataclass(frozen=True, slots=True)
class Device:
    """Cost constants of one kind of device.

    Attributes:
        name: name for reports.
        flops: per kind of arithmetic, FLOPs per second of large matrix products.
        memory: bytes per second, read or written.
        launch: seconds of an operation that does nothing.

    >>> DEVICES["H100"].seconds(2 * 4096**3, 3 * 4096**2 * 2, torch.bfloat16) < 3e-4
    True
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    launch: float

    def rate(self, dtype: torch.dtype) -> float:
        """Return the FLOPs per second of large matrix products in ``dtype``. A multiplication and an addition are two FLOPs."""
        kind, parts = _ARITHMETIC.get(dtype, ("other", 1))
        return self.flops[kind] / parts

    def seconds(self, flops: float, nbytes: float, dtype: torch.dtype) -> float:
        """Return the estimated seconds of one operation: the longer of its arithmetic and its memory traffic, plus its launch."""
        return max(flops / self.rate(dtype), nbytes / self.memory) + self.launch


def _make_device(name: str, flops: tuple[float, ...], memory: float, launch: float) -> Device:
    return Device(name, dict(zip(ARITHMETIC_KINDS, flops, strict=True)), memory, launch)


DEVICES = {
    device.name: device
    for device in (
        _make_device("CPU", (2.5e10, 5e10, 2.5e10, 2e9), 8e9, 5e-6),
        _make_device("A100", (1.36e13, 1.36e13, 2.18e14, 4.4e14), 1.8e12, 4e-6),
        _make_device("H100", (4.7e13, 4.7e13, 6.9e14, 1.38e15), 3.0e12, 4e-6),
        _make_device("H200", (4.7e13, 4.7e13, 6.9e14, 1.38e15), 4.3e12, 4e-6),
    )
}
DEFAULT_DEVICE = {"cpu": "CPU", "cuda": "H100", "meta": "H100"}  # a dry run simulates a cluster of H100


def nearest_device(name: str) -> str:
    """Return the entry of ``DEVICES`` for a device with this name, or the one that is most similar.

    >>> nearest_device("NVIDIA A100-SXM4-80GB"), nearest_device("NVIDIA GB10")
    ('A100', 'H100')
    """
    return next((kind for kind in DEVICES if kind in name.upper()), "H100")


def parse_devices(read: Any) -> dict[str, Device]:
    """Return the measured devices of a profile read from JSON, by torch's device type.

    Raises:
        ValueError: ``read`` is not a table of devices.
    """
    if not isinstance(read, dict):
        raise ValueError(f"devices by type are expected, got {type(read).__name__}")
    try:
        return {
            kind: _make_device(
                str(entry["name"]),
                tuple(parse_positive(entry["flops"][k]) for k in ARITHMETIC_KINDS),
                parse_positive(entry["memory"]),
                parse_positive(entry["launch"]),
            )
            for kind, entry in read.items()
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"a device needs name, flops of {', '.join(ARITHMETIC_KINDS)}, memory and launch: {error!r}") from None


def parse_positive(value: Any) -> float:
    """Return ``value`` as a positive, finite number: a rate or a time of a profile.

    Raises:
        ValueError: ``value`` is not.
    """
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"a time or rate must be a positive, finite number, got {value!r}")
    return number
