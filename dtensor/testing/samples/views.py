"""Samples of the operations that rename, split, merge, drop or repeat dims."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Builder, Sample, Samples

F, INT, B, C = torch.float64, torch.int64, torch.bool, torch.complex128


def x(*shape: int, dtype: torch.dtype = F, seed: int = 0) -> torch.Tensor:
    return tensor(shape, dtype, seed)


def each_dtype(shape: tuple[int, ...], *args: object) -> list[Builder]:
    return [Sample((x(*shape, dtype=dtype), *args), {}, str(dtype)) for dtype in (F, INT, B, C)]


def reshapes() -> list[Builder]:
    shapes = (
        ((5, 6), (30,)),
        ((5, 6), (5, 2, 3)),
        ((5, 6), (5, 1, 6, 1)),
        ((30,), (5, 6)),
        ((2, 3, 7), (6, 7)),
        ((4, 6), (6, 4)),
        ((4, 6, 5), (8, 15)),
        ((1, 5), (5,)),
        ((5, 1, 6), (30,)),
        ((0, 4), (4, 0)),
        ((3, 0), (3, 0, 2)),
        ((1,), ()),
        ((), (1, 1)),
    )
    return [*each_dtype((5, 6), [30]), *(Sample((x(*old), list(new)), {}, f"{old} -> {new}") for old, new in shapes)]


def aliases() -> list[Builder]:
    return [Sample((x(5, 6), [30], [1])), Sample((x(5, 6), [5, 2, 3], [6, 3, 1])), Sample((x(6, 5).t(), [5, 6], [1, 5]))]


def strided() -> list[Builder]:
    return [
        Sample((x(5, 6), [5, 6], [6, 1]), {}, "its own"),
        Sample((x(5, 6), [3, 2], [7, 1], 2), {}, "a part"),
        Sample((x(5, 6), [4, 3], [1, 2]), {}, "overlapping", gradients=False),
        Sample((x(5, 6, dtype=INT).t(), [6], [5], 1), {}, "of a transpose"),
    ]


def transposes() -> list[Builder]:
    return [*each_dtype((5, 6, 7), 0, 2), Sample((x(5, 6), -1, -2)), Sample((x(5), 0, -1)), Sample((x(), 0, -1))]


def expansions() -> list[Builder]:
    return [
        Sample((x(5, 1), [5, 7])),
        Sample((x(5, 1), [-1, 7])),
        Sample((x(5, 6), [3, 5, 6])),
        Sample((x(1, 6), [4, 1, 6])),
        Sample((x(), [3])),
        Sample((x(0, 1), [2, 0, 3])),
    ]


def squeezes() -> list[Builder]:
    return [
        Sample((x(5, 1, 6),)),
        Sample((x(1, 1),)),
        Sample((x(5, 1, 6), 1)),
        Sample((x(5, 1, 6), -1)),
        Sample((x(1, 5, 1), [0, 2])),
        Sample((x(1, 5, 1), [])),
        Sample((x(), 0)),
    ]


def retyped() -> list[Builder]:
    return [
        Sample((x(5, 6), torch.float32), {}, "longer", gradients=False),
        Sample((x(5, 6).float(), F), {}, "shorter", gradients=False),
        Sample((x(5, 6), INT), {}, "as long", gradients=False),
        Sample((x(5, 6), F), {}, "itself"),
        Sample((x(5, 6, dtype=INT), torch.int16), {}, "longer"),
    ]


def with_copy(**samples: list[Builder]) -> dict[str, list[Builder]]:
    """The same samples for the variant that copies."""
    return {**samples, **{f"{name}_copy": given for name, given in samples.items()}}


SAMPLES: Samples = with_copy(
    view=reshapes(),
    transpose=transposes(),
    t=[*each_dtype((5, 6)), Sample((x(5),)), Sample((x(),))],
    permute=[*each_dtype((5, 6, 7), [2, 0, 1]), Sample((x(5, 6), [-1, 0])), Sample((x(), []))],
    unsqueeze=[*each_dtype((5, 6), 1), Sample((x(5, 6), -1)), Sample((x(), 0)), Sample((x(0, 3), 2))],
    squeeze=squeezes(),
    expand=expansions(),
    detach=[Sample((x(5, 6),)), Sample((x(),))],
    _reshape_alias=aliases(),
    view_as_real=[Sample((x(5, 6, dtype=C),)), Sample((x(dtype=C),))],
    view_as_complex=[Sample((x(5, 2),)), Sample((x(5, 6, 2),))],
    as_strided=strided(),
) | {
    "_unsafe_view": reshapes(),
    "view.dtype": retyped(),
    "view_copy.dtype": retyped(),
}
