"""Rules on gloo process groups: the case tables of the rule families run on four processes."""

from __future__ import annotations

import pytest
import test_data_dependent_shapes
import test_rules_cat_repeat_roll
import test_rules_indexing
import test_rules_loss
import test_rules_pointwise
import test_rules_random
import test_rules_reduction
import test_rules_softmax
import test_rules_views
import test_rules_writes
import torch
from gloo_processes import run_gloo
from rule_tables import RuleCase, check_many_placements, make_floats, make_integers

import dtensor as dt
from dtensor.propagation import strategy_cost
from dtensor.testing import check

pytestmark = pytest.mark.gloo

TABLES: dict[str, dict[str, RuleCase]] = {
    "reduction": test_rules_reduction.CASES,
    "softmax": test_rules_softmax.CASES,
    "classes": test_rules_loss.CLASSES,
    "losses": {
        name: RuleCase(lambda x, y, fn=fn: fn(x, y, "mean"), (test_rules_loss.X, test_rules_loss.Y))
        for name, fn in test_rules_loss.ELEMENTWISE.items()
    },
    "random": {name: RuleCase(fn, (test_rules_random.X,)) for name, fn in test_rules_random.NEW.items()},
    "pointwise": test_rules_pointwise.CASES,
    "views": test_rules_views.CASES,
    "joining": test_rules_cat_repeat_roll.CASES,
    "indexing": test_rules_indexing.CASES,
    "writes": {
        program.__name__: RuleCase(test_rules_writes.run(program), (test_rules_writes.X, test_rules_writes.V), written=True)
        for program in test_rules_writes.PROGRAMS
    },
}
# cases that raise only on the ranks with the invalid target, while the other ranks would wait
CASES_THAT_RAISE_ON_SOME_RANKS = ("target out of range",)


def _try_tables(names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    for table in names:
        for name, case in TABLES[table].items():
            if name not in CASES_THAT_RAISE_ON_SOME_RANKS:
                try:
                    check_many_placements(case, (2, 2), 2)
                except AssertionError as error:
                    raise AssertionError(f"{table}: {name}: {error}") from error


def test_rule_case_tables_equal_plain_torch_on_four_processes() -> None:
    run_gloo(_try_tables, 4, tuple(TABLES))


def _check_scalar_norms() -> None:
    x = dt.distribute_tensor(torch.arange(9.0), dt.init_device_mesh("cpu", (4,)), [dt.Shard(0)])
    for norm in (lambda y: y.norm(), lambda y: torch.linalg.vector_norm(y, 1.5), lambda y: y.norm(keepdim=True, dim=0)):
        torch.testing.assert_close(norm(x).full_tensor(), norm(torch.arange(9.0)))


@pytest.mark.gloo
def test_scalar_norms_equal_plain_torch_on_four_processes() -> None:
    """Check norms of a 0-d result on process groups."""
    run_gloo(_check_scalar_norms, 4)


def _check_sharded_indices() -> None:
    """Check indexing on a 2-D mesh with sharded indices, and that an index out of range raises on all ranks."""
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, places = torch.arange(22.0 * 30_000).view(22, 30_000), torch.tensor([-1, 0, 21, 21, 5, 7, -22, 12, 3, 3, 3])
    given = dt.distribute_tensor(x, mesh, [dt.Shard(0), dt.Shard(1)])
    for at in ([dt.Shard(0), dt.Replicate()], [dt.Replicate(), dt.Shard(0)]):
        asked = dt.distribute_tensor(places, mesh, at)
        assert torch.equal(given[asked].full_tensor(), x[places])
        assert torch.equal(given.index_select(0, asked % 22).full_tensor(), x[places])
        with pytest.raises(IndexError, match="out of range"):
            given[asked + 5]


def test_indexing_with_sharded_indices_equals_plain_torch_on_four_processes() -> None:
    run_gloo(_check_sharded_indices, 4)


def _check_data_dependent_shapes() -> None:
    torch.set_num_threads(1)
    strategy_cost.kernel_seconds = lambda *_: -1e-4  # so that even rows this small are exchanged
    x, i, v = make_floats(7, 3), make_integers(9, low=0, high=7), make_floats(9, 3, seed=1)
    mask = x[:, 0] > 0
    for mesh_shape in ((4,), (2, 2)):
        for fn in test_data_dependent_shapes.MASK_PROGRAMS:
            check_many_placements(RuleCase(fn, (x, mask), ()), mesh_shape, 3)
        for fn in test_data_dependent_shapes.INDEX_PROGRAMS:
            check_many_placements(RuleCase(fn, (x, i, v), ()), mesh_shape, 3)
            mesh = dt.init_device_mesh("cpu", mesh_shape)
            check(fn, x, i, v, mesh=mesh, placements=[[dt.Shard(0)] * len(mesh_shape)] * 3)


@pytest.mark.filterwarnings("ignore:.*in beta.*:UserWarning")
def test_data_dependent_shapes_equal_plain_torch_on_four_processes() -> None:
    run_gloo(_check_data_dependent_shapes, 4)
