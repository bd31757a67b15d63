"""Schema samples: calls made from an operator's schema, for every overload, dtype and broadcast that plain torch accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ...base.tensor_tree import map_tensors, tensor_leaves
from .sample import Sample

Shape = tuple[int, ...]

# By number of tensors: equal shapes, and broadcasts of either operand.
SHAPES: dict[int, tuple[tuple[Shape, ...], ...]] = {
    1: (((5, 7),), ((),), ((0, 3),)),
    2: (((5, 7), (5, 7)), ((5, 7), (7,)), ((5, 1), (6, 5, 7)), ((), (5,))),
    3: (((5, 7), (5, 7), (5, 7)), ((5, 7), (7,), (5, 1)), ((7,), (5, 1), ())),
}
DTYPES = (torch.float64, torch.int64, torch.bool, torch.complex128)


def samples_by_schema(
    name: str, dtypes: Sequence[torch.dtype] = DTYPES, *, low: float = -2.0, high: float = 2.0, broadcast: bool = True
) -> list[Sample]:
    """Return samples of all overloads of ``aten::name``, with floats between ``low`` and ``high``."""
    packet = getattr(torch.ops.aten, name.partition(".")[0])
    overloads = [name.partition(".")[2]] if "." in name else packet.overloads()
    return [
        sample
        for overload in overloads
        for sample in _samples_of_overload(getattr(packet, overload), dtypes, (low, high), broadcast)
    ]


def _samples_of_overload(op: Any, dtypes: Sequence[torch.dtype], span: tuple[float, float], broadcast: bool) -> Iterator[Sample]:
    """Yield samples of an overload for each dtype and shape, but for those that plain torch refuses."""
    schema = op._schema
    if any(a.is_out for a in schema.arguments) or str(schema.overload_name).endswith("out"):
        return
    kinds = [str(a.type) for a in schema.arguments]
    if any(
        "List" in kind or kind in ("str", "Device", "Generator")
        for a, kind in zip(schema.arguments, kinds, strict=True)
        if not a.has_default_value()
    ):
        return
    count = sum(kind == "Tensor" for kind in kinds)
    for dtype in dtypes:
        for k, shapes in enumerate(SHAPES.get(count, (((5, 7),) * count,))):
            if k and (dtype is not torch.float64 or not broadcast):
                continue  # broadcasts do not depend on the dtype
            sample = make_sample(schema, dict(_tensor_arguments(schema, shapes, dtype, span)), dtype)
            if error_in_plain_torch(op, sample) is None:
                yield sample


def _tensor_arguments(
    schema: Any, shapes: Sequence[Shape], dtype: torch.dtype, span: tuple[float, float]
) -> Iterator[tuple[str, Any]]:
    """Yield the tensor arguments that a call needs, by name."""
    following = iter(shapes)
    for seed, argument in enumerate(schema.arguments):
        kind, needed = str(argument.type), not argument.has_default_value()
        if kind == "Tensor" and needed:
            tensor_dtype = torch.bool if argument.name in ("condition", "mask") else dtype
            yield argument.name, make_tensor(next(following), tensor_dtype, seed, *span)
        elif kind == "Optional[Tensor]" and (needed or argument.name in ("min", "max")):
            yield argument.name, make_tensor((7,), dtype, seed, *span)


def make_sample(schema: Any, given: Mapping[str, Any], dtype: torch.dtype) -> Sample:
    """Return a call with the given arguments by name. Other required arguments are numbers."""
    args, kwargs = [], {}
    for argument in schema.arguments:
        if argument.name not in given and argument.has_default_value():
            continue
        value = given[argument.name] if argument.name in given else _number_for(argument, dtype)
        if argument.kwarg_only or argument.has_default_value():
            kwargs[argument.name] = value
        else:
            args.append(value)
    shapes = [tuple(x.shape) for x in tensor_leaves(given)]
    return Sample(tuple(args), kwargs, f"{schema.overload_name or 'default'} {str(dtype).removeprefix('torch.')} {shapes}")


def _number_for(argument: Any, dtype: torch.dtype) -> Any:
    """Return a valid number for an argument of this type; None for other types."""
    match str(argument.type):
        case "number" | "float":
            return {torch.int64: 2, torch.bool: True}.get(dtype, 0.75)
        case "bool":
            return True
        case "int":
            return 1
        case _:
            return None


def make_tensor(
    shape: Shape, dtype: torch.dtype = torch.float64, seed: int = 0, low: float = -2.0, high: float = 2.0
) -> torch.Tensor:
    """Return a tensor of values between ``low`` and ``high`` (integers from -4 to 4) that depend only on ``seed``."""
    generator = torch.Generator().manual_seed(seed + 17)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(-4 if dtype.is_signed else 0, 5, shape, generator=generator).to(dtype)
    drawn = _round_to_64ths(torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low)
    if dtype.is_complex:
        return torch.complex(drawn, _round_to_64ths(torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5)).to(dtype)
    return drawn.to(dtype)


def _round_to_64ths(x: torch.Tensor) -> torch.Tensor:
    """Round to few binary digits: sums of addends are then exact, and reproductions are short."""
    return (x * 64).round() / 64


def run_plain(op: Any, sample: Sample, **further: Any) -> Any:
    """Return the result of plain torch. The arguments are clones, because the operator may write to them."""
    args, kwargs = map_tensors(lambda x: x.detach().clone(), sample.arguments)
    return op(*args, **kwargs, **further)


def error_in_plain_torch(op: Any, sample: Sample) -> Exception | None:
    """Return the error that plain torch raises for the sample; None if it accepts the sample."""
    try:
        run_plain(op, sample)
    except Exception as error:  # any error of the operator
        return error
    return None
