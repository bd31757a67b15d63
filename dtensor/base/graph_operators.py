"""Graph operators: operators of ``torch.ops.dtensor`` by which a compiled program does what a compiler cannot trace.

A compiler that traced eager collectives, random draws or checks would run them once, without data, and leave them out of its
graph. Instead they are calls of these operators. An operator is completed when it returns.

[Note: Collectives are effects in a graph]
Each rank must issue the collectives of a program once, in program order. Compilers drop operators without an effect and without
a use, and a rank may not use its result (the first rank of a cumulative sum). They keep operators with an effect, but copy a
part of the forward pass into the backward pass, with collectives such as ``wait_tensor``. Which part depends on sizes, which
differ between uneven shards. So these operators are registered as ordered effects, which torch neither drops nor copies nor
exchanges. Random draws are ordered effects too: each rank advances its generator equally, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch

from . import torch_internals
from .patches import patch_applied
from .symbolic_sizes import to_torch_symbols

_LIBRARY = torch.library.Library("dtensor", "FRAGMENT")
_PROXY_MODE_KEY = torch_internals.DISPATCH_MODE_KEYS.PROXY
# by tracer of a graph: the last result in the forward and in the backward pass
_LAST_RESULTS: WeakKeyDictionary[Any, dict[bool, Any]] = WeakKeyDictionary()


class GraphOperator:
    """Operator of ``torch.ops.dtensor`` with an ordered effect. It is defined at its first call.

    Args:
        name: of the operator.
        parameters: of its schema. A last one, ``Tensor? after=None``, is added; the result is a tensor.
        run: computes the result when the graph runs.
        make_empty: returns an empty tensor with shape and dtype of the result, at tracing.
    """

    def __init__(self, name: str, parameters: str, run: Callable[..., Any], make_empty: Callable[..., Any]) -> None:
        self.name, self.parameters, self.run, self.make_empty = name, parameters, run, make_empty

    def add_to_graph(self, *args: Any) -> Any:
        """Add a call to the traced graph, ordered after the last call of a graph operator, and return its result.

        The operator also gets the result of the last one: inductor of torch 2.13 does not keep the order of effects, and orders
        them by their operands, which differ between ranks. The backward pass starts a new chain: else it would save the last
        result of the forward pass only for this.
        """
        operator, args = self._operator, to_torch_symbols(args)
        mode = torch_internals.infra_mode(_PROXY_MODE_KEY)
        if mode is None:
            return operator(*args)
        nodes = mode.tracer.graph.nodes
        last = _LAST_RESULTS.setdefault(mode.tracer, {})
        is_backward = torch_internals.graph_task() >= 0
        before = len(nodes)
        last[is_backward] = result = operator(*args, after=last.get(is_backward))
        for node in islice(reversed(nodes), len(nodes) - before):
            node.meta = _MustSaveMeta(node.meta)
        return result

    @cached_property
    def _operator(self) -> Any:
        """The operator, registered with torch at the first use."""

        count = len(self.parameters.split(","))  # of the arguments before ``after``, which torch may pass by position

        def ignore_after(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, after=None: function(*args[:count])

        _LIBRARY.define(f"{self.name}({self.parameters}, Tensor? after=None) -> Tensor")
        _LIBRARY.impl(self.name, ignore_after(self.run), "CompositeExplicitAutograd")
        torch.library.register_fake(f"dtensor::{self.name}", ignore_after(self.make_empty), lib=_LIBRARY)
        _LIBRARY._register_effectful_op(f"dtensor::{self.name}", torch_internals.EffectType.ORDERED)
        patch_applied("torch.ops.dtensor")
        return getattr(torch.ops.dtensor, self.name)


class _MustSaveMeta(dict[str, Any]):
    """The metadata of a graph node with a result that must be saved.

    Activation checkpointing marks all nodes of a block to be recomputed. Ranks would then issue the collective twice, and not
    all of them.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, torch_internals.CheckpointPolicy.MUST_SAVE if key == "recompute" else value)
