"""Shape inference of matrix products: after one call of the operator, the rule infers the results of other sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.layout.layout import Layout
from dtensor.propagation.make_call import make_call
from dtensor.propagation.op_schema import operator_schema_of
from dtensor.propagation.shape_inference import infer_from_operator, infer_results
from dtensor.rules.call import Call
from dtensor.rules.registry import lookup

aten = torch.ops.aten
MESH = dt.init_device_mesh("cpu", (2,))
SIZES = [dict(zip("bmkn", found, strict=True)) for found in ((2, 3, 4, 5), (7, 5, 3, 2), (3, 2, 6, 4))]
MATRICES = [("mk", "kn"), ("bmk", "kn"), ("mk", "bkn"), ("bmk", "bkn")]


def _layouts_of_memory_orders(letters: str, sizes: dict[str, int]) -> Iterator[Layout]:
    """Yield replicated layouts of these sizes, one for each order of the dims in memory."""
    for order in itertools.permutations(range(len(letters))):
        stride = torch.empty([sizes[letters[d]] for d in order]).permute(*map(order.index, range(len(letters)))).stride()
        yield Layout.replicated(MESH, tuple(sizes[letter] for letter in letters), stride, torch.float32)


def _calls(op: Any, operands: dict[str, str], **others: Any) -> Iterator[Call]:
    """Yield a call for each of ``SIZES`` and each memory order of the operands."""
    operator = operator_schema_of(op)
    for sizes in SIZES:
        for layouts in itertools.product(*(_layouts_of_memory_orders(letters, sizes) for letters in operands.values())):
            yield make_call(operator, MESH, dict(zip(operands, layouts, strict=True)) | others)[0]


def _inference_equals_operator(op: Any, operands: dict[str, str], **others: Any) -> bool:
    operator, rule = operator_schema_of(op), lookup(op)
    return all(
        infer_results(operator, rule, call) == infer_from_operator(operator, call.arguments)
        for call in _calls(op, operands, **others)
    )


@pytest.mark.parametrize("shapes", [("k", "k"), ("mk", "k"), ("k", "bkn"), *MATRICES])
def test_matmul_results_inferred_by_rule_equal_those_of_operator(shapes: tuple[str, str]) -> None:
    assert _inference_equals_operator(aten.matmul.default, dict(zip(("self", "other"), shapes, strict=True)))


@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True]])
@pytest.mark.parametrize("shapes", MATRICES)
def test_matmul_backward_results_inferred_by_rule_equal_those_of_operator(shapes: tuple[str, str], mask: list[bool]) -> None:
    out = ("b" if "b" in "".join(shapes) else "") + "mn"
    assert _inference_equals_operator(
        aten.matmul_backward.default, {"grad": out, "self": shapes[0], "other": shapes[1]}, mask=mask
    )
    if shapes[1] == "kn":
        weight = {"self": shapes[0], "grad_output": out, "weight": "nk"}
        assert _inference_equals_operator(aten.linear_backward.default, weight, output_mask=[*mask, True])


def test_shape_inference_of_mismatched_matmul_raises_after_a_valid_call() -> None:
    operator, rule = operator_schema_of(aten.matmul.default), lookup(aten.matmul.default)
    for k in (4, 3):
        x, y = Layout.replicated(MESH, (2, 4), None, torch.float32), Layout.replicated(MESH, (k, 5), None, torch.float32)
        call, _ = make_call(operator, MESH, {"self": x, "other": y})
        if k == 4:
            assert infer_results(operator, rule, call) == infer_from_operator(operator, call.arguments)
        else:
            with pytest.raises(RuntimeError, match=r"mat1 and mat2|must match|size"):
                infer_results(operator, rule, call)
