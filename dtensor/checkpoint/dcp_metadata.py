"""DCP metadata: ``.metadata`` files of ``torch.distributed.checkpoint``, written for it, and read without trusting them.

The file is a pickle, and unpickling runs any code that it names. So it is read by an unpickler that knows only the record types
in such a file. It makes inert records of them and refuses every other name.
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
from .block_io import FileWindow, Stream, find_record
from .files import StoragePath, check_file_name, damage_error, file_size, open_for_reading, open_for_writing, read_file
from .manifest import Manifest, StoredBlock, StoredTensor, check_entries
from .tree import Stored, encode_tree, has_tensors, parse_dtype

METADATA_NAME = ".metadata"
_MAX_DESCRIPTION_BYTES = 1 << 20  # maximum bytes of the description of one tensor


# --- writing ---------------------------------------------------------------------------------------------------------------
def encode_metadata(
    values: Any, entries: Mapping[str, StoredTensor], streams: Mapping[tuple[str, tuple[int, ...]], Stream], file: StoragePath
) -> bytes:
    """Return the pickled ``.metadata`` of a checkpoint for torch's DCP, and write the plain values to ``file``.

    Args:
        values: tree of the state. Only the positions of its tensors matter.
        streams: (name, offset) -> position of the block.
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
    with open_for_writing(file) as out:
        for name, value in flat.items():
            if name not in entries:
                start = out.tell()
                torch.save(value, out)
                described[name] = dcp.BytesStorageMetadata()
                stored[dcp.MetadataIndex(name)] = _StorageInfo(file.name, start, out.tell() - start)
    return pickle.dumps(dcp.Metadata(described, planner_data=paths, storage_data=stored))


# --- reading ---------------------------------------------------------------------------------------------------------------
class _Record:
    """Inert record of a pickled object."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


_DCP = "torch.distributed.checkpoint"
_RECORD_NAMES = {
    f"{_DCP}.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex TensorProperties "
    "StorageMeta _MEM_FORMAT_ENCODING",
    f"{_DCP}.filesystem": "_StorageInfo _StoragePrefix",
    "pathlib": "PosixPath WindowsPath PurePosixPath Path",
    "pathlib._local": "PosixPath WindowsPath",
}
# A separate class for each name, so that reading code can distinguish them.
_RECORDS = {(module, name): type(name, (_Record,), {}) for module, names in _RECORD_NAMES.items() for name in names.split()}


class _RecordUnpickler(pickle.Unpickler):
    """Unpickler of records, dtypes and builtin containers, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an inert record type for a known DCP class name; raise for any other, so that no code runs."""
        record = _RECORDS.get((module, name))
        if record is not None:
            return record
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


def read_dcp_manifest(folder: StoragePath) -> Manifest:
    """Read the ``.metadata`` of a checkpoint of ``torch.distributed.checkpoint``, and return it as a manifest without digests.

    Raises:
        CheckpointError: the checkpoint is damaged, or has more than tensors and plain data.
    """
    content = _RecordUnpickler(io.BytesIO(read_file(folder / METADATA_NAME))).load()
    described, stored, paths = content.state_dict_metadata, content.storage_data, content.planner_data or {}
    locations = {(index.fqn, _offset_of(index)): info for index, info in stored.items()}
    names = {check_file_name(info.relative_path, folder / METADATA_NAME) for info in locations.values()}
    files = {name: file_size(folder / name) for name in names}
    entries: dict[str, StoredTensor] = {}
    tree: dict[Any, Any] = {}  # indices of lists are int keys of dicts here, until all items are known
    for name, description in described.items():
        leaf: Any
        if type(description).__name__ == "TensorStorageMetadata":
            entries[name] = _read_entry(folder, name, description, locations)
            leaf = Stored(name)
        else:
            leaf = _read_value(folder, name, locations[name, None])
        node, (*parents, last) = tree, paths.get(name, (name,))
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    manifest = Manifest(entries, encode_tree(_restore_lists(tree)), files)
    check_entries(manifest, folder / METADATA_NAME)
    return manifest


def _offset_of(index: Any) -> tuple[int, ...] | None:
    offset = getattr(index, "offset", None)
    return None if offset is None else tuple(offset)


def _read_entry(folder: StoragePath, name: str, description: Any, locations: Mapping[Any, Any]) -> StoredTensor:
    """Return the manifest entry of one tensor of a DCP checkpoint, with the file position of each of its chunks."""
    dtype = str(description.properties.state[0]).removeprefix("torch.")
    blocks = []
    for chunk in description.chunks:
        offset, shape = tuple(chunk.offsets), tuple(chunk.sizes)
        if 0 not in shape:
            info = locations[name, offset]
            path = folder / info.relative_path
            with open_for_reading(path) as file:
                at, stride = _locate_tensor(file, path, info, shape, parse_dtype(dtype).itemsize, name)
            blocks.append(StoredBlock(offset, shape, info.relative_path, at, None, stride))
    return StoredTensor(tuple(description.size), dtype, tuple(blocks))


def _locate_tensor(
    file: BinaryIO, path: StoragePath, info: Any, shape: tuple[int, ...], width: int, name: str
) -> tuple[int, tuple[int, ...]]:
    """Return the byte position in ``file`` of the tensor data of a ``torch.save`` stream, and the tensor's strides."""
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{name!r} in {path} is stored with the transforms {info.transform_descriptors}, but only plain streams can be read; "
            "save it without transforms"
        )
    window = FileWindow(file, info.offset, info.length)
    try:
        with zipfile.ZipFile(window) as archive:
            pickled = next(item for item in archive.infolist() if item.filename.endswith("/data.pkl"))
            if pickled.file_size > _MAX_DESCRIPTION_BYTES:
                raise zipfile.BadZipFile("its description is too long")
            tensor = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
    except (zipfile.BadZipFile, StopIteration, pickle.UnpicklingError, EOFError) as error:
        raise damage_error(f"{name!r} is damaged in {path} ({error})") from error
    if not isinstance(tensor, _SavedTensor) or tensor.shape != shape:
        raise damage_error(f"{name!r} in {path} does not have the shape {shape}, which the metadata states")
    return info.offset + find_record(window, tensor.key, path) + tensor.start * width, tensor.stride


