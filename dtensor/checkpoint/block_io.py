"""Tensors in files: ``torch.save`` streams, as ``torch.distributed.checkpoint`` writes them, and reading any box out of one."""

from __future__ import annotations

import io
import math
import mmap
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ..base.memory_order import contiguous_stride
from ..comm.rows import flat_bytes
from ..errors import CheckpointError
from .files import open_regular

_LONG = 4096  # bytes, a page: shorter runs are gathered from mapped memory, since a system call each would cost more than they do

_ALIGNMENT = 64  # bytes: of records in a stream of torch.save, and so of streams in a file


@dataclass(frozen=True, slots=True)
class Stream:
    """Where a saved object lies in its file: the whole stream, and the bytes of the tensor itself."""

    start: int
    length: int
    at: int


def append(file: BinaryIO, tensor: torch.Tensor) -> Stream:
    """Save a tensor at the end of a file that is open for reading and writing, at a place whence its data are aligned."""
    start = -(-file.seek(0, os.SEEK_END) // _ALIGNMENT) * _ALIGNMENT
    file.truncate(start)
    file.seek(start)
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # the stream holds a tensor's whole storage
    torch.save(tensor, file)
    length = file.seek(0, os.SEEK_END) - start
    file.flush()
    return Stream(start, length, start + record_at(Window(file, start, length), "0"))


class Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def record_at(window: Window, key: str) -> int:
    """Where the bytes of storage ``key`` begin in a ``torch.save`` stream: a zip archive with uncompressed records.

    Raises:
        CheckpointError: it is no such stream.
    """
    try:
        with zipfile.ZipFile(window) as archive:
            found = next(info for info in archive.infolist() if info.filename.endswith(f"/data/{key}"))
    except (zipfile.BadZipFile, StopIteration) as error:
        raise CheckpointError(f"a saved tensor is damaged ({error or 'it has no data'})") from error
    if found.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError("a saved tensor is compressed; only uncompressed ones can be read in parts")
    window.seek(found.header_offset + 26)  # the local header: 30 bytes, then a name and padding whose lengths stand here
    lengths = window.read(4)
    return found.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class Files:
    """The files of one checkpoint, opened once each, and how many bytes were read from them.

    Attributes:
        bytes_read: of tensors, without manifests.
    """

    def __init__(self, folder: Path, links: bool = False) -> None:
        """``links``: files may be symbolic links."""
        self.folder, self.links = folder, links
        self.bytes_read = 0
        self._open: dict[str, tuple[int, Any]] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exception: object) -> None:
        for handle, _ in self._open.values():
            os.close(handle)
        self._open.clear()

    def read_box(
        self,
        out: torch.Tensor,
        place: Sequence[int],
        size: Sequence[int],
        file: str,
        at: int,
        stride: Sequence[int],
        start: Sequence[int],
    ) -> None:
        """Fill the box of ``size`` at ``place`` in ``out`` from that at ``start`` in a block stored at byte ``at`` of ``file``.

        Args:
            out: contiguous, on the CPU.
            stride: of the stored block, in elements.

        Raises:
            CheckpointError: the file ends too early.
        """
        width = out.element_size()
        target = flat_bytes(out).numpy()
        source_stride = [step * width for step in stride]
        target_stride = [step * width for step in contiguous_stride(tuple(out.shape))]
        source = at + sum(a * b for a, b in zip(start, source_stride, strict=True))
        begin = sum(a * b for a, b in zip(place, target_stride, strict=True))
        outer, run = _runs(size, source_stride, target_stride, width)
        nbytes = run
        for count in size[:outer]:
            nbytes *= count
        self.bytes_read += nbytes
        handle, _ = self._handle(file)
        if os.fstat(handle).st_size < self._end(source, size, source_stride, width):
            raise CheckpointError(f"{self.folder / file} is truncated")
        if run >= _LONG:
            lines = _starts(size[:outer], source_stride), _starts(size[:outer], target_stride)
            memory = memoryview(target)  # type: ignore[arg-type]  # arrays are buffers
            for there, here in zip(*lines, strict=True):
                self._read(handle, memory[begin + here : begin + here + run], source + there, file)
            return
        mapped = self._mapped(file)
        shape = (*size, width)
        stored = np.ndarray(shape, np.uint8, mapped, source, (*source_stride, 1))
        np.ndarray(shape, np.uint8, target.data, begin, (*target_stride, 1))[...] = stored
        if hasattr(mmap, "MADV_DONTNEED"):  # else every page that was read counts as this process's memory until the end
            page = source // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, page, self._end(source, size, source_stride, width) - page)

    def mapped_box(
        self, dtype: torch.dtype, size: Sequence[int], file: str, at: int, stride: Sequence[int], start: Sequence[int]
    ) -> torch.Tensor | None:
        """The box that :meth:`read_box` would read, as it lies in mapped memory: nothing is copied, and pages are read once.

        None where its elements are not aligned there. Nobody writes to it.
        """
        width = dtype.itemsize
        source = at + sum(a * b for a, b in zip(start, stride, strict=True)) * width
        handle, _ = self._handle(file)
        end = self._end(source, size, [step * width for step in stride], width)
        if source % width or os.fstat(handle).st_size < end:
            return None
        self.bytes_read += math.prod(size) * width
        row = torch.frombuffer(self._mapped(file), dtype=dtype, count=(end - source) // width, offset=source)
        return row.as_strided(tuple(size), tuple(stride))

    def _read(self, handle: int, memory: memoryview, at: int, file: str) -> None:
        while memory:
            got = os.preadv(handle, [memory], at)
            if got == 0:
                raise CheckpointError(f"{self.folder / file} is truncated")
            memory, at = memory[got:], at + got

    def _handle(self, file: str) -> tuple[int, Any]:
        found = self._open.get(file)
        if found is None:
            found = self._open[file] = open_regular(self.folder / file, self.links), None
        return found

    def _mapped(self, file: str) -> Any:
        handle, mapped = self._handle(file)
        if mapped is None:
            mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)  # tensors are made of what may be written to
            self._open[file] = handle, mapped
        return mapped

    @staticmethod
    def _end(source: int, size: Sequence[int], stride: Sequence[int], width: int) -> int:
        return source + sum((count - 1) * step for count, step in zip(size, stride, strict=True)) + width


