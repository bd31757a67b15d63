"""Safetensors: models in the Hugging Face layout, which is ``safetensors`` files and, for several files, an index.

A file is the length of its header in 8 bytes, the header in JSON (name -> dtype, shape, first and last byte), then the
tensors, row-major, without gaps (https://huggingface.co/docs/safetensors). Headers that this library writes also contain the
digests of the tensors and a checksum of the header, in the ``__metadata__`` map.

Every rank writes its blocks to their positions in the files, and reads the blocks that it needs. No rank ever has a complete
model, or a complete tensor that it does not own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from .async_save import finish_pending_saves
from .block_io import write_box
from .coordinator import RankGroup, StateParts
from .digest import MASK, block_digest
from .files import (
    RemotePath,
    StoragePath,
    check_file_name,
    damage_error,
    file_size,
    open_for_reading,
    parse_path,
    parse_strict_json,
    path_exists,
    read_file,
    replace_file,
    sha256,
    sync_folder,
)
from .local_blocks import LocalBlock, block_tensor, iter_local_blocks
from .manifest import Manifest, StoredBlock, StoredTensor, check_entries
from .saving import check_savable, make_state_parts, reduce_partials, to_row_major_cpu
from .stateful import expand_state
from .tree import Stored, encode_tree, named_tensors
from .two_phase_commit import write_and_commit

_MAX_HEADER_BYTES = 100_000_000  # maximum bytes of a header, as in the format

_DTYPE_OF = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DIGESTS_KEY = "dtensor.digests"  # key in __metadata__ of the checksums of the tensors and of the header
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPE_OF.items()}


class HeaderEntry(NamedTuple):
    """Entry of a tensor in a safetensors header: first byte and end of its data (after the header), name, dtype and shape."""

    first: int
    last: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def to_stored_tensor(self, file: str, start: int, found: int | None) -> StoredTensor:
        """Return the manifest entry of this tensor, in a file with data from byte ``start`` on."""
        block = StoredBlock((0,) * len(self.shape), self.shape, file, start + self.first, found)
        return StoredTensor(self.shape, str(self.dtype).removeprefix("torch."), (block,) if self.last > self.first else ())


# --- encode a header -------------------------------------------------------------------------------------------------------
def encode_header(places: Sequence[HeaderEntry], digests: Mapping[str, int]) -> bytes:
    """Return the bytes of a safetensors header for these tensors; its length does not depend on the digests."""
    entries = {p.name: {"dtype": DTYPE_NAMES[p.dtype], "shape": list(p.shape), "data_offsets": [p.first, p.last]} for p in places}
    own_digests = {place.name: digests.get(place.name, 0) for place in places}
    checksums = {
        "header": _header_checksum(entries, own_digests),
        "tensors": {name: f"{value:016x}" for name, value in own_digests.items()},
    }
    header = {"__metadata__": {"format": "pt", _DIGESTS_KEY: json.dumps(checksums, separators=(",", ":"))}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align tensors to 8 bytes
    return len(text).to_bytes(8, "little") + text


def _header_checksum(entries: Mapping[str, Any], digests: Mapping[str, int]) -> str:
    return sha256(json.dumps([entries, digests], sort_keys=True).encode())


# --- read a header ---------------------------------------------------------------------------------------------------------
def read_header(path: StoragePath) -> tuple[dict[str, StoredTensor], int]:
    """Read the header of one safetensors file; return its tensors by name, and the size of the file in bytes."""
    size = file_size(path, links=True)
    with open_for_reading(path, links=True) as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise damage_error(f"{path} is truncated, or is not a safetensors file")
        text = file.read(length)
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with a brace")
        header = parse_strict_json(text, numbers=False)
        digests = _read_digests(header)
        places = [_parse_header_entry(name, description) for name, description in header.items() if name != "__metadata__"]
        _check_entries_fill_file(places, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damage_error(
            f"{path} is damaged or truncated: its header cannot be read ({type(error).__name__}: {error})"
        ) from error
    return {place.name: place.to_stored_tensor(path.name, 8 + length, digests.get(place.name)) for place in places}, size


def _parse_header_entry(name: str, description: Mapping[str, Any]) -> HeaderEntry:
    """Return the entry of one tensor in a safetensors header; raise if its bytes do not fit its dtype and shape."""
    dtype, shape, (first, last) = _DTYPE_OF[description["dtype"]], tuple(description["shape"]), description["data_offsets"]
    if len(description) != 3 or any(type(n) is not int or n < 0 for n in (*shape, first, last)):
        raise ValueError(f"the entry of {name!r} is {dict(description)}")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r}: dtype {dtype} and shape {shape} do not need bytes {first} to {last}")
    return HeaderEntry(first, last, name, dtype, shape)


def _check_entries_fill_file(places: Iterable[HeaderEntry], size: int) -> None:
    """Raise if the data of the header's tensors has gaps or overlaps, or does not end where the file ends."""
    end = 0
    for place in sorted(places):
        if place.first != end:
            raise ValueError(f"{place.name!r} begins at byte {place.first}, but the entry before it ends at byte {end}")
        end = place.last
    if end != size:
        raise ValueError(f"it describes {end:,} bytes, but the file has {size:,}")


