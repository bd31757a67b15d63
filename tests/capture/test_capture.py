"""Capture: results, gradients, buffers, random numbers and communication of a replay equal those of the function, bit for bit."""

from __future__ import annotations

import gc
import random
from typing import Any

import capture_cases
import numpy
import pytest
import torch
from capture_cases import CASES, WHOLE, Block, assert_bitwise_equal, compare_with_captured, mesh_of
from case_lists import run_cases_on_four_processes
from slow_case_marks import keep_diagonals_fast
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import dtensor as dt
from dtensor import DTensor, Partial, PerRank, Replicate, Shard
from dtensor.capture import capture
from dtensor.capture.tracing.recorder import Recorder
from dtensor.errors import CaptureError, LayoutError, MixedTensorError

MESH, THREE, GRID = mesh_of(2), mesh_of(3), mesh_of(2, 2)


def randn(*size: int, on: Any = MESH, at: Any = WHOLE, grad: bool = False, dtype: Any = None) -> DTensor:
    return capture_cases.randn(*size, on=on, at=at, grad=grad, dtype=dtype)


# --- programs ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "mesh"), keep_diagonals_fast(CASES, [MESH, THREE, GRID]))
def test_captured_training_programs_equal_eager_bitwise(name: str, mesh: Any) -> None:
    captured = compare_with_captured(lambda: CASES[name](mesh))
    assert captured.cache_info()[:4] == (1, 16, 1, 2)


@pytest.mark.gloo
def test_captured_training_programs_equal_eager_on_four_processes() -> None:
    run_cases_on_four_processes(capture_cases)


def test_captured_random_operators_in_counter_mode_equal_eager() -> None:
    with dt.random_mode("counter"):
        compare_with_captured(lambda: CASES["dropout_rand_like_and_bernoulli"](GRID), 4)


def test_source_of_captured_program_is_python_code_over_local_tensors() -> None:
    captured = compare_with_captured(lambda: CASES["mlp"](MESH))
    assert "def forward(x0, " in captured.source()
    assert " = torch.mm(x0, " in captured.source()


# --- random numbers, buffers --------------------------------------------------------------------------------------------
def test_replay_writes_buffers_and_arguments_and_increments_their_versions() -> None:
    total = dt.zeros(3, device_mesh=MESH, placements=[Shard(0)])

    def add(x: Any) -> Any:
        total.add_(x)
        x.mul_(2)
        return total * 1

    f = capture(add)
    x = dt.ones(3, device_mesh=MESH, placements=[Shard(0)])
    for expected in (1.0, 3.0, 7.0):
        before = total._version, x._version
        assert f(x).full_tensor().tolist() == [expected] * 3
        assert (total._version, x._version) == (before[0] + 1, before[1] + 1)
    assert x.full_tensor().tolist() == [8.0] * 3
    assert f.cache_info().replayed == 2


# --- guards -------------------------------------------------------------------------------------------------------------
def test_calls_with_other_shapes_layouts_or_numbers_are_recorded_again() -> None:
    w = randn(6, 6, at=[Shard(1)])
    f = capture(lambda x, scale=1.0: (x @ w) * scale)
    for size, at, scale in ((4, Replicate(), 1.0), (5, Replicate(), 1.0), (4, Shard(0), 1.0), (4, Replicate(), 2.0)):
        for _ in range(2):
            x = randn(size, 6, at=[at])
            assert_bitwise_equal(f(x, scale=scale), (x @ w) * scale)
    assert f.cache_info()[:4] == (4, 16, 4, 4)


def test_changes_of_requires_grad_grad_mode_or_train_mode_are_recorded_again() -> None:
    block = Block(8, 2, MESH, p=0.5)
    f = capture(block)
    x = randn(2, 3, 8)

    def grads() -> list[bool]:
        for p in block.parameters():
            p.grad = None
        f(x).sum().backward()
        return [p.grad is not None for p in block.parameters()]

    assert all(grads())
    assert all(grads())
    block.qkv.weight.requires_grad_(False)
    for _ in range(2):
        assert sum(grads()) == len(list(block.parameters())) - 1
    with torch.no_grad():
        assert not f(x).requires_grad
        assert not f(x).requires_grad
    block.eval()
    with torch.no_grad():
        assert_bitwise_equal(f(x), f(x))
        assert_bitwise_equal(f(x), block(x))
    with torch.inference_mode():
        assert_bitwise_equal(f(x), block(x))
        assert f(x).is_inference()
    assert f.cache_info().recorded == 5


