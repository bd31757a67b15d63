"""Profile files: measured constants change plans, invalid files are ignored with a warning, all ranks use one profile."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo

from dtensor.__main__ import main
from dtensor.commands import calibrate
from dtensor.cost import profile as profiles
from dtensor.cost.device import DEVICES
from dtensor.cost.link import get_device
from dtensor.cost.profile import BUILT_IN_PROFILE, MEASURED_COLLECTIVES, Link, Profile, Rate, profile_path, read_profile
from dtensor.layout.layout import Layout
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.redistribute import plan

SLOW_START = Profile({"gloo": Link.uniform(latency=1.0, per_peer=0.0, bandwidth=1e12, memory=1e12)})
SLOW_WIRE = Profile({"gloo": Link.uniform(latency=1e-9, per_peer=0.0, bandwidth=1.0, memory=1e12)})
P, MAX, R, S0 = Partial(), Partial("max"), Replicate(), Shard(0)


def test_profile_round_trips_through_text_and_missing_links_are_built_in() -> None:
    made = Profile({"gloo": SLOW_WIRE.links["gloo"]}, {"nccl": SLOW_START.links["gloo"]}, 4)
    read = Profile.loads(made.dumps())
    assert read.links["gloo"] == made.links["gloo"]
    assert read.links["nccl"] == BUILT_IN_PROFILE.links["nccl"]  # missing in the file, so built in
    assert read.between_hosts["nccl"] == made.between_hosts["nccl"]
    assert read.ranks_per_host == 4
    assert Profile.loads(read.dumps()) == read


def test_profile_keeps_measured_devices_and_an_old_file_has_none() -> None:
    made = Profile(devices={"cpu": replace(DEVICES["CPU"], name="mine", launch=3e-6)})
    assert Profile.loads(made.dumps()).devices == made.devices
    assert Profile.loads('{"format": 1}').devices == {}


def test_get_device_prefers_the_measured_device_to_the_built_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [70, 71]  # no mesh of these ranks has a cached device
    assert get_device(DeviceMesh("cpu", ranks)) == DEVICES["CPU"]
    assert get_device(DeviceMesh("meta", ranks)) == DEVICES["H100"]
    mine = replace(DEVICES["CPU"], name="mine")
    monkeypatch.setattr(profiles, "_process_profile", lambda: Profile(devices={"cpu": mine}))
    assert get_device(DeviceMesh("cpu", [72, 73])) == mine
    assert get_device(DeviceMesh("meta", [72, 73])) == DEVICES["H100"]


INVALID_FILES = {
    "empty": "",
    "no JSON": "{",
    "a list": "[1, 2]",
    "another format": '{"format": 0}',
    "an int as links": '{"format": 1, "links": 3}',
    "a missing collective": json.dumps({"format": 1, "links": {"gloo": {"memory": 1e9}}}),
    "a str as a number": BUILT_IN_PROFILE.dumps().replace("0.0001", '"fast"'),
    "a negative time": BUILT_IN_PROFILE.dumps().replace("0.0001", "-1"),
    "a bandwidth of zero": BUILT_IN_PROFILE.dumps().replace("1000000000.0", "0"),
    "an int as devices": '{"format": 1, "devices": 3}',
    "a missing dtype": json.dumps({"format": 1, "devices": {"cpu": {"flops": {"float32": 1e9}}}}),
    "a rate of zero": Profile(devices={"cpu": DEVICES["CPU"]}).dumps().replace("8000000000.0", "0"),
    "a negative ranks_per_host": '{"format": 1, "ranks_per_host": -2}',
}


@pytest.mark.parametrize("name", INVALID_FILES)
def test_an_invalid_profile_file_warns_and_is_ignored(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    path.write_text(INVALID_FILES[name])
    monkeypatch.setenv("DTENSOR_PROFILE", str(path))
    with pytest.warns(UserWarning, match="python -m dtensor calibrate"):
        assert read_profile() == BUILT_IN_PROFILE


def test_profile_path_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for off in ("off", ""):
        monkeypatch.setenv("DTENSOR_PROFILE", off)
        assert profile_path() is None
        assert read_profile() == BUILT_IN_PROFILE
    monkeypatch.setenv("DTENSOR_PROFILE", str(tmp_path / "mine"))
    assert profile_path() == tmp_path / "mine"
    assert read_profile() == BUILT_IN_PROFILE  # the file does not exist
    monkeypatch.delenv("DTENSOR_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profile_path() == tmp_path / "dtensor" / "profile.json"


def count_collectives(mesh: DeviceMesh) -> int:
    src, dst = (Layout.of(mesh, placements, (600, 600)) for placements in ([P, MAX], [R, R]))
    return plan(src, dst).collectives


def test_redistribution_plans_follow_the_constants_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for at, profile in enumerate((SLOW_START, SLOW_WIRE)):
        monkeypatch.setattr(profiles, "_process_profile", lambda profile=profile: profile)
        counts.append(count_collectives(DeviceMesh("cpu", [[50 + at, 1, 2], [3, 4, 5]])))  # no plan is cached for these ranks
    assert counts == [2, 3]


def test_redistribution_over_several_hosts_costs_more() -> None:
    mesh = DeviceMesh("meta", torch.arange(32).reshape(4, 8))
    within, between = (
        plan(Layout.of(mesh, src, (4096, 4096)), Layout.of(mesh, [R, R], (4096, 4096))).cost for src in ([R, S0], [S0, R])
    )
    assert between > 2 * within


def _costs_on_gloo(folder: str) -> list[Any]:
    rank = torch.distributed.get_rank()
    if rank != 2:
        os.environ["DTENSOR_PROFILE"] = f"{folder}/{rank}.json"
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2)) if rank != 1 else None
    pairs: list[list[Placement]] = [[S0, R], [P, MAX]]
    if mesh is None:  # makes its mesh after the barrier
        torch.distributed.barrier()
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    else:
        torch.distributed.barrier()
    return [str(plan(Layout.of(mesh, src, (600, 600)), Layout.of(mesh, [R, R], (600, 600)))) for src in pairs]


@pytest.mark.gloo
def test_ranks_with_different_profile_files_make_equal_plans(tmp_path: Path) -> None:
    for rank, text in enumerate((SLOW_START.dumps(), "{", "unused", SLOW_WIRE.dumps())):
        (tmp_path / f"{rank}.json").write_text(text)
    results = run_gloo(_costs_on_gloo, 4, str(tmp_path))
    assert all(result == results[0] for result in results)


def test_fit_rate_recovers_the_constants_without_negative_values() -> None:
    made = Rate(2e-4, 3e-5, 5e8)
    sizes = [(n, b) for n in (2, 4, 8) for b in (1 << 12, 1 << 16, 1 << 22)]
    found = calibrate.fit_rate([calibrate.CollectiveSample("exchange", n, b, made.seconds(n, b)) for n, b in sizes])
    assert (found.latency, found.per_peer, found.bandwidth) == pytest.approx((2e-4, 3e-5, 5e8))
    decreasing = [calibrate.CollectiveSample("exchange", n, b, (9 - n) * 1e-4 + b / 1e9) for n, b in sizes]
    found = calibrate.fit_rate(decreasing)
    assert found.per_peer == 0
    assert found.latency > 0
    assert calibrate.fit_rate(decreasing[:3]).per_peer == 0  # one group size does not determine per_peer


@pytest.mark.gloo
def test_calibrate_writes_a_profile_that_read_profile_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "profile.json"
    monkeypatch.setenv("DTENSOR_PROFILE", str(path))
    assert main(["calibrate", "--ranks", "2", "--seconds", "0.001"]) == 0
    text = capsys.readouterr().out
    assert all(kind in text for kind in MEASURED_COLLECTIVES)
    assert str(path) in text
    assert "GFLOP/s" in text
    read = read_profile()
    assert read.links["gloo"] != BUILT_IN_PROFILE.links["gloo"]
    assert read.devices["cpu"] != DEVICES["CPU"]
    assert all(1e8 < read.devices["cpu"].flops[kind] < 1e13 for kind in ("float64", "float32"))
    assert read.devices["cpu"].memory > 1e8
    assert 0 < read.devices["cpu"].launch < 1e-2
    assert all(getattr(read.links["gloo"], kind).bandwidth > 1e6 for kind in MEASURED_COLLECTIVES)
