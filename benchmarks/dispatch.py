"""Host time per op: plain torch, ``torch.distributed.tensor`` (the peer) and ``dtensor``, in one run.

    make bench      or      python benchmarks/dispatch.py [--quick] [--json] [--only add mm]

Each rank holds 8 x 8 numbers and the process group is torch's fake one of 8 ranks, on which communication takes no time:
what is left is what the library itself costs. "plain" does the same local work by hand. The last column is
(dtensor - plain) / (peer - plain): below 1 we add less than the peer does.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import timing
import torch
import torch.distributed as dist
import torch.distributed.tensor as peer
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor

WORLD = 8
N = 8  # rows and columns of a local tensor
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it


class Side(Protocol):
    """One column of the table: how it makes tensors, and what a collective is to it."""

    ranks: int  # over which a sharded dim is spread

    def shard(self, dim: int, *local: int) -> Any: ...
    def replicate(self, *shape: int) -> Any: ...
    def partial(self, *shape: int) -> Any: ...
    def ids(self, count: int, high: int) -> Any: ...
    def wrap(self, local: Tensor, **known: Any) -> Any: ...
    def unwrap(self, x: Any) -> Tensor: ...
    def to_replicate(self, x: Any) -> Any: ...
    def to_shard(self, x: Any) -> Any: ...


class Plain:
    """What one rank does, written by hand."""

    ranks = 1

    def shard(self, dim: int, *local: int) -> Tensor:
        return torch.rand(local)

    def replicate(self, *shape: int) -> Tensor:
        return torch.rand(shape)

    partial = replicate

    def ids(self, count: int, high: int) -> Tensor:
        return torch.arange(count) % high

    def wrap(self, local: Tensor, **known: Any) -> Tensor:
        return local

    def unwrap(self, x: Tensor) -> Tensor:
        return x

    def to_replicate(self, x: Tensor) -> Tensor:
        out = x.new_empty(WORLD * x.shape[0], *x.shape[1:])
        _all_gather(out, x)
        return out

    def to_shard(self, x: Tensor) -> Tensor:
        return x.narrow(0, 0, x.shape[0] // WORLD)

    def reduce(self, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out.detach())  # in place, behind autograd's back: the gradient passes as it is
        return out


class Distributed:
    """A library with the names of ``torch.distributed.tensor``."""

    ranks = WORLD

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        make = dist.device_mesh.init_device_mesh if library is peer else library.init_device_mesh
        self.mesh = make("cpu", (WORLD,))
        self.sharded, self.replicated = [library.Shard(0)], [library.Replicate()]

    def _made(self, local: Tensor, placement: Any) -> Any:
        return self.library.DTensor.from_local(local, self.mesh, [placement], run_check=False)

    def shard(self, dim: int, *local: int) -> Any:
        return self._made(torch.rand(local), self.library.Shard(dim))

    def replicate(self, *shape: int) -> Any:
        return self._made(torch.rand(shape), self.library.Replicate())

    def partial(self, *shape: int) -> Any:
        return self._made(torch.rand(shape), self.library.Partial())

    def ids(self, count: int, high: int) -> Any:
        return self._made(torch.arange(count) % high, self.library.Shard(0))

    def wrap(self, local: Tensor, **known: Any) -> Any:
        return self.library.DTensor.from_local(local, self.mesh, self.sharded, run_check=False, **known)

    def unwrap(self, x: Any) -> Tensor:
        return x.to_local()

    def to_replicate(self, x: Any) -> Any:
        return x.redistribute(self.mesh, self.replicated)

    def to_shard(self, x: Any) -> Any:
        return x.redistribute(self.mesh, self.sharded)

    reduce = to_replicate


Case = Callable[[Any], Callable[[], object]]


def on_shards(op: Callable[..., object], *, operands: int = 1) -> Case:
    """``op`` on 8 x 8 shards of tensor dim 0."""

    def case(side: Any) -> Callable[[], object]:
        given = [side.shard(0, N, N) for _ in range(operands)]
        return lambda: op(*given)

    return case


def mm(side: Any) -> Callable[[], object]:
    x, w = side.shard(0, N, N), side.replicate(N, N)
    return lambda: torch.mm(x, w)


def layer_norm(side: Any) -> Callable[[], object]:
    x, weight, bias = side.shard(0, N, N), side.replicate(N), side.replicate(N)
    return lambda: F.layer_norm(x, (N,), weight, bias)


def rms_norm(side: Any) -> Callable[[], object]:
    x, weight = side.shard(0, N, N), side.replicate(N)
    return lambda: F.rms_norm(x, (N,), weight)


def view(side: Any) -> Callable[[], object]:
    x, rows = side.shard(0, N, N), side.ranks * N
    return lambda: x.view(rows, 2, N // 2)


def expand(side: Any) -> Callable[[], object]:
    x, rows = side.shard(0, N, 1, N), side.ranks * N
    return lambda: x.expand(rows, 3, N)


def slice_sharded(side: Any) -> Callable[[], object]:
    x, rows = side.shard(0, N, N), side.ranks * N
    return lambda: x[: rows // 2]


def linear_3d(side: Any) -> Callable[[], object]:
    x, weight, bias = side.shard(0, N, 4, N), side.replicate(N, N), side.replicate(N)
    return lambda: F.linear(x, weight, bias)


def embedding(side: Any) -> Callable[[], object]:
    ids, weight = side.ids(N, 16), side.replicate(16, N)
    return lambda: F.embedding(ids, weight)


def from_local(side: Any) -> Callable[[], object]:
    local = torch.rand(N, N)
    return lambda: side.wrap(local)


def from_local_of_shape(side: Any) -> Callable[[], object]:
    """With the global shape given nobody needs to ask the other ranks for it."""
    local, shape = torch.rand(N, N), torch.Size((WORLD * N, N))
    return lambda: side.wrap(local, shape=shape, stride=(N, 1))


def to_local(side: Any) -> Callable[[], object]:
    x = side.shard(0, N, N)
    return lambda: side.unwrap(x)


def shard_to_replicate(side: Any) -> Callable[[], object]:
    x = side.shard(0, N, N)
    return lambda: side.to_replicate(x)


def replicate_to_shard(side: Any) -> Callable[[], object]:
    x = side.replicate(WORLD * N, N)
    return lambda: side.to_shard(x)


def partial_to_replicate(side: Any) -> Callable[[], object]:
    x = side.partial(N, N)
    return lambda: side.reduce(x)


def mlp(side: Any) -> Callable[[], object]:
    """Tensor-parallel: the hidden dim is sharded, the output is reduced."""
    x = side.replicate(N, N)
    up, down = side.shard(0, N, N).requires_grad_(), side.shard(1, N, N).requires_grad_()

    def step() -> None:
        up.grad = down.grad = None
        hidden = F.gelu(F.linear(x, up))
        side.reduce(F.linear(hidden, down)).sum().backward()

    return step


def _parameters(side: Any) -> list[Any]:
    parameters = [torch.nn.Parameter(side.shard(0, N, N)) for _ in range(20)]
    for parameter in parameters:
        parameter.grad = side.shard(0, N, N)
    return parameters


def adamw(side: Any) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(_parameters(side), lr=1e-3, foreach=True)
    return optimizer.step


def clip(side: Any) -> Callable[[], object]:
    parameters = _parameters(side)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)


CASES: dict[str, Case] = {
    "add": on_shards(torch.add, operands=2),
    "mul scalar": on_shards(lambda x: x * 1.5),
    "mm": mm,
    "add_": on_shards(lambda x, y: x.add_(y), operands=2),
    "sum": on_shards(torch.sum),
    "mean": on_shards(torch.mean),
    "t": on_shards(torch.t),
    "detach": on_shards(torch.detach),
    "softmax": on_shards(lambda x: torch.softmax(x, -1)),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "view": view,
    "expand": expand,
    "split": on_shards(lambda x: x.split(N // 2, dim=1)),
    "cat": on_shards(lambda x, y: torch.cat([x, y], dim=1), operands=2),
    "slice, sharded dim": slice_sharded,
    "slice, other dim": on_shards(lambda x: x[:, 1:5]),
    "linear, 3-D input": linear_3d,
    "gelu": on_shards(F.gelu),
    "embedding": embedding,
    "from_local": from_local,
    "from_local, shape=": from_local_of_shape,
    "to_local": to_local,
    "redistribute S -> R": shard_to_replicate,
    "redistribute R -> S": replicate_to_shard,
    "redistribute P -> R": partial_to_replicate,
    "TP MLP, fwd + bwd": mlp,
    "AdamW, 20 params": adamw,
    "clip_grad_norm_, 20": clip,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds, or the name of the error, of one case on each side."""

    name: str
    plain: float | str
    peer: float | str
    ours: float | str

    @property
    def ratio(self) -> float | None:
        """Our overhead over the peer's. The clock's resolution bounds both from below."""
        if isinstance(self.plain, str) or isinstance(self.peer, str) or isinstance(self.ours, str):
            return None
        return max(self.ours - self.plain, 5e-8) / max(self.peer - self.plain, 5e-8)


