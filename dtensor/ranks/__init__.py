"""All ranks in one process: their local tensors as one value, and autograd over them."""

from . import autograd_function_hook as applied  # says what does not simply run once per rank
from . import joint_modules as joint_modules  # the same of modules
from . import ragged_sizes as ragged_sizes  # the same of shapes
