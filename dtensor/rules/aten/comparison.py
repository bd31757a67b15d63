"""Questions about tensors whose answer is a Python value, the same on every rank: ``.item()``, ``equal``, ``is_same_size``."""

from __future__ import annotations

from typing import Any

import torch

from ..call import Call
from ..kernels import KernelContext
from ..registry import register
from ..rule import Factors, Kernel, Rule


def one_element(call: Call) -> Factors:
    """The value itself, whole on every rank."""
    return Factors((((),) * len(call.shape(0)),), (), {})


register("_local_scalar_dense", Rule(one_element, kind="whole", source="1 ->"))


def equal_blocks(at: KernelContext, x: Any, y: Any) -> bool:
    """All blocks are equal."""
    same = at.map(lambda _, a, b: torch.tensor(torch.equal(a, b), device=a.device), x, y)
    return bool(at.all_reduce(same, "min").item())


def equal_factors(call: Call) -> Factors:
    shape = call.shape(0)
    dims = tuple((f"d{d}",) for d in range(len(shape)))
    sizes = {f"d{d}": size for d, size in enumerate(shape)}
    return Factors(
        (dims, dims),
        (),
        sizes,
        kernels=dict.fromkeys(sizes, Kernel(equal_blocks, collectives=1, nbytes=lambda call: 1, joint=True)),
    )


def unequal_shapes(call: Call) -> Any:
    return NotImplemented if call.shape(0) == call.shape(1) else False


register("equal", Rule(equal_factors, answer=unequal_shapes, absent=True, kind="kernel", source="..., ... ->"))
register(
    "is_same_size",
    Rule(
        lambda call: None,
        answer=lambda call: call.shape(0) == call.shape(1),
        kind="answer",
        plain=("self", "other"),
        source="shapes",
    ),
)


def memory_of_one_length(call: Call) -> bool:
    """Whether two tensors span as many elements of memory (forward AD asks whether a tangent can lie as its primal does)."""
    spans = [1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride, strict=True)) for x in call.operands[:2] if x.numel]
    return len(spans) != 1 and len(set(spans)) <= 1


register("_has_same_storage_numel", Rule(lambda call: None, answer=memory_of_one_length, kind="answer", source="shapes, strides"))
