"""Samples by operator name. Every module of this package with ``SAMPLES`` contributes; there is one for each rule family."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module

import torch

from ...rules import rules
from .notation_samples import samples_by_notation
from .sample import Builder, Sample, Samples

__all__ = ["ELSEWHERE", "Builder", "Sample", "Samples", "rules_without_sample", "samples_of"]

# Operators without samples: other tests check them, or they have no CPU kernel.
ELSEWHERE = {
    "_amp_foreach_non_finite_check_and_unscale_",  # writes to a plain tensor: tests/parallel/test_training_loop_utilities.py
    "_fused_rms_norm_backward",  # no CPU kernel, as the following
    *(f"_scaled_dot_product_{name}_attention{way}" for name in ("cudnn", "efficient", "flash") for way in ("", "_backward")),
    *(f"cudnn_{name}{way}" for name in ("batch_norm", "grid_sampler") for way in ("", "_backward")),
    *(f"_use_{name}_ctc_loss{way}" for name in ("cudnn", "miopen") for way in ("", ".Tensor")),
    *(f"_thnn_fused_{name}" for name in ("lstm_cell", "lstm_cell_backward_impl", "gru_cell", "gru_cell_backward")),
    "linear_backward",
    "matmul_backward",
    "mkldnn_rnn_layer",  # it reads past tensors of other sizes, as its backward does: tests/rules/test_rules_recurrent.py
    "mkldnn_rnn_layer_backward",
}


@cache
def _builders_by_name() -> dict[str, list[Builder]]:
    """Return the builders of all samples by full operator name, ``"aten::add"`` or ``"aten::add.Tensor"``."""
    by_name: dict[str, list[Builder]] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        samples: Samples = getattr(import_module(f"{__name__}.{module}"), "SAMPLES", {})
        for name, builders in samples.items():
            by_name.setdefault(full_name(name), []).extend(builders)
    return by_name


def full_name(name: str) -> str:
    """Return the name with its namespace: ``"aten::mm"`` for ``"mm"``."""
    return name if "::" in name else f"aten::{name}"


def samples_of(name: str) -> list[Sample]:
    """Return the samples of a rule by name, including those of overloads that have no rule of their own.

    Operators outside of ``aten`` without samples get samples from their notation.
    """
    written = list(_written_samples(full_name(name)))
    return written or _derived_samples(full_name(name))


def _written_samples(name: str) -> Iterator[Sample]:
    """Yield the samples that are written for an operator: those of its rule, then those of the tables."""
    registered = rules()
    for sample in registered[name].samples if name in registered else ():
        yield sample if isinstance(sample, Sample) else sample() if callable(sample) else Sample(tuple(sample))
    for other, builders in _builders_by_name().items():
        base, _, overload = other.partition("::")[2].partition(".")
        applies = other == name or (f"{other.partition('::')[0]}::{base}" == name and overload and other not in registered)
        if applies:
            for builder in builders:
                yield builder if isinstance(builder, Sample) else builder()


def _derived_samples(name: str) -> list[Sample]:
    """Return samples of a custom operator, made from its rule's notation."""
    namespace, _, operator = name.partition("::")
    if namespace == "aten" or name not in rules():  # torch's own operators may crash on invalid arguments
        return []
    packet = getattr(getattr(torch.ops, namespace), operator.partition(".")[0])
    overloads = [
        getattr(packet, overload) for overload in ([operator.partition(".")[2]] if "." in operator else packet.overloads())
    ]
    return list(samples_by_notation(overloads, rules()[name]))


def rules_without_sample() -> list[str]:
    """Return the names of registered rules without samples, except those that no CPU kernel can run."""
    unwritten = [name for name in rules() if not any(True for _ in _written_samples(name))]  # only the first is made
    return sorted(name for name in unwritten if name.removeprefix("aten::") not in ELSEWHERE and not _derived_samples(name))
