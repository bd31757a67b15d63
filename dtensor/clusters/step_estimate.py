"""What a training step of a transformer takes on a cluster: dry runs of its parts on one rank, put together by a schedule.

Memory, bytes and seconds of a part are those of its dry run (:mod:`.dry_step`), whose cost does not grow with the ranks. Stated
are how many layers a rank has, how many micro batches are under way, and what goes on at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from ..base.caches import remembered
from ..base.group_by import by_key
from ..errors import PlanError
from .cluster import Cluster, Degrees, all_degrees
from .decoder_parts import AGAIN
from .dry_step import DryStep, Work, dry_step
from .model_sizes import Transformer

_ROOM = 0.94  # of a device's memory: the rest is the allocator's and the libraries'


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step on the busiest rank.

    Attributes:
        again: what backward computes anew: "nothing", "elementwise" or "everything".
        memory: kind -> bytes held at the peak.
        nbytes: mesh dim -> bytes received in a step.
        seconds: kind -> seconds of a step that nothing else hides.
        mfu: products of the model per second, over those of the data sheet.

    A record: it communicates nothing.

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
    """What one step takes.

    Parameters are gathered, and gradients reduced, once in a step, over ``dp`` and ``cp``; bfloat16 with float32 state that is
    spread over them. Exchanges over ``tp``, ``cp`` and ``ep`` are waited for, as the dry run issues them; those over ``dp`` go on
    under the last micro batch's passes. Stages are balanced: the embedding and the head are shared out among them.

    Args:
        sequence: tokens of a sequence.
        batch: sequences of a step, of all ranks.
        micro: sequences of a micro batch.
        chunks: stages of the interleaved pipeline that each rank has; default one for each layer.
        again: what backward computes anew; default the least with which the step fits.

    Raises:
        PlanError: the degrees do not divide the model, the sequence or the batch.

    >>> from dtensor.clusters import CLUSTERS, MODELS
    >>> found = estimate(MODELS["llama3-8b"], CLUSTERS["h100"], Degrees(tp=2, dp=32), 8192, 128)
    >>> found.fits, 0.3 < found.mfu < 0.6, sorted(found.nbytes)
    (True, True, ['cp', 'dp', 'ep', 'pp', 'tp'])

    Cost: none but host time, a second or so; dry runs are remembered.
    """
    degrees.check(model, sequence, batch)
    if batch // degrees.dp % micro:
        raise PlanError(f"micro batches of {micro} do not divide the {batch // degrees.dp} sequences of a rank")
    given = _Given(model, cluster, degrees, sequence, batch, micro, chunks)
    return _least(given, given.parts(degrees), AGAIN if again is None else (again,))


Parts = Callable[[str, str], DryStep]  # of a part and what it does again


@dataclass(frozen=True, slots=True)
class _Given:
    """What is asked for."""

    model: Transformer
    cluster: Cluster
    degrees: Degrees
    sequence: int
    batch: int
    micro: int = 1
    chunks: int | None = None

    def parts(self, degrees: Degrees) -> Parts:
        """The dry runs of its parts on other ranks."""
        return lambda part, again: _dry_step(part, again, self.model, self.cluster, degrees, self.sequence, self.micro)


@remembered(4096)
def _dry_step(
    part: str, again: str, model: Transformer, cluster: Cluster, degrees: Degrees, sequence: int, micro: int
) -> DryStep:
    return dry_step(part, model, degrees.mesh(cluster), sequence, micro, again)


def _least(given: _Given, parts: Parts, kinds: Sequence[str] = AGAIN) -> Estimate:
    """With as little done again as fits, if anything does."""
    for again in kinds:
        found = _composed(given, parts, again)
        if found.fits:
            break
    return found


def _composed(given: _Given, parts: Parts, again: str) -> Estimate:
    model, cluster, degrees = given.model, given.cluster, given.degrees
    pp, micros = degrees.pp, given.batch // degrees.dp // given.micro
    chunks = 1 if pp == 1 else given.chunks or max(1, model.layers // pp)
    start, layer, end = parts("start", AGAIN[0]), parts("layer", again), parts("end", AGAIN[0])
    shares = ((start, 1 / pp), (layer, model.layers / pp), (end, 1 / pp))

    passes, once = Work(), Work()
    for part, share in shares:
        passes, once = passes.plus(part.micro, share * micros), once.plus(part.once, share)
    if pp > 1:  # activations forward, their gradients back: a message of each stage's
        passes = passes.plus(_between(cluster, degrees, layer.boundary), 2 * chunks * micros)
    computing = passes.seconds["products"] + passes.seconds["elementwise"]
    seconds = {kind: passes.seconds[kind] + once.seconds[kind] for kind in ("products", "elementwise", "tp", "cp", "ep", "pp")}
    seconds["dp"] = max(0.0, once.seconds["dp"] - computing / micros)
    seconds["bubble"] = sum(passes.seconds.values()) * (pp - 1) / (chunks * micros)
    total = passes.plus(once).nbytes

    memory = {kind: sum(share * part.memory[kind] for part, share in shares) for kind in layer.memory}
    flying = min(micros, pp + (pp - 1) / chunks)  # micro batches that a stage has begun before the first one comes back
    memory["activations"] = flying * model.layers / pp * layer.saved
    memory["logits"] = end.saved
    memory["passing"] = max(part.most for part, _ in shares)
    mfu = 3 * model.flops(given.sequence) * given.sequence * given.batch / (sum(seconds.values()) * degrees.ranks * cluster.peak)
    nbytes = {dim: total[dim] for dim in ("tp", "cp", "ep", "pp", "dp")}
    return Estimate(degrees, again, memory, nbytes, seconds, mfu, sum(memory.values()) < _ROOM * cluster.memory)


def _between(cluster: Cluster, degrees: Degrees, nbytes: float) -> Work:
    """A message to the next stage."""
    profile = cluster.profile
    reach = degrees.tp * degrees.cp * degrees.ep * degrees.pp
    link = profile.link("nccl", between_hosts=reach > profile.ranks_per_host)
    made = Work()
    made.nbytes["pp"] += nbytes
    made.seconds["pp"] += link.exchange.seconds(2, nbytes)
    return made


def best(model: Transformer, cluster: Cluster, ranks: int, sequence: int, batch: int, most: int = 8) -> list[Estimate]:
    """The fastest ways to lay a step over ``ranks`` that fit into memory, at most ``most``.

    A micro batch takes the same whatever ``pp`` and ``dp`` are, so a dry run for each ``tp``, ``cp`` and ``ep`` says what a step
    takes at least; then those are tried that may be among the fastest.

    Raises:
        PlanError: none fits.

    >>> from dtensor.clusters import CLUSTERS, Transformer
    >>> small = Transformer(2, 1024, 8, 8, 4096, 1000)
    >>> [str(one.degrees) for one in best(small, CLUSTERS["h100"], 4, 1024, 8, most=1)]
    ['tp 1 x cp 1 x pp 1 x dp 4']

    Cost: it communicates nothing; host time, below a minute for 16,384 ranks.
    """
    ways = all_degrees(model, ranks, cluster.profile.ranks_per_host, sequence, batch)
    families = by_key((_family(degrees), degrees) for degrees in ways)
    queue: list[tuple[float, int, int, Estimate]] = []  # by what a step takes at least; how sure that is
    numbers = count()

    def push(sure: int, one: Estimate) -> None:
        heappush(queue, (one.step_seconds, next(numbers), sure, one))

    for family in families.values():
        for degrees in family:
            given = _Given(model, cluster, degrees, sequence, batch)
            push(0, _composed(given, _without_spread(given.parts(_fewest(family))), AGAIN[0]))
    found: list[Estimate] = []
    while queue and len(found) < most:
        _, _, sure, one = heappop(queue)
        given, family = _Given(model, cluster, one.degrees, sequence, batch), families[_family(one.degrees)]
        if sure == 2:
            found.append(one)
        elif (better := _least(given, given.parts(one.degrees) if sure else _without_spread(given.parts(_fewest(family))))).fits:
            push(sure + 1, better)
    if not found:
        raise PlanError(
            f"no layout tp x cp x pp x dp of {ranks} ranks with {batch} sequences of {sequence} tokens fits "
            f"into {cluster.memory / 1e9:,.0f} GB per rank"
        )
    return found


def _family(degrees: Degrees) -> tuple[int, ...]:
    return degrees.tp, degrees.cp, degrees.ep


def _fewest(family: list[Degrees]) -> Degrees:
    """The cheapest to run."""
    return min(family, key=lambda degrees: degrees.dp)


def _without_spread(parts: Parts) -> Parts:
    """Without whatever is spread over ``dp``: parameters are held in half as many bytes as their gradients."""

    def of(part: str, again: str) -> DryStep:
        step = parts(part, again)
        gradients = step.memory["gradients"]
        return replace(
            step, once=Work(), memory={"parameters": gradients / 2, "gradients": gradients, "optimizer": 0.0}, most=0.0
        )

    return of
