"""A program as a whole: recorded as a graph, planned by an exact solver, run by its plan; and placements found for a model."""

from .api import plan
from .auto_sharding import Sharding, auto_shard
from .program_plan import PlannedCall, PlannedMove, ProgramPlan

__all__ = ["PlannedCall", "PlannedMove", "ProgramPlan", "Sharding", "auto_shard", "plan"]
