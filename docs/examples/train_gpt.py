"""Train a small GPT on Python's own documentation, sharded over four ranks, and prove that sharding changed nothing.

    python docs/examples/train_gpt.py                          # all four ranks inside this process
    torchrun --nproc-per-node 4 docs/examples/train_gpt.py     # four processes, the same losses

The model (gpt_model.py) is plain torch, and so are the optimizer and the training step. Only `distribute` below knows of
a mesh: parameters are sharded over "tp" by PLAN and replicated over "dp"; the batch is sharded over "dp". Afterwards the same
model is trained on one device with the same batches, and the two losses are compared at every step.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, Config, loss_of
from one_device import needs
from torch import Tensor, nn

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode

# The placement of each parameter over "tp"; what is not listed is replicated. The weight of nn.Linear is (outputs, inputs):
# Shard(0) gives each rank some of the outputs, Shard(1) some of the inputs, and so one addend of every output.
PLAN = {
    "embedding.weight": Shard(0),  # by token
    "*.query.weight": Shard(0),  # by head
    "*.key.weight": Shard(0),
    "*.value.weight": Shard(0),
    "*.out.weight": Shard(1),
    "*.gate.weight": Shard(0),
    "*.up.weight": Shard(0),
    "*.down.weight": Shard(1),
    "head.weight": Shard(0),  # by token: no rank ever holds all logits of a position
}
# The modules with such a partial output. It is reduced at once, since more than one operator reads it.
SUMMED = ("embedding", "*.out", "*.down")
TOLERANCE = 1e-5  # float32: sums over ranks round otherwise, and each step starts where the last one ended


def distribute(model: nn.Module, mesh: dt.DeviceMesh) -> None:
    """Replace the model's parameters by distributed ones, as PLAN says, and add outputs up as SUMMED says."""

    def partition(name: str, module: nn.Module, mesh: dt.DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            over_tp = next((placement for pattern, placement in PLAN.items() if fnmatch(f"{name}.{key}", pattern)), Replicate())
            sharded = dt.distribute_tensor(parameter.detach(), mesh, [Replicate(), over_tp])
            module.register_parameter(key, nn.Parameter(sharded))
        if any(fnmatch(name, pattern) for pattern in SUMMED):
            module.register_forward_hook(lambda module, inputs, output: reduced(output))

    dt.distribute_module(model, mesh, partition)


def reduced(x: Any) -> Any:
    """``x`` with nothing left to be summed."""
    return x.redistribute(placements=[Replicate() if place.is_partial() else place for place in x.placements])


class Text:
    """The documentation of Python's topics, as numbers."""

    def __init__(self) -> None:
        text = "\n".join(topics.values())
        self.alphabet = sorted(set(text))
        numbers = {character: i for i, character in enumerate(self.alphabet)}
        self.tokens = torch.tensor([numbers[character] for character in text])

    def batches(self, steps: int, size: int, context: int) -> list[tuple[Tensor, Tensor]]:
        """(inputs, targets) of each step, both (size, context): windows at random places, the targets one further on."""
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(len(self.tokens) - context, (steps, size, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(context + 1)]
        return [(window[:, :-1], window[:, 1:]) for window in windows]

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[token] for token in tokens.tolist())


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]], show: Callable[[int, float], None]) -> list[float]:
    """The loss of every step. The same code for plain and for distributed tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step, (inputs, targets) in enumerate(batches):
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        show(step, losses[-1])
    return losses


@torch.no_grad()
def write(model: nn.Module, prompt: Tensor, length: int) -> Tensor:
    """``length`` tokens that the distributed model puts behind ``prompt``, one context long."""
    generator = torch.Generator().manual_seed(2)
    mesh = next(model.parameters()).device_mesh
    tokens = prompt
    for _ in range(length):
        window = dt.distribute_tensor(tokens[-len(prompt) :][None], mesh)
        logits = model(window)[0, -1].full_tensor()
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.6).softmax(0), 1, generator=generator)])
    return tokens[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)

    needs(4)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = mesh.get_rank() == 0
    say: Callable[..., None] = print if first else lambda *_: None

    text = Text()
    config = Config(vocabulary=len(text.alphabet))
    torch.manual_seed(0)
    model = GPT(config)
    alone = copy.deepcopy(model)
    distribute(model, mesh)
    batches = text.batches(options.steps, options.batch, config.context)
    split = [tuple(dt.distribute_tensor(part, mesh, [Shard(0), Replicate()]) for part in batch) for batch in batches]

    where = "4 processes" if dist.is_initialized() else "4 ranks in this process"
    say(f"mesh        {mesh}, {where}")
    say(f"text        {len(text.tokens):,} characters, {len(text.alphabet)} different ones")
    show_layouts(model, split[0][0], say)
    show_communication(model, split[0], say)

    say("\ntraining on the mesh")
    started = time.perf_counter()
    every = max(1, options.steps // 10)
    losses = train(model, split, lambda step, loss: say(f"  step {step:3}  loss {loss:.4f}") if step % every == 0 else None)
    say(f"  {(time.perf_counter() - started) / len(losses) * 1e3:.0f} ms per step")

    prompt = text.tokens[-config.context :]
    say("\nwhat the distributed model writes after", repr(text.decode(prompt)))
    say("  |" + text.decode(write(model, prompt, 200)).replace("\n", "\n  |"))

    if first:
        compare(losses, train(alone, batches, lambda step, loss: None))
    if dist.is_initialized():
        dist.destroy_process_group()


def show_layouts(model: nn.Module, inputs: Any, say: Callable[..., None]) -> None:
    parameters = dict(model.named_parameters())
    shown = ("embedding.weight", "blocks.0.attention.out.weight", "blocks.0.feed_forward.up.weight", "norm.weight")
    say("\nlayouts     (S(d): tensor dim d is split, R: every rank has it; then each rank's block)")
    for name, value in [("inputs", inputs), *((name, parameters[name]) for name in shown)]:
        blocks = " ".join("x".join(map(str, value.layout.local_shape(at))) for at in value.device_mesh.coordinates)
        say(f"  {name:33} {value.layout!r:40} {blocks}")
    total = sum(p.layout.nbytes for p in parameters.values())
    held = sum(p.layout.max_local_nbytes for p in parameters.values())
    say(f"  parameters: {total / 1024:.0f} KiB, of which one rank holds {held / 1024:.0f} KiB")


def show_communication(model: nn.Module, batch: tuple[Any, Any], say: Callable[..., None]) -> None:
    """What one step sends: the gradients are thrown away, so that training starts from the same weights."""
    with CommDebugMode() as comm:
        loss_of(model(batch[0]), batch[1]).backward()
    model.zero_grad()
    say("\ncollectives of one step, forward and backward")
    say(comm)


def compare(sharded: list[float], alone: list[float]) -> None:
    """Both losses at every step.

    Raises:
        SystemExit: they differ by more than TOLERANCE somewhere, or training did not learn.
    """
    print("\nthe same model and batches on one device")
    print("  step    mesh (2, 2)     one device     difference")
    for step, (ours, theirs) in enumerate(zip(sharded, alone, strict=True)):
        print(f"  {step:4} {ours:14.7f} {theirs:14.7f} {abs(ours - theirs):14.1e}")
    worst = max(abs(ours - theirs) for ours, theirs in zip(sharded, alone, strict=True))
    print(f"\nlargest difference over {len(alone)} steps: {worst:.1e} (allowed: {TOLERANCE:.0e})")
    if worst > TOLERANCE:
        raise SystemExit("the sharded model's loss is not the single device's")
    if len(alone) >= 20 and sharded[-1] > 0.8 * sharded[0]:
        raise SystemExit(f"the loss did not fall: {sharded[0]:.3f} -> {sharded[-1]:.3f}")
    print("equal at every step")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
