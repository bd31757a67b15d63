"""The local part of list operators that take numbers (``_foreach_mul_(list, 0.9)``), on a CPU.

For every element torch makes a tensor of the number and converts it to the element's dtype. Made once, in that dtype, it gives
the same bits in a third of the time, and an optimizer's step has several such operators. Other devices do a whole list at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base.caches import remembered
from ..base.recorder_hooks import ACTIVE
from ..base.torch_internals import count_dispatch_modes
from ..base.tracing import is_traced
from ..propagation.op_schema import Operator
from ..propagation.propagate import Plan

_CONVERTED = (torch.float32, torch.float64)  # in half precision the kernels compute with the number in single


def with_numbers_once(plan: Plan, operator: Operator, func: Callable[..., Any]) -> Callable[..., Any]:
    """``func``, the local function of ``operator``, or a form of it that makes a tensor of its numbers first."""
    if not operator.facts.takes_tensors or plan.call.mesh.device_type != "cpu":
        return func
    numbers = plan.call.arguments[operator.names[1]]
    dtypes = {layout.dtype for layout in plan.call.operands if layout is not None}
    floats = all(type(number) is float for number in (numbers if isinstance(numbers, (list, tuple)) else [numbers]))
    if not floats or len(dtypes) != 1 or not dtypes <= set(_CONVERTED):
        return func
    (dtype,) = dtypes

    def run(tensors: list[Tensor], numbers: Any) -> Any:
        # recordings and graphs keep the numbers, which may be symbols; what is made under somebody's mode is no plain tensor
        kept = ACTIVE or count_dispatch_modes() or is_traced(tensors[0])
        return func(tensors, numbers if kept else _tensors(numbers, len(tensors), dtype))

    return run


def _tensors(numbers: Any, count: int, dtype: torch.dtype) -> list[Tensor]:
    if type(numbers) is not float:
        if not numbers[0] or numbers.count(numbers[0]) != count:  # 0.0 == -0.0
            return list(torch.tensor(numbers, dtype=dtype, device="cpu").unbind())
        numbers = numbers[0]
    return [_known(numbers, dtype) if numbers else torch.tensor(numbers, dtype=dtype, device="cpu")] * count


@remembered(256)
def _known(number: float, dtype: torch.dtype) -> Tensor:
    """One that is not zero: a decay is the same at every step. Nobody writes to it."""
    return torch.tensor(number, dtype=dtype, device="cpu")
