"""Operator database: operators of PyTorch's database on DTensors give the values, dtypes, strides, errors and gradients of plain
torch. The fast part runs samples of each kind of operator. The slow part runs the full database, also in place, with ``out=`` and
in other dtypes. ``python benchmarks/op_coverage.py --ops NAME --seed SEED`` reruns a failure.
"""

from __future__ import annotations

import os

import op_database as db
import op_database_plain_operands as plain
import op_database_unusual_calls
import pytest
from gloo_processes import run_gloo
from slow_case_marks import keep_chosen_fast

import dtensor as dt

SEED = int(os.environ.get("OP_DATABASE_SEED", "0"))
PARTS = 24  # parts of the database, one for each test, so that workers share them

# one or two of each kind: pointwise, reductions, scans, contractions, losses, norms, convolutions, pooling, indexing, views, ...
COMMON = """
add mul div_no_rounding_mode pow where clamp sigmoid nn_functional_gelu isclose lerp
sum mean prod amax std var_mean logsumexp argmax all count_nonzero nansum norm linalg_vector_norm cumsum cumprod cummax
mm addmm bmm matmul einsum outer nn_functional_linear nn_functional_bilinear tensordot
softmax log_softmax nn_functional_cross_entropy nn_functional_mse_loss nn_functional_nll_loss nn_functional_binary_cross_entropy
nn_functional_layer_norm nn_functional_group_norm nn_functional_batch_norm nn_functional_rms_norm
nn_functional_conv1d nn_functional_conv2d nn_functional_max_pool2d nn_functional_avg_pool2d nn_functional_interpolate_bilinear
nn_functional_scaled_dot_product_attention nn_functional_embedding nn_functional_pad_reflect nn_functional_unfold
index_select gather scatter scatter_add index_put take_along_dim masked_select masked_fill nonzero unique __getitem__
reshape flatten view transpose expand squeeze unsqueeze narrow split chunk unbind stack cat roll flip repeat tile tril as_strided
sort topk kthvalue searchsorted histc fft_fft fft_irfft linalg_solve linalg_cholesky linalg_svd linalg_eigh
nn_functional_dropout bernoulli multinomial normal randn_like full_like new_zeros empty_like
"""


def assert_right(entries: list[object], setting: db.Setting) -> None:
    """Assert that no case of these entries is refused, wrong or an error."""
    cases = [case for entry in entries for case in db.cases_of(entry, setting)]
    bad = [case for case in cases if case.status not in ("pass", "void", "accepted")]
    assert any(case.status == "pass" for case in cases)
    assert not bad, "\n".join(map(str, bad[:10]))


@pytest.mark.parametrize("part", keep_chosen_fast(range(4), [0]))  # meshes over parts
def test_common_operators_with_random_placements_equal_plain_torch(part: int) -> None:
    mesh = db.MESHES[(part + SEED) % len(db.MESHES)]
    assert_right(db.entries(",".join(COMMON.split()))[part::4], db.Setting(mesh, samples=1, seed=SEED))


def assert_right_if_changed(entries: list[object], setting: db.Setting) -> None:
    """Assert that samples in other memory orders and sizes, with shared, plain or detached arguments, are right or refused."""
    cases = [case for entry in entries for case in op_database_unusual_calls.cases_of(entry, setting)]
    bad = [case for case in cases if not plain.fits(case)]
    assert not bad, "\n".join(map(str, bad[:10]))


def test_unusual_calls_of_common_operators_equal_plain_torch() -> None:
    names = "logaddexp,linalg_slogdet,linalg_solve,nn_functional_batch_norm,sum,matmul,index_select,cat,var,__getitem__,sort"
    assert_right_if_changed(db.entries(names), db.Setting((2, 2), samples=3, seed=SEED))


@pytest.mark.parametrize("part", keep_chosen_fast(range(6), [1]))
def test_common_operators_with_one_plain_operand_raise_or_equal_plain_torch(part: int) -> None:
    entries = db.entries(",".join(COMMON.split()))[part::6]
    cases = [case for entry in entries for case in plain.cases_of(entry, db.Setting((3,), samples=1))]
    assert {"pass", "refused"} <= {case.status for case in cases}
    assert not [str(case) for case in cases if not plain.fits(case)]


def test_every_common_operator_is_in_the_database() -> None:
    assert {entry.formatted_name for entry in db.entries()} >= set(COMMON.split())


def test_run_case_finds_a_wrong_result() -> None:
    (entry,) = db.entries("exp")
    setting = db.Setting(draw="partial", samples=8)  # some have no elements
    twice = [
        db.Sample(lambda x: x * 2 if isinstance(x, dt.DTensor) else x, sample.args) for _, sample in db.samples_of(entry, setting)
    ]
    assert "wrong" in [db.run_case("exp", setting, i, sample).status for i, sample in enumerate(twice)]


def test_cases_of_sharded_unique_list_it_as_gathered() -> None:
    (entry,) = db.entries("unique")
    assert any(
        "unique" in name for case in db.cases_of(entry, db.Setting(draw="shard")) for name in " ".join(case.gathered).split()
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mesh", db.MESHES, ids=str)
def test_all_operators_with_random_placements_equal_plain_torch(mesh: tuple[int, ...], part: int) -> None:
    assert_right(db.entries()[part::PARTS], db.Setting(mesh, samples=8, seed=SEED))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(
    ("variant", "dtype"), [("inplace", "float64"), ("out", "float64"), ("function", "int64"), ("function", "complex128")]
)
def test_in_place_out_and_dtype_variants_equal_plain_torch(variant: str, dtype: str, part: int) -> None:
    mesh = db.MESHES[part % 2]
    assert_right(db.entries()[part::PARTS], db.Setting(mesh, dtype, variant, samples=4, seed=SEED))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_unusual_calls_of_all_operators_equal_plain_torch(part: int) -> None:
    assert_right_if_changed(db.entries()[part::PARTS], db.Setting(db.MESHES[part % 2], samples=4, seed=SEED))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators_with_one_plain_operand_raise_or_equal_plain_torch(part: int) -> None:
    setting = db.Setting(db.MESHES[part % 2], samples=4, seed=SEED)
    cases = [case for entry in db.entries()[part::PARTS] for case in plain.cases_of(entry, setting)]
    assert not [str(case) for case in cases if not plain.fits(case)]


@pytest.mark.slow
@pytest.mark.gloo
def test_plain_operands_that_differ_between_ranks_raise_on_all_ranks() -> None:
    assert run_gloo(plain.on_processes, 2, "*", 1, timeout_s=600.0) == [[], []]
