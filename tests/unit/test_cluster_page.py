"""What ``docs/clusters.md`` gives to launchers: manifests that parse, scripts that a shell takes, options that torchrun has."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def blocks(kind: str) -> list[str]:
    found = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [manifest for block in blocks("yaml") for manifest in yaml.safe_load_all(block)]


def torchruns() -> list[list[str]]:
    """The arguments of every torchrun of the page."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[shlex.split(line).index("torchrun") + 1 :] for line in lines if "torchrun " in line]


def check_options(arguments: list[str]) -> Any:
    said = [re.sub(r"\$\w+", "2", word) for word in arguments]
    options = get_args_parser().parse_args(said)  # which ends the program at an option that it does not know
    assert options.training_script == "train.py"
    assert options.training_script_args == []
    assert options.rdzv_backend == "c10d"
    return options


def test_scripts_are_a_shell_s() -> None:
    for script in blocks("sh"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_torchrun_knows_the_options() -> None:
    for arguments in torchruns():
        check_options(arguments)
    assert len(torchruns()) == 3


def test_manifests_fit_together() -> None:
    service, job = manifests()
    assert [service["kind"], job["kind"]] == ["Service", "Job"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    options = check_options(container["args"])
    assert int(options.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options.rdzv_endpoint.startswith(f"{job['metadata']['name']}-0.{service['metadata']['name']}:")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
