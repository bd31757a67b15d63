"""Autograd functions: a user's ``torch.autograd.Function`` runs once for all ranks, and gets ``PerRank`` tensors.

``Function.apply`` is not a torch function, so ``PerRank`` cannot map it: torch would see wrappers that require no gradient, and
detach the graph. Here the function runs once for all ranks, as the code around it does. Its ``forward`` and ``backward`` get
``PerRank`` tensors, so that all ranks take part in collectives inside, while autograd sees the ranks' own tensors. Recomputing
checkpoints are such functions too.

[Note: Patch of Function.apply]
Torch has no hook in ``apply``, but it looks up what it calls: the class's ``forward``. So ``__getattribute__`` of the metaclass
is patched, and returns another ``forward`` for ``PerRank`` arguments. The patch is applied before a program gets its first
``PerRank`` tensors (``SETUP_HOOKS``), not for DTensors alone. It also works for a method that a program has read before
(``scaled = Scaled.apply``). If the arguments are plain and the function makes ``PerRank`` tensors inside, torch runs it as it
is, and the graph that torch gave to the wrapper is passed on to the ranks' tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionMeta

from ..base.patches import patch_applied, patch_removed
from ..base.torch_internals import DisableTorchFunctionSubclass, TensorBase
from ..errors import LayoutError
from .joint_functions import flatten_ranks, join_values, merge_grads
from .per_rank import JOINT_FUNCTIONS, SETUP_HOOKS, PerRank, over_ranks
from .plain_tensors import join_equal_gradients
from .rank_runs import replace_plain_arguments


def has_setup_context(cls: Any) -> bool:
    return cls.setup_context is not Function.setup_context


def apply_joint(cls: Any, args: Sequence[Any]) -> Any:
    """Apply the function ``cls`` once to the arguments of all ranks, and return its results."""
    call = _JointCall(cls, args)
    flat_results = _JointFunction.apply(call, *_flatten_tensors(args))
    return call.join_results(flat_results if isinstance(flat_results, tuple) else (flat_results,))


class _JointCall:
    """Call of a user's autograd function for all ranks: function, arguments, and how results are made of ranks' tensors."""

    def __init__(self, function: Any, args: Sequence[Any]) -> None:
        self.function, self.args = function, args
        self.outputs: Any = None
        self.single = False

    def forward(self, context: _JointContext) -> tuple[Any, ...]:
        """Run the user's forward on the arguments of all ranks, and return its tensors as a flat tuple."""
        function = self.function
        if has_setup_context(function):
            results = function.forward(*self.args)
            function.setup_context(context, self.args, results)
        else:
            results = function.forward(context, *self.args)
        self.single = not isinstance(results, tuple)
        self.outputs = (results,) if self.single else results
        flat_results = tuple(_flatten_tensors(self.outputs))
        self.args = [_ValueSpec.of(x) for x in self.args]  # the graph holds what the function saved, no more
        self.outputs = [_ValueSpec.of(x) for x in self.outputs]
        return flat_results

    def join_results(self, flat: Sequence[Any]) -> Any:
        values = _merge_by_spec(self.outputs, flat)
        return values[0] if self.single else tuple(values)

    def split_gradients(self, grads: Any, needed: Sequence[bool]) -> tuple[Any, ...]:
        """Return ``grads``, one for each argument of the user's function, as one for each rank's tensor, the node's inputs.

        A plain tensor that all ranks used gets the gradient of one rank, as on processes.

        Args:
            needed: for each argument, whether it needs its gradient.

        Raises:
            LayoutError: the gradients of ranks for such a plain tensor differ.
        """
        grads = list(grads) if isinstance(grads, (tuple, list)) else [grads]
        grads += [None] * (len(self.args) - len(grads))
        flat_grads: list[Any] = []
        for spec, grad, is_needed in zip(self.args, grads, needed, strict=False):
            if not spec.count:
                continue
            rank_grads = list(grad.shards) if isinstance(grad, PerRank) else [grad] * spec.count
            if spec.ranks or len(rank_grads) == 1:
                flat_grads += rank_grads
            else:
                flat_grads.append(join_equal_gradients(rank_grads, spec.shape) if is_needed else None)
        return tuple(flat_grads)

    def merge_gradients(self, specs: Sequence[_ValueSpec], grads: Sequence[Any]) -> tuple[Any, ...]:
        """Merge flat gradients, one for each rank's tensor, to one for each argument or result that has tensors."""
        return tuple(_merge_by_spec([spec for spec in specs if spec.count], grads))

    def flatten_grads(self, specs: Sequence[_ValueSpec], grads: Sequence[Any]) -> tuple[Any, ...]:
        """Return gradients of arguments or results as one for each rank's tensor. A plain gradient is that of each rank."""
        flat_grads: list[Any] = []
        for spec, grad in zip((spec for spec in specs if spec.count), grads, strict=True):
            flat_grads += grad.shards if isinstance(grad, PerRank) else [grad] * spec.count
        return tuple(flat_grads)


