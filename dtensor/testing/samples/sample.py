"""Sample: arguments of an operator call for the verification of its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Sample:
    """Arguments of one operator call. Tensors are plain CPU tensors, also inside lists, with small and distinct sizes.

    Attributes:
        args, kwargs: the arguments of the operator.
        note: what is special about the sample, for reports.
        values: compare values (False for uninitialized memory: shapes, dtypes and layouts only).
        gradients: compare gradients too.

    No communication.

    >>> Sample((torch.ones(5, 6),), {"dim": 0}, gradients=False).kwargs
    {'dim': 0}
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    values: bool = True
    gradients: bool = True

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return ``(args, kwargs)``, for the functions of :mod:`dtensor.base.tensor_tree`."""
        return self.args, self.kwargs

    def with_arguments(self, arguments: Any) -> Sample:
        """Return the sample with the arguments ``(args, kwargs)`` in place of its own."""
        return replace(self, args=arguments[0], kwargs=arguments[1])


Builder: TypeAlias = Sample | Callable[[], Sample]
Samples: TypeAlias = dict[str, list[Builder]]
