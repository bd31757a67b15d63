"""Case lists: functions that run as tests in one process and on four gloo processes, and helpers that they share."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_processes import run_gloo

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.testing import check
from dtensor.testing.placements import get_or_make_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class CaseList(dict[str, Callable[..., Any]]):
    """Cases by name, in the order in which they were added. The order is equal in every process that imports the module of the
    cases.

    Attributes:
        only_on_processes: cases that run only on processes, since other tests check more in one process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.only_on_processes: set[str] = set()

    @property
    def names_in_one_process(self) -> list[str]:
        """Return the names of the cases that run in one process."""
        return [name for name in self if name not in self.only_on_processes]

    def on_processes(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self.only_on_processes.add(fn.__name__)
        return self.case(fn)

    def case(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self[fn.__name__] = fn
        return fn

    def report(self, thread: int | str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a case named by the issue number ``thread`` and the name of the function."""

        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            self[f"{thread}_{fn.__name__}"] = fn
            return fn

        return add

    def run(self, folder: str | None = None) -> list[str]:
        """Run all cases on this rank of a process group, and return their names. With ``folder`` each case gets its own
        subfolder.
        """
        torch.set_num_threads(1)
        for name, fn in self.items():
            try:
                fn(*(() if folder is None else (_make_shared_folder(Path(folder) / name),)))
            except pytest.skip.Exception:
                continue
            except BaseException as error:
                raise AssertionError(f"case {name}") from error
        if folder is not None:
            dist.barrier()  # nobody leaves while others still write
        return list(self)


def _make_shared_folder(folder: Path) -> Path:
    """Create a folder on the first rank; all ranks return its path after it exists."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    return folder


def run_cases_on_four_processes(module: ModuleType, *args: Any, timeout_s: float = 280.0) -> None:
    """Run all cases of a module (or its ``main``, if it has one) on four gloo processes, and assert that each rank ran all of
    them.
    """
    assert run_gloo(_run_module_cases, 4, module.__name__, *args, timeout_s=timeout_s) == [list(module.CASES)] * 4


def make_case_tests(
    module: ModuleType, *, folders: bool = False, gather: bool = False, slow: tuple[str, ...] = ()
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two tests: one runs each case of a module in one process, the other runs all cases on four gloo processes.

    Args:
        folders: give each case its own folder.
        gather: allow operators without a rule to gather.
        slow: cases that run in one process only where slow tests run.
    """
    warned = "ignore" if gather else "error"
    names = [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in module.CASES.names_in_one_process]

    @pytest.mark.filterwarnings(f"{warned}::dtensor.errors.GatherWarning")
    @pytest.mark.parametrize("name", names)
    def in_one_process(name: str, tmp_path: Path) -> None:
        module.CASES[name](*[tmp_path] * folders)

    @pytest.mark.gloo
    def on_four_processes(tmp_path: Path) -> None:
        run_cases_on_four_processes(module, *[str(tmp_path)] * folders)

    return in_one_process, on_four_processes


def _run_module_cases(module: str, *args: Any) -> list[str]:
    """Import a module by name and run its cases on this rank; return the names of the cases."""
    cases = import_module(module)
    ran: list[str] = (cases.main if hasattr(cases, "main") else cases.CASES.run)(*args)
    return ran


# --- what cases are written with -----------------------------------------------------------------------------------------
def get_line_mesh() -> dt.DeviceMesh:
    return get_or_make_mesh((4,))


def get_square_mesh() -> dt.DeviceMesh:
    return get_or_make_mesh((2, 2))


def make_values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distribute_values(x: torch.Tensor, *placements: Any, mesh: Any = None) -> DTensor:
    return dt.distribute_tensor(x, mesh or (get_line_mesh() if len(placements) == 1 else get_square_mesh()), list(placements))


def local_tensors_by_rank(x: Any) -> dict[int, torch.Tensor]:
    """Return the local tensors of a DTensor or a ``PerRank`` by rank, for the ranks that this process has."""
    local = x._local if isinstance(x, DTensor) else x
    if isinstance(local, dt.PerRank):
        return dict(enumerate(local.shards))
    return {dist.get_rank(): local}


def make_per_rank(make: Callable[[int], torch.Tensor], count: int = 4) -> torch.Tensor:
    """Return ``make(rank)`` for this rank, or in one process a ``PerRank`` of ``make(rank)`` for ``count`` ranks."""
    return make(dist.get_rank()) if dist.is_initialized() else dt.per_rank([make(rank) for rank in range(count)])


def assert_raises(kind: type[Exception], text: str, fn: Callable[[], Any]) -> None:
    """Assert that ``fn`` raises ``kind`` with a message that matches ``text``; cases call it on every rank."""
    with pytest.raises(kind, match=text):
        fn()


def assert_full_value(x: Any, expected: torch.Tensor) -> None:
    """Assert that the full tensor of ``x`` is close to ``expected`` on every rank."""
    whole = x.full_tensor()
    for piece in whole.shards if isinstance(whole, dt.PerRank) else (whole,):
        assert torch.allclose(piece, expected), (piece, expected)


def check_under_layouts(fn: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
    """Compare ``fn`` on DTensors with ``fn`` on plain tensors, for tensors sharded unevenly, nested, replicated and partial."""
    for mesh, choices in ((get_line_mesh(), ([S0], [R], [Partial()])), (get_square_mesh(), ([S0, S1], [S0, S0], [R, Shard(-1)]))):
        for where in choices:
            fitting = [[p if not isinstance(p, Shard) or x.ndim > p.dim else R for p in where] for x in tensors]
            fitting = [
                [R if isinstance(p, Partial) and not x.is_floating_point() else p for p in each]
                for x, each in zip(tensors, fitting, strict=True)
            ]
            check(fn, *tensors, mesh=mesh, placements=fitting, **options)
