"""What of torch is not as it was found once this package is imported, and why: everything, in one list.

Code without DTensors sees none of it at work: each entry acts on this package's classes only. ``tests/unit/test_changes.py``
looks through torch's modules and classes in fresh processes, at import, with an in-process mesh, after a capture and after
debugging, and finds nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from ..base.told import IN_FORCE


class Change(NamedTuple):
    """One thing that torch is told.

    Attributes:
        where: the attribute or registry of torch's.
        when: ``"import"``, or what brings it about.
        why: what would not work without it.
        since: the first torch that it was needed on, of those supported.
        undone: how.
    """

    where: str
    when: str
    why: str
    since: str
    undone: str

    @property
    def in_force(self) -> bool:
        """Whether it has been made and not been undone."""
        return self.where in IN_FORCE


CHANGES = (
    Change(
        "torch.optim.optimizer._foreach_supported_types",
        "import",
        "optimizers take their list forms for DTensors",
        "2.11",
        "the list's remove(DTensor)",
    ),
    Change(
        "torch.utils._foreach_utils._foreach_supported_types",
        "import",
        "clip_grad_norm_ takes its list form for DTensors",
        "2.11",
        "the list's remove(DTensor)",
    ),
    Change(
        "torch._weights_only_unpickler._marked_safe_globals_set",
        "import",
        "torch.load(weights_only=True) of DTensors",
        "2.11",
        "torch.serialization.clear_safe_globals()",
    ),
    Change(
        "torch.distributed._state_dict_utils",
        "its import",
        "torch's state-dict tools take DTensors; four of its names, which ask for the class first",
        "2.11",
        "the names are kept by interop.state_dicts, which wraps them",
    ),
    Change(
        "torch.distributed.checkpoint.state_dict",
        "its import",
        "with all ranks in this process none is asked for who is first; two of its names",
        "2.11",
        "the names are kept by interop.state_dicts, which wraps them",
    ),
    Change(
        "torch.utils.dlpack.to_dlpack",
        "import",
        "it takes memory without asking, of which DTensors have none; of one it gives what x.__dlpack__() gives",
        "2.11",
        "torch._C._to_dlpack is torch's own",
    ),
    Change("torch.to_dlpack", "import", "the same function", "2.11", "the same"),
    Change(
        "torch.autograd.graph.save_on_cpu.__init__",
        "import",
        "with pin_memory=True it copies what is saved into a plain tensor; of DTensors the local tensors move",
        "2.11",
        "interop.saved_on_host keeps torch's own",
    ),
    Change(
        "sys.meta_path",
        "import",
        "the two modules above and below are told when somebody else imports them",
        "2.11",
        "at that import",
    ),
    Change(
        "torch._dynamo.trace_rules.SKIP_DIRS",
        "its import",
        "compiled graphs break at our functions instead of tracing ranks, but for those of interop.dynamo.LOOKED_INTO",
        "2.11",
        "stays",
    ),
    Change(
        "torch._dynamo",
        "its import",
        "DTensor.from_local and what parallel styles call are taken into graphs: allow_in_graph, substitute_in_graph; "
        "flex_attention of DTensors says what to do instead: py_impl",
        "2.11",
        "stays",
    ),
    Change(
        "torch.Tensor.__coerce_same_metadata_as_tangent__",
        "the import of torch._dynamo",
        "plain gradients of a compiled program's results are laid as DTensors: torch makes them where none is asked for",
        "2.13",
        "its deletion",
    ),
    Change(
        "torch._library.opaque_object._OPAQUE_TYPES",
        "import",
        "placements, meshes and layouts are constants of compiled programs, on which they are guarded",
        "2.13",
        "its pop(...)",
    ),
    Change(
        "torch.ops.dtensor",
        "the first of them that is compiled",
        "collectives, draws and checks as operators that stand in graphs, and their effects",
        "2.11",
        "Library._destroy()",
    ),
    Change(
        "torch.utils._debug_mode.DebugMode",
        "the first mesh or per_rank() tensor, and its import",
        "it steps back before DTensors, as before torch's own, and so sees what they do: register_torch_dispatch",
        "2.11",
        "Library._destroy() of interop.lookers",
    ),
    Change(
        "torch.distributed.tensor.debug.CommDebugMode",
        "the same",
        "the same: it counts collectives that operators of DTensors need",
        "2.11",
        "Library._destroy() of interop.lookers",
    ),
    Change(
        "dispatch key PythonTLSSnapshot",
        "import, and that of torch._dynamo",
        "functions that make plain constants are served above autograd, also those that torch has a compiler's Python for",
        "2.11",
        "Library._destroy()",
    ),
    Change(
        "torch.library.register_torch_dispatch",
        "the first call of an operator",
        "torch calls the operator's own function for DTensors",
        "2.11",
        "dispatch.dispatcher.clear_plans()",
    ),
    Change(
        "torch.autograd.function.FunctionMeta.__getattribute__",
        "the first tensors of all ranks that a program gets (to_local(), per_rank(), map_ranks()) or that require gradients",
        "a user's function over the tensors of all ranks keeps its graph; torch asks no subclass there, but looks up its forward",
        "2.11",
        "ranks.applied.leave_functions()",
    ),
    Change(
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "the first parameter that distributing a module replaces",
        "an optimizer that holds the replaced one says so (public: register_optimizer_step_pre_hook)",
        "2.11",
        "the handle's remove()",
    ),
    Change(
        "torch.optim.optimizer.Optimizer.zero_grad",
        "the first unit of data parallelism",
        "gradients that wait for a later backward are cleared too: .grad does not show them",
        "2.11",
        "its __wrapped__ is torch's own",
    ),
)
