"""A Trainer of transformers: on one device, or as a rank of torchrun with the model fully sharded. Prints what it logs.

python tests/hf/trainer_program.py FOLDER     or     torchrun --nproc-per-node 2 tests/hf/trainer_program.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dtensor as dt
from dtensor.parallel import fully_shard

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(folder: str) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    data = [{name: torch.randint(32, (8,)) for name in ("input_ids", "labels")} for _ in range(16)]
    if ranks > 1:
        mesh = dt.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    steps = {"max_steps": 4, "learning_rate": 1e-2, "per_device_train_batch_size": 8 // ranks, "logging_steps": 1}
    quiet = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    trainer = Trainer(model=model, args=TrainingArguments(folder, **steps, **quiet), train_dataset=data)
    if ranks > 1:
        trainer.accelerator.prepare_model = lambda model, **_: model  # it is distributed already
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        logged = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]
        print("logged " + json.dumps(logged))


if __name__ == "__main__":
    main(sys.argv[1])
