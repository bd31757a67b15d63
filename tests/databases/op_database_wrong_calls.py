"""Wrong calls made from the samples of the operator database: another size, dtype or number of dims of a tensor, or other
numbers. If plain torch raises, the operator on DTensors must raise the same type; else the results must be equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import op_database as db
import torch

from dtensor.base.tensor_tree import map_tensors, tensor_leaves

DTYPES = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128, torch.float16, torch.uint8, torch.int32)
INTEGERS = (-1, 0, 1, 2, -2, 7, -7, 100)
FLOATS = (0.0, -1.0, 2, float("inf"), 1.5, 3)
# Plain torch reads or writes outside of its arguments there: it crashes or returns uninitialized memory.
OUT_OF_BOUNDS = (
    "_batch_norm_with_update",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "lu_unpack",
    "_segment_reduce_*",
    "nn_functional_grid_sample",
    "grid_sampler_*",
    "nn_functional_multilabel_margin_loss",
    "nn_functional_ctc_loss",
)
Path = tuple[Any, ...]


def cases_of(entry: Any, setting: db.Setting) -> Iterator[db.Case]:
    """Yield the cases of an entry."""
    from fnmatch import fnmatch

    if not any(fnmatch(entry.formatted_name, pattern) for pattern in OUT_OF_BOUNDS):
        yield from db.cases_of(entry, setting, run_case)


def run_case(name: str, setting: db.Setting, position: int, sample: db.Sample) -> db.Case | None:
    """Run the sample changed by :func:`wrong`; return None for arguments that cannot be distributed."""
    if any(x.layout is not torch.strided or x.is_quantized for x in tensor_leaves(sample.given)):
        return None
    with db.quiet():
        changed = wrong(sample, db.rng_of(name, setting, position, "wrong"))
    return db.run_case(name, setting, position, changed)


def wrong(sample: db.Sample, rng: random.Random) -> db.Sample:
    """Return the sample with one or two changed arguments, without gradients."""
    given: Any = sample.given
    for _ in range(rng.choice((1, 1, 2))):
        numbers, count = list(paths_of_numbers(given)), len(tensor_leaves(given))
        if numbers and (not count or rng.random() < 0.4):
            given = put(given, rng.choice(numbers), rng)
        elif count:
            given = map_tensors(changing(rng.randrange(count), rng), given)
    return replace(sample.of(given), gradients=False)


def changing(picked: int, rng: random.Random) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that changes the size, dtype or number of dims of one tensor, by position."""
    kind, seen = rng.choice(("size", "size", "dtype", "dims")), 0

    def change(x: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen - 1 != picked:
            return x
        if kind == "dtype":
            return x.to(rng.choice(DTYPES))
        if kind == "dims":
            return x[0].clone() if x.ndim and x.shape[0] and rng.random() < 0.5 else x.unsqueeze(rng.randint(0, x.ndim)).clone()
        if not x.numel() or not x.ndim:
            return x
        dim = rng.randrange(x.ndim)
        size = x.shape[dim]
        return x.index_select(dim, torch.arange(rng.choice((0, 1, size - 1, size + 1, 2 * size))) % size)

    return change


def paths_of_numbers(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of Python numbers in nested arguments."""
    if isinstance(value, (int, float)):
        yield path
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of_numbers(item, (*path, key))


def put(value: Any, path: Path, rng: random.Random) -> Any:
    """Return ``value`` with another number at ``path``."""
    if not path:
        return not value if isinstance(value, bool) else rng.choice(INTEGERS if isinstance(value, int) else FLOATS)
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: put(value[key], tuple(rest), rng)}
    items = [put(item, tuple(rest), rng) if i == key else item for i, item in enumerate(value)]
    return items if isinstance(value, list) else tuple(items)
