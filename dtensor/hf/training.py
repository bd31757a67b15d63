"""Training: a ``Trainer`` of Hugging Face for a distributed model, and the plan of a model with adapters."""

from __future__ import annotations

from typing import Any

from ..errors import MeshError, PlacementError
from ..mesh.device_mesh import as_mesh
from ..parallel.tensor.parallelize import parameters_at, submodules_at

_ACCELERATE_DIMS = ("dp_replicate", "dp_shard", "cp", "tp")  # names of accelerate; along the last two, ranks get the same rows


def prepared(trainer: Any, mesh: Any) -> Any:
    """Make ``trainer`` leave its distributed model unwrapped, and give each rank its rows of a batch; return it.

    ``trainer`` is a ``Trainer`` of ``transformers``, or an object with an ``accelerator``.

    Under torchrun Accelerate would wrap the model in ``DistributedDataParallel``; now it leaves it unchanged. Each rank gets
    the rows of its position in ``mesh``: along ``"dp_shard"`` and ``"dp_replicate"`` its own, along ``"tp"`` and ``"cp"`` the
    same as the others. With all ranks in one process nothing is changed.

    Args:
        mesh: a mesh of all ranks with dims of these names.

    Raises:
        MeshError: a dim has another name, so the ranks with the same rows are unknown.

    Cost: none.

    >>> import types, dtensor as dt, dtensor.hf
    >>> trainer = types.SimpleNamespace(accelerator=types.SimpleNamespace())  # Trainer(model=model, ...)
    >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    >>> dtensor.hf.prepared(trainer, mesh) is trainer
    True
    """
    mesh = as_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(_ACCELERATE_DIMS):
        raise MeshError(
            f"{mesh!r} has a mesh dim without a name that accelerate knows; name each dim one of "
            f"{', '.join(_ACCELERATE_DIMS)}: by the names it finds which ranks get the same rows of a batch"
        )
    if mesh.kind == "process_group":
        trainer.accelerator.prepare_model = lambda model, **_: model
        trainer.accelerator.state.device_mesh = mesh
    return trainer


_SHARDED_FACTOR = {"colwise": "lora_B", "rowwise": "lora_A"}  # the factor with the features that a style shards


def adapted_plan(model: Any) -> dict[str, str]:
    """Return the tensor-parallel plan of a model with low-rank adapters, from the model's own plan.

    Use it for ``model.get_base_model()`` if ``model`` is one of ``peft``.

    It follows the model's own plan (``_tp_plan``), name by name. An adapted matrix is sharded as without adapter, and so is the
    factor with the sharded features: the second factor of a column-wise matrix, the first of a row-wise one. The other factor
    is small and stays replicated: all ranks must have initialized it with the same ``torch.manual_seed``.

    Raises:
        PlacementError: the model has no plan, or a module has another kind of adapter.

    Cost: none. A forward pass then reduces the output of a row-wise matrix and of its first factor, with one all-reduce each.

    >>> import torch, dtensor as dt, dtensor.hf, peft
    >>> from dtensor.parallel import parallelize_module
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"])
    >>> model = peft.inject_adapter_in_model(adapters, LlamaForCausalLM(LlamaConfig(**sizes)))
    >>> plan, mesh = dtensor.hf.adapted_plan(model), dt.init_device_mesh("cpu", (2,))
    >>> [name.removeprefix("model.layers.0.self_attn.") for name in plan if "lora" in name]
    ['q_proj.lora_B.*', 'o_proj.lora_A.*']
    >>> model = parallelize_module(model, mesh, plan)  # of get_peft_model's it is model.get_base_model()
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    styles = getattr(base, "_tp_plan", None)
    if not styles:
        raise PlacementError(
            f"adapted_plan: {type(base).__name__} has no tensor-parallel plan (model._tp_plan) to follow; pass "
            "parallelize_module a plan with the names of its modules and their styles"
        )
    names = {module: name for name, module in base.named_modules()}
    plan = {}
    for path, style in styles.items():
        modules = submodules_at(base, path)
        if not modules and parameters_at(base, path):  # parameters of experts, which have their own style
            plan[path] = style
        for module in modules:
            name = names[module]
            factor = _SHARDED_FACTOR.get(style.split("_")[0])
            if not hasattr(module, "base_layer"):
                plan[name] = style
            elif factor is None or not hasattr(module, factor):
                raise PlacementError(
                    f"{name!r} has the style {style!r} and is adapted by a {type(module).__name__}, but only low-rank "
                    "adapters (lora_A and lora_B) have a known plan; pass a plan with its submodules and their styles"
                )
            else:
                plan[f"{name}.base_layer"] = plan[f"{name}.{factor}.*"] = style
    return plan
