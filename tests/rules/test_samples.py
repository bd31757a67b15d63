"""Samples of rules: the notation of sample calls, and samples that are generated from a rule's notation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.testing import Sample, verify_rule
from dtensor.testing.samples import rules_without_sample, samples_of
from dtensor.testing.samples.sample_syntax import sample_table


def build_samples(text: str, **words: object) -> dict[str, list[Sample]]:
    return {
        name: [b if isinstance(b, Sample) else b() for b in builders] for name, builders in sample_table(text, **words).items()
    }


def test_sample_text_is_parsed_to_operators_tensors_and_arguments() -> None:
    found = build_samples("mm bmm: f[5, 6], [2], dim=-1 |\n i[7] | f[()], K", K=3)
    assert list(found) == ["mm", "bmm"]
    first, second, third = found["mm"]
    assert (first.args[0].shape, first.args[1:], first.kwargs) == ((5, 6), ([2],), {"dim": -1})
    assert (second.args[0].shape, second.args[0].dtype) == ((7,), torch.int64)
    assert (third.args[0].ndim, third.args[1], third.note) == (0, 3, "f[()], K")


def test_tensors_of_a_sample_differ_and_are_reproducible() -> None:
    (sample,), (again,) = build_samples("a: f[5], f[5]")["a"], build_samples("a: f[5], f[5]")["a"]
    assert not torch.equal(*sample.args)
    assert torch.equal(sample.args[0], again.args[0])


def test_equal_choices_in_braces_take_equal_values() -> None:
    pairs = [sample.args for sample in build_samples("a: {1/2}, {1/2}, {3/4}")["a"]]
    assert pairs == [(1, 1, 3), (1, 1, 4), (2, 2, 3), (2, 2, 4)]


def test_choices_in_an_operator_name_apply_to_its_line() -> None:
    found = build_samples("pool{2/3}d back{2/3}d: {2/3}, {5/6}")
    assert {name: [sample.args for sample in samples] for name, samples in found.items()} == {
        "pool2d": [(2, 5), (2, 6)],
        "pool3d": [(3, 5), (3, 6)],
        "back2d": [(2, 5), (2, 6)],
        "back3d": [(3, 5), (3, 6)],
    }


def test_marks_in_samples_switch_off_checks_of_gradients_and_values() -> None:
    found = build_samples("a!: 1 | ?2\nb: 1 | !2")
    assert [(s.gradients, s.values) for s in found["a"] + found["b"]] == [
        (False, True),
        (False, False),
        (True, True),
        (False, True),
    ]


def test_unreadable_sample_raises_with_its_text() -> None:
    with pytest.raises(NameError) as found:
        build_samples("a: g[5]")
    assert found.value.__notes__ == ["in the sample 'g[5]'"]


def test_pointwise_operators_have_generated_samples_in_all_dtypes() -> None:
    notes = {sample.note.split()[1] for sample in samples_of("aten::add") if sample.note.startswith("Tensor ")}
    assert notes == {"float64", "int64", "bool", "complex128"}


# --- generated samples --------------------------------------------------------------------------------------------------
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


def test_verify_rule_generates_samples_from_the_notation_of_a_rule(declared: Callable[..., str]) -> None:
    name = declared("unwritten::weighted", "a b, b c -> a c")
    x, weight, _ = next(sample.args for sample in samples_of(name) if sample.args[0].dtype is torch.float64)
    assert x.shape[1] == weight.shape[0]
    assert len({*x.shape, *weight.shape}) == 3
    report = verify_rule(name, meshes=[(2,), (3,)], limit=40)
    assert not report.wrong, str(report)
    assert {"S(0),R -> S(0)", "R,S(1) -> S(1)"} <= report.rows.forced


def test_generated_samples_use_dim_arguments_of_the_notation(declared: Callable[..., str]) -> None:
    name = declared("unwritten::turned", "a* [@dim] b* -> a* [@dim] b*")
    found = samples_of(name)
    assert {(sample.args[0].ndim, sample.args[1]) for sample in found} == {(3, 1)}
    assert any(sample.gradients for sample in found)  # an autograd formula is registered
    report = verify_rule(name, meshes=[(2,), (3,)], limit=40)
    assert not report.wrong, str(report)
    assert {"S(0) -> S(0)", "S(2) -> S(2)"} <= report.rows.forced


def test_wrong_notation_is_found_by_generated_samples(declared: Callable[..., str]) -> None:
    report = verify_rule(declared("unwritten::turned", "s* -> s*"), meshes=[(2,)], limit=40)
    assert [wrong.rows for wrong in report.wrong] == [("S(1) -> S(1)",)], str(report)


def test_notation_that_does_not_fit_the_operator_gives_no_samples(declared: Callable[..., str]) -> None:
    name = declared("unwritten::weighted", "a b, c d -> a d")
    assert samples_of(name) == []
    assert name in rules_without_sample()
