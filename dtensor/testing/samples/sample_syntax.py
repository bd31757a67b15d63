"""``table``: samples written as calls are, many on a line.

    mm: {f/i/c}[5, 6], {f/i/c}[6, 7] | f[6, 5].t(), f[7, 6].t() | f[5, 0], f[0, 7]
    sum!: f[5, 6, 7]{/, dim=[0]/, dim=[0, 2], keepdim=True}

Operators, and what stands between the brackets of their calls, parted by ``|``; a further line begins with a blank. ``f[5, 6]``
is a tensor of floats, no two of a sample alike. ``{a/b}`` is each of these, alike wherever it stands in a sample, or in the line
if in an operator's name. ``!`` (of an operator or a sample): gradients are not compared; ``?``: values are not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .of_schema import tensor
from .sample import Sample, Samples

_GROUP = re.compile(r"\{([^}]*)\}")
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@dataclass(frozen=True, slots=True)
class Drawn:
    """``drawn[5, 6]``: a tensor of this shape, each one with other values."""

    seeds: Iterator[int]
    dtype: torch.dtype = torch.float64
    low: float = -2.0
    high: float = 2.0

    def __getitem__(self, shape: int | tuple[int, ...]) -> torch.Tensor:
        return tensor((shape,) if isinstance(shape, int) else shape, self.dtype, next(self.seeds), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Below:
    """``below(7)[5, 6]``: integers from ``low`` on."""

    high: int
    low: int = 0
    seed: int = 5

    def __getitem__(self, shape: int | tuple[int, ...]) -> torch.Tensor:
        sizes = (shape,) if isinstance(shape, int) else shape
        return torch.randint(self.low, self.high, sizes, generator=torch.Generator().manual_seed(self.seed))


def distinct(high: int, count: int) -> torch.Tensor:
    """``count`` integers below ``high``."""
    return torch.randperm(high, generator=torch.Generator().manual_seed(3))[:count]


def _words() -> dict[str, Any]:
    """What samples are written with."""
    made = partial(Drawn, itertools.count())
    f = made()
    return _DTYPES | {
        "f": f,
        "i": made(torch.int64),
        "b": made(torch.bool),
        "c": made(torch.complex128),
        "h": made(torch.float16),
        "s": made(torch.float32),
        "u": made(torch.uint8),
        "p": made(low=0.1, high=0.9),  # probabilities
        "w": made(low=0.5, high=2.0),  # weights
        "below": Below,
        "distinct": distinct,
        "like": lambda x: f[tuple((x[0] if isinstance(x, tuple) else x).shape)],  # a gradient of what an operator gives
        "t": partial(torch.tensor),
        "aten": torch.ops.aten,
        "torch": torch,
        "INF": float("inf"),
        "NAN": float("nan"),
    }


def table(text: str, **words: Any) -> Samples:
    """The samples of each operator named in ``text``; ``words``: what they are written with beside the usual."""
    found: Samples = {}
    for line in re.split(r"\n(?=\S)", text.strip()):
        names, _, samples = re.sub(r"\n\s+", " ", line).partition(":")
        for name, own in _each(names, samples):
            flags = name[len(name.rstrip("!?")) :]
            for sample in own.split(" | "):
                made = [partial(_sample, given, flags, words) for given in _alternatives(sample.strip())]
                found.setdefault(name.rstrip("!?"), []).extend(made)
    return found


def _each(names: str, samples: str) -> Iterator[tuple[str, str]]:
    for name in names.split():
        groups = _GROUP.findall(name)
        for whole in _alternatives(f"{name}:{samples}", groups):
            own, _, rest = whole.partition(":")
            yield own, rest


def _alternatives(text: str, groups: list[str] | None = None) -> list[str]:
    """``text`` with each choice of its groups, or of these; a group that occurs again is chosen alike."""
    named = list(dict.fromkeys(_GROUP.findall(text) if groups is None else groups))
    found = []
    for choice in itertools.product(*(group.split("/") for group in named)):
        made = text
        for group, word in zip(named, choice, strict=True):
            made = made.replace("{" + group + "}", word)
        found.append(made)
    return found


def _sample(text: str, flags: str, words: dict[str, Any]) -> Sample:
    call = text.lstrip("!? ")
    flags += text.removesuffix(call)
    try:
        args, kwargs = eval(f"call({call})", _words() | words | {"call": lambda *args, **kwargs: (args, kwargs)})
    except Exception as error:
        error.add_note(f"in the sample {call!r}")
        raise
    return Sample(args, kwargs, call, values="?" not in flags, gradients="!" not in flags)
