"""Models of Hugging Face: in checkpoints, distributed first, then read, so that no rank ever holds a whole one; and adapted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .base.modes import implicit_replication
from .checkpoint import load, save_safetensors
from .checkpoint.coordinator import Ranks
from .checkpoint.safetensors import unique_tensors
from .errors import ArgumentError, CheckpointError, MeshError, PlacementError
from .mesh.device_mesh import as_mesh
from .parallel.tensor.parallelize import parameters_at, submodules_at
from .tensor.dtensor import DTensor
from .tensor.materialize import materialize

__all__ = ["adapted_plan", "from_pretrained", "prepared", "save_pretrained"]


def from_pretrained(
    path: str | Path, distribute: Callable[[nn.Module], nn.Module], *, model_class: type[nn.Module] | None = None
) -> nn.Module:
    """The model in the folder ``path`` (``config.json`` and safetensors), distributed as ``distribute`` does it.

    The model is built on the meta device, distributed, and given memory; then each rank reads the bytes of its own pieces. It is
    in evaluation mode, with the generation settings of the folder, as those of ``transformers`` are. No network is asked.

    Args:
        path: a folder that ``save_pretrained`` or :func:`dtensor.checkpoint.save_safetensors` wrote.
        distribute: gets the model on meta and returns it distributed: by ``parallelize_module(model, mesh["tp"], "auto")``, by
            ``fully_shard`` of its layers and itself, or both.
        model_class: the class of the model. Default: the class that ``config.json`` names under ``architectures``.

    Raises:
        CheckpointError: no checkpoint there, parameters that are missing or of another shape; or tables that the model computes
            when it is built and does not know how to compute again.

    Cost: of reading, see :func:`dtensor.checkpoint.load`. Memory: this rank's pieces twice, while they are read.

    >>> import tempfile, dtensor as dt, dtensor.hf
    >>> from dtensor.parallel import parallelize_module
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> folder, mesh = tempfile.mkdtemp(), dt.init_device_mesh("cpu", (2,))
    >>> LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    >>> model = dtensor.hf.from_pretrained(folder, lambda model: parallelize_module(model, mesh, "auto"))
    >>> model.model.layers[0].self_attn.q_proj.weight.placements
    (Shard(dim=0),)
    """
    transformers = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(path)
    kind = model_class or _class_named_by(config, path)
    with torch.device("meta"):
        model = kind(config)
    if isinstance(config.dtype, torch.dtype):
        model = model.to(config.dtype)
    model = materialize(distribute(model), init=_computed_again(model))
    load(model, path, arrange=_as_the_model_has_them(model))
    if (Path(path) / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.eval()


def _class_named_by(config: Any, path: str | Path) -> Any:
    names = config.architectures or ["<none>"]
    kind = getattr(import_module("transformers"), names[0], None)
    if kind is None:
        raise CheckpointError(
            f"config.json in {path} names no model class of transformers under 'architectures' ({names[0]}): give the class, "
            "from_pretrained(path, distribute, model_class=LlamaForCausalLM)"
        )
    return kind


def save_pretrained(model: Any, path: str | Path, *, max_shard_size: int = 5_000_000_000, process_group: Any = None) -> None:
    """Write the distributed ``model`` to the folder ``path``: ``config.json``, generation settings and safetensors.

    All ranks call it. :func:`from_pretrained` reads the folder, and so does ``from_pretrained`` of ``transformers``. Each rank
    writes its own blocks. Weights have the names of ``model.state_dict()``, also where ``transformers`` stores another form
    (the experts of a mixture one by one). To overwrite a model, remove its folder first.

    Args:
        model: a ``PreTrainedModel``.
        max_shard_size: the most bytes of tensors in one file.
        process_group: the ranks that save together. Default: all ranks.

    Raises:
        CheckpointError: on all ranks, as :func:`dtensor.checkpoint.save_safetensors`.

    Cost: no tensor is gathered; partial tensors are reduced.

    >>> import tempfile, dtensor as dt, dtensor.hf
    >>> from dtensor.parallel import parallelize_module
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> folder, mesh = tempfile.mkdtemp(), dt.init_device_mesh("cpu", (2,))
    >>> model = parallelize_module(LlamaForCausalLM(LlamaConfig(**sizes)), mesh, "auto")
    >>> dtensor.hf.save_pretrained(model, folder)
    >>> LlamaForCausalLM.from_pretrained(folder).lm_head.weight.shape
    torch.Size([8, 8])
    """
    if not hasattr(model, "_keys_to_ignore_on_save"):
        raise ArgumentError(
            f"save_pretrained takes a PreTrainedModel of transformers, got {type(model).__name__}: "
            "dtensor.checkpoint.save_safetensors(model, folder) writes the tensors of any module"
        )
    not_saved = set(model._keys_to_ignore_on_save or ())
    state = {name: x for name, x in unique_tensors(model).items() if name not in not_saved}
    save_safetensors(state, path, max_shard_size=max_shard_size, process_group=process_group)

    def write_settings() -> None:
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [_own_class(model).__name__]
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)

    Ranks("hf.save_pretrained", process_group).together(f"saving {path}", lambda: None, lambda _: write_settings())


def _own_class(model: nn.Module) -> type:
    """Return the class of ``model`` as it was before ``fully_shard`` or ``replicate`` added methods to it."""
    ours = __name__.partition(".")[0] + "."
    return next(kind for kind in type(model).__mro__ if not any(base.__module__.startswith(ours) for base in kind.__mro__))


def _as_the_model_has_them(model: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """What ``transformers`` does to the tensors of a checkpoint before the model gets them: experts, one by one in files, are put
    together, and names of older versions replaced. None where it does nothing (before version 5)."""
    if find_spec("transformers.conversion_mapping") is None:
        return None
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    library = import_module("transformers.core_model_loading")
    own = model.state_dict()
    renamings = [each for each in mapping if isinstance(each, library.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, library.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def arrange(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        collected: dict[str, Any] = {}
        for key in sorted(stored, key=library.dot_natural_key):
            name, pattern = library.rename_source_key(key, renamings, converters, model.base_model_prefix, own)
            if name not in own:
                found[key] = stored[key]
            elif pattern is None:
                found[name] = stored[key]
            else:
                converter = collected.setdefault(name, copy.deepcopy(by_pattern[pattern]))
                converter.add_tensor(name, key, pattern, stored[key])
        for name, converter in collected.items():
            found |= converter.convert(name, model=model, config=model.config)
        return found

    return arrange


def _computed_again(model: Any) -> Callable[[nn.Module], None]:
    """Sets the buffers of a module that no checkpoint has, as the model sets them; all others are read."""

    def init(module: nn.Module) -> None:
        own = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        tables = {name: table for name, table in own.items() if table is not None and table.numel()}
        for table in tables.values():
            table.fill_(_unset(table.dtype))
        if tables:
            with implicit_replication():  # a table is the same wherever it is computed
                model._init_weights(module)
        left = [name for name, table in tables.items() if _same_as_before(table)]
        if left:
            raise CheckpointError(
                f"{type(module).__name__} computes its buffers {left} in its constructor, and "
                f"{type(model).__name__}._init_weights does not compute them again; build the model on a real "
                "device and distribute it, instead of from_pretrained"
            )

    return init


def _unset(dtype: torch.dtype) -> Any:
    """A value that no table is full of."""
    if dtype is torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _same_as_before(table: torch.Tensor) -> bool:
    whole = table.full_tensor() if isinstance(table, DTensor) else table
    if whole.dtype is torch.bool:
        return False
    return bool((whole.isnan() if whole.dtype.is_floating_point else whole == torch.iinfo(whole.dtype).max).all())


_OF_BATCHES = ("dp_replicate", "dp_shard", "cp", "tp")  # accelerate's names; along the last two, ranks get the same rows


def prepared(trainer: Any, mesh: Any) -> Any:
    """``trainer``, a ``Trainer`` of ``transformers`` or whatever has an ``accelerator``, for a model that is distributed already.

    Under torchrun Accelerate would wrap the model in ``DistributedDataParallel``; now it leaves it as it is. Each rank gets the
    rows that its place in ``mesh`` asks for: along ``"dp_shard"`` and ``"dp_replicate"`` its own, along ``"tp"`` and ``"cp"`` the
    same as the others. With all ranks in one process nothing is to be done, and nothing is.

    Args:
        mesh: of all ranks, whose dims have these names.

    Raises:
        MeshError: a dim has another name: nobody could tell which ranks get the same rows.

    Cost: none.

    >>> import types, dtensor as dt, dtensor.hf
    >>> trainer = types.SimpleNamespace(accelerator=types.SimpleNamespace())  # Trainer(model=model, ...)
    >>> mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    >>> dtensor.hf.prepared(trainer, mesh) is trainer
    True
    """
    mesh = as_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(_OF_BATCHES):
        raise MeshError(
            f"{mesh!r} has no mesh dims with the names that accelerate uses, {', '.join(_OF_BATCHES)}; with "
            "these names it finds which ranks get the same rows of a batch"
        )
    if mesh.kind == "process_group":
        trainer.accelerator.prepare_model = lambda model, **_: model
        trainer.accelerator.state.device_mesh = mesh
    return trainer


_CUT_OF_LOW_RANK = {"colwise": "lora_B", "rowwise": "lora_A"}  # the factor that has the features which a style cuts


def adapted_plan(model: Any) -> dict[str, str]:
    """The plan for a model with adapters of low rank: for ``model.get_base_model()`` where ``model`` is one of ``peft``.

    It is the model's own (``_tp_plan``), name by name. A matrix that is adapted is cut as it would be without adapter, and so is
    the factor that has the features that are cut: the second of a column-wise matrix, the first of a row-wise one. The other
    factor, which is small, stays as it is on all ranks: they must have drawn the same, by one ``torch.manual_seed``.

    Raises:
        PlacementError: the model has no plan, or a module of it is adapted otherwise.

    Cost: none; applied, a forward reduces the output of a row-wise matrix and of its first factor, one all-reduce each.

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
            f"{type(base).__name__} has no tensor-parallel plan (model._tp_plan); pass a plan with the names "
            "of its modules and their styles"
        )
    names = {module: name for name, module in base.named_modules()}
    plan = {}
    for path, style in styles.items():
        found = submodules_at(base, path)
        if not found and parameters_at(base, path):  # of the experts of a mixture, which are cut by themselves
            plan[path] = style
        for module in found:
            name = names[module]
            factor = _CUT_OF_LOW_RANK.get(style.split("_")[0])
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
