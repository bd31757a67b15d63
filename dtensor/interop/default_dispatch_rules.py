"""Default dispatch rules: let torch call ``__torch_dispatch__`` without an import of ``torch.distributed.tensor``, on torch 2.13.

``torch.library.register_torch_dispatch`` registers a rule for one operator. If a class has none, torch 2.13 compares it with
``torch.distributed.tensor.DTensor`` before it calls ``__torch_dispatch__``. This imports ``torch.distributed.tensor`` and sympy,
which takes several times as long as the import of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..base.patches import patch_applied
from ..base.torch_internals import DispatchRules


class _DefaultRule(partial[Any]):
    """The rule of all operators of a class. Its truth value is False, as that of a missing rule.

    So ``register_torch_dispatch`` accepts a rule for one operator of the class. That rule comes first.
    """

    def __bool__(self) -> bool:
        return False


_DEFAULT_RULES: dict[type, _DefaultRule] = {}


def set_default_rule(dispatch_class: type, rule: Callable[..., Any]) -> None:
    """Make torch call ``rule(class, func, types, args, kwargs)`` for operators of a class or mode that have no rule for it."""
    _DEFAULT_RULES[dispatch_class] = _DefaultRule(rule)


def install_default_rules(*tensor_classes: type[torch.Tensor]) -> None:
    """Make torch look for default rules, and make ``__torch_dispatch__`` the default rule of each of ``tensor_classes``."""
    for tensor_class in tensor_classes:
        set_default_rule(tensor_class, tensor_class.__torch_dispatch__.__func__)  # type: ignore[attr-defined]  # a class method
    DispatchRules.find = _find_rule
    patch_applied("torch._library.simple_registry.GenericTorchDispatchRuleHolder.find")


def _find_rule(rules: Any, dispatch_class: type) -> Callable[..., Any] | None:
    """Return the dispatch rule of a class for one operator, else its default rule, else None."""
    return rules._data.get(dispatch_class) or _DEFAULT_RULES.get(dispatch_class)
