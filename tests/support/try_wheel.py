"""Try a wheel: install the built packages into fresh environments and use them outside the repository (``make wheel``).

python tests/support/try_wheel.py FOLDER CONSTRAINTS PYTHON...
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

USED = """
import importlib.metadata as metadata, pathlib, torch, dtensor as dt
assert dt.__version__ == metadata.version("dtensor"), metadata.version("dtensor")
assert "site-packages" in dt.__file__, dt.__file__
about = metadata.metadata("dtensor")
assert about["License-Expression"] == "BSD-3-Clause", dict(about)
root = pathlib.Path(dt.__file__).parent
assert all((root / name).exists() for name in ("py.typed", "base/tensor_methods.pyi", "testing/accepted_gaps.txt"))
mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = dt.distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [dt.Shard(0), dt.Replicate()])
w = dt.distribute_tensor(torch.ones(3, 4), mesh, [dt.Replicate(), dt.Shard(1)]).requires_grad_()
loss = ((x @ w) ** 2).mean()
loss.backward()
assert (loss.item(), w.grad.full_tensor()[0].tolist()) == (603.0, [90.0] * 4)
"""
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")} | {"OMP_NUM_THREADS": "1"}


def main(folder: Path, constraints: Path, pythons: list[str]) -> int:
    """Install the wheel for each Python and the sdist for the first; print the results and return 1 if one of them fails."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    wrong = 0
    for python in pythons:
        for built in (wheel, sdist) if python == pythons[0] else (wheel,):
            problem = find_install_errors(python, built.resolve(), constraints.resolve())
            wrong += bool(problem)
            print(f"{version_of(python)}, {built.name}: {problem or 'right'}", flush=True)
    return 1 if wrong else 0


def version_of(python: str) -> str:
    return subprocess.run([python, "--version"], capture_output=True, text=True).stdout.strip()


def find_install_errors(python: str, built: Path, constraints: Path) -> str:
    """Install ``built`` into a new virtual environment and run a program there; return the error output, or "" without errors."""
    with tempfile.TemporaryDirectory(prefix="try-wheel-") as folder:
        own = f"{folder}/venv/bin/python"
        steps = [
            [python, "-m", "venv", f"{folder}/venv"],
            [own, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(constraints), str(built)],
            [own, "-W", "error::DeprecationWarning:dtensor", "-c", USED],
            [own, "-m", "dtensor"],
            [own, "-m", "dtensor", "doctor"],
        ]
        for step in steps:
            ran = subprocess.run(step, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
            if ran.returncode:
                return f"{' '.join(step[1:3])} ended with {ran.returncode}:\n{ran.stdout[-1000:]}{ran.stderr[-3000:]}"
    return ""


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
