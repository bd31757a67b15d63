"""Sample syntax: samples written as calls, many on a line.

    mm: {f/i/c}[5, 6], {f/i/c}[6, 7] | f[6, 5].t(), f[7, 6].t() | f[5, 0], f[0, 7]
    sum!: f[5, 6, 7]{/, dim=[0]/, dim=[0, 2], keepdim=True}

A line has names of operators, then the arguments of their calls, separated by ``|``. A continuation line begins with a blank.
``f[5, 6]`` is a tensor of floats; all tensors of a sample differ. ``{a/b}`` stands for both alternatives. A group that occurs
several times in a sample has the same choice everywhere; a group in an operator's name has the same choice in the whole line. The
suffix ``!`` (of an operator or a sample) turns off the comparison of gradients, ``?`` that of values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .sample import Sample, Samples
from .schema_samples import make_tensor

_GROUP = re.compile(r"\{([^}]*)\}")
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


@dataclass(frozen=True, slots=True)
class RandomTensors:
    """Random tensors by shape: ``f[5, 6]``. Each has other values."""

    seeds: Iterator[int]
    dtype: torch.dtype = torch.float64
    low: float = -2.0
    high: float = 2.0

    def __getitem__(self, shape: int | tuple[int, ...]) -> torch.Tensor:
        return make_tensor((shape,) if isinstance(shape, int) else shape, self.dtype, next(self.seeds), self.low, self.high)


@dataclass(frozen=True, slots=True)
class RandomIntegers:
    """Random integers from ``low`` to ``high - 1``: ``below(7)[5, 6]``."""

    high: int
    low: int = 0
    seed: int = 5

    def __getitem__(self, shape: int | tuple[int, ...]) -> torch.Tensor:
        sizes = (shape,) if isinstance(shape, int) else shape
        return torch.randint(self.low, self.high, sizes, generator=torch.Generator().manual_seed(self.seed))


def distinct_integers(high: int, count: int) -> torch.Tensor:
    """Return ``count`` distinct integers below ``high``."""
    return torch.randperm(high, generator=torch.Generator().manual_seed(3))[:count]


def _syntax_words() -> dict[str, Any]:
    """Return the names that samples may use."""
    make_random = partial(RandomTensors, itertools.count())
    f = make_random()
    return _DTYPES | {
        "f": f,
        "i": make_random(torch.int64),
        "b": make_random(torch.bool),
        "c": make_random(torch.complex128),
        "h": make_random(torch.float16),
        "s": make_random(torch.float32),
        "u": make_random(torch.uint8),
        "p": make_random(low=0.1, high=0.9),  # probabilities
        "w": make_random(low=0.5, high=2.0),  # weights
        "below": RandomIntegers,
        "distinct": distinct_integers,
        "like": lambda x: f[tuple((x[0] if isinstance(x, tuple) else x).shape)],  # a gradient of an operator's result
        "t": partial(torch.tensor),
        "aten": torch.ops.aten,
        "torch": torch,
        "INF": float("inf"),
        "NAN": float("nan"),
    }


def sample_table(text: str, **words: Any) -> Samples:
    """Return the samples of each operator named in ``text``; ``words``: further names that the samples use."""
    samples_of: Samples = {}
    for line in re.split(r"\n(?=\S)", text.strip()):
        names, _, samples = re.sub(r"\n\s+", " ", line).partition(":")
        for name, calls in _expand_names(names, samples):
            flags = name[len(name.rstrip("!?")) :]
            for sample in calls.split(" | "):
                builders = [partial(_evaluate_sample, call, flags, words) for call in _expand_groups(sample.strip())]
                samples_of.setdefault(name.rstrip("!?"), []).extend(builders)
    return samples_of


def _expand_names(names: str, samples: str) -> Iterator[tuple[str, str]]:
    """Yield pairs of an operator and its samples, for all alternatives of the braces."""
    for name in names.split():
        groups = _GROUP.findall(name)
        for line in _expand_groups(f"{name}:{samples}", groups):
            operator, _, calls = line.partition(":")
            yield operator, calls


def _expand_groups(text: str, groups: list[str] | None = None) -> list[str]:
    """Return ``text`` for each choice of its groups, or only of ``groups``. Equal groups have the same choice."""
    distinct_groups = list(dict.fromkeys(_GROUP.findall(text) if groups is None else groups))
    texts = []
    for choice in itertools.product(*(group.split("/") for group in distinct_groups)):
        expanded = text
        for group, word in zip(distinct_groups, choice, strict=True):
            expanded = expanded.replace("{" + group + "}", word)
        texts.append(expanded)
    return texts


def _evaluate_sample(text: str, flags: str, words: dict[str, Any]) -> Sample:
    """Return the sample that a line describes; ``!`` means without gradients, ``?`` without values."""
    call = text.lstrip("!? ")
    flags += text.removesuffix(call)
    try:
        args, kwargs = eval(f"call({call})", _syntax_words() | words | {"call": lambda *args, **kwargs: (args, kwargs)})
    except Exception as error:
        error.add_note(f"in the sample {call!r}")
        raise
    return Sample(args, kwargs, call, values="?" not in flags, gradients="!" not in flags)
