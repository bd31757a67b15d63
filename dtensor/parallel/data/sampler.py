"""Sampler: ``DistributedBatchSampler`` splits one global order of samples into global batches, and each batch over the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ...errors import LayoutError
from ...layout.splits import chunk_sizes, offsets_of
from ...mesh.create_mesh import mesh_or_world
from ...placement import Placement, Replicate, Shard
from ...tensor.distribute import distribute_tensor
from ...tensor.dtensor import DTensor


class DistributedBatchSampler(Sampler[list[int]]):
    """Sampler of this rank's shard of each global batch, for ``DataLoader(dataset, batch_sampler=...)``.

    An epoch has one global order of samples, that of ``torch.utils.data.DistributedSampler`` with one replica. It is split
    into global batches, and each batch over the ranks as ``Shard(0)`` over ``mesh_dims``. So the samples of a step do not
    depend on the number of ranks, and a run that is resumed on more or fewer ranks continues the schedule. With all ranks in
    one process the sampler yields full global batches, and inside ``map_ranks`` the rank's shard.

    An iteration yields the rest of the current epoch; after its last batch the next epoch is current. ``set_epoch`` of the
    current epoch changes nothing, so loops that are written for torch's sampler resume inside an epoch.

    Args:
        dataset: an object with a length.
        mesh: default the mesh entered by ``with mesh:``, else one over all ranks.
        batch_size: samples of a global batch.
        mesh_dims: the mesh dims, by name or index, that shard a batch; ranks along other dims read equal samples. Default
            ``"dp"``, or the dim of a 1-d mesh.
        shuffle, seed: the order of an epoch is ``randperm`` of a generator with ``seed + epoch``; without ``shuffle`` that of
            the dataset.
        drop_last: drop a last batch that is not full; otherwise it is filled with the first samples of the epoch.

    Raises:
        LayoutError: a batch has so few samples that a rank would have none.

    Cost: no communication; memory for the order of one epoch.

    >>> import dtensor as dt
    >>> def schedule(ranks, steps, state=None):
    ...     mesh = dt.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    ...     sampler = DistributedBatchSampler(range(30), mesh, batch_size=12, seed=1)
    ...     sampler.load_state_dict(state or sampler.state_dict())
    ...     return [batch for _, batch in zip(range(steps), sampler)], sampler.state_dict()
    >>> uninterrupted, _ = schedule(4, 2)
    >>> first, state = schedule(3, 1)
    >>> rest, _ = schedule(2, 1, state)
    >>> first + rest == uninterrupted, state["epoch"], state["samples"]
    (True, 0, 12)
    """

    def __init__(
        self,
        dataset: Sized,
        mesh: Any = None,
        batch_size: int = 1,
        *,
        mesh_dims: str | int | Sequence[str | int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.mesh = mesh_or_world(mesh)
        if mesh_dims is None:
            mesh_dims = 0 if self.mesh.ndim == 1 else "dp"
        named = mesh_dims if isinstance(mesh_dims, Sequence) and not isinstance(mesh_dims, str) else (mesh_dims,)
        self.mesh_dims = tuple(self.mesh.dim_index(dim) for dim in named)
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last
        self.length = len(dataset)
        self.epoch = self._samples = 0
        self._blocks = chunk_sizes(batch_size, tuple(self.mesh.shape[dim] for dim in self.mesh_dims))
        if min(self._blocks) < 1:
            raise LayoutError(
                f"a global batch of {batch_size} leaves a rank without samples: Shard(0) over {len(self._blocks)} "
                f"ranks gives {list(self._blocks)}; use a multiple of {len(self._blocks)}"
            )
        if not self.length or (drop_last and self.length < batch_size):
            raise LayoutError(f"{self.length} samples are fewer than one batch of {batch_size}; use a smaller batch_size")

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        here, order = self._own_slice(), list(range(self.length))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.length, generator=generator, device="cpu").tolist()
        last = self.length - self.batch_size if self.drop_last else self.length - 1  # where a batch may start
        for start in range(self._samples, last + 1, self.batch_size):
            batch = order[start : start + self.batch_size]
            while len(batch) < self.batch_size:
                batch += order[: self.batch_size - len(batch)]
            self._samples = start + self.batch_size
            if self._samples > last:
                self.epoch, self._samples = self.epoch + 1, 0
            yield batch[here]

    def _own_slice(self) -> slice:
        """Return the slice of a global batch that this rank reads; everything if all ranks are in this process."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            return slice(0, 0)  # outside of the mesh
        at = 0
        for dim in self.mesh_dims:
            if not isinstance(coordinate[dim], int):
                return slice(None)  # all ranks are here
            at = at * self.mesh.shape[dim] + coordinate[dim]
        start = offsets_of(self._blocks)[at]
        return slice(start, start + self._blocks[at])

    # --- position ----------------------------------------------------------------------------------------------------
    def set_epoch(self, epoch: int) -> None:
        """Move the sampler to the start of ``epoch``; do nothing if that is the current epoch."""
        if epoch != self.epoch:
            self.epoch, self._samples = epoch, 0

    def seek(self, step: int) -> None:
        """Move the sampler to the position after ``step`` global batches, counted from the first epoch.

        A ``DataLoader`` with workers requests batches ahead of the program, and ``state_dict`` counts requested batches. With
        workers, seek the number of steps made, or use torchdata's ``StatefulDataLoader``, which counts returned batches.
        """
        self.epoch, batches = divmod(step, len(self))
        self._samples = batches * self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position, seed and length; it may be loaded with another mesh or batch size."""
        return {
            "epoch": self.epoch,
            "samples": self._samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self.length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move the sampler to the position of a result of ``state_dict()``; raise if its order of samples differs.

        Raises:
            LayoutError: samples had another order there.
        """
        ours = self.state_dict()
        other = [
            f"{key}={state[key]} there, {ours[key]} here" for key in ("seed", "shuffle", "length") if state[key] != ours[key]
        ]
        if other:
            raise LayoutError(f"this state was saved for another order of samples: {', '.join(other)}; make the sampler as there")
        self.epoch, self._samples = state["epoch"], state["samples"]

    def distribute(self, samples: torch.Tensor) -> DTensor:
        """Return ``samples``, which a loader made from a batch of this sampler, as the global batch, sharded over ``mesh_dims``.

        Args:
            samples: a tensor with samples along dim 0: this rank's shard, or the global batch if all ranks are in this
                process.

        Cost: no communication.
        """
        placements: list[Placement] = [Shard(0) if dim in self.mesh_dims else Replicate() for dim in range(self.mesh.ndim)]
        shape = (self.batch_size, *samples.shape[1:])
        if self._own_slice() == slice(None):
            return distribute_tensor(samples, self.mesh, self._with_shard_order(placements), src_data_rank=None)
        return DTensor.from_local(samples, self.mesh, self._with_shard_order(placements), shape=shape)

    def _with_shard_order(self, placements: list[Placement]) -> list[Placement]:
        """Set the levels of ``Shard`` placements so that data is split in the order of ``mesh_dims``."""
        if list(self.mesh_dims) != sorted(self.mesh_dims):
            for level, dim in enumerate(self.mesh_dims):
                placements[dim] = Shard(0, level=level)
        return placements
