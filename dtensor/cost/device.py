"""What local operations take on a kind of device: FLOPs per second by dtype, bytes per second of memory, seconds of a launch.

The built-in numbers are what one rank gets, in orders of magnitude: of GPUs 70 % of the peak of dense products and 90 % of that
of memory in NVIDIA's data sheets (A100 80GB SXM, H100 SXM, H200 SXM), ``float32`` without TF32, as torch multiplies unless told
otherwise; of a CPU one core with AVX2, as ``torchrun`` gives each rank one thread. ``python -m dtensor calibrate`` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

KINDS = ("float64", "float32", "half", "other")  # of arithmetic; half: 16 bits; other: integers and 8 bits

# dtype -> its kind, and how many products of that kind one of its own takes
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
    """One kind's constants.

    Attributes:
        name: as a person knows it.
        flops: per kind of arithmetic, FLOPs per second of large matrix products.
        memory: bytes per second, read or written.
        launch: seconds that an operation takes if it does nothing.

    >>> DEVICES["H100"].seconds(2 * 4096**3, 3 * 4096**2 * 2, torch.bfloat16) < 3e-4
    True
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    launch: float

    def rate(self, dtype: torch.dtype) -> float:
        """FLOPs per second, a multiplication and an addition being two."""
        kind, parts = _ARITHMETIC.get(dtype, ("other", 1))
        return self.flops[kind] / parts

    def seconds(self, flops: float, nbytes: float, dtype: torch.dtype) -> float:
        """Time of one operation: of its arithmetic or of its memory, whichever is longer, and its launch."""
        return max(flops / self.rate(dtype), nbytes / self.memory) + self.launch


def _device(name: str, flops: tuple[float, ...], memory: float, launch: float) -> Device:
    return Device(name, dict(zip(KINDS, flops, strict=True)), memory, launch)


DEVICES = {
    device.name: device
    for device in (
        _device("CPU", (2.5e10, 5e10, 2.5e10, 2e9), 8e9, 5e-6),
        _device("A100", (1.36e13, 1.36e13, 2.18e14, 4.4e14), 1.8e12, 4e-6),
        _device("H100", (4.7e13, 4.7e13, 6.9e14, 1.38e15), 3.0e12, 4e-6),
        _device("H200", (4.7e13, 4.7e13, 6.9e14, 1.38e15), 4.3e12, 4e-6),
    )
}
STANDS_FOR = {"cpu": "CPU", "cuda": "H100", "meta": "H100"}  # a dry run stands for a cluster of H100


def named(name: str) -> str:
    """The kind among ``DEVICES`` that a device calling itself ``name`` is, or comes nearest to.

    >>> named("NVIDIA A100-SXM4-80GB"), named("NVIDIA GB10")
    ('A100', 'H100')
    """
    return next((kind for kind in DEVICES if kind in name.upper()), "H100")


def parsed(read: Any) -> dict[str, Device]:
    """Devices by torch's type of device, of a profile that was read.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(read, dict):
        raise ValueError(f"devices by type are expected, got {type(read).__name__}")
    try:
        return {
            kind: _device(
                str(given["name"]),
                tuple(positive(given["flops"][k]) for k in KINDS),
                positive(given["memory"]),
                positive(given["launch"]),
            )
            for kind, given in read.items()
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"a device needs name, flops of {', '.join(KINDS)}, memory and launch: {error!r}") from None


def positive(value: Any) -> float:
    """A rate, or a time that is not 0.

    Raises:
        ValueError: it is none.
    """
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"no time or rate: {value!r}")
    return number
