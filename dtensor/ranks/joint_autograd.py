"""Torch functions over ``PerRank`` tensors that do not simply run once per rank: autograd passes, and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..base.generators import default_generator, go_to, state_now
from ..base.torch_internals import DisableTorchFunctionSubclass, custom_function_call, functorch_active, make_dual
from .functorch import EachRank
from .per_rank import _JOINT, PerRank, over_ranks
from .rank_values import RankValues


# --- autograd runs once for all ranks: their graphs may meet in a collective or in a shared tensor ----------------------
def flat(values: Any) -> list[Any]:
    """Return the tensors and gradient edges in ``values``, each rank's own one after the other."""
    return [] if values is None else [own for value in _listed(values) for own in _each_rank(value)]


def _listed(values: Any) -> Sequence[Any]:
    return (values,) if isinstance(values, (Tensor, GradientEdge)) else tuple(values)


def _each_rank(value: Any) -> Sequence[Any]:
    """Return what each rank has of a tensor or gradient edge; one that all have by itself."""
    if isinstance(value, PerRank):
        return value.shards
    if isinstance(value, GradientEdge) and isinstance(value.node, RankValues):
        return [GradientEdge(node, value.output_nr) for node in value.node]
    return (value,)


def _flat_grads(roots: Any, grads: Any) -> list[Any] | None:
    """One gradient for each root tensor: a plain one (or None) goes to every rank of its root."""
    if grads is None:
        return None
    roots, grads = _listed(roots), (grads,) if grads is None or isinstance(grads, Tensor) else tuple(grads)
    flat: list[Any] = []
    for root, grad in zip(roots, grads, strict=True):
        count = len(_each_rank(root))
        flat.extend(grad.shards if isinstance(grad, PerRank) else [grad] * count)
    return flat


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    grads = _flat_grads(tensors, grad_tensors if grad_variables is None else grad_variables)
    torch.autograd.backward(flat(tensors), grads, retain_graph, create_graph, inputs=None if inputs is None else flat(inputs))


def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    inputs = _listed(inputs)
    found = iter(torch.autograd.grad(flat(outputs), flat(inputs), _flat_grads(outputs, grad_outputs), *args, **kwargs))
    own = ([next(found) for _ in _each_rank(x)] for x in inputs)
    return tuple(
        merged(grads, getattr(x, "shards", None)) if len(grads) > 1 or isinstance(x, PerRank) else grads[0]
        for x, grads in zip(inputs, own, strict=True)
    )


def merged(own: Sequence[Any], like: Sequence[Tensor] | None = None) -> PerRank | None:
    """Ranks' tensors as one, None where no rank has any; where only some have none nothing flowed: zeros as ``like`` has."""
    some = next((x for x in own if x is not None), None)
    if some is None:
        return None
    return PerRank(torch.zeros_like(some if like is None else like[k]) if x is None else x for k, x in enumerate(own))


def _make_dual(x: Any, tangent: Any, *level: Any, **named: Any) -> Any:
    """With a tangent: under ``torch.func.jvp`` one tensor that hides all ranks', as under ``grad``; ragged ones stay apart."""
    if functorch_active() and len({shard.shape for value in (x, tangent) for shard in flat([value])}) == 1:
        with DisableTorchFunctionSubclass():
            return make_dual(x, tangent, *level, **named)
    return over_ranks(make_dual, (x, tangent, *level), named)


def _custom_function(function: Any, *args: Any) -> Any:
    """``Function.apply`` inside of a transform: of :class:`EachRank` what is all ranks' tensors as one is apart again."""
    return args[0].shards if function is EachRank else over_ranks(custom_function_call, (function, *args), {})


# --- random numbers: ranks that are processes start alike and draw alike ----------------------------------------------------
def _drawn(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``func`` with each rank drawing from the generator as it is now; it goes on from where the first rank left it."""
    generator = kwargs.get("generator")
    if generator is None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, PerRank)), None)
        generator = default_generator(torch.device("cpu") if x is None else x.shards[0].device)
    before: Tensor = state_now(generator)
    after: list[Tensor] = []

    def one(*own: Any, **named: Any) -> Any:
        if after:
            go_to(generator, before)
        result = func(*own, **named)
        if not after:
            after.append(state_now(generator))
        return result

    one.__name__ = func.__name__
    try:
        return over_ranks(one, args, kwargs)
    finally:
        if after:
            go_to(generator, after[0])


_DRAWING = """
    alpha_dropout bernoulli bernoulli_ binomial cauchy_ dropout dropout1d dropout2d dropout3d dropout_ exponential_
    feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d geometric_ gru gumbel_softmax
    kaiming_uniform_ log_normal_ lstm multi_head_attention_forward multinomial native_dropout normal normal_ poisson
    rand rand_like randint randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu rrelu_
    scaled_dot_product_attention uniform_
"""
_PLACES = (torch, torch.Tensor, nn.functional, nn.init)

_JOINT.update({torch.autograd.backward: _backward, torch.autograd.grad: _grad, make_dual: _make_dual})
_JOINT[custom_function_call] = _custom_function
_JOINT.update(
    {
        getattr(place, name): partial(_drawn, getattr(place, name))
        for name in _DRAWING.split()
        for place in _PLACES
        if hasattr(place, name)
    }
)
