"""The user's line: which frame of a stack is the program's, and not the library's, torch's or the standard library's."""

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

from .caches import Bounded

_HERE, _TORCH = (str(Path(file).parent) + os.sep for file in (str(Path(__file__).parent), torch.__file__))
_STANDARD = str(Path(os.__file__).resolve().parent) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_WRAPS = typing_extensions.__file__  # torch's functions, where they are deprecated
_MADE = (
    "<frozen",
    "<string>",
    "<eval_with_key",
    "<captured ",
)  # code that libraries write; "<stdin>" and notebooks are the user's
_KNOWN: Bounded[str, bool] = Bounded(10_000)  # functions that a program writes have files too
_FRAME = re.compile(r'\s*File "(?P<file>.*)", line (?P<line>\d+), in ')


class Place(NamedTuple):
    """A line of a program."""

    file: str
    number: int

    @property
    def source(self) -> str:
        """What stands there, as far as it can be read."""
        return linecache.getline(self.file, self.number).strip()

    @property
    def line(self) -> str:
        """``train.py:41  loss = h.sum(0)``."""
        return f"{self}  {source}" if (source := self.source) else str(self)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.number}" if self.file else "(no line of the program)"


NOWHERE = Place("", 0)


def is_library(file: str) -> bool:
    """Whether the code of a file is no user's."""
    found = _KNOWN.get(file)
    if found is None:
        installed = "site-packages" in file or "dist-packages" in file
        standard = not installed and str(Path(file).resolve()).startswith(_STANDARD)
        found = _KNOWN.keep(file, file.startswith((_HERE, _TORCH, _WRAPS, *_MADE)) or standard)
    return found


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program, from this one outwards."""
    known = _KNOWN
    while frame is not None and (known.get(name := frame.f_code.co_filename) or is_library(name)):
        frame = frame.f_back
    return frame


def frames_of_torch(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the calls of torch's functions, from this frame outwards, up to the first one of other code than torch's and ours."""
    while frame is not None and (file := frame.f_code.co_filename).startswith((_HERE, _TORCH)):
        if file.startswith(_TORCH):
            yield frame
        frame = frame.f_back


def wrapped_by_torch(frame: FrameType | None) -> str:
    """What to say to somebody who wraps a distributed model in torch's ``DistributedDataParallel``; "" if nobody does here."""
    if distributed.__file__ not in _files(frame):
        return ""
    return (
        ". torch.nn.parallel.DistributedDataParallel does not support DTensors: it broadcasts and "
        "reduces plain parameters. Use dtensor.parallel.replicate(model, mesh) or fully_shard, and do "
        "not pass the model to accelerate's prepare(), which wraps it: see dtensor.hf.prepared "
        "(docs/porting.md)"
    )


def loaded_elsewhere(frame: FrameType | None) -> str:
    """What to say to somebody whose optimizer's state was saved under another mesh; "" if no optimizer of torch's runs here."""
    if not any(file.startswith(_OPTIMIZERS) for file in _files(frame)):
        return ""
    return (
        ". The optimizer state was saved on another mesh and loaded unchanged. Load it with "
        "dtensor.checkpoint, which distributes it like the parameters, or redistribute each tensor of "
        "optimizer.state[p]: `s.redistribute(p.device_mesh, p.placements)`"
    )


def _files(frame: FrameType | None) -> Iterator[str]:
    """Of the code that runs, from this frame outwards."""
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def place_of(frame: FrameType | None) -> Place:
    """Where a frame is."""
    return NOWHERE if frame is None else Place(frame.f_code.co_filename, frame.f_lineno)


def users_place(formatted: Iterable[str]) -> Place:
    """The user's innermost line in a stack as ``traceback.format_stack`` gives it.

    >>> users_place(['  File "train.py", line 7, in step', '  File "<frozen runpy>", line 1, in run'])
    Place(file='train.py', number=7)
    """
    for entry in reversed(list(formatted)):
        found = _FRAME.match(entry)
        if found is not None and not is_library(found["file"]):
            return Place(found["file"], int(found["line"]))
    return NOWHERE
