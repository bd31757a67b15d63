"""First imports: modules that ``import dtensor`` and the first operators of a process import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F

before = set(sys.modules)
import dtensor as dt
{prepare}
mesh = dt.init_device_mesh("cpu", (4,))
x = dt.distribute_tensor(torch.rand({rows}, 8), mesh, [dt.Shard(0)])
weight = dt.distribute_tensor(torch.rand(8, 8), mesh, [dt.Replicate()])

{calls}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
FAKE_GROUP = """
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
"""
CALLS = """
y = torch.relu(x @ weight + weight[0])
z = F.layer_norm(F.gelu(F.linear(y, weight, weight[0])), (8,), weight[0], weight[1]).softmax(-1)
z.mul_(2).sub_(z.mean(0)).sum().item()
torch.where(y > 0, y, z).t().cumsum(1).full_tensor()
(y == z).any(), z.amax(1), z.to(torch.float64).redistribute(placements=[dt.Replicate()])
if x.shape[0] < 100:
    leaf = y.detach().requires_grad_()
    torch.relu(leaf @ weight + weight[0]).sum().backward()
"""
COMPILER = {
    "mpmath",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
}


@pytest.mark.parametrize(("prepare", "rows"), [("", 8), (FAKE_GROUP, 5000)], ids=["in process", "process group"])
def test_first_operators_import_neither_the_compiler_nor_torch_dtensor(prepare: str, rows: int) -> None:
    program = PROGRAM.format(prepare=prepare, rows=rows, calls=CALLS)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert COMPILER.isdisjoint(json.loads(done.stdout))
