"""Unit pass: the state of an FSDP unit in one forward and backward pass, and what still needs its unsharded values.

[Note: Tensors in freed memory] To reshard frees the storage of the unsharded values, while tensors in it stay alive. A kernel
that reads them computes with arbitrary bytes or ends the process. These mechanisms prevent it. A :class:`ForwardUse` keeps the
values until backward has run. :func:`watch_saved_tensors` refuses saved tensors in units that do not unshard in backward.
:func:`clone_outputs` copies outputs of the unit that are parameters or views of them. ``SavedAliases`` makes autograd refuse
values in freed memory, and ``ParamGroup.is_used_by_program`` leaves memory that a program uses to the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ....base.tensor_tree import iter_tree_leaves
from ....base.torch_internals import is_traceable_wrapper_subclass, tree_leaves, tree_map
from ....comm import PerRank, shards_of
from ....errors import DTensorError
from ....placement import Partial
from ....state.version_counters import VersionSnapshot
from ....tensor.autograd import BATCH_GRAD_PLACEMENTS
from ....tensor.local_tensors import local_tensors_of
from ....tensor.views.lazy_view import LazyView
from .parameters.param_group import ParamGroup
from .parameters.unsharded_storage import UnshardedStorage

_LEAVES_WITHOUT_TENSORS = (type(None), bool, int, float, str, torch.dtype)


class UnshardedViews(dict[int, tuple["ForwardUse | None", list[Any]]]):
    """Unsharded values of a pass, as the modules see them: by index of the group, its use and its values.

    After forward only the hooks of the outputs reference this object. If the unit referenced it, the unit would keep the graph
    alive, and the graph the unit, in a cycle that the garbage collector does not see.
    """

    def drop_unrecorded(self) -> None:
        """Drop the values without autograd node, so that only the group and the program have tensors in their memory."""
        for k in [k for k, (use, _) in self.items() if use is None]:
            del self[k]


def _no_views() -> UnshardedViews | None:
    """Return None, in place of a weak reference."""
    return None


@dataclass(eq=False, slots=True)
class InputGradients:
    """Counter of a unit's inputs for which gradients have not arrived.

    Until they have, parts of forward may be recomputed: a reentrant checkpoint does so when everything after it has run
    backward, which includes the gradients of parameters.
    """

    num_pending: int = 0

    def hook_inputs(self, inputs: Any, on_last: Callable[[], None]) -> Any:
        """Hook the gradients of ``inputs`` so that the last one calls ``on_last``; return the inputs for the module.

        If no input requires a gradient, the end of the backward pass releases the values. Inputs after the first may be used by
        other units too (the output of an encoder), and their gradients arrive late. They are replaced by aliases.
        """
        found = {id(x): x for x in tensors_in(inputs) if x.requires_grad}
        aliases = {name: x.view_as(x) for name, x in list(found.items())[1:]}
        shards = [shard for x in (found | aliases).values() for shard in shards_of(x)]
        self.num_pending += len(shards) or 1
        hook = partial(self._count_gradient, on_last)
        for shard in shards:
            shard.register_hook(hook)
        if not aliases:
            return inputs
        return tree_map(lambda x: aliases.get(id(x), x), inputs, is_leaf=lambda x: isinstance(x, PerRank))

    def _count_gradient(self, on_last: Callable[[], None], grad: Tensor) -> None:
        """Count one arrived input gradient, and call ``on_last`` when none is missing."""
        self.num_pending -= 1
        if not self.num_pending:
            on_last()


@dataclass(eq=False, slots=True)
class ForwardUse:
    """Recorded use of a group's unsharded values by one autograd node.

    Attributes:
        version: version snapshot of the values.
        input_grads: the inputs of the pass to which it belongs.
        has_run: the node has run, in any backward pass.
        is_complete: it has run in the pass that began its backward, or a later pass took it over (``NO_GRAPH_TASK``).
    """

    group: ParamGroup
    version: VersionSnapshot | None
    input_grads: InputGradients
    has_run: bool = False
    is_complete: bool = False

    def __post_init__(self) -> None:
        self.group.num_pending_uses += 1


@dataclass(eq=False, slots=True)
class UnitPass:
    """State of an FSDP unit in one pass.

    Attributes:
        modules_to_run: modules of the unit that forward has not reached.
        views: unsharded values that the modules see in forward, or in the backward that runs.
        finished_views: weak reference to ``views`` of a finished forward.
        pending_uses: uses for which gradients have not arrived.
        input_grads: the gradients of inputs that have not arrived.
        saved_tensor_hooks: hooks of :func:`watch_saved_tensors` while forward runs.
        functorch_values: scope in which transforms of ``torch.func`` see differentiable values.
    """

    modules_to_run: set[nn.Module] = field(default_factory=set)
    views: UnshardedViews = field(default_factory=UnshardedViews)
    finished_views: Callable[[], UnshardedViews | None] = _no_views
    pending_uses: set[ForwardUse] = field(default_factory=set)
    input_grads: InputGradients = field(default_factory=InputGradients)
    saved_tensor_hooks: ExitStack | None = None
    functorch_values: ExitStack = field(default_factory=ExitStack)

    def drop_views(self) -> None:
        """Drop the unsharded values, also those of a finished forward."""
        self.views, self.finished_views = UnshardedViews(), _no_views

    def close_saved_tensor_hooks(self) -> None:
        """Remove the hooks of :func:`watch_saved_tensors`."""
        if self.saved_tensor_hooks is not None:
            self.saved_tensor_hooks.close()
            self.saved_tensor_hooks = None


# --- tensors of a module's inputs and outputs ------------------------------------------------------------------------
def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors of a module's inputs or outputs. Torch's slower pytree traversal is used for unknown types only."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for x in iter_tree_leaves(value):
        if isinstance(x, Tensor):
            found.append(x)
        elif type(x) not in _LEAVES_WITHOUT_TENSORS:
            found += (y for y in tree_leaves(x) if isinstance(y, Tensor))
    return found


def watch_saved_tensors(groups: Sequence[ParamGroup]) -> ExitStack:
    """Enter hooks by which graphs save only the shape of unsharded values; a backward that needs one raises."""
    storages = _unsharded_storages(groups)

    def save_shape_if_unsharded(x: Tensor) -> Any:
        return tuple(x.shape) if _is_in(storages, x) else x

    stack = ExitStack()
    stack.enter_context(saved_tensors_hooks(save_shape_if_unsharded, _unpack_saved))
    return stack


def _unpack_saved(saved: Any) -> Any:
    """Return a saved tensor; raise if it was an unsharded parameter, which is not gathered in backward."""
    if not isinstance(saved, Tensor):  # the shape of an unsharded parameter, or of a view of one
        raise DTensorError(
            f"backward needs a parameter, or a view of one, of shape {saved}, but its unit is not gathered in "
            "backward; remove set_unshard_in_backward(False) for that unit"
        )
    return saved


def clone_outputs(output: Any, groups: Sequence[ParamGroup]) -> tuple[Any, list[Tensor]]:
    """Return a module's output, with tensors that are in the unsharded memory cloned, and the list of its tensors."""
    storages, tensors = _unsharded_storages(groups), tensors_in(output)
    if not any(_is_in(storages, x) for x in tensors):
        return output, tensors
    cloned = tree_map(
        lambda x: x.clone() if isinstance(x, Tensor) and _is_in(storages, x) else x,
        output,
        is_leaf=lambda x: isinstance(x, PerRank),
    )
    return cloned, tensors_in(cloned)


