"""Cases of ``dispatch.py`` on repeated shapes: each makes its tensors on a side and returns the function to time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measuring.sides import GRID, WORLD, N
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Run = Callable[[], object]
Case = Callable[[Any], Run]


def on_sharded_operands(op: Callable[..., object], *, operands: int = 1, recorded: bool = False) -> Case:
    """Return a case that applies ``op`` to tensors sharded along dim 0, 8 x 8 per rank; ``recorded``: by autograd too."""

    def case(side: Any) -> Run:
        given = [side.shard(0, N, N).requires_grad_(recorded) for _ in range(operands)]
        return lambda: op(*given)

    return case


def on_2d_sharded_operands(op: Callable[..., object], *, operands: int = 1) -> Case:
    """Return a case that applies ``op`` to tensors that a 2-D mesh shards along both dims, 8 x 8 per rank."""

    def case(side: Any) -> Run:
        given = [side.tiles(N, N) for _ in range(operands)]
        return lambda: op(*given)

    return case


def forward_and_backward(op: Callable[..., Any], *, operands: int = 1) -> Case:
    """Return a case that runs ``op`` and computes the gradients of all operands."""

    def case(side: Any) -> Run:
        given = [side.shard(0, N, N).requires_grad_() for _ in range(operands)]
        seed = side.shard(0, N, N)
        return lambda: torch.autograd.grad(op(*given), given, seed)

    return case


def in_inference_mode(case: Case) -> Case:
    """Return the case with its tensors made and its function timed in inference mode."""

    def built(side: Any) -> Run:
        with torch.inference_mode():
            run = case(side)

        def timed() -> object:
            with torch.inference_mode():
                return run()

        return timed

    return built


def without_grad(case: Case) -> Case:
    """Return the case with its function timed under ``torch.no_grad``."""

    def built(side: Any) -> Run:
        run = case(side)

        def timed() -> object:
            with torch.no_grad():
                return run()

        return timed

    return built


def mm(side: Any) -> Run:
    x, w = side.shard(0, N, N), side.replicate(N, N)
    return lambda: torch.mm(x, w)


def mm_2d(side: Any) -> Run:
    x, w = side.rows(N, N), side.columns(N, N)
    return lambda: torch.mm(x, w)


def layer_norm(side: Any) -> Run:
    x, weight, bias = side.shard(0, N, N), side.replicate(N), side.replicate(N)
    return lambda: F.layer_norm(x, (N,), weight, bias)


def rms_norm(side: Any) -> Run:
    x, weight = side.shard(0, N, N), side.replicate(N)
    return lambda: F.rms_norm(x, (N,), weight)


def view(side: Any) -> Run:
    x, rows = side.shard(0, N, N), side.ranks * N
    return lambda: x.view(rows, 2, N // 2)


def view_2d(side: Any) -> Run:
    x, rows, columns = side.tiles(N, N), side.grid[0] * N, side.grid[1] * N
    return lambda: x.view(rows, columns // 2, 2)


def expand(side: Any) -> Run:
    x, rows = side.shard(0, N, 1, N), side.ranks * N
    return lambda: x.expand(rows, 3, N)


def slice_sharded(side: Any) -> Run:
    x, rows = side.shard(0, N, N), side.ranks * N
    return lambda: x[: rows // 2]


def linear_3d(side: Any) -> Run:
    x, weight, bias = side.shard(0, N, 4, N), side.replicate(N, N), side.replicate(N)
    return lambda: F.linear(x, weight, bias)


def embedding(side: Any) -> Run:
    ids, weight = side.ids(N, 16), side.replicate(16, N)
    return lambda: F.embedding(ids, weight)


def cross_entropy(side: Any) -> Run:
    x, target = side.shard(0, N, N), side.ids(N, N)
    return lambda: F.cross_entropy(x, target, reduction="sum")


def cross_entropy_mean(side: Any) -> Run:
    x, target = side.shard(0, N, N), side.ids(N, N)
    return lambda: F.cross_entropy(x, target)


def cross_entropy_recorded(side: Any) -> Run:
    x, target = side.shard(0, N, N).requires_grad_(), side.ids(N, N)
    return lambda: torch.autograd.grad(F.cross_entropy(x, target), x)


def cross_entropy_of_classes(recorded: bool) -> Case:
    """Return a case of cross-entropy with sharded classes, 8 per rank, for 8 samples; with ``recorded``, the gradient too."""

    def case(side: Any) -> Run:
        x, target = side.shard(1, N, N).requires_grad_(recorded), side.same_ids(N)
        if recorded:
            return lambda: torch.autograd.grad(F.cross_entropy(x, target), x)
        return lambda: F.cross_entropy(x, target)

    return case


def attention(dim: int, *, causal: bool = False, backend: SDPBackend | None = None) -> Case:
    """Return a case of attention over (batch, heads, sequence, head dim), sharded along tensor dim ``dim``."""

    def case(side: Any) -> Run:
        query, key, value = (side.shard(dim, 2, 2, SEQUENCE, HEAD_DIM) for _ in range(3))

        def run() -> object:
            if backend is None:
                return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

        return run

    return case


def distribute(side: Any) -> Run:
    """Distribute 64 rows over 8 ranks, with the library's check of the arguments."""
    full = torch.rand(WORLD * N, N)
    return lambda: side.distribute(full)