class _ValueSpec:
    """Number of tensors of an argument or result: one per rank, one, or none. Without a tensor it has the value itself."""

    __slots__ = ("count", "ranks", "shape", "value")

    def __init__(self, count: int, ranks: bool, value: Any = None, shape: Sequence[int] = ()) -> None:
        self.count, self.ranks, self.value, self.shape = count, ranks, value, shape

    @staticmethod
    def of(x: Any) -> _ValueSpec:
        """Make the spec of one argument or result: its number of tensors, and whether it has one for each rank."""
        if isinstance(x, PerRank):
            return _ValueSpec(len(x.shards), True)
        return _ValueSpec(1, False, shape=x.shape) if isinstance(x, Tensor) else _ValueSpec(0, False, x)


def _flatten_tensors(values: Sequence[Any]) -> list[Any]:
    return flatten_ranks([x for x in values if isinstance(x, Tensor)])


def _merge_by_spec(specs: Sequence[_ValueSpec], flat: Sequence[Any]) -> list[Any]:
    """Return one value for each spec: a ``PerRank`` or tensor of the next tensors in ``flat``, or the spec's own value."""
    items, values = iter(flat), []
    for spec in specs:
        tensors = [next(items) for _ in range(spec.count)]
        values.append(merge_grads(tensors) if spec.ranks else tensors[0] if tensors else spec.value)
    return values


class _JointContext:
    """The context that the user's function gets: torch's own, with ``PerRank`` tensors in place of the tensors of ranks."""

    def __init__(self, specs: Sequence[_ValueSpec]) -> None:
        self._real: Any = None  # torch's context, only while the function runs: a permanent reference would be a cycle
        self._specs = specs
        self._saved: list[_ValueSpec] = []

    @contextmanager
    def bind_context(self, real: Any) -> Iterator[_JointContext]:
        """Use ``real`` as the context of torch while the block runs."""
        self._real = real
        try:
            yield self
        finally:
            self._real = None

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved = [_ValueSpec.of(x) for x in tensors]
        self._real.save_for_backward(*_flatten_tensors(tensors))

    save_for_forward = save_for_backward

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(_merge_by_spec(self._saved, self._real.saved_tensors))

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """Return for each argument whether a tensor of some rank needs a gradient."""
        flags, needed = list(self._real.needs_input_grad[1:]), []  # the first input is the _JointCall
        for spec in self._specs:
            needed.append(any(flags[: spec.count]))
            del flags[: spec.count]
        return tuple(needed)

    def mark_dirty(self, *tensors: Any) -> None:
        self._real.mark_dirty(*_flatten_tensors(tensors))

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._real.mark_non_differentiable(*_flatten_tensors(tensors))

    def set_materialize_grads(self, value: bool) -> None:
        self._real.set_materialize_grads(value)

    def maybe_clear_saved_tensors(self) -> None:
        self._real.maybe_clear_saved_tensors()


