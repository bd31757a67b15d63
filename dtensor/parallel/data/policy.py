"""How fully sharded modules compute and where their shards stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.torch_internals import tree_map
from ...comm import PerRank
from ...placement import Shard


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of a module's computation; parameters, gradients and optimizer states keep their own.

    Attributes:
        param_dtype: of the gathered parameters, and so of the computation and the all-gather.
        reduce_dtype: in which gradients are reduced; default that of the gathered parameters, as for complex ones always.
        output_dtype: to which floating-point outputs are cast.
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

    def cast_inputs(self, given: Any) -> Any:
        """What a module is given, as it computes with it."""
        return given if self.param_dtype is None or not self.cast_forward_inputs else _cast(given, self.param_dtype)

    def cast_output(self, output: Any) -> Any:
        """What a module gives, as it is handed on."""
        return output if self.output_dtype is None else _cast(output, self.output_dtype)


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Sharded parameters and gradients stay on the mesh's device.

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
    """Sharded parameters, gradients and so optimizer states stay in host memory.

    Attributes:
        pin_memory: where the mesh's device is an accelerator, what travels goes through pinned memory and does not block: a
            unit's row of bytes to the device, its gradients back, for which the host waits when the next unit's have come.
            Otherwise copies block.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> fully_shard(torch.nn.Linear(3, 4), mesh=mesh, offload_policy=CPUOffloadPolicy()).weight.device.type
    'cpu'

    Collectives are the same; raises nothing by itself.
    """

    pin_memory: bool = True


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """Which dims of a larger mesh are data-parallel, by name.

    Attributes:
        shard: the dims to cut parameters over.
        replicate: the dims to copy them over.

    A value: no communication.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> DataParallelMeshDims(shard="dp").shard
    'dp'

    Names that the mesh does not have raise where a model is given both.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Those of ``shard``, however it was given."""
        return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Those of ``replicate``."""
        return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


@dataclass(frozen=True, slots=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` gives for a parameter that is cut over another mesh than the rest: experts, say.

    Attributes:
        placement: the ``Shard(dim)`` to cut by; None: ``Shard(0)``.
        mesh_info: the mesh, as ``mesh=`` of ``fully_shard``: of one dim, or of two, copied over the first.

    Each mesh has collectives of its own, and gradients are averaged over it.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    >>> def where(p):
    ...     return ShardPlacementResult(dt.Shard(1), mesh["inner"]) if p.ndim == 2 else None
    >>> layer = fully_shard(torch.nn.Linear(4, 6), mesh=mesh.flatten("dp"), shard_placement_fn=where)
    >>> layer.weight.layout, layer.bias.layout
    (float32[6, 4] on (inner=S(1)), float32[6] on (dp=S(0)))

    What is no mesh raises ``PlacementError`` where the parameter is asked for.
    """

    placement: Shard | None
    mesh_info: Any


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """``values`` with their floating-point tensors in ``dtype``."""

    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype != dtype else x

    return tree_map(one, values, is_leaf=lambda x: isinstance(x, PerRank))