def test_replay_uses_replaced_parameters_and_records_other_layouts_again() -> None:
    linear = nn.Linear(4, 4, bias=False)
    linear = dt.distribute_module(linear, MESH)
    f = capture(linear)
    x = randn(3, 4)
    with torch.no_grad():
        f(x)
        assert_bitwise_equal(f(x), linear(x))
        linear.weight = nn.Parameter(randn(4, 4))
        assert_bitwise_equal(f(x), linear(x))
        linear.weight.data = randn(4, 4)
        assert_bitwise_equal(f(x), linear(x))
        linear.weight = nn.Parameter(randn(4, 4, at=[Shard(0)]))
        assert_bitwise_equal(f(x), linear(x))
        assert f.cache_info().recorded == 2


def test_captured_program_under_autocast_equals_eager() -> None:
    def build() -> Any:
        w = randn(6, 6, at=[Shard(1)], grad=True)

        def fn(x: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.softmax(x @ w, -1)

        return fn, (lambda i: (randn(4, 6),)), [w]

    compare_with_captured(build)

    def outside() -> Any:
        _, arguments, params = build()
        return (lambda x: torch.softmax(x @ params[0], -1)), arguments, params

    captured = compare_with_captured(outside, around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert "torch.bfloat16" in captured.source()


def test_calls_beyond_the_limit_of_recordings_warn_and_run_eagerly() -> None:
    f = capture(lambda x, by: x * by, limit=2)
    x = randn(4, at=[Shard(0)])
    assert_bitwise_equal([f(x, 1.0), f(x, 2.0)], [x * 1.0, x * 2.0])
    with pytest.warns(UserWarning, match="recorded 2 times"):
        assert_bitwise_equal(f(x, 3.0), x * 3.0)
    assert f.cache_info() == (2, 2, 2, 0, 1)


# --- autograd -----------------------------------------------------------------------------------------------------------
def test_replays_accumulate_gradients_as_eager() -> None:
    w = randn(6, 6, at=[Shard(1)], grad=True)
    f, g = capture(lambda x: (x @ w).tanh()), lambda x: (x @ w).tanh()
    xs = [randn(4, 6) for _ in range(4)]
    f(xs[0]).sum().backward()
    grads = []
    for fn in (f, g):
        w.grad = None
        for x in xs:
            fn(x).sum().backward()
        (fn(xs[0]) + fn(xs[1])).sum().backward()
        grads.append(w.grad)
    assert_bitwise_equal(*grads)


def test_tensor_hooks_run_once_per_backward_of_a_replay() -> None:
    w = randn(6, 6, at=[Shard(1)], grad=True)
    seen = []
    w.register_hook(lambda grad: seen.append(grad.placements))
    w.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    f = capture(lambda x: x.t() @ (x @ w))
    for _ in range(3):
        f(randn(4, 6, at=[Shard(0)])).sum().backward()
        assert seen == [(Shard(1),), "accumulated"]
        seen.clear()
    assert w.grad.placements == (Shard(1),)


def test_backward_after_in_place_write_to_a_saved_tensor_raises() -> None:
    w = randn(4, 4, at=[Shard(1)], grad=True)
    for fn, result in ((lambda x: x @ w, False), (lambda x: torch.exp(x @ w), True)):
        f = capture(fn)
        for _ in range(3):
            y = f(randn(3, 4, grad=True))
            y.sum().backward()
        for _ in range(2):
            y = f(randn(3, 4, grad=True))
            with torch.no_grad():
                (y if result else w).mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def test_in_place_writes_to_results_of_replays_have_gradients_of_eager() -> None:
    w = randn(4, 4, at=[Shard(1)], grad=True)
    f = capture(lambda x: x @ w)
    xs = [randn(3, 4, grad=True) for _ in range(3)]
    grads = []
    for fn in (f, lambda x: x @ w):
        w.grad = None
        for x in xs:
            y = fn(x)
            y.relu_()
            y.sum().backward()
        grads.append(w.grad)
    assert_bitwise_equal(*grads)


def test_gradients_of_two_leaves_of_a_replay_do_not_share_memory() -> None:
    a, b = randn(4, grad=True, at=[Shard(0)]), randn(4, grad=True, at=[Shard(0)])
    f = capture(lambda: a + b)
    for _ in range(3):
        a.grad = b.grad = None
        f().sum().backward()
        a.grad.add_(1)
        assert b.grad.full_tensor().tolist() == [1.0] * 4


def test_second_derivative_of_a_captured_function_raises_but_inside_it_works() -> None:
    w = randn(4, at=[Shard(0)], grad=True)
    f = capture(lambda: (w * w * w).sum())
    for _ in range(3):
        with pytest.raises(CaptureError, match="twice"):
            torch.autograd.grad(f(), w, create_graph=True)
        f().backward()
    penalty = capture(lambda: torch.autograd.grad((w * w * w).sum(), w, create_graph=True)[0].square().sum())
    grads = []
    for _ in range(3):
        w.grad = None
        penalty().backward()
        grads.append(w.grad)
    assert_bitwise_equal(grads[1:], grads[:1] * 2)


def test_backward_of_a_replay_with_gradients_in_other_layouts_equals_eager() -> None:
    w = randn(4, 6, at=[Shard(1)], grad=True)
    f = capture(lambda x: x @ w)
    x = randn(3, 4)
    f(x).sum().backward()
    for at in (Shard(0), Replicate()):
        w.grad = None
        (f(x) * randn(3, 6, at=[at])).sum().backward()
        assert w.grad is not None
    g = torch.autograd.grad((f(x) * x.sum()).redistribute(placements=[Replicate()]).sum(), w)[0]
    assert torch.allclose(g.full_tensor(), torch.autograd.grad(((x @ w) * x.sum()).sum(), w)[0].full_tensor())


# --- containers, aliases ------------------------------------------------------------------------------------------------
def test_results_of_replays_alias_arguments_as_in_eager() -> None:
    def views(x: Any, w: Any) -> Any:
        h = x * 2
        first, second = h.chunk(2)
        return x, x.t(), x[1:3], h.detach(), first, second, w

    f = capture(views)
    for grad in (False, True):
        for _ in range(3):
            x, w = randn(4, 6, at=[Shard(1)]), randn(3)
            if grad:
                x = x.requires_grad_() * 1
            made = f(x, w)
            assert made[0] is x
            assert made[6] is w
            assert_bitwise_equal(made, views(x, w))
            with torch.no_grad():
                made[1][0].fill_(7)
                made[2][0].fill_(5)
            assert x.full_tensor()[:, 0].tolist() == [7.0, 5.0, 7.0, 7.0]
            if grad:
                (x.sum() + made[1].sum() + made[4].sum()).backward()


def test_result_that_is_a_view_through_to_local_raises() -> None:
    f = capture(lambda x: DTensor.from_local(x.to_local(), MESH, [Shard(0)], shape=(4,)))
    with pytest.raises(CaptureError, match=r"return x\.clone\(\)"):
        f(randn(4, at=[Shard(0)], grad=True) * 1)


def test_replays_with_arguments_that_share_memory_equal_eager_or_raise() -> None:
    f = capture(lambda a, b: a * 2 + b)
    x = randn(4, at=[Shard(0)])
    assert_bitwise_equal([f(x, x) for _ in range(2)], [x * 2 + x] * 2)
    assert_bitwise_equal([f(x, x.detach()) for _ in range(2)], [x * 2 + x] * 2)
    y = randn(4, at=[Shard(0)])
    assert_bitwise_equal([f(x, y) for _ in range(2)], [x * 2 + y] * 2)

    def write(a: Any, b: Any) -> Any:
        c = b * 3
        a.add_(1)
        return c + b * 3

    f = capture(write)
    for make in (lambda x: randn(4, at=[Shard(0)]), lambda x: x.detach()):
        for _ in range(2):
            x = randn(4, at=[Shard(0)])
            other = make(x)
            one, two = x.clone(), None
            two = one.detach() if other._local.shards[0].data_ptr() == x._local.shards[0].data_ptr() else other.clone()
            assert_bitwise_equal(f(x, other), write(one, two))
    with pytest.raises(CaptureError, match="shares its memory"):
        capture(write)(x, x.detach())


def test_replay_with_other_local_strides_equals_eager() -> None:
    w = randn(4, 6, at=[Shard(0)])
    f = capture(lambda x: (x.mul_(1) if not x.requires_grad else x) @ w)
    for other in (False, True, False):
        pieces = [torch.randn(2, 3, 4).transpose(1, 2)[0] if other else torch.randn(4, 3) for _ in range(2)]
        x = DTensor.from_local(dt.per_rank([p.t() for p in pieces]), MESH, [Shard(1)], shape=(3, 8), stride=(8, 1))
        w = randn(8, 6, at=[Shard(0)])
        assert torch.equal(f(x).full_tensor(), (x @ w).full_tensor())


def test_plain_and_per_rank_results_of_replays_equal_eager() -> None:
    w = randn(4, 4, at=[Shard(0)], grad=True)
    f = capture(lambda x: ((x @ w).full_tensor(), (x @ w).sum().to_local(), x.to_local()))
    for _ in range(3):
        x = randn(2, 4)
        whole, local, given = f(x)
        assert torch.equal(whole, (x @ w).full_tensor())
        assert isinstance(local, PerRank)
        assert isinstance(given, PerRank)
        assert [shard.data_ptr() for shard in given.shards] == [shard.data_ptr() for shard in x._local.shards]
        grads = []
        for out in (whole, (x @ w).full_tensor()):
            w.grad = None
            out.sum().backward(retain_graph=True)
            grads.append(w.grad)
        assert_bitwise_equal(*grads)


# --- what is refused ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x if x.sum() > 0 else -x, "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "nonzero|index"),
        (lambda x: x * sum(x.tolist()), r"tolist\(\)"),
        (lambda x: x * float(x.full_tensor().numpy().sum()), r"numpy\(\)"),
        (lambda x: torch.manual_seed(0) and torch.rand_like(x), "generator"),
        (lambda x: x * random.random(), "random numbers"),
        (lambda x: x * float(numpy.random.rand()), "random numbers"),
        (lambda x: x.unsqueeze_(0), "changes the s"),
        (lambda x: object(), "returns a object"),
    ],
)
def test_value_reads_random_states_and_unsupported_results_raise_at_capture(fn: Any, message: str) -> None:
    f = capture(fn)
    for _ in range(2):
        with pytest.raises(CaptureError, match=message):
            f(randn(4, at=[Shard(0)]))
    assert f.cache_info().kept == 0
    assert torch.arange(3).tolist() == [0, 1, 2], "reads are allowed again"


