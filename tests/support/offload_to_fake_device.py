"""Offload to a fake device: check the devices of offloaded parameters and gradients, and which copies between devices may block.

    python tests/support/offload_to_fake_device.py

A separate program, like ``rules_on_fake_device.py``. Backward is not run, since errors of torch's engine on such a device end the
process; the gradients to reduce are made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import dtensor as dt
from dtensor.parallel import CPUOffloadPolicy, fully_shard, materialize, replicate
from dtensor.parallel.data.units.gradients.grad_reduction import SendBufferPool, start_reductions
from dtensor.parallel.data.units.unit import unit_of

DEVICE = "pretended"


class DeviceCopyRecorder(TorchDispatchMode):
    """Dispatch mode that records copies between devices as (source device type, target device type, non_blocking)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str, bool]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; if it copies between devices, record the devices and ``non_blocking``."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            source, target = args[-1 if name == "copy_" and len(args) == 2 else 0], result
            if name == "copy_":
                target, source = args[0], args[1]
            if source.device.type != target.device.type:
                free = bool((kwargs or {}).get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False))
                self.seen.add((source.device.type, target.device.type, free))
        elif name == "_foreach_copy_":
            for target, source in zip(args[0], args[1], strict=True):
                assert target.device == source.device
        return result


class FakeEvent:
    """Replacement of ``torch.Event``, which the fake device lacks; counts calls of ``synchronize``."""

    waited = 0

    def __init__(self, device: Any) -> None:
        assert torch.device(device).type == DEVICE

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        FakeEvent.waited += 1


def run_offloaded_unit(make: Any, pin: bool, meta: bool) -> tuple[set[tuple[str, str, bool]], int]:
    """Run forward and one gradient reduction of an offloaded unit; return the recorded copies and how many events were waited
    for.
    """
    mesh = dt.init_device_mesh(DEVICE, (2,))
    seen: list[str] = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.device.type)
            return super().forward(x)

    model = make(Seen(5, 3, device="meta" if meta else "cpu"), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    if meta:
        materialize(model)
    assert {shard.device.type for p in model.parameters() for shard in p._local.shards} == {"cpu"}
    FakeEvent.waited = 0
    with DeviceCopyRecorder() as copies, torch.no_grad():
        model(dt.per_rank([torch.ones(2, 5, device=DEVICE)] * 2))
        assert seen == [DEVICE]
        (group,) = unit_of(model).groups
        column = {
            k: tuple(torch.ones(m.unsharded_layout.shape, device=DEVICE) for _ in range(2))
            for k, m in enumerate(group.fsdp_params)
        }
        (reduction,) = start_reductions(group, column, True, SendBufferPool())
        reduction.finish_first_round()
        early = FakeEvent.waited
        assert all(p.grad is None for p in model.parameters())
        reduction.deliver()
    assert not early
    assert {shard.device.type for p in model.parameters() for shard in p.grad._local.shards} == {"cpu"}
    return copies.seen, FakeEvent.waited


def main() -> None:
    """Assert that copies block only without pinned memory, for both data-parallel modes and for models that start on meta."""
    _setup_privateuseone_for_python_backend(DEVICE)
    torch.Event = FakeEvent
    with FakeTensorMode(allow_non_fake_inputs=True):
        for make in (fully_shard, replicate):
            for meta in (False, True):
                moved, waits = run_offloaded_unit(make, True, meta)
                assert moved == {("cpu", DEVICE, True), (DEVICE, "cpu", True)}, moved
                assert waits == 2, waits  # a copy for each member
                moved, waits = run_offloaded_unit(make, False, meta)
                assert (DEVICE, "cpu", True) not in moved, moved
                assert (DEVICE, "cpu", False) in moved, moved
                assert not waits


if __name__ == "__main__":
    main()
    print("all as it should be")