def measure(name: str, case: Case, sides: dict[str, Side], effort: timing.Effort) -> Row:
    functions = {side_name: _built(case, side) for side_name, side in sides.items()}
    return Row(name, **timing.interleaved(functions, effort))


def _built(case: Case, side: Side) -> Callable[[], object]:
    try:
        return case(side)
    except Exception as error:
        raised = error

        def fail() -> None:
            raise raised

        return fail


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'microseconds per call':22} {'plain':>10} {'peer':>12} {'dtensor':>12} {'overhead ratio':>15}"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"{row.name:22} {_cell(row.plain):>10} {_cell(row.peer):>12} {_cell(row.ours):>12} {ratio:>15}")
    return "\n".join([*lines, "", verdict(rows)])


def _cell(value: float | str) -> str:
    return value[:12] if isinstance(value, str) else f"{value * 1e6:.1f}"


def verdict(rows: Sequence[Row]) -> str:
    ratios = {row.name: row.ratio for row in rows if row.ratio is not None}
    if not ratios:
        return "no case ran on all three sides"
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    above = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if ratio > 1) or "none"
    return f"overhead ratio dtensor / peer: geometric mean {mean:.2f} over {len(ratios)} of {len(rows)} cases; above 1: {above}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--only", nargs="+", metavar="CASE", help=f"some of: {', '.join(CASES)}")
    options = parser.parse_args()
    unknown = set(options.only or ()) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    sides: dict[str, Side] = {"plain": Plain(), "peer": Distributed(peer), "ours": Distributed(dtensor)}
    effort = timing.Effort.quick() if options.quick else timing.Effort()
    rows = [measure(name, case, sides, effort) for name, case in CASES.items() if name in (options.only or CASES)]
    about = timing.machine()
    if options.json:
        columns = [{"name": row.name, "plain": row.plain, "peer": row.peer, "ours": row.ours, "ratio": row.ratio} for row in rows]
        print(json.dumps({"machine": about, "unit": "seconds", "rows": columns, "verdict": verdict(rows)}, indent=1))
    else:
        print(*(f"{key:8} {value}" for key, value in about.items()), "", table(rows), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
