"""Models in the Hugging Face layout: ``safetensors`` files and, where there are several, an index of what is in which.

A file is the length of its header in 8 bytes, the header in JSON (name -> dtype, shape, first and last byte), then the tensors,
row-major, without gaps (https://huggingface.co/docs/safetensors). So every rank writes the blocks that it holds to their places
in the files, and reads those that it needs: no rank ever holds a whole model, or a whole tensor that is not its own.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .agreement import Ranks
from .archive import write_box
from .held import Held, held_here, piece_of
from .manifest import Block, Entry, Manifest, replace_file, sync_folder
from .saving import fingerprint_of, finish_pending, locked, reduced, same_state, with_values
from .stateful import expand
from .tree import named_tensors

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LONGEST = 100_000_000  # bytes of a header: the format's own bound

_NAMES = {
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
_OF = {dtype: name for name, dtype in _NAMES.items()}


# --- reading ---------------------------------------------------------------------------------------------------------------
def is_model(path: Path) -> bool:
    """Whether ``path`` is a model in this layout: a folder with an index or a single file, or such a file."""
    return path.suffix == ".safetensors" or (path / INDEX).exists() or (path / SINGLE).exists()


def read_model(path: Path) -> Manifest:
    """What the files hold, and where; they have no checksums.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or lacks what the index says.
    """
    if path.suffix == ".safetensors":
        return _joined(path.parent, {path.name: None})
    if not (path / INDEX).exists():
        return _joined(path, {SINGLE: None})
    try:
        held = json.loads((path / INDEX).read_text())["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in held.items():
            files.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / INDEX} is damaged ({type(error).__name__}: {error})") from error
    return _joined(path, files)


def _joined(folder: Path, files: Mapping[str, set[str] | None]) -> Manifest:
    tensors: dict[str, Entry] = {}
    sizes = {}
    for file, expected in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX} names {file!r}, which is not in its folder")
        entries, sizes[file] = _read_header(folder / file)
        wanted = entries.keys() if expected is None else expected
        if wanted - entries.keys():
            raise CheckpointError(f"{folder / file} lacks {sorted(wanted - entries.keys())[:4]}, which {INDEX} says are in it")
        tensors |= {name: entry for name, entry in entries.items() if name in wanted}
    return Manifest(tensors, {name: {"!": "tensor", "v": name} for name in tensors}, sizes)


def _read_header(path: Path) -> tuple[dict[str, Entry], int]:
    """The tensors of one file, and the bytes that it has."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_LONGEST, size - 8):
                raise CheckpointError(f"{path} is truncated, or no safetensors file")
            header = json.loads(file.read(length))
        entries, end = {}, 0
        for name, said in header.items():
            if name != "__metadata__":
                entries[name], last = _entry(path.name, 8 + length, said)
                end = max(end, last)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read ({type(error).__name__}: {error})") from error
    if size != 8 + length + end:
        raise CheckpointError(f"{path} has {size:,} bytes instead of {8 + length + end:,}: it is truncated or was changed")
    return entries, size


def _entry(file: str, start: int, said: Mapping[str, Any]) -> tuple[Entry, int]:
    dtype, shape, (first, last) = _NAMES[said["dtype"]], tuple(said["shape"]), said["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, first, last)) or last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{dtype} of shape {shape} does not take bytes {first} to {last}")
    block = Block((0,) * len(shape), shape, file, start + first)
    return Entry(shape, str(dtype).removeprefix("torch."), (block,) if last > first else ()), last


# --- writing ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _File:
    """A file to be written: its header, and where each of its tensors begins."""

    name: str
    header: bytes
    starts: dict[str, int]
    size: int


