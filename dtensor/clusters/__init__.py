"""A training step of a known model on a cluster of any size, from dry runs of its parts on one rank."""

from .cluster import CLUSTERS, Cluster, Degrees, cluster
from .composed import Estimate, best, estimate
from .transformer import MODELS, Transformer

__all__ = ["CLUSTERS", "MODELS", "Cluster", "Degrees", "Estimate", "Transformer", "best", "cluster", "estimate"]
