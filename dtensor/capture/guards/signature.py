"""Signature: the arguments of a call and the modes around it, as a key. Equal keys select the same recordings.

The module also has the checks of tensor metadata that a replay makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from ...base.modes import MODES, mode_values
from ...base.torch_internals import TensorBase, TensorGuards, autocast_enabled, count_function_modes, pytree
from ...comm import PerRank
from ...errors import CaptureError
from ...mesh.device_mesh import DeviceMesh
from ...random.draw import RANDOM_MODE
from ...tensor.dtensor import DTensor
from .guard_discovery import discover_guards
from .object_model import VALUES, ById, guarded_attributes, has_user_attributes, have_no_user_attributes, value_key
from .setting_guards import operator_choice_settings

_ONLY_DTENSOR = {DTensor}
_LAYOUT = attrgetter("_layout")
_DTENSOR_KEY = attrgetter("_layout", "requires_grad")
_AUTOCAST_STATE = (torch.is_autocast_enabled, torch.get_autocast_dtype)


class Signature(NamedTuple):
    """The signature of one call.

    Attributes:
        key: static arguments, metadata of tensors, and which arguments are the same tensor.
        tensors: each tensor once, in order.
        rebuild: returns ``(args, kwargs)`` with other tensors in place of ``tensors``.
        may_differ: whether the sizes of a tensor may differ between ranks.
    """

    key: tuple[Any, ...]
    tensors: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    may_differ: bool = False

    @property
    def meshes(self) -> tuple[DeviceMesh, ...]:
        """The meshes of the DTensors, in order."""
        return tuple(dict.fromkeys(x._layout.mesh for x in self.tensors if isinstance(x, DTensor)))


def make_signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Return the signature of a call with these arguments."""
    only_distinct_dtensors = not kwargs and {*map(type, args)} <= _ONLY_DTENSOR and len({*map(id, args)}) == len(args)
    if only_distinct_dtensors and have_no_user_attributes(args):  # the fast path
        return Signature((*map(_DTENSOR_KEY, args),), args, lambda tensors: (tuple(tensors), {}))
    leaves, tree = pytree.tree_flatten((args, kwargs))
    key: list[Any] = [tree]
    tensors: list[Any] = []
    numbers: dict[int, int] = {}
    places: list[int | None] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            key.append(_static_key(leaf))
            places.append(None)
            continue
        number = numbers.setdefault(id(leaf), len(tensors))
        places.append(number)
        key.append((number, type(leaf), guarded_metadata(leaf, is_argument=True), _attributes_key(leaf)))
        if number == len(tensors):
            tensors.append(leaf)

    def rebuild(replacements: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        filled = [leaf if place is None else replacements[place] for leaf, place in zip(leaves, places, strict=True)]
        rebuilt: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(filled, tree)
        return rebuilt

    return Signature(tuple(key), tensors, rebuild, any(map(may_differ_across_ranks, tensors)))


def may_differ_across_ranks(x: torch.Tensor) -> bool:
    """Return True if the sizes of a tensor may differ between ranks: it is a plain tensor with at least one dim."""
    return not (isinstance(x, (DTensor, PerRank)) or x.ndim == 0 or MODES.implicit_replication)


def _attributes_key(x: torch.Tensor) -> tuple[Any, ...]:
    """Return a key of the attributes that user code has set on a tensor."""
    if not has_user_attributes(x):
        return ()
    return tuple((name, _static_key(value)) for name, value in guarded_attributes(x).items())


def _static_key(value: Any) -> Any:
    """Return a key of a Python argument. Tensors that it refers to are refused at their first use."""
    if type(value) in VALUES:
        return value_key(value)
    return ById(value), tuple(discover_guards(value).key)


def guarded_metadata(x: torch.Tensor, is_argument: bool = False) -> Any:
    """Return the metadata of a tensor that the computation depends on."""
    if isinstance(x, DTensor):
        return x._layout, x.requires_grad
    if isinstance(x, PerRank):
        if is_argument:
            raise CaptureError(
                "capture: an argument is a PerRank tensor (the local tensors of all ranks); pass a DTensor: "
                "DTensor.from_local(x, mesh, placements)"
            )
        return tuple(guarded_metadata(shard) for shard in x.shards)
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg(), x.is_inference()


def make_picker(numbers: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that picks the items with these numbers from a sequence."""
    first = numbers[0] if numbers else 0
    if [*numbers] == [*range(first, first + len(numbers))]:
        return itemgetter(slice(first, first + len(numbers)))
    return itemgetter(*numbers)


class TensorCheck:
    """Checks in one comparison that tensors have the types, sizes, strides, dtypes, devices and flags of earlier tensors.

    Torch's comparison may also fail for equal tensors, because it sees modes. Then ``describe(tensors) == expected`` decides.

    Args:
        describe: returns the facts of tensors that must be equal.
        expected: these facts of the earlier tensors.
    """

    __slots__ = ("_describe", "_expected", "_matches_at_once")

    def __init__(self, describe: Callable[[Sequence[Any]], Any], expected: Any) -> None:
        self._describe, self._expected = describe, expected
        self._matches_at_once: Callable[..., bool] = lambda *_: False  # before the first comparison

    def __call__(self, tensors: Sequence[Any]) -> bool:
        if self._matches_at_once(*tensors):
            return True
        if self._describe(tensors) != self._expected:
            return False
        if tensors:
            self._matches_at_once = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return True


def strides_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [*map(TensorBase.stride, tensors)]


def _describe_tensors(tensors: Sequence[Any]) -> list[Any]:
    return [(type(x), guarded_metadata(x)) for x in tensors]


class MetadataGuard:
    """Checks the metadata of tensors of a guard set at each call.

    The metadata of a DTensor is its layout and ``requires_grad``. A plain tensor has sizes, strides, dtype, device and flags.

    Args:
        numbers: of the tensors in the guard set.
        tensors: all tensors of the guard set.
    """

    __slots__ = ("_check_known_types", "_layouts", "_other_metadata", "_pick_dtensors", "_pick_known_types", "_pick_other_types")

    def __init__(self, numbers: Sequence[int], tensors: Sequence[Any]) -> None:
        dtensors = [number for number in numbers if type(tensors[number]) is DTensor]
        plain = [number for number in numbers if type(tensors[number]) in (torch.Tensor, torch.nn.Parameter)]
        known = {*dtensors, *plain}
        self._pick_dtensors, self._pick_known_types = make_picker(dtensors), make_picker([*dtensors, *plain])
        self._pick_other_types = make_picker([number for number in numbers if number not in known])
        self._layouts = [*map(_LAYOUT, self._pick_dtensors(tensors))]
        self._other_metadata = _describe_tensors(self._pick_other_types(tensors))
        self._check_known_types = TensorCheck(_describe_tensors, _describe_tensors(self._pick_known_types(tensors)))

    def holds(self, tensors: Sequence[Any]) -> bool:
        """Return True if the metadata of the tensors is unchanged."""
        return (
            self._check_known_types(self._pick_known_types(tensors))
            and [*map(_LAYOUT, self._pick_dtensors(tensors))] == self._layouts
            and (not self._other_metadata or _describe_tensors(self._pick_other_types(tensors)) == self._other_metadata)
        )


def current_modes() -> tuple[Any, ...]:
    """Return the modes and settings that change the result of an operator."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_enabled() and tuple([state(kind) for state in _AUTOCAST_STATE for kind in ("cpu", "cuda")]),
        mode_values(),
        RANDOM_MODE.mode,
        torch.get_default_dtype(),
        count_function_modes() and torch.get_default_device(),
        operator_choice_settings(),
    )
