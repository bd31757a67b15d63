"""Elastic restart: a job with killed workers and agents continues on the remaining ranks with the losses of an uninterrupted
run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "elastic.py"
STEPS, EVERY = 2000, 4  # more steps than run between the kills
LIMIT_S = float(os.environ.get("ELASTIC_LIMIT_S", "300"))  # limit of each wait


@dataclass(frozen=True)
class Line:
    """Step that rank 0 of one start of the program has logged."""

    pid: int
    ranks: int
    step: int
    loss: float


def logged_steps(folder: Path) -> list[Line]:
    """Return the logged steps, without a line that is being written."""
    path = folder / "losses.txt"
    text = path.read_text() if path.exists() else ""
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [Line(int(pid), int(ranks), int(step), float(loss)) for pid, ranks, step, loss in rows]


def wait_for(folder: Path, pids: set[int], steps: int, agent: subprocess.Popen[bytes]) -> None:
    """Wait until a start of the program outside of ``pids`` has made ``steps`` steps."""
    end = time.monotonic() + LIMIT_S
    while sum(line.pid not in pids for line in logged_steps(folder)) < steps:
        assert agent.poll() is None, (folder / "output.txt").read_text()
        if time.monotonic() > end:
            raise AssertionError(f"no step in {LIMIT_S} s; {stacks(folder, agent)}")
        time.sleep(0.002)


def stacks(folder: Path, agent: subprocess.Popen[bytes]) -> str:
    """Abort the workers to print their stacks, and return the output."""
    for pid in children(agent.pid):
        os.kill(pid, signal.SIGABRT)
    time.sleep(2.0)
    return (folder / "output.txt").read_text()


def launch(folder: Path, steps: int, *options: str, before: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *options]
    script = [str(SCRIPT), "--folder", str(folder), "--steps", str(steps), "--every", str(EVERY)]
    python = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "TORCHELASTIC_ERROR_FILE": "",
        **environment,
    }
    with open(folder / "output.txt", "ab") as out:
        return subprocess.Popen([*before, *command, *script], stdout=out, stderr=out, env=os.environ | python, cwd=folder)


def children(pid: int) -> list[int]:
    """Return the process ids of an agent's workers."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_all(agent: subprocess.Popen[bytes]) -> None:
    """Kill the agent and then its workers, as a container or Slurm does."""
    workers = children(agent.pid) if agent.poll() is None else []
    for pid in (agent.pid, *workers):
        kill(pid)
    agent.wait()


def check_losses(folder: Path, expected: dict[int, float]) -> None:
    """Check that each step has the expected loss, and that each start resumed from the last complete checkpoint."""
    lines, last = logged_steps(folder), 0
    for line in lines:
        assert line.loss == pytest.approx(expected[line.step], rel=1e-9), line
    for pid in dict.fromkeys(line.pid for line in lines):
        steps = [line.step for line in lines if line.pid == pid]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        complete = max(0, (last - 1) // EVERY - 1) * EVERY  # the last save may be incomplete
        assert complete < steps[0] <= last + 1, (pid, steps[0], last)
        last = steps[-1]


def uninterrupted(folder: Path, steps: int) -> dict[int, float]:
    """Return the losses of an uninterrupted run in one process."""
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--steps", str(steps), "--every", str(steps)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=LIMIT_S, capture_output=True)
    return {line.step: line.loss for line in logged_steps(folder)}


def run_with_kills(folder: Path, phases: list[tuple[int, int]], seed: int = 0) -> None:
    """Run phases of (ranks, kills): kill workers, and at the end of a phase the agent; then let the run finish.

    Args:
        folder: new folder of the job.
    """
    folder.mkdir()
    dice, seen = random.Random(seed), set[int]()
    for ranks, kills in phases:
        options = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "99")
        agent = launch(folder, STEPS, *options)
        try:
            for number in range(kills):
                wait_for(folder, seen, dice.randint(1, 3 * EVERY), agent)
                time.sleep(dice.random() * 0.02)  # at a random point in a step
                seen = {line.pid for line in logged_steps(folder)}
                if number < kills - 1:
                    kill(dice.choice(children(agent.pid)))
        finally:
            kill_all(agent)
    steps = max(line.step for line in logged_steps(folder)) + EVERY
    assert steps < STEPS
    last = launch(folder, steps, "--standalone", "--nproc-per-node", str(phases[-1][0]))
    try:
        assert last.wait(LIMIT_S) == 0, (folder / "output.txt").read_text()
    finally:
        kill_all(last)
    expected = uninterrupted(folder.parent / "uninterrupted", steps)
    check_losses(folder, expected)
    lines = logged_steps(folder)
    assert len({line.pid for line in lines}) == sum(kills for _, kills in phases) + 1
    assert list(dict.fromkeys(line.ranks for line in lines)) == list(dict.fromkeys(ranks for ranks, _ in phases))
    assert lines[-1].step == steps


