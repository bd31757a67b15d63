"""Only what ``dtensor.interop.patch_catalog`` lists is changed in torch: checked in a fresh process, stage by stage."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dtensor
from dtensor.interop.dynamo import INLINED_MODULES
from dtensor.interop.patch_catalog import PATCHES

LOOK = """
import gc, math, os, sys, types, warnings
import torch, torch.distributed, torch.utils.checkpoint, torch.nn.utils.rnn
warnings.simplefilter("ignore")
OWN = os.path.join(os.getcwd(), "dtensor", "")

PLAIN = {str, int, float, bool, bytes, type(None)}

def is_ours(value):
    if type(value) in PLAIN:
        return False
    value = value.__func__ if isinstance(value, (classmethod, staticmethod, types.MethodType)) else value
    named = value if isinstance(value, (types.FunctionType, type)) else type(value)
    if isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith(OWN):
        return True  # a function of torch's with other code
    return str(getattr(named, "__module__", "")).partition(".")[0] == "dtensor"

def inside(value):
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, (list, set, frozenset)) else []

def ours():
    found, seen = {"sys.meta_path"} if any(map(is_ours, sys.meta_path)) else set(), set()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "math", "builtins") or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if is_ours(value) or any(map(is_ours, inside(value))):
                found.add(f"{name}.{key}")
            if isinstance(value, type) and value not in seen and str(value.__module__).partition(".")[0] == "torch":
                seen.add(value)
                found |= {
                    f"{value.__module__}.{value.__qualname__}.{attribute}"
                    for attribute, held in list(vars(value).items())
                    if is_ours(held) or any(map(is_ours, inside(held)))
                }
    return found

assert not ours()
import dtensor, dtensor as dt
assert gc.isenabled()  # which rests during the import
assert "torch._dynamo" not in sys.modules  # whose import takes ten times as long as ours
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
def found_after() -> dict[str, tuple[set[str], set[str]]]:
    """By stage what of torch is ours once it has run, and those before it; and what is said to be."""
    told = "*sorted(ours()), '', *dtensor.base.patches.APPLIED_PATCHES"
    program = LOOK + "".join(STAGES[stage] + f"\nprint({stage!r}, {told}, sep=';')\n" for stage in STAGES)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    rows = [[set(part.split(";")) for part in line.split(";;")] for line in done.stdout.splitlines()]
    return {stage: (found - {stage}, said) for stage, (found, said) in zip(STAGES, rows, strict=True)}


@pytest.mark.parametrize("stage", STAGES)
def test_torch_is_as_it_was_but_for_the_list(stage: str, found_after: dict[str, tuple[set[str], set[str]]]) -> None:
    found, said = found_after[stage]
    assert said <= {change.where for change in PATCHES}
    beyond = {name for name in found if not any(name == known or name.startswith(known + ".") for known in said)}
    # torch's own DTensor has other names for the same two lists
    assert beyond <= {
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
        assert (where in found) is (where in said)
    for where in ("torch.library.register_torch_dispatch", "torch.utils._debug_mode.DebugMode"):
        assert (where in said) is (stage != "import")


def test_every_change_says_why_and_how_it_is_undone() -> None:
    assert all(change.why and change.undone and change.since.startswith("2.") for change in PATCHES)
    assert len({change.where for change in PATCHES}) == len(PATCHES)


def test_modules_that_dynamo_inlines_exist() -> None:
    package = Path(dtensor.__file__).parent
    assert not [name for name in sorted(INLINED_MODULES) if not (package / f"{name}.py").is_file()]