class _JointFunction(Function):
    """Autograd's function from and to the tensors of all ranks. It calls the user's function once."""

    @staticmethod
    def forward(ctx: Any, call: _JointCall, *tensors: Any) -> Any:
        """Run the user's forward once, on the arguments of all ranks."""
        ctx.call, ctx.context = call, _JointContext([_ValueSpec.of(x) for x in call.args])
        with ctx.context.bind_context(ctx) as context:
            return call.forward(context)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run the user's backward on the gradients of all ranks, and return those of all inputs, flat."""
        call: _JointCall = ctx.call
        specs = [spec for spec in call.outputs if spec.count]
        with ctx.context.bind_context(ctx) as context:
            grads_of_args = call.function.backward(context, *_grads_of_outputs(call.outputs, _merge_by_spec(specs, grads)))
            return None, *call.split_gradients(grads_of_args, context.needs_input_grad)


class _JointNode:
    """The node that ``grad_fn`` of the results returns. Its hooks get the gradients of all ranks together."""

    def __init__(self, node: Any) -> None:
        self._node, self._call = node, node.call

    def name(self) -> str:
        return f"{self._call.function.__name__}Backward"

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook that runs after the node: ``hook(argument gradients, result gradients)`` may return other ones."""
        args, outputs = self._call.args, self._call.outputs

        def run_node_hook(grads: Any, output_grads: Any) -> Any:
            new_grads = hook(self._call.merge_gradients(args, grads), self._call.merge_gradients(outputs, output_grads))
            return None if new_grads is None else self._call.flatten_grads(args, as_tuple(new_grads))

        return self._node.register_hook(run_node_hook)

    def register_prehook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook that runs before the node: ``hook(result gradients)`` may return other ones."""
        outputs = self._call.outputs

        def run_node_prehook(grads: Any) -> Any:
            new_grads = hook(self._call.merge_gradients(outputs, grads))
            return None if new_grads is None else self._call.flatten_grads(outputs, as_tuple(new_grads))

        return self._node.register_prehook(run_node_prehook)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _joint_grad_fn(x: PerRank, *owner: Any) -> Any:
    """Return ``grad_fn`` of a ``PerRank``: the joint node if one function ran for all ranks, else the nodes of all ranks."""
    nodes = [shard.grad_fn for shard in x.shards]
    if type(nodes[0]) is _JointFunction._backward_cls and all(node is nodes[0] for node in nodes):
        return _JointNode(nodes[0])
    return join_values(nodes, "grad_fn")


def _grads_of_outputs(outputs: Sequence[_ValueSpec], grads: Sequence[Any]) -> list[Any]:
    """Return one gradient for each output, None for an output without a tensor."""
    items = iter(grads)
    return [next(items) if spec.count else None for spec in outputs]


JOINT_FUNCTIONS[vars(TensorBase)["grad_fn"].__get__] = _joint_grad_fn


_SYM_SIZE = torch.ops.aten.sym_size.default
_PATCHED_NAME = "torch.autograd.function.FunctionMeta.__getattribute__"


def patch_functions() -> None:
    """Patch ``Function.apply`` so that it takes ``PerRank`` arguments, also in methods that a program has read before."""
    if "__getattribute__" not in vars(FunctionMeta):
        FunctionMeta.__getattribute__ = _get_function_attribute  # type: ignore[method-assign]  # see [Note: Patch of Function.apply]
        patch_applied(_PATCHED_NAME)


def unpatch_functions() -> None:
    """Restore torch's own ``Function.apply``."""
    if "__getattribute__" in vars(FunctionMeta):
        del FunctionMeta.__getattribute__
        patch_removed(_PATCHED_NAME)


class _ApplyState(local):
    """The state of torch's ``apply`` in this thread."""

    looked_up: Any = None  # the class with the ``apply`` that was read last, until its ``forward`` is called
    begun: Any = None  # the class for which torch has made a node, whether its ``apply`` was patched, and the grad mode
    joint: Any = None  # the class that ran for all ranks, until torch asks for its ``setup_context``
    noted: Sequence[int] = ()  # ids of tensors with sizes that torch reads; a reference would prevent swap_tensors


_APPLY_STATE = _ApplyState()


