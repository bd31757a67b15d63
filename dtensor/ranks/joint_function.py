"""A user's ``torch.autograd.Function`` over tensors of all ranks at once.

``Function.apply`` is no torch function, so ``PerRank`` cannot map it: torch would see wrappers that require no gradient, and cut
the graph. Here the function runs once for all ranks, as the code around it does: its ``forward`` and ``backward`` get ``PerRank``
tensors, so collectives inside are met by all ranks, while autograd sees the ranks' own tensors. That is the law of a recomputing
checkpoint as well, which is such a function around a piece of program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Function

from ..base.torch_internals import TensorBase
from .joint_autograd import flat, merged
from .joint_nodes import joined
from .per_rank import _JOINT, PerRank


def sets_up(cls: Any) -> bool:
    return cls.setup_context is not Function.setup_context


def joint(cls: Any, args: Sequence[Any]) -> Any:
    call = _Call(cls, args)
    flat = _Joint.apply(call, *_tensors(args))
    return call.results(flat if isinstance(flat, tuple) else (flat,))


class _Call:
    """One application: which function, its arguments, and how its results are made of tensors."""

    def __init__(self, function: Any, args: Sequence[Any]) -> None:
        self.function, self.args = function, args
        self.outputs: Any = None
        self.single = False

    def forward(self, context: _Context) -> tuple[Any, ...]:
        function = self.function
        if sets_up(function):
            found = function.forward(*self.args)
            function.setup_context(context, self.args, found)
        else:
            found = function.forward(context, *self.args)
        self.single = not isinstance(found, tuple)
        self.outputs = (found,) if self.single else found
        flat = tuple(_tensors(self.outputs))
        self.args = [_Shape.of(x) for x in self.args]  # the graph holds what the function saved, no more
        self.outputs = [_Shape.of(x) for x in self.outputs]
        return flat

    def results(self, flat: Sequence[Any]) -> Any:
        made = _grouped(self.outputs, flat)
        return made[0] if self.single else tuple(made)

    def gradients(self, found: Any) -> tuple[Any, ...]:
        """One gradient per tensor argument of ours for those that the function gave, one per argument of its own."""
        given = list(found) if isinstance(found, (tuple, list)) else [found]
        given += [None] * (len(self.args) - len(given))
        flat: list[Any] = []
        for shape, grad in zip(self.args, given, strict=False):
            if not shape.count:
                continue
            own = list(grad.shards) if isinstance(grad, PerRank) else [grad] * shape.count
            if shape.ranks or len(own) == 1:
                flat += own
            else:  # one tensor that all ranks used
                flat.append(sum(own[1:], own[0]))
        return tuple(flat)

    def grouped(self, shapes: Sequence[_Shape], grads: Sequence[Any]) -> tuple[Any, ...]:
        """The gradients of arguments or of results, all ranks' together."""
        return tuple(_grouped([shape for shape in shapes if shape.count], grads))

    def apart(self, shapes: Sequence[_Shape], grads: Sequence[Any]) -> tuple[Any, ...]:
        """As the node has them; a plain one is every rank's."""
        flat: list[Any] = []
        for shape, grad in zip((shape for shape in shapes if shape.count), grads, strict=True):
            flat += grad.shards if isinstance(grad, PerRank) else [grad] * shape.count
        return tuple(flat)


class _Shape:
    """How many tensors an argument or result stands for: one per rank, one, or none, and then its value."""

    __slots__ = ("count", "ranks", "value")

    def __init__(self, count: int, ranks: bool, value: Any = None) -> None:
        self.count, self.ranks, self.value = count, ranks, value

    @staticmethod
    def of(x: Any) -> _Shape:
        if isinstance(x, PerRank):
            return _Shape(len(x.shards), True)
        return _Shape(1, False) if isinstance(x, Tensor) else _Shape(0, False, x)


