"""Random numbers: independent of mesh and placements in both modes; in one process and, unchanged, on four."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cases_defects import RAGGED, S0, S1, R, line, run_all, square
from cases_gloo import equal
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import DTensor, Partial, Shard

CASES: dict[str, Callable[[], None]] = {}
LAYOUTS: tuple[list[Any], ...] = ([S0], [S1], [R], [RAGGED], [S0, S1], [S0, S0], [Shard(0, level=1), Shard(0, level=0)])


def case(fn: Callable[[], None]) -> Callable[[], None]:
    CASES[fn.__name__] = fn
    return fn


def put(x: torch.Tensor, placements: list[Any]) -> DTensor:
    return dt.distribute_tensor(x, line() if len(placements) == 1 else square(), placements)


def plain(x: Any) -> torch.Tensor:
    whole = x.detach().full_tensor() if isinstance(x, DTensor) else x
    return whole.shards[0] if isinstance(whole, dt.PerRank) else whole


def as_on_one_device(draw: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
    """``draw`` gives the same on a plain tensor and under every layout, and leaves the generator alike."""
    torch.manual_seed(3)
    expected, after = draw(x.clone()), torch.rand(2)
    for placements in LAYOUTS:
        made = put(x, placements)
        torch.manual_seed(3)
        equal(draw(made).detach(), expected)
        assert torch.equal(torch.rand(2), after)


X = torch.arange(30.0).reshape(5, 6) / 30
DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "bernoulli": torch.bernoulli,
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.4),
    "dropout": lambda x: F.dropout(x, 0.4),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial_with_replacement": lambda x: torch.multinomial(x, 9, replacement=True),
    "normal_around": lambda x: torch.normal(x, 0.5),
    "poisson": lambda x: torch.poisson(x * 4),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "permutation": lambda x: x[torch.argsort(torch.rand_like(x[:, 0]))],
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda x: nn.init.sparse_(x, 0.3),
    "dirac": lambda x: nn.init.eye_(x) + torch.rand_like(x),
    "own_generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(7)),
}
for _name, _draw in DRAWS.items():
    CASES[f"exact_{_name}"] = lambda draw=_draw: as_on_one_device(draw, X)  # type: ignore[misc]


@case
def a_permutation_of_rows() -> None:
    torch.manual_seed(1)
    order = torch.randperm(5)
    for placements in LAYOUTS:
        torch.manual_seed(1)
        where = [R] * len(placements)
        equal(put(X, placements)[put(torch.randperm(5), where)], X[order])


def in_both_modes(fn: Callable[[], None]) -> None:
    for mode in ("exact", "counter"):
        CASES[f"{mode}_{fn.__name__}"] = lambda mode=mode: _in(mode, fn)  # type: ignore[misc]


def _in(mode: str, fn: Callable[[], None]) -> None:
    with dt.random_mode(mode):
        fn()


@in_both_modes
def draws_are_the_same_under_every_layout() -> None:
    for name in ("normal_", "uniform_", "rand_like", "randint_like", "bernoulli_p", "dropout", "trunc_normal", "own_generator"):
        seen = []
        for placements in LAYOUTS:
            torch.manual_seed(5)
            seen.append(plain(DRAWS[name](put(X, placements))))
        assert all(torch.equal(seen[0], other) for other in seen), name


@in_both_modes
def a_checkpointed_layer_drops_the_same() -> None:
    for placements in LAYOUTS:
        grads = []
        for recompute in (False, True):
            torch.manual_seed(2)
            x = put(X, placements).requires_grad_()
            layer = lambda x: F.dropout(x * x, 0.5)  # noqa: E731
            out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            out.sum().backward()
            grads.append(plain(x.grad))
        assert torch.equal(*grads)


@in_both_modes
def states_are_saved_and_restored() -> None:
    x = put(X, [S0])
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first = plain(torch.rand_like(x))
    second = plain(torch.rand_like(x))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(plain(torch.rand_like(x)), first)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        other = plain(torch.rand_like(x))
    assert torch.equal(plain(torch.rand_like(x)), second)
    assert not torch.equal(other, second)


@in_both_modes
def factories_of_partial_tensors() -> None:
    torch.manual_seed(6)
    expected = plain(dt.randn(5, 6, device_mesh=line(), placements=[R]))
    torch.manual_seed(6)
    equal(dt.randn(5, 6, device_mesh=line(), placements=[Partial()]), expected)


def main() -> list[str]:
    """Runs all cases; their names."""
    return run_all(CASES)