@pytest.mark.parametrize(
    "fn",
    [
        lambda table, places: F.embedding(places, table),
        lambda table, places: table.index_select(0, places),
        lambda table, places: F.cross_entropy(table.t().contiguous(), places[:3]),
        lambda table, places: F.nll_loss(table.t().contiguous(), places[:3], ignore_index=2),
    ],
    ids=["embedding", "index_select", "cross_entropy", "nll_loss with ignore_index"],
)
def test_replays_use_the_indices_of_each_call_and_raise_if_out_of_range(fn: Any) -> None:
    captured, table = capture(fn), randn(7, 3, at=[Shard(0)])

    def places(*values: int) -> DTensor:
        return dt.distribute_tensor(torch.tensor(values), MESH, WHOLE)

    for values in ((0, 6, 2, 1), (5, 5, 3, 0), (2, 2, 4, 6)):
        assert_bitwise_equal(captured(table, places(*values)), fn(table, places(*values)))
    assert captured.cache_info().replayed == 2
    with pytest.raises(IndexError, match="7"):
        captured(table, places(0, 7, 1, 2))


def test_replays_check_one_hot_classes_and_masked_scatter_sizes() -> None:
    one_hot, scattered = capture(lambda x: F.one_hot(x, 7)), capture(lambda x, mask: x.masked_scatter(mask, x[:1]))
    x = randn(4, at=[Shard(0)])

    def given(*values: int, dtype: Any = None) -> DTensor:
        return dt.distribute_tensor(torch.tensor(values, dtype=dtype), MESH, [Shard(0)])

    for values in ((0, 6, 2, 1), (5, 5, 3, 0)):
        assert_bitwise_equal(one_hot(given(*values)), F.one_hot(given(*values), 7))
    for values in ((0, 0, 0, 1), (1, 0, 0, 0)):
        scattered(x, given(*values, dtype=torch.bool))
    assert one_hot.cache_info().replayed == scattered.cache_info().replayed == 1
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        one_hot(given(0, 7, 1, 2))
    with pytest.raises(RuntimeError, match="number of ones"):
        scattered(x, given(1, 1, 0, 0, dtype=torch.bool))


