"""``python -m dtensor bench``: what redistributions and operators take on processes, beside the model and plain torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..cost.calibrate import slowest
from ..errors import ArgumentError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import REDUCE_OPS, Partial, Placement, Replicate, Shard
from ..redistribute import plan
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor

Shape = tuple[int, ...]
Places = tuple[Placement, ...]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SECONDS = 0.04  # that each round of a case lasts
MOST_RANKS = 64


# --- what is asked ------------------------------------------------------------------------------------------------------
def mesh_of(text: str) -> Shape:
    """``"3x2"`` as a shape.

    Raises:
        ArgumentError: it is no shape of a mesh, or one of more processes than a machine takes.

    >>> mesh_of("3x2")
    (3, 2)
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ArgumentError(f"{text!r} is no mesh; write its shape, as 4 or 3x2")
    shape = tuple(map(int, text.split("x")))
    if not 2 <= math.prod(shape) <= MOST_RANKS:
        raise ArgumentError(f"a mesh of {text} has {math.prod(shape)} ranks; from 2 to {MOST_RANKS} processes are started")
    return shape


def shape_of(text: str) -> Shape:
    """``"1MB"`` as the shape of a nearly square float32 matrix, or ``"1031x1021"`` as it is.

    Raises:
        ArgumentError: it is neither.

    >>> shape_of("1MB"), shape_of("6x7x8")
    ((512, 512), (6, 7, 8))
    """
    if re.fullmatch(r"\d+(x\d+)+", text):
        return tuple(map(int, text.split("x")))
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]?)i?B?", text, re.IGNORECASE)
    if found is None or not (elements := int(float(found[1]) * _UNITS[found[2].upper()]) // 4):
        raise ArgumentError(f"{text!r} is no size; write bytes, as 64KB, 1MB or 0.5GB (powers of 1024), or a shape, as 1031x1021")
    rows = math.isqrt(elements)
    return rows, elements // rows


def pair_of(text: str, mesh: Shape, ndim: int) -> tuple[Places, Places]:
    """``"S0->S1,R"``: from and to, a placement for each mesh dim; those left out replicate.

    Raises:
        ArgumentError: it is no pair, or does not fit the mesh or the tensor.

    >>> pair_of("S0->S1,P", (3, 2), 2)
    ((Shard(dim=0), Replicate()), (Shard(dim=1), Partial(sum)))
    """
    sides = text.replace(" ", "").split("->")
    if len(sides) != 2:
        raise ArgumentError(f"{text!r} is no pair; write SOURCE->TARGET, as 'S0->S1,R' (quoted)")
    source, target = (_places(side, mesh, ndim) for side in sides)
    return source, target


def _places(side: str, mesh: Shape, ndim: int) -> Places:
    words = side.split(",")
    if len(words) > len(mesh):
        raise ArgumentError(f"{side!r} has {len(words)} placements for a mesh of {len(mesh)} dims")
    return (*(_place(word, ndim) for word in words), *(Replicate(),) * (len(mesh) - len(words)))


def _place(word: str, ndim: int) -> Placement:
    found = re.fullmatch(r"R|S\(?(?P<dim>\d+)\)?|P(?:\((?P<op>\w+)\))?", word)
    if found is None or (found["dim"] and int(found["dim"]) >= ndim) or (found["op"] and found["op"] not in REDUCE_OPS):
        raise ArgumentError(f"{word!r} is no placement of a tensor of {ndim} dims: R, S0 to S{ndim - 1}, P or P(max)")
    return Replicate() if word == "R" else Shard(int(found["dim"])) if found["dim"] else Partial(found["op"] or "sum")


def usual_pairs(mesh: Shape) -> list[str]:
    """What is measured where no pairs are given: each kind of movement over one mesh dim, and over all."""
    kinds = ("S0->R", "S0->S1", "P->R", "P->S0", "R->S0")
    everywhere = [",".join([a] * len(mesh)) + "->" + ",".join([b] * len(mesh)) for a, b in (kind.split("->") for kind in kinds)]
    return list(dict.fromkeys([*kinds, *everywhere]))


# --- redistribute -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Moved:
    """One redistribution of a float32 tensor: what the plan says of it, and what it took on the slowest rank (a median)."""

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


def moves_on_ranks(mesh_shape: Shape, shapes: Sequence[Shape], pairs: Sequence[str]) -> Iterator[Moved]:
    """On each rank: one row per pair and shape. What a rank gets is compared with its block first."""
    mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh_shape)).view(mesh_shape))
    for shape in shapes:
        for pair in pairs:
            source, target = pair_of(pair, mesh_shape, len(shape))
            whole = (torch.arange(math.prod(shape)) % 7 + 1).float().view(shape)
            x = distribute_tensor(whole, mesh, [p if isinstance(p, Shard) else Replicate() for p in source])
            x = x.redistribute(placements=source)
            found = plan(x.layout, x.layout.replace(placements=target))
            _compare(x.redistribute(placements=target), whole, pair)
            taken = slowest(lambda x=x, target=target: x.redistribute(placements=target), _SECONDS)  # type: ignore[misc]  # of this turn
            yield Moved(mesh_shape, pair, shape, found.collectives, found.bytes, found.peak_bytes, found.cost, taken)