def from_local(side: Any) -> Run:
    local = torch.rand(N, N)
    return lambda: side.wrap(local)


def from_local_recorded(side: Any) -> Run:
    local = torch.rand(N, N).requires_grad_()
    return lambda: side.wrap(local)


def from_local_of_shape(side: Any) -> Run:
    """Pass the global shape, so that it need not be exchanged between ranks."""
    local, shape = torch.rand(N, N), torch.Size((WORLD * N, N))
    return lambda: side.wrap(local, shape=shape, stride=(N, 1))


def to_local(side: Any) -> Run:
    x = side.shard(0, N, N)
    return lambda: side.unwrap(x)


def to_local_recorded(side: Any) -> Run:
    x = side.shard(0, N, N).requires_grad_()
    return lambda: side.unwrap(x)


def shard_to_replicate(side: Any) -> Run:
    x = side.shard(0, N, N)
    return lambda: side.to_replicate(x)


def replicate_to_shard(side: Any) -> Run:
    x = side.replicate(WORLD * N, N)
    return lambda: side.to_shard(x)


def partial_to_replicate(side: Any) -> Run:
    x = side.partial(N, N)
    return lambda: side.reduce(x)


def redistribute_to_present_placements(side: Any) -> Run:
    """Redistribute to the present placements; plain torch has no work here."""
    x = side.shard(0, N, N)
    return (lambda: x) if side.ranks == 1 else (lambda: side.to_shard(x))


def mlp(side: Any) -> Run:
    """Run a tensor-parallel MLP: the hidden dim is sharded, the output is reduced."""
    x = side.replicate(N, N)
    up, down = side.shard(0, N, N).requires_grad_(), side.shard(1, N, N).requires_grad_()

    def step() -> None:
        up.grad = down.grad = None
        hidden = F.gelu(F.linear(x, up))
        side.reduce(F.linear(hidden, down)).sum().backward()

    return step


HEADS, HEAD_DIM, SEQUENCE = WORLD, N, 4
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    """A transformer block on one sequence; the heads are local tensors if its linear layers return local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.reduce: Callable[[Tensor], Tensor] = lambda x: x
        self.enter: Callable[[Tensor], Tensor] = lambda x: x  # where a program by hand sums gradients

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(self.norm_1(x))
        query, key, value = (
            layer(h).view(1, SEQUENCE, -1, HEAD_DIM).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = torch.softmax(query @ key.transpose(-2, -1) * HEAD_DIM**-0.5, dim=-1)
        x = x + self.reduce(self.out((scores @ value).transpose(1, 2).reshape(1, SEQUENCE, -1)))
        return x + self.reduce(self.down(F.gelu(self.up(self.enter(self.norm_2(x))))))


def planned_block(side: Any) -> Run:
    """Run a block under the library's tensor-parallel plan: norms and attention on plain tensors."""
    block = side.parallelize(Block())
    x = torch.rand(1, SEQUENCE, WIDTH)

    def step() -> None:
        block.zero_grad()
        block(x).sum().backward()

    return step


def make_block(side: Any) -> Block:
    """Return one side's block with sharded heads and hidden features, the rest replicated."""
    block = Block()
    for name in ("query", "key", "value"):
        block.get_submodule(name).weight = nn.Parameter(side.shard(0, HEAD_DIM, WIDTH))
    block.out.weight = nn.Parameter(side.shard(1, WIDTH, HEAD_DIM))
    block.up.weight = nn.Parameter(side.shard(0, 4 * HEAD_DIM, WIDTH))
    block.down.weight = nn.Parameter(side.shard(1, WIDTH, 4 * HEAD_DIM))
    for norm in (block.norm_1, block.norm_2):
        norm.weight, norm.bias = nn.Parameter(side.replicate(WIDTH)), nn.Parameter(side.replicate(WIDTH))
    block.reduce = side.reduce
    return block


def distributed_block(side: Any) -> Run:
    """Run a block with every tensor distributed, forward and backward."""
    block = make_block(side)
    x = side.replicate(1, SEQUENCE, WIDTH)

    def step() -> None:
        block.zero_grad()
        block(x).sum().backward()

    return step


def distributed_block_forward(side: Any) -> Run:
    """Run a block with every tensor distributed, without gradients."""
    block = make_block(side).requires_grad_(False)
    x = side.replicate(1, SEQUENCE, WIDTH)
    return lambda: block(x)


