"""``x.backward()``: a number's own gradient is 1, so torch is not asked to make it by an operator."""

from __future__ import annotations

from typing import Any

import torch

from ..base.torch_internals import count_dispatch_modes, count_function_modes, functorch_active, run_backward
from ..dispatch.wrap import wrap_local

_ONE = torch.Size(())


def backward(
    x: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Compute the gradients of the leaves that this value depends on, and add them to their ``.grad``: as
    ``torch.Tensor.backward`` does, whose arguments these are.

    ``gradient`` (the same global shape; of a number 1 by default) may have any layout. Each leaf's gradient is communicated
    to the leaf's layout, besides what the operators' own gradients communicate.

    Raises:
        RuntimeError: what torch raises, on all ranks: no gradient can be computed, or the graph is gone.

    >>> import dtensor as dt
    >>> x = dt.ones(3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]).requires_grad_()
    >>> (x * 2).sum().backward()
    >>> x.grad.full_tensor(), x.grad.placements
    (tensor([2., 2., 2.]), (Shard(dim=0),))
    """
    known = gradient is None and inputs is None and x.requires_grad and _is_replicated_scalar(x._layout)
    if not known or count_dispatch_modes() or count_function_modes() or functorch_active():
        torch.Tensor.backward(x, gradient, retain_graph, create_graph, inputs)
        return
    root = wrap_local(torch.ones_like(x._local), x._layout)
    keep = create_graph if retain_graph is None else retain_graph
    run_backward((x,), (root,), keep, create_graph, (), allow_unreachable=True, accumulate_grad=True)


def _is_replicated_scalar(layout: Any) -> bool:
    """Whether it is one of every rank's."""
    return layout.shape == _ONE and layout.dtype.is_floating_point and layout.is_replicated
