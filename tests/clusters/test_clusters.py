"""Training steps on clusters: published parameter counts, issued bytes, and measured configurations."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo

import dtensor as dt
from dtensor.__main__ import main
from dtensor.clusters import CLUSTERS, MODELS, Degrees, Transformer, best, estimate
from dtensor.clusters.cluster import MESH_DIMS
from dtensor.clusters.decoder_parts import RECOMPUTATIONS
from dtensor.clusters.dry_step import dry_step
from dtensor.debug import CommDebugMode
from dtensor.errors import PlanError
from dtensor.layout.layout import Layout

SMALL = Transformer(2, 32, 8, 8, 64, 96)
MIXED = Transformer(2, 32, 8, 8, 64, 96, experts=4, chosen=2)


def test_parameter_counts_equal_those_of_published_models() -> None:
    counts = {"llama3-8b": 8030261248, "llama3-70b": 70553706496, "llama3-405b": 405853388800, "mixtral-8x7b": 46702792704}
    assert {name: model.parameters for name, model in MODELS.items()} == counts


# --- measured configurations --------------------------------------------------------------------------------------------
def gpt(layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(layers, hidden, heads, heads, 4 * hidden, 51200, gated=False)


def check_order(cluster: str, rows: list[tuple[float, Any, Degrees, int, int, dict[str, Any]]]) -> None:
    """Check that estimates of ``rows`` keep the order of their measured MFU, and differ by at most a sixth."""
    found = [
        (mfu, 100 * estimate(model, CLUSTERS[cluster], degrees, sequence, batch, again="elementwise", **options).mfu)
        for mfu, model, degrees, sequence, batch, options in rows
    ]
    for (_, first), (_, second) in itertools.pairwise(found):
        assert first > second, found
    assert all(5 / 6 < ours / theirs < 7 / 6 for theirs, ours in found), found


@pytest.mark.slow
def test_estimated_mfu_of_llama_405b_agrees_with_published_measurements() -> None:
    """Llama Team, "The Llama 3 Herd of Models" (2024), arXiv:2407.21783, table 4."""
    model = MODELS["llama3-405b"]
    rows: list[Any] = [
        (43, model, Degrees(tp=8, pp=16, dp=64), 8192, 2048, {}),
        (41, model, Degrees(tp=8, pp=16, dp=128), 8192, 2048, {}),
        (38, model, Degrees(tp=8, cp=16, pp=16, dp=8), 131072, 128, {}),
    ]
    check_order("h100", rows)


@pytest.mark.slow
def test_estimated_mfu_of_megatron_agrees_with_published_measurements() -> None:
    """Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), arXiv:2205.05198, table 5."""
    rows: list[Any] = [
        (56.3, gpt(128, 25600, 160), Degrees(tp=8, pp=64), 2048, 512, {}),
        (56.0, gpt(105, 20480, 128), Degrees(tp=8, pp=35), 2048, 280, {"chunks": 3}),
        (51.4, gpt(96, 12288, 96), Degrees(tp=8, pp=8), 2048, 64, {"chunks": 3}),
        (41.5, gpt(48, 6144, 64), Degrees(tp=8), 2048, 4, {"micro": 4}),
    ]
    check_order("a100", rows)


@pytest.mark.slow
def test_best_configuration_of_llama_405b_is_the_published_one() -> None:
    found = best(MODELS["llama3-405b"], CLUSTERS["h100"], 16384, 8192, 2048, most=1)
    assert found[0].degrees == Degrees(tp=8, pp=16, dp=128)
    assert found[0].fits


# --- issued bytes -------------------------------------------------------------------------------------------------------
CONFIGURATIONS = [
    (SMALL, Degrees(tp=2)),
    (SMALL, Degrees(tp=2, cp=2)),
    (SMALL, Degrees(tp=2, cp=2, dp=2)),
    (SMALL, Degrees(tp=8)),
    (MIXED, Degrees(dp=2, ep=2)),
    (MIXED, Degrees(tp=2, dp=4, ep=2)),
]


def issued_bytes(model: Transformer, degrees: Degrees) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Return the bytes of a micro batch and of one-time work, by part, on ranks with data."""
    shape = (degrees.dp // degrees.ep, degrees.pp, degrees.ep, degrees.cp, degrees.tp)
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=MESH_DIMS)
    return bytes_by_part(model, mesh)


def bytes_by_part(model: Transformer, mesh: dt.DeviceMesh) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    steps = {part: dry_step(part, model, mesh, 32) for part in ("start", "layer", "end")}
    return {part: (dict(step.micro.nbytes), {k: v for k, v in step.once.nbytes.items() if v}) for part, step in steps.items()}


def check_bytes(model: Transformer, degrees: Degrees) -> None:
    assert issued_bytes(model, degrees) == bytes_by_part(model, degrees.mesh(CLUSTERS["h100"]))


@pytest.mark.parametrize(("model", "degrees"), CONFIGURATIONS[4:5])
def test_predicted_bytes_equal_issued_bytes(model: Transformer, degrees: Degrees) -> None:
    check_bytes(model, degrees)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "degrees"), CONFIGURATIONS)
