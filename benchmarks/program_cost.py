"""Program cost: bytes, matrix FLOPs and collectives of an unchanged model, compared with those of a hand-written program.

    python benchmarks/program_cost.py [--families llama,gpt2] [--layouts tp,fsdp,dp,tp_dp,styles,styles_sp] [--layers 2]
    python benchmarks/program_cost.py --families more    # ... those of costing/untuned_models.py
    python benchmarks/program_cost.py --dtype bfloat16
    python benchmarks/program_cost.py --ways eager,captured,planned      # also replayed, and by a plan of the whole program
    python benchmarks/program_cost.py --cluster          # two layers as large as Llama-70B's, on a dry run of 512 x 8 ranks
    python benchmarks/program_cost.py --xla [--jax-python /path/to/python]      # the same Llama by XLA's partitioner

Only parameters are placed, as ``FAMILIES`` says (``styles``: by a plan of ``parallelize_module``); then one forward and backward
runs with all ranks in this process. *Bytes* are those that one rank receives, relative to the hand-written program
(``costing/families.py`` has the formulas); *FLOPs* are those of the matrix products of all ranks together, relative to one
device; *collectives* are shown beside those of the hand-written program. *Way*: ``eager`` is the step as it runs, ``captured`` a
replay of ``dt.capture(step)``, ``planned`` one of ``dt.capture(step, plan="program")``.

Needs the extra ``hf``, ``planned`` also ``plan``.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from costing import xla
from costing.families import FAMILIES, USUAL, Family, Size, build_model, count_hand_written_cost
from costing.styles import PLANS
from costing.untuned_models import MORE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import dtensor as dt
from dtensor.parallel import parallelize_module

# --- counting --------------------------------------------------------------------------------------------------------------
aten = torch.ops.aten
FLOP_FORMULAS = flop_registry | {  # the CPU's attention, which torch leaves out, as the GPU's
    getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{way}"): flop_registry[
        getattr(aten, f"_scaled_dot_product_flash_attention{way}")
    ]
    for way in ("", "_backward")
}


def count_grouped_mm_flops(a: Any, b: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped matrix product. Each position of the grouped dim is in one group."""
    groups = out_val.shape[0] if a.ndim == b.ndim == 2 else 1
    return int(2 * a.shape[-1] * out_val.numel() // groups)


FLOP_FORMULAS[aten._grouped_mm] = count_grouped_mm_flops


class FlopCounter(TorchDispatchMode):
    """Dispatch mode that counts matrix FLOPs of local operations on tensors of one device type. Planning runs operators on the
    device "meta" to learn the shapes of results; with another device those are not counted.
    """

    looks_on = True  # nothing runs otherwise: captured steps are replayed

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.total = 0
        self.by: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and add its FLOPs; an operator without a formula is decomposed first if it can be."""
        if any(issubclass(kind, dt.DTensor) for kind in types):
            return NotImplemented
        if func.overloadpacket not in FLOP_FORMULAS and func._can_decompose():  # a kernel's matmul, which comes here whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        count = FLOP_FORMULAS.get(func.overloadpacket)
        if count is not None and get_first_tensor(out).device.type == self.device:
            found = count(*args, **(kwargs or {}), out_val=out)
            self.total += found
            self.by[str(func)] += found
        return out


def get_first_tensor(value: Any) -> torch.Tensor:
    """Return the first tensor of an operation's result."""
    return value if isinstance(value, torch.Tensor) else next(x for x in value if isinstance(x, torch.Tensor))


@dataclass
class Cost:
    """Costs of one step: bytes that a rank receives, FLOPs of all ranks, collectives by kind; and the loss."""

    nbytes: int
    flops: int
    collectives: Counter[str]
    loss: float

    @property
    def count(self) -> int:
        return sum(self.collectives.values())


def make_step(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], Any]:
    """Return a step of forward and backward. Gradients get the placements of their parameters, as an optimizer needs."""

    def step() -> Any:
        model.zero_grad()
        with dt.implicit_replication():
            loss = model(**inputs).loss
            loss.backward()
        return loss.detach()

    return step


def make_run(way: str, model: nn.Module, inputs: dict[str, Any]) -> Callable[[], Any]:
    """Return the eager step, or the function that replays its capture, after it was recorded."""
    step = make_step(model, inputs)
    if way == "eager":
        return step
    run = dt.capture(step, plan="program" if way == "planned" else None)
    while not run.cache_info().replayed:
        run()
    return run


def measure_step(step: Callable[[], Any], device: str = "cpu") -> Cost:
    """Run a step once and return its bytes, FLOPs, collectives and loss."""
    with dt.debug.CommDebugMode() as comm, FlopCounter(device) as flops:
        loss = step()
    value = loss.full_tensor() if isinstance(loss, dt.DTensor) else loss
    kinds = Counter(event.kind for event in comm.events)
    found = float("nan") if value.device.type == "meta" else float(value)
    return Cost(sum(event.bytes for event in comm.events), flops.total, kinds, found)


