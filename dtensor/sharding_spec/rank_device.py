"""Rank and device of a shard: a place, in the notation ``"rank:0/cuda:1"``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import MeshError
from ..mesh.init_world import has_processes

_PLACE_PATTERN = re.compile(r"rank:(?P<rank>\d+)(/(?P<device>[a-z]+(:\d+)?))?|(?P<alone>[a-z]+(:\d+)?)")


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Rank and device of a shard.

    A device without a rank means the rank with its index, as ``torchrun`` numbers them on one machine.

    >>> Place.of("rank:1/cuda:3"), Place.of(2), Place.of("cuda:1"), Place.of(torch.device("cpu"))
    (rank:1/cuda:3, rank:2, rank:1/cuda:1, rank:0/cpu)
    """

    rank: int
    device: str | None = None

    @staticmethod
    def of(notation: Any) -> Place:
        """Return the place that text such as ``"rank:0/cuda:1"``, a rank or a torch device names.

        Raises:
            MeshError: it names none.
        """
        if isinstance(notation, Place):
            return notation
        if isinstance(notation, torch.device):
            notation = str(notation)
        if isinstance(notation, int) and not isinstance(notation, bool) and notation >= 0:
            return Place(notation)
        match = _PLACE_PATTERN.fullmatch(notation) if isinstance(notation, str) else None
        device = None if match is None else match["device"] or match["alone"]
        if match is None or (device is not None and not _is_device(device)):
            raise MeshError(
                f'{notation!r} is not a device placement; write "rank:0/cuda:0", "rank:1/cpu", "rank:2", "cuda:1", a '
                "rank or a torch.device"
            )
        if match["rank"] is not None:
            return Place(int(match["rank"]), device)
        return Place(torch.device(match["alone"]).index or 0, device)

    def __str__(self) -> str:
        return f"rank:{self.rank}" + (f"/{self.device}" if self.device else "")

    __repr__ = __str__


def _is_device(text: str) -> bool:
    """Return True if torch can parse ``text`` as a device."""
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def common_device_type(places: Iterable[Place]) -> str:
    """Return the one device type that the places name; the CPU if they name none, or in process if it is missing.

    If all ranks are in this process and it lacks such a device, the CPU replaces it.

    Raises:
        MeshError: the places have several device types.
    """
    types = sorted({torch.device(place.device).type for place in places if place.device is not None})
    if len(types) > 1:
        raise MeshError(f"one tensor's shards live on devices of one type, got {types}; choose one of them")
    if not types:
        return "cpu"
    (device_type,) = types
    if device_type != "cpu" and not has_processes() and not torch.get_device_module(device_type).is_available():
        return "cpu"
    return device_type


def mesh_ranks_of(places: Iterable[Place]) -> dict[Place, int]:
    """Return the mesh rank of each place: its rank, or in process one number per device if a rank has several.

    With process groups it is the rank of the place: a process uses one device, so all blocks of a rank are on it. With all
    ranks in this process, each device of a rank is a separate mesh rank, numbered in order, as soon as some rank has several.
    """
    ordered = sorted(set(places), key=lambda place: (place.rank, _device_sort_key(place.device)))
    if has_processes() or len({place.rank for place in ordered}) == len(ordered):
        return {place: place.rank for place in ordered}
    return {place: number for number, place in enumerate(ordered)}


def _device_sort_key(device: str | None) -> tuple[str, int]:
    kind, _, index = (device or "").partition(":")
    return kind, int(index or 0)
