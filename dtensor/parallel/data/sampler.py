"""Which samples a rank reads: one global order, cut into global batches, whose blocks follow the mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ...errors import LayoutError
from ...layout.splits import chunk_sizes, offsets_of
from ...mesh.create import mesh_or_world
from ...placement import Placement, Replicate, Shard
from ...tensor.distribute import distribute_tensor
from ...tensor.dtensor import DTensor


class DistributedBatchSampler(Sampler[list[int]]):
    """This rank's part of each global batch, for ``DataLoader(dataset, batch_sampler=...)``.

    Samples have one global order in an epoch, that of ``torch.utils.data.DistributedSampler`` with one replica; it is cut into
    global batches, and each of those among the ranks as ``Shard(0)`` cuts it over ``mesh_dims``. So which samples a step sees
    does not depend on the number of ranks: a run resumed on more or fewer continues the schedule. Where all ranks live in this
    process it gives whole global batches, and inside ``map_ranks`` the rank's part.

    An iteration gives the rest of the current epoch; with its last batch the next epoch is the current one. ``set_epoch`` of the
    epoch that is current changes nothing, so loops written for torch's sampler resume in its middle.

    Args:
        dataset: anything with a length.
        mesh: default that entered by ``with mesh:``, else one over all ranks.
        batch_size: samples of a global batch.
        mesh_dims: the mesh dims, by name or index, that cut a batch; the ranks along others read the same. Default ``"dp"``, or
            all of a 1-d mesh.
        shuffle, seed: an epoch's order is ``randperm`` of a generator with ``seed + epoch``; without ``shuffle`` the dataset's.
        drop_last: leave a last batch that is not full out; else it is filled up with the epoch's first samples.

    Raises:
        LayoutError: a batch of so few samples that a rank would have none.

    Cost: no communication; memory for one epoch's order.

    >>> import dtensor as dt
    >>> def schedule(ranks, steps, state=None):
    ...     mesh = dt.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    ...     sampler = DistributedBatchSampler(range(30), mesh, batch_size=12, seed=1)
    ...     sampler.load_state_dict(state or sampler.state_dict())
    ...     return [batch for _, batch in zip(range(steps), sampler)], sampler.state_dict()
    >>> whole, _ = schedule(4, 2)
    >>> first, state = schedule(3, 1)
    >>> rest, _ = schedule(2, 1, state)
    >>> first + rest == whole, state["epoch"], state["samples"]
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
            raise LayoutError(f"{self.length} samples are fewer than one batch of {batch_size}")

    def __len__(self) -> int:
        """The batches of an epoch."""
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order, here = self._order(), self._here()
        last = self.length - self.batch_size if self.drop_last else self.length - 1  # where a batch may start
        for start in range(self._samples, last + 1, self.batch_size):
            batch = order[start : start + self.batch_size]
            while len(batch) < self.batch_size:
                batch += order[: self.batch_size - len(batch)]
            self._samples = start + self.batch_size
            if self._samples > last:
                self.epoch, self._samples = self.epoch + 1, 0
            yield batch[here]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch), device="cpu").tolist()

    def _here(self) -> slice:
        """The rows of a batch that this rank reads."""
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

    # --- where it stands ---------------------------------------------------------------------------------------------------
    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing changes if it is the current one."""
        if epoch != self.epoch:
            self.epoch, self._samples = epoch, 0

    def seek(self, step: int) -> None:
        """Go to where ``step`` global batches have been taken, from the first epoch on.

        A ``DataLoader`` with workers asks ahead of what the program has got, and ``state_dict`` tells what it has asked for: with
        workers, seek the number of steps made, or use torchdata's ``StatefulDataLoader``, which keeps count.
        """
        self.epoch, batches = divmod(step, len(self))
        self._samples = batches * self.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and what the order depends on. It may be loaded with another mesh or batch size."""
        return {
            "epoch": self.epoch,
            "samples": self._samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self.length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state_dict()`` was taken.

        Raises:
            LayoutError: samples had another order there.
        """
        ours = self.state_dict()
        other = [
            f"{key}={state[key]} there, {ours[key]} here" for key in ("seed", "shuffle", "length") if state[key] != ours[key]
        ]
        if other:
            raise LayoutError(f"this state was saved for another order of samples: {', '.join(other)}")
        self.epoch, self._samples = state["epoch"], state["samples"]

    def distribute(self, samples: torch.Tensor) -> DTensor:
        """What a loader made of one of this sampler's batches, as the global batch, sharded over ``mesh_dims``.

        Args:
            samples: a tensor whose dim 0 is the samples: of this rank's part; of all where all ranks live in this process.

        Cost: no communication.
        """
        placements: list[Placement] = [Shard(0) if dim in self.mesh_dims else Replicate() for dim in range(self.mesh.ndim)]
        shape = (self.batch_size, *samples.shape[1:])
        if self._here() == slice(None):
            return distribute_tensor(samples, self.mesh, self._nested(placements), src_data_rank=None)
        return DTensor.from_local(samples, self.mesh, self._nested(placements), shape=shape)

    def _nested(self, placements: list[Placement]) -> list[Placement]:
        """Shards that nest in the order of ``mesh_dims``, where that is not that of the mesh."""
        if list(self.mesh_dims) != sorted(self.mesh_dims):
            for level, dim in enumerate(self.mesh_dims):
                placements[dim] = Shard(0, level=level)
        return placements
