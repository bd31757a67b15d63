"""Files of a checkpoint's folder, local or remote: only regular files are read (links, pipes: refused), writes are atomic.

Remote storage (object stores, memory) is accessed through fsspec. A remote folder exists if an object's name begins with it. An
object appears completely or not at all, like a renamed file on a disk, and the manifest is written last. There are no locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from ..errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RemotePath:
    """Folder or file on remote storage, with the methods of ``pathlib.Path`` that checkpoints use."""

    fs: Any  # an fsspec file system
    path: str

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path))

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.fs, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.fs, self.path.rstrip("/").rpartition("/")[0])

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

    def iterdir(self) -> Iterator[RemotePath]:
        self.fs.invalidate_cache()
        return (RemotePath(self.fs, found) for found in self.fs.ls(self.path, detail=False))

    def unlink(self, missing_ok: bool = False) -> None:
        if self.exists() or not missing_ok:
            self.fs.rm_file(self.path)

    def remove_all(self) -> None:
        self.fs.rm(self.path, recursive=True)

    def size(self) -> int:
        """Return the size of the remote file in bytes; raise a CheckpointError if it is missing."""
        try:
            return int(self.fs.info(self.path)["size"])
        except FileNotFoundError:
            raise _missing_error(self) from None

    def read(self, start: int | None = None, end: int | None = None) -> bytes:
        """Return the content of the remote file, or its bytes from ``start`` to ``end``."""
        try:
            return bytes(self.fs.cat_file(self.path, start=start, end=end))
        except FileNotFoundError:
            raise _missing_error(self) from None

    def open_for_reading(self) -> BinaryIO:
        """Open the remote file for reading small parts, such as descriptions of tensors."""
        try:
            return cast(BinaryIO, self.fs.open(self.path, "rb", block_size=1 << 16))
        except FileNotFoundError:
            raise _missing_error(self) from None

    def write(self, content: bytes) -> None:
        """Replace the content of the remote file atomically."""
        self.fs.pipe_file(self.path, content)

    def upload(self, file: str) -> None:
        """Upload the local file ``file`` to this remote path."""
        self.fs.put_file(file, self.path)


StoragePath: TypeAlias = Path | RemotePath


def damage_error(problem: str) -> CheckpointError:
    """Return the CheckpointError for a damaged or missing file: the ``problem``, and how to remedy it."""
    return CheckpointError(f"{problem}; restore the file, or load another checkpoint")


def _missing_error(place: StoragePath) -> CheckpointError:
    return damage_error(f"{place} is missing: the checkpoint is incomplete")


def parse_path(path: str | os.PathLike[str]) -> StoragePath:
    """Return a local path, or a RemotePath for an address with a protocol (``s3://bucket/run``).

    Raises:
        CheckpointError: the package that fsspec needs for that protocol is not installed, or the protocol is unknown.
    """
    if not (isinstance(path, str) and "://" in path):
        return Path(path)
    try:
        from fsspec.core import url_to_fs  # a dependency of torch; most protocols need further packages

        fs, inner = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be reached: {error}") from error
    local = {"file", "local"}.intersection([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)
    return Path(inner) if local else RemotePath(fs, inner)


# --- files, local or remote ------------------------------------------------------------------------------------------------
def open_regular(path: Path, links: bool = False) -> int:
    """Open a regular file for reading, and return its descriptor; raise for a FIFO, device or folder without opening it.

    Args:
        links: follow a symbolic link.

    Raises:
        CheckpointError: there is no regular file at ``path``.
    """
    try:
        status = os.stat(path, follow_symlinks=links)
    except FileNotFoundError:
        raise _missing_error(path) from None
    except ValueError as error:  # a name with a null character
        raise damage_error(f"{path!s:.100} is missing: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        what = "a symbolic link, which is not followed here" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise CheckpointError(f"{path} is {what}; put a copy of the file there")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(handle).st_mode):  # it was replaced meanwhile
        os.close(handle)
        raise CheckpointError(f"{path} is no regular file; put a copy of the file there")
    return handle


def open_for_reading(path: StoragePath, links: bool = False) -> BinaryIO:
    """Open a regular or remote file for reading parts of it; see :func:`open_regular`."""
    return path.open_for_reading() if isinstance(path, RemotePath) else open(open_regular(path, links), "rb")


def read_file(path: StoragePath, links: bool = False) -> bytes:
    """Return the content of a regular or remote file; see :func:`open_regular`."""
    if isinstance(path, RemotePath):
        return path.read()
    with open_for_reading(path, links) as file:
        return file.read()


def file_size(path: StoragePath, links: bool = False) -> int:
    """Return the size of a regular or remote file in bytes; see :func:`open_regular`."""
    if isinstance(path, RemotePath):
        return path.size()
    handle = open_regular(path, links)
    try:
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def path_exists(path: StoragePath) -> bool:
    """Return True if anything exists at ``path``, also a symbolic link to nothing."""
    return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)


def check_file_name(name: Any, referrer: StoragePath) -> str:
    """Return ``name`` if it names a file in the folder of ``referrer``, the file that has the name; raise for other paths.

    Raises:
        CheckpointError: the name leads to another folder.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"}.intersection(name)
    if not plain:
        raise CheckpointError(
            f"{referrer} refers to {name!r}, which is outside of its folder, so it is not read; save the checkpoint again"
        )
    return name


def parse_strict_json(text: bytes | str, numbers: bool = True) -> Any:
    """Return parsed JSON; raise if a key appears twice in one dict.

    Args:
        numbers: also accept NaN and infinities, which Python writes but JSON does not have.

    Raises:
        ValueError, RecursionError: the text is not such JSON.
    """

    def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the pairs of a JSON object as a dict; raise if a key appears twice."""
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a key appears twice")
        return result

    def parse_constant(name: str) -> float:
        """Return the float that NaN, Infinity or -Infinity names; raise if ``numbers`` is False."""
        if not numbers:
            raise ValueError(f"{name} is not JSON")
        return float(name)

    return json.loads(text, object_pairs_hook=reject_duplicate_keys, parse_constant=parse_constant)


@contextlib.contextmanager
def open_for_writing(path: StoragePath) -> Iterator[BinaryIO]:
    """Open a new local or remote file for writing and reading; it is durable (synced or uploaded) at the end of the block."""
    if isinstance(path, RemotePath):
        with tempfile.NamedTemporaryFile() as temporary:
            yield cast(BinaryIO, temporary)
            temporary.flush()
            path.upload(temporary.name)
        return
    with open(path, "w+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: StoragePath, content: bytes) -> None:
    """Replace the content of ``path`` atomically: write a temporary file, sync it to disk, rename it; remotely, one upload."""
    if isinstance(path, RemotePath):
        path.write(content)
        return
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # left by a killed save; if it is a link, its target is not written to
    with open(temporary, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: StoragePath) -> None:
    """Sync a local folder's file names to disk, so that a rename in it survives a crash."""
    if isinstance(folder, RemotePath):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
