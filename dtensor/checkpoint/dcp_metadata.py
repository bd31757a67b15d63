"""``.metadata`` files, by which ``torch.distributed.checkpoint`` finds its tensors: written for it, and read without trust.

The file is a pickle, and unpickling runs whatever code it names. So it is read by an unpickler that knows the handful of record
types in it, makes inert records of them, and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch

from ..base.torch_internals import StorageInfo as _StorageInfo
from ..base.torch_internals import flatten_state_dict
from ..errors import CheckpointError
from .block_io import Stream, Window, record_at
from .files import check_name, opened, read_regular, size_of, written
from .manifest import Block, Entry, Manifest, check_entries
from .remote import Address
from .tree import Stored, dtype_of, has_tensors
from .tree import encode as encode_tree

NAME = ".metadata"
_LONGEST = 1 << 20  # bytes that describe one tensor


# --- writing ---------------------------------------------------------------------------------------------------------------
def encode(
    values: Any, entries: Mapping[str, Entry], streams: Mapping[tuple[str, tuple[int, ...]], Stream], file: Address
) -> bytes:
    """The content of a ``.metadata`` file; plain values, which it keeps in streams of their own, go to ``file``.

    Args:
        values: the state's tree; of its tensors only their places count.
        streams: (name, offset) -> where the block lies.
    """
    from torch.distributed.checkpoint import metadata as dcp  # takes a second to import: only where it is needed

    flat, paths = flatten_state_dict(values if isinstance(values, dict) else {"": values})
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for name, entry in entries.items():
        chunks = [dcp.ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in entry.blocks]
        properties = dcp.TensorProperties(dtype=entry.torch_dtype)
        described[name] = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for i, block in enumerate(entry.blocks):
            stream = streams[name, block.offset]
            stored[dcp.MetadataIndex(name, block.offset, i)] = _StorageInfo(block.file, stream.start, stream.length)
    with written(file) as out:
        for name, value in flat.items():
            if name not in entries:
                start = out.tell()
                torch.save(value, out)
                described[name] = dcp.BytesStorageMetadata()
                stored[dcp.MetadataIndex(name)] = _StorageInfo(file.name, start, out.tell() - start)
    return pickle.dumps(dcp.Metadata(described, planner_data=paths, storage_data=stored))


# --- reading ---------------------------------------------------------------------------------------------------------------
class _Record:
    """What a pickle says about an object, as data."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    f"{_DCP}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
    "pathlib": "PosixPath WindowsPath PurePosixPath Path",
    "pathlib._local": "PosixPath WindowsPath",
}
# A class of its own for each name, so that reading code can tell them apart.
_RECORDS = {(module, name): type(name, (_Record,), {}) for module, names in _KNOWN.items() for name in names.split()}


