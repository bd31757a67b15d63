"""A round trip to the first position of a group: each rank tells it a row of whole numbers, and is answered.

Two messages for each rank but the first. A collective, compared by its words as any other; what ranks tell in it need not be alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..mesh.groups import Group
from .backends import after, post, started
from .pending import Pending

Answer = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a rank puts in.

    Attributes:
        row: what it tells, whole numbers, as many as all others.
        nbytes: length of the answer that it expects.
        answer: at the first position, of the rows of all: what each rank is answered, rows of bytes.
    """

    row: Tensor
    nbytes: int
    answer: Answer

    dtype: ClassVar[torch.dtype] = torch.uint8  # as which it travels
    is_meta: ClassVar[bool] = False


def bind_answers(group: Group) -> Callable[[Asked], Pending[Tensor]]:
    """What this rank is answered."""
    first, *others = group.order or range(group.size)

    def issue(asked: Asked) -> Pending[Tensor]:
        row, device = asked.row, asked.row.device
        if group.position:
            answer = torch.empty(asked.nbytes, dtype=torch.uint8, device=device)
            works = post(group, [], [(first, row)], device)
            return started([*works, *post(group, [(first, answer)], [], device)], lambda: answer)
        rows = row.new_empty((group.size, len(row)))
        rows[0] = row
        works = post(group, [*zip(others, rows[1:], strict=True)], [], device)

        def finish() -> Tensor:
            answers = asked.answer(rows)
            return after(post(group, [], [*zip(others, answers[1:], strict=True)], device), lambda: answers[0])

        return started(works, finish)

    return issue
