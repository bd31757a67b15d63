"""Samples by operator name, one module per rule family; every module here that has ``SAMPLES`` takes part."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module

import torch

from ...rules import rules
from .of_notation import samples_by_notation
from .sample import Builder, Sample, Samples

__all__ = ["ELSEWHERE", "Builder", "Sample", "Samples", "samples_of", "without_sample"]

# What other tests check: it runs on other devices only, or is no operator to try arguments on.
ELSEWHERE = {
    "_amp_foreach_non_finite_check_and_unscale_",  # writes to a plain tensor: tests/parallel/test_parallel_training.py
    "_fused_rms_norm_backward",  # no CPU kernel, as what follows
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
def _by_name() -> dict[str, list[Builder]]:
    """All samples by full operator name, ``"aten::add"`` or ``"aten::add.Tensor"``."""
    found: dict[str, list[Builder]] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        samples: Samples = getattr(import_module(f"{__name__}.{module}"), "SAMPLES", {})
        for name, builders in samples.items():
            found.setdefault(full_name(name), []).extend(builders)
    return found


def full_name(name: str) -> str:
    """``"mm"`` is ``"aten::mm"``."""
    return name if "::" in name else f"aten::{name}"


def samples_of(name: str) -> list[Sample]:
    """The samples of a rule: those of its name, and for an operator those of its overloads that have no rule of their own.

    Of operators that are not torch's, where none are written, those that its notation says.
    """
    written = list(_find(full_name(name)))
    return written or _derived(full_name(name))


def _find(name: str) -> Iterator[Sample]:
    registered = rules()
    for given in registered[name].samples if name in registered else ():
        yield given if isinstance(given, Sample) else given() if callable(given) else Sample(tuple(given))
    for known, builders in _by_name().items():
        base, _, overload = known.partition("::")[2].partition(".")
        own = known == name or (f"{known.partition('::')[0]}::{base}" == name and overload and known not in registered)
        if own:
            for builder in builders:
                yield builder if isinstance(builder, Sample) else builder()


def _derived(name: str) -> list[Sample]:
    namespace, _, own = name.partition("::")
    if namespace == "aten" or name not in rules():  # torch's may end the process, given what makes no sense
        return []
    packet = getattr(getattr(torch.ops, namespace), own.partition(".")[0])
    overloads = [getattr(packet, which) for which in ([own.partition(".")[2]] if "." in own else packet.overloads())]
    return list(samples_by_notation(overloads, rules()[name]))


def without_sample() -> list[str]:
    """Registered rules that no sample exercises, those aside that have no kernel on a CPU."""
    unwritten = [name for name in rules() if not any(True for _ in _find(name))]  # one is enough to make
    return sorted(name for name in unwritten if name.removeprefix("aten::") not in ELSEWHERE and not _derived(name))