class _Reader(pickle.Unpickler):
    """Unpickles records, dtypes and builtin containers, nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = _RECORDS.get((module, name))
        if found is not None:
            return found
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: layout
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"the metadata of the checkpoint refers to {module}.{name}, which does not belong in a "
            "checkpoint, so it is not loaded"
        )


def read_foreign(folder: Address) -> Manifest:
    """The manifest of a checkpoint that ``torch.distributed.checkpoint`` wrote; it has no digests.

    Raises:
        CheckpointError: damaged, or made of more than tensors and plain data.
    """
    content = _Reader(io.BytesIO(read_regular(folder / NAME))).load()
    described, stored, paths = content.state_dict_metadata, content.storage_data, content.planner_data or {}
    places = {(index.fqn, _offset(index)): info for index, info in stored.items()}
    names = {check_name(info.relative_path, folder / NAME) for info in places.values()}
    files = {name: size_of(folder / name) for name in names}
    entries: dict[str, Entry] = {}
    tree: dict[str, Any] = {}
    for name, said in described.items():
        leaf: Any
        if type(said).__name__ == "TensorStorageMetadata":
            entries[name] = _entry(folder, name, said, places)
            leaf = Stored(name)
        else:
            leaf = _value(folder, name, places[name, None])
        _put(tree, paths.get(name, (name,)), leaf)
    manifest = Manifest(entries, encode_tree(_with_lists(tree)), files)
    check_entries(manifest, folder / NAME)
    return manifest


def _offset(index: Any) -> tuple[int, ...] | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else tuple(offset)


def _entry(folder: Address, name: str, said: Any, places: Mapping[Any, Any]) -> Entry:
    dtype = str(said.properties.state[0]).removeprefix("torch.")
    blocks = []
    for chunk in said.chunks:
        offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        if 0 not in shape:
            info = places[name, offset]
            with opened(folder / info.relative_path) as file:
                at, stride = _tensor_in(file, info, shape, dtype_of(dtype).itemsize, name)
            blocks.append(Block(offset, shape, info.relative_path, at, None, stride))
    return Entry(tuple(said.size), dtype, tuple(blocks))


def _tensor_in(file: BinaryIO, info: Any, shape: tuple[int, ...], width: int, name: str) -> tuple[int, tuple[int, ...]]:
    """Where a stream's tensor begins, and its strides."""
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{name!r} is stored with the transforms {info.transform_descriptors}, but only plain streams can be read"
        )
    window = Window(file, info.offset, info.length)
    try:
        with zipfile.ZipFile(window) as archive:
            pickled = next(item for item in archive.infolist() if item.filename.endswith("/data.pkl"))
            if pickled.file_size > _LONGEST:
                raise zipfile.BadZipFile("its description is too long")
            found = _TensorReader(io.BytesIO(archive.read(pickled))).load()
    except (zipfile.BadZipFile, StopIteration, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{name!r} is damaged in {info.relative_path} ({error})") from error
    if not isinstance(found, _Saved) or found.shape != shape:
        raise CheckpointError(f"{name!r} in {info.relative_path} does not have the shape {shape} that the metadata says")
    return info.offset + record_at(window, found.key) + found.start * width, found.stride


class _Saved:
    """A tensor as its pickle describes it."""

    def __init__(self, key: str, start: int, shape: Any, stride: Any, *rest: Any) -> None:
        self.key, self.start, self.shape, self.stride = key, start, tuple(shape), tuple(stride)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a saved tensor contains an object state, which does not belong in a checkpoint")


class _TensorReader(pickle.Unpickler):
    """Unpickles one tensor's description."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                return _Saved
            case "torch._utils", "_rebuild_parameter":
                return lambda data, *rest: data
            case "collections", "OrderedDict":
                return dict
            case "torch" | "torch.storage", _ if name.endswith("Storage"):
                return name
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        raise CheckpointError(
            f"a saved tensor refers to {module}.{name}, which does not belong in a checkpoint, so it is not loaded"
        )

    def persistent_load(self, pid: Any) -> str:
        return str(pid[2])  # ("storage", type, key, device, elements)


def _value(folder: Address, name: str, info: Any) -> Any:
    try:
        with opened(folder / info.relative_path) as file:
            content = io.BytesIO(Window(file, info.offset, info.length).readall())
        value = torch.load(content, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever torch's reader trips over
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{name!r} is damaged or holds more than tensors and plain data ({reason})") from error
    if has_tensors(value):
        raise CheckpointError(
            f"{name!r} holds tensors that torch.distributed.checkpoint has stored inside of one value, as it does with tuples: "
            "they cannot be read in parts; save them in a list or a dict"
        )
    return value


# --- the tree that paths describe ------------------------------------------------------------------------------------------
def _put(tree: Any, path: tuple[Any, ...], leaf: Any) -> None:
    """Along a path, strings are keys of dicts and ints places in lists (kept as dicts until all of them are known)."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _with_lists(tree: Any) -> Any:
    if isinstance(tree, dict) and tree and all(type(key) is int for key in tree):
        return [_with_lists(tree[key]) for key in sorted(tree)]
    return {str(key): _with_lists(item) for key, item in tree.items()} if isinstance(tree, dict) else tree
