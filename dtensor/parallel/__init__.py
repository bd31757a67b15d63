"""Whole models: tensor, sequence and data parallelism, built on DTensors and their redistribution."""

from ..untraced import leave_untraced as _leave_untraced
from .auto_wrap import units_by_size
from .boundary import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from .fully_shard import fully_shard, register_fsdp_forward_method
from .loss import loss_parallel
from .materialize import materialize
from .plan import parallelize_module
from .policy import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from .replicate import ReplicatedModule, replicate
from .style import ParallelStyle
from .tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from .transport import AllGather, Comm, ReduceScatter
from .zero import ZeroRedundancyOptimizer

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "Comm",
    "DataParallelMeshDims",
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
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
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
