"""The arguments of a call and the modes around it, as a key: equal keys mean that a replay computes what the function would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..comm import PerRank
from ..errors import CaptureError
from ..modes import MODES
from ..rules.draw import DRAWING
from ..tensor import DTensor
from .environment import VALUES, ById


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
    if isinstance(value, VALUES):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value
    return ById(value)


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


class Metadata(NamedTuple):
    """Tensors of the survey by their numbers, and what a replay takes for granted of each."""

    numbers: tuple[int, ...]
    layouts: list[Any]
    requires_grad: list[bool]

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Whether it is so."""
        found = [tensors[number] for number in self.numbers]
        return [x._layout if type(x) is DTensor else described(x) for x in found] == self.layouts and [
            x.requires_grad for x in found
        ] == self.requires_grad


def guards_of(numbers: Sequence[int], tensors: Sequence[Any]) -> Metadata:
    """The tensors as they are now."""
    found = [tensors[number] for number in numbers]
    layouts = [x._layout if type(x) is DTensor else described(x) for x in found]
    return Metadata(tuple(numbers), layouts, [x.requires_grad for x in found])


def modes() -> tuple[Any, ...]:
    """The switches that change what operations do."""
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast and tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        MODES.implicit_replication,
        MODES.explicit,
        DRAWING.mode,
        torch.get_default_dtype(),
        torch.get_deterministic_debug_mode(),
    )
