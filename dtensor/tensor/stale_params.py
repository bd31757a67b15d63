"""Parameters in whose places distributing a module has put others.

Who still holds one, an optimizer made before or a module that shared it, works on a weight that the model no longer has: it
computes, and nothing moves. Modules are asked when they are distributed themselves, optimizers at their step.
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

from ..base.patches import changed
from ..errors import DTensorError, UnitError
from .copies import user_attributes

Place = tuple[nn.Module, str]


@dataclass(frozen=True, eq=False, slots=True)
class Replacement:
    """What took a parameter's place.

    Attributes:
        by: the function that put it there.
        what: that function's record of it, if it keeps any.
    """

    by: str
    what: Any = None


@dataclass(frozen=True, eq=False, slots=True)
class Attributes:
    """Attributes that programs set on a parameter (``weight.no_decay = True``), and its ``grad_dtype``.

    Attributes:
        by_name: their values.
        grad_dtype: the dtype of gradients, where it was set.
    """

    by_name: dict[str, Any]
    grad_dtype: tuple[torch.dtype | None, ...]  # none or one

    @staticmethod
    def of(x: Tensor) -> Attributes:
        """Return the attributes of ``x``."""
        changed_dtype = x.is_leaf and x.grad_dtype != x.dtype
        return Attributes(user_attributes(x), (x.grad_dtype,) if changed_dtype else ())

    def set_on(self, made: Tensor) -> None:
        """Set them on the tensor that replaces ``x``, but for those that it has already."""
        for name, value in self.by_name.items():
            made.__dict__.setdefault(name, value)
        if self.grad_dtype:
            made.grad_dtype = self.grad_dtype[0]


_REPLACED: Any = WeakTensorKeyDictionary()  # parameters as they were -> Replacement
_CHECKED: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()  # what an optimizer was last checked for
_counts = [0]  # replacements so far; with the first, optimizers are asked


def replacement_of(parameter: Tensor) -> Replacement | None:
    """What took the place of ``parameter``, if anything did."""
    found: Replacement | None = _REPLACED.get(parameter)
    return found


def note_replaced(parameter: Tensor, by: str, what: Any = None) -> None:
    """Another parameter stands where ``parameter`` did."""
    if not _counts[0]:
        register_optimizer_step_pre_hook(_check)
        changed("torch.optim.optimizer._global_optimizer_pre_hooks")
    _counts[0] += 1
    _REPLACED[parameter] = Replacement(by, what)


@contextmanager
def replacing(modules: Iterable[nn.Module], by: str) -> Iterator[None]:
    """Inside, ``by`` replaces parameters of ``modules``, which are noted. One that stands in several places stands in all of them
    afterwards too, as replaced first. Others are not kept alive: there may be no room for both. Attributes are carried over.

    Raises:
        UnitError: one of them has been replaced already, where another module has it; or one that stands in several places has
            been taken apart in one of them.
    """
    places: dict[int, list[Place]] = {}
    for at in dict.fromkeys(modules):
        for name, parameter in at._parameters.items():
            if parameter is not None:
                if (was := replacement_of(parameter)) is not None:
                    raise UnitError(not_alone(at, name, by, was))
                places.setdefault(id(parameter), []).append((at, name))
    old = [(weakref.ref(_at(where[0])), Attributes.of(_at(where[0])), where) for where in places.values()]
    shared = [_at(where[0]) for where in places.values() if len(where) > 1]
    yield
    for reference, attributes, where in old:
        parameter = reference()
        now = [*map(_at, where)]
        if len(where) > 1 and None in now:
            at, name = where[now.index(None)]
            raise UnitError(
                f"{name!r} of a {type(at).__name__} is also the weight of another module, and {by} would split it "
                "(parts=), so the two would no longer be shared"
            )
        made = next((p for p in now if p is not None and p is not parameter), None)
        if made is not None:
            attributes.set_on(made)
        if parameter is not None and made is not None:
            note_replaced(parameter, by)
            for at, name in where:
                at._parameters[name] = made
    del shared  # until now: a parameter that is gone could not be told from what took its places


def _at(place: Place) -> Any:
    module, name = place
    return module._parameters.get(name)


def not_alone(module: nn.Module, name: str, by: str, was: Replacement | None) -> str:
    """Why ``by`` cannot have the parameter ``name`` of ``module``."""
    both = ", or on both: fully_shard([first, second])" if by == "fully_shard" else ""
    together, this = f"call {by} on a module that contains both{both}", f"{name!r} of this {type(module).__name__}"
    if was is None:  # it is what took the place: of this very module
        return (
            f"{this} belongs to a data-parallel unit already. If that is a unit around this module, wrap "
            f"inner modules first: call {by} on this one, then on that. If this module is a part of two "
            f"modules, {together}"
        )
    return (
        f"{this} is also a weight of another module, to which {was.by} was applied already, so the two "
        f"would no longer be shared; {together}"
    )


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises DTensorError: the optimizer holds trainable parameters that no model has any more."""
    asked = _counts[0], sum(len(group["params"]) for group in optimizer.param_groups)
    if _CHECKED.get(optimizer) == asked:
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found = [(p, was) for p in held if p.requires_grad and (was := replacement_of(p)) is not None]
    if found:
        shapes = ", ".join(str(tuple(p.shape)) for p, _ in found[:4]) + (", ..." if len(found) > 4 else "")
        by = " and ".join(dict.fromkeys(was.by for _, was in found))
        raise DTensorError(
            f"{len(found)} of the {len(held)} parameters of this {type(optimizer).__name__} (shapes {shapes}) "
            f"were replaced by {by}, so its steps would not update the model. Make the optimizer afterwards, "
            "from model.parameters(). If it was made afterwards, a module that is not distributed shares a "
            "weight with one that is: distribute both in one call, or a module that contains both"
        )
    _CHECKED[optimizer] = asked
