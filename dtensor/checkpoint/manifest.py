"""Manifest: the contents of a checkpoint and their positions. It is written last, so a folder with a manifest is a complete
checkpoint.
"""

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
from .files import (
    StoragePath,
    check_file_name,
    damage_error,
    file_size,
    parse_strict_json,
    path_exists,
    read_file,
    replace_file,
    sha256,
)
from .tree import Stored, decode_tree, parse_dtype

MANIFEST_NAME = "manifest.json"
_FORMAT = "dtensor checkpoint 1"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Stored block of a tensor: its place in the tensor, and its place in a file.

    Attributes:
        offset, shape: position in the tensor.
        file: the file with the block, in the checkpoint's folder.
        at: position in bytes of its first element in the file.
        digest: see ``digest``; None if the writer made none.
        stride: in elements; None means row-major.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    at: int
    digest: int | None = None
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Stored tensor: its global shape, the name of its dtype, and blocks that tile it."""

    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[StoredBlock, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return parse_dtype(self.dtype)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a checkpoint: its tensors with their blocks, the tree of plain values, and the files.

    Attributes:
        tensors: name -> stored tensor.
        tree: nesting and plain values of the state, as ``tree.encode_tree`` returns them.
        files: name -> size in bytes.
        beside: SHA-256 of the ``.metadata`` files that may accompany it (see ``saving``). Another hash means that another
            program saved into the folder.
        links: files may be symbolic links, as in the cache of a model hub.
        notes: plain values in addition to the state (see ``manager``).
    """

    tensors: dict[str, StoredTensor]
    tree: Any
    files: dict[str, int]
    beside: tuple[str, ...] = field(default=())
    links: bool = False
    notes: Any = None

    def nested(self) -> Any:
        """Return the decoded tree of the state, with a ``Stored`` (a tensor's name) in place of each tensor."""
        return decode_tree(self.tree, {name: Stored(name) for name in self.tensors})

    def write(self, folder: StoragePath) -> None:
        """Write the manifest to ``folder`` in place of an older one, by one atomic rename."""
        contents = {key: value for key, value in asdict(self).items() if key != "links"}
        body = json.dumps(contents, separators=(",", ":"))
        text = json.dumps({"format": _FORMAT, "sha256": sha256(body.encode()), "body": body})
        replace_file(folder / MANIFEST_NAME, text.encode())


def read_manifest(folder: StoragePath) -> Manifest:
    """Read the manifest of this library's checkpoint in ``folder``, and check its checksum, entries and files.

    Raises:
        CheckpointError: it is damaged, of another format, or a file is missing or has another size.
    """
    path = folder / MANIFEST_NAME
    outer = parse_strict_json(read_file(path))
    body = outer["body"]
    if outer["format"] != _FORMAT:
        raise CheckpointError(
            f"{path} has the format {outer['format']!r}; load it with the version that wrote it (this one reads {_FORMAT!r})"
        )
    if outer["sha256"] != sha256(body.encode()):
        raise damage_error(f"{path} is damaged: it does not match its checksum")
    manifest = _parse_manifest(parse_strict_json(body), path)
    check_entries(manifest, path)
    _check_dcp_metadata(manifest, folder)
    check_files(manifest, folder)
    return manifest


def check_files(manifest: Manifest, folder: StoragePath) -> None:
    """Check that every file of the manifest exists in ``folder`` and has the recorded size.

    Raises:
        CheckpointError: a file is missing or has another size.
    """
    for name, size in manifest.files.items():
        path = folder / name
        actual = file_size(path, manifest.links)
        if actual != size:
            raise damage_error(f"{path} has {actual:,} bytes instead of {size:,}: the checkpoint is truncated or was changed")


def _check_dcp_metadata(manifest: Manifest, folder: StoragePath) -> None:
    """Raise if another program has replaced ``.metadata`` (torch's DCP) since the manifest was written."""
    path = folder / ".metadata"
    if manifest.beside and path_exists(path) and sha256(read_file(path)) not in manifest.beside:
        raise CheckpointError(
            f"{path} and {MANIFEST_NAME} were not written by the same save: another program has saved into this folder "
            "since. Remove the older of the two"
        )


