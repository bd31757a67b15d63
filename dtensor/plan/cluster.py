"""What a training step of a transformer takes on a cluster, in closed form: memory by kind, bytes by mesh dim, seconds, MFU.

Nothing is run and nothing is kept per rank: time and memory of an estimate do not depend on the number of ranks. What a layer
sends is what the programs of this library send (``tests/plan/test_cluster.py`` compares them).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..cost.device import DEVICES, Device
from ..cost.profile import Link
from ..errors import PlanError
from .transformer import Transformer

_HALF, _FULL = 2, 4  # bytes of bfloat16 and float32
_ATTENTION = 0.55  # of the rate of products, about: FlashAttention-2, forward and backward, on an H100
_STATE = 12  # bytes of an optimizer's state for each parameter: master weight and two moments in float32


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and links, as stated: nothing is measured.

    Attributes:
        peak: FLOPs per second of the data sheet, dense bfloat16, by which MFU counts; ``device`` has what products reach.
        memory: bytes of a device.
        node: ranks that ``inside`` joins; groups that reach further go by ``between``.
    """

    device: Device
    peak: float
    memory: float
    node: int
    inside: Link
    between: Link


def _tpu() -> Device:
    flops = {"float64": 1e12, "float32": 5.7e13, "half": 3.2e14, "other": 6.4e14}  # 70 % of 459 TFLOP/s in bfloat16
    return Device("TPU v5p", flops, 2.5e12, 2e-6)


def _links(inside: float, between: float, memory: float) -> tuple[Link, Link]:
    """Of 80 % of what data sheets say of one direction: NVLink 3 and 4, InfiniBand of 200 and 400 Gb/s per GPU, two links of
    90 GB/s for a ring on an axis of the torus.
    """
    return Link.uniform(1e-5, 1e-6, inside, memory), Link.uniform(2e-5, 2e-6, between, memory)


CLUSTERS = {
    "a100": Cluster(DEVICES["A100"], 3.12e14, 80e9, 8, *_links(2.4e11, 2e10, 1.8e12)),
    "h100": Cluster(DEVICES["H100"], 9.89e14, 80e9, 8, *_links(3.6e11, 4e10, 3e12)),
    "tpu-v5p": Cluster(_tpu(), 4.59e14, 95e9, 8960, *_links(1.44e11, 5e9, 2.5e12)),
}


@dataclass(frozen=True, slots=True)
class Degrees:
    """Ranks along mesh dims: ``tp`` innermost, then ``cp``, ``pp``, ``dp``; ``ep`` of those of ``dp`` and ``cp`` cut experts."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp {self.tp} x cp {self.cp} x pp {self.pp} x dp {self.dp}" + (f" (ep {self.ep})" if self.ep > 1 else "")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step on the busiest rank.

    Attributes:
        memory: kind -> bytes held at the peak.
        nbytes: mesh dim -> bytes received in a step.
        seconds: kind -> seconds of a step that nothing else hides.
        mfu: products of the model per second, over those of the data sheet.
    """

    degrees: Degrees
    memory: dict[str, float]
    nbytes: dict[str, float]
    seconds: dict[str, float]
    mfu: float
    fits: bool

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def layer_bytes(model: Transformer, degrees: Degrees, tokens: float, element: int = _HALF) -> dict[str, float]:
    """What a rank receives for one layer, forward and backward, of ``tokens`` (a micro batch's, over ``cp``), by mesh dim.

    Tensor and sequence parallel: two gathers and two reduce-scatters each way. Ring attention: keys and values go around in
    forward, they and their gradients, which are added up in float32, in backward. Experts: tokens go there and come back, each
    way.
    """
    tp, cp, ep = degrees.tp, degrees.cp, degrees.ep
    hidden = tokens * model.hidden * element
    return {
        "tp": 8 * hidden * (tp - 1) / tp,
        "cp": 2 * tokens * model.kv / tp * (cp - 1) * (2 * element + max(element, _FULL)),
        "ep": 4 * hidden * model.chosen / tp * (ep - 1) / ep,
    }


