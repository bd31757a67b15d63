"""Who sees a program for the first time finds its all-gather too many in one command: the line, why, and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from torch_versions import needs_whole

from dtensor.__main__ import main

HEAD = """
import torch
import torch.nn.functional as F
import dtensor as dt
from torch import nn
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
R, S0, S1 = dt.Replicate(), dt.Shard(0), dt.Shard(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        h = self.up(x).relu()
        return self.down(h)


def model(up, down):
    block = Block()
    for layer, place in ((block.up, up), (block.down, down)):
        layer.weight = nn.Parameter(dt.distribute_tensor(layer.weight.detach(), mesh, [place]))
    return block


x = dt.ones(6, 4, device_mesh=mesh)
"""


class Extra(NamedTuple):
    """A program that moves too much on the line with ``# here``; ``told``: the remedy, by which ``old`` becomes ``new``."""

    program: str
    why: str
    told: str
    old: str
    new: str


PROGRAMS = {
    "activations": Extra(
        """
scale = dt.ones(6, 8, device_mesh=mesh, placements=[S0])
h = model(S0, S1).up(x)
y = h * scale  # here
""",
        "forward aten::mul.Tensor: all_to_all over tp, 2 ranks, 48 B",
        "or: make other float32[6, 8] on (tp=S(0)) with placements=[Shard(dim=1)]; then nothing is redistributed",
        "placements=[S0])\nh =",
        "placements=[S1])\nh =",
    ),
    "activations, by hand": Extra(
        """
scale = dt.ones(6, 8, device_mesh=mesh, placements=[S0])
h = model(S0, S1).up(x)
y = h * scale  # here
""",
        "forward aten::mul.Tensor: all_to_all over tp, 2 ranks, 48 B",
        "write instead: self.redistribute(placements=[Shard(dim=0)]), once, before this line",
        "y = h * scale",
        "h = h.redistribute(placements=[dt.Shard(dim=0)])\ny = h * scale",
    ),
    "weights": Extra(
        "\ny = model(S0, S0)(x)\n",
        "forward aten::linear in Block.down: all_gather over tp, 2 ranks, 96 B",
        "or: make weight float32[4, 8] on (tp=S(0)) with placements=[Shard(dim=1)]; then nothing is redistributed",
        "model(S0, S0)",
        "model(S0, S1)",
    ),
    "a loss": Extra(
        """
target = dt.ones(6, 8, device_mesh=mesh, placements=[S1])
logits = dt.ones(6, 8, device_mesh=mesh, placements=[S0])
loss = F.mse_loss(logits, target)  # here
""",
        "forward aten::mse_loss: all_to_all over tp, 2 ranks, 48 B",
        "or: make self float32[6, 8] on (tp=S(0)) with placements=[Shard(dim=1)]; then nothing is redistributed",
        "logits = dt.ones(6, 8, device_mesh=mesh, placements=[S0])",
        "logits = dt.ones(6, 8, device_mesh=mesh, placements=[S1])",
    ),
    "a redistribution": Extra(
        """
block = model(S0, S1)
h = block.up(x).relu()
h = h.redistribute(placements=[R])  # here
y = block.down(h)
""",
        "forward DTensor.redistribute: all_gather over tp, 2 ranks, 96 B",
        "float32[6, 8] on (tp=S(1)) -> (tp=R)",
        "h = h.redistribute(placements=[R])  # here\n",
        "",
    ),
    "a hook": Extra(
        """
block = model(S0, S1)
def look(module, given, made):
    print(made.full_tensor().norm() > 0)  # here
handle = block.up.register_forward_hook(look)
y = block(x)
""",
        "forward DTensor.full_tensor in Block.up: all_gather over tp, 2 ranks, 96 B",
        "float32[6, 8] on (tp=S(1)) -> (tp=R)",
        "made.full_tensor().norm() > 0",
        "made.to_local().shape",
    ),
    "a style": Extra(
        """
block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(output_layouts=R)})
h = block.up(torch.ones(6, 4))  # here
""",
        "forward dtensor.parallel.tensor.style in Linear: all_gather over tp, 2 ranks, 96 B",
        "float32[6, 8] on (tp=S(1)) -> (tp=R)",
        "output_layouts=R",
        "",
    ),
    "a gradient": Extra(
        """
w = nn.Parameter(dt.ones(4, 5, device_mesh=mesh, placements=[R]))
y = dt.ones(6, 4, device_mesh=mesh, placements=[S0]) @ w  # here
y.sum().backward()
""",
        "backward gradient (AccumulateGrad): all_reduce over tp, 2 ranks, 80 B",
        "float32[4, 5] on (tp=P(sum)) -> (tp=R)",
        "placements=[S0]) @ w",
        "placements=[R]) @ w",
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_whole) if name == "weights" else name for name in PROGRAMS])
def test_line_reason_and_remedy_are_right(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra, script = PROGRAMS[name], tmp_path / "model.py"
    text = HEAD + extra.program
    script.write_text(text)
    assert main(["explain", str(script)]) == 0
    said = capsys.readouterr().out
    marked = "# here" if "# here" in extra.program else "return self.down(h)"
    at = next(number for number, row in enumerate(text.splitlines(), 1) if marked in row)
    line = next(row for row in said.splitlines() if row.startswith("model.py:") and "collective" in row)
    assert line.startswith(f"model.py:{at}  {text.splitlines()[at - 1].strip()}: 1 collective, "), said
    for told in (extra.why, extra.told):
        assert any(row.strip().startswith(told) for row in said.splitlines()), said
    assert extra.old in text
    script.write_text(text.replace(extra.old, extra.new))
    assert main(["explain", str(script)]) == 0
    said = capsys.readouterr().out
    if "redistribute" in extra.new:  # by hand: what moved without a word is written there
        assert "1 collective, 48 B" in said
        assert "DTensor.redistribute" in said
    else:
        assert "0 collectives, 0 B received per rank" in said, said
