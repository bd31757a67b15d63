"""Commands of ``python -m dtensor``: help, explain, trace, plan, bench and doctor."""

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
from torch_version_marks import needs_undecomposed_linear
from trace_format import read_trace_events

import dtensor as dt
from dtensor.__main__ import main
from dtensor.commands import bench, doctor
from dtensor.commands.spawn_ranks import spawn_ranks
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


def test_main_without_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    output = capsys.readouterr().out
    assert all(verb in output for verb in VERBS)


@pytest.mark.parametrize("status", [0, 3])
def test_explain_runs_a_script_and_prints_its_collectives(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, before = tmp_path / "train.py", (list(sys.path), list(sys.argv))
    script.write_text(SCRIPT)
    assert main(["explain", str(script), str(status)]) == status
    output = capsys.readouterr().out
    assert "1 collective, 72 B received per rank" in output
    assert "train.py:6  y = x.full_tensor()  # moves: 1 collective, 72 B" in output
    assert (sys.path, sys.argv) == before


def test_trace_runs_a_script_and_writes_its_collectives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, trace_file = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    assert main(["trace", "--output", str(trace_file), str(script), "3"]) == 3
    assert f"written to {trace_file}" in capsys.readouterr().out
    collectives = [event for event in read_trace_events(trace_file) if event["ph"] == "X" and event["tid"] == COMMUNICATION]
    assert [(event["pid"], event["name"], event["args"]["bytes"]) for event in collectives] == [
        (k, "all_gather", 72) for k in (0, 1)
    ]
    script.write_text(SCRIPT.replace("sys.exit", "1 / 0, sys.exit"))
    with pytest.raises(ZeroDivisionError):
        main(["trace", "--output", str(tmp_path / "none.json"), str(script), "0"])
    assert not (tmp_path / "none.json").exists()
    for arguments in (["trace", "--output"], ["explain", "--html"], ["plan", "--json"]):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, str(tmp_path / "no" / "file"), str(script)])
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.gloo
@pytest.mark.parametrize("verb", ["explain", "trace"])
def test_explain_and_trace_under_torchrun_report_once(verb: str, tmp_path: Path) -> None:
    script, trace_file = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT.replace("sys.exit", "import torch.distributed as dist; dist.destroy_process_group(); sys.exit"))
    arguments = [verb, *(["--output", str(trace_file)] if verb == "trace" else []), str(script), "0"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "dtensor",
        *arguments,
    ]
    output = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, check=True).stdout
    if verb == "explain":
        assert output.count("1 collective, 72 B received per rank") == output.count("train.py:6") == 1
    else:
        assert output.count("written to") == 1
        collectives = [event for event in read_trace_events(trace_file) if event["ph"] == "X" and event["tid"] == COMMUNICATION]
        assert sorted((event["pid"], event["args"]["bytes"]) for event in collectives) == [(0, 72), (1, 72)]


def test_explain_reports_the_collectives_of_a_script_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("sys.exit", "1 / 0, sys.exit"))
    with pytest.raises(ZeroDivisionError):
        main(["explain", str(script), "0"])
    assert "1 collective, 72 B" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "other.py")]) == 2
    assert "there is no file" in capsys.readouterr().err