class _SavedTensor:
    """Description of a pickled tensor: its storage key, storage offset, shape and strides, without data."""

    def __init__(self, key: str, start: int, shape: Any, stride: Any, *rest: Any) -> None:
        self.key, self.start, self.shape, self.stride = key, start, tuple(shape), tuple(stride)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it contains an object state, which does not belong in a checkpoint")


class _TensorUnpickler(pickle.Unpickler):
    """Unpickler that reads the description of one tensor, and neither its data nor any other object."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for each name that occurs in torch's tensor pickles; raise for any other."""
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2" | "_rebuild_tensor_v3":
                return _SavedTensor
            case "torch._utils", "_rebuild_parameter":
                return lambda data, *rest: data
            case "collections", "OrderedDict":
                return dict
            case "torch" | "torch.storage", _ if name.endswith("Storage"):
                return name
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which does not belong in a checkpoint, so it is not loaded")

    def persistent_load(self, pid: Any) -> str:
        return str(pid[2])  # ("storage", type, key, device, elements)


def _read_value(folder: StoragePath, name: str, info: Any) -> Any:
    """Return a plain Python value that a DCP checkpoint stores; raise if it is damaged or has tensors in it."""
    path = folder / info.relative_path
    try:
        with open_for_reading(path) as file:
            content = io.BytesIO(FileWindow(file, info.offset, info.length).readall())
        value = torch.load(content, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many types for damaged data
        reason = (str(error).splitlines() or [""])[0]
        raise damage_error(f"{name!r} in {path} is damaged or holds more than tensors and plain data ({reason})") from error
    if has_tensors(value):
        raise CheckpointError(
            f"{name!r} holds tensors that torch.distributed.checkpoint has stored inside of one value, as it does with tuples: "
            "they cannot be read in parts; save them in a list or a dict"
        )
    return value


# --- the tree of the state -------------------------------------------------------------------------------------------------
def _restore_lists(tree: Any) -> Any:
    """Return the tree with each dict that has only int keys replaced by a list, and all other keys as strings."""
    if isinstance(tree, dict) and tree and all(type(key) is int for key in tree):
        return [_restore_lists(tree[key]) for key in sorted(tree)]
    return {str(key): _restore_lists(item) for key, item in tree.items()} if isinstance(tree, dict) else tree
