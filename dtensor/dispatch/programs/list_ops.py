"""List operators: local functions of foreach and fused operators, and lists with elements that share memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...base.caches import memoize
from ...base.recorder_hooks import ACTIVE_RECORDERS
from ...base.torch_internals import count_dispatch_modes
from ...base.tracing import is_traced
from ...propagation.op_schema import OperatorSchema
from ...propagation.propagate import CallPlan
from ...ranks.per_rank import shards_of
from ...state.shared_memory import memory_state_of
from ...state.wrap import write_value
from .frame import Args, Keywords

_SCALAR_DTYPES = (torch.float32, torch.float64)  # kernels in half precision compute with the scalar in single precision


# --- foreach operators with scalars -------------------------------------------------------------------------------------
def convert_scalars_once(plan: CallPlan, operator: OperatorSchema, func: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``func``, a foreach operator with scalars (``_foreach_mul_(list, 0.9)``), to make one tensor of a scalar on a CPU.

    For every element torch makes a tensor of the scalar and converts it to the element's dtype. Made once, in that dtype, the
    tensor gives the same bits in a third of the time, and an optimizer step has several such operators. Other devices do a whole
    list at once, so ``func`` itself is returned for them.
    """
    if not operator.traits.takes_tensors or plan.call.mesh.device_type != "cpu":
        return func
    scalars = plan.call.arguments[operator.names[1]]
    dtypes = {layout.dtype for layout in plan.call.operands if layout is not None}
    are_floats = all(type(scalar) is float for scalar in (scalars if isinstance(scalars, (list, tuple)) else [scalars]))
    if not are_floats or len(dtypes) != 1 or not dtypes <= set(_SCALAR_DTYPES):
        return func
    (dtype,) = dtypes

    def run_with_tensors(elements: list[Tensor], scalars: Any) -> Any:
        """Call the operator with the scalars as tensors, unless a recording, a mode or a graph must keep the numbers."""
        # recordings and graphs keep the scalars, which may be symbols; tensors made under a dispatch mode are no plain tensors
        keep = ACTIVE_RECORDERS or count_dispatch_modes() or is_traced(elements[0])
        return func(elements, scalars if keep else _make_scalar_tensors(scalars, len(elements), dtype))

    return run_with_tensors


def _make_scalar_tensors(scalars: Any, count: int, dtype: torch.dtype) -> list[Tensor]:
    """Return numbers of a foreach operator as 0-d tensors; equal numbers share one."""
    if type(scalars) is not float:
        if not scalars[0] or scalars.count(scalars[0]) != count:  # 0.0 == -0.0
            return list(torch.tensor(scalars, dtype=dtype, device="cpu").unbind())
        scalars = scalars[0]
    return [_cached_scalar_tensor(scalars, dtype) if scalars else torch.tensor(scalars, dtype=dtype, device="cpu")] * count


@memoize(256)
def _cached_scalar_tensor(scalar: float, dtype: torch.dtype) -> Tensor:
    """Return the cached 0-d tensor of a scalar that is not zero, such as a weight decay; no operator writes to it."""
    return torch.tensor(scalar, dtype=dtype, device="cpu")


# --- fused operators ----------------------------------------------------------------------------------------------------
def match_list_strides(operator: OperatorSchema) -> Callable[..., Any]:
    """Wrap a fused operator, whose CPU kernel reads lists as flat memory, so that it takes elements of any strides.

    Tensors with other strides than those of the first list are copied before, and copied back if they were written to.
    """
    func, is_written = operator.func, [name in operator.mutated for name in operator.names]

    def run_with_equal_strides(*local_args: Any, **local_kwargs: Any) -> Any:
        """Run the function on copies of elements with other strides than the first list's, and write results back."""
        copied: list[tuple[Any, Any]] = []  # written tensors and their copies
        first = local_args[0]
        if not _all_match([arg for arg in local_args if isinstance(arg, list)]):
            for k, elements in enumerate(local_args):
                if isinstance(elements, list):
                    pairs = _copy_mismatched(elements, first, k == 0)
                    copied += pairs if is_written[k] else []
        result = func(*local_args, **local_kwargs)
        for x, copy in copied:
            write_value(x, copy)
        return result

    return run_with_equal_strides


def _copy_mismatched(elements: list[Any], first: list[Any], is_first: bool) -> list[tuple[Any, Any]]:
    """Replace elements of a list, in place, by copies if their strides do not match; return pairs of element and copy."""
    copied = []
    for i, (x, like) in enumerate(zip(elements, first, strict=False)):
        if not (all(map(_is_dense, shards_of(x))) if is_first else all(map(_has_strides_of, shards_of(x), shards_of(like)))):
            elements[i] = torch.empty_like(like, dtype=x.dtype).copy_(x)
            copied.append((x, elements[i]))
    return copied


def _all_match(lists: list[list[Any]]) -> bool:
    """Return True if a quick look shows that all lists have the strides of the first; step counts have none.

    False may be wrong: :func:`_copy_mismatched` compares element by element.
    """
    if {*map(type, chain.from_iterable(lists))} != {torch.Tensor} or not all(map(torch.Tensor.is_contiguous, lists[0])):
        return False
    strides = list(map(torch.Tensor.stride, lists[0]))
    return all((own := list(map(torch.Tensor.stride, elements))) == strides or not any(own) for elements in lists[1:])


def _is_dense(x: torch.Tensor) -> bool:
    """Return True if the memory of ``x`` has no gaps, as that of a slice of rows has."""
    return x.numel() < 2 or x.stride() == torch.empty_like(x).stride()


def _has_strides_of(x: torch.Tensor, first: torch.Tensor) -> bool:
    return x.shape != first.shape or x.stride() == first.stride() or x.numel() < 2


# --- elements that share memory -----------------------------------------------------------------------------------------
def has_aliased_elements(operator: OperatorSchema, args: Args, kwargs: Keywords) -> bool:
    """Return True if two elements of a call's lists share memory, as a tensor and its view, and one of them is written to."""
    first: dict[int, int] = {}  # by memory: the index of the first element with it
    written: set[int] = set()
    aliased: set[int] = set()
    for name, values in operator.bind(args, kwargs).items():
        for index, x in enumerate(values if isinstance(values, (list, tuple)) else ()):
            if isinstance(x, torch.Tensor):
                memory = id(memory_state_of(x))
                if first.setdefault(memory, index) != index:
                    aliased.add(memory)
                if name in operator.mutated:
                    written.add(memory)
    return not written.isdisjoint(aliased)


def run_per_element(operator: OperatorSchema, args: Args, kwargs: Keywords) -> None:
    """Call a list operator that returns nothing once for each element of its lists, in order."""
    count = max(len(x) for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple)))

    def select(index: int, x: Any) -> Any:
        return x[index : index + 1] if isinstance(x, (list, tuple)) and len(x) == count else x

    for k in range(count):
        operator.func(*[select(k, x) for x in args], **{name: select(k, x) for name, x in kwargs.items()})
