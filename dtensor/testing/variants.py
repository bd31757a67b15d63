"""The forms in which one operator is called: as it is, in place, with ``out=``, on lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.tensor_tree import tensors
from ..base.torch_internals import resolve_packet
from ..mesh.device_mesh import DeviceMesh
from ..rules.op_traits import list_forms
from .placements import mesh_of
from .samples import Sample
from .samples.of_schema import plainly, refusal


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to call an operator with a sample.

    Attributes:
        name: of the operator called, as under ``torch.ops``: ``"aten.add_"``.
        sample: the arguments.
        writes: it writes to its arguments, which are clones then.
    """

    name: str
    sample: Sample
    writes: bool

    @property
    def call(self) -> Callable[..., Any]:
        return operator_named(self.name)

    def mesh(self, shape: tuple[int, ...]) -> DeviceMesh:
        """A mesh where the sample's tensors are."""
        device_type = next((x.device.type for x in tensors(self.sample.given)), "cpu")
        return mesh_of(shape, device_type)


def resolved(variant: Variant) -> Variant:
    """The same call by the name of the overload that torch finds for it, which takes torch long where lists are concerned."""
    op: Any = variant.call
    if hasattr(op, "_schema"):
        return variant
    try:
        overload = resolve_packet(op._qualified_op_name, *variant.sample.args, **variant.sample.kwargs)
    except RuntimeError:  # plain torch refuses the call
        return variant
    return replace(variant, name=f"{variant.name}.{overload or 'default'}")


def operator_named(name: str) -> Callable[..., Any]:
    """``"aten.add"`` or ``"aten.add.Tensor"`` under ``torch.ops``."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def exists(name: str) -> bool:
    try:
        operator_named(name)
    except (AttributeError, RuntimeError):
        return False
    return True


def variants(rule_name: str, sample: Sample) -> Iterator[Variant]:
    """The operator itself and its other forms that plain torch accepts for this sample."""
    name = rule_name.replace("::", ".")
    namespace, base = name.split(".")[:2]
    if exists(name):
        yield Variant(name, sample, _writes(name))
    if not base.endswith("_") and exists(other := f"{namespace}.{base}_"):
        yield Variant(other, sample, True)
    if "out" not in sample.kwargs and (written := _with_out(f"{namespace}.{base}", sample)) is not None:
        yield Variant(f"{namespace}.{base}", written, True)
    for lists in (f"{namespace}.{form}" for form in list_forms(base)):
        if exists(lists) and (listed := _listed(lists, sample)) is not None:
            yield Variant(lists, listed, False)


def _writes(name: str) -> bool:
    found: Any = operator_named(name)
    overloads = [found] if hasattr(found, "_schema") else [getattr(found, overload) for overload in found.overloads()]
    return any(overload._schema.is_mutable and not any(a.is_out for a in overload._schema.arguments) for overload in overloads)


def _with_out(name: str, sample: Sample) -> Sample | None:
    found: Any = operator_named(name) if exists(name) else None
    if found is None or not any(a.name == "out" for o in found.overloads() for a in getattr(found, o)._schema.arguments):
        return None
    try:
        result = plainly(found, sample)
        if not isinstance(result, torch.Tensor):
            return None
        out = torch.zeros_like(result.contiguous())
        plainly(found, sample, out=out)
        if not torch.equal(out.nan_to_num(), result.nan_to_num()):
            return None  # plain torch contradicts itself, as in binary_cross_entropy with a mean
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    return replace(sample, kwargs={**sample.kwargs, "out": torch.zeros_like(out)}, note="out=", gradients=False)


def _listed(name: str, sample: Sample) -> Sample | None:
    """Every tensor twice, in a list; None where the list operator does not take that."""
    if not tensors(sample.args) or any(isinstance(value, (list, tuple)) for value in sample.args):
        return None
    given = replace(sample, args=tuple([x, x] if isinstance(x, torch.Tensor) else x for x in sample.args), note="lists")
    return given if refusal(operator_named(name), given) is None else None
