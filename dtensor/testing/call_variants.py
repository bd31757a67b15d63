"""Variants of an operator call: unchanged, in place, with ``out=``, and on lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.tensor_tree import tensor_leaves
from ..base.torch_internals import resolve_packet
from ..mesh.device_mesh import DeviceMesh
from ..rules.op_traits import list_operator_names
from .placements import get_or_make_mesh
from .samples import Sample
from .samples.schema_samples import error_in_plain_torch, run_plain


@dataclass(frozen=True, slots=True)
class Variant:
    """Way to call an operator with a sample: itself, in place, with ``out=``, or on lists.

    Attributes:
        name: the name of the operator under ``torch.ops``: ``"aten.add_"``.
        sample: the arguments.
        writes: True if it writes to its arguments, which are then clones.
    """

    name: str
    sample: Sample
    writes: bool

    @property
    def call(self) -> Callable[..., Any]:
        return get_operator(self.name)

    def mesh(self, shape: tuple[int, ...]) -> DeviceMesh:
        """Return a mesh on the device of the sample's tensors."""
        device_type = next((x.device.type for x in tensor_leaves(self.sample.arguments)), "cpu")
        return get_or_make_mesh(shape, device_type)


def resolve_variant_overload(variant: Variant) -> Variant:
    """Return the variant with the overload that torch calls for its sample, because torch's own resolution is slow."""
    op: Any = variant.call
    if hasattr(op, "_schema"):
        return variant
    try:
        overload = resolve_packet(op._qualified_op_name, *variant.sample.args, **variant.sample.kwargs)
    except RuntimeError:  # plain torch rejects the call
        return variant
    return replace(variant, name=f"{variant.name}.{overload or 'default'}")


def get_operator(name: str) -> Callable[..., Any]:
    """Return the operator of ``torch.ops`` that ``"aten.add"`` or ``"aten.add.Tensor"`` names."""
    operator: Any = torch.ops
    for part in name.split("."):
        operator = getattr(operator, part)
    return operator


def operator_exists(name: str) -> bool:
    """Return True if torch has an operator of this name."""
    try:
        get_operator(name)
    except (AttributeError, RuntimeError):
        return False
    return True


def make_variants(rule_name: str, sample: Sample) -> Iterator[Variant]:
    """Yield the operator with the sample, and its in-place, ``out=`` and list variants that plain torch accepts."""
    name = rule_name.replace("::", ".")
    namespace, base = name.split(".")[:2]
    if operator_exists(name):
        yield Variant(name, sample, _is_mutating(name))
    if not base.endswith("_") and operator_exists(inplace := f"{namespace}.{base}_"):
        yield Variant(inplace, sample, True)
    if "out" not in sample.kwargs and (out_sample := _make_out_sample(f"{namespace}.{base}", sample)) is not None:
        yield Variant(f"{namespace}.{base}", out_sample, True)
    for list_operator in (f"{namespace}.{form}" for form in list_operator_names(base)):
        if operator_exists(list_operator) and (list_sample := _make_list_sample(list_operator, sample)) is not None:
            yield Variant(list_operator, list_sample, False)


def _is_mutating(name: str) -> bool:
    """Return True if an overload of the operator writes to an argument that is no ``out=``."""
    operator: Any = get_operator(name)
    overloads = [operator] if hasattr(operator, "_schema") else [getattr(operator, overload) for overload in operator.overloads()]
    return any(overload._schema.is_mutable and not any(a.is_out for a in overload._schema.arguments) for overload in overloads)


def _make_out_sample(name: str, sample: Sample) -> Sample | None:
    """Return the sample with an ``out=`` argument; None if the operator has none, or computes something else with it."""
    operator: Any = get_operator(name) if operator_exists(name) else None
    if operator is None or not any(a.name == "out" for o in operator.overloads() for a in getattr(operator, o)._schema.arguments):
        return None
    try:
        result = run_plain(operator, sample)
        if not isinstance(result, torch.Tensor):
            return None
        out = torch.zeros_like(result.contiguous())
        run_plain(operator, sample, out=out)
        if not torch.equal(out.nan_to_num(), result.nan_to_num()):
            return None  # the out= variant of plain torch differs, as in binary_cross_entropy with a mean
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return replace(sample, kwargs={**sample.kwargs, "out": torch.zeros_like(out)}, note="out=", gradients=False)


def _make_list_sample(name: str, sample: Sample) -> Sample | None:
    """Return a sample with each tensor twice in a list; None if the list operator does not accept it."""
    if not tensor_leaves(sample.args) or any(isinstance(value, (list, tuple)) for value in sample.args):
        return None
    list_sample = replace(sample, args=tuple([x, x] if isinstance(x, torch.Tensor) else x for x in sample.args), note="lists")
    return list_sample if error_in_plain_torch(get_operator(name), list_sample) is None else None
