"""The files of a checkpoint's folder: read without trust in what stands there, replaced by one atomic rename."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import CheckpointError


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
        raise CheckpointError(f"{path} is no regular file")
    return handle


def read_regular(path: Path, links: bool = False) -> bytes:
    """A regular file's content; see :func:`open_regular`."""
    with open(open_regular(path, links), "rb") as file:
        return file.read()


def present(path: Path) -> bool:
    """Whether anything stands there, also a link to nothing."""
    return os.path.lexists(path)


def check_name(name: Any, said_by: Path) -> str:
    """``name``, which ``said_by`` gives a file in its own folder.

    Raises:
        CheckpointError: it leads elsewhere.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\\", "\0"}.intersection(name)
    if not plain:
        raise CheckpointError(f"{said_by} names {name!r}, which is not in its folder: it is not read")
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
            raise ValueError("a key stands twice")
        return found

    def constant(name: str) -> float:
        if not numbers:
            raise ValueError(f"{name} is no JSON")
        return float(name)

    return json.loads(text, object_pairs_hook=once, parse_constant=constant)


def replace_file(path: Path, content: bytes) -> None:
    """``path`` with this content: written aside, brought to the disk, renamed."""
    aside = path.with_name(path.name + ".new")
    aside.unlink(missing_ok=True)  # left by a killed save; never written through, if it is a link
    with open(aside, "xb") as file:
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


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
