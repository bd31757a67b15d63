"""Library attributes: all attributes that the library stores on tensors are declared in one table."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

import dtensor as dt
from dtensor import DTensor, Shard
from dtensor.tensor.tensor_state import ATTRIBUTES


def test_operators_store_only_declared_attributes() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    before = {id(x) for x in gc.get_objects() if isinstance(x, DTensor)}
    x = dt.distribute_tensor(torch.randn(7, 6), mesh, [Shard(0)])
    w = dt.distribute_tensor(torch.randn(6, 6), mesh, [Shard(0)]).requires_grad_()
    results = [x @ w, x.t() @ x, x[2:5], x.view(7, 2, 3), x.unsqueeze(1).expand(7, 4, 6), torch.cat([x, x @ w])]
    rows = (x[:, 0] > 0).nonzero()
    results += [
        rows,
        x[rows[:, 0]],
        x.index_add(0, rows[:, 0], x[rows[:, 0]]),
        x.redistribute(placements=[Shard(1)], async_op=True),
    ]
    results += [x.softmax(0).sum(), *x.unbind(1), x.detach(), w.data]
    (x @ w).relu().square().sum().backward()
    x[1:3].add_(1.0)
    results += [w.grad, x @ w]
    tensors = [y for y in gc.get_objects() if isinstance(y, DTensor) and id(y) not in before]
    assert len(tensors) >= len(results)
    names = {name for y in tensors for name in y.__dict__}
    assert names <= {"_local", "_layout", *ATTRIBUTES}
    assert {"_local_indices", "_grad_layout", "_preferred_layout"} <= names


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_modules_declared_to_use_an_attribute_name_it_in_their_source(name: str) -> None:
    folder = Path(dt.__file__).parent
    paths = [*folder.glob("state/*.py"), *folder.glob("dispatch/**/*.py")]
    sources = [path.read_text() for path in paths if path.name != "tensor_state.py"]
    constants = {match for text in sources for match in re.findall(rf'^(\w+) = "{name}"', text, re.MULTILINE)}
    constants |= set(re.findall(rf'^(\w+) = "{name}"', (folder / "tensor/autograd.py").read_text(), re.MULTILINE))
    used = re.compile(rf"\b{name}\b" + "".join(rf"|\b{constant}\b" for constant in constants))
    assert ATTRIBUTES[name].purpose
    for module in ATTRIBUTES[name].writers + ATTRIBUTES[name].readers:
        assert used.search((folder / f"{module}.py").read_text()), module