def _make_parameters(side: Any, count: int) -> list[Any]:
    parameters = [nn.Parameter(side.shard(0, N, N)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = side.shard(0, N, N)
    return parameters


def adamw(side: Any) -> Run:
    return torch.optim.AdamW(_make_parameters(side, 100), lr=1e-3, foreach=True).step


def adamw_fused(side: Any) -> Run:
    return torch.optim.AdamW(_make_parameters(side, 20), lr=1e-3, fused=True).step


def zero_grad(side: Any) -> Run:
    optimizer = torch.optim.AdamW(_make_parameters(side, 20), lr=1e-3, foreach=True)
    return lambda: optimizer.zero_grad(set_to_none=False)


def sgd(side: Any) -> Run:
    return torch.optim.SGD(_make_parameters(side, 20), lr=1e-3, momentum=0.9, foreach=True).step


def clip(side: Any) -> Run:
    parameters = _make_parameters(side, 100)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)


CASES: dict[str, Case] = {
    "add": on_sharded_operands(torch.add, operands=2),
    "add, recorded": on_sharded_operands(torch.add, operands=2, recorded=True),
    "add, no_grad": without_grad(on_sharded_operands(torch.add, operands=2)),
    "add, inference mode": in_inference_mode(on_sharded_operands(torch.add, operands=2)),
    "add, 2-D mesh": on_2d_sharded_operands(torch.add, operands=2),
    "mul, fwd + bwd": forward_and_backward(torch.mul, operands=2),
    "mul scalar": on_sharded_operands(lambda x: x * 1.5),
    "mm": mm,
    f"mm, {GRID[0]} x {GRID[1]} mesh": mm_2d,
    "add_": on_sharded_operands(lambda x, y: x.add_(y), operands=2),
    "mul_ scalar": on_sharded_operands(lambda x: x.mul_(1.0)),
    "copy_": on_sharded_operands(lambda x, y: x.copy_(y), operands=2),
    "sum": on_sharded_operands(torch.sum),
    "mean": on_sharded_operands(torch.mean),
    "t": on_sharded_operands(torch.t),
    "transpose, recorded": on_sharded_operands(lambda x: x.transpose(0, 1), recorded=True),
    "detach": on_sharded_operands(torch.detach),
    "clone": on_sharded_operands(torch.clone),
    "zeros_like": on_sharded_operands(torch.zeros_like),
    "softmax": on_sharded_operands(lambda x: torch.softmax(x, -1)),
    "softmax, fwd + bwd": forward_and_backward(lambda x: torch.softmax(x, -1)),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "view": view,
    "view, inference mode": in_inference_mode(view),
    "view, 2-D mesh": view_2d,
    "expand": expand,
    "split": on_sharded_operands(lambda x: x.split(N // 2, dim=1)),
    "chunk": on_sharded_operands(lambda x: x.chunk(4, dim=1)),
    "unbind": on_sharded_operands(lambda x: x.unbind(1)),
    "cat": on_sharded_operands(lambda x, y: torch.cat([x, y], dim=1), operands=2),
    "slice, sharded dim": slice_sharded,
    "slice, other dim": on_sharded_operands(lambda x: x[:, 1:5]),
    "linear, 3-D input": linear_3d,
    "gelu": on_sharded_operands(F.gelu),
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "cross_entropy, mean": cross_entropy_mean,
    "cross_entropy, fwd + bwd": cross_entropy_recorded,
    "cross_entropy, classes": cross_entropy_of_classes(False),
    "classes, fwd + bwd": cross_entropy_of_classes(True),
    "sdpa, batch cut": attention(0),
    "sdpa, causal, math": attention(1, causal=True, backend=SDPBackend.MATH),
    "distribute_tensor": distribute,
    "from_local": from_local,
    "from_local, recorded": from_local_recorded,
    "from_local, shape=": from_local_of_shape,
    "to_local": to_local,
    "to_local, recorded": to_local_recorded,
    "redistribute, same": redistribute_to_present_placements,
    "redistribute S -> R": shard_to_replicate,
    "redistribute R -> S": replicate_to_shard,
    "redistribute P -> R": partial_to_replicate,
    "TP MLP, fwd + bwd": mlp,
    "block, TP plan": planned_block,
    "block, DTensors": distributed_block,
    "block, forward only": distributed_block_forward,
    "SGD, 20 params": sgd,
    "AdamW, 100 params": adamw,
    "AdamW, 20, fused": adamw_fused,
    "zero_grad, 20, kept": zero_grad,
    "clip_grad_norm_, 100": clip,
}
# The bounds of the overhead ratio that the project has set itself; all other rows 0.9.
HALF = ("TP MLP, fwd + bwd", "block, TP plan", "block, DTensors", "AdamW, 100 params", "clip_grad_norm_, 100")
BOUNDS = {name: 0.5 if name in HALF else 0.9 for name in CASES}
