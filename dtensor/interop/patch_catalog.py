"""Patch catalog: every change that this package makes to torch, and the reason for it.

Code without DTensors does not notice them: each patch acts on classes of this package only. ``tests/unit/test_patch_catalog.py``
compares torch's modules and classes in fresh processes, at import, with an in-process mesh, after a capture and after debugging.
It fails if there is a change that is not in this list.
"""

from __future__ import annotations

from typing import NamedTuple

from ..base.patches import APPLIED_PATCHES


class Patch(NamedTuple):
    """A change that this package makes to torch.

    Attributes:
        where: the attribute or registry of torch that is changed.
        when: ``"import"``, or the event that applies the patch.
        why: what would not work without it.
        since: the first supported torch version that needs it.
        undone: how to undo it.
    """

    where: str
    when: str
    why: str
    since: str
    undone: str

    @property
    def in_force(self) -> bool:
        """Return True if the patch is applied and was not undone."""
        return self.where in APPLIED_PATCHES


PATCHES = (
    Patch(
        "torch.optim.optimizer._foreach_supported_types",
        "import",
        "optimizers use their foreach implementation for DTensors",
        "2.11",
        "the list's remove(DTensor)",
    ),
    Patch(
        "torch.utils._foreach_utils._foreach_supported_types",
        "import",
        "clip_grad_norm_ uses its foreach implementation for DTensors",
        "2.11",
        "the list's remove(DTensor)",
    ),
    Patch(
        "torch._weights_only_unpickler._marked_safe_globals_set",
        "import",
        "torch.load(weights_only=True) accepts DTensors",
        "2.11",
        "torch.serialization.clear_safe_globals()",
    ),
    Patch(
        "torch.distributed._state_dict_utils",
        "its import",
        "torch's state-dict functions accept DTensors; patches four names of the module that check the class",
        "2.11",
        "the names are kept by interop.state_dicts, which wraps them",
    ),
    Patch(
        "torch.distributed.checkpoint.state_dict",
        "its import",
        "with all ranks in this process they do not ask for the rank of a process group; patches two names of the module",
        "2.11",
        "the names are kept by interop.state_dicts, which wraps them",
    ),
    Patch(
        "torch.distributed.checkpoint._state_dict_stager",
        "its import",
        "async_save copies the local tensors of DTensors; one method of StateDictStager, which copies attribute by attribute",
        "2.11",
        "the method is kept by interop.state_dicts, which wraps it",
    ),
    Patch(
        "torch.utils.dlpack.to_dlpack",
        "import",
        "it exports memory without a check, and a DTensor has none; for a DTensor it returns x.__dlpack__()",
        "2.11",
        "torch._C._to_dlpack is torch's own",
    ),
    Patch("torch.to_dlpack", "import", "the same function as torch.utils.dlpack.to_dlpack", "2.11", "the same"),
    Patch(
        "torch.autograd.graph.save_on_cpu.__init__",
        "import",
        "with pin_memory=True it copies what is saved into a plain tensor; of DTensors the local tensors move",
        "2.11",
        "interop.saved_on_host keeps torch's own",
    ),
    Patch(
        "sys.meta_path",
        "import",
        'post-import hooks: the modules of this list with "its import" are patched when another module imports them',
        "2.11",
        "at that import",
    ),
    Patch(
        "torch._dynamo.trace_rules.SKIP_DIRS",
        "its import",
        "compiled graphs break at functions of dtensor instead of tracing ranks, except those in interop.dynamo.INLINED_MODULES",
        "2.11",
        "stays",
    ),
    Patch(
        "torch._dynamo",
        "its import",
        "DTensor.from_local and functions of parallel styles become a part of graphs (allow_in_graph, substitute_in_graph)",
        "2.11",
        "stays",
    ),
    Patch(
        "torch.ops.higher_order.flex_attention",
        "the import of torch.nn.attention.flex_attention, and that of dtensor.capture",
        "the operator and its backward operator have an implementation for DTensors and one for recorders of capture (py_impl)",
        "2.11",
        "stays",
    ),
    Patch(
        "torch.nn.attention.flex_attention.setup_compilation_env",
        "its import",
        "without torch.compile, flex_attention of DTensors calls its operator directly: Dynamo cannot trace local tensors of all "
        "ranks",
        "2.11",
        "torch._higher_order_ops.utils has torch's own",
    ),
    Patch(
        "torch._dynamo.variables.higher_order_ops.FlexAttentionHigherOrderVariable.create_wrapped_node",
        "its import",
        "plain tensors that score_mod and mask_mod capture count as equal on all ranks while Dynamo traces them",
        "2.11",
        "the method is kept by interop.flex_registration, which wraps it",
    ),
    Patch(
        "torch.Tensor.__coerce_same_metadata_as_tangent__",
        "the import of torch._dynamo",
        "torch makes plain gradients for results of a compiled program that need none; they become DTensors",
        "2.13",
        "its deletion",
    ),
    Patch(
        "torch._library.opaque_object._OPAQUE_TYPES",
        "import",
        "placements, meshes and layouts are constants of compiled programs, with guards",
        "2.13",
        "its pop(...)",
    ),
    Patch(
        "torch.ops.dtensor",
        "the first of them that is compiled",
        "collectives, random operators and checks, with their effects, are operators of compiled graphs",
        "2.11",
        "Library._destroy()",
    ),
    Patch(
        "torch._library.simple_registry.GenericTorchDispatchRuleHolder.find",
        "import",
        "a class may have one torch_dispatch rule for all operators; torch 2.13 imports torch.distributed.tensor and "
        "sympy at the first call of a class without a rule",
        "2.11",
        "interop.default_dispatch_rules has the function; torch's own returns rules._data.get(class)",
    ),
    Patch(
        "torch.utils._debug_mode.DebugMode",
        "import, or its import",
        "it lets DTensors dispatch first, as it does torch's own, and so records their local operators "
        "and collectives (set_default_rule)",
        "2.11",
        "interop.default_dispatch_rules._DEFAULT_RULES.pop(...)",
    ),
    Patch(
        "torch.distributed.tensor.debug.CommDebugMode",
        "the same",
        "it lets DTensors dispatch first, and so counts the collectives that their operators need",
        "2.11",
        "the same",
    ),
    Patch(
        "torch.distributed._tools.mem_tracker.MemTracker",
        "its import",
        "it lets DTensors dispatch first, and so counts their local tensors; its hooks are not registered on the gathered "
        "parameters that a unit's forward sees, which are no leaves",
        "2.11",
        "the same; interop.torch_debug_modes keeps torch's method",
    ),
    Patch(
        "torch.distributed._tools.mem_tracker.get_untyped_storages",
        "with MemTracker",
        "it returns the storages of the local tensors of all ranks in this process",
        "2.11",
        "torch.distributed._tools.common_utils has torch's own",
    ),
    Patch(
        "torch.distributed._tools.mod_tracker.register_multi_grad_hook",
        "with MemTracker",
        "a hook over tensors of all ranks gets the gradients of all ranks together, once",
        "2.11",
        "torch.autograd.graph has torch's own",
    ),
    Patch(
        "dispatch key PythonTLSSnapshot",
        "import, and that of torch._dynamo",
        "functions that create constants are handled above autograd, also those with a Python implementation for torch.compile",
        "2.11",
        "Library._destroy()",
    ),
    Patch(
        "torch.library.register_torch_dispatch",
        "the first call of an operator",
        "torch calls dtensor's implementation of the operator for DTensors",
        "2.11",
        "dispatch.dispatcher.clear_plans()",
    ),
    Patch(
        "torch.autograd.function.FunctionMeta.__getattribute__",
        "the first tensors of all ranks that a program gets (to_local(), per_rank(), map_ranks()) or that require gradients",
        "an autograd.Function over PerRank tensors keeps its graph: torch has no subclass hook there, but it looks up forward",
        "2.11",
        "ranks.autograd_function.unpatch_functions()",
    ),
    Patch(
        "torch.autograd.graph.register_multi_grad_hook",
        "the first tensors of all ranks, as above",
        "a hook over tensors of all ranks gets the gradients of all ranks together, once",
        "2.11",
        "ranks.joint_functions.unpatch_hooks()",
    ),
    Patch(
        "torch.utils.module_tracker.register_multi_grad_hook",
        "the first tensors of all ranks, as above",
        "the same function under the name by which ModuleTracker and FlopCounterMode call it",
        "2.11",
        "ranks.joint_functions.unpatch_hooks()",
    ),
    Patch(
        "torch.nn.modules.batchnorm.SyncBatchNorm.forward",
        "the first tensors of all ranks, as above",
        "it takes the statistics of all ranks; torch's asks for a process group, which ranks of one process do not have",
        "2.11",
        "ranks.joint_modules.unpatch_modules()",
    ),
    Patch(
        "torch.nn.modules.transformer.TransformerEncoder.forward",
        "the first tensors of all ranks, as above",
        "padded rows are zeros in eval(), as on processes; torch computes nested tensors for plain tensors only",
        "2.11",
        "ranks.joint_modules.unpatch_modules()",
    ),
    Patch(
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "the first parameter that distributing a module replaces",
        "an optimizer that still holds the replaced parameter raises (public: register_optimizer_step_pre_hook)",
        "2.11",
        "the handle's remove()",
    ),
    Patch(
        "torch.optim.optimizer.Optimizer.zero_grad",
        "the first unit of data parallelism",
        "gradients that are accumulated for a later reduction are cleared too; .grad does not show them",
        "2.11",
        "its __wrapped__ is torch's own",
    ),
)
