"""Train step: training steps of a Llama-shaped model on gloo processes, by ``dtensor``, PyTorch's DTensor ("peer") and a
hand-written program.

    python benchmarks/train_step.py [--quick] [--json] [--only tp2 fsdp4] [--memory] [--captured]

Cases: a Llama-shaped model under tensor parallelism (tp2, tp4), DDP (ddp), fully sharded (fsdp), both (fsdp2xtp2), copies of
shards (hsdp2x2) and DDP with a ZeRO optimizer (zero); one tensor-parallel MLP (tp-mlp) and one block of the model (tp-block);
feed-forward layers with norms as DTensors and nothing else, parameters replicated and the batch sharded (dtensors). The sides
alternate, step by step, on the same processes and groups, so that noise of the machine affects all of them. A step is forward,
backward and AdamW; its time is that of the slowest rank. "cpu" is the processor time of a rank, which other programs on the
machine hardly change, "host" that of its main thread; in brackets, the ratio to PyTorch DTensor's. "by hand" is Megatron-LM's
tensor parallelism with explicit all-reduces (tp), or plain torch with one flat all-reduce of the gradients (the others). With
--memory each side runs alone, and the growth of resident memory to its peak is shown. With --captured there is a fourth side:
ours, its step a captured function.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "examples"), str(ROOT / "benchmarks")]

from gpt_model import GPT, Block, Config, FeedForward, loss_of  # noqa: E402  # it is found by the path above
from measuring import timing  # noqa: E402  # it is found by the path above

CASES = {  # name -> (processes, mesh shape)
    "tp2": (2, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "ddp2": (2, {"dp": 2}),
    "ddp4": (4, {"dp": 4}),
    "fsdp2": (2, {"dp": 2}),
    "fsdp4": (4, {"dp": 4}),
    "fsdp2xtp2": (4, {"dp": 2, "tp": 2}),
    "hsdp2x2": (4, {"replica": 2, "part": 2}),
    "dtensors2": (2, {"dp": 2}),
    "dtensors4": (4, {"dp": 4}),
    "zero2": (2, {"dp": 2}),
    "zero4": (4, {"dp": 4}),
    "tp-mlp2": (2, {"tp": 2}),
    "tp-mlp4": (4, {"tp": 4}),
    "tp-block2": (2, {"tp": 2}),
    "tp-block4": (4, {"tp": 4}),
}
SIDES = ("ours", "peer", "by hand")
BATCH = 4
PARTS = ("tp-mlp", "tp-block")
ADAMW: dict[str, Any] = {"lr": 1e-4, "foreach": True}  # as it is by default on accelerators


def make_config(size: str) -> Config:
    if size == "small":
        return Config(vocabulary=512, context=64, width=64, heads=4, layers=2)
    return Config(vocabulary=2048, context=128, width=256, heads=8, layers=4)


# --- the same plan for both libraries ------------------------------------------------------------------------------------
def make_tensor_parallel_plan(lib: Any, shard: Any, replicate: Any) -> dict[str, Any]:
    """Return the ``parallelize_module`` plan of a GPT with tensor, sequence and loss parallelism; ``lib`` is either library."""
    plan = {
        "embedding": lib.RowwiseParallel(input_layouts=replicate(), output_layouts=shard(1)),
        "norm": lib.SequenceParallel(),
        "head": lib.ColwiseParallel(input_layouts=shard(1), use_local_output=False),
    }
    block = {
        "attention_norm": lib.SequenceParallel(),
        "attention": lib.PrepareModuleInput(
            input_layouts=(shard(1), None, None), desired_input_layouts=(replicate(), None, None)
        ),
        "attention.query": lib.ColwiseParallel(),
        "attention.key": lib.ColwiseParallel(),
        "attention.value": lib.ColwiseParallel(),
        "attention.out": lib.RowwiseParallel(output_layouts=shard(1)),
        "feed_forward_norm": lib.SequenceParallel(),
        "feed_forward": lib.PrepareModuleInput(input_layouts=(shard(1),), desired_input_layouts=(replicate(),)),
        "feed_forward.gate": lib.ColwiseParallel(),
        "feed_forward.up": lib.ColwiseParallel(),
        "feed_forward.down": lib.RowwiseParallel(output_layouts=shard(1)),
    }
    return plan | {f"blocks.*.{name}": style for name, style in block.items()}


Step = Callable[[], float]


class OneLayerModel(nn.Module):
    """A feed-forward layer or a block between a cheap embedding and a cheap loss, so that the layer dominates the time."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config, block: bool) -> None:
        super().__init__()
        whole = GPT(config)
        self.part = Block(config) if block else FeedForward(config)
        self.register_buffer("cos", whole.cos)
        self.register_buffer("sin", whole.sin)
        self.register_buffer("table", whole.embedding.weight.detach())

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(tokens, self.table)
        return self.part(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]]) if isinstance(self.part, Block) else self.part(x)


