"""Styles by the name that ``torch.distributed.tensor.parallel.style`` has for them."""

from .tensor.boundary import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .tensor.matrix import ColwiseParallel, RowwiseParallel, SequenceParallel
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
