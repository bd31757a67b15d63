"""The arguments of a call and the modes around it, as a key: equal keys mean that a replay computes what the function would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from ..base.modes import MODES
from ..base.torch_internals import count_function_modes, pytree
from ..comm import PerRank
from ..errors import CaptureError
from ..random.draw import DRAWING
from ..tensor.dtensor import DTensor
from .belonging import VALUES, ById, value_of
from .survey import Environment

_DISTRIBUTED = frozenset((DTensor,))
_LAYOUT = attrgetter("_layout")
_REQUIRES_GRAD = attrgetter("requires_grad")
_METADATA = attrgetter("shape", "dtype", "device", "requires_grad")


class Signature(NamedTuple):
    """One call.

    Attributes:
        key: static arguments, metadata of tensors, and which places hold the same tensor.
        tensors: each tensor once, in order.
        rebuild: (args, kwargs) with other tensors in their places.
    """

    key: tuple[Any, ...]
    tensors: list[Any]
    rebuild: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def sign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call with these arguments."""
    if not kwargs:
        kinds = {type(value) for value in args}
        if kinds <= {DTensor} and len(set(map(id, args))) == len(args):  # the most frequent form
            return Signature(tuple([(x._layout, x.requires_grad) for x in args]), list(args), lambda given: (tuple(given), {}))
    leaves, tree = pytree.tree_flatten((args, kwargs))
    key: list[Any] = [tree]
    tensors: list[Any] = []
    numbers: dict[int, int] = {}
    places: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            key.append(static(leaf))
            places.append(None)
            continue
        number = numbers.setdefault(id(leaf), len(tensors))
        places.append(number)
        key.append((number, described(leaf, argument=True)))
        if number == len(tensors):
            tensors.append(leaf)

    def rebuild(given: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = [leaf if place is None else given[place] for leaf, place in zip(leaves, places, strict=True)]
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(filled, tree)
        return made

    return Signature(tuple(key), tensors, rebuild)


def static(value: Any) -> Any:
    """A Python argument as a part of a key."""
    if type(value) in VALUES:
        return value_of(value)
    return ById(value), tuple(Environment(value).key)  # what it holds; tensors in it are refused where they are used


def described(x: torch.Tensor, argument: bool = False) -> Any:
    """The metadata of a tensor that decide what is computed."""
    if isinstance(x, DTensor):
        return x._layout, x.requires_grad
    if isinstance(x, PerRank):
        if argument:
            raise CaptureError(
                "capture: an argument is the local tensors of ranks; pass a DTensor: DTensor.from_local(x, mesh, placements)"
            )
        return tuple(described(shard) for shard in x.shards)
    if argument and x.numel() != 1 and not MODES.implicit_replication:
        raise CaptureError(
            f"capture: an argument is a plain tensor of shape {tuple(x.shape)}, which may differ between ranks, so they might "
            "disagree on whether to replay; pass a DTensor (distribute_tensor(t, mesh, placements) or DTensor.from_local), "
            "or, if every rank holds the same, use `with dtensor.implicit_replication():`"
        )
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def picking(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Gives the items of these numbers."""
    return itemgetter(*numbers) if len(numbers) > 1 else lambda items: [items[number] for number in numbers]


class Metadata:
    """What a replay takes for granted of tensors of the survey, by their numbers: layouts (of plain ones sizes, strides, dtype,
    device), and whether they require gradients. Checked at each call, so in few, large comparisons."""

    __slots__ = ("_flags", "_layouts", "_others", "_plain", "_strides", "_tensors", "_whole")

    def __init__(self, numbers: Sequence[int], tensors: Sequence[Any]) -> None:
        distributed = [number for number in numbers if type(tensors[number]) is DTensor]
        plain = [number for number in numbers if type(tensors[number]) in (torch.Tensor, torch.nn.Parameter)]
        self._tensors, self._plain, kinds = picking(distributed), picking(plain), {*distributed, *plain}
        self._others = [(number, described(tensors[number])) for number in numbers if number not in kinds]
        found = self._found(tensors)
        self._layouts, self._flags, self._whole, self._strides = found

    def _found(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        distributed, plain = self._tensors(tensors), self._plain(tensors)
        return (
            [*map(_LAYOUT, distributed)],
            [*map(_REQUIRES_GRAD, distributed)],
            [*map(_METADATA, plain)],
            [*map(torch.Tensor.stride, plain)],
        )

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Whether it is so."""
        if not {*map(type, self._tensors(tensors))} <= _DISTRIBUTED:
            return False
        layouts, flags, whole, strides = self._found(tensors)
        return (
            layouts == self._layouts
            and flags == self._flags
            and whole == self._whole
            and strides == self._strides
            and all(described(tensors[number]) == known for number, known in self._others)
        )


def modes() -> tuple[Any, ...]:
    """The switches that change what operations do."""
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast and tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        MODES.implicit_replication,
        MODES.explicit,
        MODES.remembered,
        DRAWING.mode,
        torch.get_default_dtype(),
        count_function_modes() and torch.get_default_device(),
        torch.get_deterministic_debug_mode(),
    )
