"""The arguments of a call and the modes around it, as a key: equal keys mean that a replay computes what the function would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from ..base.modes import MODES, switches
from ..base.torch_internals import TensorBase, TensorGuards, autocast_enabled, count_function_modes, pytree
from ..comm import PerRank
from ..errors import CaptureError
from ..mesh.device_mesh import DeviceMesh
from ..random.draw import DRAWING
from ..tensor.dtensor import DTensor
from .guard_discovery import Environment
from .object_ownership import VALUES, ById, all_bare, attributes_of, bare, value_of
from .setting_guards import chosen

_DISTRIBUTED = {DTensor}
_LAYOUT = attrgetter("_layout")
_KEY = attrgetter("_layout", "requires_grad")
_AUTOCAST = (torch.is_autocast_enabled, torch.get_autocast_dtype)


class Signature(NamedTuple):
    """One call.

    Attributes:
        key: static arguments, metadata of tensors, and which places hold the same tensor.
        tensors: each tensor once, in order.
        rebuild: (args, kwargs) with other tensors in their places.
        plain: whether there are plain tensors among them, whose sizes may change on one rank alone.
    """

    key: tuple[Any, ...]
    tensors: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    plain: bool = False

    @property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The meshes of the distributed tensors, in order."""
        return tuple(dict.fromkeys(x._layout.mesh for x in self.tensors if isinstance(x, DTensor)))


def sign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call with these arguments."""
    usual = not kwargs and {*map(type, args)} <= _DISTRIBUTED and len({*map(id, args)}) == len(args)
    if usual and all_bare(args):  # the most frequent form
        return Signature((*map(_KEY, args),), args, _positional)
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
        key.append((number, type(leaf), described(leaf, argument=True), () if bare(leaf) else _put_on(leaf)))
        if number == len(tensors):
            tensors.append(leaf)

    def rebuild(given: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = [leaf if place is None else given[place] for leaf, place in zip(leaves, places, strict=True)]
        made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(filled, tree)
        return made

    return Signature(tuple(key), tensors, rebuild, any(map(may_differ, tensors)))


def may_differ(x: torch.Tensor) -> bool:
    """Whether the sizes of a tensor are one rank's affair."""
    return not (isinstance(x, (DTensor, PerRank)) or x.ndim == 0 or MODES.implicit_replication)


def _positional(given: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(given), {}


def _put_on(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple((name, static(held)) for name, held in attributes_of(x).items())


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
                "capture: an argument is a PerRank tensor (the local tensors of all ranks); pass a DTensor: "
                "DTensor.from_local(x, mesh, placements)"
            )
        return tuple(described(shard) for shard in x.shards)
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference()


def picking(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Gives the items of these numbers."""
    first = numbers[0] if numbers else 0
    if [*numbers] == [*range(first, first + len(numbers))]:
        return itemgetter(slice(first, first + len(numbers)))
    return itemgetter(*numbers)


class Alike:
    """Whether tensors are as others were: of the same types, sizes, strides, dtypes, devices and flags, in one comparison.

    Args:
        facts: what of them decides where that one fails: torch also compares what modes make of a tensor.
        known: these facts.
    """

    __slots__ = ("_at_once", "_facts", "_known")

    def __init__(self, facts: Callable[[Sequence[Any]], Any], known: Any) -> None:
        self._facts, self._known, self._at_once = facts, known, _never

    def __call__(self, tensors: Sequence[Any]) -> bool:
        if self._at_once(*tensors):
            return True
        if self._facts(tensors) != self._known:
            return False
        if tensors:
            self._at_once = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return True


def _never(*_: Any) -> bool:
    return False


def strides_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [*map(TensorBase.stride, tensors)]


def _described(tensors: Sequence[Any]) -> list[Any]:
    return [(type(x), described(x)) for x in tensors]


class Metadata:
    """What a replay takes for granted of tensors of the survey, by their numbers: layouts (of plain ones sizes, strides, dtype,
    device), and whether they require gradients. Checked at each call."""

    __slots__ = ("_alike", "_apart", "_distributed", "_known", "_layouts", "_together")

    def __init__(self, numbers: Sequence[int], tensors: Sequence[Any]) -> None:
        distributed = [number for number in numbers if type(tensors[number]) is DTensor]
        plain = [number for number in numbers if type(tensors[number]) in (torch.Tensor, torch.nn.Parameter)]
        self._distributed, self._together = picking(distributed), picking([*distributed, *plain])
        self._apart = picking([number for number in numbers if number not in {*distributed, *plain}])
        self._layouts, self._known = [*map(_LAYOUT, self._distributed(tensors))], _described(self._apart(tensors))
        self._alike = Alike(_described, _described(self._together(tensors)))

    def hold(self, tensors: Sequence[Any]) -> bool:
        """Whether it is so."""
        return (
            self._alike(self._together(tensors))
            and [*map(_LAYOUT, self._distributed(tensors))] == self._layouts
            and (not self._known or _described(self._apart(tensors)) == self._known)
        )


def modes() -> tuple[Any, ...]:
    """The switches that change what operations do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_enabled() and tuple([f(kind) for f in _AUTOCAST for kind in ("cpu", "cuda")]),
        switches(),
        DRAWING.mode,
        torch.get_default_dtype(),
        count_function_modes() and torch.get_default_device(),
        chosen(),
    )
