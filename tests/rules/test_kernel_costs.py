"""Communication costs of kernels: each kernel issues the collectives and bytes that it declares, which the choice of a strategy
depends on. Every shipped sample of every rule runs on two ranks with its dims sharded, one by one and together. On two ranks a
rank receives as many bytes as it sends, so the declared bytes are those of the events.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.base.tensor_tree import fill_tensors, tensor_leaves
from dtensor.comm import events
from dtensor.dispatch.programs import local_call
from dtensor.errors import RuleError
from dtensor.propagation.propagate import CallPlan
from dtensor.rules import register, rules, unregister
from dtensor.rules.kernel_context import KernelContext
from dtensor.rules.rule import Factors, Kernel, Rule
from dtensor.testing import scatter
from dtensor.testing.call_variants import Variant, operator_exists
from dtensor.testing.placements import get_or_make_mesh
from dtensor.testing.samples import Sample, samples_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

# operator with data-dependent communication -> bounds on the issued collectives, then on the received bytes
Bound = Callable[[int, int], bool]
AT_MOST: Bound = lambda declared, issued: issued <= declared  # noqa: E731
AT_LEAST: Bound = lambda declared, issued: issued >= declared  # noqa: E731
EXACTLY: Bound = lambda declared, issued: issued == declared  # noqa: E731
ANY: Bound = lambda declared, issued: True  # noqa: E731
DATA_DEPENDENT_BOUNDS: dict[str, tuple[Bound, Bound]] = {
    "aten::sort": (AT_MOST, ANY),  # extra rounds for equal elements and misplaced ones; the declared cost is half of the block
    "aten::topk": (AT_MOST, ANY),  # the last collective runs only if equal elements leave the choice open
    "aten::bincount": (EXACTLY, AT_LEAST),  # the largest value decides the number of bins
    "aten::nonzero": (AT_LEAST, ANY),  # lengths; and rows if the local blocks are not in row-major order
    # only rows of other ranks are sent
    **dict.fromkeys(("aten::index", "aten::_unsafe_index", "aten::index_select"), (AT_MOST, ANY)),
    **dict.fromkeys(("aten::index_add", "aten::index_copy", "aten::index_reduce"), (AT_MOST, ANY)),
    **dict.fromkeys(("aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index_put"), (AT_MOST, ANY)),
    **dict.fromkeys(("aten::gather", "aten::scatter", "aten::scatter_add", "aten::scatter_reduce"), (AT_MOST, ANY)),
    "aten::_unique": (EXACTLY, ANY),
    "aten::_unique2": (EXACTLY, ANY),
    "aten::unique_consecutive": (EXACTLY, ANY),
    "aten::unique_dim": (EXACTLY, ANY),
    "aten::unique_dim_consecutive": (EXACTLY, ANY),
}
RANKS = 2


class RecordKernelRuns:
    """Wrapper of the kernels of plans that records the events of each kernel run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[CallPlan, Kernel, list[events.Event]]] = []
        bound = local_call.bind_kernel
        monkeypatch.setattr(local_call, "bind_kernel", lambda plan: self._watched(plan, bound(plan)))

    def _watched(self, plan: CallPlan, run: Callable[..., Any]) -> Callable[..., Any]:
        row = None if plan.chosen is None else plan.chosen.kernel_strategy
        if row is None or row.kernel is None:
            return run
        kernel = row.kernel

        def watched(*args: Any, **kwargs: Any) -> Any:
            issued: list[events.Event] = []
            with events.listening(issued.append):
                result = run(*args, **kwargs)
            self.runs.append((plan, kernel, issued))
            return result

        return watched


def _placements_of_sample(sample: Sample) -> Iterator[list[Any]]:
    """Yield placements: each dim of each tensor sharded alone, then dim ``d`` of all tensors, counted from the start and from the
    end."""
    xs = tensor_leaves(sample.arguments)
    seen: list[list[Any]] = []
    for d in range(max((x.ndim for x in xs), default=0)):
        alone = [[Shard(d) if i == k else Replicate() for i in range(len(xs))] for k, x in enumerate(xs) if d < x.ndim]
        together = [[Shard(at(x)) if d < x.ndim else Replicate() for x in xs] for at in (lambda x: d, lambda x: x.ndim - 1 - d)]  # noqa: B023
        for placements in (*alone, *together):
            if placements not in seen:
                seen.append(placements)
                yield placements