def _read_digests(header: Mapping[str, Any]) -> dict[str, int]:
    """Return the digests that :func:`save_safetensors` wrote into a header; {} for headers of other programs."""
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(item, str) for item in metadata.values()):
        raise TypeError("__metadata__ is not a map of strings")
    if _DIGESTS_KEY not in metadata:
        return {}
    checksums = parse_strict_json(metadata[_DIGESTS_KEY])
    digests = {name: int(value, 16) for name, value in checksums["tensors"].items()}
    if checksums["header"] != _header_checksum({name: item for name, item in header.items() if name != "__metadata__"}, digests):
        raise ValueError(
            "it does not match its checksum; if another program has changed the file, "
            f"remove {_DIGESTS_KEY!r} from its __metadata__"
        )
    return digests


# --- models ----------------------------------------------------------------------------------------------------------------
INDEX_NAME, SINGLE_FILE_NAME = "model.safetensors.index.json", "model.safetensors"


# --- read a model ----------------------------------------------------------------------------------------------------------
def is_safetensors_file(path: StoragePath) -> bool:
    """Return True if ``path`` is a single ``.safetensors`` file, not a folder."""
    return path.suffix == ".safetensors" and not path.is_dir()


def is_safetensors_model(path: StoragePath) -> bool:
    """Return True if ``path`` is a ``.safetensors`` file, or a folder with an index or a single model file."""
    return is_safetensors_file(path) or path_exists(path / INDEX_NAME) or path_exists(path / SINGLE_FILE_NAME)


def read_safetensors_manifest(path: StoragePath) -> Manifest:
    """Return the manifest of a safetensors model, with digests if this library wrote the files.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or lacks a tensor of the index.
    """
    if is_safetensors_file(path):
        return _make_manifest(path.parent, {path.name: None})
    if not path_exists(path / INDEX_NAME):
        return _make_manifest(path, {SINGLE_FILE_NAME: None})
    files: dict[str, set[str] | None] = {}
    for name, file in parse_strict_json(read_file(path / INDEX_NAME, links=True), numbers=False)["weight_map"].items():
        files.setdefault(check_file_name(file, path / INDEX_NAME), set()).add(name)  # type: ignore[union-attr]  # a set, just made
    return _make_manifest(path, files)


def _make_manifest(folder: StoragePath, files: Mapping[str, set[str] | None]) -> Manifest:
    """Return the manifest of the tensors in these safetensors files, read from their headers."""
    tensors: dict[str, StoredTensor] = {}
    sizes = {}
    for file, expected in files.items():
        entries, sizes[file] = read_header(folder / file)
        expected_names = entries.keys() if expected is None else expected
        if expected_names - entries.keys():
            raise damage_error(
                f"{folder / file} does not have {sorted(expected_names - entries.keys())[:4]}, which {INDEX_NAME} says are in it"
            )
        tensors |= {name: entry for name, entry in entries.items() if name in expected_names}
    manifest = Manifest(tensors, encode_tree({name: Stored(name) for name in tensors}), sizes, links=True)
    check_entries(manifest, folder)
    return manifest


