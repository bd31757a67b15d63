"""Folds: reductions along sharded dims, by a state of each block, one all-reduce of the states, and a final step on each rank.

A fold computes with blocks of the dims in brackets. Its parts are mathematics on plain tensors, independent of ranks. Its cost
follows from the state: its numbers for each element that is left after the reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..base.symbolic_sizes import to_torch_symbols
from ..comm.local_reduce import reduce_pairwise, reduction_identity
from ..layout.layout import Layout
from ..placement import Monoid, Partial
from .bind_pattern import Reduction, factors_of_pattern
from .call import Call
from .declared_factors import by, fitting
from .kernel_context import At, KernelContext, schema_argument_names
from .notation import Pattern
from .rule import Declaration, Kernel, R

ALONG_PATTERN = "each: a* [@dim] b* -> each: a* [@dim] b*"
REDUCED_PATTERN = "a* [@dim] b* -> each: a* b*"


@dataclass(frozen=True, slots=True)
class ReduceInPairs:
    """Combine states of several numbers, stacked along dim 0, in pairs.

    ``combine`` distinguishes numbers (dim 0 of a state), but not elements.
    """

    combine: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, stack: Tensor) -> Tensor:
        """Reduce the states in dim 0 of ``stack`` to one, by combining pairs of them."""
        return reduce_pairwise(self.combine, stack.movedim(0, 1), 1)


class FoldContext:
    """The facts of the call that the parts of a fold get beside a block of each tensor.

    Attributes:
        dims: the folded tensor dims (of operand 0). A state has them with size one.
        dtype: the dtype of the state, to which floating blocks are converted.
    """

    __slots__ = ("_arguments", "_member", "_plan", "dims", "dtype")

    def __init__(self, plan: _FoldPlan, member: int, arguments: Mapping[str, Any]) -> None:
        self._plan, self._member, self._arguments = plan, member, arguments
        self.dims, self.dtype = plan.dims, plan.dtype

    def __getitem__(self, name: str) -> Any:
        """Return an argument of this call, or None if the call does not give it."""
        return self._arguments.get(name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape of operand 0, as numbers that tensors can be multiplied by."""
        return tuple(to_torch_symbols(self._plan.folded.shape))

    @property
    def count(self) -> int:
        """The number of global elements that the fold reduces to one."""
        return self._plan.count

    @property
    def offsets(self) -> tuple[int, ...]:
        """The global position of the first element of operand 0's block, as numbers that tensors can be added to."""
        layout = self._plan.folded
        return tuple(to_torch_symbols(layout.local_offset(layout.mesh.coordinates[self._member])))


@dataclass(frozen=True, slots=True)
class Fold(Declaration):
    """A fold: the state of a block, a monoid that combines states in one collective, and the final step.

    ``block(part, *blocks)`` returns the *state* of a block of each operand, in which dims ``part.dims`` have size one. ``monoid``
    combines states. ``finish(part, *blocks, *state)`` returns the results. ``part["name"]`` is an argument of the call.

    Args:
        block: returns the state. Blocks without elements count as the identity.
        monoid: a reduction's name, a :class:`Monoid`, or a function of the call that returns one.
        finish: the final step. None: states are addends of the result, and nothing is communicated. For a Python value it gets
            the state, a number.
        numbers: how many tensors ``block`` returns, a tuple if several.
        dtype: dtype of the state, to which floating blocks are converted. Default: that of the result, at least float32.
        pattern: the notation with the folded dims in brackets. Registration sets it.

    >>> Fold(lambda part, x: x.exp().sum(part.dims, keepdim=True), "sum", lambda part, x, total: x.exp() / total).numbers
    1
    """

    block: Callable[..., Any]
    monoid: Reduction | Callable[[Call], Reduction]
    finish: Callable[..., Any] | None = None
    numbers: int = 1
    dtype: torch.dtype | None = None
    pattern: Pattern | by | fitting | None = None

    def __call__(self, at: KernelContext, *args: Any, **kwargs: Any) -> Any:
        """Reduce each rank's block to a state, all-reduce the states, and return each rank's results."""
        if "fold" not in at.cache:
            at.cache["fold"] = _FoldPlan.make(self, at)
        plan: _FoldPlan = at.cache["fold"]
        arguments = dict(zip(plan.names, args, strict=False)) | kwargs
        blocks = [plan.to_state_dtype(arguments[name]) for name in plan.tensors]
        contexts: dict[int, FoldContext] = {}

        def state_of(here: At, *blocks: Tensor) -> Tensor:
            context = contexts[here.member] = FoldContext(plan, here.member, arguments)
            return self.block_state(context, plan, *blocks)

        state = at.map(state_of, *blocks)
        if self.finish is not None:
            state = at.all_reduce(state, plan.monoid)
        if not plan.results and self.finish is not None:
            return self.finish(state.item())

        def finish_block(here: At, state: Tensor, *blocks: Tensor) -> Any:
            """Compute the results of one rank from its blocks and the combined state."""
            if self.finish is None:
                return plan.shape_results(here.member, (state,))
            numbers = (state,) if self.numbers == 1 else state.unbind(0)
            value = self.finish(contexts[here.member], *blocks, *numbers)
            return plan.shape_results(here.member, value if isinstance(value, tuple) else (value,))

        return at.map(finish_block, state, *blocks)

    def block_state(self, part: FoldContext, plan: _FoldPlan, *blocks: Tensor) -> Tensor:
        """Return the state of one rank's block. For an empty block it is the identity of the monoid."""
        first = blocks[0]
        if all(map(torch.numel, blocks)):
            block_state = self.block(part, *blocks)
            if self.numbers > 1:
                return torch.stack([x if x.dtype is plan.dtype else x.to(plan.dtype) for x in block_state])
            state: Tensor = block_state if block_state.ndim == first.ndim else block_state.reshape(plan.state_shape(first))
            return state
        shape = plan.state_shape(first)
        shape = shape if self.numbers == 1 else [self.numbers, *shape]
        return reduction_identity(plan.monoid, first.new_empty(shape, dtype=plan.dtype))

    def make_kernel(self, pattern: Pattern | by | fitting) -> Kernel:
        """Return the fold as a kernel for the factors in brackets of a notation, with its communication costs."""
        bound_fold = replace(self, pattern=pattern)
        if self.finish is None:
            assert isinstance(self.monoid, (str, Monoid))
            return Kernel(bound_fold, Partial(self.monoid), joint=True)
        return Kernel(bound_fold, R, collectives=1, nbytes=bound_fold.nbytes, joint=True)

    def nbytes(self, call: Call) -> int:
        """Return the bytes of one rank's state, which the all-reduce sends."""
        shape, dims = call.shape(0), _folded_dims(self.pattern, call)
        rows = math.prod(size for d, size in enumerate(shape) if d not in dims)
        return rows * self.numbers * _state_dtype(self, call).itemsize


