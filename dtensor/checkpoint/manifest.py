"""The manifest: what a checkpoint holds and where, written last, so that a folder with a manifest is a complete checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..base.memory_order import contiguous_stride
from ..errors import CheckpointError
from .files import check_name, present, read_regular, replace_file, sha256, size_of, strict_json
from .remote import Address
from .tree import Stored, decode, dtype_of

NAME = "manifest.json"
_FORMAT = "dtensor checkpoint 1"


@dataclass(frozen=True, slots=True)
class Block:
    """A stored block of a tensor.

    Attributes:
        offset, shape: its place in the tensor.
        file: the file that holds it, in the checkpoint's folder.
        at: position in bytes of its first element there.
        digest: see ``digest``; None where whoever wrote it made none.
        stride: in elements; None is row-major.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    digest: int | None = None
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored tensor: its global shape, its dtype by name, and blocks that tile it."""

    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[Block, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's contents.

    Attributes:
        tensors: name -> entry.
        tree: the state's nesting and plain values, as ``tree.encode`` gives it.
        files: name -> size in bytes.
        beside: SHA-256 of the ``.metadata`` files that may lie beside it (see ``saving``): of another one, another program made
            it.
        links: files may be symbolic links, of which the cache of a model hub consists.
        notes: plain values beside the state (see ``series``).
    """

    tensors: dict[str, Entry]
    tree: Any
    files: dict[str, int]
    beside: tuple[str, ...] = field(default=())
    links: bool = False
    notes: Any = None

    def nested(self) -> Any:
        """The state's tree, with the places of its tensors."""
        return decode(self.tree, {name: Stored(name) for name in self.tensors})

    def write(self, folder: Address) -> None:
        """Put it into ``folder``, in place of an older one: one atomic rename."""
        said = {key: value for key, value in asdict(self).items() if key != "links"}
        body = json.dumps(said, separators=(",", ":"))
        text = json.dumps({"format": _FORMAT, "sha256": sha256(body.encode()), "body": body})
        replace_file(folder / NAME, text.encode())


def read_manifest(folder: Address) -> Manifest:
    """The manifest in ``folder``.

    Raises:
        CheckpointError: it is damaged, of another format, or a file is missing or has another size.
    """
    path = folder / NAME
    outer = strict_json(read_regular(path))
    body = outer["body"]
    if outer["format"] != _FORMAT:
        raise CheckpointError(f"{path} has the format {outer['format']!r}; this version reads {_FORMAT!r}")
    if outer["sha256"] != sha256(body.encode()):
        raise CheckpointError(f"{path} is damaged: it does not match its checksum")
    manifest = _from_json(strict_json(body), path)
    check_entries(manifest, path)
    _check_beside(manifest, folder)
    check_files(manifest, folder)
    return manifest


def check_files(manifest: Manifest, folder: Address) -> None:
    """Every file is there, with its size.

    Raises:
        CheckpointError: one is not.
    """
    for name, size in manifest.files.items():
        path = folder / name
        found = size_of(path, manifest.links)
        if found != size:
            raise CheckpointError(f"{path} has {found:,} bytes instead of {size:,}: the checkpoint is truncated or was changed")


def _check_beside(manifest: Manifest, folder: Address) -> None:
    path = folder / ".metadata"
    if manifest.beside and present(path) and sha256(read_regular(path)) not in manifest.beside:
        raise CheckpointError(
            f"{path} and {NAME} were not written by the same save: another program has saved into this folder "
            "since. Remove the older of the two"
        )


def _from_json(data: Any, path: Address) -> Manifest:
    tensors = {}
    for name, entry in data["tensors"].items():
        blocks = tuple(Block(*[_listed(block[part.name]) for part in fields(Block)]) for block in entry["blocks"])
        tensors[name] = Entry(tuple(entry["shape"]), entry["dtype"], blocks)
    files = {check_name(name, path): _count(size) for name, size in data["files"].items()}
    return Manifest(tensors, data["tree"], files, tuple(data["beside"]), notes=data.get("notes"))


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# --- what a manifest may say -----------------------------------------------------------------------------------------------
_MOST = 2**63 - 1  # elements and bytes that torch can count


def check_entries(manifest: Manifest, path: Address) -> None:
    """Every entry is a tensor that can be, whose blocks tile it and lie in the files; the tree names no other.

    Raises:
        CheckpointError: ``path`` says something else.
    """
    for name, entry in manifest.tensors.items():
        try:
            _check_entry(entry, manifest.files)
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged: {name!r} cannot be ({error})") from error
        for block in entry.blocks:
            check_name(block.file, path)
    decode(manifest.tree, dict.fromkeys(manifest.tensors))


def _check_entry(entry: Entry, files: Mapping[str, int]) -> None:
    width = entry.torch_dtype.itemsize
    shape = [_count(size) for size in entry.shape]
    if math.prod(size for size in shape if size) * width > _MOST:
        raise ValueError(f"shape {shape} is too large")
    for block in entry.blocks:
        box = [(_count(a), _count(n)) for a, n in zip(block.offset, block.shape, strict=True)]
        if any(a + n > size or not n for (a, n), size in zip(box, shape, strict=True)):
            raise ValueError(f"a block of shape {block.shape} at offset {block.offset} is outside of shape {shape}")
        stride = contiguous_stride(block.shape) if block.stride is None else [_count(step) for step in block.stride]
        last = sum((n - 1) * step for n, step in zip(block.shape, stride, strict=True))
        if _count(block.at) + (last + 1) * width > files[block.file]:
            raise ValueError(f"its block at {block.offset} ends after the end of {block.file}")
        if block.digest is not None and _count(block.digest) >= 2**64:
            raise ValueError("a digest is too large")
    if not tile(shape, [(block.offset, block.shape) for block in entry.blocks]):
        raise ValueError(f"its blocks do not cover shape {shape} exactly once")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is not a count")
    return value


def _apart(intervals: Iterable[tuple[int, int]]) -> bool:
    """Whether intervals, as start and end, are the same or do not meet."""
    return all(one[1] <= following[0] for one, following in pairwise(sorted(set(intervals))))


def tile(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offset, shape), each within ``shape`` and not empty, are disjoint and fill it."""
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    if len(boxes) < 2:
        return True
    sides = [[(offset[dim], offset[dim] + size[dim]) for offset, size in boxes] for dim in range(len(shape))]
    if all(map(_apart, sides)):  # the cells of a grid, which is the common case
        return len({tuple(offset) for offset, _ in boxes}) == len(boxes)
    starts, ends = np.array(sides).transpose(2, 1, 0)
    meet = (((starts[i] < ends[i + 1 :]) & (starts[i + 1 :] < ends[i])).all(1).any() for i in range(len(boxes) - 1))
    return not any(meet)
