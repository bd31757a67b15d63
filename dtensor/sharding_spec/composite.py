"""Composite specs: the specs of a model by names of parameters and submodules (globs), and functions that make specs.

A spec is another way to write a mesh and placements: a grid of blocks with the place (or, with ``"rank:0|rank:1"``, the
replicas) of each. It validates itself, prints as the call that makes it, and converts to and from plain data for YAML or JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..errors import PlacementError
from ..layout.layout import Layout
from ..layout.splits import chunk_sizes
from .rank_device import Place
from .specs import MeshSplit, SingleSplit, Spec, Whole, parse_replicas


@dataclass(frozen=True, slots=True, repr=False)
class Composite:
    """Specs by the names of parameters and submodules. Names are dotted paths of globs.

    A value: no communication. See ``composite``.

    >>> composite({"net*": "rank:0"}).find("net7.weight")
    whole('rank:0')
    """

    specs: tuple[tuple[str, Spec | Composite], ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """Return every place that has a shard, in order of appearance."""
        return tuple(dict.fromkeys(place for _, spec in self.specs for place in spec.places))

    def find(self, name: str) -> Spec | None:
        """Return the spec for the parameter ``name`` by the best matching key, or None; a submodule's spec applies below it.

        >>> composite({"net*": "rank:0"}, net2=composite(weight=single_split(0, [0, 1]))).find("net2.weight")
        single_split(0, ['rank:0', 'rank:1'])
        """
        match = self._find_best(tuple(name.split(".")))
        return match[1] if match else None

    def names_parameter(self, name: str) -> bool:
        """Return True if the best matching key names the parameter itself, not a submodule that contains it."""
        match = self._find_best(tuple(name.split(".")))
        return match is not None and match[2]

    def matching_keys(self, name: str) -> set[str]:
        """Return the keys (globs of dotted paths) that match the parameter ``name`` or a module that contains it."""
        return {key for key, _ in self.specs if is_prefix_match(key.split("."), name.split("."))}

    def _find_best(self, path: tuple[str, ...]) -> tuple[int, Spec, bool] | None:
        """Return the best matching spec as (rank of the match, spec, whether its key names the full path), or None."""
        best: tuple[int, Spec, bool] | None = None
        for key, spec in self.specs:
            tokens = key.split(".") if key else []
            if not is_prefix_match(tokens, path):
                continue
            inner = spec._find_best(path[len(tokens) :]) if isinstance(spec, Composite) else (0, spec, len(tokens) == len(path))
            if inner is not None:
                rank = inner[0] + sum(2 if token == part else 1 for token, part in zip(tokens, path, strict=False))
                best = (rank, *inner[1:]) if best is None or rank > best[0] else best
        return best

    def to_data(self) -> Any:
        """Return the spec as dicts, lists, strings and numbers, for YAML or JSON."""
        return {"composite": {name: spec.to_data() for name, spec in self.specs}}

    def __repr__(self) -> str:
        """Return the call of ``composite`` that makes this spec."""
        plain = all(name.isidentifier() for name, _ in self.specs)
        items = ", ".join(f"{name}={spec!r}" if plain else f"{name!r}: {spec!r}" for name, spec in self.specs)
        return f"composite({items})" if plain else f"composite({{{items}}})"


def is_prefix_match(tokens: Sequence[str], path: Sequence[str]) -> bool:
    """Return True if globs match the first parts of a dotted path, one glob per part."""
    return len(tokens) <= len(path) and all(fnmatchcase(part, token) for token, part in zip(tokens, path, strict=False))


# --- constructors ----------------------------------------------------------------------------------------------------------
def single_split(dim: int, placements: Sequence[Any], shard_sizes: Sequence[int] | None = None) -> SingleSplit:
    """Return the spec that splits tensor dim ``dim`` over ``placements``, in order.

    Args:
        placements: places ("rank:0/cuda:0", "rank:1/cpu", ranks, torch devices). A place may repeat and then has several
            shards.
        shard_sizes: size of each shard; default as ``torch.chunk``.

    Raises:
        PlacementError, MeshError: no places, or not as many sizes.

    No communication.

    >>> single_split(0, ["rank:0", "rank:1"], [1, 2])
    single_split(0, ['rank:0', 'rank:1'], [1, 2])
    """
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise PlacementError(f"single_split: the split dim is an int, got {dim!r}")
    if isinstance(placements, str) or not len(placements):
        raise PlacementError(f"single_split: pass a list of device placements, one for each shard, got {placements!r}")
    sizes = None if shard_sizes is None else tuple(int(size) for size in shard_sizes)
    if sizes is not None and (len(sizes) != len(placements) or min(sizes) < 0):
        raise PlacementError(
            f"single_split: {len(sizes)} shard_sizes {list(sizes)} for {len(placements)} shards; give one size for each"
        )
    return SingleSplit(dim, tuple(parse_replicas(each) for each in placements), sizes)


def mesh(placements: Any, shard_sizes: Sequence[Sequence[int] | None] | None = None) -> MeshSplit:
    """Return the spec that shards a tensor into a grid of blocks: an array of places with as many dims as the tensor.

    Args:
        placements: a nested list or array of places; an entry may repeat.
        shard_sizes: for each tensor dim the sizes of its blocks, or None for those of ``torch.chunk``.

    Raises:
        PlacementError, MeshError: ragged or empty, or sizes that do not fit.

    >>> mesh([[0, 1], [2, 3]]).mesh_and_placements((4, 8))
    (DeviceMesh('cpu', [[0, 1], [2, 3]]), (Shard(dim=0), Shard(dim=1)))

    No communication.
    """
    try:
        array = np.asarray(placements.tolist() if hasattr(placements, "tolist") else placements, dtype=object)
    except ValueError as error:
        raise PlacementError(
            f"mesh: the array of device placements is ragged: {placements!r}; give rows of equal length"
        ) from error
    if array.size == 0 or array.ndim == 0 or any(isinstance(each, (list, tuple)) for each in array.reshape(-1)):
        raise PlacementError(f"mesh: pass an n-d array of device placements with rows of equal length, got {placements!r}")
    sizes = None if shard_sizes is None else tuple(None if s is None else tuple(int(n) for n in s) for s in shard_sizes)
    if sizes is not None and (
        len(sizes) != array.ndim or any(s is not None and len(s) != n for s, n in zip(sizes, array.shape, strict=True))
    ):
        raise PlacementError(
            f"mesh: shard_sizes {shard_sizes!r} do not fit an array of shape {array.shape}; "
            "give for each dim None or as many sizes"
        )
    return MeshSplit(tuple(array.shape), tuple(parse_replicas(each) for each in array.reshape(-1)), sizes)


def whole(*placements: Any) -> Whole:
    """Return the spec of a tensor that is complete on one place, or has a copy on each of several.

    No communication.

    Raises:
        MeshError: no place, or one twice.

    >>> whole("rank:0", 1)
    whole('rank:0|rank:1')
    """
    if not placements:
        raise PlacementError("whole: pass one or several device placements")
    return Whole(tuple(place for each in placements for place in parse_replicas(each)))


def composite(specs: Mapping[str, Any] | None = None, **named: Any) -> Composite:
    """Return the spec of a module, from names of parameters or submodules to specs, composites or single places.

    Names are dotted paths of globs.

    >>> composite(net1="rank:0", net2=composite(weight=single_split(0, [0, 1])))
    composite(net1=whole('rank:0'), net2=composite(weight=single_split(0, ['rank:0', 'rank:1'])))

    No communication. A value that is not a spec raises ``MeshError``.
    """
    items = {**(specs or {}), **named}
    if not items:
        raise PlacementError("composite: name at least one parameter or submodule")
    return Composite(tuple((name, as_spec(spec)) for name, spec in items.items()))


def as_spec(notation: Any) -> Any:
    """Return ``notation`` as a spec: a spec unchanged, a place as the complete tensor there, a mapping as a composite.

    Raises:
        MeshError: it is none of these.

    No communication.

    >>> as_spec("rank:1"), as_spec({"net1": 0})
    (whole('rank:1'), composite(net1=whole('rank:0')))
    """
    if isinstance(notation, (Spec, Composite)):
        return notation
    return composite(notation) if isinstance(notation, Mapping) else Whole(parse_replicas(notation))


def spec_of(layout: Layout) -> Spec:
    """Return the spec that describes a layout, with ranks as places.

    Raises:
        PlacementError: the layout is partial.

    >>> from dtensor import DeviceMesh, Layout, Shard
    >>> spec_of(Layout.of(DeviceMesh("cpu", [[0, 1], [2, 3]]), [Shard(1), Shard(1)], (2, 5)))
    single_split(1, ['rank:0', 'rank:1', 'rank:2', 'rank:3'], [2, 1, 1, 1])

    No communication.
    """
    if layout.is_partial:
        raise PlacementError(f"{layout!r} is Partial, and no sharding spec describes partial values; reduce it first")
    counts = [1 if split is None else len(split.sizes) for split in layout.splits]
    shards: dict[tuple[int, ...], list[Place]] = {}
    for member, rank in enumerate(layout.mesh.ranks):
        coordinate = layout.mesh.coordinates[member]
        index = tuple(0 if split is None else layout.mesh.index_over(split.mesh_dims, coordinate) for split in layout.splits)
        shards.setdefault(index, []).append(Place(rank))
    ordered = tuple(tuple(shards[index]) for index in np.ndindex(*counts))
    sharded_dims = [d for d, split in enumerate(layout.splits) if split is not None]
    sizes = {d: layout.splits[d].sizes for d in sharded_dims}  # type: ignore[union-attr]  # a sharded dim has a split
    uneven = {d: s for d, s in sizes.items() if s != chunk_sizes(layout.shape[d], (len(s),))}
    match sharded_dims:
        case []:
            return Whole(ordered[0])
        case [d]:
            return SingleSplit(d, ordered, uneven.get(d))
    return MeshSplit(tuple(counts), ordered, tuple(uneven.get(d) for d in range(layout.ndim)) if uneven else None)


def from_data(data: Any) -> Any:
    """Return the spec that :meth:`to_data` wrote as plain data, as ``yaml.safe_load`` or ``json.load`` read it.

    Raises:
        PlacementError, MeshError: the data is not a spec.

    >>> from_data({"composite": {"net1": "rank:0", "net2": {"single_split": {"dim": 0, "placements": [0, 1]}}}})
    composite(net1=whole('rank:0'), net2=single_split(0, ['rank:0', 'rank:1']))

    No communication.
    """
    match data:
        case {"single_split": {"dim": dim, "placements": placements, **rest}} if rest.keys() <= {"shard_sizes"}:
            sizes: Any = rest.get("shard_sizes")
            return single_split(dim, placements, sizes)
        case {"mesh": {"placements": placements, **rest}} if rest.keys() <= {"shard_sizes"}:
            sizes = rest.get("shard_sizes")
            return mesh(placements, sizes)
        case {"composite": dict(named)}:
            return composite({name: from_data(item) for name, item in named.items()})
        case str() | int():
            return Whole(parse_replicas(data))
    raise PlacementError(
        f"{data!r} is not a sharding spec: write a device placement, or one of single_split, mesh, composite with their arguments"
    )