@pytest.mark.gloo
@pytest.mark.slow
def test_job_resumes_with_equal_losses_after_killed_worker_and_agents(tmp_path: Path) -> None:
    run_with_kills(tmp_path / "job", [(4, 2), (3, 1), (4, 1)])


@pytest.mark.gloo
@pytest.mark.slow
def test_job_resumes_with_equal_losses_after_20_kills_on_4_then_3_then_4_ranks(tmp_path: Path) -> None:
    run_with_kills(tmp_path / "job", [(4, 7), (3, 7), (4, 6)], seed=1)


# --- several hosts ------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def two_hosts() -> Iterator[list[tuple[str, dict[str, str], tuple[str, ...]]]]:
    """Yield address, environment and command prefix of two hosts: linked network namespaces, or this host twice."""
    names = [f"dt{os.getpid()}{side}" for side in "ab"]
    ends = [f"e{os.getpid()}{side}" for side in "ab"]
    ip = shutil.which("ip")
    setup = [["netns", "add", name] for name in names]
    setup += [["link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]]]
    for at, (name, end) in enumerate(zip(names, ends, strict=True)):
        setup += [["-n", name, "addr", "add", f"10.77.0.{at + 1}/24", "dev", end]]
        setup += [["-n", name, "link", "set", device, "up"] for device in (end, "lo")]
    try:
        made = ip is not None and all(subprocess.run([ip, *args], capture_output=True).returncode == 0 for args in setup)
        if made:
            assert ip is not None
            yield [
                (f"10.77.0.{at + 1}", {"GLOO_SOCKET_IFNAME": end, "TP_SOCKET_IFNAME": end}, (ip, "netns", "exec", name))
                for at, (name, end) in enumerate(zip(names, ends, strict=True))
            ]
        else:
            yield [("127.0.0.1", {}, ()), ("127.0.0.1", {}, ())]
    finally:
        for name in names if ip is not None else ():
            subprocess.run([ip, "netns", "del", name], capture_output=True)


@pytest.mark.gloo
@pytest.mark.slow
def test_two_node_job_resumes_with_equal_losses_after_a_lost_worker_and_node(tmp_path: Path) -> None:
    """Kill a worker, then the second node until it returns; in the end kill and restart both nodes."""
    folder = tmp_path / "job"
    folder.mkdir()

    def start(at: int, steps: int) -> subprocess.Popen[bytes]:
        address, environment, before = hosts[at]
        environment = environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # needed for nodes that join later
        patience = f"is_host={at == 0},last_call_timeout=1,keep_alive_interval=1"
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0][0]}:29477", "--rdzv-id", str(steps))
        many = ("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "9", *rendezvous, "--rdzv-conf", patience)
        return launch(folder, steps, *many, "--local-addr", address, before=before, **environment)

    def wait_for_more_steps() -> None:
        seen = {line.pid for line in logged_steps(folder)}
        wait_for(folder, seen, EVERY + 2, agents[0])

    with two_hosts() as hosts:
        agents = [start(at, STEPS) for at in (0, 1)]
        try:
            wait_for_more_steps()
            kill(children(agents[1].pid)[1])
            wait_for_more_steps()
            kill_all(agents[1])
            wait_for_more_steps()
            agents[1] = start(1, STEPS)
            wait_for_more_steps()
        finally:
            for agent in agents:
                kill_all(agent)
        steps = logged_steps(folder)[-1].step + EVERY
        agents = [start(at, steps) for at in (0, 1)]
        try:
            assert [agent.wait(LIMIT_S) for agent in agents] == [0, 0], (folder / "output.txt").read_text()
        finally:
            for agent in agents:
                kill_all(agent)
    check_losses(folder, uninterrupted(tmp_path / "uninterrupted", steps))
    starts = {line.pid: line.ranks for line in logged_steps(folder)}
    assert list(starts.values()) == [4, 4, 2, 4, 4]