MODEL_SCRIPT = """
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


@needs_undecomposed_linear
def test_explain_names_line_reason_and_fix_of_an_extra_all_gather(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, html_file = tmp_path / "model.py", tmp_path / "page.html"
    script.write_text(MODEL_SCRIPT)
    assert main(["explain", "--html", str(html_file), str(script)]) == 0
    output = capsys.readouterr().out
    at = 1 + MODEL_SCRIPT.splitlines().index("        return self.down(h)")
    for expected in (
        "1 collective (1 implicit), 96 B received per rank",
        f"model.py:{at}  return self.down(h): 1 collective, 96 B",
        "forward aten::linear in Block.down: all_gather over tp, 2 ranks, 96 B",
        "write instead: input.redistribute(placements=[Replicate()]), once, before this line",
        f"written to {html_file}",
    ):
        assert expected in output, output
    assert f'<td class="number">{at}</td>' in html_file.read_text()
    assert "return self.down(h)" in re.sub("</?span[^>]*>", "", html_file.read_text())
    assert "<title>Communication of model.py</title>" in html_file.read_text()
    script.write_text(MODEL_SCRIPT.replace("[dt.Shard(0)]", "[dt.Shard(int(layer is model.down))]"))  # the recommended placements
    assert main(["explain", str(script)]) == 0
    assert "0 collectives, 0 B received per rank" in capsys.readouterr().out


def test_plan_of_a_script_writes_json_and_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, html_file, plan_file = tmp_path / "model.py", tmp_path / "page.html", tmp_path / "plan.json"
    script.write_text(MODEL_SCRIPT + "import sys; sys.exit(3)")
    assert main(["plan", "--html", str(html_file), "--json", str(plan_file), str(script)]) == 3
    output = capsys.readouterr().out
    found = dt.ProgramPlan.load(plan_file)
    assert output.startswith(str(found))
    assert found.nbytes <= found.eager_nbytes == 96
    assert f"{found.nbytes} B received per rank" in html_file.read_text()
    assert "<title>Plan of model.py</title>" in html_file.read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
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
def test_bench_refuses_invalid_arguments_before_it_starts_processes(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dtensor.__main__.spawn_ranks", None)
    assert main(["bench", "redistribute", *arguments]) == 2
    assert problem in capsys.readouterr().err


def test_commands_without_an_installed_extra_fail_first_and_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("dtensor.__main__.spawn_ranks", lambda *given: _fail())
    (tmp_path / "script.py").write_text("1 / 0")
    for arguments, extra in (
        (["bench", "redistribute", "--plot", "out.png"], "dtensor[plot]"),
        (["bench", "dispatch", "--plot", "out.png"], "dtensor[plot]"),
        (["plan", str(tmp_path / "script.py")], "dtensor[plan]"),
    ):
        assert main(arguments) == 2
        assert extra in capsys.readouterr().err


def _fail() -> Iterator[int]:
    yield 1 // 0


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], *([verb, "--help"] for verb in VERBS), ["bench", "redistribute", "--help"]]
)
def test_help_of_each_command_has_examples_and_no_markup(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$") if arguments else nullcontext():
        main(arguments)
    output = capsys.readouterr().out
    assert "``" not in output
    assert ":mod:" not in output
    assert len(arguments) < 2 or re.search(r"\nexamples?:\n  ", output), output


def test_ranks_command_with_a_missing_folder_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", str(tmp_path / "none")]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err


def test_version_option_prints_dtensor_and_torch_versions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith(f"dtensor {dt.__version__}, torch {torch.__version__}")


def test_the_console_script_of_pyproject_is_main() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["dtensor"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


@pytest.mark.parametrize(("word", "suggestion"), [("llama", "llama3-8b"), ("mixtral", "mixtral-8x7b"), ("lama3-8b", "llama3-8b")])
def test_plan_suggests_the_nearest_model_name(word: str, suggestion: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", word, "--ranks", "8"]) == 2
    assert re.search(f"neither a script nor a known model; did you mean .*{suggestion}", capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["explain", "trace", "plan"])
def test_explain_trace_and_plan_raise_an_error_of_the_script_unchanged(verb: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import dtensor as dt\nraise dt.errors.ArgumentError('seventeen')")
    pytest.importorskip("scipy")
    with pytest.raises(dt.errors.ArgumentError, match="seventeen"):
        main([verb, str(script)])


def test_bench_warns_if_the_machine_is_not_calibrated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = bench.RedistributionTiming((2,), "S0->R", (5, 7), 1, 70, 140, 1e-4, 2e-4)
    monkeypatch.setattr("dtensor.__main__.spawn_ranks", lambda *given: iter([row]))
    profile = tmp_path / "profile.json"
    monkeypatch.setenv("DTENSOR_PROFILE", str(profile))
    arguments = ["bench", "redistribute", "--mesh", "2", "--size", "5x7", "--pairs", "S0->R"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[1].split() == ["S0->R", "5x7", "1", "70", "B", "140", "B", "100", "us", "200", "us"]
    assert "this machine is not calibrated" in output.err
    profile.write_text("{}")
    assert main(arguments) == 0
    assert "calibrated" not in capsys.readouterr().err


def test_bench_plots_have_a_title_and_the_fastest_row_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    figures: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, path, **given: figures.append(self))
    rows = [
        bench.RedistributionTiming((2,), f"S{k}->R", (5, 7), 1, 70, 140, 1e-4, seconds)
        for k, seconds in enumerate((3e-4, 1e-4, 2e-4))
    ]
    bench.draw_plot(rows, tmp_path / "redistribute.png")
    bench.draw_plot([bench.OperatorTiming("add", 2e-6, 5e-6), bench.OperatorTiming("mm", 1e-6, 4e-6)], tmp_path / "dispatch.png")
    for plot, best in zip(figures, ("S1->R 5x7", "mm"), strict=True):
        (axes,) = plot.axes
        assert axes.get_title()
        assert (axes.get_xscale(), len(axes.patches)) == ("log", 0)  # no bars
        assert axes.yaxis_inverted()
        assert axes.get_yticklabels()[0].get_text() == best
        assert axes.get_legend() is None
        assert len(plot.legends) == 1


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
def test_bench_measures_redistributions_on_four_processes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "redistribute", "--mesh", "2x2", "--size", "5x7", "--pairs", "S0->S1,R", "P->R", "R->P(max)"]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["mesh"], row["pair"], row["shape"]) for row in rows] == [([2, 2], pair, [5, 7]) for pair in arguments[-3:]]
    mesh = dt.init_device_mesh("cpu", (2, 2))
    x = dt.zeros(5, 7, device_mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    found = x.explain_redistribute([dt.Shard(1), dt.Replicate()])
    assert (rows[0]["bytes"], rows[0]["collectives"]) == (found.bytes, found.collectives)
    assert all(row["seconds"] > 0 for row in rows)
    assert rows[2]["bytes"] == 0
    assert main(["bench", "dispatch", "--only", "add", "mm"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["operator", "add", "mm"]


def fail_on_processes(failure: str) -> Iterator[int]:
    yield 1
    if failure == "raises":
        raise ValueError("seventeen")
    os._exit(3)


@pytest.mark.gloo
def test_spawn_ranks_reports_the_error_of_a_failed_process() -> None:
    for failure, expected in (("raises", "ValueError: seventeen"), ("dies", "exit code 3")):
        rows = spawn_ranks(2, fail_on_processes, failure)
        with pytest.raises(DTensorError, match=expected):
            list(rows)


def test_doctor_reports_versions_backends_and_patches() -> None:
    output = "\n".join(doctor.report_lines())
    assert "torch 2." in output
    assert "gloo" in output
    for change in PATCHES:
        assert (f"  {change.where}: {change.why}" in output) is change.in_force
    assert "  torch.optim.optimizer._foreach_supported_types: " in output


@pytest.mark.gloo
def test_doctor_self_test_passes_on_processes() -> None:
    assert doctor.self_test(120.0) == ""
