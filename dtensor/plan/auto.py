"""``auto_shard``: the placements of a model's parameters and of its batch, found with those of everything in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..base.extensions import provided
from ..base.modes import implicit_replication
from ..base.torch_internals import tree_leaves, tree_map
from ..errors import ArgumentError, PlanError
from ..mesh.device_mesh import DeviceMesh, init_device_mesh
from ..placement import Placement, Replicate
from ..tensor.create import empty
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from ..tensor.observed import OBSERVERS
from .describe import described
from .graph import Graph
from .make import best_options
from .memory import Memory
from .options import Option, classes_from, eager_options
from .program_plan import ProgramPlan, spelled
from .record import Recorder

Places = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Placements that were found.

    Attributes:
        placements: of each parameter and buffer by name; ``batch``: of each tensor of the example, in order.
        seconds, nbytes, memory: predicted, of one step: its time, bytes that a rank receives, bytes that a rank holds at the peak
            (parameters, gradients, optimizer's states, what forward keeps for backward).
        plan: what each call does under them.

    A record; ``apply`` costs what distributing the parameters does, and raises ``ArgumentError`` for another mesh.

    >>> import torch, dtensor as dt
    >>> model, mesh = torch.nn.Linear(64, 64), dt.init_device_mesh("cpu", (4,))
    >>> found = dt.auto_shard(model, mesh, example=(torch.empty(1024, 64),))
    >>> found.apply(model, mesh).weight.placements == found.placements["weight"]
    True
    """

    mesh: tuple[int, ...]
    placements: dict[str, Places]
    batch: tuple[Places, ...]
    seconds: float
    nbytes: int
    memory: int
    plan: ProgramPlan

    def __str__(self) -> str:
        head = (
            f"on a mesh of {'x'.join(map(str, self.mesh))}: {self.seconds * 1e3:.3f} ms a step, {self.nbytes:,} B received and "
            f"{self.memory / 2**30:.2f} GiB held per rank"
        )
        lines = [f"  {name}: {', '.join(spelled(places))}" for name, places in self.placements.items()]
        return "\n".join([head, *lines, *(f"  batch {i}: {', '.join(spelled(places))}" for i, places in enumerate(self.batch))])

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(provided("html_of")(self))

    def apply(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """``model``, its parameters and buffers made DTensors on ``mesh`` in place, as they were placed.

        Raises:
            ArgumentError: the mesh has another shape than the one that was planned for.
        """
        if tuple(mesh.shape) != self.mesh:
            raise ArgumentError(f"these placements are for a mesh of shape {self.mesh}, not {tuple(mesh.shape)}")
        made: dict[int, Any] = {}
        for name, x in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
            owner, _, leaf = name.rpartition(".")
            if id(x) not in made:
                value = distribute_tensor(x.detach(), mesh, self.placements[name])
                made[id(x)] = nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value
            setattr(model.get_submodule(owner), leaf, made[id(x)])
        return model


def auto_shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    example: Sequence[Any] | Mapping[str, Any],
    memory: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer_bytes: float = 8.0,
    placements: Mapping[str, Sequence[Placement]] | None = None,
    seconds: float = 60.0,
) -> Sharding:
    """The placements of parameters and batch under which one step, forward and backward, takes least time by the model.

    Nothing is computed, changed or communicated: the step is recorded on a dry run, and every mesh counts as one of its kind
    (``init_device_mesh("meta", shape)``, a cluster of GPUs). Use :meth:`Sharding.apply`, and ``capture(step, plan="program")`` or
    ``plan`` for the steps.

    Args:
        mesh: of which shape and names matter.
        example: arguments of the model, by position or by name; of tensors shapes and dtypes matter.
        memory: bytes that a rank may hold: parameters, gradients, optimizer's states, what forward keeps for backward.
        loss: from the model's result to a number; default its ``.loss``, or its mean.
        optimizer_bytes: state per element of a parameter: 8 for Adam's two moments.
        placements: of parameters by name, where they are given.
        seconds: for each run of the solver.

    Raises:
        PlanError: no placements were found that fit into ``memory``.

    >>> import torch, dtensor as dt
    >>> model = torch.nn.Linear(64, 64)
    >>> found = dt.auto_shard(model, dt.init_device_mesh("meta", (4,)), example=(torch.empty(1024, 64),))
    >>> sorted(found.placements), found.memory > 0
    (['bias', 'weight'], True)
    """
    graph, named, batch = _recorded(model, mesh, example, loss, optimizer_bytes)
    start = _started(graph, named, placements or {})
    limit, classes = Memory(graph, math.inf if memory is None else memory), classes_from(graph, start)
    tries = [best_options(classes, start, seconds, limit, reverse) for reverse in (False, True)[: 1 + (mesh.ndim > 1)]]
    plans = [(described(graph, classes, taken, start, limit), taken) for taken in tries]
    plan, taken = min(plans, key=lambda made: (max(made[0].peak_bytes, limit.limit), made[0].seconds))
    if plan.peak_bytes > limit.limit:
        raise PlanError(f"auto_shard: the least memory found is {plan.peak_bytes:,} B per rank, more than memory={memory:,.0f}")

    def places(number: int | None, ndim: int = mesh.ndim) -> Places:
        layout = None if number is None else taken[graph.values[number].producer.number].results[0]
        return (Replicate(),) * ndim if layout is None else layout.placements

    return Sharding(
        tuple(mesh.shape),
        {name: places(number) for name, number in named.items()},
        tuple(map(places, batch)),
        plan.seconds,
        plan.nbytes,
        plan.peak_bytes,
        plan,
    )