# --- export a model --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _PlannedFile:
    """Safetensors file to be written: its tensors, and the size of its header and of the file in bytes."""

    name: str
    places: tuple[HeaderEntry, ...]
    header: int
    size: int


def save_safetensors(
    state: Any, path: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000, process_group: Any = None
) -> None:
    """Export tensors to the folder ``path`` in the Hugging Face layout, for other programs to read.

    All ranks call it. Every rank writes its own blocks to their positions in the files; nothing is gathered. A parameter with
    several names in a module is written once, under its first name. :func:`load` reads such a folder (or a single file).

    Args:
        state: a module, or a (nested) dict of tensors; keys are joined by dots.
        max_shard_size: bytes of tensors in a file. If one file suffices it is ``model.safetensors``. Otherwise there are
            ``model-00001-of-00003.safetensors`` ... and ``model.safetensors.index.json``.
        process_group: the ranks that save together, default all.

    Raises:
        CheckpointError: on all ranks, with the same text: a folder that has a model already or cannot be written, a full disk,
            a value that is not a tensor, a dtype that the format lacks.

    >>> import tempfile, dtensor as dt
    >>> mesh, folder = dt.init_device_mesh("cpu", (2,)), tempfile.mkdtemp()
    >>> dt.checkpoint.save_safetensors({"w": dt.ones(5, 3, device_mesh=mesh, placements=[dt.Shard(0)])}, folder)
    >>> state = {"w": dt.zeros(5, 3, device_mesh=mesh, placements=[dt.Shard(1)])}
    >>> dt.checkpoint.load(state, folder).bytes_read, state["w"].sum().item()
    (60, 15.0)
    """
    finish_pending_saves()
    ranks, folder = RankGroup("checkpoint.save_safetensors", process_group), parse_path(path)
    if isinstance(folder, RemotePath):
        raise CheckpointError(f"models are exported to a local file system, not to {path}; export to a local folder and copy it")
    what = f"exporting to {folder}"
    tensors: dict[str, Any] = {}
    files: list[_PlannedFile] = []
    parts: StateParts | Exception
    try:
        tensors = check_savable(unique_tensors(state))
        files = _plan_files(tensors, max_shard_size)
        parts = make_state_parts(tensors, max_shard_size=max_shard_size)
    except Exception as error:  # raised on all ranks at their next exchange
        parts = error
    else:
        tensors = reduce_partials(tensors, parts, ranks, what)
    write_and_commit(
        ranks,
        folder,
        what,
        parts,
        begin=lambda token: _allocate_files(folder, files, token),
        write=lambda token: _write_blocks(tensors, files, _temporary_paths(folder, files, token), ranks),
        commit=lambda sums, token: _publish_files(folder, files, _temporary_paths(folder, files, token), sums),
        discard=lambda token: _remove_temporary(_temporary_paths(folder, files, token), ranks),
        left="the folder holds a complete model or none",
    )


def _allocate_files(folder: Path, files: list[_PlannedFile], token: str) -> None:
    """Create the temporary files of an export in their full size, so that a full disk raises before any rank writes."""
    if is_safetensors_model(folder):
        raise CheckpointError(f"{folder} has a model already; export into a new folder")
    for leftover in folder.glob(".model*.safetensors.*"):  # of a killed export
        leftover.unlink()
    allocated = []
    try:
        for part, file in zip(_temporary_paths(folder, files, token), files, strict=True):
            allocated.append(part)
            with open(part, "xb") as out:
                os.posix_fallocate(out.fileno(), 0, file.size)
    except OSError:
        for path in allocated:
            path.unlink(missing_ok=True)
        raise


def _temporary_paths(folder: Path, files: Iterable[_PlannedFile], token: str) -> list[Path]:
    """Return the path that each file has while it is written; it is hidden and contains the token of the save."""
    return [folder / f".{file.name}.{token}" for file in files]


