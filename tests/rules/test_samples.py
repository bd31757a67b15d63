"""Samples are written as calls are; what is written is what is tried."""

from __future__ import annotations

import pytest
import torch

from dtensor.testing import Sample
from dtensor.testing.samples import samples_of
from dtensor.testing.samples.written import table


def made(text: str, **words: object) -> dict[str, list[Sample]]:
    return {name: [b if isinstance(b, Sample) else b() for b in builders] for name, builders in table(text, **words).items()}


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
