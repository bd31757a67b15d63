"""Torch internals: every private name of torch that the library uses, its purpose, and the public API that could replace it.

A name is resolved when a module of the library imports it from here. If this version of torch lacks the name, the import fails
and says what it is needed for. An upgrade of torch therefore changes only this file. Nothing here changes torch: monkeypatches
are in ``interop``.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch


class Internal(NamedTuple):
    """Private name of torch: its path, its use in the library, and the public API that is or would be its replacement."""

    path: str
    use: str
    instead: str


_NONE = "no public way"
_PYTREE = "torch.utils.pytree, once it is there"

NAMES: dict[str, Internal] = {
    # --- tensors of a class of our own
    "make_wrapper_subclass": Internal("torch.Tensor._make_wrapper_subclass", "a tensor without storage of its own", _NONE),
    "disabled_torch_function": Internal("torch._C._disabled_torch_function_impl", "no __torch_function__ and no cost", _NONE),
    "set_conj": Internal("torch._C._set_conj", "torch sees above dispatch that a local tensor is lazily conjugated", _NONE),
    "TensorBase": Internal("torch._C.TensorBase", "methods as torch defines them, under those of the subclass", "torch.Tensor"),
    "nn_functions": Internal("torch._C._nn", "functions of torch.nn.functional written in C++", "torch.nn.functional"),
    "flash_attention_on_cpu": Internal(
        "torch._scaled_dot_product_flash_attention_for_cpu", "attention with the logarithms of the rows' sums", _NONE
    ),
    "assert_async": Internal("torch._assert_async", "a check of values that does not wait for the device", _NONE),
    "OpOverload": Internal("torch._ops.OpOverload", "the type of an operator's overload", _NONE),
    "OpOverloadPacket": Internal("torch._ops.OpOverloadPacket", "the type of an operator", _NONE),
    "suggest_memory_format": Internal("torch._prims_common.suggest_memory_format", "the format that strides mean", _NONE),
    "foreach_supported_types": Internal(
        "torch.utils._foreach_utils._foreach_supported_types", "optimizers use foreach operators for DTensors", _NONE
    ),
    "optimizer_supported_types": Internal(
        "torch.optim.optimizer._foreach_supported_types", "optimizers use foreach operators for DTensors", _NONE
    ),
    "linalg_functions": Internal("torch._C._linalg", "functions of torch.linalg written in C++", "torch.linalg"),
    "fft_functions": Internal("torch._C._fft", "functions of torch.fft written in C++", "torch.fft"),
    "special_functions": Internal("torch._C._special", "functions of torch.special written in C++", "torch.special"),
    # --- dispatch
    "TorchDispatchMode": Internal("torch.utils._python_dispatch.TorchDispatchMode", "recorders and explainers", _NONE),
    "current_dispatch_modes": Internal(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack", "which recorder is active in this thread", _NONE
    ),
    "count_dispatch_modes": Internal("torch._C._len_torch_dispatch_stack", "whether a dispatch mode is active", _NONE),
    "pop_dispatch_mode": Internal("torch.utils._python_dispatch._pop_mode", "a recorder is left below another mode", _NONE),
    "push_dispatch_mode": Internal("torch.utils._python_dispatch._push_mode", "a recorder is left below another mode", _NONE),
    "is_traceable_wrapper_subclass": Internal(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "parameters that are made of several tensors",
        _NONE,
    ),
    "find_torch_dispatch_rule": Internal(
        "torch._library.simple_registry.find_torch_dispatch_rule",
        "whether register_torch_dispatch was called before",
        _NONE,
    ),
    "DispatchRules": Internal(
        "torch._library.simple_registry.GenericTorchDispatchRuleHolder",
        "one torch_dispatch rule for all operators of a class",
        _NONE,
    ),
    "DispatchKey": Internal("torch._C.DispatchKey", "names of dispatch keys", _NONE),
    "DispatchKeySet": Internal("torch._C.DispatchKeySet", "the keys that a kernel was called with", _NONE),
    "keys_of_arguments": Internal("torch._ops._compute_keyset", "the next implementation of a higher-order operator", _NONE),
    "has_kernel": Internal("torch._C._dispatch_has_kernel_for_dispatch_key", "whether an operator is a composite", _NONE),
    "keys_after": Internal("torch._C._dispatch_keyset_full_after", "to continue below a kernel of the library", _NONE),
    "is_key_excluded": Internal(
        "torch._C._dispatch_tls_is_dispatch_key_excluded", "to read whether lazy conjugation is off", _NONE
    ),
    "set_key_excluded": Internal("torch._C._dispatch_tls_set_dispatch_key_excluded", "to turn lazy conjugation off or on", _NONE),
    "included_keys": Internal("torch._C._dispatch_tls_local_include_set", "to call a kernel as the caller would", _NONE),
    "excluded_keys": Internal("torch._C._dispatch_tls_local_exclude_set", "to call a kernel as the caller would", _NONE),
    "ForceDispatchKeyGuard": Internal("torch._C._ForceDispatchKeyGuard", "to call a kernel under given keys", _NONE),
    "all_schemas": Internal("torch._C._jit_get_all_schemas", "the page of operators lists what has no rule", _NONE),
    "resolve_packet": Internal("torch._C._jit_resolve_packet", "the overload that a call would take", _NONE),
    "CustomOpDef": Internal("torch._library.custom_ops.CustomOpDef", "the type that torch.library.custom_op returns", _NONE),
    "context": Internal("torch._C", "settings of torch, which each call of a captured function compares", "torch.backends"),
    "count_function_modes": Internal("torch._C._len_torch_function_stack", "whether the user has function modes entered", _NONE),
    "current_function_modes": Internal(
        "torch.overrides._get_current_function_mode_stack", "the function modes that the user has entered", _NONE
    ),
    "DeviceContext": Internal("torch.utils._device.DeviceContext", "the function mode that torch.device enters", _NONE),
    "TensorGuards": Internal(
        "torch._C._dynamo.guards.TensorGuards", "metadata of many tensors compared at once", "a getter each"
    ),
    "PRINT_OPTS": Internal("torch._tensor_str.PRINT_OPTS", "how tensors are printed", "torch.get_printoptions, once it is there"),
    "dict_version": Internal(
        "torch._C._dynamo.guards.dict_version",
        "a number that changes with each change of a dict",
        "a comparison of all entries",
    ),
    "autocast_enabled": Internal(
        "torch._C._is_any_autocast_enabled", "whether autocast casts operands", "torch.is_autocast_enabled of each device"
    ),
    # --- threads: what autograd carries to its own
    "keep_in_thread": Internal("torch._C._stash_obj_in_tls", "modes are seen in backward passes", _NONE),
    "kept_in_thread": Internal("torch._C._get_obj_in_tls", "modes are seen in backward passes", _NONE),
    "is_kept_in_thread": Internal("torch._C._is_key_in_tls", "modes are seen in backward passes", _NONE),
    "profiler_enabled": Internal("torch._C._autograd._profiler_enabled", "ranges of the library in the profiler", _NONE),
    # --- autograd
    "BelowAutograd": Internal("torch._C._AutoDispatchBelowAutograd", "local operations skip autograd", "torch.no_grad(), slower"),
    "graph_task": Internal("torch._C._current_graph_task_id", "whether gradients are being computed in this thread", _NONE),
    "implicit_replication_allowed": Internal(
        "torch._C._get_dtensor_allow_implicit_replication",
        "whether torch says that plain tensors of a batching rule are equal on all ranks; since 2.12",
        _NONE,
    ),
    "engine_will_run": Internal(
        "torch._C._will_engine_execute_node", "whether backward was asked for some gradients only", _NONE
    ),
    "keeps_graph": Internal(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "whether a backward pass was given retain_graph=True",
        _NONE,
    ),
    "storage_use_count": Internal(
        "torch._C._storage_Use_Count", "memory of gathered parameters that a program still uses is not freed", _NONE
    ),
    "set_version_counter": Internal(
        "torch._C._autograd._unsafe_set_version_counter",
        "autograd refuses saved tensors with freed memory",
        "hooks for all saved tensors",
    ),
    "AccumulateGrad": Internal("torch._C._functions.AccumulateGrad", "nodes that accumulate gradients of leaves", _NONE),
    "autograd_node": Internal(
        "torch._C._current_autograd_node", "the autograd node that runs an operation in a backward pass", _NONE
    ),
    "sequence_number": Internal("torch._C._autograd._get_sequence_nr", "which forward call a backward belongs to", _NONE),
    "run_backward": Internal(
        "torch.autograd.graph._engine_run_backward",
        "a backward pass whose root gradient is known",
        "torch.autograd.backward, slower",
    ),
    "engine": Internal("torch.autograd.Variable._execution_engine", "to act when a backward pass ends", "a hook on every leaf"),
    "forward_ad": Internal("torch.autograd.forward_ad", "whether forward-mode gradients are computed", _NONE),
    "make_dual": Internal("torch._VF._make_dual", "a tangent given to all ranks' tensors", "torch.autograd.forward_ad.make_dual"),
    "DisableTorchFunctionSubclass": Internal(
        "torch._C.DisableTorchFunctionSubclass", "a transform of torch.func sees all ranks' tensors as one", _NONE
    ),
    "custom_function_call": Internal(
        "torch._functorch.autograd_function.custom_function_call", "Function.apply inside torch.func", _NONE
    ),
    "swap_impl": Internal(
        "torch._C._swap_tensor_impl", "x.t_() makes x a view of what it was", "torch.utils.swap_tensors of views"
    ),
    "CreationMeta": Internal("torch._C._autograd.CreationMeta", "whether torch lets a view be changed in place", _NONE),
    "creation_meta": Internal("torch._C._autograd._get_creation_meta", "whether torch lets a view be changed in place", _NONE),
    "functorch_active": Internal(
        "torch._C._are_functorch_transforms_active", "whether a transform of torch.func is active", _NONE
    ),
    "is_functorch_wrapped": Internal("torch._C._functorch.is_functorch_wrapped_tensor", "a tensor under torch.func", _NONE),
    "functorch_unwrapped": Internal("torch._C._functorch.get_unwrapped", "the DTensor that torch.func hides", _NONE),
    "is_functorch_batched": Internal("torch._C._functorch.is_batchedtensor", "vmap hides a dim of a DTensor", _NONE),
    "is_legacy_batched": Internal("torch._C._functorch.is_legacy_batchedtensor", "a tensor under the old vmap", _NONE),
    "single_level_functions_allowed": Internal(
        "torch._functorch.utils.enable_single_level_autograd_function",
        "a custom Function below transforms of torch.func",
        _NONE,
    ),
    "DisableFuncTorch": Internal("torch._C._DisableFuncTorch", "constants are made below transforms of torch.func", _NONE),
    "transform_level": Internal("torch._C._functorch.maybe_get_level", "which transform of torch.func hides a tensor", _NONE),
    "current_transform": Internal(
        "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter",
        "whether a transform differentiates a tensor",
        _NONE,
    ),
    "batch_dim_of": Internal("torch._C._functorch.maybe_get_bdim", "which dim of a tensor vmap batches", _NONE),
    "add_batch_dim": Internal("torch._add_batch_dim", "batched gradients of a redistributed DTensor", _NONE),
    "remove_batch_dim": Internal("torch._remove_batch_dim", "batched gradients of a redistributed DTensor", _NONE),
    # --- fake tensors
    "FakeTensor": Internal("torch._subclasses.FakeTensor", "tensors without values are not compared", _NONE),
    "FakeTensorMode": Internal("torch._subclasses.fake_tensor.FakeTensorMode", "shapes of results without data", _NONE),
    "UnsupportedFakeTensorException": Internal(
        "torch._subclasses.fake_tensor.UnsupportedFakeTensorException", "operators without a meta kernel", _NONE
    ),
    "GuardOnDataDependentSymNode": Internal(
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode", "errors name sizes that depend on values", _NONE
    ),
    "FunctionalTensor": Internal(
        "torch._subclasses.functional_tensor.FunctionalTensor", "local tensors of a program that is being compiled", _NONE
    ),
    "DISPATCH_MODE_KEYS": Internal("torch._C._TorchDispatchModeKey", "names of torch's own modes", _NONE),
    "infra_mode": Internal("torch._C._get_dispatch_mode", "whether operators are recorded for a graph", _NONE),
    "track_tensor": Internal(
        "torch.fx.experimental.proxy_tensor.track_tensor_tree",
        "DTensors become constants of a graph of DTensors",
        _NONE,
    ),
    "sympy_interp": Internal(
        "torch.utils._sympy.interp.sympy_interp", "sizes that planning computed are computed in a graph", _NONE
    ),
    "PythonReferenceAnalysis": Internal(
        "torch.utils._sympy.reference.PythonReferenceAnalysis", "sizes that planning computed are computed in a graph", _NONE
    ),
    "from_functional": Internal("torch._from_functional_tensor", "the tensor that a functional local tensor wraps", _NONE),
    "has_data_mutation": Internal(
        "torch._functionalize_has_data_mutation", "whether a compiled program writes to an argument", _NONE
    ),
    "restart": Internal(
        "torch._dynamo.exc.TensorifyScalarRestartAnalysis", "compilation starts again with a size as a constant", _NONE
    ),
    "compile_id": Internal("torch._guards.CompileContext.current_compile_id", "which program is compiled", _NONE),
    "WrappedConstant": Internal(
        "torch._library.fake_class_registry.FakeScriptObject", "a constant that comes out of a broken graph", _NONE
    ),
    "without_modes": Internal("torch.utils._python_dispatch._disable_current_modes", "planning is not traced", _NONE),
    # --- nested values
    "tree_flatten": Internal("torch.utils._pytree.tree_flatten", "arguments of captured functions", _PYTREE),
    "tree_leaves": Internal("torch.utils._pytree.tree_leaves", "tensors among arguments", _PYTREE),
    "tree_map": Internal("torch.utils._pytree.tree_map", "tensors among arguments", _PYTREE),
    "tree_unflatten": Internal("torch.utils._pytree.tree_unflatten", "results in their structure", _PYTREE),
    "pytree": Internal("torch.utils._pytree", "its type of a structure", _PYTREE),
    # --- process groups and checkpoints
    "resolve_process_group": Internal("torch._C._distributed_c10d._resolve_process_group", "the group of a name", _NONE),
    "hash_ranks": Internal("torch.distributed.distributed_c10d._hash_ranks_to_str", "names of groups that we make", _NONE),
    "world": Internal("torch.distributed.distributed_c10d._world", "the process groups that a program has made", _NONE),
    "default_store": Internal("torch.distributed.distributed_c10d._get_default_store", "values that ranks exchange", _NONE),
    "flatten_state_dict": Internal(
        "torch.distributed.checkpoint._nested_dict.flatten_state_dict", "names as in torch's checkpoints", _NONE
    ),
    "StorageInfo": Internal(
        "torch.distributed.checkpoint.filesystem._StorageInfo", "position of a block in a file of torch", _NONE
    ),
    # --- the compiler
    "eval_frame": Internal("torch._C._dynamo.eval_frame", "our own frames are not compiled", "torch.compiler.disable"),
    "opaque_object": Internal("torch._library.opaque_object", "placements and meshes are constants of graphs", _NONE),
    "graph_break": Internal("torch._dynamo.graph_break", "an operation that is not compiled says why", _NONE),
    "TracingContext": Internal("torch._guards.TracingContext", "whether a program is being compiled", _NONE),
    "Unsupported": Internal("torch._dynamo.exc.Unsupported", "a tensor that is not compiled says why", _NONE),
    "export_trace": Internal("torch.export._trace", "an exported program is refused, a graph captured for it is not", _NONE),
    "CachingMode": Internal(
        "torch.utils.checkpoint._CachingTorchDispatchMode",
        "gathers of parameters are hidden from checkpoint policies",
        _NONE,
    ),
    "CachedMode": Internal(
        "torch.utils.checkpoint._CachedTorchDispatchMode", "gathers of parameters are hidden from checkpoint policies", _NONE
    ),
    "CheckpointPolicy": Internal(
        "torch.utils.checkpoint.CheckpointPolicy", "a collective is not computed again in a backward pass", _NONE
    ),
    "EffectType": Internal("torch._library.effects.EffectType", "compilers neither drop nor copy a collective", _NONE),
}


def __getattr__(name: str) -> Any:
    """Return the object of torch that ``NAMES`` lists under ``name``, resolved at its first use."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _resolve_internal(NAMES[name])
    return value


def _resolve_internal(internal: Internal) -> Any:
    """Import and return the object of torch at the path of ``internal``.

    Raises:
        ImportError: this version of torch lacks the path.
    """
    parts = internal.path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            for part in parts[count:]:
                value = getattr(value, part)
        except AttributeError:
            break
        return value
    raise ImportError(
        f"torch {torch.__version__} has no {internal.path}, which dtensor needs for: {internal.use} ({internal.instead})"
    )
