"""Lazy transforms of checkpoints: tensors that are stacked, concatenated, sliced and transposed while loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoint_cases
import pytest
import torch
from torch import Tensor

import dtensor as dt
from dtensor.checkpoint import load, save, save_safetensors
from dtensor.errors import CheckpointError

Transform = Callable[[Tensor, Tensor], Tensor]  # function of two tensors of shape (4, 6)
TRANSFORMS: dict[str, Transform] = {
    "stack": lambda x, y: torch.stack([x, y]),
    "stack on the last dim": lambda x, y: torch.stack([x, y], -1),
    "concatenate": lambda x, y: torch.cat([x, y, x], 1),
    "transposed": lambda x, y: torch.cat([x.t(), y.transpose(0, -1)]),
    "permuted stack": lambda x, y: torch.stack([x, y]).permute(2, 0, 1).contiguous(),
    "concatenated stacks": lambda x, y: torch.cat([torch.stack([x, y]), torch.stack([y, x])], dim=1),
    "chunks, splits and slices": lambda x, y: torch.cat([x.chunk(2, 1)[1], y.split([2, 4], 1)[1], x[:, 1:3]], -1),
    "stacked rows": lambda x, y: torch.stack([*x.unbind(), y[2], y.select(0, -1)]),
    "slice of a transposed stack": lambda x, y: torch.stack([x, y], 1).transpose(0, 2)[2:5, 1],
    "reshaped": lambda x, y: torch.stack([x.view(2, 12), y.reshape(2, -1)]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_lazily_transformed_tensors_load_and_read_only_the_needed_bytes(name: str, tmp_path: Path) -> None:
    made, mesh = TRANSFORMS[name], dt.init_device_mesh("cpu", (3,))
    x, y = checkpoint_cases.make_values(4, 6), checkpoint_cases.make_values(4, 6) + 100
    save({"x": dt.distribute_tensor(x, mesh, [dt.Shard(1)]) if name != "reshaped" else x, "y": y}, tmp_path / "ours")
    save_safetensors({"x": x, "y": y}, tmp_path / "other")
    expected = made(x, y)
    for folder in ("ours", "other"):
        for dim in range(expected.ndim):
            into = dt.zeros(*expected.shape, dtype=x.dtype, device_mesh=mesh, placements=[dt.Shard(dim)])
            read = load({"made": into}, tmp_path / folder, arrange=lambda stored: {"made": made(stored["x"], stored["y"])})
            checkpoint_cases.assert_same_values(into, expected)
            assert read.bytes_read == expected.nbytes


def test_corrupted_data_of_a_tensor_renamed_by_arrange_raises(tmp_path: Path) -> None:
    x = checkpoint_cases.make_values(4, 6)
    save({"x": x}, tmp_path)
    (file,) = [each for each in tmp_path.iterdir() if each.name.startswith("__0_") and not each.stem.endswith("v")]
    data = bytearray(file.read_bytes())
    data[data.index(x.numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="corrupted"):
        load({"y": torch.zeros_like(x)}, tmp_path, arrange=lambda stored: {"y": stored["x"]})


REFUSED: dict[str, tuple[Transform, str]] = {
    "arithmetic": (lambda x, y: x + y, "is not supported"),
    "change of dtype": (lambda x, y: x.half(), "keep their dtype"),
    "slice with step 2": (lambda x, y: x[::2], "step 1"),
    "reshape of a transpose": (lambda x, y: x.t().reshape(4, 6), "must be reshaped before"),
    "tensor not from the checkpoint": (lambda x, y: torch.zeros(4, 6), "not computed from tensors of the checkpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_lazy_transforms_raise(name: str, tmp_path: Path) -> None:
    made, said = REFUSED[name]
    x = checkpoint_cases.make_values(4, 6)
    save({"x": x, "y": x}, tmp_path)
    with pytest.raises(CheckpointError, match=said):
        load({"x": torch.zeros_like(x)}, tmp_path, arrange=lambda stored: {"x": made(stored["x"], stored["y"])})


def test_arrange_that_returns_non_tensors_raises(tmp_path: Path) -> None:
    save({"x": torch.zeros(2), "step": 3}, tmp_path)
    with pytest.raises(CheckpointError, match="a dict of tensors"):
        load({"x": torch.zeros(2)}, tmp_path, arrange=dict)