class TextKeyed(dict[Any, Any]):
    """A dictionary with an overridden ``get``, which converts the key to text."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(str(key), default)


def test_changed_result_of_an_overridden_dict_get_is_recorded_again() -> None:
    kept = TextKeyed({"1": 2.0})
    f, x = capture(lambda x: x * kept.get(1)), randn(4, at=[Shard(0)])
    for _ in range(2):
        assert_bitwise_equal(f(x), x * 2.0)
    kept["1"] = 3.0
    assert_bitwise_equal(f(x), x * 3.0)
    assert f.cache_info().replayed == 1


@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (lambda x, sizes: x.tensor_split(sizes), (torch.tensor([1, 3]),)),
        (lambda x, sizes: pack_padded_sequence(x[:, None], sizes)[0], (torch.tensor([5]),)),
        (lambda x, sizes: x * torch.from_dlpack(sizes.to_local()).sum(), (dt.distribute_tensor(torch.ones(2), MESH, WHOLE),)),
    ],
    ids=["tensor_split", "pack_padded_sequence", "dlpack"],
)
def test_operators_that_read_tensor_values_internally_raise_at_capture(fn: Any, given: Any) -> None:
    with pytest.raises(CaptureError, match="reads the values of a tensor"):
        capture(fn)(randn(6, 2, at=[Shard(0)]), *given)


def test_tensor_split_by_a_tensor_of_constants_is_captured() -> None:
    f, x = capture(lambda x: x.tensor_split(torch.tensor([1, 3]))), randn(6, at=[Shard(0)])
    for _ in range(2):
        for mine, like in zip(f(x), x.split([1, 2, 3]), strict=True):
            assert_bitwise_equal(mine, like)
    assert f.cache_info().replayed == 1


def test_profiler_ranges_are_not_recorded() -> None:
    def step(x: DTensor) -> DTensor:
        with torch.profiler.record_function("a range"):
            return x * 2

    f = capture(step)
    for _ in range(2):
        f(randn(4, at=[Shard(0)]))
    assert "profiler" not in f.source()


def test_python_attribute_that_each_call_changes_raises() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return x * 2

    module = Counter()
    f = capture(module)
    x = randn(4, at=[Shard(0)])
    f(x)
    f(x)
    assert module.calls == 2
    with pytest.raises(CaptureError, match=r"\.calls changed in each"):
        f(x)


def test_tensor_that_the_first_call_stores_in_an_attribute_is_captured() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask: Any = None

        def forward(self, x: Any) -> Any:
            if self.mask is None:
                self.mask = torch.rand_like(x)
            return x * self.mask

    module = Lazy()
    f = capture(module)
    x = randn(4, at=[Shard(0)])
    first = f(x)
    for _ in range(3):
        assert_bitwise_equal(f(x), first)
    assert f.cache_info()[:4] == (1, 16, 2, 2)


def test_tensors_of_unknown_origin_and_mixed_operands_raise_at_capture() -> None:
    w = randn(4, at=[Shard(0)], grad=True)
    hidden = randn(4, at=[Shard(0)])
    inside = type("Far", (), {"__module__": "torch.far"})()  # of another library
    inside.held = hidden
    with pytest.raises(CaptureError, match="cannot find among the arguments"):
        capture(lambda x: x + inside.held)(w)
    with pytest.raises(MixedTensorError, match="plain tensor of shape"):
        capture(lambda x: w + x)(torch.ones(4))


def test_captured_program_with_constant_tensors_equals_eager() -> None:
    def build() -> Any:
        w = randn(6, 6, at=[Shard(1)], grad=True)

        def fn(x: Any) -> Any:
            y = x @ w + torch.tensor(2.0)
            return y[[0, 2]] * F.one_hot(x.argmax(-1), 6)[[0, 2]]

        return fn, (lambda i: (randn(4, 6),)), [w]

    compare_with_captured(build)


def test_plain_arguments_under_implicit_replication_are_replayed() -> None:
    w = randn(4, at=[Shard(0)])
    f = capture(lambda x: w * x)
    with dt.implicit_replication():
        for _ in range(3):
            x = torch.randn(4)
            assert_bitwise_equal(f(x), w * x)
    assert f.cache_info().replayed == 2


def test_replays_with_partial_and_complex_arguments_equal_eager() -> None:
    f = capture(lambda x, z: (x * 2 + 1, (z.conj() * z).sum(), z.conj()))
    for _ in range(3):
        x = DTensor.from_local(dt.per_rank([torch.randn(3), torch.randn(3)]), MESH, [Partial()])
        z = randn(5, at=[Shard(0)], dtype=torch.complex64)
        eager = (x * 2 + 1, (z.conj() * z).sum(), z.conj())
        for a, b in zip(f(x, z), eager, strict=True):
            assert a._layout is b._layout
            assert torch.equal(a.full_tensor(), b.full_tensor())


def test_branch_on_a_tensor_of_python_values_is_captured_and_guarded() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(torch.arange(1.0, 6.0), mesh, [dt.Shard(0)])
    lengths = [2, 3]

    def packed(x: Any) -> Any:
        places = torch.arange(5)
        starts = torch.diff(places, prepend=places[:1] - 1) != 1
        starts[0] = len(lengths) > 1
        mask = torch.zeros(5, dtype=torch.bool)
        mask[: lengths[0]] = True
        return x * mask.nonzero().numel() if starts.any() else x

    f = dt.capture(packed)
    with dt.implicit_replication():
        for _ in range(3):
            torch.testing.assert_close(f(x).full_tensor(), 2 * x.full_tensor())
        assert f.cache_info().replayed == 2
        lengths[0] = 4
        torch.testing.assert_close(f(x).full_tensor(), 4 * x.full_tensor())


@pytest.mark.parametrize("late", [False, True])
def test_branch_on_memory_with_values_of_an_argument_raises(late: bool) -> None:
    x = dt.distribute_tensor(torch.arange(1.0, 6.0), dt.init_device_mesh("cpu", (2,)), [dt.Shard(0)])

    def decides(x: Any, plain: torch.Tensor) -> Any:
        made = torch.zeros(2)
        view = made[:1]
        (view if late else made).copy_(plain)
        return x if made.any() else -x

    with pytest.raises(CaptureError, match="reads the values of a tensor"):
        dt.capture(decides)(x, torch.ones(1))
    with pytest.raises(CaptureError, match="reads the values of a tensor"):
        dt.capture(lambda x: x * torch.rand(3).argmax().item())(x)


def test_replay_raises_if_gradients_of_a_plain_tensor_differ_between_ranks() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    w = torch.ones(3, requires_grad=True)

    def step(x: Any) -> Any:
        (grad,) = torch.autograd.grad((x.to_local() * w).sum(), w)
        return grad

    f, same = dt.capture(step), dt.ones(3, device_mesh=mesh)
    with dt.implicit_replication():
        for _ in range(3):
            assert torch.equal(f(same), torch.ones(3))
        assert f.cache_info().replayed
        apart = DTensor.from_local(dt.per_rank([torch.ones(3), torch.zeros(3)]), mesh, [Replicate()])
        with pytest.raises(LayoutError, match="differs between ranks"):
            f(apart)


def test_recorder_is_garbage_collected_after_capture() -> None:
    """Check that facts stored with parameters and buffers hold no reference to the recorder."""
    mesh = dt.init_device_mesh("cpu", (2,))
    weight, buffer = (dt.distribute_tensor(torch.randn(6, 6), mesh, [Shard(0)]) for _ in range(2))
    weight.requires_grad_()
    before = {id(one) for one in gc.get_objects() if type(one) is Recorder}
    f = dt.capture(lambda x: (x @ weight @ buffer).square().mean())
    for _ in range(3):
        weight.grad = None
        f(dt.distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])).backward()
    gc.collect()
    assert f.cache_info().replayed >= 1
    assert not [one for one in gc.get_objects() if type(one) is Recorder and id(one) not in before]
