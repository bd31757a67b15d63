"""Patch catalog: a fresh process changes only the names of torch that ``dtensor.interop.patch_catalog`` lists."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dtensor
from dtensor.interop.dynamo import INLINED_MODULES
from dtensor.interop.patch_catalog import PATCHES

INSPECTION = """
import gc, math, os, sys, types, warnings
import torch, torch.distributed, torch.utils.checkpoint, torch.nn.utils.rnn
warnings.simplefilter("ignore")
OWN = os.path.join(os.getcwd(), "dtensor", "")

PLAIN = {str, int, float, bool, bytes, type(None)}

def is_patched(value):
    if type(value) in PLAIN:
        return False
    value = value.__func__ if isinstance(value, (classmethod, staticmethod, types.MethodType)) else value
    named = value if isinstance(value, (types.FunctionType, type)) else type(value)
    if isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(OWN):
        return True  # a function of torch with replaced code
    return str(getattr(named, "__module__", "")).partition(".")[0] == "dtensor"

def elements_of(value):
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, (list, set, frozenset)) else []

def patched_names():
    found, visited = {"sys.meta_path"} if any(map(is_patched, sys.meta_path)) else set(), set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "math", "builtins") or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if is_patched(value) or any(map(is_patched, elements_of(value))):
                found.add(f"{name}.{key}")
            if isinstance(value, type) and value not in visited and str(value.__module__).partition(".")[0] == "torch":
                visited.add(value)
                found |= {
                    f"{value.__module__}.{value.__qualname__}.{attribute}"
                    for attribute, stored in list(vars(value).items())
                    if is_patched(stored) or any(map(is_patched, elements_of(stored)))
                }
    return found

assert not patched_names()
import dtensor, dtensor as dt
assert gc.isenabled()  # the import disables it temporarily
assert "torch._dynamo" not in sys.modules  # its import takes ten times as long as that of dtensor
"""
STAGES = {
    "import": "",
    "an in-process mesh": """
x = dt.distribute_tensor(torch.ones(4, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])
(x @ x.t()).sum().item()
""",
    "a capture": """
x = dt.distribute_tensor(torch.ones(4, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])
step = dt.capture(lambda x: (x * 2).relu().sum())
step(x), step(x)
try:
    dt.capture(lambda x: 1 / 0)(x)
except ZeroDivisionError:
    pass
""",
    "debugging": """
from dtensor.debug import CommDebugMode
x = dt.distribute_tensor(torch.ones(4, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])
with CommDebugMode():
    x.sum().item()
dt.explain(lambda: x @ x.t())
""",
    "memory tracking": """
from torch.distributed._tools.mem_tracker import MemTracker
x = dt.distribute_tensor(torch.ones(4, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])
with MemTracker():
    x @ x.t()
""",
    "local tensors": """
x = dt.distribute_tensor(torch.ones(4, 3), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])
x.to_local().sum()
""",
    "data parallelism": """
dt.parallel.fully_shard(torch.nn.Linear(3, 2), mesh=dt.init_device_mesh("cpu", (2,)))(x).sum().backward()
""",
}


@pytest.fixture(scope="module")
def names_after_stages() -> dict[str, tuple[set[str], set[str]]]:
    """Return, for each stage, the patched names that are found in torch and those that are recorded as applied."""
    columns = "*sorted(patched_names()), '', *dtensor.base.patches.APPLIED_PATCHES"
    program = INSPECTION + "".join(STAGES[stage] + f"\nprint({stage!r}, {columns}, sep=';')\n" for stage in STAGES)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    rows = [[set(part.split(";")) for part in line.split(";;")] for line in done.stdout.splitlines()]
    return {stage: (found - {stage}, recorded) for stage, (found, recorded) in zip(STAGES, rows, strict=True)}


@pytest.mark.parametrize("stage", STAGES)
def test_only_listed_names_of_torch_are_patched_after_each_stage(
    stage: str, names_after_stages: dict[str, tuple[set[str], set[str]]]
) -> None:
    found, recorded = names_after_stages[stage]
    assert recorded <= {change.where for change in PATCHES}
    unlisted = {name for name in found if not any(name == entry or name.startswith(entry + ".") for entry in recorded)}
    # torch.distributed.tensor has other names for the same two lists
    assert unlisted <= {
        "torch.distributed.tensor._optim_foreach_supported_types",
        "torch.distributed.tensor._util_foreach_supported_types",
    }
    assert {"torch.optim.optimizer._foreach_supported_types", "torch.utils._foreach_utils._foreach_supported_types"} <= found
    assert ("torch.autograd.function.FunctionMeta.__getattribute__" in found) is (stage in ("local tensors", "data parallelism"))
    assert ("torch.optim.optimizer.Optimizer.zero_grad" in found) is (stage == "data parallelism")
    for where in (
        "torch.autograd.function.FunctionMeta.__getattribute__",
        "torch.optim.optimizer.Optimizer.zero_grad",
        "sys.meta_path",
    ):
        assert (where in found) is (where in recorded)
    assert ("torch.library.register_torch_dispatch" in recorded) is (stage != "import")
    assert "torch.utils._debug_mode.DebugMode" in recorded


def test_each_patch_has_a_reason_a_way_to_undo_it_and_a_version() -> None:
    assert all(change.why and change.undone and change.since.startswith("2.") for change in PATCHES)
    assert len({change.where for change in PATCHES}) == len(PATCHES)


def test_modules_that_dynamo_inlines_exist() -> None:
    package = Path(dtensor.__file__).parent
    assert not [name for name in sorted(INLINED_MODULES) if not (package / f"{name}.py").is_file()]
