"""A unit's forward passes and their uses of gathered values: which of them backward still needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...base.tensor_tree import leaves
from ...base.torch_internals import tree_leaves, tree_map
from ...comm import PerRank, shards_of
from ...dispatch.version_counters import Stamp
from ...placement import Partial
from ...tensor.autograd import OWN_USES
from .param_group import Group


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of what a module is given or gives; torch's walk, which takes longer, where lists and dicts are not all."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for x in leaves(value):
        if isinstance(x, Tensor):
            found.append(x)
        elif type(x) not in _WITHOUT:
            found += (y for y in tree_leaves(x) if isinstance(y, Tensor))
    return found


_WITHOUT = (type(None), bool, int, float, str, torch.dtype)


def used_for_parts(parameters: Iterable[Any], cut: Set[tuple[int, ...]], op: str = "sum") -> None:
    """Say of parameters, DTensors, that along mesh dims that ``cut`` the batch each rank uses its pieces for its own part: terms
    of one loss, or of the mean of the losses that ranks have of plain batches."""
    made: dict[int, dict[int, Partial]] = {}  # by mesh, of which parameters have few
    for x in parameters:
        mesh = x._layout.mesh
        uses = made.get(id(mesh))
        if uses is None:
            uses = made[id(mesh)] = {i: Partial(op) for i, dims in enumerate(mesh._dims) if dims in cut}
        x.__dict__[OWN_USES] = uses


def used_beside(groups: Iterable[Group], schedule: Any) -> None:
    """What is read of parameters beside their unit's forward (``lm_head.weight.full_tensor()``) is for a rank's batch as well."""
    distributed = schedule is not None and schedule.distributed is not None
    for group in groups:
        dims = set(group.axes.mesh._dims)
        cut, op = (schedule.cut & dims, "sum") if distributed else (dims, "avg")
        if group.used != (cut, op):
            used_for_parts([m.parameter for m in group.managed], cut, op)
            group.used = cut, op


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
        found = {id(x): x for x in tensors_in(given) if x.requires_grad}
        own = {name: x.view_as(x) for name, x in list(found.items())[1:]}
        pieces = [piece for x in (found | own).values() for piece in shards_of(x)]
        self.inputs += len(pieces) or 1
        hook = partial(self._came, then)
        for piece in pieces:
            piece.register_hook(hook)
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
        ran: the node has run, in whatever pass.
        through: in the pass that began it, or it was left to a LATER one.
    """

    group: Group
    stamp: Stamp | None
    of: Pass
    ran: bool = False
    through: bool = False

    def __post_init__(self) -> None:
        self.group.outstanding += 1


class Views(dict[int, tuple[Use | None, list[Any]]]):
    """The gathered parameters of a pass, by group. Once its forward is over, hooks of what it leads to have them: held by the
    unit they would hold the graph, and that the unit, in a circle that no collector sees."""

    def drop_unrecorded(self) -> None:
        """Drop the values that no node of a graph has given. Their memory then has only the group's tensors and the program's."""
        for k in [k for k, (use, _) in self.items() if use is None]:
            del self[k]


def nothing_left() -> Views | None:
    """In place of a weak reference to some."""
    return None