def _state_dtype(fold: Fold, call: Call) -> torch.dtype:
    """Return the dtype of a fold's state: the declared one, else that of the result but at least float32."""
    if fold.dtype is not None:
        return fold.dtype
    result = next((meta for meta in call.results if meta is not None), None)
    return torch.promote_types(call.operands[0].dtype if result is None else result.dtype, torch.float32)


def _folded_dims(pattern: Pattern | by | fitting | None, call: Call) -> tuple[int, ...]:
    """Return the dims of operand 0 that the notation has in brackets, over which the fold reduces."""
    chosen: Any = pattern(call) if isinstance(pattern, (by, fitting)) else pattern
    factors = factors_of_pattern(chosen, call, None)
    assert factors is not None  # otherwise the kernel would not run
    return tuple(d for d, dim in enumerate(factors.operands[0]) if not factors.unsharded.isdisjoint(dim))


@dataclass(frozen=True, slots=True)
class _FoldPlan:
    """The facts that a fold computes once for all runs of a plan."""

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype
    monoid: Reduction
    folded: Layout  # operand 0
    count: int
    results: tuple[Layout, ...]
    shapes: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict, compare=False)  # result shapes, by rank

    @classmethod
    def make(cls, fold: Fold, at: KernelContext) -> _FoldPlan:
        """Compute the constants of a fold for one dispatch plan: folded dims, monoid, state dtype, results."""
        call = at.call
        given = tuple(dict.fromkeys(name for i, name in enumerate(call.names) if i not in call.fixed_operands))
        monoid = fold.monoid if isinstance(fold.monoid, (str, Monoid)) else fold.monoid(call)
        results = tuple(layout for layout in at.results if layout is not None)
        folded, dims = at.operands[0], _folded_dims(fold.pattern, call)
        count = math.prod([folded.shape[d] for d in dims])
        return cls(at.compute_once(schema_argument_names), given, dims, _state_dtype(fold, call), monoid, folded, count, results)

    def state_shape(self, block: Tensor) -> list[int]:
        """Return the shape of one number of the state of an operand-0 block: folded dims have size one."""
        return [1 if d in self.dims else size for d, size in enumerate(block.shape)]

    def to_state_dtype(self, block: Tensor) -> Tensor:
        return block if block.dtype is self.dtype or not self.dtype.is_floating_point else block.to(self.dtype)

    def shape_results(self, member: int, values: tuple[Tensor, ...]) -> Any:
        """Convert one rank's results to the dtypes and local shapes of the result layouts."""
        shapes = self.shapes.get(member)
        if shapes is None:
            shapes = tuple([layout.shape_of(member) for layout in self.results])
            self.shapes[member] = shapes
        results = []
        for value, shape, layout in zip(values, shapes, self.results, strict=True):
            value = value if value.shape == shape else value.reshape(shape)
            results.append(value if value.dtype is layout.dtype else value.to(layout.dtype))
        return results[0] if len(results) == 1 else tuple(results)


@dataclass(frozen=True, slots=True)
class DtypeRestrictedKernel(Declaration):
    """A kernel for first operands of certain dtypes. Other operands are passed to the operator itself, which may refuse them."""

    kernel: Kernel
    takes: str

    def __call__(self, call: Call) -> Kernel | None:
        return self.kernel if _ACCEPTS[self.takes](call.operands[0].dtype) else None


_ACCEPTS: dict[str, Callable[[torch.dtype], bool]] = {
    "floating": lambda dtype: dtype.is_floating_point,
    "real": lambda dtype: not dtype.is_complex,
    "numbers": lambda dtype: dtype is not torch.bool,
}