def test_predicted_bytes_equal_issued_bytes_on_two_to_eight_ranks(model: Transformer, degrees: Degrees) -> None:
    check_bytes(model, degrees)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("model", "degrees"), [CONFIGURATIONS[1], CONFIGURATIONS[2], CONFIGURATIONS[5]])
def test_predicted_bytes_equal_issued_bytes_on_processes(model: Transformer, degrees: Degrees) -> None:
    run_gloo(check_bytes, degrees.ranks, model, degrees)


# --- command ------------------------------------------------------------------------------------------------------------
def test_parallel_degrees_that_do_not_divide_heads_or_batch_raise(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match=r"tp 16 does not divide 8 heads.*dp 3 does not divide 64 sequences"):
        estimate(MODELS["llama3-8b"], CLUSTERS["h100"], Degrees(tp=16, dp=3), 8192, 64)
    with pytest.raises(PlanError, match="micro batches of 3 do not divide the 64 sequences"):
        estimate(MODELS["llama3-8b"], CLUSTERS["h100"], Degrees(), 8192, 64, micro=3)


@pytest.mark.slow
def test_plan_command_without_a_fitting_layout_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama3-405b", "--ranks", "8", "--batch", "8"]) == 2
    assert "no layout tp x cp x pp x dp of 8 ranks" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cluster"), [("llama3-8b", "a100"), ("mixtral-8x7b", "tpu-v5p")])
def test_best_configurations_are_sorted_fit_in_memory_and_equal_estimates(name: str, cluster: str) -> None:
    model, where = MODELS[name], CLUSTERS[cluster]
    found = best(model, where, 64, 4096, 256, most=4)
    assert found == sorted(found, key=lambda one: one.step_seconds)
    for one in found:
        degrees, lone = one.degrees, estimate(model, where, one.degrees, 4096, 256, again=one.again)
        assert degrees.ranks == 64
        assert lone == one
        assert one.fits
        assert sum(one.memory.values()) < where.memory
        assert 0 < one.mfu < where.device.flops["half"] / where.peak
        for dim, nbytes in one.nbytes.items():
            size = degrees.dp * degrees.cp if dim == "dp" else getattr(degrees, dim)
            assert (nbytes > 0) == (size > 1), (dim, one)
        kinds = [estimate(model, where, degrees, 4096, 256, again=again) for again in RECOMPUTATIONS]
        assert sorted((kind.memory["activations"] for kind in kinds), reverse=True) == [
            kind.memory["activations"] for kind in kinds
        ]


@pytest.mark.slow
def test_plan_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawn = tmp_path / "p.png"
    plot = [] if importlib.util.find_spec("matplotlib") is None else ["--plot", str(drawn)]
    assert main(["plan", "llama3-8b", "--ranks", "16", "--batch", "64", "--sequence", "2048", "--most", "3", *plot]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "llama3-8b, 64 sequences of 2048 tokens, on 16 ranks"
    assert "690 of 989 TFLOP/s, 80 GB at 3000 GB/s; nodes of 8: inside 360 GB/s, between 40 GB/s" in lines[1]
    assert len(lines) == 6
    assert len({len(line) for line in lines[2:]}) == 1
    assert lines[2].split()[:4] == ["mesh", "recomputed", "step", "s"]
    assert not plot or drawn.stat().st_size > 1000


# --- scaling with the number of ranks -----------------------------------------------------------------------------------
@pytest.mark.slow
def test_redistribution_on_16384_ranks_computes_few_local_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that planning does not compute the local shape of every rank, by counting calls."""
    asked: list[int] = []
    before = Layout.local_shape

    def counted(layout: Layout, coordinate: Any) -> tuple[int, ...]:
        asked.append(1)
        return before(layout, coordinate)

    monkeypatch.setattr(Layout, "local_shape", counted)
    mesh = dt.init_device_mesh("meta", (16, 8, 128), mesh_dim_names=("dp", "cp", "tp"))
    x = dt.empty(100003, 5000, device_mesh=mesh, placements=[dt.Shard(0), dt.Replicate(), dt.Shard(1)])
    with CommDebugMode() as comm:
        x.redistribute(placements=[dt.Shard(1), dt.Shard(0), dt.Replicate()]).redistribute(placements=[dt.Replicate()] * 3)
    assert comm.get_total_counts() > 1
    assert len(asked) < 100


def test_bound_all_gather_of_uneven_rows_on_1024_ranks_counts_received_bytes() -> None:
    """Check the shape and received bytes of an all-gather of rows of 1 to 1,024 elements."""
    mesh = dt.init_device_mesh("meta", (1024,))
    found = dt.comm.communicator_of(mesh).bind_row_all_gather((0,), lambda _: range(1, 1025), torch.float32)
    with CommDebugMode() as comm:
        whole = found(torch.empty(1, device="meta")).wait()
    assert whole.shape == (sum(range(1, 1025)),)
    assert comm.events[0].bytes == 4 * (sum(range(1, 1025)) - 1)