def _parse_manifest(data: Any, path: StoragePath) -> Manifest:
    """Return the Manifest that decoded JSON describes; entries are not validated yet."""
    tensors = {}
    for name, entry in data["tensors"].items():
        blocks = []
        for block in entry["blocks"]:
            values = [block[part.name] for part in fields(StoredBlock)]
            arguments: list[Any] = [tuple(value) if isinstance(value, list) else value for value in values]
            blocks.append(StoredBlock(*arguments))
        tensors[name] = StoredTensor(tuple(entry["shape"]), entry["dtype"], tuple(blocks))
    files = {check_file_name(name, path): _check_count(size) for name, size in data["files"].items()}
    return Manifest(tensors, data["tree"], files, tuple(data["beside"]), notes=data.get("notes"))


# --- validation ------------------------------------------------------------------------------------------------------------
_MAX_COUNT = 2**63 - 1  # greatest count of elements and bytes in torch


def check_entries(manifest: Manifest, path: StoragePath) -> None:
    """Check that each tensor's blocks tile it and are inside of their files, and that the tree names no other tensor.

    Raises:
        CheckpointError: an entry of ``path`` is not.
    """
    for name, entry in manifest.tensors.items():
        try:
            _check_entry(entry, manifest.files)
        except (TypeError, ValueError, KeyError) as error:
            raise damage_error(f"{path} is damaged: the entry of {name!r} is not valid ({error})") from error
        for block in entry.blocks:
            check_file_name(block.file, path)
    decode_tree(manifest.tree, dict.fromkeys(manifest.tensors))


def _check_entry(entry: StoredTensor, files: Mapping[str, int]) -> None:
    """Raise if the blocks of a stored tensor exceed their files, or do not cover the tensor exactly once."""
    width = entry.torch_dtype.itemsize
    shape = [_check_count(size) for size in entry.shape]
    if math.prod(size for size in shape if size) * width > _MAX_COUNT:
        raise ValueError(f"shape {shape} is too large")
    for block in entry.blocks:
        box = [(_check_count(a), _check_count(n)) for a, n in zip(block.offset, block.shape, strict=True)]
        if any(a + n > size or not n for (a, n), size in zip(box, shape, strict=True)):
            raise ValueError(f"a block of shape {block.shape} at offset {block.offset} is outside of shape {shape}")
        stride = contiguous_stride(block.shape) if block.stride is None else [_check_count(step) for step in block.stride]
        last = sum((n - 1) * step for n, step in zip(block.shape, stride, strict=True))
        if _check_count(block.at) + (last + 1) * width > files[block.file]:
            raise ValueError(f"its block at {block.offset} ends after the end of {block.file}")
        if block.digest is not None and _check_count(block.digest) >= 2**64:
            raise ValueError("a digest is too large")
    if not is_tiling(shape, [(block.offset, block.shape) for block in entry.blocks]):
        raise ValueError(f"its blocks do not cover shape {shape} exactly once")


def _check_count(value: Any) -> int:
    """Return ``value`` if it is an int from 0 to 2^64 - 1; raise a ValueError otherwise."""
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"{value!r} is not a count")
    return value


def _are_equal_or_disjoint(intervals: Iterable[tuple[int, int]]) -> bool:
    """Return True if any two intervals (start, end) are equal or disjoint."""
    return all(one[1] <= following[0] for one, following in pairwise(sorted(set(intervals))))


def is_tiling(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return True if boxes (offset, shape), each within ``shape`` and not empty, are disjoint and cover it."""
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    if len(boxes) < 2:
        return True
    sides = [[(offset[dim], offset[dim] + size[dim]) for offset, size in boxes] for dim in range(len(shape))]
    if all(map(_are_equal_or_disjoint, sides)):  # a grid of blocks, which is the common case
        return len({tuple(offset) for offset, _ in boxes}) == len(boxes)
    starts, ends = np.array(sides).transpose(2, 1, 0)
    overlaps = (((starts[i] < ends[i + 1 :]) & (starts[i + 1 :] < ends[i])).all(1).any() for i in range(len(boxes) - 1))
    return not any(overlaps)
