"""Model parallelism: tensor, sequence, context and data parallelism of modules, built on DTensors."""

from ..interop.dynamo import mark_untraced as _leave_untraced
from ..tensor.modules.materialize import materialize
from .data.fully_shard import fully_shard, register_fsdp_forward_method, units_by_size
from .data.replicate import ReplicatedModule, replicate
from .data.sampler import DistributedBatchSampler
from .data.settings.custom_collectives import AllGather, Comm, ReduceScatter
from .data.settings.policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from .data.units.fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from .data.zero import ZeroRedundancyOptimizer
from .tensor.colwise_rowwise import ColwiseParallel, RowwiseParallel, SequenceParallel
from .tensor.context_parallel import context_parallel, context_parallel_unshard
from .tensor.loss import loss_parallel
from .tensor.parallelize import parallelize_module
from .tensor.prepare_io import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .tensor.style import ParallelStyle

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "Comm",
    "DataParallelMeshDims",
    "DistributedBatchSampler",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReduceScatter",
    "ReplicatedModule",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardPlacementResult",
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
    "context_parallel",
    "context_parallel_unshard",
    "fully_shard",
    "loss_parallel",
    "materialize",
    "parallelize_module",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "units_by_size",
]

_leave_untraced(__name__)
