"""Experimental functions of ``torch.distributed.tensor.experimental``, under their names there."""

from .base.modes import implicit_replication
from .parallel import context_parallel, context_parallel_unshard
from .tensor.local_map import local_map
from .user_rules.register_sharding import register_sharding

__all__ = ["context_parallel", "context_parallel_unshard", "implicit_replication", "local_map", "register_sharding"]
