"""All ranks in one process: their local tensors as one ``PerRank`` tensor, and autograd over them."""

from . import autograd_function as autograd_function  # registers the functions of ``PerRank`` that run once for all ranks
from . import joint_functions as joint_functions
from . import joint_modules as joint_modules
