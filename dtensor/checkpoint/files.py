"""The files of a checkpoint's folder: read without trust in what stands there, replaced by one atomic rename."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import CheckpointError
from .remote import Address, Remote


def open_regular(path: Path, links: bool = False) -> int:
    """A handle to read a regular file with; what else may stand there (a FIFO, a device, a folder) is not opened.

    Args:
        links: a symbolic link is followed.

    Raises:
        CheckpointError: there is none.
    """
    try:
        found = os.stat(path, follow_symlinks=links)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete") from None
    except ValueError as error:  # a name with a null character
        raise CheckpointError(f"{path!s:.100} is missing: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link, which is not followed here" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise CheckpointError(f"{path} is {what}")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    if not stat.S_ISREG(os.fstat(handle).st_mode):  # it was exchanged since
        os.close(handle)
        raise CheckpointError(f"{path} is not a regular file")
    return handle


def opened(path: Address, links: bool = False) -> BinaryIO:
    """A regular file to read parts of; see :func:`open_regular`."""
    return path.opened() if isinstance(path, Remote) else open(open_regular(path, links), "rb")


def read_regular(path: Address, links: bool = False) -> bytes:
    """A regular file's content; see :func:`open_regular`."""
    if isinstance(path, Remote):
        return path.read()
    with opened(path, links) as file:
        return file.read()


def size_of(path: Address, links: bool = False) -> int:
    """Bytes of a regular file; see :func:`open_regular`."""
    if isinstance(path, Remote):
        return path.size()
    handle = open_regular(path, links)
    try:
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def present(path: Address) -> bool:
    """Whether anything stands there, also a link to nothing."""
    return path.exists() if isinstance(path, Remote) else os.path.lexists(path)


def check_name(name: Any, said_by: Address) -> str:
    """``name``, which ``said_by`` gives a file in its own folder.

    Raises:
        CheckpointError: it leads elsewhere.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"}.intersection(name)
    if not plain:
        raise CheckpointError(f"{said_by} refers to {name!r}, which is outside of its folder, so it is not read")
    return name


def strict_json(text: bytes | str, numbers: bool = True) -> Any:
    """Parsed JSON in which no key stands twice.

    Args:
        numbers: also NaN and the infinities, which Python writes and JSON does not have.

    Raises:
        ValueError, RecursionError: it is none.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key appears twice")
        return found

    def constant(name: str) -> float:
        if not numbers:
            raise ValueError(f"{name} is not JSON")
        return float(name)

    return json.loads(text, object_pairs_hook=once, parse_constant=constant)


@contextlib.contextmanager
def written(path: Address) -> Iterator[BinaryIO]:
    """A new file to write and read, on its disk at the end."""
    if isinstance(path, Remote):
        with tempfile.NamedTemporaryFile() as aside:
            yield cast(BinaryIO, aside)
            aside.flush()
            path.take(aside.name)
        return
    with open(path, "w+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Address, content: bytes) -> None:
    """``path`` with this content: written aside, brought to the disk, renamed."""
    if isinstance(path, Remote):
        path.write(content)
        return
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)  # left by a killed save; never written through, if it is a link
    with open(aside, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Address) -> None:
    """Bring the names in ``folder`` to the disk."""
    if isinstance(folder, Remote):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
