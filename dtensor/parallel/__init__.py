"""Whole models: tensor, sequence and data parallelism, built on DTensors and their redistribution."""

from .boundary import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .loss import loss_parallel
from .plan import parallelize_module
from .style import ParallelStyle
from .tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
