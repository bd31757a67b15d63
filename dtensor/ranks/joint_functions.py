"""Joint functions over ``PerRank`` tensors, which run once for all ranks: autograd passes, random functions, and sizes.

Functions of autograd nodes are joint too. All other functions run once per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.autograd.graph
import torch.utils.module_tracker
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ..base.generators import default_generator, get_generator_state, set_generator_state
from ..base.patches import patch_applied, patch_removed
from ..base.torch_internals import DisableTorchFunctionSubclass, TensorBase, custom_function_call, functorch_active, make_dual
from .per_rank import JOINT_FUNCTIONS, SETUP_HOOKS, PerRank, over_ranks, split_arguments
from .per_rank_functorch import SplitRanks
from .rank_values import RankValues, collapse_if_equal, require_equal


# --- autograd passes: one pass for all ranks, since their graphs may meet in a collective or in a shared tensor ------------
def flatten_ranks(values: Any) -> list[Any]:
    """Return the tensors and gradient edges in ``values``, with those of each rank one after the other."""
    return [] if values is None else [own for value in _as_sequence(values) for own in _values_of_ranks(value)]


def _as_sequence(values: Any) -> Sequence[Any]:
    return (values,) if isinstance(values, (Tensor, GradientEdge)) else tuple(values)


def _values_of_ranks(value: Any) -> Sequence[Any]:
    """Return the tensor or gradient edge of each rank; only ``value`` itself if all ranks share it."""
    if isinstance(value, PerRank):
        return value.shards
    if isinstance(value, GradientEdge) and isinstance(value.node, RankValues):
        return [GradientEdge(node, value.output_nr) for node in value.node]
    return (value,)


def _flatten_grads(roots: Any, grads: Any) -> list[Any] | None:
    """Return one gradient for each flattened root. A plain gradient (or None) is that of each rank of its root."""
    if grads is None:
        return None
    roots, grads = _as_sequence(roots), (grads,) if grads is None or isinstance(grads, Tensor) else tuple(grads)
    flat_grads: list[Any] = []
    for root, grad in zip(roots, grads, strict=True):
        count = len(_values_of_ranks(root))
        flat_grads.extend(grad.shards if isinstance(grad, PerRank) else [grad] * count)
    return flat_grads


def _joint_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Run ``torch.autograd.backward`` once, from the tensors of all ranks."""
    grads = _flatten_grads(tensors, grad_tensors if grad_variables is None else grad_variables)
    torch.autograd.backward(
        flatten_ranks(tensors), grads, retain_graph, create_graph, inputs=None if inputs is None else flatten_ranks(inputs)
    )


def _joint_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Call ``torch.autograd.grad`` on the tensors of all ranks, and merge the gradients of each input."""
    inputs = _as_sequence(inputs)
    flat_grads = iter(
        torch.autograd.grad(flatten_ranks(outputs), flatten_ranks(inputs), _flatten_grads(outputs, grad_outputs), *args, **kwargs)
    )
    grads_by_input = ([next(flat_grads) for _ in _values_of_ranks(x)] for x in inputs)
    return tuple(
        merge_grads(grads, getattr(x, "shards", None)) if len(grads) > 1 or isinstance(x, PerRank) else grads[0]
        for x, grads in zip(inputs, grads_by_input, strict=True)
    )


def merge_grads(grads: Sequence[Any], like: Sequence[Tensor] | None = None) -> PerRank | None:
    """Return the gradients of all ranks as one ``PerRank``, None if no rank has one.

    If only some ranks have a gradient, the others get zeros, with the shape of their tensor in ``like``.
    """
    example = next((x for x in grads if x is not None), None)
    if example is None:
        return None
    return PerRank(torch.zeros_like(example if like is None else like[k]) if x is None else x for k, x in enumerate(grads))


def _joint_make_dual(x: Any, tangent: Any, *level: Any, **named: Any) -> Any:
    """Make a dual tensor. Under ``torch.func.jvp`` it is one wrapped tensor for all ranks, unless shards are ragged."""
    if functorch_active() and len({shard.shape for value in (x, tangent) for shard in flatten_ranks([value])}) == 1:
        with DisableTorchFunctionSubclass():
            return make_dual(x, tangent, *level, **named)
    return over_ranks(make_dual, (x, tangent, *level), named)


def _joint_custom_function(function: Any, *args: Any) -> Any:
    """Run ``Function.apply`` inside a ``torch.func`` transform, once per rank; :class:`SplitRanks` returns the ranks' tensors."""
    return args[0].shards if function is SplitRanks else over_ranks(custom_function_call, (function, *args), {})


