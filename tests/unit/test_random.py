"""Random numbers: reproducibility in both modes, and the distributions of counter mode."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import random_cases
import torch
from case_lists import make_case_tests

import dtensor as dt
from dtensor import Shard
from dtensor.debug import CommDebugMode
from dtensor.random.philox import philox
from dtensor.testing.placements import get_or_make_mesh

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(random_cases, gather=True)


# --- the Philox generator -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_outputs(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in philox(tuple(torch.tensor(c) for c in counter), key)) == expected


# --- distributions in counter mode ----------------------------------------------------------------------------------
SIZE = (40, 1003)


def draw(fill: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return the values that ``fill`` draws over four ranks, as float64."""
    x = dt.zeros(SIZE, device_mesh=get_or_make_mesh((2, 2)), placements=[Shard(0), Shard(1)], dtype=dtype)
    with dt.random_mode("counter"):
        dt.manual_seed(seed)
        return fill(x).full_tensor().double()


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


CONTINUOUS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "uniform": (lambda x: x.uniform_(-1, 3), lambda x: (x + 1) / 4),
    "normal": (lambda x: x.normal_(1, 2), lambda x: normal_cdf((x - 1) / 2)),
    "rand_like": (torch.rand_like, lambda x: x),
    "randn_like": (torch.randn_like, normal_cdf),
    "exponential": (lambda x: x.exponential_(2.0), lambda x: 1 - torch.exp(-2 * x)),
    "log_normal": (lambda x: x.log_normal_(0.5, 0.25), lambda x: normal_cdf((x.log() - 0.5) / 0.25)),
    "cauchy": (lambda x: x.cauchy_(1.0, 2.0), lambda x: 0.5 + torch.atan((x - 1) / 2) / math.pi),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_values_follow_their_distribution(name: str, dtype: torch.dtype) -> None:
    """Apply the Kolmogorov-Smirnov test at a level of about one in a million. The seed is fixed."""
    fill, cumulative = CONTINUOUS[name]
    x = draw(fill, dtype).flatten().sort().values
    steps = torch.arange(1, x.numel() + 1, dtype=torch.float64) / x.numel()
    distance = torch.maximum((cumulative(x) - steps).abs(), (cumulative(x) - steps + 1 / x.numel()).abs()).max()
    assert distance < 2.7 / math.sqrt(x.numel())


@pytest.mark.parametrize(
    ("fill", "mean", "variance"),
    [
        (lambda x: x.bernoulli_(0.3), 0.3, 0.21),
        (lambda x: torch.randint_like(x, -3, 9), 2.5, 143 / 12),
        (lambda x: torch.randint_like(x, 0, 2**40), (2**40 - 1) / 2, 2.0**80 / 12),
        (lambda x: x.geometric_(0.25), 4.0, 12.0),
        (lambda x: x.random_(0, 7), 3.0, 4.0),
        (lambda x: torch.nn.functional.dropout(torch.ones_like(x), 0.4), 1.0, 0.4 / 0.6),
    ],
    ids=["bernoulli", "randint", "wide randint", "geometric", "random", "dropout"],
)
def test_discrete_values_have_the_mean_and_variance_of_their_distribution(
    fill: Callable[[torch.Tensor], torch.Tensor], mean: float, variance: float
) -> None:
    x = draw(fill, torch.float64)
    assert abs(x.mean().item() - mean) < 5 * math.sqrt(variance / x.numel())
    assert abs(x.var().item() / variance - 1) < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_values_of_positions_and_calls_are_uncorrelated(dtype: torch.dtype) -> None:
    """Compare neighbours, rows, blocks of ranks and successive calls."""
    x, y = draw(torch.randn_like, dtype), draw(torch.randn_like, dtype, seed=1)
    x = x[:, :1000]
    pairs = [(x[:, :-lag], x[:, lag:]) for lag in (1, 2, 3, 4, 8, 502)] + [(x[:-lag], x[lag:]) for lag in (1, 2, 20)]
    for a, b in [*pairs, (x, y[:, :1000]), (x.square(), y[:, :1000].square()), (x[:, :-1].square(), x[:, 1:].square())]:
        correlation = ((a - a.mean()) * (b - b.mean())).mean() / (a.std() * b.std())
        assert abs(correlation.item()) < 5 / math.sqrt(a.numel())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_uniform_values_are_below_one(dtype: torch.dtype) -> None:
    x = draw(lambda x: x.uniform_(), dtype)
    assert x.max() < 1
    assert x.min() == 0


