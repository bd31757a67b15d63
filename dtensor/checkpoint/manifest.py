"""The manifest: what a checkpoint holds and where, written last, so that a folder with a manifest is a complete checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .tree import dtype_of

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
    """

    tensors: dict[str, Entry]
    tree: Any
    files: dict[str, int]
    beside: tuple[str, ...] = field(default=())

    def write(self, folder: Path) -> None:
        """Put it into ``folder``, in place of an older one: one atomic rename."""
        body = json.dumps(asdict(self), separators=(",", ":"))
        text = json.dumps({"format": _FORMAT, "sha256": _sha256(body.encode()), "body": body})
        replace_file(folder / NAME, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``.

    Raises:
        CheckpointError: it is damaged, of another format, or a file is missing or has another size.
    """
    try:
        outer = json.loads((folder / NAME).read_text())
        body = outer["body"]
        intact = outer["sha256"] == _sha256(body.encode())
        known = outer["format"] == _FORMAT
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / NAME} is damaged ({error})") from error
    if not known:
        raise CheckpointError(f"{folder / NAME} has the format {outer['format']!r}; this version reads {_FORMAT!r}")
    if not intact:
        raise CheckpointError(f"{folder / NAME} is damaged: its checksum does not fit")
    manifest = _from_json(json.loads(body))
    _check_beside(manifest, folder)
    check_files(manifest, folder)
    return manifest


def check_files(manifest: Manifest, folder: Path) -> None:
    """Every file is there, with its size.

    Raises:
        CheckpointError: one is not.
    """
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
        found = path.stat().st_size
        if found != size:
            raise CheckpointError(f"{path} has {found:,} bytes instead of {size:,}: the checkpoint is truncated or was changed")


def _check_beside(manifest: Manifest, folder: Path) -> None:
    path = folder / ".metadata"
    if manifest.beside and path.exists() and _sha256(path.read_bytes()) not in manifest.beside:
        raise CheckpointError(
            f"{path} was not written together with {NAME}: another program has saved into this folder since; "
            f"remove the older of the two"
        )


def _from_json(data: Any) -> Manifest:
    tensors = {}
    for name, entry in data["tensors"].items():
        blocks = tuple(
            Block(
                tuple(b["offset"]),
                tuple(b["shape"]),
                b["file"],
                b["at"],
                b["digest"],
                None if b["stride"] is None else tuple(b["stride"]),
            )
            for b in entry["blocks"]
        )
        tensors[name] = Entry(tuple(entry["shape"]), entry["dtype"], blocks)
    return Manifest(tensors, data["tree"], data["files"], tuple(data["beside"]))


def replace_file(path: Path, content: bytes) -> None:
    """``path`` with this content: written aside, brought to the disk, renamed."""
    aside = path.with_name(path.name + ".new")
    with open(aside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str | None:
    """Of a file's content; None if there is no such file."""
    return _sha256(path.read_bytes()) if path.exists() else None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
