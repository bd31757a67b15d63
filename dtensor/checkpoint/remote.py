"""Checkpoints on storage that is not a file system of this machine (object stores, memory), by way of fsspec.

A folder is there what names begin with. An object comes to be whole or not at all, which is what a rename is on a disk: the
manifest is the last one written. There are no locks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from ..errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Remote:
    """A folder or file there: what of ``pathlib.Path`` checkpoints use."""

    fs: Any  # fsspec's
    path: str

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def __truediv__(self, name: str) -> Remote:
        return Remote(self.fs, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.fs, self.path.rstrip("/").rpartition("/")[0])

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    def is_dir(self) -> bool:
        self.fs.invalidate_cache()  # other ranks write there too
        return bool(self.fs.isdir(self.path))

    def exists(self) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        self.fs.makedirs(self.path, exist_ok=exist_ok)

    def iterdir(self) -> Iterator[Remote]:
        self.fs.invalidate_cache()
        return (Remote(self.fs, found) for found in self.fs.ls(self.path, detail=False))

    def unlink(self, missing_ok: bool = False) -> None:
        if self.exists() or not missing_ok:
            self.fs.rm_file(self.path)

    def remove_all(self) -> None:
        self.fs.rm(self.path, recursive=True)

    def size(self) -> int:
        try:
            return int(self.fs.info(self.path)["size"])
        except FileNotFoundError:
            raise _missing(self) from None

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Its content, or some bytes of it."""
        try:
            return bytes(self.fs.cat_file(self.path, start=start, end=end))
        except FileNotFoundError:
            raise _missing(self) from None

    def opened(self) -> BinaryIO:
        """To read parts of it: what describes tensors is short."""
        try:
            return cast(BinaryIO, self.fs.open(self.path, "rb", block_size=1 << 16))
        except FileNotFoundError:
            raise _missing(self) from None

    def write(self, content: bytes) -> None:
        """Replaced at once."""
        self.fs.pipe_file(self.path, content)

    def take(self, file: str) -> None:
        """The content of a file here."""
        self.fs.put_file(file, self.path)


Address: TypeAlias = Path | Remote


def _missing(place: Remote) -> CheckpointError:
    return CheckpointError(f"{place} is missing: the checkpoint is incomplete")


def place_of(path: str | os.PathLike[str]) -> Address:
    """A path, or what fsspec makes of an address with a protocol (``s3://bucket/run``).

    Raises:
        CheckpointError: what fsspec needs for that protocol is not installed, or there is none of that name.
    """
    if not (isinstance(path, str) and "://" in path):
        return Path(path)
    try:
        from fsspec.core import url_to_fs  # torch brings it; packages for most protocols are extras

        fs, inner = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be reached: {error}") from error
    local = {"file", "local"}.intersection([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)
    return Path(inner) if local else Remote(fs, inner)


def local_of(path: str | os.PathLike[str]) -> Path:
    """A path on this machine.

    Raises:
        CheckpointError: it is an address of another storage.
    """
    place = place_of(path)
    if isinstance(place, Remote):
        raise CheckpointError(f"models are exported to a local file system, not to {path}; export to a local folder and copy it")
    return place
