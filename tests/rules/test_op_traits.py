"""Traits of operators: facts declared next to their rules, by overload, operator and in-place variant. The engine names no
operator."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor
from dtensor.errors import RuleError
from dtensor.rules.op_traits import declare_traits, traits_of
from dtensor.testing.oracle import check, compare

aten = torch.ops.aten
PACKAGE = Path(dtensor.__file__).parent
ENGINE = ("base", "comm", "cost", "layout", "mesh", "propagation", "dispatch", "random", "ranks", "redistribute")


def test_traits_of_an_overload_extend_those_of_its_operator() -> None:
    assert traits_of(aten.normal.Tensor_Tensor).strides is not None
    assert traits_of(aten.normal.Tensor_Tensor).local_function is None
    assert traits_of(aten.div.Tensor_mode).strides is not None
    assert traits_of(aten.div.Tensor).strides is None
    assert traits_of(aten.view.default).view_kind == "all"
    assert traits_of(aten.view.dtype).view_kind is None
    assert traits_of(aten.view.dtype).needs_strides


def test_in_place_variant_has_the_argument_checks_of_its_operator() -> None:
    assert traits_of(aten.index_fill_.int_Scalar).checks == traits_of(aten.index_fill.int_Scalar).checks != ()


def test_declaring_traits_twice_raises() -> None:
    with pytest.raises(RuleError, match="declared twice"):
        declare_traits("heaviside", by_device=True)


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield all string constants except docstrings."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


@pytest.mark.parametrize("folder", ENGINE)
def test_engine_source_names_no_aten_operator(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        found = [text for text in strings(ast.parse(path.read_text())) if re.search(r"\baten::\w", text)]
        assert not found, f"{path}: {found}: facts about operators belong in rules/aten/"


@pytest.mark.parametrize("placement", [dtensor.Replicate(), dtensor.Shard(0), dtensor.Shard(1)], ids=str)
def test_in_place_cumsum_of_bools_raises_as_in_torch(placement: dtensor.Placement) -> None:
    x = torch.ones(5, 7, dtype=torch.bool)
    with pytest.raises(NotImplementedError):
        x.clone().cumsum_(0)
    with pytest.raises(NotImplementedError, match="bools in place"):
        dtensor.distribute_tensor(x, dtensor.init_device_mesh("cpu", (3,)), [placement]).cumsum_(0)


X, ROW = torch.arange(30.0).view(5, 6) / 8, torch.arange(6.0)
REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "renorm of order 0": lambda x, w: x.renorm(0, 0, 1.0),
    "renorm of order NaN": lambda x, w: x.renorm(float("nan"), 0, 1.0),
    "renorm with negative maxnorm": lambda x, w: x.renorm(2, 0, -1.0),
    "renorm of dim out of range": lambda x, w: x.renorm(2, 2, 1.0),
    "layer norm with float64 weight": lambda x, w: torch.layer_norm(x, (6,), w.double()),
    "layer norm with bfloat16 weight": lambda x, w: torch.layer_norm(x, (6,), w.bfloat16()),
    "layer norm with weight and bias of two dtypes": lambda x, w: torch.layer_norm(x.bfloat16(), (6,), w, w.bfloat16()),
    "addmm with input of more rows than the product": lambda x, w: torch.addmm(x[:2], x[:1], x[0].diag()),
    "addmv with input longer than the product": lambda x, w: torch.addmv(w, x[:1], w),
    "allclose with another size": lambda x, w: torch.allclose(x, x[:2]),
    "allclose with an empty tensor": lambda x, w: torch.allclose(w, w[:0]),
    "allclose of two dtypes": lambda x, w: torch.allclose(x, x.double()),
    "allclose with negative rtol": lambda x, w: torch.allclose(x[:1], x[:1], -1.0),
    "floor division of bools": lambda x, w: (x > 1) // (x > 1),
    "log softmax of bools": lambda x, w: (x > 1).log_softmax(0),
    "frac of bools": lambda x, w: (x > 1).frac(),
    "clamp of complex numbers": lambda x, w: torch.clamp(x + 1j, x + 1j),
    "leaky_relu of uint8": lambda x, w: torch.nn.functional.leaky_relu(x.to(torch.uint8)),
    "masked_fill with a complex number": lambda x, w: x.masked_fill(x > 1, w[1] + 1j),
    "segment_reduce with too large lengths": lambda x, w: torch.segment_reduce(x, "sum", lengths=w[:4].long()),
    "unsafe segment_reduce with a negative length": lambda x, w: torch.segment_reduce(
        x, "sum", lengths=w[:3].long() * 2 - 1, unsafe=True
    ),
    "softmax backward with gradient of one column": lambda x, w: aten._softmax_backward_data(x[:, :1], x, 1, x.dtype),
    "select_backward with gradient of another size": lambda x, w: aten.select_backward(x[:, 0], list(x.shape), 0, 1),
    "slice_backward with gradient of fewer rows": lambda x, w: aten.slice_backward(x[:2], list(x.shape), 0, 1, 4, 1),
    "diagonal_backward with gradient of fewer elements": lambda x, w: aten.diagonal_backward(x[:4, 0], list(x.shape), 0, 0, 1),
    "segment_reduce with a negative length": lambda x, w: torch.segment_reduce(x, "sum", lengths=w[:4].long() * 4 - 5),
}


@pytest.mark.parametrize("where", [dtensor.Replicate(), dtensor.Shard(0), dtensor.Shard(-1)], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_torch_kernels_reject_raise_under_every_placement(name: str, where: dtensor.Placement) -> None:
    mesh = dtensor.init_device_mesh("cpu", (3,))
    outcome = compare(REFUSED[name], [X, ROW], mesh, [[where], [dtensor.Replicate()]], gradients=False)
    assert outcome.same_error, outcome.problems


ACCEPTED: dict[str, Callable[[Any, Any], Any]] = {  # accepted by torch's kernels, but not by its meta functions
    "in-place pow of bools": lambda x, w: (x > 1).pow_(True),
    "select_backward of a row with gradient that broadcasts": lambda x, w: aten.select_backward(
        x[:, :1].sum(0), list(x.shape), 0, 1
    ),
    "select_backward of a column with gradient that broadcasts": lambda x, w: aten.select_backward(
        x[:1].sum(1), list(x.shape), 1, 1
    ),
    "slice_backward with a column that broadcasts": lambda x, w: aten.slice_backward(x[:, :1], list(x.shape), 1, 1, 4, 1),
    "slice_backward with a row that broadcasts": lambda x, w: aten.slice_backward(x[0], list(x.shape), 0, 1, 4, 1),
    "diagonal_backward with gradient that broadcasts": lambda x, w: aten.diagonal_backward(x[0, :1], list(x.shape), 0, 0, 1),
    "masked_fill with a complex number without imaginary part": lambda x, w: x.masked_fill(x > 1, w[1] + 0j),
}


def test_log_softmax_backward_with_too_small_gradient_raises() -> None:
    x = dtensor.distribute_tensor(X, dtensor.init_device_mesh("cpu", (3,)), [dtensor.Replicate()])
    with pytest.raises(RuntimeError, match="the gradient has shape"):
        aten._log_softmax_backward_data(x[:, :1], x, 1, x.dtype)


@pytest.mark.parametrize("where", [dtensor.Replicate(), dtensor.Shard(0), dtensor.Shard(-1), dtensor.Partial()], ids=str)
@pytest.mark.parametrize("name", ACCEPTED)
def test_calls_that_torch_kernels_but_not_meta_functions_accept_equal_torch(name: str, where: dtensor.Placement) -> None:
    mesh = dtensor.init_device_mesh("cpu", (3,))
    check(ACCEPTED[name], X, ROW, mesh=mesh, placements=[[where], [dtensor.Replicate()]], gradients=False)


def test_allclose_with_tensor_of_local_shape_raises() -> None:
    mesh = dtensor.init_device_mesh("cpu", (2,))
    outcome = compare(torch.allclose, [X[:4], X[:2]], mesh, [[dtensor.Shard(0)], [dtensor.Replicate()]], gradients=False)
    assert outcome.same_error, outcome.problems