def _run_sample(name: str, sample: Sample, placements: list[Any]) -> None:
    """Run the operator on distributed copies of a sample, and ignore its errors."""
    mesh = get_or_make_mesh((RANKS,))
    given = zip(tensor_leaves(sample.arguments), placements, strict=True)
    try:
        args, kwargs = fill_tensors(sample.arguments, [scatter(x.clone(), mesh, [p], seed=1) for x, p in given])
        torch.default_generator.manual_seed(0)
        with torch.no_grad():
            Variant(name.replace("::", "."), sample, False).call(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        pass  # samples that raise, and reductions that a dtype lacks: test_verify_rules.py covers them


KINDS_WITHOUT_KERNEL = {"pointwise", "random", "decomposition", "answer"}
RULES_WITH_KERNELS = [
    name
    for name, rule in sorted(rules().items())
    if rule.kind not in KINDS_WITHOUT_KERNEL and operator_exists(name.replace("::", "."))
]


@pytest.mark.slow
def test_kernels_issue_the_collectives_and_bytes_that_they_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    dt.dispatch.dispatcher.clear_plans()
    seen, wrong, counted = RecordKernelRuns(monkeypatch), [], set()
    for name in RULES_WITH_KERNELS:
        given = samples_of(name)
        for sample in given[:: max(1, len(given) // 100)]:
            for placements in _placements_of_sample(sample):
                _run_sample(name, sample, placements)
        for plan, kernel, issued in seen.runs:
            counted.add(kernel.run)
            wrong += _find_cost_mismatches(plan, kernel, issued)
        seen.runs.clear()
    dt.dispatch.dispatcher.clear_plans()
    assert wrong == []
    assert len(counted) > 50, len(counted)


def _find_cost_mismatches(plan: CallPlan, kernel: Kernel, issued: list[events.Event]) -> Iterator[str]:
    name = plan.call.func._schema.name
    of_count, of_bytes = DATA_DEPENDENT_BOUNDS.get(name, (EXACTLY, EXACTLY))
    declared, received = kernel.nbytes(plan.call), sum(event.bytes for event in issued)
    told = [(event.kind, event.bytes) for event in issued]
    if not of_count(kernel.collectives, len(issued)):
        yield f"{plan.call}: {kernel.collectives} collectives declared, issued {told}"
    elif math.prod(plan.call.shape(0)) and not of_bytes(declared, received):
        yield f"{plan.call}: {declared} bytes declared, issued {told}"


def test_kernel_that_reads_a_number_argument_from_at_call_raises() -> None:
    """Check that ``at.call`` refuses to give numbers: calls with other numbers run the same plan."""

    @torch.library.custom_op("kernelcosts::scaled", mutates_args=())
    def scaled(x: torch.Tensor, by: float, rounds: int) -> torch.Tensor:
        return x * by * rounds

    scaled.register_fake(lambda x, by, rounds: torch.empty_like(x))

    def kernel(at: KernelContext, x: Any, by: float, rounds: int) -> Any:
        return x * at.call["by"] if rounds == 1 else x * by * at.call["rounds"]

    register("kernelcosts::scaled", Rule(lambda call: Factors(((("n",),),), ((("n",),),), {"n": 4}), run=kernel))
    mesh = get_or_make_mesh((RANKS,))
    x = scatter(torch.arange(4.0), mesh, [Shard(0)], seed=0)
    try:
        for by in (2.0, 3.0):
            assert scaled(x, by, 2).full_tensor().tolist() == [0.0, 2 * by, 4 * by, 6 * by]
        with pytest.raises(RuleError, match="the value of 'by' may change between calls"):
            scaled(x, 2.0, 1)
    finally:
        unregister("kernelcosts::scaled")
