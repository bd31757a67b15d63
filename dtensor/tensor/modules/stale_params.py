"""Stale parameters: parameters of a module that were replaced when the module was distributed.

An optimizer that was made before, or a module that shared the weight, may still hold the old parameter. It would compute with a
weight that the model no longer has. Modules are checked when they are distributed, optimizers at their step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ...base.patches import patch_applied
from ...errors import DTensorError, UnitError
from ..copies import user_attributes

ParamPlace = tuple[nn.Module, str]


@dataclass(frozen=True, eq=False, slots=True)
class Replacement:
    """Record of the replacement of a parameter.

    Attributes:
        by: name of the function that replaced it.
        what: the object of that function, if any.
    """

    by: str
    what: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class ParamAttributes:
    """Attributes that programs set on a parameter (``weight.no_decay = True``), and its ``grad_dtype``.

    Attributes:
        by_name: their values.
        grad_dtype: the dtype of gradients if it was set: a tuple of one, else empty.
    """

    by_name: dict[str, Any]
    grad_dtype: tuple[torch.dtype | None, ...]  # empty or one element

    @staticmethod
    def of(x: Tensor) -> ParamAttributes:
        """Return the attributes of ``x``."""
        changed_dtype = x.is_leaf and x.grad_dtype != x.dtype
        return ParamAttributes(user_attributes(x), (x.grad_dtype,) if changed_dtype else ())

    def set_on(self, replacement: Tensor) -> None:
        """Set the attributes on the replacement, unless it has them."""
        for name, value in self.by_name.items():
            replacement.__dict__.setdefault(name, value)
        if self.grad_dtype:
            replacement.grad_dtype = self.grad_dtype[0]


_REPLACEMENTS: Any = WeakTensorKeyDictionary()  # old parameter -> Replacement
_CHECKED: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # optimizer -> its state at the last check
_replacement_count = [0]  # from the first replacement on, optimizers are checked


def replacement_of(parameter: Tensor) -> Replacement | None:
    """Return the record of the replacement of ``parameter``; None if it was not replaced."""
    replacement: Replacement | None = _REPLACEMENTS.get(parameter)
    return replacement


def note_replaced(parameter: Tensor, by: str, what: Any = None) -> None:
    """Record that ``by`` replaced ``parameter`` in its module; from the first call on, optimizer steps are checked."""
    if not _replacement_count[0]:
        register_optimizer_step_pre_hook(_check_optimizer)
        patch_applied("torch.optim.optimizer._global_optimizer_pre_hooks")
    _replacement_count[0] += 1
    _REPLACEMENTS[parameter] = Replacement(by, what)


@contextmanager
def replacing_params(modules: Iterable[nn.Module], by: str) -> Iterator[None]:
    """Note the parameters of ``modules`` that ``by`` replaces inside this context, and copy their attributes to the replacements.

    A parameter of several modules gets its first replacement in all of them. Other old parameters are not kept alive, because
    there may be no memory for both.

    Raises:
        UnitError: a parameter was replaced before, and another module still has it; or a parameter of several modules was split
            in one of them.
    """
    places_by_id: dict[int, list[ParamPlace]] = {}
    for module in dict.fromkeys(modules):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if (earlier := replacement_of(parameter)) is not None:
                    raise UnitError(shared_param_error(module, name, by, earlier))
                places_by_id.setdefault(id(parameter), []).append((module, name))
    old = [
        (weakref.ref(_param_at(param_places[0])), ParamAttributes.of(_param_at(param_places[0])), param_places)
        for param_places in places_by_id.values()
    ]
    shared_params = [_param_at(param_places[0]) for param_places in places_by_id.values() if len(param_places) > 1]
    yield
    for reference, attributes, param_places in old:
        parameter = reference()
        current = [*map(_param_at, param_places)]
        if len(param_places) > 1 and None in current:
            module, name = param_places[current.index(None)]
            raise UnitError(
                f"{name!r} of a {type(module).__name__} is also the weight of another module, and {by} would split it "
                "(parts=), so the two would no longer be shared; untie them first, or leave parts= out"
            )
        replacement = next((p for p in current if p is not None and p is not parameter), None)
        if replacement is not None:
            attributes.set_on(replacement)
        if parameter is not None and replacement is not None:
            note_replaced(parameter, by)
            for module, name in param_places:
                module._parameters[name] = replacement
    del shared_params  # kept until here, to compare them with their replacements


def _param_at(place: ParamPlace) -> Any:
    module, name = place
    return module._parameters.get(name)


def shared_param_error(module: nn.Module, name: str, by: str, was: Replacement | None) -> str:
    """Return the message that ``by`` cannot take the parameter ``name`` of ``module``.

    ``was``: the record of its earlier replacement. None: the parameter belongs to a data-parallel unit already.
    """
    advice = ", or on both: fully_shard([first, second])" if by == "fully_shard" else ""
    remedy, subject = f"call {by} on a module that contains both{advice}", f"{name!r} of this {type(module).__name__}"
    if was is None:  # the parameter is a replacement, in this module
        return (
            f"{subject} belongs to a data-parallel unit already. If that is a unit around this module, wrap "
            f"inner modules first: call {by} on this one, then on that. If this module is a part of two "
            f"modules, {remedy}"
        )
    return (
        f"{subject} is also a weight of another module, to which {was.by} was applied already, so the two "
        f"would no longer be shared; {remedy}"
    )


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise DTensorError if an optimizer holds trainable parameters that no model has any more."""
    state = _replacement_count[0], sum(len(group["params"]) for group in optimizer.param_groups)
    if _CHECKED.get(optimizer) == state:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    stale = [(p, was) for p in params if p.requires_grad and (was := replacement_of(p)) is not None]
    if stale:
        shapes = ", ".join(str(tuple(p.shape)) for p, _ in stale[:4]) + (", ..." if len(stale) > 4 else "")
        replaced_by = " and ".join(dict.fromkeys(was.by for _, was in stale))
        raise DTensorError(
            f"{len(stale)} of the {len(params)} parameters of this {type(optimizer).__name__} (shapes {shapes}) "
            f"were replaced by {replaced_by}, so its steps would not update the model. Make the optimizer afterwards, "
            "from model.parameters(). If it was made afterwards, a module that is not distributed shares a "
            "weight with one that is: distribute both in one call, or a module that contains both"
        )
    _CHECKED[optimizer] = state
