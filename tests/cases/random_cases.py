"""Random cases: random numbers are independent of mesh and placements in both modes, in one process and on four."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_lists import S0, S1, CaseList, R, assert_full_value, get_line_mesh, get_square_mesh, local_tensors_by_rank
from compare_with_one_device import full_value
from pytorch_defect_cases import RAGGED
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import DTensor, Partial, Shard
from dtensor.errors import MeshError

CASES = CaseList()
case = CASES.case
LAYOUTS: tuple[list[Any], ...] = ([S0], [S1], [R], [RAGGED], [S0, S1], [S0, S0], [Shard(0, level=1), Shard(0, level=0)])


def distribute_values(x: torch.Tensor, placements: list[Any]) -> DTensor:
    return dt.distribute_tensor(x, get_line_mesh() if len(placements) == 1 else get_square_mesh(), placements)


def assert_same_draw_under_layouts(draw: Callable[[torch.Tensor], Any], x: torch.Tensor, rounded: bool = False) -> None:
    """Assert that ``draw`` gives equal bits on a plain tensor and under every layout, or equal up to the order of sums if
    ``rounded``.
    """
    torch.manual_seed(3)
    expected, after = draw(x.clone()), torch.rand(2)
    for placements in LAYOUTS:
        made = distribute_values(x, placements)
        torch.manual_seed(3)
        got = full_value(draw(made))
        assert torch.allclose(got, expected) if rounded else torch.equal(got, expected)
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
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.4),
    "several": lambda x: torch.rand_like(x) + F.dropout(torch.randn_like(x[1:]), 0.2).sum() * 0 + x.t().exponential_().t(),
    "own_generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(7)),
}
ROUNDED = ("gumbel_softmax", "orthogonal", "attention")
for _name, _draw in DRAWS.items():
    CASES[f"exact_{_name}"] = lambda draw=_draw, rounded=_name in ROUNDED: assert_same_draw_under_layouts(draw, X, rounded)


@case
def a_permutation_of_rows() -> None:
    torch.manual_seed(1)
    order = torch.randperm(5)
    for placements in LAYOUTS:
        torch.manual_seed(1)
        where = [R] * len(placements)
        assert_full_value(distribute_values(X, placements)[distribute_values(torch.randperm(5), where)], X[order])


def in_both_modes(fn: Callable[[], None]) -> None:
    for mode in ("exact", "counter"):
        CASES[f"{mode}_{fn.__name__}"] = lambda mode=mode: run_in_mode(mode, fn)


def run_in_mode(mode: str, fn: Callable[[], None]) -> None:
    with dt.random_mode(mode):
        fn()


@in_both_modes
def random_values_are_equal_under_every_layout() -> None:
    for name in ("normal_", "uniform_", "rand_like", "randint_like", "bernoulli_p", "dropout", "trunc_normal", "own_generator"):
        seen = []
        for placements in LAYOUTS:
            torch.manual_seed(5)
            seen.append(full_value(DRAWS[name](distribute_values(X, placements))))
        assert all(torch.equal(seen[0], other) for other in seen), name


@in_both_modes
def a_checkpointed_dropout_uses_the_same_mask() -> None:
    for placements in LAYOUTS:
        grads = []
        for recompute in (False, True):
            torch.manual_seed(2)
            x = distribute_values(X, placements).requires_grad_()
            layer = lambda x: F.dropout(x * x, 0.5)  # noqa: E731
            out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            out.sum().backward()
            grads.append(full_value(x.grad))
        assert torch.equal(*grads)


@in_both_modes
def generator_state_is_saved_and_restored() -> None:
    x = distribute_values(X, [S0])
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first = full_value(torch.rand_like(x))
    second = full_value(torch.rand_like(x))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(full_value(torch.rand_like(x)), first)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        other = full_value(torch.rand_like(x))
    assert torch.equal(full_value(torch.rand_like(x)), second)
    assert not torch.equal(other, second)


@in_both_modes
def partial_factories_equal_replicated_ones() -> None:
    torch.manual_seed(6)
    expected = full_value(dt.randn(5, 6, device_mesh=get_line_mesh(), placements=[R]))
    torch.manual_seed(6)
    assert_full_value(dt.randn(5, 6, device_mesh=get_line_mesh(), placements=[Partial()]), expected)


@in_both_modes
def reset_parameters_after_meta_init_is_equal_under_every_layout() -> None:
    seen = []
    for placements in ([R], [S0], [S1]):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(6, 5), nn.Embedding(7, 3))
        dt.distribute_module(
            module,
            get_line_mesh(),
            lambda name, m, mesh, where=placements: (
                [
                    m.register_parameter(key, nn.Parameter(dt.distribute_tensor(p, mesh, where if p.ndim > 1 else [S0])))
                    for key, p in m.named_parameters(recurse=False)
                ]
                and None
            ),
        )
        module.to_empty(device="cpu")
        torch.manual_seed(0)
        for m in module:
            m.reset_parameters()
        seen.append([full_value(p) for p in module.parameters()])
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))
    if dt.random.RANDOM_MODE.mode == "exact":
        torch.manual_seed(0)
        expected = [p.detach() for p in nn.Sequential(nn.Linear(6, 5), nn.Embedding(7, 3)).parameters()]
        assert all(torch.equal(a, b) for a, b in zip(seen[0], expected, strict=True))


@case
def ranks_seeded_differently_draw_alike() -> None:
    """Check that the ranks of a submesh share its first draw, which does not make the seeds of the whole mesh equal."""
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh._root.seeded.clear()  # as at the start
    if dist.is_initialized():
        torch.manual_seed(dist.get_rank())
    for part, placements in ((mesh["tp"], [R]), (mesh, [R, R])):
        drawn = dt.rand(5, device_mesh=part, placements=placements)
        for piece in local_tensors_by_rank(drawn).values():
            mine = DTensor.from_local(piece, part, [Partial("max")] * part.ndim, shape=(5,))
            assert torch.equal(full_value(mine.redistribute(placements=placements)), full_value(drawn))


@case
def manual_seed_with_different_seeds_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if dist.is_initialized():  # in one process there is one generator
        stage = mesh.get_local_rank("dp")
        dt.manual_seed(stage, mesh["tp"])
        with pytest.raises(MeshError, match="pass the same seed"):
            dt.manual_seed(stage, mesh)
    dt.manual_seed(3, mesh)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert_full_value(dt.rand(4, device_mesh=mesh, placements=[R, S0]), expected)
