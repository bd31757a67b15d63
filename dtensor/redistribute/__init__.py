"""Redistribute: plans of local steps and collectives between two layouts (pure), and their execution."""

from .across_meshes import Transit, move_between, plan_between
from .coalesce import execute_many
from .executor import execute, redistribute_local, redistribution_between, start
from .planner import estimate, plan
from .step import VIEWS, AllGather, AllReduce, Exchange, Once, Plan, ReduceScatter, Repeat, Slice, Spread, Step

__all__ = [
    "VIEWS",
    "AllGather",
    "AllReduce",
    "Exchange",
    "Once",
    "Plan",
    "ReduceScatter",
    "Repeat",
    "Slice",
    "Spread",
    "Step",
    "Transit",
    "estimate",
    "execute",
    "execute_many",
    "move_between",
    "plan",
    "plan_between",
    "redistribute_local",
    "redistribution_between",
    "start",
]
