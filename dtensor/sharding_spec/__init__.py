"""Sharding specs: how tensors and models are sharded, written with device names.

See :mod:`.composite` for the functions that make specs, :mod:`dtensor.sharded_tensor` for tensors made from them.
"""

from .composite import Composite, as_spec, composite, from_data, mesh, single_split, spec_of, whole
from .specs import MeshSplit, SingleSplit, Spec, Whole

__all__ = [
    "Composite",
    "MeshSplit",
    "SingleSplit",
    "Spec",
    "Whole",
    "as_spec",
    "composite",
    "from_data",
    "mesh",
    "single_split",
    "spec_of",
    "whole",
]
