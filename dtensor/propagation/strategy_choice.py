"""What was chosen for a call. A value."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout.layout import Layout
from ..layout.splits import Split
from ..rules.disjoint_partial import Left
from ..rules.rule import Choice, Row


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice with the layouts that follow from it.

    Attributes:
        kernel_row: the row whose kernel runs (one of them, if a joint kernel has several factors).
        by_numbers: for other kinds of numbers it may be another choice.
        left: of which results it is known that their rows are parted.
    """

    choice: Choice
    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]
    kernel_row: Row | None = None
    by_numbers: bool = False
    left: tuple[Left, ...] = ()

    @property
    def kernel_splits(self) -> dict[str, Split]:
        """How the kernel's factors are cut."""
        names = {row.factor for row in self.choice.rows if row.kernel is not None}
        return {name: split for name, split in self.choice.splits.items() if name in names}
