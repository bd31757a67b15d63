"""Styles: plans of ``ColwiseParallel`` and ``RowwiseParallel`` for unchanged models, as users write them."""

from __future__ import annotations

from typing import Any

from dtensor import Replicate, Shard
from dtensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

Plan = dict[str, Any]


def _matrices(prefix: str, columns: tuple[str, ...], rows: tuple[str, ...], left: dict[str, Any]) -> Plan:
    plan: Plan = {f"{prefix}{name}": ColwiseParallel() for name in columns}
    return plan | {f"{prefix}{name}": RowwiseParallel(**left) for name in rows}


def make_llama_plan(sequence: bool) -> Plan:
    """Return the tensor-parallel plan of a Llama, with sequence parallelism if ``sequence``."""
    left: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
    given: dict[str, Any] = {"input_layouts": Shard(1)} if sequence else {}
    plan = _matrices(
        "model.layers.*.",
        ("self_attn.[qkv]_proj", "mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.o_proj", "mlp.down_proj"),
        left,
    )
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), **left)
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False, **given)
    if not sequence:
        return plan
    norms = ("model.norm", "model.layers.*.input_layernorm", "model.layers.*.post_attention_layernorm")
    whole = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    plan |= {name: SequenceParallel() for name in norms}
    plan["model.layers.*.self_attn"] = PrepareModuleInput(input_kwarg_layouts=whole[0], desired_input_kwarg_layouts=whole[1])
    plan["model.layers.*.mlp"] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    return plan


def make_opt_plan(sequence: bool) -> Plan:
    plan = _matrices("model.decoder.layers.*.", ("fc1",), ("self_attn.out_proj", "fc2"), {})
    # heads are counted by the configuration, not by the width of what a rank has: they must stay distributed
    plan["model.decoder.layers.*.self_attn.[qkv]_proj"] = ColwiseParallel(use_local_output=False)
    plan["model.decoder.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return plan


def make_gpt2_plan(sequence: bool) -> Plan:
    plan = _matrices("transformer.h.*.", ("mlp.c_fc",), ("attn.c_proj", "mlp.c_proj"), {})
    plan["transformer.h.*.attn.c_attn"] = ColwiseParallel(parts=3, use_local_output=False)  # heads as in OPT
    plan["transformer.wte"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return plan


def make_phi3_plan(sequence: bool) -> Plan:
    plan = _matrices("model.layers.*.", (), ("self_attn.o_proj", "mlp.down_proj"), {})
    plan["model.layers.*.self_attn.qkv_proj"] = ColwiseParallel(parts=3, use_local_output=False)  # heads as in OPT
    plan["model.layers.*.mlp.gate_up_proj"] = ColwiseParallel(parts=2)
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    return plan


def make_glm_plan(sequence: bool) -> Plan:
    plan = make_llama_plan(sequence)
    del plan["model.layers.*.mlp.gate_proj"], plan["model.layers.*.mlp.up_proj"]
    return plan | {"model.layers.*.mlp.gate_up_proj": ColwiseParallel(parts=2)}


# family -> whether its sequence can be cut too -> the plan
PLANS = {
    ("llama", "styles"): lambda: make_llama_plan(False),
    ("llama", "styles_sp"): lambda: make_llama_plan(True),
    ("mistral", "styles"): lambda: make_llama_plan(False),
    ("mistral", "styles_sp"): lambda: make_llama_plan(True),
    ("gpt2", "styles"): lambda: make_gpt2_plan(False),
    ("opt", "styles"): lambda: make_opt_plan(False),
    ("phi3", "styles"): lambda: make_phi3_plan(False),
    ("glm", "styles"): lambda: make_glm_plan(False),
    ("glm", "styles_sp"): lambda: make_glm_plan(True),
}
