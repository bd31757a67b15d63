"""Placement forms: read every form in which users write placements, and print placements with mesh dim names.

The forms are one placement per mesh dim in order, a mapping from mesh dim names, the text that layouts print, and a
:class:`Partition`. What raises depends on the form and the mesh alone, so all ranks raise together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.tracing import unwrap_graph_constant
from ..errors import PlacementError
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Partition, Placement, Replicate, Shard, normalize_placements, parse_placement


def is_placement_form(given: Any) -> bool:
    """Return True if ``given`` has the type of a form of placements. A mesh does not."""
    return isinstance(unwrap_graph_constant(given), (Placement, list, tuple, Mapping, str, Partition))


def split_mesh_and_placements(device_mesh: Any, placements: Any) -> tuple[Any, Any]:
    """Return (mesh, placements) of a call's arguments; placements passed in place of the mesh give (None, placements)."""
    if placements is None and device_mesh is not None and is_placement_form(device_mesh):
        return None, device_mesh
    return device_mesh, placements


_BY_NAME = object()  # marks the cache key of a mapping: no form that a user writes is equal to it


def hashable_form(given: Any) -> Any:
    """Return a value that caches can look up: equal for equal forms, hashable if the placements are."""
    if isinstance(given, (list, tuple)):
        return tuple(given)
    return (_BY_NAME, *given.items()) if isinstance(given, Mapping) else given


def resolve_placements(given: Any, mesh: DeviceMesh, ndim: int) -> tuple[Placement, ...]:
    """Return one placement per mesh dim of ``given``, with non-negative tensor dims. Mesh dims without one are replicated.

    Raises:
        PlacementError: not placements, or they do not fit the mesh or a tensor of ``ndim`` dims.
    """
    return normalize_placements(read_placements(given, mesh, ndim), mesh.ndim, ndim)


def read_placements(given: Any, mesh: DeviceMesh, ndim: int | None = None) -> Any:
    """Return the placements of a form in the order of the mesh dims. Mesh dims that it leaves out are replicated.

    Arguments and errors are those of :func:`read_form`.
    """
    placements = read_form(given, mesh, ndim)
    return tuple(placements.get(i, Replicate()) for i in range(mesh.ndim)) if isinstance(placements, dict) else placements


def read_form(given: Any, mesh: DeviceMesh, ndim: int | None = None) -> Any:
    """Return the placements of a form: by mesh dim number for a mapping or text with names, else in order or unchanged.

    A mapping and text with mesh dim names give a dict, other text and a :class:`Partition` a tuple. Everything else is returned
    unchanged. The number of placements and their tensor dims are not checked.

    Args:
        ndim: number of dims of the tensor, None if it is not known yet.

    Raises:
        PlacementError: text that cannot be read, a mesh dim that the mesh does not have or that is named twice, or a partition
            with more entries than tensor dims.
    """
    if isinstance(given, (list, tuple)):  # the most frequent form
        return given
    given = unwrap_graph_constant(given)
    if isinstance(given, str):
        return _read_text(given, mesh, ndim)
    if isinstance(given, Mapping):
        return _place_by_name(list(given.items()), mesh.mesh_dim_names or (), given)
    if isinstance(given, Partition):
        return _read_partition(given, mesh, ndim)
    return given


def _place_by_name(pairs: Sequence[tuple[Any, Any]], names: Sequence[Any], form: Any) -> dict[int, Any]:
    """Return placements by number of the mesh dim, from pairs (mesh dim name, placement) of the argument ``form``."""
    placed: dict[int, Any] = {}
    for name, placement in pairs:
        mesh_dim = _find_mesh_dim(name, names, form)
        if mesh_dim in placed:
            raise PlacementError(f"{form!r} has mesh dim {name!r} twice; give one placement for each mesh dim")
        placed[mesh_dim] = placement
    return placed


def _find_mesh_dim(name: Any, names: Sequence[Any], form: Any) -> int:
    """Return the index of the mesh dim of this name; raise with advice if there is none."""
    if name in names:
        return names.index(name)
    advice = "its mesh dims are " + ", ".join(map(repr, names))
    if all(str(own).isdigit() for own in names):
        advice = "it has no names: pass mesh_dim_names= to init_device_mesh, or give a list with one placement for each mesh dim"
    raise PlacementError(f"{form!r}: the mesh has no mesh dim {name!r}; {advice}")


def _read_partition(partition: Partition, mesh: DeviceMesh, ndim: int | None) -> tuple[Placement, ...]:
    """Return one placement per mesh dim for a partition, which names the mesh dims of each tensor dim."""
    if ndim is not None and len(partition.dims) > ndim:
        raise PlacementError(f"{partition!r} has {len(partition.dims)} entries for a tensor of {ndim} dims; leave the last out")
    names = mesh.mesh_dim_names or ()
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for dim, dim_names in enumerate(partition.dims):
        mesh_dims = [_find_mesh_dim(name, names, partition) for name in dim_names]
        in_order = mesh_dims == sorted(mesh_dims)
        for level, mesh_dim in enumerate(mesh_dims):
            placements[mesh_dim] = Shard(dim, None, None if in_order else level)
    for name in partition.unreduced:
        placements[_find_mesh_dim(name, names, partition)] = Partial()
    return tuple(placements)


# --- text of the placements on a mesh: printed and read here; the text of one placement is in placement.py ----------------
def placements_text(placements: Sequence[Placement], mesh: DeviceMesh) -> str:
    """Return placements as text that :func:`read_placements` reads, with names or numbers of the mesh dims.

    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    >>> placements_text((Shard(0), Replicate()), mesh), read_placements("dp=S(0), tp=R", mesh)
    ('dp=S(0), tp=R', (Shard(dim=0), Replicate()))
    """
    return ", ".join(f"{name}={placement}" for name, placement in zip(mesh.named(range(mesh.ndim)), placements, strict=True))


LAYOUT_TEXT = re.compile(
    r"(?P<tensor>\w+\[(?P<sizes>[\d, ]*)\]) (?:on )?\((?P<placements>.*?)\)(?:, stride=\((?P<stride>[\d, ]*)\))?"
)
"""The text of a layout: dtype and shape of the tensor, placements in parentheses, and strides that are not row-major."""


def _read_text(text: str, mesh: DeviceMesh, ndim: int | None) -> Any:
    """Return the placements in ``text``: in parentheses or not, or in the text of a layout of a tensor with ``ndim`` dims."""
    inside = text.strip()
    if match := LAYOUT_TEXT.fullmatch(inside):
        if ndim not in (None, len(re.findall(r"\d+", match["sizes"]))):
            raise PlacementError(f"{text!r} is not the layout of a tensor with {ndim} dims; write only the placements")
        inside = match["placements"]
    elif inside[:1] in ("(", "[") and inside[-1:] in (")", "]"):
        inside = inside[1:-1]
    words = _split_words(inside)
    named = [(name.strip(), word) for name, equals, word in (word.partition("=") for word in words) if equals and "(" not in name]
    if not named:
        return tuple(map(parse_placement, words))
    if len(named) < len(words):
        raise PlacementError(f"{text!r} has placements with and without the name of a mesh dim; name all of them, or none")
    names = [str(name) for name in mesh.named(range(mesh.ndim))]
    return _place_by_name([(name, parse_placement(word)) for name, word in named], names, text)


def _split_words(text: str) -> list[str]:
    """Return the words between the commas of ``text`` that are not in parentheses. A comma at the end adds no word."""
    words, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and not depth:
            words.append("")
        else:
            words[-1] += character
    return words if words[-1].strip() else words[:-1]
