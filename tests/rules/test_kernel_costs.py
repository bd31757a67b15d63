"""What kernels declare of their communication is what they issue: choices between rows are made by it.

Every shipped sample of every rule runs on two ranks with its dims sharded, one by one and together; each kernel's collectives are
counted and compared. On two ranks a rank receives as many bytes as it gives, so the declared bytes are those of the events.
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
from dtensor.dispatch import local_call
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

# operator -> the law of those whose data decide: (declared, issued) -> whether it is kept; of collectives, then of bytes
Law = Callable[[int, int], bool]
AT_MOST: Law = lambda declared, issued: issued <= declared  # noqa: E731
AT_LEAST: Law = lambda declared, issued: issued >= declared  # noqa: E731
EXACTLY: Law = lambda declared, issued: issued == declared  # noqa: E731
ANY: Law = lambda declared, issued: True  # noqa: E731
DATA_DECIDE: dict[str, tuple[Law, Law]] = {
    "aten::sort": (AT_MOST, ANY),  # of equal elements and of what belongs elsewhere; priced as half of the block moved
    "aten::topk": (AT_MOST, ANY),  # the last one only where equal elements leave the choice open
    "aten::bincount": (EXACTLY, AT_LEAST),  # as many bins as the largest number asks for
    "aten::nonzero": (AT_LEAST, ANY),  # lengths; rows where blocks do not follow each other, as many as there are
    **dict.fromkeys(("aten::index", "aten::_unsafe_index", "aten::index_select"), (AT_MOST, ANY)),  # what is another's travels
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


class Seen:
    """Wraps the kernels of plans: what each issued, beside what it declares."""

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


def _placed(sample: Sample) -> Iterator[list[Any]]:
    """Each tensor's dims sharded alone, then all tensors' alike, counted from either end."""
    xs = tensor_leaves(sample.arguments)
    seen: list[list[Any]] = []
    for d in range(max((x.ndim for x in xs), default=0)):
        alone = [[Shard(d) if i == k else Replicate() for i in range(len(xs))] for k, x in enumerate(xs) if d < x.ndim]
        together = [[Shard(at(x)) if d < x.ndim else Replicate() for x in xs] for at in (lambda x: d, lambda x: x.ndim - 1 - d)]  # noqa: B023
        for placements in (*alone, *together):
            if placements not in seen:
                seen.append(placements)
                yield placements


def _run(name: str, sample: Sample, placements: list[Any]) -> None:
    """The operator, if it runs at all."""
    mesh = get_or_make_mesh((RANKS,))
    given = zip(tensor_leaves(sample.arguments), placements, strict=True)
    try:
        args, kwargs = fill_tensors(sample.arguments, [scatter(x.clone(), mesh, [p], seed=1) for x, p in given])
        torch.default_generator.manual_seed(0)
        with torch.no_grad():
            Variant(name.replace("::", "."), sample, False).call(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        pass  # samples of errors, and partial kinds that a dtype lacks: test_verify_rules.py compares them


WITHOUT = {"pointwise", "random", "decomposition", "answer"}
WITH_KERNELS = [
    name for name, rule in sorted(rules().items()) if rule.kind not in WITHOUT and operator_exists(name.replace("::", "."))
]


@pytest.mark.slow
def test_kernels_issue_what_they_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    dt.dispatch.dispatcher.clear_plans()
    seen, wrong, counted = Seen(monkeypatch), [], set()
    for name in WITH_KERNELS:
        given = samples_of(name)
        for sample in given[:: max(1, len(given) // 100)]:
            for placements in _placed(sample):
                _run(name, sample, placements)
        for plan, kernel, issued in seen.runs:
            counted.add(kernel.run)
            wrong += _problems(plan, kernel, issued)
        seen.runs.clear()
    dt.dispatch.dispatcher.clear_plans()
    assert wrong == []
    assert len(counted) > 50, len(counted)


def _problems(plan: CallPlan, kernel: Kernel, issued: list[events.Event]) -> Iterator[str]:
    name = plan.call.func._schema.name
    of_count, of_bytes = DATA_DECIDE.get(name, (EXACTLY, EXACTLY))
    declared, received = kernel.nbytes(plan.call), sum(event.bytes for event in issued)
    told = [(event.kind, event.bytes) for event in issued]
    if not of_count(kernel.collectives, len(issued)):
        yield f"{plan.call}: {kernel.collectives} collectives declared, issued {told}"
    elif math.prod(plan.call.shape(0)) and not of_bytes(declared, received):
        yield f"{plan.call}: {declared} bytes declared, issued {told}"


def test_the_call_that_a_kernel_sees_tells_no_number_of_another_call() -> None:
    """A plan serves calls that differ in their numbers: the kernel's arguments are this call's, ``at.call`` the first one's."""

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
