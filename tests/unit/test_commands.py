"""``python -m dtensor``: help, scripts that are explained and planned, benches, ``doctor``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_versions import needs_whole
from trace_format import events_in

import dtensor as dt
from dtensor.__main__ import main
from dtensor.base.spawn_ranks import spawn_ranks
from dtensor.debug import bench, doctor
from dtensor.debug.trace import COMMUNICATION
from dtensor.errors import DTensorError
from dtensor.interop.patch_catalog import PATCHES

VERBS = ("explain", "trace", "plan", "bench", "doctor", "ranks", "verify", "calibrate", "ops")

SCRIPT = """
import sys
import dtensor as dt
assert __name__ == "__main__"
x = dt.ones(5, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
y = x.full_tensor()  # moves
sys.exit(int(sys.argv[1]))
"""


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(verb in said for verb in VERBS)


@pytest.mark.parametrize("status", [0, 3])
def test_a_script_is_run_and_explained(status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, before = tmp_path / "train.py", (list(sys.path), list(sys.argv))
    script.write_text(SCRIPT)
    assert main(["explain", str(script), str(status)]) == status
    said = capsys.readouterr().out
    assert "1 collective, 72 B received per rank" in said
    assert "train.py:6  y = x.full_tensor()  # moves: 1 collective, 72 B" in said
    assert (sys.path, sys.argv) == before


def test_a_script_is_run_and_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, written = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    assert main(["trace", "--output", str(written), str(script), "3"]) == 3
    assert f"written to {written}" in capsys.readouterr().out
    moved = [event for event in events_in(written) if event["ph"] == "X" and event["tid"] == COMMUNICATION]
    assert [(event["pid"], event["name"], event["args"]["bytes"]) for event in moved] == [(k, "all_gather", 72) for k in (0, 1)]
    script.write_text(SCRIPT.replace("sys.exit", "1 / 0, sys.exit"))
    with pytest.raises(ZeroDivisionError):
        main(["trace", "--output", str(tmp_path / "none.json"), str(script), "0"])
    assert not (tmp_path / "none.json").exists()
    for words in (["trace", "--output"], ["explain", "--html"], ["plan", "--json"]):
        with pytest.raises(SystemExit, match="2"):
            main([*words, str(tmp_path / "no" / "file"), str(script)])
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.parametrize("verb", ["explain", "trace"])
def test_what_torchrun_starts_speaks_once(verb: str, tmp_path: Path) -> None:
    script, written = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT.replace("sys.exit", "import torch.distributed as dist; dist.destroy_process_group(); sys.exit"))
    words = [verb, *(["--output", str(written)] if verb == "trace" else []), str(script), "0"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dtensor", *words]
    said = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, check=True).stdout
    if verb == "explain":
        assert said.count("1 collective, 72 B received per rank") == said.count("train.py:6") == 1
    else:
        assert said.count("written to") == 1
        moved = [event for event in events_in(written) if event["ph"] == "X" and event["tid"] == COMMUNICATION]
        assert sorted((event["pid"], event["args"]["bytes"]) for event in moved) == [(0, 72), (1, 72)]


def test_what_a_failing_script_moved_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("sys.exit", "1 / 0, sys.exit"))
    with pytest.raises(ZeroDivisionError):
        main(["explain", str(script), "0"])
    assert "1 collective, 72 B" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "other.py")]) == 2
    assert "there is no file" in capsys.readouterr().err


EXTRA = """
import torch
import dtensor as dt
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        h = self.up(x).relu()
        return self.down(h)

mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = Block()
for layer in (model.up, model.down):
    layer.weight = nn.Parameter(dt.distribute_tensor(layer.weight.detach(), mesh, [dt.Shard(0)]))
model(dt.ones(6, 4, device_mesh=mesh))
"""


@needs_whole
def test_a_stranger_finds_the_all_gather_too_many_in_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, page = tmp_path / "model.py", tmp_path / "page.html"
    script.write_text(EXTRA)
    assert main(["explain", "--html", str(page), str(script)]) == 0
    said = capsys.readouterr().out
    at = 1 + EXTRA.splitlines().index("        return self.down(h)")
    for told in (
        "1 collective (1 implicit), 96 B received per rank",
        f"model.py:{at}  return self.down(h): 1 collective, 96 B",
        "forward aten::linear in Block.down: all_gather over tp, 2 ranks, 96 B",
        "write instead: input.redistribute(placements=[Replicate()]), once, before this line",
        f"written to {page}",
    ):
        assert told in said, said
    assert f'<td class="number">{at}</td>' in page.read_text()
    assert "return self.down(h)" in re.sub("</?span[^>]*>", "", page.read_text())
    assert "<title>Communication of model.py</title>" in page.read_text()
    script.write_text(EXTRA.replace("[dt.Shard(0)]", "[dt.Shard(int(layer is model.down))]"))  # as it should be
    assert main(["explain", str(script)]) == 0
    assert "0 collectives, 0 B received per rank" in capsys.readouterr().out


def test_a_script_is_planned_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, page, kept = tmp_path / "model.py", tmp_path / "page.html", tmp_path / "plan.json"
    script.write_text(EXTRA + "import sys; sys.exit(3)")
    assert main(["plan", "--html", str(page), "--json", str(kept), str(script)]) == 3
    said = capsys.readouterr().out
    found = dt.ProgramPlan.load(kept)
    assert said.startswith(str(found))
    assert found.nbytes <= found.eager_nbytes == 96
    assert f"{found.nbytes} B received per rank" in page.read_text()
    assert "<title>Plan of model.py</title>" in page.read_text()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--mesh", "0x3"], "'0x3' is not the shape of a mesh"),
        (["--mesh", "3 x 2"], "'3 x 2' is not the shape of a mesh"),
        (["--mesh", "1"], "from 2 to 64 processes"),
        (["--mesh", "100x100"], "10000 ranks"),
        (["--size", "2 bytes"], "is not a size"),
        (["--size", "1B"], "is not a size"),
        (["--pairs", "S0"], "write SOURCE->TARGET"),
        (["--mesh", "2", "--pairs", "S0->S1,R"], "2 placements for a mesh of 1 mesh dims"),
        (["--pairs", "S2->R"], "'S2' is not a placement of a tensor with 2 dims"),
        (["--pairs", "P(median)->R"], "not a placement"),
    ],
)
def test_what_means_nothing_is_told_before_a_process_starts(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtensor.__main__.spawn_ranks", None)
    assert main(["bench", "redistribute", *words]) == 2
    assert problem in capsys.readouterr().err


def test_extras_are_asked_for_before_work_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("dtensor.__main__.spawn_ranks", lambda *given: _fail())
    (tmp_path / "script.py").write_text("1 / 0")
    for words, extra in (
        (["bench", "redistribute", "--plot", "out.png"], "dtensor[plot]"),
        (["bench", "dispatch", "--plot", "out.png"], "dtensor[plot]"),
        (["plan", str(tmp_path / "script.py")], "dtensor[plan]"),
    ):
        assert main(words) == 2
        assert extra in capsys.readouterr().err


def _fail() -> Iterator[int]:
    yield 1 // 0


@pytest.mark.parametrize("words", [[], ["--help"], *([verb, "--help"] for verb in VERBS), ["bench", "redistribute", "--help"]])
def test_help_has_examples_and_no_markup(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$") if words else nullcontext():
        main(words)
    said = capsys.readouterr().out
    assert "``" not in said
    assert ":mod:" not in said
    assert len(words) < 2 or re.search(r"\nexamples?:\n  ", said), said


def test_ranks_of_a_missing_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", str(tmp_path / "none")]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith(f"dtensor {dt.__version__}, torch {torch.__version__}")


def test_the_console_script_is_the_same_command() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["dtensor"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


@pytest.mark.parametrize(("word", "near"), [("llama", "llama3-8b"), ("mixtral", "mixtral-8x7b"), ("lama3-8b", "llama3-8b")])
def test_a_near_model_is_named(word: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", word, "--ranks", "8"]) == 2
    assert re.search(f"neither a script nor a known model; did you mean .*{near}", capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["explain", "trace", "plan"])
def test_an_error_of_the_script_keeps_its_traceback(verb: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import dtensor as dt\nraise dt.errors.ArgumentError('seventeen')")
    pytest.importorskip("scipy")
    with pytest.raises(dt.errors.ArgumentError, match="seventeen"):
        main([verb, str(script)])


def test_an_uncalibrated_machine_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = bench.RedistributionTiming((2,), "S0->R", (5, 7), 1, 70, 140, 1e-4, 2e-4)
    monkeypatch.setattr("dtensor.__main__.spawn_ranks", lambda *given: iter([row]))
    profile = tmp_path / "profile.json"
    monkeypatch.setenv("DTENSOR_PROFILE", str(profile))
    words = ["bench", "redistribute", "--mesh", "2", "--size", "5x7", "--pairs", "S0->R"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[1].split() == ["S0->R", "5x7", "1", "70", "B", "140", "B", "100", "us", "200", "us"]
    assert "this machine is not calibrated" in said.err
    profile.write_text("{}")
    assert main(words) == 0
    assert "calibrated" not in capsys.readouterr().err


def test_plots_have_a_title_and_the_fastest_row_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, path, **given: drawn.append(self))
    rows = [
        bench.RedistributionTiming((2,), f"S{k}->R", (5, 7), 1, 70, 140, 1e-4, seconds)
        for k, seconds in enumerate((3e-4, 1e-4, 2e-4))
    ]
    bench.draw_plot(rows, tmp_path / "moved.png")
    bench.draw_plot([bench.OperatorTiming("add", 2e-6, 5e-6), bench.OperatorTiming("mm", 1e-6, 4e-6)], tmp_path / "called.png")
    for shown, best in zip(drawn, ("S1->R 5x7", "mm"), strict=True):
        (axes,) = shown.axes
        assert axes.get_title()
        assert (axes.get_xscale(), len(axes.patches)) == ("log", 0)  # no bars
        assert axes.yaxis_inverted()
        assert axes.get_yticklabels()[0].get_text() == best
        assert axes.get_legend() is None
        assert len(shown.legends) == 1


def test_bench_parses_placement_pairs_and_tensor_sizes() -> None:
    R, P = dt.Replicate(), dt.Partial()
    assert bench.parse_pair("P(max),S(1) -> R", (2, 3), 2) == ((dt.Partial("max"), dt.Shard(1)), (R, R))
    assert bench.parse_shape("64 KiB") == (128, 128)
    assert bench.parse_shape("0.5GB") == (11585, 11585)
    assert "P,P->S0,S0" in bench.default_pairs((2, 2))
    assert len(bench.default_pairs((4,))) == 5
    assert all(bench.parse_pair(pair, (2, 2), 2) for pair in bench.default_pairs((2, 2)))
    assert bench.parse_pair("R->P", (2,), 2)[1] == (P,)


@pytest.mark.gloo
def test_redistributions_are_measured_on_any_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "redistribute", "--mesh", "2x2", "--size", "5x7", "--pairs", "S0->S1,R", "P->R", "R->P(max)"]
    assert main([*words, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["mesh"], row["pair"], row["shape"]) for row in rows] == [([2, 2], pair, [5, 7]) for pair in words[-3:]]
    mesh = dt.init_device_mesh("cpu", (2, 2))
    x = dt.zeros(5, 7, device_mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    found = x.explain_redistribute([dt.Shard(1), dt.Replicate()])
    assert (rows[0]["bytes"], rows[0]["collectives"]) == (found.bytes, found.collectives)
    assert all(row["seconds"] > 0 for row in rows)
    assert rows[2]["bytes"] == 0
    assert main(["bench", "dispatch", "--only", "add", "mm"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["operator", "add", "mm"]


def failing(how: str) -> Iterator[int]:
    yield 1
    if how == "raises":
        raise ValueError("seventeen")
    os._exit(3)


@pytest.mark.gloo
def test_processes_that_fail_are_named() -> None:
    for how, told in (("raises", "ValueError: seventeen"), ("dies", "exit code 3")):
        rows = spawn_ranks(2, failing, how)
        with pytest.raises(DTensorError, match=told):
            list(rows)


def test_the_doctor_names_what_is_there() -> None:
    said = "\n".join(doctor.report_lines())
    assert "torch 2." in said
    assert "gloo" in said
    for change in PATCHES:
        assert (f"  {change.where}: {change.why}" in said) is change.in_force
    assert "  torch.optim.optimizer._foreach_supported_types: " in said


@pytest.mark.gloo
def test_the_doctor_tries_processes() -> None:
    assert doctor.self_test(120.0) == ""
