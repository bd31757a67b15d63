"""Parallel styles under the module name that ``torch.distributed.tensor.parallel.style`` has for them."""

from .tensor.colwise_rowwise import ColwiseParallel, RowwiseParallel, SequenceParallel
from .tensor.prepare_io import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .tensor.style import ParallelStyle

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
]