def _recorded(
    model: nn.Module, mesh: DeviceMesh, example: Any, loss: Any, optimizer_bytes: float
) -> tuple[Graph, dict[str, int | None], list[int | None]]:
    """The graph of one step, everything whole on a dry run; the values of parameters and buffers by name, and of the batch."""
    dry = mesh if mesh.kind == "dry_run" else init_device_mesh("meta", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
    stand_ins: dict[int, DTensor] = {}

    def stand_in(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in stand_ins:
            made = empty(*x.shape, device_mesh=dry, dtype=x.dtype)
            stand_ins[id(x)] = made.requires_grad_() if x.requires_grad else made
        return stand_ins[id(x)]

    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    swapped = {name: stand_in(x) for name, x in state.items()}
    given = tree_map(stand_in, example)
    args, kwargs = ((), given) if isinstance(example, Mapping) else (tuple(given), {})
    recorder = Recorder(placing=True)
    with recorder, OBSERVERS.entered(recorder), implicit_replication():
        made = torch.func.functional_call(model, swapped, args, kwargs)
        _loss_of(made, loss).backward()
    for x in stand_ins.values():
        value = recorder.value_of(x)
        if value is not None:
            size = x.element_size()
            value.producer.memory = (size + optimizer_bytes) / size if x.requires_grad else 1.0
    recorder.finish()
    numbers = {name: _number(recorder, x) for name, x in swapped.items()}
    return recorder.graph, numbers, [_number(recorder, x) for x in tree_leaves(given) if isinstance(x, DTensor)]


def _number(recorder: Recorder, x: DTensor) -> int | None:
    value = recorder.value_of(x)
    return None if value is None else value.number


def _loss_of(made: Any, loss: Any) -> torch.Tensor:
    if loss is not None:
        return loss(made)
    found = getattr(made, "loss", made)
    if not isinstance(found, torch.Tensor):
        raise ArgumentError("auto_shard: the model gives no loss; pass loss=, a function from its result to a number")
    return found if not found.ndim else found.float().mean()


def _started(graph: Graph, named: Mapping[str, int | None], given: Mapping[str, Sequence[Placement]]) -> list[Option]:
    """The recorded options, with parameters where they are given to lie."""
    options = eager_options(graph)
    for name, places in given.items():
        if name not in named:
            raise ArgumentError(f"auto_shard: placements are given for {name!r}, which the model does not have")
        number = named[name]
        if number is not None:
            producer = graph.values[number].producer
            layout = graph.values[number].layout.replace(placements=places)
            options[producer.number] = replace(options[producer.number], results=(layout,))
            producer.given = True
    return options
