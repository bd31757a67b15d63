"""Policy objects of data parallelism: dtypes of the computation, storage of shards, and the roles of mesh dims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....base.torch_internals import tree_map
from ....comm import PerRank
from ....placement import NamedPlacements, Shard


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of a module's computation. Parameters, gradients and optimizer states keep their own dtypes.

    Attributes:
        param_dtype: dtype of the unsharded parameters, and so of the computation and the all-gather.
        reduce_dtype: dtype in which gradients are reduced; default that of the unsharded parameters; complex gradients keep
            theirs.
        output_dtype: dtype to which floating-point outputs are cast.
        cast_forward_inputs: cast floating-point inputs to ``param_dtype``.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = fully_shard(torch.nn.Linear(3, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    >>> model(torch.ones(2, 3)).dtype, model.weight.dtype
    (torch.bfloat16, torch.float32)

    Raises nothing by itself.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def cast_inputs(self, inputs: Any) -> Any:
        """Return a module's inputs in the dtype of the computation."""
        return (
            inputs if self.param_dtype is None or not self.cast_forward_inputs else _cast_floating_point(inputs, self.param_dtype)
        )

    def cast_output(self, output: Any) -> Any:
        """Return a module's output in ``output_dtype``."""
        return output if self.output_dtype is None else _cast_floating_point(output, self.output_dtype)


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Policy without offload: sharded parameters and gradients stay on the mesh's device.

    No communication with the host.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> fully_shard(torch.nn.Linear(3, 4), mesh=mesh, offload_policy=OffloadPolicy()).weight.device.type
    'cpu'

    Raises nothing by itself.
    """


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Offload policy: sharded parameters, gradients and so optimizer states are stored in host memory.

    Attributes:
        pin_memory: if the mesh's device is an accelerator, copies use pinned memory and do not block. A unit's row of bytes
            is copied to the device, and its gradients back; the host waits for them when the next unit's gradients have
            arrived. Without it copies block.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> fully_shard(torch.nn.Linear(3, 4), mesh=mesh, offload_policy=CPUOffloadPolicy()).weight.device.type
    'cpu'

    Collectives are unchanged. Raises nothing by itself.
    """

    pin_memory: bool = True


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """Names of the data-parallel dims of a larger mesh.

    Attributes:
        shard: mesh dims over which parameters are sharded.
        replicate: mesh dims over which parameters are replicated.

    No communication.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> DataParallelMeshDims(shard="dp").shard
    'dp'

    A name that the mesh does not have raises where it is used with a mesh.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names in ``shard``, as a tuple."""
        return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names in ``replicate``, as a tuple."""
        return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


@dataclass(frozen=True, slots=True)
class ShardPlacementResult:
    """Result of ``shard_placement_fn`` for a parameter on another mesh than the rest, such as an expert.

    Attributes:
        placement: the ``Shard(dim)`` to shard by, in any form but a list; None: ``Shard(0)``.
        mesh_info: the mesh, as ``mesh=`` of ``fully_shard``: of one dim, or of two, with replication over the first.

    Each mesh has collectives of its own, and gradients are averaged over it.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    >>> def where(p):
    ...     return ShardPlacementResult(dt.Shard(1), mesh["inner"]) if p.ndim == 2 else None
    >>> layer = fully_shard(torch.nn.Linear(4, 6), mesh=mesh.flatten("dp"), shard_placement_fn=where)
    >>> layer.weight.layout, layer.bias.layout
    (float32[6, 4] on (inner=S(1)), float32[6] on (dp=S(0)))

    ``fully_shard`` raises ``PlacementError`` if ``mesh_info`` is not a mesh.
    """

    placement: Shard | NamedPlacements | None
    mesh_info: Any


def _cast_floating_point(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with floating-point tensors converted to ``dtype``."""

    def cast_one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype != dtype else x

    return tree_map(cast_one, values, is_leaf=lambda x: isinstance(x, PerRank))


@dataclass(frozen=True, slots=True)
class HostOffload:
    """Copies of shards between the device and host memory, in which offloaded parameters are stored.

    A device copies from and to pinned memory asynchronously. Shards are stored in pageable memory, and what is sent to the
    device is a copy in pinned memory. So an optimizer may write the shards while an older value is being sent.

    Attributes:
        pinned: copies use pinned memory and do not block; requires an accelerator.
    """

    pinned: bool

    @staticmethod
    def from_policy(policy: OffloadPolicy, device_type: str) -> HostOffload | None:
        """Return the offload of parameters that are computed with on ``device_type``; None if ``policy`` does not offload."""
        if not isinstance(policy, CPUOffloadPolicy):
            return None
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return HostOffload(policy.pin_memory and accelerator is not None and accelerator.type == device_type)

    def concatenate(self, parts: list[Tensor]) -> Tensor:
        """Return the concatenation of ``parts`` in new memory, from which a device may copy at any time."""
        if not self.pinned:
            return torch.cat(parts)
        buffer = allocate_pinned(sum(part.numel() for part in parts), parts[0].dtype)
        return torch.cat(parts, out=buffer)

    def copy_to_device(self, x: Tensor, device: str) -> Tensor:
        """Return a copy of ``x`` on the device. Work that is issued on the device from now on sees its values."""
        return self.concatenate([x.detach().reshape(-1)]).to(device, non_blocking=True).view(x.shape)

    def copy_to_host(self, x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        """Return a flat copy of ``x`` in host memory, and a function that must be called before the copy is read."""
        if not self.pinned or x.device.type == "cpu":
            return x.cpu(), lambda: None
        buffer = allocate_pinned(x.numel(), x.dtype)
        buffer.copy_(x, non_blocking=True)
        event = torch.Event(x.device)
        event.record()
        return buffer, event.synchronize


def allocate_pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Return pinned memory. Torch's allocator reuses it only after asynchronous copies from and to it have finished."""
    return torch.empty(numel, dtype=dtype, pin_memory=True, device="cpu")