class FeedForwardStack(nn.Module):
    """Model of feed-forward layers and norms, with many parameters of different sizes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        layers = (nn.Sequential(nn.LayerNorm(config.width), FeedForward(config)) for _ in range(2 * config.layers))
        self.layers = nn.Sequential(*layers)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))


def mean_of_squares(out: Any, targets: Any) -> Any:
    return (out**2).mean()


def make_one_layer_plan(plan: dict[str, Any], lib: Any, shard: Any, replicate: Any, block: bool) -> dict[str, Any]:
    """Return the plan of one feed-forward layer or one block, with replicated inputs and outputs."""
    if not block:
        return {"gate": lib.ColwiseParallel(), "up": lib.ColwiseParallel(), "down": lib.RowwiseParallel()}
    inner = {name.removeprefix("blocks.*."): style for name, style in plan.items() if name.startswith("blocks.*.")}
    inner[""] = lib.PrepareModuleInputOutput(
        input_layouts=(replicate(), None, None),
        desired_input_layouts=(shard(1), None, None),
        use_local_input=True,  # as the plan of the whole model has it: what is between the styled modules is local
        output_layouts=shard(1),
        desired_output_layouts=replicate(),
    )
    return inner


def make_captured_step(case: str, model: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    import dtensor as dt

    return make_dtensor_step(case, model, tokens, targets, dt.capture)


def make_dtensor_step(
    case: str, model: nn.Module, tokens: Tensor, targets: Tensor, around: Callable[[Any], Any] = lambda step: step
) -> Step:
    """Parallelize the model of a case with ``dtensor`` and return its training step."""
    import dtensor as dt
    from dtensor import parallel

    shape = CASES[case][1]
    mesh = dt.init_device_mesh(tokens.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    if case.startswith(PARTS):
        plan = make_one_layer_plan(
            make_tensor_parallel_plan(parallel, dt.Shard, dt.Replicate), parallel, dt.Shard, dt.Replicate, "block" in case
        )
        parallel.parallelize_module(model.part, mesh["tp"], plan)
        return make_step(model, tokens, targets, mean_of_squares, around=around)
    if "dtensors" in case:
        whole, cut = dt.distribute_module(model, mesh["dp"]), dt.DTensor.from_local(tokens, mesh["dp"], [dt.Shard(0)])
        return make_step(whole, cut, targets, mean_of_squares, around=around)
    if "tp" in shape:
        parallel.parallelize_module(model, mesh["tp"], make_tensor_parallel_plan(parallel, dt.Shard, dt.Replicate))
        labels: Any = dt.DTensor.from_local(targets, mesh["tp"], [dt.Replicate()])
    else:
        labels = targets
    if "fsdp" in case:
        for block in model.blocks:
            parallel.fully_shard(block, mesh=mesh["dp"])
        parallel.fully_shard(model, mesh=mesh["dp"])
    elif "hsdp" in case:
        for block in model.blocks:
            parallel.fully_shard(block, mesh=mesh)
        parallel.fully_shard(model, mesh=mesh)
    else:
        parallel.replicate(model, mesh["dp"]) if "dp" in shape else None
    if "zero" in case:
        zero: Any = functools.partial(parallel.ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, **ADAMW)
        return make_step(model, tokens, labels, optimizer=zero, around=around)
    return make_step(model, tokens, labels, around=around)


def make_peer_step(case: str, model: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    """Parallelize the model of a case with PyTorch's DTensor, FSDP2, DDP or ZeRO and return its training step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, parallel

    shape = CASES[case][1]
    mesh = init_device_mesh(tokens.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    if case.startswith(PARTS):
        plan = make_one_layer_plan(
            make_tensor_parallel_plan(parallel, Shard, Replicate), parallel, Shard, Replicate, "block" in case
        )
        whole = plan.pop("", None)  # it has no name for the module itself
        parallel.parallelize_module(model.part, mesh["tp"], plan)
        if whole is not None:
            parallel.parallelize_module(model.part, mesh["tp"], whole)
        return make_step(model, tokens, targets, mean_of_squares)
    if "dtensors" in case:
        cut = DTensor.from_local(tokens, mesh["dp"], [Shard(0)])
        return make_step(distribute_module(model, mesh["dp"]), cut, targets, mean_of_squares)
    if "tp" in shape:
        parallel.parallelize_module(model, mesh["tp"], make_tensor_parallel_plan(parallel, Shard, Replicate))
    if "fsdp" in case:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif "hsdp" in case:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif "dp" in shape:
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    if "zero" in case:
        return make_step(model, tokens, targets, optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, **ADAMW))
    if "tp" not in shape:
        return make_step(model, tokens, targets)

    inner = make_step(model, tokens, targets)

    def step() -> float:
        with parallel.loss_parallel():
            return inner()

    return step


