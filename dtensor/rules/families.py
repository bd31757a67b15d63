"""Importing this module registers every rule of the library."""

from . import (
    comparison,
    contraction,
    creation,
    extremum,
    joining,
    linalg,
    loss,
    nll,
    pointwise,
    random,
    reduction,
    scan,
    slices,
    softmax,
    variance,
    views,
)

__all__ = [
    "comparison",
    "contraction",
    "creation",
    "extremum",
    "joining",
    "linalg",
    "loss",
    "nll",
    "pointwise",
    "random",
    "reduction",
    "scan",
    "slices",
    "softmax",
    "variance",
    "views",
]
