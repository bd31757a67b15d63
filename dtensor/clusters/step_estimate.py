"""Step estimate: time and memory of a transformer's training step on a cluster, composed from dry runs of its parts.

Memory, bytes and seconds of a part are those of its dry run (:mod:`.dry_step`), which does not cost more with more ranks. The
number of layers per rank, the number of micro batches in flight, and the overlap of communication are modeled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from ..base.caches import memoize
from ..base.group_by import group_by_key
from ..errors import PlanError
from .cluster import Cluster, Degrees, iter_degrees
from .decoder_parts import RECOMPUTATIONS
from .dry_step import DryStep, PeriodWork, dry_step
from .model_sizes import Transformer

_USABLE_MEMORY = 0.94  # usable share of a device's memory; the allocator and the libraries need the rest


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of a step on the busiest rank.

    Attributes:
        again: what backward recomputes: "nothing", "elementwise" or "everything".
        memory: bytes at the peak, by kind.
        nbytes: bytes received in a step, by mesh dim.
        seconds: seconds of a step that are not overlapped, by kind.
        mfu: FLOPs of the model per second, relative to the data sheet.

    A record: no communication.

    >>> from dtensor.clusters import CLUSTERS, MODELS
    >>> found = estimate(MODELS["llama3-8b"], CLUSTERS["h100"], Degrees(dp=8), 2048, 64)
    >>> sorted(found.memory)
    ['activations', 'gradients', 'logits', 'optimizer', 'parameters', 'passing']
    """

    degrees: Degrees
    again: str
    memory: dict[str, float]
    nbytes: dict[str, float]
    seconds: dict[str, float]
    mfu: float
    fits: bool

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def estimate(
    model: Transformer,
    cluster: Cluster,
    degrees: Degrees,
    sequence: int,
    batch: int,
    *,
    micro: int = 1,
    chunks: int | None = None,
    again: str | None = None,
) -> Estimate:
    """Return the estimated time, memory and traffic of one training step on the cluster with these degrees.

    Parameters are gathered and gradients are reduced once in a step, over ``dp`` and ``cp``. Parameters are bfloat16, with
    float32 state that is sharded over these dims. The step waits for exchanges over ``tp``, ``cp`` and ``ep``, as the dry run
    issues them. Those over ``dp`` overlap with the passes of the last micro batch. Stages are balanced: the embedding and the
    head are distributed over them.

    Args:
        sequence: tokens of a sequence.
        batch: sequences of a step, of all ranks.
        micro: sequences of a micro batch.
        chunks: stages of the interleaved pipeline per rank; default one for each layer.
        again: what backward recomputes; default the least with which the step fits into memory.

    Raises:
        PlanError: the degrees do not divide the model, the sequence or the batch.

    >>> from dtensor.clusters import CLUSTERS, MODELS
    >>> found = estimate(MODELS["llama3-8b"], CLUSTERS["h100"], Degrees(tp=2, dp=32), 8192, 128)
    >>> found.fits, 0.3 < found.mfu < 0.6, sorted(found.nbytes)
    (True, True, ['cp', 'dp', 'ep', 'pp', 'tp'])

    Cost: only host time, about a second; dry runs are cached.
    """
    degrees.check(model, sequence, batch)
    if batch // degrees.dp % micro:
        raise PlanError(f"micro batches of {micro} do not divide the {batch // degrees.dp} sequences of a rank; pass a divisor")
    request = _StepRequest(model, cluster, degrees, sequence, batch, micro, chunks)
    return _estimate_least_recomputation(request, request.dry_runs_of(degrees), RECOMPUTATIONS if again is None else (again,))


DryRunOf = Callable[[str, str], DryStep]  # (part, what it recomputes) -> its dry run


@dataclass(frozen=True, slots=True)
class _StepRequest:
    """Arguments of a step estimate."""

    model: Transformer
    cluster: Cluster
    degrees: Degrees
    sequence: int
    batch: int
    micro: int = 1
    chunks: int | None = None

    def dry_runs_of(self, degrees: Degrees) -> DryRunOf:
        """Return a function from (part, recomputation) to the cached dry step of that part with these degrees."""
        return lambda part, again: _cached_dry_step(part, again, self.model, self.cluster, degrees, self.sequence, self.micro)


@memoize(4096)
def _cached_dry_step(
    part: str, again: str, model: Transformer, cluster: Cluster, degrees: Degrees, sequence: int, micro: int
) -> DryStep:
    """Return the dry step of one part of a model on the cluster, measured once for equal arguments."""
    return dry_step(part, model, degrees.mesh(cluster), sequence, micro, again)


def _estimate_least_recomputation(request: _StepRequest, parts: DryRunOf, kinds: Sequence[str] = RECOMPUTATIONS) -> Estimate:
    """Return the step estimate with the least recomputation that fits into memory; with the most if none fits."""
    for again in kinds:
        result = _compose_estimate(request, parts, again)
        if result.fits:
            break
    return result


