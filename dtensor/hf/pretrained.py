"""Pretrained: models of Hugging Face that are distributed before they are read from a checkpoint, and written from shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.modes import implicit_replication
from ..checkpoint import load, save_safetensors
from ..checkpoint.coordinator import RankGroup
from ..checkpoint.safetensors import unique_tensors
from ..errors import ArgumentError, CheckpointError
from ..tensor.dtensor import DTensor
from ..tensor.modules.materialize import materialize


def from_pretrained(
    path: str | Path, distribute: Callable[[nn.Module], nn.Module], *, model_class: type[nn.Module] | None = None
) -> nn.Module:
    """Build the model in the folder ``path`` on meta, distribute it by ``distribute``, and read each rank's shards.

    The folder has ``config.json`` and safetensors.

    The model is built on the meta device, distributed, and given memory. Then each rank reads the bytes of its own local
    tensors. The model is in evaluation mode, with the generation settings of the folder, as in ``transformers``. The network is
    not used.

    Args:
        path: a folder that ``save_pretrained`` or :func:`dtensor.checkpoint.save_safetensors` wrote.
        distribute: gets the model on meta and returns it distributed: by ``parallelize_module(model, mesh["tp"], "auto")``, by
            ``fully_shard`` of its layers and itself, or both.
        model_class: the class of the model. Default: the class that ``config.json`` names under ``architectures``.

    Raises:
        CheckpointError: no checkpoint, parameters that are missing or of another shape; or buffers that the model computes in
            its constructor and cannot compute again.

    Cost: for reading, see :func:`dtensor.checkpoint.load`. Memory: this rank's local tensors twice, while they are read.

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
    kind = model_class or _find_model_class(config, path)
    with torch.device("meta"):
        model = kind(config)
    if isinstance(config.dtype, torch.dtype):
        model = model.to(config.dtype)
    model = materialize(distribute(model), init=_make_buffer_initializer(model))
    load(model, path, arrange=_make_weight_conversion(model))
    if (Path(path) / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.eval()


def _find_model_class(config: Any, path: str | Path) -> Any:
    """Return the class of ``transformers`` that config.json names under 'architectures'; raise if there is none."""
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
        """Write ``config.json`` and the generation settings, on one rank."""
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [_own_class(model).__name__]
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)

    RankGroup("hf.save_pretrained", process_group).run_on_all(f"saving {path}", lambda: None, lambda _: write_settings())


def _own_class(model: nn.Module) -> type:
    """Return the class of ``model`` as it was before ``fully_shard`` or ``replicate`` added methods to it."""
    ours = __name__.partition(".")[0] + "."
    return next(kind for kind in type(model).__mro__ if not any(base.__module__.startswith(ours) for base in kind.__mro__))


def _make_weight_conversion(model: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None:
    """Return a function that converts stored tensors as ``transformers`` does; None before its version 5.

    The conversions stack experts that files store one by one, and replace names of older versions.
    """
    if find_spec("transformers.conversion_mapping") is None:
        return None
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    library = import_module("transformers.core_model_loading")
    own_state = model.state_dict()
    renamings = [each for each in mapping if isinstance(each, library.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, library.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    def convert_tensors(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the stored tensors with the names, and in the shapes, that the model's parameters have."""
        results: dict[str, torch.Tensor] = {}
        collected: dict[str, Any] = {}
        for key in sorted(stored, key=library.dot_natural_key):
            name, pattern = library.rename_source_key(key, renamings, converters, model.base_model_prefix, own_state)
            if name not in own_state:
                results[key] = stored[key]
            elif pattern is None:
                results[name] = stored[key]
            else:
                converter = collected.setdefault(name, copy.deepcopy(by_pattern[pattern]))
                converter.add_tensor(name, key, pattern, stored[key])
        for name, converter in collected.items():
            results |= converter.convert(name, model=model, config=model.config)
        return results

    return convert_tensors


def _make_buffer_initializer(model: Any) -> Callable[[nn.Module], None]:
    """Return a function that fills a module's non-persistent buffers, which are not read, as the model computes them."""

    def compute_buffers(module: nn.Module) -> None:
        """Compute the non-persistent buffers of a module; raise if ``_init_weights`` does not compute them."""
        buffers = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        tables = {name: table for name, table in buffers.items() if table is not None and table.numel()}
        for table in tables.values():
            table.fill_(_sentinel_value(table.dtype))
        if tables:
            with implicit_replication():  # buffers are computed identically on all ranks
                model._init_weights(module)
        unchanged = [name for name, table in tables.items() if _is_still_sentinel(table)]
        if unchanged:
            raise CheckpointError(
                f"{type(module).__name__} computes its buffers {unchanged} in its constructor, and "
                f"{type(model).__name__}._init_weights does not compute them again; build the model on a real "
                "device and distribute it, instead of from_pretrained"
            )

    return compute_buffers


def _sentinel_value(dtype: torch.dtype) -> Any:
    """Return the value that marks elements of a buffer of ``dtype`` which nothing has computed."""
    if dtype is torch.bool:
        return True
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_still_sentinel(table: torch.Tensor) -> bool:
    """Return True if ``_init_weights`` left all of a buffer at :func:`_sentinel_value`; never for a bool buffer."""
    full = table.full_tensor() if isinstance(table, DTensor) else table
    if full.dtype is torch.bool:
        return False
    return bool((full.isnan() if full.dtype.is_floating_point else full == torch.iinfo(full.dtype).max).all())
