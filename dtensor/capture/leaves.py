"""``.grad`` of the tensors that a function reads: a whole step finds gradients there, adds to them, takes them away.

What matters of them for a replay is known after the run: nothing, if no Python code looked at ``.grad`` and no backward pass
accumulated; else whether each leaf has a gradient, of which layout, and who listens to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..tensor import DTensor
from .signature import described

_PLACE: Any = torch._C.TensorBase.grad


class Leaf(NamedTuple):
    """A leaf of autograd by its number in the survey, and what a replay takes for granted of it."""

    number: int
    hooks: tuple[Any, ...]
    grad: Any

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether it is so."""
        return leaf_of(self.number, tensors[self.number]) == self


def leaf_of(number: int, x: Any) -> Leaf:
    """The leaf as it is now."""
    grad = x.grad
    return Leaf(number, hooks_of(x), None if grad is None else grad._layout if type(grad) is DTensor else described(grad))


def hooks_of(x: torch.Tensor) -> tuple[Any, ...]:
    """The numbers of the hooks on a leaf; torch never uses one again."""
    return tuple(x._backward_hooks or ()), tuple(x._post_accumulate_grad_hooks or ())


class Leaves:
    """The leaves of one recorded run.

    Attributes:
        accumulated: numbers of those that a backward pass inside of the run gave a gradient.
        touched: whether anything of the run depends on gradients that were there, or changes them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._leaves = {number: x for number, x in enumerate(tensors) if x.requires_grad and x.is_leaf}
        self._known = [leaf_of(number, x) for number, x in self._leaves.items()]
        self._before = {number: x.grad for number, x in self._leaves.items()}
        self.accumulated: set[int] = set()
        self.touched = False

    def gradients(self) -> dict[int, torch.Tensor]:
        """Those that were there before the run."""
        return {number: grad for number, grad in self._before.items() if grad is not None}

    def changed(self) -> dict[int, torch.Tensor | None]:
        """The gradients of leaves that have another one than before, or none."""
        found = {number: x.grad for number, x in self._leaves.items() if x.grad is not self._before[number]}
        self.touched |= bool(found)
        return found

    def guards(self) -> tuple[Leaf, ...]:
        """What a replay must find."""
        return tuple(self._known) if self.touched or self.accumulated else ()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, it is seen who looks at ``.grad`` and which leaves get gradients."""
        handles = [x.register_post_accumulate_grad_hook(self._noting(number)) for number, x in self._leaves.items()]

        def look(x: torch.Tensor) -> Any:
            self.touched = True
            return _PLACE.__get__(x)

        def put(x: torch.Tensor, grad: Any) -> None:
            self.touched = True
            _PLACE.__set__(x, grad)

        def remove(x: torch.Tensor) -> None:
            put(x, None)

        torch.Tensor.grad = property(look, put, remove)  # type: ignore[assignment]  # for the time of the run
        try:
            yield
        finally:
            del torch.Tensor.grad
            for handle in handles:
                handle.remove()

    def _noting(self, number: int) -> Callable[[Any], None]:
        return lambda _: self.accumulated.add(number)
