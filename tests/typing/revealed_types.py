"""Revealed types: each comment is the type that mypy and pyright give to the line, or ``error``. Python does not run the file."""

from typing import Any, reveal_type

import torch
from torch import nn

import dtensor as dt
from dtensor import functional as F
from dtensor.parallel import ColwiseParallel, FSDPModule, fully_shard, parallelize_module, replicate

mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
x = dt.ones(4, 4, device_mesh=mesh, placements=[dt.Shard(0)])
w = x.detach()
plain = torch.ones(4, 4)

reveal_type(x + 1)  # DTensor
reveal_type(1 + x)  # DTensor
reveal_type(1 - x)  # DTensor
reveal_type(2.0 * x)  # DTensor
reveal_type(2 / x)  # DTensor
reveal_type(7 // x)  # DTensor
reveal_type(7 % x)  # DTensor
reveal_type(2**x)  # DTensor
reveal_type(x - plain)  # DTensor
reveal_type(x @ w)  # DTensor
reveal_type(x**2)  # DTensor
reveal_type(-x)  # DTensor
reveal_type(abs(x))  # DTensor
reveal_type(~(x > 0))  # DTensor
reveal_type((x > 0) & (x < 2))  # DTensor
reveal_type(x == w)  # DTensor
reveal_type(x != 1)  # DTensor
reveal_type(x[0])  # DTensor
reveal_type(x[1:, None, ..., -1])  # DTensor
reveal_type(x[x > 0])  # DTensor
reveal_type(next(iter(x)))  # DTensor
reveal_type(list(x))  # list[DTensor]
reveal_type(len(x))  # int
reveal_type(bool(x))  # bool
reveal_type({x: 1})  # dict[DTensor, int]
x += 1
x -= w
x *= 2
x /= 2
x @= w
x[0] = 1.0
reveal_type(x)  # DTensor

reveal_type(x.sum())  # DTensor
reveal_type(x.sum(0, keepdim=True))  # DTensor
reveal_type(x.mean(dim=(0, 1)))  # DTensor
reveal_type(x.norm())  # DTensor
reveal_type(x.relu().softmax(-1).matmul(w).add_(1))  # DTensor
reveal_type(x.view(-1).reshape(2, 8).transpose(0, 1).contiguous())  # DTensor
reveal_type(x.to(torch.float64).float().cpu())  # DTensor
reveal_type(x.clone().requires_grad_())  # DTensor
reveal_type(x.new_zeros(3))  # DTensor
reveal_type(x.masked_fill(x > 0, 1.0))  # DTensor
reveal_type(x.where(x > 0, w))  # DTensor
reveal_type(x.T)  # DTensor
reveal_type(x.data)  # DTensor
reveal_type(x.grad)  # DTensor | None
reveal_type(x.requires_grad)  # bool
x.requires_grad = True
x.grad = None
x.data = plain
reveal_type(x.split(2))  # tuple[DTensor, ...]
reveal_type(x.chunk(2, dim=1))  # tuple[DTensor, ...]
reveal_type(x.unbind())  # tuple[DTensor, ...]
reveal_type(x.max(0).values)  # DTensor
reveal_type(x.max())  # DTensor
reveal_type(x.unique())  # DTensor
reveal_type(x.tolist())  # Any
reveal_type(x.dim())  # int
values, indices = x.topk(2)
reveal_type(values)  # DTensor
reveal_type(indices)  # DTensor
reveal_type(x.sort(-1).indices)  # DTensor
reveal_type(x.shape[0])  # int
reveal_type(x.placements)  # tuple[Placement, ...]
reveal_type((x + 1).redistribute(placements=[dt.Replicate()]))  # DTensor
reveal_type(x.sum().full_tensor())  # Tensor
reveal_type(x.backward())  # None
print(x.sum().placement)  # error
x.sun()  # error

reveal_type(F.gelu(x, approximate="tanh"))  # DTensor
reveal_type(F.layer_norm(x, (4,)))  # DTensor
reveal_type(F.scaled_dot_product_attention(x, x, x, is_causal=True))  # DTensor
reveal_type(F.cross_entropy(x, plain, ignore_index=0))  # DTensor
reveal_type(F.conv2d(x, w, padding="same"))  # DTensor
reveal_type(F.cat([x, w], dim=1))  # DTensor
reveal_type(F.where(x > 0, x, 1.0))  # DTensor
reveal_type(F.zeros_like(x))  # DTensor
reveal_type(F.gelu(plain))  # Tensor
reveal_type(F.stack((plain, plain)))  # Tensor
reveal_type(F.silu(nn.Parameter(plain)))  # Tensor
reveal_type(F.typed_by_first(torch.logdet)(x))  # DTensor
F.gelu(x, approximation="tanh")  # error

local = x.to_local()
reveal_type(local.shards)  # tuple[Tensor, ...]
reveal_type((local + 1).sum())  # LocalTensor
reveal_type(F.softmax(local, -1))  # LocalTensor
if isinstance(local, dt.PerRank):
    reveal_type(local)  # PerRank
    reveal_type(local * 2)  # PerRank
else:
    reveal_type(local)  # LocalTensor
reveal_type(dt.per_rank([plain]) - 1)  # PerRank
print(plain.shards)  # error


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def logits(self, x: torch.Tensor) -> int:
        return x.ndim


model = fully_shard(Model(), mesh=mesh)
reveal_type(model)  # Model
reveal_type(fully_shard([Model(), Model()], mesh=mesh))  # list[Model]
reveal_type(replicate(Model(), mesh))  # Model
reveal_type(parallelize_module(Model(), mesh, {"head": ColwiseParallel()}))  # Model
reveal_type(dt.distribute_module(Model(), mesh))  # Model
model.unshard()  # error
if isinstance(model, FSDPModule):
    reveal_type(model.logits(x))  # int
    reveal_type(model.unshard())  # UnshardHandle | None
for part in model.modules():
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(False)
        reveal_type(part)  # FSDPModule
weight = nn.Parameter(x)
if isinstance(weight, dt.DTensor):
    reveal_type(weight.placements)  # tuple[Placement, ...]


@dt.capture
def step(a: dt.DTensor, scale: float = 2.0) -> dt.DTensor:
    return a * scale


def local_product(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return a @ b * scale


def local_extent(a: torch.Tensor) -> int:
    return a.shape[0]


def local_anything(a: Any) -> Any:
    return a


product = dt.local_map(local_product, out_placements=[dt.Partial()], in_placements=([dt.Shard(1)], [dt.Shard(0)]))
reveal_type(product(x, w, scale=2.0))  # DTensor
reveal_type(dt.local_map(out_placements=[dt.Shard(0)])(local_product)(x, w))  # DTensor
reveal_type(dt.local_map(local_extent, out_placements=None)(x))  # int
reveal_type(dt.local_map(out_placements=None)(local_extent)(x))  # int
dt.local_map(local_anything, [dt.Shard(0)])(x)
product(x)  # error
product(x, w, scale="2")  # error
reveal_type(step(x, scale=3.0))  # DTensor
reveal_type(dt.capture(local_extent)(x))  # int
step(x, scales=3.0)  # error
reveal_type(step.source())  # str