def _get_function_attribute(cls: Any, name: str) -> Any:
    """Return an attribute of an autograd function: ``apply``, ``forward`` and ``setup_context`` as they run all ranks."""
    attribute = type.__getattribute__(cls, name)
    match name:
        case "apply":
            return partial(_call_apply, cls, attribute)
        case "_backward_cls":  # torch makes a node, and calls ``forward`` next
            _APPLY_STATE.begun, _APPLY_STATE.looked_up = (cls, _APPLY_STATE.looked_up is cls, torch.is_grad_enabled()), None
        case "forward" if _APPLY_STATE.begun and _APPLY_STATE.begun[0] is cls and cls not in _UNPATCHED_FUNCTIONS:
            begun, _APPLY_STATE.begun = _APPLY_STATE.begun, None
            return partial(_call_forward, attribute, *begun)
        case "setup_context" if _APPLY_STATE.joint is cls:
            _APPLY_STATE.joint = None
            return _mark_non_differentiable
    return attribute


def _call_apply(cls: Any, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch's ``apply`` of the function ``cls``; ``PerRank`` results of plain arguments get a graph for each rank."""
    _APPLY_STATE.looked_up = cls
    result = plain(*replace_plain_arguments(cls, args), **kwargs)
    return tuple(map(_split_result, result)) if type(result) is tuple else _split_result(result)


def _split_result(result: Any) -> Any:
    """Return a result of plain arguments; if it is a ``PerRank``, give its ranks' tensors the graph of the wrapper."""
    if type(result) is not PerRank:
        return result
    with DisableTorchFunctionSubclass():
        needs_grad = result.requires_grad
    return PerRank(_SplitGraph.apply(result)) if needs_grad else result


def _call_forward(plain: Callable[..., Any], cls: Any, was_patched: bool, grad_mode: bool, *args: Any) -> Any:
    """Run ``forward`` of ``cls`` as torch calls it; with ``PerRank`` arguments for all ranks, in a graph without torch's node."""
    is_two_part = has_setup_context(cls)
    has_per_rank = any(type(arg) is PerRank for arg in args)
    if has_per_rank:
        with torch.set_grad_enabled(grad_mode):
            results = apply_joint(cls, args if is_two_part else args[1:])
    else:
        results = plain(*args)
    per_rank_tensors = [x for x in (*args, *as_tuple(results)) if type(x) is PerRank]
    if not per_rank_tensors:
        return results
    _APPLY_STATE.noted = [*map(id, per_rank_tensors)]
    if not has_per_rank and not was_patched and grad_mode and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        raise LayoutError(
            f"{cls.__name__}.apply was read before PerRank tensors were in use, and does not support them; "
            f"read it again at the call: {cls.__name__}.apply(x)"
        )
    if has_per_rank and is_two_part:
        _APPLY_STATE.joint = cls
    elif has_per_rank:
        _mark_non_differentiable(args[0], args, results)
    return results


def _mark_non_differentiable(context: Any, inputs: Any, results: Any) -> None:
    context.mark_non_differentiable(*(x for x in as_tuple(results) if isinstance(x, Tensor)))


def _joint_size(x: PerRank) -> Any:
    """Return the sizes that all ranks have; those of the first rank if torch's autograd node reads them, which ignores them."""
    return x.shards[0].shape if id(x) in _APPLY_STATE.noted else over_ranks(_SYM_SIZE, (x,), {})


class _SplitGraph(Function):
    """Autograd function from a ``PerRank`` wrapper, to which torch gave a graph, to the ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: PerRank) -> tuple[Tensor, ...]:
        return tuple(shard.detach() for shard in x.shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the ranks' gradients as one ``PerRank``, the gradient of the wrapper."""
        grad = PerRank(grads)
        _APPLY_STATE.noted = [id(grad)]
        return grad


# _NoopSaveInputs of torch 2.11 never runs backward.
_UNPATCHED_FUNCTIONS = {_SplitGraph, getattr(torch.utils.checkpoint, "_NoopSaveInputs", _SplitGraph)}

SETUP_HOOKS.append(patch_functions)
JOINT_FUNCTIONS[_SYM_SIZE] = _joint_size