# --- random functions: ranks that are processes start with equal generators and draw equal numbers --------------------------
def _run_random(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a random function once per rank, each from one generator state, then restore the state after the first rank."""
    generator = kwargs.get("generator")
    if generator is None:
        x = next((x for x in (*args, *kwargs.values()) if isinstance(x, PerRank)), None)
        generator = default_generator(torch.device("cpu") if x is None else x.shards[0].device)
    state_before: Tensor = get_generator_state(generator)
    states_after: list[Tensor] = []

    def run_rank(*own: Any, **named: Any) -> Any:
        """Run ``func`` for one rank; each rank starts from the generator state that the first had."""
        if states_after:
            set_generator_state(generator, state_before)
        result = func(*own, **named)
        if not states_after:
            states_after.append(get_generator_state(generator))
        return result

    run_rank.__name__ = func.__name__
    try:
        return over_ranks(run_rank, args, kwargs)
    finally:
        if states_after:
            set_generator_state(generator, states_after[0])


_RANDOM_FUNCTIONS = """
    alpha_dropout bernoulli bernoulli_ binomial cauchy_ dropout dropout1d dropout2d dropout3d dropout_ exponential_
    feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d geometric_ gru gumbel_softmax
    kaiming_uniform_ log_normal_ lstm multi_head_attention_forward multinomial native_dropout normal normal_ poisson
    rand rand_like randint randint_like randn randn_like random_ randperm rnn_relu rnn_tanh rrelu rrelu_
    scaled_dot_product_attention uniform_
"""
_RANDOM_NAMESPACES = (torch, torch.Tensor, nn.functional, nn.init)

JOINT_FUNCTIONS.update({torch.autograd.backward: _joint_backward, torch.autograd.grad: _joint_grad, make_dual: _joint_make_dual})
JOINT_FUNCTIONS[custom_function_call] = _joint_custom_function
JOINT_FUNCTIONS.update(
    {
        getattr(place, name): partial(_run_random, getattr(place, name))
        for name in _RANDOM_FUNCTIONS.split()
        for place in _RANDOM_NAMESPACES
        if hasattr(place, name)
    }
)


def _joint_sizes(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function of sizes gives on all ranks, with a ``RankNumber`` for each dim in which ranks differ."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, PerRank):
        return over_ranks(func, args, kwargs)
    sizes = [func(*own, **named) for own, named in split_arguments(args, kwargs, len(x.shards))]
    first = sizes[0]
    if all(value == first for value in sizes):
        return first
    if all(isinstance(value, int) for value in sizes):
        return collapse_if_equal(sizes)
    if len({len(value) for value in sizes}) > 1:
        return over_ranks(func, args, kwargs)  # raises LayoutError: the numbers of dims differ between ranks
    return tuple(map(collapse_if_equal, zip(*sizes, strict=True)))


_SIZE_FUNCTIONS = (vars(TensorBase)["shape"].__get__, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, torch.numel)
JOINT_FUNCTIONS.update({func: partial(_joint_sizes, func) for func in _SIZE_FUNCTIONS})


class RankNodes(RankValues):
    """The autograd nodes of all ranks, in rank order: ``grad_fn`` of a ``PerRank``.

    Attributes and methods are those of each rank's node: nodes are returned as ``RankNodes``, tensors as ``PerRank``.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of all ranks' nodes as one value; a method runs on each rank's node."""
        if name.startswith("__"):
            raise AttributeError(f"nodes of each rank have no {name} of their own")
        values = [getattr(node, name) for node in self]
        return super().__getattr__(name) if all(map(callable, values)) else join_values(values, name)


def join_values(values: Sequence[Any], name: str) -> Any:
    """Return the values of one node attribute on all ranks as one value: nodes, tensors, numbers, and tuples of these."""
    first = values[0]
    if all(value is first for value in values):
        return first
    if all(isinstance(value, Node) for value in values):
        return RankNodes(values)
    if all(isinstance(value, Tensor) for value in values):
        return PerRank(values)
    if all(type(value) is int for value in values):
        return collapse_if_equal(values)
    if all(isinstance(value, tuple) for value in values):
        is_one_length = len({len(value) for value in values}) == 1
        return tuple(join_values(column, name) for column in zip(*values, strict=True)) if is_one_length else RankValues(values)
    kinds = {type(value) for value in values}
    return require_equal(list(values), f"`{name}` of a node of each rank") if len(kinds) == 1 else RankValues(values)


def register_joint_multi_grad_hook(tensors: Sequence[Any], fn: Callable[..., Any], *, mode: str = "all") -> Any:
    """Register a multi-gradient hook once for all ranks: ``fn`` gets one ``PerRank`` gradient for each tensor."""
    if not any(isinstance(x, PerRank) for x in tensors):
        return _TORCH_MULTI_GRAD_HOOK(tensors, fn, mode=mode)  # type: ignore[arg-type]  # torch's stub lists the modes
    counts = [len(x.shards) if isinstance(x, PerRank) else 0 for x in tensors]

    def call_with_merged(grads: Sequence[Tensor | None]) -> None:
        items = iter(grads)
        fn([merge_grads([next(items) for _ in range(count)]) if count else next(items) for count in counts])

    return _TORCH_MULTI_GRAD_HOOK(flatten_ranks(tensors), call_with_merged if mode == "all" else fn, mode=mode)  # type: ignore[arg-type]  # see above


_TORCH_MULTI_GRAD_HOOK = torch.autograd.graph.register_multi_grad_hook
_HOOK_MODULES: tuple[Any, ...] = (torch.autograd.graph, torch.utils.module_tracker)


def patch_hooks() -> None:
    """Patch ``register_multi_grad_hook`` so that it takes ``PerRank`` tensors, also when ``ModuleTracker`` calls it."""
    for module in _HOOK_MODULES:
        if module.register_multi_grad_hook is _TORCH_MULTI_GRAD_HOOK:
            module.register_multi_grad_hook = register_joint_multi_grad_hook
            patch_applied(f"{module.__name__}.register_multi_grad_hook")


def unpatch_hooks() -> None:
    """Restore torch's own ``register_multi_grad_hook``."""
    for module in _HOOK_MODULES:
        if module.register_multi_grad_hook is register_joint_multi_grad_hook:
            module.register_multi_grad_hook = _TORCH_MULTI_GRAD_HOOK
            patch_removed(f"{module.__name__}.register_multi_grad_hook")


SETUP_HOOKS.append(patch_hooks)