def write_box(block: torch.Tensor, file: BinaryIO, at: int, shape: Sequence[int], start: Sequence[int]) -> None:
    """Write a block to its place in a tensor of ``shape`` that is stored row-major from byte ``at`` of ``file``.

    Args:
        block: contiguous, on the CPU.
        file: open for reading and writing, of its full size.
        start: of the block in the tensor.
    """
    width = block.element_size()
    source_stride = [step * width for step in contiguous_stride(tuple(block.shape))]
    target_stride = [step * width for step in contiguous_stride(tuple(shape))]
    at += sum(a * b for a, b in zip(start, target_stride, strict=True))
    outer, run = _runs(block.shape, target_stride, source_stride, width)
    source = flat_bytes(block).numpy()
    if run >= _LONG:
        memory = memoryview(source)  # type: ignore[arg-type]  # arrays are buffers
        lines = _starts(block.shape[:outer], target_stride), _starts(block.shape[:outer], source_stride)
        for there, here in zip(*lines, strict=True):
            rest, place = memory[here : here + run], at + there
            while rest:
                done = os.pwrite(file.fileno(), rest, place)
                rest, place = rest[done:], place + done
        return
    mapped = np.memmap(file, np.uint8, "r+")
    stored = np.ndarray((*block.shape, width), np.uint8, mapped, at, (*target_stride, 1))
    stored[...] = np.ndarray((*block.shape, width), np.uint8, source.data, 0, (*source_stride, 1))
    mapped.flush()


def _runs(size: Sequence[int], source: Sequence[int], target: Sequence[int], width: int) -> tuple[int, int]:
    """How many outer dims are walked, and the bytes that lie side by side in both memories under each of their places."""
    dim, run = len(size), width
    while dim and (size[dim - 1] == 1 or source[dim - 1] == target[dim - 1] == run):
        dim -= 1
        run *= size[dim]
    return dim, run


def _starts(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    starts = np.zeros(1, dtype=np.int64)
    for count, step in zip(size, stride, strict=False):
        starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return starts.tolist()