def _tensors(values: Sequence[Any]) -> list[Any]:
    return flat([x for x in values if isinstance(x, Tensor)])


def _grouped(shapes: Sequence[_Shape], flat: Sequence[Any]) -> list[Any]:
    items, made = iter(flat), []
    for shape in shapes:
        own = [next(items) for _ in range(shape.count)]
        made.append(merged(own) if shape.ranks else own[0] if own else shape.value)
    return made


class _Context:
    """What the user's function sees as its context: torch's own, in terms of ``PerRank``."""

    def __init__(self, shapes: Sequence[_Shape]) -> None:
        self._real: Any = None  # torch's, while the function runs: the two would keep each other alive
        self._shapes = shapes
        self._saved: list[_Shape] = []

    @contextmanager
    def over(self, real: Any) -> Iterator[_Context]:
        self._real = real
        try:
            yield self
        finally:
            self._real = None

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved = [_Shape.of(x) for x in tensors]
        self._real.save_for_backward(*_tensors(tensors))

    save_for_forward = save_for_backward

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(_grouped(self._saved, self._real.saved_tensors))

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        flags, made = list(self._real.needs_input_grad[1:]), []  # the first is our description of the call
        for shape in self._shapes:
            made.append(any(flags[: shape.count]))
            del flags[: shape.count]
        return tuple(made)

    def mark_dirty(self, *tensors: Any) -> None:
        self._real.mark_dirty(*_tensors(tensors))

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._real.mark_non_differentiable(*_tensors(tensors))

    def set_materialize_grads(self, value: bool) -> None:
        self._real.set_materialize_grads(value)

    def maybe_clear_saved_tensors(self) -> None:
        self._real.maybe_clear_saved_tensors()


class _Joint(Function):
    """The ranks' tensors in, the ranks' tensors out; between them the user's function on all of them."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Any) -> Any:
        ctx.call, ctx.context = call, _Context([_Shape.of(x) for x in call.args])
        with ctx.context.over(ctx) as context:
            return call.forward(context)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        shapes = [shape for shape in call.outputs if shape.count]
        with ctx.context.over(ctx) as context:
            found = call.function.backward(context, *_each(call.outputs, _grouped(shapes, grads)))
        return None, *call.gradients(found)


class _Node:
    """What ``grad_fn`` gives for the function's results: its node, whose hooks get the gradients of all ranks together."""

    def __init__(self, node: Any) -> None:
        self._node, self._call = node, node.call

    def name(self) -> str:
        return f"{self._call.function.__name__}Backward"

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """``hook(gradients of arguments, gradients of results)``, after the node has run; it may give others for the first."""
        into, out = self._call.args, self._call.outputs

        def over_flat(grads: Any, outer: Any) -> Any:
            found = hook(self._call.grouped(into, grads), self._call.grouped(out, outer))
            return None if found is None else self._call.apart(into, as_tuple(found))

        return self._node.register_hook(over_flat)

    def register_prehook(self, hook: Callable[..., Any]) -> Any:
        """``hook(gradients of results)``, before the node runs; it may give others."""
        out = self._call.outputs

        def over_flat(grads: Any) -> Any:
            found = hook(self._call.grouped(out, grads))
            return None if found is None else self._call.apart(out, as_tuple(found))

        return self._node.register_prehook(over_flat)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _grad_fn(x: PerRank, *owner: Any) -> Any:
    nodes = [shard.grad_fn for shard in x.shards]
    if type(nodes[0]) is _Joint._backward_cls and all(node is nodes[0] for node in nodes):
        return _Node(nodes[0])
    return joined(nodes, "grad_fn")


def _each(outputs: Sequence[_Shape], grads: Sequence[Any]) -> list[Any]:
    """One gradient per output: None for what is no tensor."""
    items = iter(grads)
    return [next(items) if shape.count else None for shape in outputs]


_JOINT[vars(TensorBase)["grad_fn"].__get__] = _grad_fn
