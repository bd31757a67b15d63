"""Samples are written as calls are; what is written is what is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.testing import Sample, verify_rule
from dtensor.testing.samples import rules_without_sample, samples_of
from dtensor.testing.samples.sample_syntax import sample_table


def made(text: str, **words: object) -> dict[str, list[Sample]]:
    return {
        name: [b if isinstance(b, Sample) else b() for b in builders] for name, builders in sample_table(text, **words).items()
    }


def test_a_line_names_operators_and_their_calls() -> None:
    found = made("mm bmm: f[5, 6], [2], dim=-1 |\n i[7] | f[()], K", K=3)
    assert list(found) == ["mm", "bmm"]
    first, second, third = found["mm"]
    assert (first.args[0].shape, first.args[1:], first.kwargs) == ((5, 6), ([2],), {"dim": -1})
    assert (second.args[0].shape, second.args[0].dtype) == ((7,), torch.int64)
    assert (third.args[0].ndim, third.args[1], third.note) == (0, 3, "f[()], K")


def test_no_two_tensors_of_a_sample_are_alike_and_each_time_they_are_the_same() -> None:
    (sample,), (again,) = made("a: f[5], f[5]")["a"], made("a: f[5], f[5]")["a"]
    assert not torch.equal(*sample.args)
    assert torch.equal(sample.args[0], again.args[0])


def test_choices_are_each_tried_and_alike_wherever_they_stand() -> None:
    pairs = [sample.args for sample in made("a: {1/2}, {1/2}, {3/4}")["a"]]
    assert pairs == [(1, 1, 3), (1, 1, 4), (2, 2, 3), (2, 2, 4)]


def test_choices_in_a_name_hold_for_its_line() -> None:
    found = made("pool{2/3}d back{2/3}d: {2/3}, {5/6}")
    assert {name: [sample.args for sample in samples] for name, samples in found.items()} == {
        "pool2d": [(2, 5), (2, 6)],
        "pool3d": [(3, 5), (3, 6)],
        "back2d": [(2, 5), (2, 6)],
        "back3d": [(3, 5), (3, 6)],
    }


def test_marks_leave_out_gradients_and_values() -> None:
    found = made("a!: 1 | ?2\nb: 1 | !2")
    assert [(s.gradients, s.values) for s in found["a"] + found["b"]] == [
        (False, True),
        (False, False),
        (True, True),
        (False, True),
    ]


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(NameError) as found:
        made("a: g[5]")
    assert found.value.__notes__ == ["in the sample 'g[5]'"]


def test_pointwise_operators_have_samples_by_schema_in_all_dtypes() -> None:
    notes = {sample.note.split()[1] for sample in samples_of("aten::add") if sample.note.startswith("Tensor ")}
    assert notes == {"float64", "int64", "bool", "complex128"}


# --- what no one wrote -----------------------------------------------------------------------------------------------------
@torch.library.custom_op("unwritten::weighted", mutates_args=())
def weighted(x: torch.Tensor, weight: torch.Tensor, factor: float) -> torch.Tensor:
    return (x * factor) @ weight


@torch.library.custom_op("unwritten::turned", mutates_args=())
def turned(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.flip(dim)


weighted.register_fake(lambda x, weight, factor: x @ weight)
turned.register_fake(lambda x, dim: torch.empty_like(x))
turned.register_autograd(
    lambda ctx, grad: (grad.flip(ctx.dim), None), setup_context=lambda ctx, inputs, output: setattr(ctx, "dim", inputs[1])
)


@pytest.fixture
def declared() -> Iterator[Callable[..., str]]:
    names: list[str] = []

    def declare(name: str, notation: str, **options: Any) -> str:
        names.append(name)
        dt.register_sharding(getattr(torch.ops.unwritten, name.partition("::")[2]).default, notation, **options)
        return name

    yield declare
    for name in names:
        dt.unregister_sharding(getattr(torch.ops.unwritten, name.partition("::")[2]).default)


def test_an_operator_of_which_no_sample_is_written_is_tried_as_its_notation_says(declared: Callable[..., str]) -> None:
    name = declared("unwritten::weighted", "a b, b c -> a c")
    x, weight, _ = next(sample.args for sample in samples_of(name) if sample.args[0].dtype is torch.float64)
    assert x.shape[1] == weight.shape[0]
    assert len({*x.shape, *weight.shape}) == 3
    report = verify_rule(name, meshes=[(2,), (3,)], limit=40)
    assert not report.wrong, str(report)
    assert {"S(0),R -> S(0)", "R,S(1) -> S(1)"} <= report.rows.forced


def test_arguments_that_pick_dims_pick_those_of_the_notation(declared: Callable[..., str]) -> None:
    name = declared("unwritten::turned", "a* [@dim] b* -> a* [@dim] b*")
    found = samples_of(name)
    assert {(sample.args[0].ndim, sample.args[1]) for sample in found} == {(3, 1)}
    assert any(sample.gradients for sample in found)  # one is registered
    report = verify_rule(name, meshes=[(2,), (3,)], limit=40)
    assert not report.wrong, str(report)
    assert {"S(0) -> S(0)", "S(2) -> S(2)"} <= report.rows.forced


def test_a_false_notation_is_found_without_samples(declared: Callable[..., str]) -> None:
    report = verify_rule(declared("unwritten::turned", "s* -> s*"), meshes=[(2,)], limit=40)
    assert [wrong.rows for wrong in report.wrong] == [("S(1) -> S(1)",)], str(report)


def test_what_its_notation_does_not_fit_has_no_samples(declared: Callable[..., str]) -> None:
    name = declared("unwritten::weighted", "a b, c d -> a d")
    assert samples_of(name) == []
    assert name in rules_without_sample()
