"""``explain``: what a program on DTensors would move, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..base.torch_internals import OpOverload, TorchDispatchMode, tree_leaves
from ..dispatch.operands import plan_for
from ..dispatch.report import describe
from ..layout.layout import Layout
from ..propagation.propagate import Plan
from ..propagation.schema import operator_of
from ..tensor.dtensor import DTensor


@dataclass(frozen=True, slots=True)
class Line:
    """One operation: its name, how it was served, the layouts in and out, and what it moves."""

    name: str
    how: str
    operands: tuple[Layout, ...]
    results: tuple[Any, ...]
    moves: str
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        into = ", ".join(map(repr, self.operands))
        outof = ", ".join(repr(layout) for layout in self.results if layout is not None)
        return f"{self.name}: {into} -> {outof}" + (f"\n{self.moves}" if self.moves else "")


@dataclass(frozen=True, slots=True)
class Explanation:
    """All operations of a run, in order. ``str`` lists those that communicate; ``lines`` has them all."""

    lines: tuple[Line, ...]
    result: Any

    @property
    def nbytes(self) -> int:
        """Bytes that one rank receives in redistributions (kernels' own collectives are counted by ``CommDebugMode``)."""
        return sum(line.nbytes for line in self.lines)

    @property
    def seconds(self) -> float:
        """Estimated time of these redistributions."""
        return sum(line.seconds for line in self.lines)

    def __str__(self) -> str:
        moving = [line for line in self.lines if line.moves]
        head = (
            f"{len(self.lines)} operations, {len(moving)} of them communicate: "
            f"{self.nbytes} bytes received per rank, about {self.seconds:.2e} s"
        )
        return "\n".join([head, *map(str, moving)])

    __repr__ = __str__


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run ``fn(*args, **kwargs)`` and tell, for each operation on DTensors, what its plan moves, how much, and why.

    Operations are what torch dispatches. Left out is what moves outside of them: explicit ``redistribute`` and ``full_tensor``,
    what the styles of ``dtensor.parallel`` move at the boundaries of modules, fully sharded and replicated modules, and
    gradients that are brought to the layout of their leaf. :class:`dtensor.debug.CommDebugMode` counts all of these.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> x = dt.ones(4, 6, device_mesh=mesh, placements=[dt.Shard(1)])
    >>> print(dt.explain(lambda x: (x @ x.t()).relu(), x).lines[-1].name)
    aten::relu
    """
    with _Recorder() as recorder:
        result = fn(*args, **kwargs)
    return Explanation(tuple(recorder.lines), result)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))) and isinstance(func, OpOverload):
            operator = operator_of(func)
            self.lines.append(_line(operator.name, plan_for(operator, args, kwargs)))
        return func(*args, **kwargs)


def _line(name: str, plan: Plan) -> Line:
    moves = [move for _, move in (*plan.moves, *plan.write_back) if move.communicates]
    kernel = None if plan.chosen is None else plan.chosen.kernel_row
    text = describe(plan) if moves or kernel is not None or plan.how == "gather" else ""
    return Line(
        name,
        plan.how,
        plan.call.operands,
        plan.results,
        text,
        sum(move.bytes for move in moves),
        sum(move.cost for move in moves),
    )
