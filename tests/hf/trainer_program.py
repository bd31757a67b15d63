"""Train with transformers' ``Trainer`` on one device, or as a rank of torchrun with a distributed model; print its logs.

python tests/hf/trainer_program.py FOLDER WAY     or     torchrun --nproc-per-node N tests/hf/trainer_program.py FOLDER WAY
"""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dtensor as dt
from dtensor.hf import prepared
from dtensor.parallel import fully_shard, parallelize_module

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MESHES = {"fully": {"dp_shard": 2}, "by heads": {"tp": 2}, "both": {"dp_shard": 2, "tp": 2}}


def main(folder: str, way: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    data = [{name: torch.randint(32, (8,)) for name in ("input_ids", "labels")} for _ in range(16)]
    sizes = MESHES[way] if ranks > 1 else {}
    if sizes:
        mesh = dt.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        parallelize_module(model, mesh["tp"], "auto")
    if "dp_shard" in sizes:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp_shard"])
        model = fully_shard(model, mesh=mesh["dp_shard"])
    steps = {"max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1}
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    rows = 8 // sizes.get("dp_shard", 1)
    args = TrainingArguments(folder, **steps, **quiet, per_device_train_batch_size=rows)
    trainer = Trainer(model=model, args=args, train_dataset=data)
    if sizes:
        prepared(trainer, mesh)
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        logged = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        print("logged " + json.dumps(logged))


if __name__ == "__main__":
    main(*sys.argv[1:])
