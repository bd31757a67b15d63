"""The law of partial rows: terms that meet zeros, infinities and NaN, in the terms, in the other operands and in numbers, give NaN
and infinities where one device does. Whatever row is free is taken, so that every row of every rule is tried."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor import DTensor, Partial, Replicate
from dtensor.comm import per_rank
from dtensor.nested import replace, tensors
from dtensor.operators import operator_of
from dtensor.rules import rules
from dtensor.testing import Sample
from dtensor.testing.cases import mesh_of
from dtensor.testing.differences import close
from dtensor.testing.samples import samples_of
from dtensor.testing.variants import Variant, variants

NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([0.0, -0.0, INF, -INF, NAN])
FINITE = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, -1.0])
NUMBERS = (0.0, -0.0, INF, -INF, NAN, 1e-320, 1e300)
OPS = ("sum", "avg", "max", "min", "product")
RANKS = 3
CASES_PER_RULE = 10
WITH_ROWS = sorted(name for name, rule in rules().items() if rule.partials)

pytestmark = pytest.mark.filterwarnings("ignore")


def drawn(like: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Of the shape of ``like``: ``share`` of the elements special."""
    if not like.is_floating_point() or like.itemsize < 2:
        return like.clone()
    pick = torch.randint(0, len(SPECIAL), like.shape, generator=generator)
    finite = FINITE[torch.randint(0, len(FINITE), like.shape, generator=generator)]
    special = torch.rand(like.shape, generator=generator) < share
    made = torch.where(special, SPECIAL[pick], finite)
    return torch.empty_like(like).copy_(made)


def in_terms(like: Tensor, op: str, share: float, generator: torch.Generator) -> DTensor:
    """A value whose terms, one on each rank, are drawn."""
    terms = per_rank([drawn(like, share, generator) for _ in range(RANKS)])
    return DTensor.from_local(terms, mesh_of((RANKS,)), [Partial(op)])


def whole(like: Tensor, share: float, generator: torch.Generator) -> DTensor:
    return dt.distribute_tensor(drawn(like, share, generator), mesh_of((RANKS,)), [Replicate()])


def choices(xs: list[Tensor]) -> list[tuple[str | None, ...]]:
    """Each floating operand in terms by itself, two by two, and all."""
    floating = [i for i, x in enumerate(xs) if x.is_floating_point() and x.itemsize > 1]
    picks = [{i} for i in floating] + [{i, j} for i in floating for j in floating if i < j] + [set(floating)]
    return [tuple(op if i in pick else None for i in range(len(xs))) for op in OPS for pick in picks if pick]


def same_outcome(call: Callable[..., Any], args: Any, kwargs: Any, written: bool) -> str | None:
    """What differs between ``call`` on DTensors and on their values; None where plain torch refuses them."""
    plain_args, plain_kwargs = replace(lambda x: x.full_tensor().clone() if isinstance(x, DTensor) else x, (args, kwargs))
    torch.manual_seed(0)
    try:
        expected = call(*plain_args, **plain_kwargs)
    except (RuntimeError, IndexError, ValueError):
        return None
    torch.manual_seed(0)
    got = call(*args, **kwargs)
    pairs = list(
        zip(
            tensors((got, args, kwargs) if written else got),
            tensors((expected, plain_args, plain_kwargs) if written else expected),
            strict=True,
        )
    )
    for mine, right in pairs:
        value = mine.full_tensor() if isinstance(mine, DTensor) else mine
        parts = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (value, right)]  # inf + 0j is no number
        if not close(*parts):
            return f"{value.tolist()}, not {right.tolist()}"
    return None


def report(variant: Variant, ops: tuple[str | None, ...], share: float, seed: int) -> str | None:
    generator = torch.Generator().manual_seed(seed)
    following = iter(ops)

    def place(x: Tensor) -> DTensor:
        op = next(following)
        return whole(x, share, generator) if op is None else in_terms(x, op, share, generator)

    args, kwargs = replace(place, (variant.sample.args, variant.sample.kwargs))
    found = same_outcome(variant.call, args, kwargs, variant.writes)
    return found and f"{variant.name} {variant.sample.note} under {ops}, {args}, {kwargs} seed {seed}: {found}"


def cases(name: str, limit: int) -> Iterator[tuple[Variant, tuple[str | None, ...], float, int]]:
    rng = random.Random(zlib.crc32(name.encode()))
    every = [
        (variant, ops, share)
        for sample in samples_of(name)
        if sample.values
        for variant in variants(name, sample)
        for ops in choices(tensors((variant.sample.args, variant.sample.kwargs)))
        for share in (0.05, 0.4)
    ]
    for variant, ops, share in rng.sample(every, min(limit, len(every))):
        yield variant, ops, share, rng.randrange(1 << 30)


@pytest.mark.parametrize("name", WITH_ROWS)
def test_special_values_pass_terms_as_they_pass_one_device(name: str) -> None:
    for variant, ops, share, seed in cases(name, CASES_PER_RULE):
        assert (found := report(variant, ops, share, seed)) is None, found
