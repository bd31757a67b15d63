"""Dispatch: look up or make the plan of an operator call, bind it to a program once, run the program.

Other packages import from here.
"""

from .announced_collectives import redistribute_under_policy
from .cross_mesh import make_mesh_error, meshes_of
from .dispatcher import bypasses_rules, clear_plans, dispatch, install_view_runners, make_eager_view_runner, run_with_strategies
from .operand_layouts import layouts_of_arguments, plan_call, specialize_sizes
from .plain_tensor_args import counts_as_replicated, distribute_like, is_number, make_constants_runner, replicate_plain
from .programs.comm_report import Cause, describe_plan
from .programs.facts import facts_of_call
from .programs.frame import Runner
from .programs.grad_redistribute import HAS_PROGRAM_PLAN, REDISTRIBUTING_GRAD, redistribute_grad_unless_planned
from .programs.list_ops import has_aliased_elements, run_per_element
from .programs.local_op import below_autograd, named_function_of
from .programs.redistribution_cache import FRESH_CACHE, IN_DECOMPOSITION

__all__ = [
    "FRESH_CACHE",
    "HAS_PROGRAM_PLAN",
    "IN_DECOMPOSITION",
    "REDISTRIBUTING_GRAD",
    "Cause",
    "Runner",
    "below_autograd",
    "bypasses_rules",
    "clear_plans",
    "counts_as_replicated",
    "describe_plan",
    "dispatch",
    "distribute_like",
    "facts_of_call",
    "has_aliased_elements",
    "install_view_runners",
    "is_number",
    "layouts_of_arguments",
    "make_constants_runner",
    "make_eager_view_runner",
    "make_mesh_error",
    "meshes_of",
    "named_function_of",
    "plan_call",
    "redistribute_grad_unless_planned",
    "redistribute_under_policy",
    "replicate_plain",
    "run_per_element",
    "run_with_strategies",
    "specialize_sizes",
]
