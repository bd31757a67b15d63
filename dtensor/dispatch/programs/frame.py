"""Frame: one operator call while the steps of its program run, and the types of steps and runners.

Calls that share a plan share their signature (:class:`~dtensor.propagation.op_schema.CallSignature`): the same number of
positional arguments and the same keywords. So a step knows the :data:`ArgumentPosition` of each argument, its position or
keyword, when the program is bound. A default is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...propagation.op_schema import ArgumentPosition, CallSignature, OperatorSchema
from ...propagation.propagate import CallPlan

Args = tuple[Any, ...]
Keywords = dict[str, Any]
# Runs one call: the user's positional arguments and keywords, then copies of both with local tensors in place of DTensors.
Runner = Callable[[Args, Keywords, list[Any], Keywords], Any]


class Frame:
    """The state of one call. Steps read and change it.

    Attributes:
        args, kwargs: the arguments as the user gave them.
        local_args, local_kwargs: the same with local tensors in place of DTensors; steps redistribute and replace them here.
        local_result: the result of the local call, before it is wrapped.
        output: what the call returns to the user.
        ownerships: the row ownership of operands, read before the call (see :mod:`.facts`).
    """

    local_result: Any = None
    output: Any = None
    ownerships: Any = None

    def __init__(self, args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> None:
        self.args, self.kwargs, self.local_args, self.local_kwargs = args, kwargs, local_args, local_kwargs

    def given(self, place: ArgumentPosition) -> Any:
        """Return the user's argument at ``place``."""
        return self.args[place] if type(place) is int else self.kwargs[place]  # type: ignore[index]

    def local(self, place: ArgumentPosition) -> Any:
        """Return the local value of the argument at ``place``."""
        return self.local_args[place] if type(place) is int else self.local_kwargs[place]  # type: ignore[index]

    def put_local(self, place: ArgumentPosition, value: Any) -> None:
        """Replace the local value of the argument at ``place``."""
        if isinstance(place, int):
            self.local_args[place] = value
        else:
            self.local_kwargs[place] = value


# Reads and changes the frame. A step before the local call (a pass in ``BEFORE``) ends the call if it returns True: the frame's
# output is complete then. What later steps return is ignored.
Step = Callable[[Frame], Any]
Pass = Callable[[CallPlan, OperatorSchema, CallSignature], Step | None]  # makes the step of one program


def argument_at(place: ArgumentPosition, args: Args, kwargs: Keywords) -> Any:
    """Return the user's argument at ``place``: a position in ``args``, or a name in ``kwargs``."""
    return args[place] if isinstance(place, int) else kwargs[place]


def results_as_tuple(local_result: Any, operator: OperatorSchema) -> Args:
    """Return the results of a local call as a tuple, one for each return value of ``operator``."""
    count = len(operator.returns)
    return () if count == 0 else (local_result,) if count == 1 else tuple(local_result)
