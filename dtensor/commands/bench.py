"""Benchmarks (``dtensor bench``): time redistributions and operators on processes; compare with the cost model and torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..base.units import bytes_text, seconds_text
from ..errors import ArgumentError, PlacementError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placement, Replicate, Shard, check_placement, parse_placement
from ..redistribute import plan
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from .calibrate import median_of_slowest_rank

Shape = tuple[int, ...]
Placements = tuple[Placement, ...]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SECONDS = 0.04  # duration of each round of a case
MOST_RANKS = 64


# --- arguments ---------------------------------------------------------------------------------------------------------
def parse_mesh(text: str) -> Shape:
    """Return the mesh shape that text such as ``"3x2"`` gives.

    Raises:
        ArgumentError: ``text`` is not a shape, or has more ranks than one machine starts.

    >>> parse_mesh("3x2")
    (3, 2)
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ArgumentError(f"{text!r} is not the shape of a mesh; write for example 4 or 3x2")
    shape = tuple(map(int, text.split("x")))
    if not 2 <= math.prod(shape) <= MOST_RANKS:
        raise ArgumentError(f"a mesh of {text} has {math.prod(shape)} ranks, but bench starts from 2 to {MOST_RANKS} processes")
    return shape


def parse_shape(text: str) -> Shape:
    """Return the shape that ``"1031x1021"`` gives, or that of a nearly square float32 matrix of ``"1MB"``.

    Raises:
        ArgumentError: ``text`` is neither.

    >>> parse_shape("1MB"), parse_shape("6x7x8")
    ((512, 512), (6, 7, 8))
    """
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(map(int, text.split("x")))
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)i?B?", text, re.IGNORECASE)
    if match is None or not (elements := int(float(match[1]) * _UNITS[match[2].upper()]) // 4):
        raise ArgumentError(
            f"{text!r} is not a size; write bytes, such as 64KB or 1MB (powers of 1024), or a shape, such as 1031x1021"
        )
    rows = math.isqrt(elements)
    return rows, elements // rows


def parse_pair(text: str, mesh: Shape, ndim: int) -> tuple[Placements, Placements]:
    """Return the source and target placements that ``"S0->S1,R"`` gives; mesh dims left out are replicated.

    Raises:
        ArgumentError: ``text`` is not a pair, or does not fit the mesh or the tensor.

    >>> parse_pair("S0->S1,P", (3, 2), 2)
    ((Shard(dim=0), Replicate()), (Shard(dim=1), Partial(sum)))
    """
    sides = text.replace(" ", "").split("->")
    if len(sides) != 2:
        raise ArgumentError(f"{text!r} is not a redistribution; write SOURCE->TARGET, such as 'S0->S1,R' (in quotes)")
    source, target = (_parse_placements(side, mesh, ndim) for side in sides)
    return source, target


def _parse_placements(side: str, mesh: Shape, ndim: int) -> Placements:
    """Return the placements that comma-separated words such as ``S1,R`` name, one per mesh dim, replicated where left out."""
    words = side.split(",")
    if len(words) > len(mesh):
        raise ArgumentError(f"{side!r} has {len(words)} placements for a mesh of {len(mesh)} mesh dims")
    return (*(_parse_placement(word, ndim) for word in words), *(Replicate(),) * (len(mesh) - len(words)))


def _parse_placement(word: str, ndim: int) -> Placement:
    """Return the placement that a word such as ``S0``, ``R`` or ``P`` names."""
    try:
        return check_placement(parse_placement(re.sub(r"^S(\d+)$", r"S(\1)", word)), ndim)
    except PlacementError:
        raise ArgumentError(
            f"{word!r} is not a placement of a tensor with {ndim} dims; write R, S0 to S{ndim - 1}, P or P(max)"
        ) from None


def default_pairs(mesh: Shape) -> list[str]:
    """Return the redistributions to time by default, as text such as ``S0->R``: each kind over one mesh dim, and over all."""
    kinds = ("S0->R", "S0->S1", "P->R", "P->S0", "R->S0")
    everywhere = [",".join([a] * len(mesh)) + "->" + ",".join([b] * len(mesh)) for a, b in (kind.split("->") for kind in kinds)]
    return list(dict.fromkeys([*kinds, *everywhere]))


# --- redistribute -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RedistributionTiming:
    """Redistribution of a float32 tensor: its plan, and the median time of the slowest rank."""

    mesh: Shape
    pair: str
    shape: Shape
    collectives: int
    bytes: int  # that one rank receives
    peak: int  # bytes that one rank holds, the source included
    predicted: float
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.pair} {'x'.join(map(str, self.shape))}"


def time_redistributions(mesh_shape: Shape, shapes: Sequence[Shape], pairs: Sequence[str]) -> Iterator[RedistributionTiming]:
    """Check and time each redistribution with each shape, on all ranks, and yield a row with its plan and its time."""
    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).view(mesh_shape))
    for shape in shapes:
        for pair in pairs:
            source, target = parse_pair(pair, mesh_shape, len(shape))
            full = (torch.arange(math.prod(shape)) % 7 + 1).float().view(shape)
            x = distribute_tensor(full, mesh, [p if isinstance(p, Shard) else Replicate() for p in source])
            x = x.redistribute(placements=source)
            redistribution = plan(x.layout, x.layout.replace(placements=target))
            _check_values(x.redistribute(placements=target), full, pair)
            seconds = median_of_slowest_rank(lambda x=x, target=target: x.redistribute(placements=target), _SECONDS)  # type: ignore[misc]  # bound in this iteration
            yield RedistributionTiming(
                mesh_shape,
                pair,
                shape,
                redistribution.collectives,
                redistribution.bytes,
                redistribution.peak_bytes,
                redistribution.cost,
                seconds,
            )


