"""Errors of the operator database: for its error inputs, operators on DTensors raise the error type of plain torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import op_database as db
import pytest
import torch
from slow_case_marks import keep_every_nth_fast

import dtensor as dt
from dtensor.base.tensor_tree import fill_tensors, tensor_leaves

SEED = int(os.environ.get("OP_DATABASE_SEED", "0"))
PARTS = 6
# arguments that overlap in memory have no distributed counterpart
OWN_MEMORY = "single memory location"


def wrong_calls(entry: Any) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    with db.quiet():
        for given in entry.error_inputs("cpu") if entry.error_inputs_func else ():
            sample = given.sample_input
            yield entry.op, (sample.input, *sample.args), sample.kwargs


def raised(fn: Any, args: Any, kwargs: Any) -> Exception | None:
    try:
        with db.quiet():
            fn(*args, **kwargs)
    except Exception as error:
        return error
    return None


def find_differing_errors(entry: Any, mesh_shape: tuple[int, ...]) -> Iterator[str]:
    mesh, setting = dt.init_device_mesh("cpu", mesh_shape), db.Setting(mesh_shape, seed=SEED)
    for i, (fn, args, kwargs) in enumerate(wrong_calls(entry)):
        given, expected = tensor_leaves((args, kwargs)), raised(fn, args, kwargs)
        usable = all(x.layout is torch.strided and x.device.type == "cpu" for x in given)
        if expected is None or not given or not usable or OWN_MEMORY in str(expected):
            continue
        rng = db.rng_of(entry.formatted_name, setting, i)
        made = [dt.distribute_tensor(x, mesh, db.draw_placements(x, setting, rng)) for x in given]
        got = raised(fn, *fill_tensors((args, kwargs), made))
        if not isinstance(got, type(expected)):
            yield f"{entry.formatted_name} error input {i}: {got!r}, not {expected!r}"


@pytest.mark.parametrize("part", keep_every_nth_fast(range(4), 4))
def test_error_inputs_of_common_operators_raise_as_in_torch(part: int) -> None:
    names = "add,amax,bucketize,cat,gather,index_select,mm,sum,nn_functional_conv2d,reshape,scatter,softmax,sort,split,squeeze"
    names += ",narrow_copy,multinomial,_chunk_cat,masked_scatter"
    problems = [problem for entry in db.entries(names)[part::4] for problem in find_differing_errors(entry, (2, 2))]
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mesh", db.MESHES, ids=str)
def test_error_inputs_of_all_operators_raise_as_in_torch(mesh: tuple[int, ...], part: int) -> None:
    problems = [problem for entry in db.entries()[part::PARTS] for problem in find_differing_errors(entry, mesh)]
    assert not problems, "\n".join(problems)
