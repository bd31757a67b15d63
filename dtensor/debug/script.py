"""Scripts as they are, watched: ``python -m dtensor explain script.py``, ``trace``, ``plan``."""

from __future__ import annotations

import os
import runpy
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..errors import ArgumentError
from ..plan import plan
from .explain import Explanation
from .html import save_html
from .seen import Record
from .trace import save


def run(script: Path, arguments: Sequence[str]) -> int:
    """Runs a script as Python would; its exit status."""
    before, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent.resolve())
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv, sys.path[:] = before, path
    return 0


def explained(script: Path, arguments: Sequence[str], html: Path | None = None) -> int:
    """Run a script, then print what it moved, computed and held; its exit status. Where it raises, what it did until then is
    printed first.
    """
    with told(html, f"What {script.name} moves") as tell, Record(computing=True) as record:
        tell(lambda: Explanation.of(record))
        return run(script, arguments)


def traced(script: Path, arguments: Sequence[str], output: Path) -> int:
    """Run a script, then write what it did, over time; its exit status. Where it raises on one rank nothing is written."""
    with Record(computing=True) as record:
        began = time.perf_counter_ns()
        status = run(script, arguments)
    with _together():
        save(record, began, output)
    if first():
        print(f"written to {output}: open it in https://ui.perfetto.dev", flush=True)
    return status


def planned(script: Path, arguments: Sequence[str], html: Path | None = None, json: Path | None = None) -> int:
    """Run a script once, then print how all of its calls together should run; its exit status."""
    status: list[int] = []
    found = plan(lambda: status.append(run(script, arguments)))
    with told(html, f"How {script.name} should run") as tell:
        tell(lambda: found)
    if json is not None and first():
        found.save(json)
    return status[0]


def first() -> bool:
    """Whether this process speaks for all."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _together() -> Iterator[None]:
    """The processes that torchrun started have a group, also where the script has ended its own."""
    ended = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if ended:
        store, rank, size = next(rendezvous("env://"))  # which remembers where the processes of the first group were
        dist.init_process_group("gloo", store=PrefixStore("dtensor", store), rank=rank, world_size=size)
    yield
    if ended:
        dist.destroy_process_group()


@contextmanager
def told(html: Path | None, title: str) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """At the end one rank prints what it was handed, and writes it as a page if a path is given."""
    handed: list[Callable[[], Any]] = []
    try:
        yield handed.append
    finally:
        for make in handed if first() else ():
            print(found := make(), flush=True)
            if html is not None:
                print(f"written to {save_html(found, html, title=title)}")


def writable(text: str) -> Path:
    """The path of a file that can be written there, as ``argparse`` asks for it: otherwise it ends the command, with 2."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"{text} cannot be written: it is a folder, or there is none to put it in")
    return path


def asked(script: Path) -> Path:
    """``script``, if it is there.

    Raises:
        ArgumentError: it is not.
    """
    if not script.is_file():
        raise ArgumentError(f"{script} is no file")
    return script
