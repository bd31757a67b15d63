"""``auto_shard``: the placements of parameters, optimizer states and batch, found with those of everything in between."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..base.late_binding import pictured
from ..base.modes import implicit_replication
from ..base.torch_internals import tree_leaves, tree_map
from ..base.units import bytes_text, seconds_text
from ..errors import ArgumentError, PlanError
from ..mesh.create import dry_run_of
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placement, Replicate
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from ..tensor.observers import OBSERVERS
from ..tensor.stale_params import Attributes
from .api import agreed, best_options
from .describe import described
from .graph import Graph
from .graph_recorder import Recorder
from .liveness import Memory
from .meta_substitution import StandIns, reached
from .program_plan import ProgramPlan, spelled
from .strategy_options import Option, classes_from, eager_options

Places = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Placements that were found.

    Attributes:
        placements: of each parameter and buffer by name, and of each of an optimizer's states by its parameter's name and its own
            (``"0.weight.exp_avg"``); ``batch``: of each tensor of the example, in order.
        seconds, nbytes, memory: predicted, of one step: its time, bytes that a rank receives, bytes that a rank holds at the peak
            (parameters, gradients, optimizer's states, what forward keeps for backward, and what is in use at that moment).
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
            f"on a mesh of {'x'.join(map(str, self.mesh))}: {seconds_text(self.seconds)} a step, {bytes_text(self.nbytes)} "
            f"received and peak memory {bytes_text(self.memory)} per rank"
        )
        lines = [f"  {name}: {', '.join(spelled(places))}" for name, places in self.placements.items()]
        return "\n".join([head, *lines, *(f"  batch {i}: {', '.join(spelled(places))}" for i, places in enumerate(self.batch))])

    _repr_html_ = pictured

    def apply(self, model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
        """``model``, its parameters and buffers made DTensors on ``mesh`` in place, as they were placed.

        Args:
            optimizer: over the model's parameters; it goes on with the new ones, its states placed as they were found, those that
                it has and those that it makes in its next step.

        Raises:
            ArgumentError: the mesh has another shape than the one that was planned for.
        """
        if tuple(mesh.shape) != self.mesh:
            raise ArgumentError(f"these placements are for a mesh of shape {self.mesh}, not {tuple(mesh.shape)}")
        made: dict[int, Any] = {}
        names: dict[Any, str] = {}
        for name, x in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
            owner, _, leaf = name.rpartition(".")
            if id(x) not in made:
                value = distribute_tensor(x.detach(), mesh, self.placements[name])
                made[id(x)] = nn.Parameter(value, x.requires_grad) if isinstance(x, nn.Parameter) else value
                Attributes.of(x).set_on(made[id(x)])
                names[made[id(x)]] = name
            setattr(model.get_submodule(owner), leaf, made[id(x)])
        if optimizer is not None:
            for group in optimizer.param_groups:
                group["params"] = [made.get(id(p), p) for p in group["params"]]
            for p in [p for p in optimizer.state if id(p) in made]:
                optimizer.state[made[id(p)]] = optimizer.state.pop(p)
            self._place_states(optimizer, mesh, names)
            optimizer.register_step_post_hook(lambda own, *_: self._place_states(own, mesh, names))
        return model

    def _place_states(self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, names: Mapping[Any, str]) -> None:
        for p, state in optimizer.state.items():
            for key, x in state.items():
                places = self.placements.get(f"{names.get(p, '')}.{key}")
                if places is not None and isinstance(x, DTensor) and x.placements != places:
                    state[key] = x.redistribute(placements=places)
                elif places is not None and not isinstance(x, DTensor):
                    state[key] = distribute_tensor(x, mesh, places)


@dataclass(slots=True)
class _Program:
    """A recorded step: its graph, and the values of parameters, buffers and states by name, and of the batch."""

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
    placements: Mapping[str, Sequence[Placement]] | None = None,
    seconds: float = 60.0,
) -> Sharding:
    """The placements under which one step takes least time by the model: of parameters, of an optimizer's states, of the batch.

    Nothing is computed and no tensor is changed: the step is recorded on a dry run, and priced as ``mesh`` is: by its calibrated
    profile, or, on ``init_device_mesh("meta", shape)``, as a cluster of GPUs. Use :meth:`Sharding.apply`, and
    ``capture(step, plan="program")`` or ``plan`` for the steps. On process groups every rank calls it, and all get what the first
    one finds; that exchange is all that is communicated.

    Args:
        model_or_step: a model, of which forward and backward are one step; or a function that does a step, its optimizer's too.
            Its modules and optimizers are those that it names, is bound to or is given in ``example``; it runs twice, with
            tensors without data (what else it counts, as a schedule does, goes on).
        example: arguments, by position or by name; of tensors shapes and dtypes matter.
        memory: bytes that a rank may hold at once: parameters, gradients, optimizer's states, activations, moved forms.
        loss: from the model's result to a number; default its ``.loss``, or its mean.
        optimizer_bytes: for a model, state per element of a parameter: 8 for Adam's two moments in float32.
        placements: of parameters and states by name, where they are given.
        seconds: for each run of the solver.

    Raises:
        PlanError: no placements were found that fit into ``memory``; the least peak that was found is told.

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
    program = _recorded(model_or_step, mesh, example, loss, optimizer_bytes)
    start = _started(program, placements or {})
    return agreed(mesh, lambda: _found(program, start, math.inf if memory is None else memory, seconds))


