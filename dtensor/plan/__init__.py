"""Program plans: record a program as a graph, choose all of its strategies and layouts with an exact solver, and run it so."""

from .auto_sharding import Sharding, auto_shard
from .make_plan import plan
from .program_plan import PlannedCall, PlannedMove, ProgramPlan

__all__ = ["PlannedCall", "PlannedMove", "ProgramPlan", "Sharding", "auto_shard", "plan"]
