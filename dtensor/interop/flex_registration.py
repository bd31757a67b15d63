"""Flex registration: let torch's ``flex_attention`` and its higher-order operator compute DTensors.

``tensor/overrides/flex_attention.py`` computes them. It is registered as a Python implementation of the operator, for the
dispatch key that runs above autograd. Without ``torch.compile``, torch's function compiles the operator for the eager backend.
Dynamo cannot trace tensors of all ranks in one process, so for DTensors the operator is called directly.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..base.late_binding import resolve_late
from ..base.modes import implicit_replication
from ..base.patches import patch_applied
from ..base.torch_internals import DispatchKey
from ..tensor.dtensor import DTensor
from .import_hooks import on_import


def install_flex_attention() -> None:
    """Patch ``flex_attention`` and Dynamo for DTensors, when torch's modules are imported."""
    on_import("torch.nn.attention.flex_attention", _install_kernel)
    on_import("torch._dynamo.variables.higher_order_ops", _allow_captured_tensors)


def _install_kernel(module: Any) -> None:
    """Register the implementation of flex_attention for DTensors, and keep torch from compiling calls with DTensors."""
    operator = torch.ops.higher_order.flex_attention
    operator.py_impl(DispatchKey.PythonTLSSnapshot)(_compute)
    patch_applied("torch.ops.higher_order.flex_attention")
    make_environment = getattr(module, "setup_compilation_env", None)
    if make_environment is None:
        return

    def setup_compilation_env(*args: Any, **kwargs: Any) -> Any:
        """Return torch's compilation settings, without the compiler if the caller's operands are DTensors."""
        environment, caller = make_environment(*args, **kwargs), sys._getframe(1).f_locals
        is_distributed = any(isinstance(caller.get(name), DTensor) for name in ("query", "key", "value"))
        return _without_compiler(environment) if is_distributed else environment

    module.setup_compilation_env = setup_compilation_env
    patch_applied("torch.nn.attention.flex_attention.setup_compilation_env")


def _compute(*args: Any) -> Any:
    return resolve_late("compute_flex_attention")(*args)


@contextlib.contextmanager
def _without_compiler(environment: Any) -> Iterator[Any]:
    with environment as backend, torch.compiler.set_stance("force_eager"):
        yield backend


def _allow_captured_tensors(module: Any) -> None:
    """Patch Dynamo so that plain tensors captured by ``score_mod`` or ``mask_mod`` count as replicated while it traces.

    Dynamo makes their arguments with ``query.new_empty``, so these are DTensors.
    """
    kind = module.FlexAttentionHigherOrderVariable
    trace_function = kind.create_wrapped_node

    def create_wrapped_node(*args: Any, **kwargs: Any) -> Any:
        """Trace the function of the user while plain tensors count as replicated."""
        with implicit_replication():
            return trace_function(*args, **kwargs)

    kind.create_wrapped_node = create_wrapped_node
    patch_applied("torch._dynamo.variables.higher_order_ops.FlexAttentionHigherOrderVariable.create_wrapped_node")
