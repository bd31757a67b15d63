"""Cluster page: the shell scripts, torchrun options and Kubernetes manifests of ``docs/clusters.md`` are valid."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

PAGE = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()


def code_blocks(kind: str) -> list[str]:
    found = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found


def load_manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [manifest for block in code_blocks("yaml") for manifest in yaml.safe_load_all(block)]


def torchrun_arguments() -> list[list[str]]:
    """Return the arguments of each torchrun command of the page."""
    lines = "\n".join(code_blocks("sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line)[shlex.split(line).index("torchrun") + 1 :] for line in lines if "torchrun " in line]


def check_options(arguments: list[str]) -> Any:
    substituted = [re.sub(r"\$\w+", "2", word) for word in arguments]
    options = get_args_parser().parse_args(substituted)  # exits at an unknown option
    assert options.training_script == "train.py"
    assert options.training_script_args == []
    assert options.rdzv_backend == "c10d"
    return options


def test_shell_scripts_of_the_page_parse() -> None:
    for script in code_blocks("sh"):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_torchrun_commands_of_the_page_have_valid_options() -> None:
    for arguments in torchrun_arguments():
        check_options(arguments)
    assert len(torchrun_arguments()) == 3


def test_kubernetes_service_and_job_of_the_page_agree_with_torchrun_options() -> None:
    service, job = load_manifests()
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