def make_hand_written_step(case: str, model: nn.Module, tokens: Tensor, targets: Tensor) -> Step:
    """Return the training step of a case by Megatron's sharding or by averaging all gradients in one all-reduce."""
    from measuring import megatron_gpt

    shape = CASES[case][1]
    if case.startswith(PARTS):
        return make_step(megatron_gpt.split_part(model, dist.group.WORLD), tokens, targets, mean_of_squares)
    if case.startswith("tp"):
        return make_step(
            megatron_gpt.split_model(model, dist.group.WORLD),
            tokens,
            targets,
            megatron_gpt.make_vocabulary_loss(dist.group.WORLD),
        )
    if "tp" in shape:  # the data-parallel program, each group of two computing the same
        return make_hand_written_step("ddp4", model, tokens, targets)
    parameters = list(model.parameters())

    def average() -> None:
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad.copy_(part.view_as(p))

    return make_step(model, tokens, targets, mean_of_squares if "dtensors" in case else loss_of, after_backward=average)


def make_step(
    model: nn.Module,
    tokens: Tensor,
    targets: Any,
    loss_fn: Callable[[Any, Any], Any] = loss_of,
    after_backward: Callable[[], None] = lambda: None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, **ADAMW),
    around: Callable[[Any], Any] = lambda step: step,
) -> Step:
    """Return a function that runs one training step and returns the loss; ``around`` may capture the step."""
    stepping = optimizer(model.parameters())

    def train() -> Any:
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        after_backward()
        stepping.step()
        stepping.zero_grad()
        return loss.detach()

    run = around(train)

    def step() -> float:
        local = run()
        return float(local.full_tensor() if hasattr(local, "full_tensor") else local)

    return step


def build_model(case: str, config: Config) -> nn.Module:
    if "dtensors" in case:
        return FeedForwardStack(config)
    return OneLayerModel(config, "block" in case) if case.startswith(PARTS) else GPT(config)


