"""Examples of parallel models: their losses equal those of one device, in one process and under torchrun."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from test_demo import printed_by

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NAMES = {
    "llama_tp_sp": 4,
    "fsdp_tp_2d": 4,
    "hsdp_3d": 8,
    "ddp": 4,
    "zero": 4,
    "digits_fsdp": 2,
    "meta_start": 2,
    "two_meshes": 4,
    "ring_attention": 4,
    "context_parallel": 4,
    "pipeline_3d": 8,
    "toy_tp": 4,
    "fsdp2": 2,
    "char_gpt_ddp": 4,
    "titan": 4,
}
PORTS = {"toy_tp", "fsdp2", "char_gpt_ddp", "titan"}  # examples of features that other examples run on processes too
_LOSSES = re.compile(r"^ +(\d+) +(\d+\.\d+) +(\d+\.\d+)$", re.MULTILINE)


def arguments(name: str) -> tuple[str, ...]:
    if name == "digits_fsdp":
        pytest.importorskip("sklearn")
        return "--epochs", "1"
    return ()


def losses(printed: str) -> list[tuple[float, float]]:
    """Return the losses (mesh, one device) of each step."""
    found = [(float(ours), float(theirs)) for _, ours, theirs in _LOSSES.findall(printed)]
    assert found
    return found


ONE_BY_ONE = """
import runpy, sys
folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
for name in names:
    print("==", name)
    sys.argv[:] = [name]
    runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
"""


@pytest.mark.slow
def test_examples_in_one_process_have_the_losses_of_one_device() -> None:
    """Run all examples in one interpreter, to import torch once."""
    names = sorted(NAMES.keys() - {"pipeline_3d", "digits_fsdp"})  # pipeline stages need processes
    printed = printed_by(sys.executable, "-c", ONE_BY_ONE, str(EXAMPLES), *names)
    parts = dict(part.split("\n", 1) for part in printed.split("== ")[1:])
    assert list(parts) == names
    for part in parts.values():
        for ours, theirs in losses(part):
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_digits_example_in_one_process_has_the_losses_of_one_device() -> None:
    for ours, theirs in losses(printed_by(sys.executable, str(EXAMPLES / "digits_fsdp.py"), *arguments("digits_fsdp"))):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_example_with_wrong_number_of_processes_names_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the error without starting processes, by the environment of a launcher."""
    arguments(name)  # skips an example without its packages
    script = EXAMPLES / f"{name}.py"
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert isinstance(ended.value.code, str)  # Python prints it and exits with status 1
    assert (
        f"{name}.py needs {NAMES[name]} processes and has 3; start it as: torchrun --nproc-per-node {NAMES[name]} "
        in ended.value.code
    )


@pytest.mark.gloo
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in PORTS)) for name in NAMES])
def test_examples_under_torchrun_have_the_losses_of_one_device(name: str) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NAMES[name]))
    for ours, theirs in losses(printed_by(sys.executable, *launch, str(EXAMPLES / f"{name}.py"), *arguments(name))):
        assert ours == pytest.approx(theirs, abs=1e-4)
