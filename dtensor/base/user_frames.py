"""User frames: find the stack frame of the user's program among frames of the library, torch and the standard library."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import typing_extensions
from torch.nn.parallel import distributed

from .caches import BoundedDict

_LIBRARY_PATH, _TORCH_PATH = (str(Path(file).parent) + os.sep for file in (str(Path(__file__).parent), torch.__file__))
_STDLIB_PATH = str(Path(os.__file__).resolve().parent) + os.sep
_OPTIMIZER_PATH = os.path.join(_TORCH_PATH, "optim", "")
_TYPING_EXTENSIONS = typing_extensions.__file__  # wraps deprecated functions of torch
# generated code of libraries; "<stdin>" and notebooks belong to the user
_GENERATED_PREFIXES = ("<frozen", "<string>", "<eval_with_key", "<captured ")
_IS_LIBRARY_CACHE: BoundedDict[str, bool] = BoundedDict(10_000)  # bounded, because generated functions have file names too
_FRAME_PATTERN = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in ')


class SourceLine(NamedTuple):
    """Line of a program."""

    file: str
    number: int

    @property
    def source(self) -> str:
        """Return the text of the line, "" if it cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def line(self) -> str:
        """Return the place and its text, such as ``train.py:41  loss = h.sum(0)``."""
        return f"{self}  {source}" if (source := self.source) else str(self)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}" if self.file else "(no line of the program)"


NO_SOURCE_LINE = SourceLine("", 0)


def is_library_file(file: str) -> bool:
    """Return True if ``file`` belongs to the library, torch, an installed package or the standard library."""
    known = _IS_LIBRARY_CACHE.get(file)
    if known is None:
        installed = "site-packages" in file or "dist-packages" in file
        standard = not installed and str(Path(file).resolve()).startswith(_STDLIB_PATH)
        ours = file.startswith((_LIBRARY_PATH, _TORCH_PATH, _TYPING_EXTENSIONS, *_GENERATED_PREFIXES))
        known = _IS_LIBRARY_CACHE.keep(file, ours or standard)
    return known


def find_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's program, searched outwards from ``frame``; None if there is none."""
    known = _IS_LIBRARY_CACHE
    while frame is not None and (known.get(name := frame.f_code.co_filename) or is_library_file(name)):
        frame = frame.f_back
    return frame


def iter_torch_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield frames of torch's functions, outwards from ``frame``, up to the first frame outside of torch and the library."""
    while frame is not None and (file := frame.f_code.co_filename).startswith((_LIBRARY_PATH, _TORCH_PATH)):
        if file.startswith(_TORCH_PATH):
            yield frame
        frame = frame.f_back


def torch_ddp_hint(frame: FrameType | None) -> str:
    """Return an error hint for a distributed model inside of ``DistributedDataParallel``; "" if that is not on the stack."""
    if distributed.__file__ not in _stack_files(frame):
        return ""
    return (
        ". torch.nn.parallel.DistributedDataParallel does not support DTensors: it broadcasts and "
        "reduces plain parameters. Use dtensor.parallel.replicate(model, mesh) or fully_shard, and do "
        "not pass the model to accelerate's prepare(), which wraps it: see dtensor.hf.prepared "
        "(docs/porting.md)"
    )


def optimizer_state_hint(frame: FrameType | None) -> str:
    """Return an error hint for optimizer state saved on another mesh; "" if no optimizer of torch is on the stack."""
    if not any(file.startswith(_OPTIMIZER_PATH) for file in _stack_files(frame)):
        return ""
    return (
        ". The optimizer state was saved on another mesh and loaded unchanged. Load it with "
        "dtensor.checkpoint, which distributes it like the parameters, or redistribute each tensor of "
        "optimizer.state[p]: `s.redistribute(p.device_mesh, p.placements)`"
    )


def _stack_files(frame: FrameType | None) -> Iterator[str]:
    """Yield the files of the frames, outwards from ``frame``."""
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def source_line_of(frame: FrameType | None) -> SourceLine:
    """Return the source line of ``frame``; ``NO_SOURCE_LINE`` for None."""
    return NO_SOURCE_LINE if frame is None else SourceLine(frame.f_code.co_filename, frame.f_lineno)


def user_line_of_stack(formatted: Iterable[str]) -> SourceLine:
    """Return the innermost line of the user in a stack that ``traceback.format_stack`` formatted.

    >>> user_line_of_stack(['  File "train.py", line 7, in step', '  File "<frozen runpy>", line 1, in run'])
    SourceLine(file='train.py', number=7)
    """
    for entry in reversed(list(formatted)):
        match = _FRAME_PATTERN.match(entry)
        if match is not None and not is_library_file(match["file"]):
            return SourceLine(match["file"], int(match["line"]))
    return NO_SOURCE_LINE
