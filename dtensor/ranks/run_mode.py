"""Run mode: the torch function mode that sees the calls of one rank's run of a function, see ``rank_runs``.

It also has the messages for calls that ``torch.compile`` cannot compile. Dynamo traces the mode with the functions that it
compiles, so it must not skip this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..base import torch_internals

NOT_COMPILED = (
    "tensors of each rank are not compiled into one graph. A function that needs one (flex_attention) runs per rank: "
    "dtensor.map_ranks(lambda at, q, k, v: flex_attention(q, k, v), q, k, v, mesh=mesh), also inside a function of local_map"
)
_GRADIENTS_NOT_COMPILED = (
    "torch.compile inside map_ranks, of tensors that require gradients: the gradients of plain tensors would be the sum over "
    "ranks; call the compiled function outside of map_ranks, or under torch.no_grad()"
)


class RunMode(TorchFunctionMode):
    """Mode that calls ``follow(func, args, kwargs)`` for each torch function, except in calls that are being compiled."""

    def __init__(self, follow: Callable[..., Any]) -> None:
        super().__init__()
        self._follow = follow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass a torch function to ``follow``; in a call that is being compiled, run it, or break the graph for gradients."""
        if torch.compiler.is_dynamo_compiling():
            if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
                torch_internals.graph_break(msg=_GRADIENTS_NOT_COMPILED)
            return func(*args, **(kwargs or {}))
        return self._follow(func, args, kwargs or {})