def test_complex_randn_has_unit_variance() -> None:
    with dt.random_mode("counter"):
        x = dt.randn(300, 70, device_mesh=get_or_make_mesh((4,)), placements=[Shard(1)], dtype=torch.complex64).full_tensor()
    assert abs(x.abs().square().mean().item() - 1) < 0.05
    assert abs(x.mean().abs().item()) < 0.05


def test_random_integers_cover_the_range_of_their_dtype() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int32):
        x = draw(lambda x: x.random_(), dtype)
        assert x.min() >= 0
        assert x.max() > 0.97 * torch.iinfo(dtype).max


def test_counter_mode_calls_differ_without_communication() -> None:
    x = dt.zeros(7, 5, device_mesh=get_or_make_mesh((4,)), placements=[Shard(0)])
    with dt.random_mode("counter"), CommDebugMode() as comm:
        first, second = torch.rand_like(x), torch.rand_like(x)
    assert not comm.get_total_counts()
    assert not torch.equal(first.full_tensor(), second.full_tensor())


def test_counter_mode_values_do_not_depend_on_mesh_and_placements() -> None:
    """Blocks may start inside a group of Philox words and may have different chunk sizes."""
    for shape in ((), (1,), (13,), (5, 1), (3, 2, 9), (2, 70_001)):
        for dtype in (torch.float32, torch.float64, torch.int64):
            values = []
            for mesh, placements in (((1,), [Shard(-1)]), ((4,), [Shard(-1)]), ((3,), [Shard(0)])):
                x_placements = placements if shape else [dt.Replicate()]
                x = dt.zeros(shape, device_mesh=get_or_make_mesh(mesh), placements=x_placements, dtype=dtype)
                with dt.random_mode("counter"):
                    dt.manual_seed(0)
                    values.append(x.random_(0, 2**33).full_tensor())
            assert all(torch.equal(values[0], other) for other in values)


def test_manual_seed_refuses_unknown_modes() -> None:
    with pytest.raises(ValueError, match=r"'fast' is not one of"):
        dt.manual_seed(0, mode="fast")
    with dt.random_mode("exact"):
        dt.manual_seed(0, mode="counter")
        assert dt.random.RANDOM_MODE.mode == "counter"
    assert dt.random.RANDOM_MODE.mode == "exact"


def test_noise_that_torch_draws_into_plain_tensors_needs_implicit_replication() -> None:
    mesh, x = dt.init_device_mesh("cpu", (2,)), torch.arange(1.0, 6)

    def draw_noise(x: torch.Tensor) -> list[torch.Tensor]:
        dt.manual_seed(3)
        normal = torch.distributions.Normal(x, x).rsample((2,))
        return [normal, torch.vmap(lambda row: torch.nn.functional.dropout(row), randomness="different")(normal)]

    distributed_x = dt.distribute_tensor(x, mesh, [dt.Shard(0)])
    with pytest.raises(dt.errors.MixedTensorError, match="implicit_replication"):
        draw_noise(distributed_x)
    with dt.implicit_replication():
        found = draw_noise(distributed_x)
    for plain, distributed in zip(draw_noise(x), found, strict=True):
        assert isinstance(distributed, dt.DTensor)
        assert torch.equal(distributed.full_tensor(), plain)


def test_a_random_custom_operator_can_return_a_symint() -> None:
    with torch.library._scoped_library("drawing", "DEF") as library:
        library.define("halved(Tensor x) -> (Tensor, SymInt)", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("halved", lambda x: (torch.dropout(x, 0.5, True), x.shape[0]), "CPU")
        library.impl("halved", lambda x: (torch.empty_like(x), x.shape[0]), "Meta")
        x = dt.distribute_tensor(torch.ones(8, 3), dt.init_device_mesh("cpu", (4,)), [dt.Shard(0)])
        torch.manual_seed(2)
        with pytest.warns(dt.errors.GatherWarning):
            result, rows = torch.ops.drawing.halved(x)
        torch.manual_seed(2)
        assert rows == 8
        assert torch.equal(result.full_tensor(), torch.dropout(torch.ones(8, 3), 0.5, True))