def save_safetensors(
    state: Any, path: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000, process_group: Any = None
) -> None:
    """Export tensors to the folder ``path`` in the Hugging Face layout, for other programs to read.

    All ranks call it. Every rank writes its own blocks to their places in the files; nothing is gathered. Parameters that a
    module knows by several names are written once, by the first of them. :func:`load` reads such a folder (or a single file).

    Args:
        state: a module, or a (nested) dict of tensors; keys are joined by dots.
        max_shard_size: bytes of tensors in a file. If one suffices it is ``model.safetensors``, otherwise there are
            ``model-00001-of-00003.safetensors`` ... and ``model.safetensors.index.json``.
        process_group: the ranks that save together, default all.

    Raises:
        CheckpointError: on all ranks, with the same words: a folder that holds a model already or cannot be written, a full disk,
            something that is no tensor, a dtype that the format lacks.

    >>> import tempfile, dtensor as dt
    >>> mesh, folder = dt.init_device_mesh("cpu", (2,)), tempfile.mkdtemp()
    >>> dt.checkpoint.save_safetensors({"w": dt.ones(5, 3, device_mesh=mesh, placements=[dt.Shard(0)])}, folder)
    >>> state = {"w": dt.zeros(5, 3, device_mesh=mesh, placements=[dt.Shard(1)])}
    >>> dt.checkpoint.load(state, folder).bytes_read, state["w"].sum().item()
    (60, 15.0)
    """
    finish_pending()
    ranks, folder = Ranks(process_group), Path(path)
    what = f"exporting to {folder}"
    failed: Exception | None = None
    tensors: dict[str, Any] = {}
    files: list[_File] = []
    fingerprint = ""
    try:
        tensors = with_values(_tensors_of(state))
        files = _plan(tensors, max_shard_size)
        fingerprint = fingerprint_of([(file.name, file.header) for file in files], tensors)
    except Exception as error:  # told when the ranks meet
        failed, tensors = error, {}
    tensors = reduced(tensors, fingerprint, ranks, what)

    def planned() -> str:
        if failed is not None:
            raise failed
        return fingerprint

    with contextlib.ExitStack() as stack:

        def opened(prints: list[str]) -> str:
            same_state(prints)
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
            if is_model(folder):
                raise CheckpointError(f"{folder} holds a model already; export into a new folder")
            for left in folder.glob(".model*.safetensors.*"):  # by an export that was killed
                left.unlink()
            token = uuid.uuid4().hex[:12]
            _allocate(folder, files, token)
            return token

        token = ranks.together(what, planned, opened)
        parts = [folder / _part(file, token) for file in files]
        try:
            ranks.together(
                what, lambda: _write(tensors, files, parts, ranks.rank), lambda _: _publish(folder, files, parts), left=_EITHER
            )
        except CheckpointError:
            if ranks.coordinates:
                for part in parts:
                    part.unlink(missing_ok=True)
            raise


_EITHER = "the folder holds a complete model or none"


def _tensors_of(state: Any) -> dict[str, torch.Tensor]:
    tree = expand(state).tree
    tensors = named_tensors(tree)
    others = sorted(set(_leaves(tree)) - tensors.keys())
    if others:
        raise CheckpointError(f"{others[:4]} are no tensors: this layout has nothing else; export the model's state dict alone")
    if isinstance(state, torch.nn.Module):
        first = dict(state.named_parameters())
        tied = {name for name, _ in state.named_parameters(remove_duplicate=False)} - first.keys()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    return tensors


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterable[str]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _leaves(item, (*path, str(key)))
    else:
        yield ".".join(path)


def _plan(tensors: Mapping[str, Any], most: int) -> list[_File]:
    """Tensors dealt to files in order, as many to each as it may hold."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, x in tensors.items():
        if x.dtype not in _OF:
            raise CheckpointError(f"{name!r} is {str(x.dtype).removeprefix('torch.')}, which safetensors files do not have")
        nbytes = x.numel() * x.dtype.itemsize
        if groups[-1] and held + nbytes > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
    return [_layout(file, {name: tensors[name] for name in group}) for file, group in zip(names, groups, strict=True)]


def _layout(file: str, tensors: Mapping[str, Any]) -> _File:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name, x in tensors.items():
        end = at + x.numel() * x.dtype.itemsize
        header[name] = {"dtype": _OF[x.dtype], "shape": list(x.shape), "data_offsets": [at, end]}
        starts[name], at = at, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return _File(
        file, len(text).to_bytes(8, "little") + text, {n: 8 + len(text) + at for n, at in starts.items()}, 8 + len(text) + at
    )


def _part(file: _File, token: str) -> str:
    return f".{file.name}.{token}"


def _allocate(folder: Path, files: Iterable[_File], token: str) -> None:
    """Files of their full size, so that a full disk is found out before anybody writes."""
    made = []
    try:
        for file in files:
            made.append(folder / _part(file, token))
            with open(made[-1], "xb") as out:
                os.posix_fallocate(out.fileno(), 0, file.size)
                out.write(file.header)
    except OSError:
        for path in made:
            path.unlink(missing_ok=True)
        raise


def _write(tensors: Mapping[str, Any], files: Iterable[_File], parts: Iterable[Path], rank: int) -> None:
    blocks: dict[str, list[Held]] = {name: [h for h in held if h.answers] for name, held in held_here(tensors, rank)}
    for file, part in zip(files, parts, strict=True):
        if any(blocks[name] for name in file.starts):
            with open(part, "r+b") as out:
                for name, start in file.starts.items():
                    for held in blocks[name]:
                        piece = piece_of(tensors[name], held.member).detach().cpu().resolve_conj().resolve_neg().contiguous()
                        write_box(piece, out, start, tuple(tensors[name].shape), held.offset)
                out.flush()
                os.fsync(out.fileno())


def _publish(folder: Path, files: list[_File], parts: list[Path]) -> None:
    """The index last: without it, the files of a larger model are none."""
    for file, part in zip(files, parts, strict=True):
        os.replace(part, folder / file.name)
    sync_folder(folder)
    if len(files) > 1:
        total = sum(file.size - len(file.header) for file in files)
        held = {name: file.name for file in files for name in file.starts}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": held}, indent=2)
        replace_file(folder / INDEX, text.encode())
