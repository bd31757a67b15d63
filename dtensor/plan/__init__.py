"""A program as a whole: recorded as a graph, planned by an exact solver, run by its plan."""

from .make import plan
from .program_plan import PlannedCall, PlannedMove, ProgramPlan

__all__ = ["PlannedCall", "PlannedMove", "ProgramPlan", "plan"]
