"""Tensors in files: ``torch.save`` streams, as ``torch.distributed.checkpoint`` writes them, and reading any box out of one."""

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
from ..comm.flat_rows import flat_bytes
from ..errors import CheckpointError
from .files import open_regular
from .manifest import Block
from .remote import Address, Remote

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
    return found.header_offset + 30 + sum(struct.unpack("<HH", window.read(4)))


class Box(NamedTuple):
    """What a block of ours and a stored one have in common.

    Attributes:
        number, block: the stored one.
        start, size: in the tensor.
        here, there: where it begins in ours, and in the stored one.
    """

    number: int
    block: Block
    start: tuple[int, ...]
    size: tuple[int, ...]
    here: tuple[int, ...]
    there: tuple[int, ...]

    def source(self, width: int) -> tuple[int, list[int], int]:
        """In bytes, of elements of so many: where it begins in its file, its strides there, and how long it is from its first to
        its last."""
        stride = [step * width for step in self.block.stride or contiguous_stride(self.block.shape)]
        begin = self.block.at + sum(a * b for a, b in zip(self.there, stride, strict=True))
        return begin, stride, sum((count - 1) * step for count, step in zip(self.size, stride, strict=True)) + width

    def target(self, out: torch.Tensor) -> tuple[int, list[int]]:
        """The same of a row-major tensor of ours: where in its memory, and strides."""
        stride = [step * out.element_size() for step in contiguous_stride(tuple(out.shape))]
        return sum(a * b for a, b in zip(self.here, stride, strict=True)), stride


class Files:
    """The files of one checkpoint, opened once each, and how many bytes were read from them.

    Attributes:
        bytes_read: of tensors, without manifests.
    """

    def __init__(self, folder: Address, links: bool = False) -> None:
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

    def read_box(self, out: torch.Tensor, box: Box) -> None:
        """Fill the box in ``out``, which is contiguous and on the CPU.

        Raises:
            CheckpointError: the file ends too early.
        """
        width, size, file = out.element_size(), box.size, box.block.file
        target = flat_bytes(out).numpy()
        source, source_stride, length = box.source(width)
        begin, target_stride = box.target(out)
        outer, run = _runs(size, source_stride, target_stride, width)
        self.bytes_read += run * math.prod(size[:outer])
        handle, _ = self._handle(file)
        if os.fstat(handle).st_size < source + length:
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
            mapped.madvise(mmap.MADV_DONTNEED, page, source + length - page)

    def mapped_box(self, dtype: torch.dtype, box: Box) -> torch.Tensor | None:
        """The box that :meth:`read_box` would read, as it lies in mapped memory: nothing is copied, and pages are read once.

        None where its elements are not aligned there. Nobody writes to it.
        """
        width, file = dtype.itemsize, box.block.file
        source, stride, length = box.source(width)
        handle, _ = self._handle(file)
        if source % width or os.fstat(handle).st_size < source + length:
            return None
        self.bytes_read += math.prod(box.size) * width
        row = torch.frombuffer(self._mapped(file), dtype=dtype, count=length // width, offset=source)
        return row.as_strided(box.size, [step // width for step in stride])

    def _read(self, handle: int, memory: memoryview, at: int, file: str) -> None:
        while memory:
            got = os.preadv(handle, [memory], at)
            if got == 0:
                raise CheckpointError(f"{self.folder / file} is truncated")
            memory, at = memory[got:], at + got

    def _handle(self, file: str) -> tuple[int, Any]:
        found = self._open.get(file)
        if found is None:
            path = self.folder / file
            assert isinstance(path, Path)
            found = self._open[file] = open_regular(path, self.links), None
        return found

    def _mapped(self, file: str) -> Any:
        handle, mapped = self._handle(file)
        if mapped is None:
            mapped = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)  # tensors are made of what may be written to
            self._open[file] = handle, mapped
        return mapped


class RemoteFiles(Files):
    """Those of another storage: one request for each box, from its first byte to its last."""

    def mapped_box(self, dtype: torch.dtype, box: Box) -> None:
        """None: what is elsewhere is copied."""

    def read_box(self, out: torch.Tensor, box: Box) -> None:
        width, path = out.element_size(), self.folder / box.block.file
        (source, theirs, length), (begin, ours) = box.source(width), box.target(out)
        assert isinstance(path, Remote)
        data = path.read(source, source + length)
        self.bytes_read += len(data)
        if len(data) < length:
            raise CheckpointError(f"{path} is truncated")
        here = np.ndarray((*box.size, width), np.uint8, flat_bytes(out).numpy().data, begin, (*ours, 1))
        here[...] = np.ndarray((*box.size, width), np.uint8, data, 0, (*theirs, 1))


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