def _compare(got: DTensor, whole: torch.Tensor, pair: str) -> None:
    wrong: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wrong, not torch.equal(got.full_tensor(), whole))
    if any(wrong):
        raise ArgumentError(f"{pair} gives other values; please report it with the mesh and the shape")


# --- dispatch -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Called:
    """Seconds of one call: of plain torch on a rank's block, and of the same on DTensors, nothing being communicated."""

    name: str
    plain: float
    ours: float


Tensor = torch.Tensor
OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {  # of a tensor cut by rows, one like it, and a whole one
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


def calls_on_ranks(names: Sequence[str]) -> Iterator[Called]:
    """On each of two ranks: one row per operator, blocks of 8 x 8 numbers."""
    mesh = DeviceMesh("cpu", dist.get_world_size())
    torch.set_num_threads(1)
    local = [torch.randn(8, 8) for _ in range(3)]
    cut, whole = Layout.of(mesh, [Shard(0)], (8 * mesh.size(), 8)), Layout.of(mesh, [Replicate()], (8, 8))
    ours = [
        DTensor.from_local(block, mesh, layout.placements, shape=layout.shape, stride=layout.stride)
        for block, layout in zip(map(torch.clone, local), (cut, cut, whole), strict=True)
    ]
    with torch.no_grad():
        for name in names:
            call = OPERATORS[name]
            plain, distributed = (
                slowest(lambda given=given, call=call: call(*given), _SECONDS)  # type: ignore[misc]  # of this turn
                for given in (local, ours)
            )
            yield Called(name, plain, distributed)


# --- what is shown ------------------------------------------------------------------------------------------------------
def moved_head(mesh: Shape) -> str:
    columns = f"{'collectives':>11} {'B received':>13} {'peak B':>13} {'predicted':>10} {'measured':>10}"
    return f"mesh {'x'.join(map(str, mesh)):22} {columns}"


def moved_line(row: Moved) -> str:
    measured = f"{row.predicted * 1e3:7.3f} ms {row.seconds * 1e3:7.3f} ms"
    return f"{row.name:27} {row.collectives:11} {row.bytes:13,} {row.peak:13,} {measured}"


CALLED_HEAD = f"{'us per call':16} {'plain':>8} {'dtensor':>8} {'added':>8}"


def called_line(row: Called) -> str:
    return f"{row.name:16} {row.plain * 1e6:8.1f} {row.ours * 1e6:8.1f} {(row.ours - row.plain) * 1e6:8.1f}"


def as_json(rows: Sequence[Moved | Called]) -> list[dict[str, Any]]:
    """Rows as JSON takes them."""
    return [asdict(row) for row in rows]


def plot(rows: Sequence[Moved | Called], path: Path) -> None:
    """Bars of what was measured beside what the model predicts, or beside plain torch."""
    import matplotlib as mpl  # optional: only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot

    moved, plain = ("predicted", "plain torch")
    pairs = [(r.name, r.seconds, r.predicted, moved) if isinstance(r, Moved) else (r.name, r.ours, r.plain, plain) for r in rows]
    names, ours, others, labels = zip(*pairs[::-1], strict=True)
    places = range(len(names))
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(names) + 1.2), layout="constrained")
    axes.barh([p - 0.2 for p in places], [t * 1e6 for t in others], height=0.4, label=labels[0], color="lightgrey")
    axes.barh([p + 0.2 for p in places], [t * 1e6 for t in ours], height=0.4, label="measured", color="steelblue")
    axes.set(yticks=list(places), yticklabels=names, xlabel="microseconds", xscale="log")
    axes.legend()
    figure.savefig(path, dpi=120)