# --- measuring -----------------------------------------------------------------------------------------------------------
def measure_rank(rank: int, case: str, sides: tuple[str, ...], size: str, rounds: int, folder: str) -> None:
    """Build the step of each side on one gloo rank and time them in turn; the first rank writes the results to ``folder``."""
    ranks, shape = CASES[case]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = make_config(size)
    dp_rank = 0 if set(shape) == {"tp"} else rank // shape.get("tp", 1)
    batch = torch.randint(config.vocabulary, (BATCH, config.context + 1), generator=torch.Generator().manual_seed(dp_rank))
    steps: dict[str, Step] = {}
    for side in sides:
        torch.manual_seed(0)
        build = {
            "ours": make_dtensor_step,
            "peer": make_peer_step,
            "by hand": make_hand_written_step,
            "captured": make_captured_step,
        }[side]
        steps[side] = build(case, build_model(case, config), batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
    losses = {side: [step() for _ in range(3)] for side, step in steps.items()}
    wall: dict[str, list[float]] = {side: [] for side in sides}
    host: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    for k in range(rounds):
        for side in sides[k % len(sides) :] + sides[: k % len(sides)]:
            dist.barrier()
            thread, process, now = time.thread_time(), time.process_time(), time.perf_counter()
            steps[side]()
            host[side].append(time.thread_time() - thread)
            cpu[side].append(time.process_time() - process)
            took = torch.tensor(time.perf_counter() - now, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            wall[side].append(took.item())
    sent = count_communication(steps) if "ours" in sides else {}
    if rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = {
            side: {
                "ms": statistics.median(wall[side]) * 1e3 if rounds else math.nan,
                "host_ms": statistics.median(host[side]) * 1e3 if rounds else math.nan,
                "cpu_ms": statistics.median(cpu[side]) * 1e3 if rounds else math.nan,
                "losses": losses[side],
                "peak_mib": (peak - started) / 1024,
                **sent.get(side, {}),
            }
            for side in sides
        }
        Path(folder, "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def count_communication(steps: dict[str, Step]) -> dict[str, dict[str, Any]]:
    """Return the collectives and received bytes of one step of ``dtensor``; the other sides run a step too and return nothing."""
    from dtensor.debug import CommDebugMode

    with CommDebugMode() as comm:
        steps["ours"]()
    found = {"ours": {"collectives": comm.get_total_counts(), "bytes": sum(comm.get_comm_bytes().values())}}
    for side in steps:
        if side != "ours":
            steps[side]()
    return found


def measure_case(case: str, sides: tuple[str, ...], size: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_rank, (case, sides, size, rounds, folder), nprocs=CASES[case][0])
        return json.loads(Path(folder, "result.json").read_text())


def main() -> None:
    """Measure the chosen cases, time or memory, and print them as a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--captured", action="store_true", help="also ours, captured")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args()
    size, rounds = ("small", 5) if options.quick else ("medium", 15)
    sides = (*SIDES, "captured") if options.captured else SIDES
    results = {}
    for case in options.only:
        if options.memory:
            results[case] = {side: measure_case(case, (side,), size, 0)[side] for side in sides}
        else:
            results[case] = measure_case(case, sides, size, options.rounds or rounds)
        if not options.json:
            print_case(case, results[case], options.memory)
    if options.json:
        print(json.dumps(results))
    elif not options.memory:
        print_summary(results)


def print_case(case: str, found: dict[str, Any], memory: bool) -> None:
    """Print a line for each side of a case: its times relative to PyTorch, or its peak memory."""
    for side, row in found.items():
        if memory:
            print(f"{case:10} {side:8} peak {row['peak_mib']:7.1f} MiB", flush=True)
            continue
        relative = {key: row[key] / found["peer"][key] for key in ("ms", "cpu_ms")}
        sent = f"  {row['collectives']} collectives, {row['bytes'] / 2**20:.2f} MiB" if "collectives" in row else ""
        busy = f"cpu {row['cpu_ms']:7.1f} ms ({relative['cpu_ms']:.2f})  host {row['host_ms']:7.1f} ms"
        times = f"{row['ms']:8.1f} ms ({relative['ms']:.2f})  {busy}"
        print(f"{case:10} {side:8} {times}  loss {row['losses'][-1]:.5f}{sent}", flush=True)


def print_summary(results: dict[str, Any]) -> None:
    """Print the mean ratios to PyTorch's time by kind of parallelism."""
    for kind in ("tp", "ddp", "zero", "fsdp", "hsdp", "dtensors"):
        for key, what in (("ms", "time"), ("cpu_ms", "processor time")):
            ratios = [found["ours"][key] / found["peer"][key] for case, found in results.items() if case.startswith(kind)]
            if ratios:
                mean = timing.geometric_mean(ratios)
                print(f"{kind}: {mean:.2f} of the peer's {what} (geometric mean of {len(ratios)})")


if __name__ == "__main__":
    main()
