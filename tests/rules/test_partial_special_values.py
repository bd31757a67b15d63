"""Partial values with special values: partial strategies with zeros, infinities and NaN in addends, other operands and numbers
give the result of plain torch. All partial strategies of all rules are tried."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from slow_case_marks import keep_every_nth_fast
from torch import Tensor
from torch_version_marks import mark_undecomposed_linear

import dtensor as dt
from dtensor import DTensor, Partial, Replicate
from dtensor.base.tensor_tree import fill_tensors, map_tensors, tensor_leaves
from dtensor.comm import per_rank
from dtensor.rules import rules
from dtensor.testing.call_variants import Variant, make_variants
from dtensor.testing.compare import is_close
from dtensor.testing.placements import get_or_make_mesh
from dtensor.testing.samples import samples_of

NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([0.0, -0.0, INF, -INF, NAN])
FINITE = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, -1.0])
NUMBERS = (0.0, -0.0, INF, -INF, NAN, 1e-320, 1e300)
OPS = ("sum", "avg", "max", "min", "product")
RANKS = 3
CASES_PER_RULE = 4
RULES_WITH_PARTIALS = sorted(name for name, rule in rules().items() if rule.partials)

pytestmark = pytest.mark.filterwarnings("ignore")


def random_with_special_values(like: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return a random tensor with the shape of ``like``, in which ``share`` of the elements are special values."""
    if not like.is_floating_point() or like.itemsize < 2:
        return like.clone()
    pick = torch.randint(0, len(SPECIAL), like.shape, generator=generator)
    finite = FINITE[torch.randint(0, len(FINITE), like.shape, generator=generator)]
    special = torch.rand(like.shape, generator=generator) < share
    made = torch.where(special, SPECIAL[pick], finite)
    return torch.empty_like(like).copy_(made)


def random_partial(like: Tensor, op: str, share: float, generator: torch.Generator) -> DTensor:
    """Return a partial DTensor with a random addend on each rank."""
    terms = per_rank([random_with_special_values(like, share, generator) for _ in range(RANKS)])
    return DTensor.from_local(terms, get_or_make_mesh((RANKS,)), [Partial(op)])


def random_replicated(like: Tensor, share: float, generator: torch.Generator) -> DTensor:
    return dt.distribute_tensor(random_with_special_values(like, share, generator), get_or_make_mesh((RANKS,)), [Replicate()])


def choose_partial_operands(xs: list[Tensor]) -> list[tuple[str | None, ...]]:
    """Return the reductions of the operands of each case: one, two or all floating-point operands are partial."""
    floating = [i for i, x in enumerate(xs) if x.is_floating_point() and x.itemsize > 1]
    picks = [{i} for i in floating] + [{i, j} for i in floating for j in floating if i < j] + [set(floating)]
    return [tuple(op if i in pick else None for i in range(len(xs))) for op in OPS for pick in picks if pick]


def find_difference(call: Callable[..., Any], args: Any, kwargs: Any, written: bool) -> str | None:
    """Return the difference between ``call`` on DTensors and on their values; None if there is none, or if plain torch raises."""
    plain_args, plain_kwargs = map_tensors(lambda x: x.full_tensor().clone() if isinstance(x, DTensor) else x, (args, kwargs))
    torch.default_generator.manual_seed(0)
    try:
        expected = call(*plain_args, **plain_kwargs)
    except (RuntimeError, IndexError, ValueError):
        return None
    torch.default_generator.manual_seed(0)
    got = call(*args, **kwargs)
    pairs = list(
        zip(
            tensor_leaves((got, args, kwargs) if written else got),
            tensor_leaves((expected, plain_args, plain_kwargs) if written else expected),
            strict=True,
        )
    )
    for mine, right in pairs:
        value = mine.full_tensor() if isinstance(mine, DTensor) else mine
        # complex comparisons of inf + 0j fail
        parts = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (value, right)]
        if not is_close(*parts):
            return f"{value.tolist()}, not {right.tolist()}"
    return None


