"""Clusters: estimate a training step of a known model on a cluster of any size, from dry runs of its parts on one rank."""

from .cluster import CLUSTERS, Cluster, Degrees, cluster
from .model_sizes import MODELS, Transformer
from .step_estimate import Estimate, best, estimate

__all__ = ["CLUSTERS", "MODELS", "Cluster", "Degrees", "Estimate", "Transformer", "best", "cluster", "estimate"]
