"""Block I/O: write tensors as ``torch.save`` streams, as DCP of torch does, and read any box of a stored block."""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from ..base.memory_order import contiguous_stride
from ..comm.flat_rows import flatten_to_bytes
from ..errors import CheckpointError
from .files import RemotePath, StoragePath, damage_error, open_regular
from .manifest import StoredBlock

# bytes, a page: shorter runs are copied from mapped memory, because a system call for each would cost more
_MIN_DIRECT_READ = 4096

_ALIGNMENT = 64  # bytes: alignment of records in a torch.save stream, and so of streams in a file


@dataclass(frozen=True, slots=True)
class Stream:
    """Position of a saved object in its file: start and length of the stream, and the position of the tensor's own bytes."""

    start: int
    length: int
    at: int


def append_tensor(file: BinaryIO, tensor: torch.Tensor) -> Stream:
    """Append a tensor to an open file as an aligned ``torch.save`` stream, and return the positions of stream and data."""
    start = -(-file.seek(0, os.SEEK_END) // _ALIGNMENT) * _ALIGNMENT
    file.truncate(start)
    file.seek(start)
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes the complete storage
    torch.save(tensor, file)
    length = file.seek(0, os.SEEK_END) - start
    file.flush()
    return Stream(start, length, start + find_record(FileWindow(file, start, length), "0", file.name))


class FileWindow(io.RawIOBase):
    """Seekable read-only file object of ``length`` bytes of another file, beginning at byte ``start``."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self.start, self._length, self.position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the read position relative to the window's start, present position or end, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self._length}[whence]
        self.position = max(0, base + offset)
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read bytes of the window from its position into ``buffer``, and return how many were read."""
        self._file.seek(self.start + self.position)
        data = self._file.read(max(0, min(len(buffer), self._length - self.position)))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def find_record(window: FileWindow, key: str, file: object) -> int:
    """Return the byte position of the data of storage ``key`` in a ``torch.save`` stream, an uncompressed zip archive.

    Args:
        file: path of the file, for errors.

    Raises:
        CheckpointError: the window is not such a stream.
    """
    try:
        with zipfile.ZipFile(window) as archive:
            record = next(info for info in archive.infolist() if info.filename.endswith(f"/data/{key}"))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise damage_error(f"{file}: the saved tensor at byte {window.start} is damaged ({error or 'it has no data'})") from error
    if record.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(
            f"{file}: the saved tensor at byte {window.start} is compressed, and only uncompressed tensors can be read in parts; "
            "save it with torch.save or this library"
        )
    window.seek(record.header_offset + 26)  # here are the lengths of the name and padding that follow the 30-byte header
    return record.header_offset + 30 + sum(struct.unpack("<HH", window.read(4)))


class CommonBox(NamedTuple):
    """Intersection of a requested block and a stored block.

    Attributes:
        number, block: index and stored block.
        start, size: position in the tensor.
        here, there: start in the requested block, and in the stored block.
    """

    number: int
    block: StoredBlock
    start: tuple[int, ...]
    size: tuple[int, ...]
    here: tuple[int, ...]
    there: tuple[int, ...]

    def file_range(self, width: int) -> tuple[int, list[int], int]:
        """Return position and strides of the box in its file, and the length from first to last element, in bytes."""
        stride = [step * width for step in self.block.stride or contiguous_stride(self.block.shape)]
        begin = self.block.at + sum(a * b for a, b in zip(self.there, stride, strict=True))
        return begin, stride, sum((count - 1) * step for count, step in zip(self.size, stride, strict=True)) + width

    def memory_range(self, out: torch.Tensor) -> tuple[int, list[int]]:
        """Return the position and strides of the box in ``out``, a row-major tensor, in bytes."""
        stride = [step * out.element_size() for step in contiguous_stride(tuple(out.shape))]
        return sum(a * b for a, b in zip(self.here, stride, strict=True)), stride


class CheckpointFiles:
    """Open files of one checkpoint, and the number of bytes that were read from them.

    Attributes:
        bytes_read: bytes of tensors, without manifests.
    """

    def __init__(self, folder: StoragePath, links: bool = False) -> None:
        """Open no file yet. ``links=True`` allows files that are symbolic links."""
        self.folder, self.links = folder, links
        self.bytes_read = 0
        self._open: dict[str, tuple[int, Any]] = {}

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle, _ in self._open.values():
            os.close(handle)
        self._open.clear()

    def read_box(self, out: torch.Tensor, box: CommonBox) -> None:
        """Read the part of a stored block that ``box`` covers from its file into ``out``, a contiguous CPU tensor.

        Raises:
            CheckpointError: the file ends too early.
        """
        width, size, file = out.element_size(), box.size, box.block.file
        target = flatten_to_bytes(out).numpy()
        source, source_stride, length = box.file_range(width)
        begin, target_stride = box.memory_range(out)
        outer, run = _contiguous_runs(size, source_stride, target_stride, width)
        self.bytes_read += run * math.prod(size[:outer])
        handle, _ = self._get_or_open(file)
        if os.fstat(handle).st_size < source + length:
            raise damage_error(f"{self.folder / file} is truncated")
        if run >= _MIN_DIRECT_READ:
            lines = _run_starts(size[:outer], source_stride), _run_starts(size[:outer], target_stride)
            memory = memoryview(target)  # type: ignore[arg-type]  # arrays are buffers
            for there, here in zip(*lines, strict=True):
                self._read_exactly(handle, memory[begin + here : begin + here + run], source + there, file)
            return
        mapped = self._get_or_map(file)
        shape = (*size, width)
        stored = np.ndarray(shape, np.uint8, mapped, source, (*source_stride, 1))
        np.ndarray(shape, np.uint8, target.data, begin, (*target_stride, 1))[...] = stored
        if hasattr(mmap, "MADV_DONTNEED"):  # without it, pages that were read count as memory of this process until it ends
            page = source // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, page, source + length - page)

    def mapped_box(self, dtype: torch.dtype, box: CommonBox) -> torch.Tensor | None:
        """Return the part of a stored block that ``box`` covers as a view of the memory-mapped file, without a copy.

        None if its elements are not aligned in the file.
        """
        width, file = dtype.itemsize, box.block.file
        source, stride, length = box.file_range(width)
        handle, _ = self._get_or_open(file)
        if source % width or os.fstat(handle).st_size < source + length:
            return None
        self.bytes_read += math.prod(box.size) * width
        row = torch.frombuffer(self._get_or_map(file), dtype=dtype, count=length // width, offset=source)
        return row.as_strided(box.size, [step // width for step in stride])

    def _read_exactly(self, handle: int, memory: memoryview, at: int, file: str) -> None:
        """Fill ``memory`` with the bytes of a file from byte ``at``; raise if the file ends before."""
        while memory:
            got = os.preadv(handle, [memory], at)
            if got == 0:
                raise damage_error(f"{self.folder / file} is truncated")
            memory, at = memory[got:], at + got

    def _get_or_open(self, file: str) -> tuple[int, Any]:
        """Return the handle of a file, opened at the first call, and its memory map, if it has one."""
        entry = self._open.get(file)
        if entry is None:
            path = self.folder / file
            assert isinstance(path, Path)
            entry = self._open[file] = open_regular(path, self.links), None
        return entry

    def _get_or_map(self, file: str) -> Any:
        """Return the memory map of a file, made at the first call."""
        handle, mapped = self._get_or_open(file)
        if mapped is None:
            mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)  # torch.frombuffer needs writable memory
            self._open[file] = handle, mapped
        return mapped


class RemoteCheckpointFiles(CheckpointFiles):
    """Files of a checkpoint on remote storage: one request for each box, from its first byte to its last."""

    def mapped_box(self, dtype: torch.dtype, box: CommonBox) -> None:
        """Return None, which makes the caller copy: remote files cannot be mapped."""

    def read_box(self, out: torch.Tensor, box: CommonBox) -> None:
        """Read the part of a stored block that ``box`` covers from remote storage into ``out``, by one request."""
        width, path = out.element_size(), self.folder / box.block.file
        (source, theirs, length), (begin, ours) = box.file_range(width), box.memory_range(out)
        assert isinstance(path, RemotePath)
        data = path.read(source, source + length)
        self.bytes_read += len(data)
        if len(data) < length:
            raise damage_error(f"{path} is truncated")
        here = np.ndarray((*box.size, width), np.uint8, flatten_to_bytes(out).numpy().data, begin, (*ours, 1))
        here[...] = np.ndarray((*box.size, width), np.uint8, data, 0, (*theirs, 1))


def write_box(block: torch.Tensor, file: BinaryIO, at: int, shape: Sequence[int], start: Sequence[int]) -> None:
    """Write one block of a tensor of ``shape`` to its position in ``file``, which has the tensor row-major from byte ``at``.

    Args:
        block: contiguous, on the CPU.
        file: open for reading and writing, of its full size.
        start: start of the block in the tensor.
    """
    width = block.element_size()
    source_stride = [step * width for step in contiguous_stride(tuple(block.shape))]
    target_stride = [step * width for step in contiguous_stride(tuple(shape))]
    at += sum(a * b for a, b in zip(start, target_stride, strict=True))
    outer, run = _contiguous_runs(block.shape, target_stride, source_stride, width)
    source = flatten_to_bytes(block).numpy()
    if run >= _MIN_DIRECT_READ:
        memory = memoryview(source)  # type: ignore[arg-type]  # arrays are buffers
        lines = _run_starts(block.shape[:outer], target_stride), _run_starts(block.shape[:outer], source_stride)
        for there, here in zip(*lines, strict=True):
            rest, position = memory[here : here + run], at + there
            while rest:
                count = os.pwrite(file.fileno(), rest, position)
                rest, position = rest[count:], position + count
        return
    mapped = np.memmap(file, np.uint8, "r+")
    stored = np.ndarray((*block.shape, width), np.uint8, mapped, at, (*target_stride, 1))
    stored[...] = np.ndarray((*block.shape, width), np.uint8, source.data, 0, (*source_stride, 1))
    mapped.flush()


def _contiguous_runs(size: Sequence[int], source: Sequence[int], target: Sequence[int], width: int) -> tuple[int, int]:
    """Return the number of outer dims to iterate over, and the bytes per iteration that are contiguous in both memories."""
    dim, run = len(size), width
    while dim and (size[dim - 1] == 1 or source[dim - 1] == target[dim - 1] == run):
        dim -= 1
        run *= size[dim]
    return dim, run


def _run_starts(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the byte offset of each contiguous run, for all indices of the outer dims in row-major order."""
    starts = np.zeros(1, dtype=np.int64)
    for count, step in zip(size, stride, strict=False):
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return starts.tolist()