def run_case(variant: Variant, ops: tuple[str | None, ...], share: float, seed: int) -> str | None:
    generator = torch.Generator().manual_seed(seed)

    def place(x: Tensor, op: str | None) -> DTensor:
        return random_replicated(x, share, generator) if op is None else random_partial(x, op, share, generator)

    given = variant.sample.arguments
    args, kwargs = fill_tensors(given, map(place, tensor_leaves(given), ops))
    found = find_difference(variant.call, args, kwargs, variant.writes)
    return found and f"{variant.name} {variant.sample.note} under {ops}, {args}, {kwargs} seed {seed}: {found}"


def cases(name: str, limit: int) -> Iterator[tuple[Variant, tuple[str | None, ...], float, int]]:
    rng = random.Random(zlib.crc32(name.encode()))
    every = [
        (variant, ops, share)
        for sample in samples_of(name)
        if sample.values
        for variant in make_variants(name, sample)
        for ops in choose_partial_operands(tensor_leaves(variant.sample.arguments))
        for share in (0.05, 0.4)
    ]
    for variant, ops, share in rng.sample(every, min(limit, len(every))):
        yield variant, ops, share, rng.randrange(1 << 30)


@pytest.mark.parametrize("name", keep_every_nth_fast(RULES_WITH_PARTIALS, every=4))
def test_partial_strategies_with_special_values_equal_plain_torch(name: str) -> None:
    for variant, ops, share, seed in cases(name, CASES_PER_RULE):
        assert (found := run_case(variant, ops, share, seed)) is None, found