def estimate(
    model: Transformer, cluster: Cluster, degrees: Degrees, sequence: int, batch: int, recompute: bool = False
) -> Estimate:
    """What one step takes.

    Sharded optimizer and gradients over ``dp`` and ``cp`` (ZeRO-2), bfloat16 with float32 state, micro batches of one sequence,
    an interleaved pipeline. Exchanges over ``tp``, ``cp``, ``ep`` and ``pp`` are waited for; those over ``dp`` go on under
    backward.

    Args:
        sequence: tokens of a sequence.
        batch: sequences of a step, of all ranks.
        recompute: layers keep their input alone, and run forward twice.

    Raises:
        PlanError: the degrees do not divide the model or the batch.

    >>> from dtensor.plan.transformer import MODELS
    >>> found = estimate(MODELS["llama3-8b"], CLUSTERS["h100"], Degrees(tp=2, dp=32), 8192, 128)
    >>> found.fits, 0.3 < found.mfu < 0.6, sorted(found.nbytes)
    (True, True, ['cp', 'dp', 'ep', 'pp', 'tp'])
    """
    _check(model, degrees, batch)
    tp, cp, pp, dp, ep = degrees.tp, degrees.cp, degrees.pp, degrees.dp, degrees.ep
    tokens, micros, layers = sequence / cp, batch // dp, model.layers / pp
    device, rounds = cluster.device, 4 if recompute else 3  # forward once or twice, backward as two
    passes = micros * layers

    flops = layers * (model.layer_flops(0) + model.attention_flops(sequence) / _ATTENTION) + model.head_flops / pp
    compute = micros * rounds * device.seconds(flops * tokens / tp, 0, torch.bfloat16)
    elementwise = passes * rounds * 2 * model.kept * tokens * _HALF / tp / device.memory

    nbytes = {dim: passes * count for dim, count in layer_bytes(model, degrees, tokens).items()}
    chunks = max(1, model.layers // pp) if pp > 1 else 1  # of a rank, each a stage of the interleaved pipeline
    nbytes["pp"] = micros * 2 * chunks * tokens * model.hidden * _HALF / tp * (pp > 1)
    dense, routed = _held(model, degrees)
    spread, others = dp * cp, max(1, dp * cp // ep)
    nbytes["dp"] = sum(count * (_HALF + _FULL) * (size - 1) / size for count, size in ((dense, spread), (routed, others)))
    calls = {"tp": 8 * passes, "cp": 3 * passes * (cp - 1), "ep": 4 * passes, "pp": 2 * micros * chunks, "dp": 2 * layers}
    moved = {dim: _seconds(cluster, degrees, dim, nbytes[dim], calls[dim]) for dim in nbytes}
    busy = compute + elementwise + moved["tp"] + moved["cp"] + moved["ep"] + moved["pp"]
    seconds = {"compute": compute, "elementwise": elementwise, **{dim: moved[dim] for dim in ("tp", "cp", "ep", "pp")}}
    seconds["dp"] = max(0.0, moved["dp"] - (compute + elementwise) * 2 / (3 * micros))
    seconds["bubble"] = busy * (pp - 1) / (chunks * micros)

    memory = {
        "parameters": _HALF * (dense + routed),
        "gradients": _FULL * (dense / spread + routed / others),
        "optimizer": _STATE * (dense / spread + routed / others),
        "activations": _activations(model, degrees, tokens, min(micros, pp), layers, recompute),
        "logits": tokens * model.vocabulary * (_HALF + _FULL) / tp,
    }
    total = (model.layers * model.layer_flops(sequence) + model.head_flops) * 3 * sequence * batch
    mfu = total / (sum(seconds.values()) * degrees.ranks * cluster.peak)
    return Estimate(degrees, memory, nbytes, seconds, mfu, sum(memory.values()) < 0.94 * cluster.memory)


def _check(model: Transformer, degrees: Degrees, batch: int) -> None:
    wrong = [
        (model.kv_heads % degrees.tp, f"tp {degrees.tp} does not divide {model.kv_heads} heads of keys and values"),
        (degrees.pp > model.layers, f"pp {degrees.pp} is more than {model.layers} layers"),
        (batch % degrees.dp, f"dp {degrees.dp} does not divide {batch} sequences"),
        (model.experts % degrees.ep, f"ep {degrees.ep} does not divide {model.experts} experts"),
        ((degrees.dp * degrees.cp) % degrees.ep, f"ep {degrees.ep} does not divide the ranks of dp and cp"),
    ]
    said = [words for bad, words in wrong if bad]
    if said:
        raise PlanError("; ".join(said))


def _held(model: Transformer, degrees: Degrees) -> tuple[float, float]:
    """Parameters of a rank: those that all tokens go through, and those of experts."""
    around = model.parameters - model.layers * model.expert_parameters
    routed = model.layers * model.expert_parameters
    share = degrees.tp * degrees.pp
    return (around + (routed if model.experts == 1 else 0)) / share, (routed if model.experts > 1 else 0) / share / degrees.ep


def _activations(model: Transformer, degrees: Degrees, tokens: float, flying: int, layers: float, recompute: bool) -> float:
    """What micro batches under way keep: of each layer all, or its input, and then all of one that runs again."""
    whole = model.kept * tokens * _HALF / degrees.tp
    if not recompute:
        return flying * layers * whole
    return flying * layers * model.hidden * tokens * _HALF / degrees.tp + whole


def _seconds(cluster: Cluster, degrees: Degrees, dim: str, nbytes: float, calls: float) -> float:
    """Of ``calls`` exchanges over a mesh dim that move ``nbytes`` together."""
    size = {"dp": degrees.dp * degrees.cp, "pp": 2}.get(dim, getattr(degrees, dim))
    if size == 1 or not nbytes:
        return 0.0
    inner = {"tp": 1, "cp": degrees.tp, "pp": degrees.tp * degrees.cp}.get(dim, degrees.tp * degrees.cp * degrees.pp)
    reach = inner * (degrees.pp if dim == "pp" else size)
    rate = (cluster.inside if reach <= cluster.node else cluster.between).all_gather
    peers = 2 if dim in ("pp", "cp") else size  # a ring and a pipeline talk to their neighbours
    return calls * rate.seconds(peers, 0) + nbytes / rate.bandwidth


def best(model: Transformer, cluster: Cluster, ranks: int, sequence: int, batch: int, most: int = 8) -> list[Estimate]:
    """The fastest ways to lay a step over ``ranks`` that fit into memory, at most ``most``; layers run twice where that helps.

    Raises:
        PlanError: none fits.
    """
    found = []
    for degrees in _all_degrees(model, ranks, batch):
        tries = [estimate(model, cluster, degrees, sequence, batch, again) for again in (False, True)]
        found += sorted((one for one in tries if one.fits), key=lambda one: one.step_seconds)[:1]
    if not found:
        raise PlanError(
            f"no tp x cp x pp x dp of {ranks} ranks with {batch} sequences of {sequence} fits into {cluster.memory:,.0f} B"
        )
    return sorted(found, key=lambda one: one.step_seconds)[:most]


def _all_degrees(model: Transformer, ranks: int, batch: int) -> Iterator[Degrees]:
    """Powers of two along all dims but ``dp``, which takes the rest."""
    twos = [2**k for k in range(ranks.bit_length()) if ranks % 2**k == 0]
    for tp in twos:
        for cp in twos:
            for pp in twos:
                dp, rest = divmod(ranks, tp * cp * pp)
                for ep in twos if model.experts > 1 else [1]:
                    fits = not rest and dp and not (model.kv_heads % tp or batch % dp or model.experts % ep or dp * cp % ep)
                    if fits and pp <= model.layers:
                        yield Degrees(tp, cp, pp, dp, ep)
