"""Run a script under a recorder: ``dtensor explain script.py``, ``dtensor trace`` and ``dtensor plan``."""

from __future__ import annotations

import os
import runpy
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..base.text_tables import print_table
from ..debug.explain import Explanation
from ..debug.html import save_html
from ..debug.trace import save_trace
from ..errors import ArgumentError
from ..plan import plan
from ..recorders.run_recorder import RunRecorder
from .progress import report_periodically


def run_script(script: Path, arguments: Sequence[str]) -> int:
    """Run a script as ``python script arguments`` would, in this process, and return its exit status."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent.resolve())
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def explain_script(script: Path, arguments: Sequence[str], html: Path | None = None) -> int:
    """Run a script, print its communication, computation and memory, and return its exit status.

    If the script raises, the report of the part that ran is printed first.
    """
    with report_at_end(html, f"Communication of {script.name}") as set_report, RunRecorder(with_operators=True) as record:
        set_report(lambda: Explanation.from_record(record))
        return run_script(script, arguments)


def trace_script(script: Path, arguments: Sequence[str], output: Path) -> int:
    """Run a script, write a trace of it, and return its exit status. If it raises on one rank, nothing is written."""
    with RunRecorder(with_operators=True) as record:
        began = time.perf_counter_ns()
        status = run_script(script, arguments)
    with _ensure_process_group(), _report_progress(f"writing {output}"):
        save_trace(record, began, output)
    if is_printing_rank():
        print(f"written to {output}: open it in https://ui.perfetto.dev", flush=True)
    return status


def plan_script(script: Path, arguments: Sequence[str], html: Path | None = None, json: Path | None = None) -> int:
    """Run a script once, print a plan of all its operators, and return its exit status."""
    status: list[int] = []
    with _report_progress(f"planning {script.name}"):
        program_plan = plan(lambda: status.append(run_script(script, arguments)))
    with report_at_end(html, f"Plan of {script.name}") as set_report:
        set_report(lambda: program_plan)
    if json is not None and is_printing_rank():
        program_plan.save(json)
    return status[0]


def is_printing_rank() -> bool:
    """Return True on the rank that prints for all ranks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _ensure_process_group() -> Iterator[None]:
    """Provide a gloo process group in the ``with`` block if torchrun started several ranks and the script left none."""
    is_missing = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_missing:
        store, rank, size = next(rendezvous("env://"))  # the store still has the addresses of the first group: hence the prefix
        dist.init_process_group("gloo", store=PrefixStore("dtensor", store), rank=rank, world_size=size)
    yield
    if is_missing:
        dist.destroy_process_group()


@contextmanager
def report_at_end(html: Path | None, title: str) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """When the ``with`` block ends, make the report by the function that was set, print it, and write it as a page."""
    makers: list[Callable[[], Any]] = []
    try:
        yield makers.append
    finally:
        for make in makers if is_printing_rank() else ():
            with _report_progress("making the report"):
                report = make()
            _print_report(report)
            if html is not None:
                print(f"written to {save_html(report, html, title=title)}")


def _print_report(report: Any) -> None:
    """Print a report; of an explanation the text by line and the table of modules."""
    if not isinstance(report, Explanation):
        print(report, flush=True)
        return
    print(report.text_by_line, flush=True)
    if table := report.module_table:
        print_table(table, numbers=True)


def _report_progress(activity: str) -> AbstractContextManager[None]:
    """Return a context that reports on stderr, on one rank, that ``activity`` goes on."""
    return report_periodically(lambda: activity) if is_printing_rank() else nullcontext()


def writable_path(text: str) -> Path:
    """Return ``text`` as the path of a file that can be written, for ``argparse``; else end the command with status 2."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArgumentTypeError(f"{text} cannot be written: it is a folder, or its folder does not exist")
    return path


def existing_file(script: Path) -> Path:
    """Return ``script``; raise an ``ArgumentError`` if there is no such file."""
    if not script.is_file():
        raise ArgumentError(f"there is no file {script}")
    return script
