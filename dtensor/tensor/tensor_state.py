"""Tensor state: the attributes that the library stores on a tensor in addition to its local value and its layout.

:data:`ATTRIBUTES` declares each of them, with its purpose and the modules that write and read it. A new attribute is declared
here, and the sets below, which copies, files, captured programs and in-place view operators use, follow from the table. All other
attributes of a tensor belong to the user. ``tests/unit/test_library_attributes.py`` checks both.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorAttribute(NamedTuple):
    """Declaration of an attribute that the library stores on tensors.

    Attributes:
        purpose: what the value says.
        writers, readers: the modules of ``dtensor`` that write and read it.
        follows_memory: it describes the memory. If another tensor object takes the memory over, it takes the attribute.
        refers_to_tensors: captured programs look at the value, which may be, or lead to, other tensors.
        is_copied: a copy of the tensor has it as well.
    """

    purpose: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    follows_memory: bool = False
    refers_to_tensors: bool = False
    is_copied: bool = False


_STATE, _CACHE, _FACTS = "state/shared_memory", "dispatch/programs/redistribution_cache", "dispatch/programs/facts"
_CLASS, _LAZY, _GRADS, _COPIES = "tensor/dtensor", "tensor/views/lazy_view", "tensor/leaf_gradients", "tensor/copies"
_PARAM, _PARAM_INIT = "parallel/data/units/parameters/fsdp_param", "parallel/data/units/parameters/fsdp_param_init"
_PENDING, _WRITEBACK, _UNIT = "tensor/async_tensor", "tensor/views/view_writeback", "parallel/data/units/unit"

ATTRIBUTES: dict[str, TensorAttribute] = {
    # --- identity: what the tensor is; the other attributes may be dropped at the cost of time or memory
    "_storage_start": TensorAttribute(
        "storage offset of a view, in elements; 0 for other tensors",
        ("state/wrap", _CLASS),
        ("state/wrap", "dispatch/dispatcher", _LAZY),
        is_copied=True,
    ),
    "_origin": TensorAttribute(
        "how a lazy view is computed from its base",
        (_LAZY,),
        (_LAZY, _WRITEBACK),
        refers_to_tensors=True,
    ),
    "_place": TensorAttribute(
        "index of a lazy view among the results of its operator",
        (_LAZY,),
        (_LAZY, _WRITEBACK),
        refers_to_tensors=True,
    ),
    "_pending": TensorAttribute(
        "the local value that is still being received",
        (_PENDING,),
        (_PENDING,),
        refers_to_tensors=True,
    ),
    "_memory": TensorAttribute(
        "storage object that programs get, to compare which tensors share memory",
        ("tensor/storage",),
        ("tensor/storage",),
        refers_to_tensors=True,
    ),
    "_data_parallel": TensorAttribute(
        "device that a data-parallel unit keeps the parameter on",
        (_PARAM, _PARAM_INIT, "parallel/data/units/parameters/buffers"),
        ("tensor/modules/materialize", _PARAM_INIT),
        refers_to_tensors=True,
    ),
    # --- versions of the memory
    "_memory_state": TensorAttribute(
        "MemoryState: version counters, and whether user code holds the local tensors", (_STATE, _PENDING), (_STATE,)
    ),
    "_version_owner": TensorAttribute(
        "tensor with the version counter of this memory, or a weak reference to it, if it is not the tensor itself",
        (_LAZY, "tensor/views/flattened_sharded_dims"),
        (_STATE,),
        follows_memory=True,
    ),
    "_data_alias": TensorAttribute("the tensor that x.data returns", (_CLASS,), (_CLASS,), follows_memory=True),
    "_has_new_memory": TensorAttribute(
        "True if the tensor got other memory (x.data = y): views of it do not share memory with it any more",
        (_CLASS,),
        (_STATE,),
        follows_memory=True,
    ),
    # --- redistribution cache
    "_cached_copies": TensorAttribute(
        "CachedCopies of all of the memory; on a view: of its part", (_CACHE,), (_CACHE, _FACTS), follows_memory=True
    ),
    "_cached_parts": TensorAttribute("CachedCopies of parts of the memory, by part", (_CACHE,), (_CACHE,), follows_memory=True),
    "_preferred_layout": TensorAttribute("PreferredLayout: the layout that consumers needed", (_CACHE,), (_FACTS,)),
    # --- facts of operands
    "_disjoint_rows": TensorAttribute("DisjointRows: each row is non-zero on one rank only", (_FACTS,), (_FACTS,)),
    "_ownerships": TensorAttribute("RowOwnerships made of this tensor of group ends", (_FACTS,), (_FACTS,)),
    "_deferred_reductions": TensorAttribute(
        "DeferredReductions: an operator left this partial tensor unreduced", (_FACTS,), (_FACTS,)
    ),
    "_local_indices": TensorAttribute("LocalIndices: each rank has indices into its own shard only", (_FACTS,), (_FACTS,)),
    # --- gradients and parameters
    "_grad_layout": TensorAttribute(
        "list of the layout of a leaf, to which its gradient is redistributed, and of copies to drop when the gradient arrives",
        (_GRADS,),
        (_GRADS, _CACHE, "plan/graph_recorder"),
        follows_memory=True,
    ),
    "_batch_tensors": TensorAttribute(
        "weak references to all tensors that wait for one batch of leaf gradients", (_GRADS, _PENDING), (_GRADS, _PENDING)
    ),
    "_own_uses": TensorAttribute(
        "by mesh dim of a data-parallel unit: the reduction of the gradients of this parameter",
        ("parallel/data/units/unit_pass",),
        ("tensor/autograd",),
    ),
    "_is_param": TensorAttribute("True for isinstance(x, nn.Parameter)", (_UNIT, _COPIES), (_COPIES,)),
}

OF_MEMORY = tuple(name for name, each in ATTRIBUTES.items() if each.follows_memory)
NOT_COPIED = frozenset(name for name, each in ATTRIBUTES.items() if not each.is_copied)
NOT_FOLLOWED = frozenset(name for name, each in ATTRIBUTES.items() if not each.refers_to_tensors)
