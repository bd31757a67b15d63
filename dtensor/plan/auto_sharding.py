"""Auto-sharding: finds placements of parameters, optimizer states and batch, together with those of all values in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..base.late_binding import html_repr
from ..base.modes import implicit_replication
from ..base.torch_internals import tree_leaves, tree_map
from ..base.units import bytes_text, seconds_text
from ..errors import ArgumentError, PlanError
from ..mesh.create_mesh import dry_run_of_mesh
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placement, Replicate
from ..placement import Placements as AnyPlacements
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from ..tensor.modules.stale_params import ParamAttributes
from ..tensor.observers import OBSERVERS
from .graph import Graph
from .graph_recorder import GraphRecorder
from .liveness import MemoryModel
from .make_plan import broadcast_result, choose_options
from .meta_substitution import MetaSubstitution, find_objects
from .plan_builder import build_plan
from .program_plan import ProgramPlan, placement_texts
from .strategy_options import Option, make_classes, recorded_options

Placements = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Result of :func:`auto_shard`: placements of parameters, states and batch, their predicted costs, and the program plan.

    Attributes:
        mesh: the shape of the mesh.
        placements: for each parameter and buffer by name. For each optimizer state, by the names of parameter and state
            (``"0.weight.exp_avg"``).
        batch: for each tensor of the example, in order.
        seconds: predicted time of one step.
        nbytes: predicted bytes that a rank receives in one step.
        memory: predicted peak in bytes of one rank: parameters, gradients, optimizer states, tensors saved for backward, and
            tensors in use.
        plan: the plan of the step under these placements.

    The object is a record, and reading it does not communicate. ``apply`` distributes the parameters. It raises ``ArgumentError``
    for another mesh.

    >>> import torch, dtensor as dt
    >>> model, mesh = torch.nn.Linear(64, 64), dt.init_device_mesh("cpu", (4,))
    >>> found = dt.auto_shard(model, mesh, example=(torch.empty(1024, 64),))
    >>> found.apply(model, mesh).weight.placements == found.placements["weight"]
    True
    """

    mesh: tuple[int, ...]
    placements: dict[str, Placements]
    batch: tuple[Placements, ...]
    seconds: float
    nbytes: int
    memory: int
    plan: ProgramPlan

    def __str__(self) -> str:
        head = (
            f"on a mesh of {'x'.join(map(str, self.mesh))}: {seconds_text(self.seconds)} a step, {bytes_text(self.nbytes)} "
            f"received and peak memory {bytes_text(self.memory)} per rank"
        )
        parameters = [f"  {name}: {', '.join(placement_texts(own))}" for name, own in self.placements.items()]
        batch = [f"  batch {i}: {', '.join(placement_texts(own))}" for i, own in enumerate(self.batch)]
        return "\n".join([head, *parameters, *batch])

    _repr_html_ = html_repr

    def apply(self, model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """Replace the parameters and buffers of ``model`` by DTensors with the placements of this record, and return the model.

        Args:
            model: the model; it is changed in place.
            mesh: a mesh of the planned shape.
            optimizer: an optimizer of the model's parameters. It continues with the new parameters. Its states get their
                placements, those that exist and those that its next step makes.

        Raises:
            ArgumentError: the mesh has another shape than the planned one.
        """
        if tuple(mesh.shape) != self.mesh:
            raise ArgumentError(f"these placements are for a mesh of shape {self.mesh}, not {tuple(mesh.shape)}")
        distributed: dict[int, Any] = {}
        names: dict[Any, str] = {}
        for name, x in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
            owner, _, leaf = name.rpartition(".")
            if id(x) not in distributed:
                value = distribute_tensor(x.detach(), mesh, self.placements[name])
                distributed[id(x)] = nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value
                ParamAttributes.of(x).set_on(distributed[id(x)])
                names[distributed[id(x)]] = name
            setattr(model.get_submodule(owner), leaf, distributed[id(x)])
        if optimizer is not None:
            for group in optimizer.param_groups:
                group["params"] = [distributed.get(id(p), p) for p in group["params"]]
            for p in [p for p in optimizer.state if id(p) in distributed]:
                optimizer.state[distributed[id(p)]] = optimizer.state.pop(p)
            self._place_states(optimizer, mesh, names)
            optimizer.register_step_post_hook(lambda own, *_: self._place_states(own, mesh, names))
        return model

    def _place_states(self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, names: Mapping[Any, str]) -> None:
        """Redistribute or distribute the states of an optimizer to the planned placements."""
        for p, state in optimizer.state.items():
            for key, x in state.items():
                placements = self.placements.get(f"{names.get(p, '')}.{key}")
                if placements is not None and isinstance(x, DTensor) and x.placements != placements:
                    state[key] = x.redistribute(placements=placements)
                elif placements is not None and not isinstance(x, DTensor):
                    state[key] = distribute_tensor(x, mesh, placements)


@dataclass(slots=True)
class _RecordedStep:
    """Recorded step: its graph, and the graph values of named tensors and of the batch; None for an unused tensor."""

    graph: Graph
    named: dict[str, int | None] = field(default_factory=dict)
    batch: list[int | None] = field(default_factory=list)


def auto_shard(
    model_or_step: nn.Module | Callable[..., Any],
    mesh: DeviceMesh,
    *,
    example: Sequence[Any] | Mapping[str, Any] = (),
    memory: float | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer_bytes: float = 8.0,
    placements: Mapping[str, AnyPlacements] | None = None,
    seconds: float = 60.0,
) -> Sharding:
    """Return placements of parameters, optimizer states and batch with the least estimated time of one step.

    Nothing is computed and no tensor is changed. The step is recorded on a dry run, with the costs of ``mesh``: its calibrated
    profile, or a cluster of GPUs for ``init_device_mesh("meta", shape)``. Use :meth:`Sharding.apply` to distribute the model, and
    ``capture(step, plan="program")`` or ``plan`` for the steps. On process groups every rank calls it, and all ranks get the
    result of the first rank. Nothing else is communicated.

    Args:
        model_or_step: a model, with forward and backward as one step; or a function that runs a step, with its optimizer. The
            function's modules and optimizers are those that it names, is bound to or gets in ``example``. It runs twice on
            tensors without data. Its other state, such as a learning-rate schedule, advances.
        mesh: the mesh to shard over.
        example: arguments, by position or by name. Only shapes and dtypes of tensors matter.
        memory: bytes that a rank may hold at once: parameters, gradients, optimizer states, activations, redistributed copies.
        loss: a function from the model's result to a scalar. The default is the result's ``.loss``, or its mean.
        optimizer_bytes: for a model, bytes of optimizer state per element of a parameter: 8 for Adam's two moments in float32.
        placements: fixed placements of parameters and states, by name, in any form.
        seconds: time limit for each run of the solver.

    Raises:
        PlanError: no placements were found that fit into ``memory``. The message has the smallest peak that was found.

    >>> import torch, dtensor as dt
    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> def step(x):
    ...     model(x).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> found = dt.auto_shard(step, dt.init_device_mesh("meta", (4,)), example=(torch.empty(1024, 64),))
    >>> sorted(found.placements)
    ['bias', 'bias.exp_avg', 'bias.exp_avg_sq', 'weight', 'weight.exp_avg', 'weight.exp_avg_sq']
    """
    step = _record_step(model_or_step, mesh, example, loss, optimizer_bytes)
    start = _start_options(step, placements or {})
    return broadcast_result(mesh, lambda: _search(step, start, math.inf if memory is None else memory, seconds))


def _search(step: _RecordedStep, start: list[Option], memory: float, seconds: float) -> Sharding:
    """Return the cheapest sharding within ``memory`` that the planner finds; it tries both orders of the mesh dims."""
    graph, model = step.graph, MemoryModel(step.graph, memory)
    mesh, classes = graph.mesh, make_classes(graph, start)
    assert mesh is not None
    orders = (False, True)[: 1 + (mesh.ndim > 1)]
    candidates = [choose_options(classes, start, seconds, model, reverse) for reverse in orders]
    plans = [(build_plan(graph, classes, options, start, model), options) for options in candidates]
    plan, options = min(plans, key=lambda pair: (max(pair[0].peak_bytes, memory), pair[0].seconds))
    if plan.peak_bytes > memory:
        raise PlanError(
            f"auto_shard: no placements within memory={memory:,.0f} bytes per rank were found; the smallest peak is "
            f"{plan.peak_bytes:,} bytes, in {plan.peak_at}. Use a larger mesh, a smaller batch or more memory="
        )

    def placements_of_value(number: int | None, ndim: int = mesh.ndim) -> Placements:
        layout = None if number is None else options[graph.values[number].producer.number].results[0]
        return (Replicate(),) * ndim if layout is None else layout.placements

    named = {name: placements_of_value(number) for name, number in step.named.items()}
    batch = tuple(map(placements_of_value, step.batch))
    return Sharding(tuple(mesh.shape), named, batch, plan.seconds, plan.nbytes, plan.peak_bytes, plan)


def _record_step(model_or_step: Any, mesh: DeviceMesh, example: Any, loss: Any, optimizer_bytes: float) -> _RecordedStep:
    """Record one step as a graph, on meta tensors that are replicated over a dry-run mesh."""
    model = model_or_step if isinstance(model_or_step, nn.Module) else None
    recorder = GraphRecorder(for_placement=True)
    objects = {"model": model} if model is not None else find_objects(model_or_step, example)
    with MetaSubstitution(dry_run_of_mesh(mesh), objects) as substitution:
        inputs = tree_map(substitution.replace_tensor, example)
        args, kwargs = ((), inputs) if isinstance(example, Mapping) else (tuple(inputs), {})

        def run_step() -> None:
            """Run the user's step once; for a model, its forward and the backward of its loss."""
            result = model_or_step(*args, **kwargs)
            if model is not None:
                _compute_loss(result, loss).backward()

        with implicit_replication():
            if substitution.optimizers:
                run_step()  # the optimizers make their states
            with recorder, OBSERVERS.entered(recorder):
                run_step()
        recorder.complete_graph()
        if recorder.graph.mesh is None:
            raise PlanError("auto_shard: the step uses no module that it refers to, is a method of, or gets as an argument")
        named = {**substitution.parameters, **substitution.states}
        for x in [*substitution.tensors, *named.values()]:
            if (number := _find_input(recorder, x)) is not None:
                state = optimizer_bytes / x.element_size() if x.requires_grad and not substitution.optimizers else 0.0
                recorder.graph.values[number].producer.bytes_factor = 1.0 + state
        batch = [_find_input(recorder, x) for x in tree_leaves(inputs) if isinstance(x, DTensor)]
        return _RecordedStep(recorder.graph, {name: _find_input(recorder, x) for name, x in named.items()}, batch)


def _find_input(recorder: GraphRecorder, x: DTensor) -> int | None:
    """Return the number of the graph input that a tensor was at first; None if the step has not used it as an input."""
    value = recorder.find_value(x)
    return None if value is None or recorder.graph.values[value.root].producer.kind != "input" else value.root


def _compute_loss(result: Any, loss: Any) -> torch.Tensor:
    """Return the scalar loss of the model's result: by the user's function, its attribute ``loss``, or its mean."""
    if loss is not None:
        return loss(result)
    value = getattr(result, "loss", result)
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            "auto_shard: the model does not return a loss; pass loss=, a function from the result of the model to a scalar"
        )
    return value if not value.ndim else value.float().mean()


def _start_options(step: _RecordedStep, fixed: Mapping[str, AnyPlacements]) -> list[Option]:
    """Return one option per node to start the search from: the recorded ones, with the user's fixed placements."""
    graph, options = step.graph, recorded_options(step.graph)
    for name, placements in fixed.items():
        if name not in step.named:
            raise ArgumentError(f"auto_shard: placements are given for {name!r}, which the model does not have")
        number = step.named[name]
        if number is not None:
            producer = graph.values[number].producer
            layout = graph.values[number].layout.to_replicated().replace(placements=placements)
            options[producer.number] = replace(options[producer.number], results=(layout,))
            producer.is_user_placed = True
    return options
