"""``Sample``: arguments that show an operator at work, for the generic verification of its rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Sample:
    """Arguments of one operator call. Tensors are plain CPU tensors, also inside lists; sizes small and distinct.

    Attributes:
        args, kwargs: as the operator takes them.
        note: what is special about it, for reports.
        values: compare values (False for uninitialised memory: shapes, dtypes and layouts only).
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
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Both, as :mod:`dtensor.base.tensor_tree` goes through them."""
        return self.args, self.kwargs

    def of(self, given: Any) -> Sample:
        """The same with other arguments."""
        return replace(self, args=given[0], kwargs=given[1])


Builder: TypeAlias = Sample | Callable[[], Sample]
Samples: TypeAlias = dict[str, list[Builder]]
