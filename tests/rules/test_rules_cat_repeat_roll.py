"""Rules of cat, stack, repeat, roll, flip and pad under all placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule_tables import (
    MESHES,
    RuleCase,
    check_many_placements,
    check_placement,
    get_collective_kinds,
    get_received_bytes,
    make_floats,
    make_integers,
)
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import check

X, Y, Z = make_floats(5, 6), make_floats(3, 6, seed=1), make_integers(5, 6)
F = torch.nn.functional

CASES = {
    "cat": RuleCase(lambda x, y: torch.cat([x, y]), (X, Y)),
    "cat along the other dim": RuleCase(lambda x, y: torch.cat([x, y, x], 1), (X, make_floats(5, 2, seed=1))),
    "cat of integers": RuleCase(lambda x, y: torch.cat([x, y], -2), (Z, make_integers(1, 6, seed=1))),
    "cat promotes": RuleCase(lambda x, y: torch.cat([x, y]), (X, Z)),
    "cat with an empty tensor": RuleCase(lambda x, y: torch.cat([x, y, x]), (X, make_floats(0)), ("sum",)),
    "split and cat": RuleCase(lambda x: torch.cat([part * 2 for part in x.split([1, 3, 1])]), (X,)),
    "stack": RuleCase(lambda x, y: torch.stack([x, y], 1), (X, make_floats(5, 6, seed=1))),
    "hstack and vstack": RuleCase(lambda x, y: (torch.hstack([x, y]), torch.vstack([x, y]), torch.dstack([x, y])), (X, X * 2)),
    "column_stack": RuleCase(lambda x, y: torch.column_stack([x, y]), (X, make_floats(5, seed=1))),
    "repeat": RuleCase(lambda x: (x.repeat(2, 1), x.repeat(3, 1, 2)), (X,)),
    "tile": RuleCase(lambda x: x.tile(2), (X,)),
    "repeat_interleave": RuleCase(lambda x: x.repeat_interleave(2, 1), (X,)),
    "roll": RuleCase(lambda x: (x.roll(2, 0), x.roll((1, -1), (0, 1)), x.roll(3)), (X,)),
    "flip": RuleCase(lambda x: (x.flip(0), x.fliplr()), (X,)),
    "rot90": RuleCase(lambda x: (x.rot90(), x.rot90(2), x.rot90(-1)), (X,)),
    "pad": RuleCase(lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 0, 3, 1), value=2.5)), (X,)),
    "pad and crop": RuleCase(lambda x: F.pad(x, (-2, 1, 2, -4)), (X,)),
    "pad with value 1": RuleCase(lambda x: F.pad(x, (1, 1), value=1.0), (X,), ("sum", "product", "avg")),
    "triangles": RuleCase(lambda x: (x.tril(1), x.triu(-2), x.t().tril()), (X,)),
    "triangles in place": RuleCase(lambda x: x.tril_(-1), (X,), written=True),
    "diag": RuleCase(lambda x: (x.diag(1), x[0].diag(-1)), (X,)),
    "diag_embed": RuleCase(lambda x: torch.diag_embed(x, 1, 0, 2), (X,)),
    "trace": RuleCase(lambda x: x.trace(), (X,)),
    "block_diag": RuleCase(lambda x, y: torch.block_diag(x, y), (X, Y), ("sum",)),
    "meshgrid": RuleCase(lambda x, y: torch.meshgrid(x, y, indexing="ij"), (make_floats(5), make_floats(6))),
    "pixel_shuffle": RuleCase(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2) * 2, 2), (make_floats(2, 8, 3, 1),)),
}


@pytest.mark.filterwarnings("ignore:.*has no sharding rule.*:UserWarning")
@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(CASES, MESHES, every=3), ids=str)
def test_cat_repeat_roll_values_and_gradients_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(CASES[name], mesh_shape, 7)


R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
LOCAL_CASES: list[tuple[str, Callable[..., Any], list[Any], list[Any]]] = [
    ("cat along the unsharded dim", lambda x: torch.cat([x, x], 1), [S0], [S0]),
    ("cat of splits", lambda x: torch.cat(x.split([1, 3, 1])), [S0], [S0]),
    ("cat of chunks", lambda x: torch.cat(x.chunk(3)), [Shard(0, sizes=(4, 1))], [Shard(0, sizes=(4, 1))]),
    ("cat of partial sums", lambda x: torch.cat([x, x]), [P], [P]),
    ("cat of partial averages and ones", lambda x: torch.cat([x, torch.ones_like(x)]), [Partial("avg")], [Partial("avg")]),
    ("stack", lambda x: torch.stack([x, x]), [S0], [S1]),
    ("pad of the sharded dim", lambda x: F.pad(x, (0, 0, 2, 1)), [S0], [Shard(0, sizes=(5, 3))]),
    ("repeat of unsharded dims", lambda x: x.repeat(3, 1, 2), [S0], [S1]),
    ("triangle", lambda x: x.tril(), [S1], [S1]),
    ("trace", lambda x: x.trace(), [S0], [P]),
    ("zero padding of partial sums", lambda x: F.pad(x, (1, 1)), [P], [P]),
]


@pytest.mark.parametrize(("fn", "given", "expected"), [row[1:] for row in LOCAL_CASES], ids=[row[0] for row in LOCAL_CASES])
def test_cat_repeat_pad_keep_shards_without_communication(fn: Callable[..., Any], given: list[Any], expected: list[Any]) -> None:
    outcome = check_placement(fn, (X,), (2,), [given])
    assert get_collective_kinds(outcome) == []
    layout = outcome.layouts[0]
    assert layout.placements == dt.Layout.of(layout.mesh, expected, layout.shape).placements


def test_cat_along_sharded_dim_sends_only_rows_that_change_rank() -> None:
    outcome = check_placement(lambda x, y: torch.cat([x, y]), (X, X), (2,), [[S0], [S0]])
    assert outcome.layouts[0].placements == (S0,)
    assert get_collective_kinds(outcome) == ["all_to_all"]  # both operands in one collective
    assert get_received_bytes(outcome) <= 2 * 3 * 6 * 8  # of 5 rows each, 2 and 3 move


def test_cat_of_tokens_to_sharded_cache_adds_them_to_the_last_shard() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    cache = dt.distribute_tensor(X.clone(), mesh, [S0])
    token = dt.distribute_tensor(make_floats(1, 6), mesh, [R])
    with dt.explicit():
        for _ in range(3):
            cache = torch.cat([cache, token])
    assert cache.placements == (Shard(0, sizes=(3, 5)),)


def test_pad_of_partial_stays_partial_for_zero_and_is_right_for_nonzero_value() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(X.clone(), mesh, [P])
    assert F.pad(x, (1, 1), value=0.0).placements == (P,)
    assert torch.equal(F.pad(x, (1, 1), value=3.0).full_tensor(), F.pad(X, (1, 1), value=3.0))


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3)])
@pytest.mark.parametrize("factor", [2, 3])
def test_pixel_shuffle_sharded_on_two_mesh_dims_equals_plain_torch(mesh_shape: tuple[int, ...], factor: int) -> None:
    mesh, x = dt.init_device_mesh("cpu", mesh_shape), make_floats(1, factor**2, 2, 3)
    for where in ([Shard(1), Shard(2)], [Shard(1), S1], [Shard(2), Shard(1)]):
        check(lambda x: F.pixel_shuffle(x, factor), x, mesh=mesh, placements=[where])
    for where in ([Shard(2), Shard(2)], [Shard(2), Shard(3)], [Shard(3), Shard(3)]):
        check(lambda x: F.pixel_unshuffle(x, factor), F.pixel_shuffle(x, factor), mesh=mesh, placements=[where])


def test_stack_of_mixed_dtypes_has_the_promoted_dtype_on_every_rank() -> None:
    """Check that ranks without a tensor of the widest dtype, or without any, use the promoted dtype."""

    def stacked(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[k].double() if k == 4 else x[k] for k in range(5)])

    outcome = check_placement(stacked, (X.float(),), (4,), [[S0]])
    assert not outcome.problems
    assert outcome.layouts[0].dtype is torch.float64