# --- numbers: a plan for usual numbers is not reused for special ones ---------------------------------------------------
ADDENDS = [torch.tensor([3.0, 0.0, -1.0, INF]), torch.tensor([-1.0, 0.0, 1.0, 1.0]), torch.tensor([1.0, 2.0, 0.0, 0.0])]
NUMBER_CALLS: dict[str, Callable[[Any, float], Any]] = {
    "mul": lambda x, n: x * n,
    "rmul": lambda x, n: n * x,
    "div": lambda x, n: x / n,
    "mul_": lambda x, n: x.clone().mul_(n),
    "div out": lambda x, n: torch.div(x, n, out=torch.empty_like(x)),
    "add": lambda x, n: x.add(x, alpha=n),
    "sub": lambda x, n: x.sub(x * 2, alpha=n),
    "rsub": lambda x, n: torch.rsub(x, x * 2, alpha=n),
    "shift": lambda x, n: x + n,
    "lerp": lambda x, n: x.lerp(x * 3, n),
    "addcmul": lambda x, n: x.addcmul(x, torch.ones_like(x, dtype=torch.int64), value=n),
    "foreach mul": lambda x, n: torch._foreach_mul([x, x], n),
    "foreach div": lambda x, n: torch._foreach_div([x, x], [2.0, n]),
    "foreach add": lambda x, n: torch._foreach_add([x, x], [x, x], alpha=n),
    "leaky_relu": lambda x, n: torch.ops.aten.leaky_relu_backward(x, torch.ones_like(x).sub(2), n, False),
    "mul complex": lambda x, n: torch.view_as_real(torch.complex(x, x) * complex(n, 1.0)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", NUMBER_CALLS)
def test_calls_with_special_numbers_after_a_cached_plan_equal_plain_torch(name: str, dtype: torch.dtype) -> None:
    call = NUMBER_CALLS[name]
    if name == "mul complex" and dtype is torch.float16:
        dtype = torch.float64
    for op in OPS:
        x = DTensor.from_local(per_rank([term.to(dtype) for term in ADDENDS]), get_or_make_mesh((3,)), [Partial(op)])
        for number in (2.0, *NUMBERS, 1e5, 0.5, 1e-6, 2.0, INF):
            if dtype is torch.float16 and number in (1e300, 1e5) and name in ("addcmul", "lerp", "add", "sub", "rsub"):
                continue  # torch refuses numbers that the dtype does not have
            found = find_difference(call, (x, number), {}, False)
            assert found is None, (op, number, found)


def test_partial_times_or_divided_by_number_stays_partial_if_factor_is_finite() -> None:
    x = DTensor.from_local(per_rank(ADDENDS), get_or_make_mesh((3,)), [Partial()])
    for number, placement in ((2.0, Partial()), (INF, Replicate()), (0.5, Partial()), (0.0, Partial()), (1e39, Replicate())):
        assert (x * number).placements == (placement,)
    for number, placement in ((0.0, Replicate()), (2.0, Partial()), (-0.0, Replicate()), (1e-40, Replicate())):
        assert (x / number).placements == (placement,)
    assert (x * True).placements == (Partial(),)
    mask = dt.distribute_tensor(torch.tensor([True, False, True, True]), get_or_make_mesh((3,)), [Replicate()])
    assert (x * mask).placements == (Partial(),)


def test_partial_over_zero_counts_or_times_infinite_weights_is_inf_or_nan() -> None:
    """Divide a partial tensor by counts of which some are zero."""
    x = DTensor.from_local(per_rank(ADDENDS), get_or_make_mesh((3,)), [Partial()])
    counts = dt.distribute_tensor(torch.tensor([0.0, 0.0, 0.0, 1.0]), get_or_make_mesh((3,)), [Replicate()])
    assert (x / counts).full_tensor().tolist() == [INF, INF, pytest.approx(NAN, nan_ok=True), INF]
    weights = dt.distribute_tensor(torch.tensor([[INF], [1.0], [1.0], [1.0]]), get_or_make_mesh((3,)), [Replicate()])
    assert (x @ weights).full_tensor().tolist() == [INF]


# --- gradients: functions whose derivative is infinite somewhere ---------------------------------------------------------------
FUNCTIONS_WITH_INFINITE_DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "log": torch.log,
    "log1p": torch.log1p,
    "atanh": torch.atanh,
    "erfinv": torch.erfinv,
    "reciprocal": torch.reciprocal,
    "pow": lambda x: x.pow(0.5),
    "logit": torch.logit,
    "acos": torch.acos,
    "xlogy": lambda x: torch.xlogy(x, x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu by tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "elu": torch.nn.functional.elu,
    "mish": torch.nn.functional.mish,
    "norm": lambda x: torch.linalg.vector_norm(x, dim=0),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(0),
    "softmax": lambda x: x.softmax(0),
    "cumprod": lambda x: x.cumprod(0),
    "prod": lambda x: x.prod(),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=0),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (x.shape[0],), eps=0.0),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (x.shape[0],), eps=0.0),
    "masked": lambda x: torch.where(x > 0, x.log(), 0.0),
    "nan_to_num": torch.nan_to_num,
    "logaddexp": lambda x: torch.logaddexp(x, x * 2),
    "hypot": lambda x: torch.hypot(x, x),
}


@pytest.mark.parametrize("name", mark_undecomposed_linear(FUNCTIONS_WITH_INFINITE_DERIVATIVES, ("cumprod", "prod")))
def test_partial_gradients_times_infinite_derivatives_equal_plain_torch(name: str) -> None:
    def pulled(x: Any, cotangent: Any) -> Any:
        leaf = x.detach().requires_grad_()
        y = FUNCTIONS_WITH_INFINITE_DERIVATIVES[name](leaf)
        (grad,) = torch.autograd.grad(y, leaf, cotangent if y.ndim else cotangent.sum())
        return grad

    for values in (
        [0.0, 1.0, -1.0, 0.5, 2.0],
        [0.0, INF, -INF, NAN, 1e300],
        [1.0, 1.0, 1.0, 1.0, 1.0],
        [0.0] * 5,
        [-0.0, 1.0, 0.25, 1e-320, 3.0],
    ):
        x = torch.tensor(values, dtype=torch.float64)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            terms = random_partial(x, "sum" if seed else "avg", 0.2, generator)
            terms = terms if FUNCTIONS_WITH_INFINITE_DERIVATIVES[name](x).shape == x.shape else terms.sum()
            placed = dt.distribute_tensor(x, get_or_make_mesh((RANKS,)), [Replicate()])
            found = find_difference(pulled, (placed, terms), {}, False)
            assert found is None, (values, seed, found)
