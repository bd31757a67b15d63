"""The convolutional network of the MNIST tutorials on handwritten digits, fully sharded: the accuracy of one device.

    python docs/examples/digits_fsdp.py          or          torchrun --nproc-per-node 2 docs/examples/digits_fsdp.py

The digits are scikit-learn's (1,797 of 8 x 8 pixels; `pip install 'dtensor[examples]'`). The batch is a DTensor, sharded over
the ranks, so the loss is that of the global batch. Dropout has the values of one device, so losses in float64 are equal. The
last batch of an epoch is uneven. Units are chosen by size, as `size_based_auto_wrap_policy` does.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from one_device import compare, needs
from sklearn.datasets import load_digits
from torch import Tensor, nn

import dtensor as dt
from dtensor import Shard
from dtensor.parallel import fully_shard, units_by_size


class Net(nn.Module):
    """Two convolutions, pooling, dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(256, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def net() -> Net:
    """The same network, whoever asks."""
    torch.manual_seed(0)
    return Net().double()


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train with, and to test with."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = (images.double().reshape(-1, 1, 8, 8) - 4.9) / 6.0
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def run(model: nn.Module, epochs: int, mesh: dt.DeviceMesh | None = None) -> tuple[list[float], float]:
    """(mean loss of every epoch, accuracy on what was not trained with). The loop does not depend on placements."""
    images, labels, test_images, test_labels = digits()
    given: Any = (lambda x: x) if mesh is None else lambda x: dt.distribute_tensor(x, mesh, [Shard(0)])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    torch.manual_seed(7)
    losses = []
    for _ in range(epochs):
        model.train()
        total = 0.0
        for x, y in zip(images.split(128), labels.split(128), strict=True):
            optimizer.zero_grad()
            loss = F.nll_loss(model(given(x)), given(y), reduction="sum")
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total / len(images))
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = (model(given(test_images)).argmax(dim=1) == given(test_labels)).sum().item()
    return losses, right / len(test_labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    needs(2)
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = net()
    for unit in units_by_size(model, 1000):
        fully_shard(unit, mesh=mesh)
    losses, accuracy = run(model, options.epochs, mesh)
    alone_losses, alone_accuracy = run(net(), options.epochs)
    if mesh.get_rank() == 0:
        total = sum(p.layout.nbytes for p in model.parameters())
        held = sum(p.layout.max_local_nbytes for p in model.parameters())
        print(f"parameters: {total / 1024:.0f} KiB, of which one rank holds {held / 1024:.0f} KiB")
        print(f"accuracy: {accuracy:.4f} on the mesh, {alone_accuracy:.4f} on one device")
    compare("digits", losses, alone_losses, tolerance=1e-6)
    if abs(accuracy - alone_accuracy) > 0.01:
        raise SystemExit("the mesh's accuracy is not the single device's")


if __name__ == "__main__":
    main()
