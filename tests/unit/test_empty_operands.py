"""Empty operands: operators on tensors without elements give the results or errors of plain torch on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_processes import run_gloo
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing.placements import get_or_make_mesh

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule for:UserWarning")  # the gather fallback of an empty tensor

Program = Callable[[torch.Tensor, Callable[..., torch.Tensor]], torch.Tensor]
ONE_D: dict[str, Program] = {
    "conv1d": lambda x, w: F.conv1d(x, w(6, x.shape[1], 3)),
    "conv_transpose1d": lambda x, w: F.conv_transpose1d(x, w(x.shape[1], 6, 3)),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[-1:]),
    "instance_norm": lambda x, w: F.instance_norm(x),
    "nearest": lambda x, w: F.interpolate(x, scale_factor=2),
    "linear": lambda x, w: F.interpolate(x, size=7, mode="linear"),
    "amax": lambda x, w: x.amax(-1),
    "argmax": lambda x, w: x.argmax(1),
    "max": lambda x, w: x.max(),
    "median": lambda x, w: x.median(1).values,
    "logsumexp": lambda x, w: x.logsumexp(0),
    "cumsum": lambda x, w: x.cumsum(0),
    "reflect": lambda x, w: F.pad(x, (1, 1), mode="reflect"),
    "max_pool1d": lambda x, w: F.max_pool1d(x, 2),
}
TWO_D: dict[str, Program] = {
    "conv2d": lambda x, w: F.conv2d(x, w(6, x.shape[1], 3, 3)),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "nearest": lambda x, w: F.interpolate(x, scale_factor=2.0),
    "nearest-exact": lambda x, w: F.interpolate(x, scale_factor=2.0, mode="nearest-exact"),
    "bilinear": lambda x, w: F.interpolate(x, size=(4, 4), mode="bilinear"),
    "bicubic": lambda x, w: F.interpolate(x, size=(4, 4), mode="bicubic"),
    "antialias": lambda x, w: F.interpolate(x, size=(4, 4), mode="bilinear", antialias=True),
    "avg_pool2d": lambda x, w: F.avg_pool2d(x, 2),
    "adaptive_max_pool2d": lambda x, w: F.adaptive_max_pool2d(x, 2),
    "channel_shuffle": lambda x, w: F.channel_shuffle(x, 2),
}
SHAPES = {3: [(0, 4, 5), (2, 0, 5), (2, 4, 0), (0, 0, 0)], 4: [(0, 4, 6, 5), (2, 0, 6, 5), (2, 4, 0, 5), (0, 0, 6, 0)]}
CASES = [(name, fn, 3) for name, fn in ONE_D.items()] + [(name, fn, 4) for name, fn in TWO_D.items()]


def _result_or_error(run: Callable[[], torch.Tensor]) -> Any:
    """Return the result of ``run``, or the error that it raises."""
    try:
        found = run()
    except Exception as error:  # any error of torch
        return error
    return found


@pytest.mark.parametrize(
    ("case", "gradient"),
    keep_diagonals_fast(CASES, [False, True], every=5),
    ids=lambda value: f"{value[0]}-{value[2]}" if isinstance(value, tuple) else None,
)
def test_operators_on_empty_tensors_equal_plain_torch(case: tuple[str, Program, int], gradient: bool) -> None:
    _, fn, ndim = case
    for shape in SHAPES[ndim]:
        for placement in (Replicate(), Partial(), *map(Shard, range(ndim))):
            _check_equal_to_plain(fn, shape, get_or_make_mesh((3,)), placement, gradient)


def _check_equal_to_plain(fn: Program, shape: tuple[int, ...], mesh: dt.DeviceMesh, placement: Any, gradient: bool) -> None:
    values = lambda *size: torch.linspace(-1, 1, max(1, torch.Size(size).numel()))[: torch.Size(size).numel()].reshape(size)  # noqa: E731

    def run(x: torch.Tensor, weight: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = x.requires_grad_(gradient)
        out = fn(x, weight)
        if not gradient:
            return out
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    plain = _result_or_error(lambda: run(values(*shape), values))
    weight = lambda *size: dt.distribute_tensor(values(*size), mesh, [Replicate()])  # noqa: E731
    own = _result_or_error(lambda: run(dt.distribute_tensor(values(*shape), mesh, [placement]), weight))
    text = f"{shape}, {placement}: {plain!r} by plain torch, {own!r}"
    if isinstance(plain, Exception):
        assert isinstance(own, type(plain)), text
        assert str(own).splitlines()[0] == str(plain).splitlines()[0], text
    else:
        assert isinstance(own, dt.DTensor), text
        torch.testing.assert_close(own.full_tensor(), plain, equal_nan=True)


def _error_texts() -> list[str]:
    dt.check_ranks("off")
    mesh = dt.init_device_mesh("cpu", (3,))
    bools = dt.distribute_tensor(torch.ones(2, 4, dtype=torch.bool), mesh, [dt.Shard(0)])
    counts = dt.distribute_tensor(torch.ones(2, 4, dtype=torch.int64), mesh, [dt.Shard(0)])
    replicated = dt.distribute_tensor(torch.ones(4, 4, dtype=torch.bool), mesh, [dt.Replicate()])
    texts = []
    for program in (
        lambda: bools @ replicated,
        lambda: counts.softmax(1),
        lambda: counts.log_softmax(-1),
        lambda: counts.sin().neg(),
    ):
        try:
            program()
            texts.append("")
        except NotImplementedError as error:
            texts.append(str(error))
    return texts


@pytest.mark.gloo
def test_a_rank_without_elements_raises_the_dtype_errors_of_other_ranks() -> None:
    first, *others = run_gloo(_error_texts, 3)
    assert [bool(words) for words in first] == [True, True, True, False]
    assert others == [first, first]


def _gather_empty_tensors() -> list[tuple[int, ...]]:
    mesh = dt.init_device_mesh("cpu", (2,))
    choices = ([Replicate()], [Shard(0)], [Partial()])
    return [tuple(dt.distribute_tensor(torch.ones(0, 6), mesh, placement).full_tensor().shape) for placement in choices]


@pytest.mark.gloo
def test_full_tensor_of_empty_tensors_on_processes_has_the_global_shape() -> None:
    assert run_gloo(_gather_empty_tensors, 2, timeout_s=30.0) == [[(0, 6)] * 3] * 2


def test_a_custom_kernel_does_not_run_on_a_rank_with_empty_results() -> None:
    """Kernels of accelerators refuse empty inputs, so a rank with empty results allocates them without a kernel."""

    def kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not x.numel():
            raise RuntimeError("invalid argument")
        return x + 1, x.sum(1)

    add_and_sum = torch.library.custom_op("empty_ranks::add_and_sum", kernel, mutates_args=())
    add_and_sum.register_fake(lambda x: (torch.empty_like(x), x.new_empty(x.shape[0])))
    dt.register_sharding(add_and_sum._opoverload)(lambda x: [([Shard(0), Shard(0)], [Shard(0)])])
    x = torch.randn(5, 3).t().contiguous().t()
    rows, sums = add_and_sum(dt.distribute_tensor(x, get_or_make_mesh((4,)), [Shard(0)]))
    assert [shard.shape for shard in rows._local.shards] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert torch.equal(rows.full_tensor(), x + 1)
    assert torch.equal(sums.full_tensor(), x.sum(1))