def _unsharded_storages(groups: Sequence[ParamGroup]) -> list[UnshardedStorage]:
    return [group.unsharded.storage for group in groups if not group.needs_no_gather]


def _is_in(storages: Sequence[UnshardedStorage], x: Any) -> bool:
    """Return True if a local tensor of ``x``, or of the base of a lazy view, is in one of the storages."""
    while isinstance(x, LazyView):  # its local tensors are computed when they are read
        x = x._origin.base
    return any(part in storage for part in _plain_parts(x) for storage in storages)


def _plain_parts(x: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of which the local tensors of ``x`` are made."""
    for shard in local_tensors_of(x):
        if is_traceable_wrapper_subclass(shard):
            for name in shard.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # a traceable subclass has it
                yield from _plain_parts(getattr(shard, name))
        else:
            yield shard


# --- reads of parameters for a part of the batch ---------------------------------------------------------------------
def declare_partial_use(parameters: Iterable[Any], batch_dims: Set[tuple[int, ...]], op: str = "sum") -> None:
    """Mark DTensor parameters so that gradients of their local tensors are partial along the mesh dims ``batch_dims``.

    Their gradients are then partial: addends of the gradient of one loss (``"sum"``), or of the mean of the ranks' losses of
    plain batches (``"avg"``).
    """
    by_mesh: dict[int, dict[int, Partial]] = {}
    for x in parameters:
        mesh = x._layout.mesh
        uses = by_mesh.get(id(mesh))
        if uses is None:
            uses = by_mesh[id(mesh)] = {i: Partial(op) for i, dims in enumerate(mesh._dims) if dims in batch_dims}
        x.__dict__[BATCH_GRAD_PLACEMENTS] = uses


def declare_outside_use(groups: Iterable[ParamGroup], schedule: Any) -> None:
    """Mark parameters so that reads outside forward (``lm_head.weight.full_tensor()``) have partial gradients, too."""
    has_distributed_batch = schedule is not None and schedule.batch_mesh is not None
    for group in groups:
        dims = set(group.axes.mesh._dims)
        use = (schedule.batch_dims & dims, "sum") if has_distributed_batch else (dims, "avg")
        if group.declared_use != use:
            declare_partial_use([x.parameter for x in group.fsdp_params], *use)
            group.declared_use = use