def _found(program: _Program, start: list[Option], memory: float, seconds: float) -> Sharding:
    graph, limit = program.graph, Memory(program.graph, memory)
    mesh, classes = graph.mesh, classes_from(graph, start)
    assert mesh is not None
    tries = [best_options(classes, start, seconds, limit, reverse) for reverse in (False, True)[: 1 + (mesh.ndim > 1)]]
    plans = [(described(graph, classes, taken, start, limit), taken) for taken in tries]
    plan, taken = min(plans, key=lambda made: (max(made[0].peak_bytes, memory), made[0].seconds))
    if plan.peak_bytes > memory:
        raise PlanError(
            f"auto_shard: no placements within memory={memory:,.0f} bytes per rank were found; the smallest peak is "
            f"{plan.peak_bytes:,} bytes, in {plan.peak_at}. Use a larger mesh, a smaller batch or more memory="
        )

    def places(number: int | None, ndim: int = mesh.ndim) -> Places:
        layout = None if number is None else taken[graph.values[number].producer.number].results[0]
        return (Replicate(),) * ndim if layout is None else layout.placements

    named = {name: places(number) for name, number in program.named.items()}
    batch = tuple(map(places, program.batch))
    return Sharding(tuple(mesh.shape), named, batch, plan.seconds, plan.nbytes, plan.peak_bytes, plan)


def _recorded(what: Any, mesh: DeviceMesh, example: Any, loss: Any, optimizer_bytes: float) -> _Program:
    """One step, everything whole on a dry run."""
    model = what if isinstance(what, nn.Module) else None
    recorder = Recorder(placing=True)
    with StandIns(dry_run_of(mesh), {"model": model} if model is not None else reached(what, example)) as there:
        given = tree_map(there.of, example)
        args, kwargs = ((), given) if isinstance(example, Mapping) else (tuple(given), {})

        def run() -> None:
            made = what(*args, **kwargs)
            if model is not None:
                _loss_of(made, loss).backward()

        with implicit_replication():
            if there.optimizers:
                run()  # makes their states
            with recorder, OBSERVERS.entered(recorder):
                run()
        recorder.finish()
        if recorder.graph.mesh is None:
            raise PlanError("auto_shard: the step uses no module that it refers to, is a method of, or gets as an argument")
        named = {**there.parameters, **there.states}
        for x in [*there.all, *named.values()]:
            if (number := _number(recorder, x)) is not None:
                held = optimizer_bytes / x.element_size() if x.requires_grad and not there.optimizers else 0.0
                recorder.graph.values[number].producer.memory = 1.0 + held
        batch = [_number(recorder, x) for x in tree_leaves(given) if isinstance(x, DTensor)]
        return _Program(recorder.graph, {name: _number(recorder, x) for name, x in named.items()}, batch)


def _number(recorder: Recorder, x: DTensor) -> int | None:
    """The input that a tensor was, whatever has been written to it since."""
    value = recorder.value_of(x)
    return None if value is None or recorder.graph.values[value.root].producer.kind != "input" else value.root


def _loss_of(made: Any, loss: Any) -> torch.Tensor:
    if loss is not None:
        return loss(made)
    found = getattr(made, "loss", made)
    if not isinstance(found, torch.Tensor):
        raise ArgumentError(
            "auto_shard: the model does not return a loss; pass loss=, a function from the result of the model to a scalar"
        )
    return found if not found.ndim else found.float().mean()


def _started(program: _Program, given: Mapping[str, Sequence[Placement]]) -> list[Option]:
    """The recorded options, with parameters and states where they are given to lie."""
    graph, options = program.graph, eager_options(program.graph)
    for name, places in given.items():
        if name not in program.named:
            raise ArgumentError(f"auto_shard: placements are given for {name!r}, which the model does not have")
        number = program.named[name]
        if number is not None:
            producer = graph.values[number].producer
            layout = graph.values[number].layout.replace(placements=places)
            options[producer.number] = replace(options[producer.number], results=(layout,))
            producer.given = True
    return options