def _check_values(result: DTensor, expected: torch.Tensor, pair: str) -> None:
    """Raise on all ranks if the redistributed values differ from the expected ones on some rank."""
    is_wrong: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(is_wrong, not torch.equal(result.full_tensor(), expected))
    if any(is_wrong):
        raise ArgumentError(f"{pair} gives wrong values; please report it with the mesh and the shape")


# --- dispatch -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class OperatorTiming:
    """Seconds of one call without communication: plain torch on local tensors, and the same call on DTensors."""

    name: str
    plain: float
    ours: float


Tensor = torch.Tensor
OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {  # (x, y, w): x, y sharded by rows
    "add": lambda x, y, w: x + y,
    "mul_": lambda x, y, w: y.mul_(1.0),
    "relu": lambda x, y, w: torch.relu(x),
    "mm": lambda x, y, w: x @ w,
    "transpose": lambda x, y, w: x.t(),
    "view": lambda x, y, w: x.view(-1, 2, 4),
    "slice": lambda x, y, w: x[:, 2:5],
    "sum of rows": lambda x, y, w: x.sum(1),
    "softmax": lambda x, y, w: torch.softmax(x, -1),
    "layer_norm": lambda x, y, w: torch.nn.functional.layer_norm(x, (8,)),
    "linear": lambda x, y, w: torch.nn.functional.linear(x, w),
    "cat": lambda x, y, w: torch.cat([x, y], 1),
}


def time_operators(names: Sequence[str]) -> Iterator[OperatorTiming]:
    """Time each operator on two ranks, with plain tensors and with DTensors of 8 x 8 shards, and yield its times."""
    mesh = DeviceMesh("cpu", dist.get_world_size())
    torch.set_num_threads(1)
    local = [torch.randn(8, 8) for _ in range(3)]
    sharded, replicated = Layout.of(mesh, [Shard(0)], (8 * mesh.size(), 8)), Layout.of(mesh, [Replicate()], (8, 8))
    ours = [
        DTensor.from_local(block, mesh, layout.placements, shape=layout.shape, stride=layout.stride)
        for block, layout in zip(map(torch.clone, local), (sharded, sharded, replicated), strict=True)
    ]
    with torch.no_grad():
        for name in names:
            call = OPERATORS[name]
            plain, distributed = (
                median_of_slowest_rank(lambda operands=operands, call=call: call(*operands), _SECONDS)  # type: ignore[misc]  # bound in this iteration
                for operands in (local, ours)
            )
            yield OperatorTiming(name, plain, distributed)


# --- report -------------------------------------------------------------------------------------------------------------
def table_rows(rows: Sequence[RedistributionTiming | OperatorTiming]) -> list[tuple[str, ...]]:
    """Return timings as rows of a text table, the head first: redistributions with their plan, operators with overhead."""
    moved = [
        (
            row.name,
            str(row.collectives),
            bytes_text(row.bytes),
            bytes_text(row.peak),
            seconds_text(row.predicted),
            seconds_text(row.seconds),
        )
        for row in rows
        if isinstance(row, RedistributionTiming)
    ]
    if moved:
        return [("redistribution", "collectives", "received", "peak memory", "predicted", "measured"), *moved]
    called = [
        (row.name, seconds_text(row.plain), seconds_text(row.ours), seconds_text(row.ours - row.plain))
        for row in rows
        if isinstance(row, OperatorTiming)
    ]
    return [("operator", "torch", "dtensor", "overhead"), *called]


def draw_plot(rows: Sequence[RedistributionTiming | OperatorTiming], path: Path) -> None:
    """Write a dot plot of measured times next to predicted or plain-torch times to ``path``, the fastest on top."""
    from matplotlib.figure import Figure  # optional: the extra plot

    if moved := [row for row in rows if isinstance(row, RedistributionTiming)]:
        mesh = "x".join(map(str, moved[0].mesh))
        title, other = f"Redistributions of float32 tensors on a mesh of {mesh} processes (gloo)", "predicted by the cost model"
        points = [(row.seconds, row.predicted, row.name) for row in moved]
    else:
        title, other = "Host time of one operator call, without communication", "plain torch"
        points = [(row.ours, row.plain, row.name) for row in rows if isinstance(row, OperatorTiming)]
    ours, others, names = zip(*sorted(points), strict=True)
    figure = Figure(figsize=(9, 0.35 * len(names) + 1.8), layout="constrained")
    axes = figure.subplots()
    places = range(len(names))
    axes.hlines(places, *zip(*map(sorted, zip(ours, others, strict=True)), strict=True), color="lightgrey", zorder=1)
    axes.scatter(ours, places, label="dtensor, measured", color="steelblue", zorder=3)
    axes.scatter(others, places, label=other, facecolors="white", edgecolors="dimgrey", zorder=2)
    axes.set(xlabel="seconds (logarithmic)", xscale="log", title=title)
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