def _compose_estimate(request: _StepRequest, parts: DryRunOf, again: str) -> Estimate:
    """Return the step estimate that follows from the dry steps of a model's parts under a pipeline schedule."""
    model, cluster, degrees = request.model, request.cluster, request.degrees
    pp, micros = degrees.pp, request.batch // degrees.dp // request.micro
    chunks = 1 if pp == 1 else request.chunks or max(1, model.layers // pp)
    start, layer, end = parts("start", RECOMPUTATIONS[0]), parts("layer", again), parts("end", RECOMPUTATIONS[0])
    shares = ((start, 1 / pp), (layer, model.layers / pp), (end, 1 / pp))

    passes, once = PeriodWork(), PeriodWork()
    for part, share in shares:
        passes, once = passes.add_scaled(part.micro, share * micros), once.add_scaled(part.once, share)
    if pp > 1:  # each stage sends activations forward and their gradients back
        passes = passes.add_scaled(_pipeline_message(cluster, degrees, layer.boundary), 2 * chunks * micros)
    computing = passes.seconds["products"] + passes.seconds["elementwise"]
    seconds = {kind: passes.seconds[kind] + once.seconds[kind] for kind in ("products", "elementwise", "tp", "cp", "ep", "pp")}
    seconds["dp"] = max(0.0, once.seconds["dp"] - computing / micros)
    seconds["bubble"] = sum(passes.seconds.values()) * (pp - 1) / (chunks * micros)
    total = passes.add_scaled(once).nbytes

    memory = {kind: sum(share * part.memory[kind] for part, share in shares) for kind in layer.memory}
    in_flight = min(micros, pp + (pp - 1) / chunks)  # micro batches that a stage begins before the first backward
    memory["activations"] = in_flight * model.layers / pp * layer.saved
    memory["logits"] = end.saved
    memory["passing"] = max(part.most for part, _ in shares)
    model_flops = 3 * model.flops(request.sequence) * request.sequence * request.batch
    mfu = model_flops / (sum(seconds.values()) * degrees.ranks * cluster.peak)
    nbytes = {dim: total[dim] for dim in ("tp", "cp", "ep", "pp", "dp")}
    return Estimate(degrees, again, memory, nbytes, seconds, mfu, sum(memory.values()) < _USABLE_MEMORY * cluster.memory)


def _pipeline_message(cluster: Cluster, degrees: Degrees, nbytes: float) -> PeriodWork:
    """Return the bytes and seconds of sending ``nbytes`` of activations to the next pipeline stage."""
    profile = cluster.profile
    reach = degrees.tp * degrees.cp * degrees.ep * degrees.pp
    link = profile.link("nccl", between_hosts=reach > profile.ranks_per_host)
    work = PeriodWork()
    work.nbytes["pp"] += nbytes
    work.seconds["pp"] += link.exchange.seconds(2, nbytes)
    return work


def best(model: Transformer, cluster: Cluster, ranks: int, sequence: int, batch: int, most: int = 8) -> list[Estimate]:
    """Return at most ``most`` parallel layouts over ``ranks``, the fastest that fit into memory, with their estimates.

    A micro batch takes the same time for all ``pp`` and ``dp``. So one dry run for each ``tp``, ``cp`` and ``ep`` gives a lower
    bound of the step. Then the layouts that may be among the fastest are tried.

    Raises:
        PlanError: no layout fits.

    >>> from dtensor.clusters import CLUSTERS, Transformer
    >>> small = Transformer(2, 1024, 8, 8, 4096, 1000)
    >>> [str(one.degrees) for one in best(small, CLUSTERS["h100"], 4, 1024, 8, most=1)]
    ['tp 1 x cp 1 x pp 1 x dp 4']

    Cost: no communication; host time, below a minute for 16,384 ranks.
    """
    candidates = iter_degrees(model, ranks, cluster.profile.ranks_per_host, sequence, batch)
    families = group_by_key((_family_key(degrees), degrees) for degrees in candidates)
    queue: list[tuple[float, int, int, Estimate]] = []  # (lower bound of seconds, number, certainty, estimate)
    numbers = count()

    def push_estimate(certainty: int, one: Estimate) -> None:
        heappush(queue, (one.step_seconds, next(numbers), certainty, one))

    for family in families.values():
        for degrees in family:
            request = _StepRequest(model, cluster, degrees, sequence, batch)
            parts = _without_data_parallel(request.dry_runs_of(_cheapest_degrees(family)))
            push_estimate(0, _compose_estimate(request, parts, RECOMPUTATIONS[0]))
    results: list[Estimate] = []
    while queue and len(results) < most:
        _, _, certainty, one = heappop(queue)
        request, family = _StepRequest(model, cluster, one.degrees, sequence, batch), families[_family_key(one.degrees)]
        if certainty == 2:
            results.append(one)
            continue
        exact = request.dry_runs_of(one.degrees) if certainty else None
        parts = exact or _without_data_parallel(request.dry_runs_of(_cheapest_degrees(family)))
        if (refined := _estimate_least_recomputation(request, parts)).fits:
            push_estimate(certainty + 1, refined)
    if not results:
        raise PlanError(
            f"no layout tp x cp x pp x dp of {ranks} ranks with {batch} sequences of {sequence} tokens fits "
            f"into {cluster.memory / 1e9:,.0f} GB per rank; use more ranks, a smaller batch or shorter sequences"
        )
    return results


def _family_key(degrees: Degrees) -> tuple[int, ...]:
    return degrees.tp, degrees.cp, degrees.ep


def _cheapest_degrees(family: list[Degrees]) -> Degrees:
    """Return the degrees of a family with the fewest ``dp`` ranks, which have the cheapest dry run."""
    return min(family, key=lambda degrees: degrees.dp)


def _without_data_parallel(parts: DryRunOf) -> DryRunOf:
    """Wrap ``parts`` so that dry steps lack the work and memory that depend on ``dp``, for a lower bound of the estimate."""

    def lower_bound_of_part(part: str, again: str) -> DryStep:
        """Return the dry step of a part without work per step, optimizer state and peak memory."""
        step = parts(part, again)
        gradients = step.memory["gradients"]
        return replace(
            step, once=PeriodWork(), memory={"parameters": gradients / 2, "gradients": gradients, "optimizer": 0.0}, most=0.0
        )

    return lower_bound_of_part
