"""Random programs of a few operations, whose compiled results are compared with eager ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compile_cases import Case, Made

import dtensor as dt
from dtensor import DeviceMesh, Partial, Replicate, Shard

Step = Callable[[Any, Any], Any]  # function of the current value and another value of equal shape
ROWS, COLUMNS = 5, 6


def in_place_step(write: Callable[[Any, Any], Any]) -> Step:
    """Return a step that writes to a copy of the current value."""

    def step(x: Any, y: Any) -> Any:
        z = x * 1
        write(z, y)
        return z

    return step


def redistribute_step(*placements: Any) -> Step:
    return lambda x, y: x.redistribute(placements=list(placements))


def assign_slices(z: Any, y: Any) -> None:
    z[1:3] = y[2:4]
    z[0, ::2] = 3.0


def attention_of_heads(*given: Any) -> Any:
    return F.scaled_dot_product_attention(*(x.view(1, -1, 2, 3).transpose(1, 2) for x in given))


STEPS: dict[str, Step] = {
    "add": lambda x, y: x + y,
    "times": lambda x, y: x * y.sigmoid(),
    "sin": lambda x, y: x.sin(),
    "relu": lambda x, y: F.relu(x) - 0.1 * y,
    "square product": lambda x, y: (x @ y.t()) @ x * 0.1,
    "product by columns": lambda x, y: x @ (y.t() @ x) * 0.1,
    "softmax of rows": lambda x, y: x.softmax(1) * y,
    "softmax of columns": lambda x, y: x.softmax(0) + y,
    "layer_norm": lambda x, y: F.layer_norm(x, (COLUMNS,)),
    "minus mean": lambda x, y: x - x.mean(0, keepdim=True),
    "minus sum": lambda x, y: x - 0.1 * x.sum(),
    "divided by std": lambda x, y: x / (1 + x.std(1, keepdim=True)),
    "largest of columns": lambda x, y: x + x.amax(0),
    "cumsum of columns": lambda x, y: x.cumsum(0) * 0.5,
    "cumsum of rows": lambda x, y: x.cumsum(1) * 0.5,
    "sorted": lambda x, y: x.sort(0)[0] + y,
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "masked": lambda x, y: x.masked_fill(y > 0.5, 0.25),
    "clamped": lambda x, y: x.clamp(-1, 1) + y,
    "flip and roll": lambda x, y: x.flip(0) + x.roll(1, 1),
    "shift down by pad": lambda x, y: F.pad(x, (0, 0, 1, 0))[:-1] + y,
    "cat of slices": lambda x, y: torch.cat([x[:2], y[2:]], 0),
    "cat of swapped halves": lambda x, y: torch.cat(x.chunk(2, 1)[::-1], 1),
    "a row": lambda x, y: x + y[3],
    "a column": lambda x, y: x * y[:, 2:3],
    "flatten and view": lambda x, y: (x.reshape(-1) * 2).view(ROWS, COLUMNS),
    "transpose twice": lambda x, y: (x.t() + y.t()).t(),
    "unflatten and sum": lambda x, y: x.unflatten(1, (2, 3)).transpose(0, 1).sum(0).repeat(1, 2) + y,
    "view and reshape": lambda x, y: x.view(-1, 2, 3).movedim(1, 0).reshape(-1, COLUMNS) + y,
    "attention": lambda x, y: attention_of_heads(x, y, x).transpose(1, 2).reshape(-1, COLUMNS),
    "stacked": lambda x, y: torch.stack([x, y], 1).amax(1),
    "index_select or flip": lambda x, y: (
        x.index_select(0, torch.tensor([4, 0, 3, 1, 2])) if type(x) is torch.Tensor else x.flip(1)
    ),
    "dropout": lambda x, y: F.dropout(x, 0.25) + y,
    "noise": lambda x, y: x + 0.1 * torch.rand_like(y),
    "norms": lambda x, y: F.normalize(x, dim=1) + x.norm() * 0.1,
    "log_softmax": lambda x, y: F.log_softmax(x, 1) * 0.3 + y,
    "added in place": in_place_step(lambda z, y: z.add_(y)),
    "a row in place": in_place_step(lambda z, y: z[2].mul_(y[1])),
    "columns in place": in_place_step(lambda z, y: z[:, 1:4].add_(y[:, 2:5])),
    "transpose in place": in_place_step(lambda z, y: z.t().mul_(0.5)),
    "assigned": in_place_step(assign_slices),
    "filled": in_place_step(lambda z, y: z[:, 0].fill_(1.5)),
    "flat in place": in_place_step(lambda z, y: z.view(-1)[7:20].sub_(1)),
    "to S0": redistribute_step(Shard(0)),
    "to S1": redistribute_step(Shard(1)),
    "to R": redistribute_step(Replicate()),
    "to P": redistribute_step(Partial()),
    "to uneven S0": redistribute_step(Shard(0, sizes=(1, 4))),
    "to_local and from_local": lambda x, y: dt.DTensor.from_local(
        x.redistribute(placements=[Shard(1)]).to_local().cos(), x.device_mesh, [Shard(1)], shape=x.shape
    ),
    "mean of full_tensor": lambda x, y: x * x.full_tensor().mean().detach(),
    "bfloat16 and back": lambda x, y: x.to(torch.bfloat16).float() + y,
    "number": lambda x, y: x * y.detach().sum().sigmoid(),
}
LAYOUTS = ([Shard(0)], [Shard(1)], [Replicate()], [Shard(0, sizes=(4, 1))])


def random_case(seed: int) -> tuple[str, Case]:
    """Return the description and the case of the program with this seed."""
    draw = random.Random(seed)
    names = draw.choices(list(STEPS), k=draw.randint(2, 5))
    where = draw.choice(LAYOUTS), draw.choice(LAYOUTS)

    def run(x: Any, y: Any) -> Any:
        for name in names:
            x, y = STEPS[name](x, y), x
        return x

    def make(mesh: DeviceMesh) -> Made:
        return run, tuple(dt.distribute_tensor(torch.randn(ROWS, COLUMNS), mesh, lying) for lying in where)

    return f"{seed}: {where} {' > '.join(names)}", make