# --- layouts ---------------------------------------------------------------------------------------------------------------
def distribute_model(model: nn.Module, mesh: dt.DeviceMesh, placement_of: Callable[[str, nn.Parameter], Any]) -> nn.Module:
    """Replace parameters by DTensors with the placements of ``placement_of``, and its buffers by replicated DTensors."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, leaf = name.rpartition(".")
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(dt.distribute_tensor(parameter.detach(), mesh, placement_of(name, parameter)))
        setattr(model.get_submodule(owner), leaf, made[id(parameter)])
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, dt.distribute_tensor(buffer, mesh, [dt.Replicate()] * mesh.ndim))
    return model


def distribute_inputs(inputs: dict[str, torch.Tensor], mesh: dt.DeviceMesh, placements: Any) -> dict[str, Any]:
    return {name: dt.distribute_tensor(x.to(mesh.device_type), mesh, placements) for name, x in inputs.items()}


def prepare_model(
    layout: str, name: str, size: Size, mesh: dt.DeviceMesh | None = None
) -> tuple[nn.Module, dict[str, Any], tuple[int, ...]]:
    """Return a family's model with distributed parameters, its batch, and the sizes of the mesh dims."""
    family = FAMILIES[name]
    model, inputs = build_model(family, size), family.inputs(size)
    if layout == "tp_dp":
        mesh = mesh or dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = distribute_model(model, mesh, lambda name, p: [dt.Replicate(), family.place(name)])
        return model, distribute_inputs(inputs, mesh, [dt.Shard(0), dt.Replicate()]), mesh.shape
    mesh = mesh or dt.init_device_mesh("cpu", (4,))
    if layout in ("styles", "styles_sp"):
        return parallelize_module(model, mesh, PLANS[name, layout]()), inputs, mesh.shape
    placements: dict[str, Callable[[str, nn.Parameter], Any]] = {
        "tp": lambda name, p: [family.place(name)],
        "fsdp": lambda name, p: [dt.Shard(0)],
        "dp": lambda name, p: [dt.Replicate()],
    }
    cut = dt.Replicate() if layout == "tp" else dt.Shard(0)
    return distribute_model(model, mesh, placements[layout]), distribute_inputs(inputs, mesh, [cut]), mesh.shape


# --- rows of the table -----------------------------------------------------------------------------------------------------
def measure_row(name: str, layout: str, size: Size, one: Cost, kinds: bool, way: str) -> str:
    """Return a line of the table for one family, layout and way to run, relative to the hand-written program and one device."""
    model, inputs, ranks = prepare_model(layout, name, size)
    try:
        found = measure_step(make_run(way, model, inputs))
    except dt.errors.CaptureError as error:
        return f"{name:10} {layout:9} {way:9} is not captured: {str(error).partition(':')[2][:80]}"
    hand, count = count_hand_written_cost(layout, FAMILIES[name], build_model(FAMILIES[name], size), size, ranks)
    close = (1e-4 if size.dtype is torch.float32 else 2e-2) * abs(one.loss)
    wrong = "" if abs(found.loss - one.loss) < close else f"  WRONG: {one.loss}"
    return (
        f"{name:10} {layout:9} {way:9} {found.nbytes:12,} {found.nbytes / hand:9.2f} {found.flops / one.flops:15.2f} "
        f"{found.count:14} ({count:5})  {found.loss:.5f}{wrong} {dict(found.collectives) if kinds else ''}"
    )


CLUSTER = Size(2, 8192, 512, 4096, 128_256, (64, 8), 28_672, torch.bfloat16)  # a sequence of 4,096 tokens for each of 512


def measure_cluster(name: str, size: Size) -> str:
    """Return a line with the costs of layers as large as Llama-70B's in a dry run; FLOPs are one rank's, relative to its equal
    share.
    """
    mesh = dt.init_device_mesh("meta", (512, 8), mesh_dim_names=("dp", "tp"))
    family = FAMILIES[name]
    with torch.device("meta"):
        model, inputs, ranks = prepare_model("tp_dp", name, size, mesh)
        measure_step(step := make_step(model, inputs), "meta")  # plans are made, which asks operators without data too
        found = measure_step(step, "meta")
        part = replace(size, batch=size.batch // 512)
        one = measure_step(
            make_step(build_model(family, part), {key: x.to("meta") for key, x in family.inputs(part).items()}), "meta"
        )
        hand, count = count_hand_written_cost("tp_dp", family, build_model(family, size), size, ranks)
    return (
        f"{name:10} 512 x 8   {found.nbytes / 1e9:9.2f} GB {found.nbytes / hand:9.2f} {found.flops * 8 / one.flops:15.2f} "
        f"{found.count:14} ({count:5})  by hand {hand / 1e9:.2f} GB"
    )


def main() -> None:
    """Print the costs of all chosen families, layouts and ways to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(USUAL))
    parser.add_argument("--layouts", default="tp,fsdp,dp,tp_dp,styles,styles_sp")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kinds", action="store_true", help="collectives by kind")
    parser.add_argument("--ways", default="eager", help="any of eager,captured,planned")
    parser.add_argument("--cluster", action="store_true", help="one row: Llama-70B's layers on 4,096 ranks")
    parser.add_argument("--xla", action="store_true", help="also the same Llama in jax, divided by XLA's partitioner")
    parser.add_argument("--jax-python", default="", help="the interpreter that has jax; default this one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    head = f"{'model':10} {'layout':9} {'way':9} {'bytes':>12} {'over hand':>9} {'FLOPs over fair':>15}"
    print(head, f"{'collectives (by hand)':>22}  loss")
    if options.cluster:
        print(measure_cluster("llama", CLUSTER))
        return
    size = Size(options.layers, options.width, dtype=getattr(torch, options.dtype))
    FAMILIES.update(MORE)
    for name in MORE if options.families == "more" else options.families.split(","):
        family: Family = FAMILIES[name]
        one = measure_step(make_step(build_model(family, size), family.inputs(size)))
        for layout in options.layouts.split(","):
            if not layout.startswith("styles") or (name, layout) in PLANS:
                for way in options.ways.split(","):
                    print(measure_row(name, layout, size, one, options.kinds, way), flush=True)
    if options.xla:
        for line in xla.measure_layouts(size, options.layouts.split(","), options.jax_python):
            print(line)


if __name__ == "__main__":
    main()
