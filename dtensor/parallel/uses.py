"""A unit's forward passes and their uses of gathered values: which of them backward still needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..comm import PerRank
from .group import Group, shards_of


@dataclass(eq=False, slots=True)
class Pass:
    """One forward pass of a unit.

    Attributes:
        inputs: how many inputs' gradients have not come. Until they have, parts may still be computed again: a reentrant
            checkpoint does it when all that came after it is through, parameters' gradients among that.
    """

    inputs: int = 0

    def expect_inputs(self, given: Any, then: Callable[[], None]) -> Any:
        """``given``, its gradients counted; ``then`` when the last has come. Where there are none, the end of backward tells.

        Further inputs (an encoder's result, say) may be other units' too, and their gradients late: ours are aliases of our own.
        """
        found = {id(x): x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad}
        own = {name: x.view_as(x) for name, x in list(found.items())[1:]}
        tensors = list((found | own).values())
        self.inputs += sum(len(shards_of(x)) for x in tensors) or 1
        for x in tensors:
            x.register_hook(partial(self._came, then))
        return tree_map(lambda x: own.get(id(x), x), given, is_leaf=lambda x: isinstance(x, PerRank)) if own else given

    def _came(self, then: Callable[[], None], grad: Tensor) -> None:
        self.inputs -= 1
        if not self.inputs:
            then()


@dataclass(eq=False, slots=True)
class Use:
    """One recorded use of a group's gathered values, by a node of the graph.

    Attributes:
        stamp: of the values.
        of: the pass that it belongs to.
        through: the node has run.
    """

    group: Group
    stamp: list[Any]
    of: Pass
    through: bool = False
