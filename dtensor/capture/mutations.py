"""What an operation on local tensors writes to: what its schema says, and what its rule knows that the schema does not say."""

from __future__ import annotations

from typing import Any

import torch

from ..base import tensor_tree
from ..propagation.op_schema import operator_of
from ..rules.call import Call
from ..rules.registry import lookup


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that a call writes to."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found.extend(tensor_tree.tensors(value))
    rule = lookup(func)
    if rule is not None and rule.writes is not None:
        bound = operator_of(func).bind(args, kwargs)
        call = Call(func, None, bound, (), ())  # type: ignore[arg-type]  # of local tensors, on no mesh
        found.extend(tensor_tree.tensors([bound[name] for name in rule.writes(call)]))
    return found