def _remove_temporary(parts: Iterable[Path], ranks: RankGroup) -> None:
    for part in parts if ranks.is_coordinator else ():
        part.unlink(missing_ok=True)


def unique_tensors(state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of ``state`` by dotted name; a tied parameter of a module appears under its first name only.

    Raises:
        CheckpointError: ``state`` has other values than tensors.
    """
    tree = expand_state(state).tree
    tensors = named_tensors(tree)
    others = sorted(set(_leaf_names(tree)) - tensors.keys())
    if others:
        raise CheckpointError(
            f"{others[:4]} are not tensors, and this file format stores tensors only; export the state dict of the model alone"
        )
    if isinstance(state, torch.nn.Module):
        first = dict(state.named_parameters())
        tied = {name for name, _ in state.named_parameters(remove_duplicate=False)} - first.keys()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    return tensors


def _leaf_names(tree: Any, path: tuple[str, ...] = ()) -> Iterable[str]:
    """Yield the dotted names of the leaves of a tree of mappings."""
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _leaf_names(item, (*path, str(key)))
    else:
        yield ".".join(path)


def _plan_files(tensors: Mapping[str, Any], max_bytes: int) -> list[_PlannedFile]:
    """Assign tensors to safetensors files in order, each of at most ``max_bytes`` of data or one tensor."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, x in tensors.items():
        if x.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{name!r} is {str(x.dtype).removeprefix('torch.')}, which safetensors files do not have; "
                "convert it, for example by x.float()"
            )
        nbytes = x.numel() * x.dtype.itemsize
        if groups[-1] and used + nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += nbytes
    count = len(groups)
    names = [SINGLE_FILE_NAME] if count == 1 else [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
    return [_plan_file(file, {name: tensors[name] for name in group}) for file, group in zip(names, groups, strict=True)]


def _plan_file(file: str, tensors: Mapping[str, Any]) -> _PlannedFile:
    """Return the planned file with these tensors one after the other behind its header."""
    places, at = [], 0
    for name, x in tensors.items():
        places.append(HeaderEntry(at, at + x.numel() * x.dtype.itemsize, name, x.dtype, tuple(x.shape)))
        at = places[-1].last
    length = len(encode_header(places, {}))
    return _PlannedFile(file, tuple(places), length, length + at)


def _write_blocks(
    tensors: Mapping[str, Any], files: Iterable[_PlannedFile], parts: Iterable[Path], ranks: RankGroup
) -> dict[str, int]:
    """Write this rank's blocks to their positions in the temporary files; return their digests, summed by tensor."""
    blocks: dict[str, list[LocalBlock]] = {
        name: [h for h in held if h.is_primary] for name, held in iter_local_blocks(tensors, ranks.rank, ranks.participants)
    }
    sums: dict[str, int] = {}
    for file, part in zip(files, parts, strict=True):
        if any(blocks[place.name] for place in file.places):
            with open(part, "r+b") as out:
                for place in file.places:
                    for held in blocks[place.name]:
                        shard = to_row_major_cpu(block_tensor(tensors[place.name], held).detach())
                        write_box(shard, out, file.header + place.first, place.shape, held.offset)
                        sums[place.name] = (sums.get(place.name, 0) + block_digest(shard, held.offset)) & MASK
                out.flush()
                os.fsync(out.fileno())
    return sums


def _publish_files(folder: Path, files: list[_PlannedFile], parts: list[Path], sums: list[dict[str, int]]) -> None:
    """Write headers with the digests of all ranks, rename the files to their final names, and write the index last."""
    for file, part in zip(files, parts, strict=True):
        digests = {place.name: sum(each.get(place.name, 0) for each in sums) & MASK for place in file.places}
        with open(part, "r+b") as out:
            out.write(encode_header(file.places, digests))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, folder / file.name)
    sync_folder(folder)
    if len(files) > 1:
        total = sum(file.size - file.header for file in files)
        file_of = {place.name: file.name for file in files for place in file.places}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2)
        replace_file(folder / INDEX_NAME, text.encode())
