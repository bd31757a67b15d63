"""Lists of cases that run in this process and on four: ``@case`` adds one, and ``held`` gives the local tensors of ranks."""

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


class Cases(dict[str, Callable[..., Any]]):
    """Cases by name, in the order in which they were added, the same in every process that imports their module.

    Attributes:
        elsewhere: cases that run only on processes, since other tests check more in one process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()

    @property
    def here(self) -> list[str]:
        """Return the names of the cases that run in one process."""
        return [name for name in self if name not in self.elsewhere]

    def on_processes(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self.elsewhere.add(fn.__name__)
        return self.case(fn)

    def case(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        self[fn.__name__] = fn
        return fn

    def report(self, thread: int | str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a case that was reported under this issue number."""

        def add(fn: Callable[..., Any]) -> Callable[..., Any]:
            self[f"{thread}_{fn.__name__}"] = fn
            return fn

        return add

    def run(self, folder: str | None = None) -> list[str]:
        """Run all cases, each in its own subfolder of ``folder`` if given; return their names. Errors get a note with the case's
        name."""
        torch.set_num_threads(1)
        for name, fn in self.items():
            try:
                fn(*(() if folder is None else (_made(Path(folder) / name),)))
            except pytest.skip.Exception:
                continue
            except BaseException as error:
                raise AssertionError(f"case {name}") from error
        if folder is not None:
            dist.barrier()  # nobody leaves while others still write
        return list(self)


def _made(folder: Path) -> Path:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    return folder


def on_four(module: ModuleType, *args: Any, timeout_s: float = 280.0) -> None:
    """Run all cases of a module (or its ``main``, if it has one) on four processes."""
    assert run_gloo(_run, 4, module.__name__, *args, timeout_s=timeout_s) == [list(module.CASES)] * 4


def here_and_on_four(
    module: ModuleType, *, folders: bool = False, gather: bool = False, slow: tuple[str, ...] = ()
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two tests: each case of a module in one process, and all of them on four.

    Args:
        folders: give each case its own folder.
        gather: allow operators without a rule to gather.
        slow: cases that run in one process only where slow tests run.
    """
    warned = "ignore" if gather else "error"
    names = [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in module.CASES.here]

    @pytest.mark.filterwarnings(f"{warned}::dtensor.errors.GatherWarning")
    @pytest.mark.parametrize("name", names)
    def in_one_process(name: str, tmp_path: Path) -> None:
        module.CASES[name](*[tmp_path] * folders)

    @pytest.mark.gloo
    def on_four_processes(tmp_path: Path) -> None:
        on_four(module, *[str(tmp_path)] * folders)

    return in_one_process, on_four_processes


def _run(module: str, *args: Any) -> list[str]:
    cases = import_module(module)
    ran: list[str] = (cases.main if hasattr(cases, "main") else cases.CASES.run)(*args)
    return ran


# --- what cases are written with -----------------------------------------------------------------------------------------
def line() -> dt.DeviceMesh:
    return get_or_make_mesh((4,))


def square() -> dt.DeviceMesh:
    return get_or_make_mesh((2, 2))


def value(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def put(x: torch.Tensor, *placements: Any, mesh: Any = None) -> DTensor:
    return dt.distribute_tensor(x, mesh or (line() if len(placements) == 1 else square()), list(placements))


def held(x: Any) -> dict[int, torch.Tensor]:
    """Return the local tensor of each rank in this process."""
    local = x._local if isinstance(x, DTensor) else x
    if isinstance(local, dt.PerRank):
        return dict(enumerate(local.shards))
    return {dist.get_rank(): local}


def by_rank(make: Callable[[int], torch.Tensor], count: int = 4) -> torch.Tensor:
    """Return the tensor that ``make`` returns for every rank, or for this process's rank."""
    return make(dist.get_rank()) if dist.is_initialized() else dt.per_rank([make(rank) for rank in range(count)])


def raises(kind: type[Exception], text: str, fn: Callable[[], Any]) -> None:
    """Assert that ``fn`` raises on every rank with the same message."""
    with pytest.raises(kind, match=text):
        fn()


def equal(x: Any, expected: torch.Tensor) -> None:
    whole = x.full_tensor()
    for piece in whole.shards if isinstance(whole, dt.PerRank) else (whole,):
        assert torch.allclose(piece, expected), (piece, expected)


def everywhere(fn: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> None:
    """Assert that ``fn`` is right with its tensors sharded unevenly, nested, along other dims, replicated and partial."""
    for mesh, choices in ((line(), ([S0], [R], [Partial()])), (square(), ([S0, S1], [S0, S0], [R, Shard(-1)]))):
        for where in choices:
            fitting = [[p if not isinstance(p, Shard) or x.ndim > p.dim else R for p in where] for x in tensors]
            fitting = [
                [R if isinstance(p, Partial) and not x.is_floating_point() else p for p in each]
                for x, each in zip(tensors, fitting, strict=True)
            ]
            check(fn, *tensors, mesh=mesh, placements=fitting, **options)
