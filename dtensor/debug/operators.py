"""Every operator that runs while somebody records: what it is called on, its FLOPs and its time, on each rank.

A dispatch mode sees them below autograd. What it sees it runs as it is: distributed ones as torch would, local ones by going on.
Planning, which runs operators without data, is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..base.group_by import by_key
from ..base.tensor_tree import tensors
from ..base.torch_internals import FakeTensor, OpOverload, TorchDispatchMode, graph_task, has_kernel
from ..base.tracing import under_way
from ..base.user_frames import Place
from ..comm import events
from ..cost.device import DEVICES, STANDS_FOR, Device
from ..cost.link import device_of
from ..dispatch.comm_report import Cause
from ..mesh.current_rank import RUNNING
from ..mesh.device_mesh import DeviceMesh
from ..ranks.per_rank import PerRank
from ..rules.op_traits import facts_of, shows_memory
from ..tensor.dtensor import DTensor
from .memory_tracker import ACTIVATIONS, BUFFERS, Birth, Holdings

_ATTENTION = "_scaled_dot_product_flash_attention"
_COUNTED_AS = {
    getattr(torch.ops.aten, f"{_ATTENTION}_for_cpu{way}"): getattr(torch.ops.aten, _ATTENTION + way) for way in ("", "_backward")
}
_ASIDE = ("profiler", "prim")  # namespaces of operators that compute nothing
Origin = Callable[[], tuple[Place, str, str]]  # the user's line, the phase, the module


@dataclass(slots=True, eq=False)
class LocalCall:
    """One operator on one rank's tensors.

    Attributes:
        rank: whose; None where this process is one rank.
        start, end: nanoseconds of ``time.perf_counter_ns``.
        flops: as torch's ``FlopCounterMode`` counts them, which knows no attention of CPUs: that is counted alike.
        bytes: read and written.
        pace: the rate of its products, over that of large matrix products.
        reads, writes: of each tensor with memory of its own, the number of that memory among ``Holdings.stores``, and bytes.
    """

    rank: int | None
    operator: str
    start: int
    end: int
    flops: int
    bytes: int
    dtype: torch.dtype
    pace: float = 1.0
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()

    def seconds(self, device: Device) -> float:
        """Estimated on a device."""
        return device.seconds(self.flops / self.pace, self.bytes, self.dtype)


@dataclass(slots=True, eq=False)
class Operation:
    """One operator of the program, with the local operators that it runs on each rank.

    Attributes:
        operator: ``"aten::mm"``.
        operands, results: dtype, global shape and placements; of plain tensors dtype and shape.
        place, phase, module: as of a :class:`.program_recorder.Movement`.
    """

    operator: str
    operands: tuple[str, ...]
    place: Place
    phase: str
    module: str
    mesh: DeviceMesh | None
    results: tuple[str, ...] = ()
    calls: list[LocalCall] = field(default_factory=list)

    def by_rank(self) -> dict[int | None, list[LocalCall]]:
        return by_key((call.rank, call) for call in self.calls)

    @property
    def flops(self) -> int:
        """Of one rank, the most over ranks."""
        return max((sum(call.flops for call in calls) for calls in self.by_rank().values()), default=0)

    @property
    def measured(self) -> float:
        """Seconds that the slowest rank took on the host, one operator after the other."""
        return max((sum(call.end - call.start for call in calls) for calls in self.by_rank().values()), default=0) / 1e9

    @property
    def seconds(self) -> float:
        """Estimated for the slowest rank, by the profile of the machine."""
        return max((sum(map(self.estimated, calls)) for calls in self.by_rank().values()), default=0.0)

    def estimated(self, call: LocalCall) -> float:
        """Seconds of one of its calls."""
        return call.seconds(DEVICES[STANDS_FOR["cpu"]] if self.mesh is None else device_of(self.mesh))


class Operators(TorchDispatchMode):
    """Tells ``record`` of every operator of this thread and its backward passes.

    Attributes:
        records: whether one is wanted here.
        collectives: how many collectives are being issued or ended; their own operators are no operations.
        counts: whether what these allocate is held: in one process it only stands for what arrives.
    """

    supports_higher_order_operators = True
    looks_on = True

    def __init__(self, holdings: Holdings, asked: Origin, records: Callable[[], bool]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.holdings, self.asked, self.records = holdings, asked, records
        self.collectives, self.counts = 0, True
        self._running: list[Operation] = []
        self._in_backward = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        no_operator = not isinstance(func, OpOverload) or func.namespace in _ASIDE
        if no_operator or under_way() or FakeTensor in types or not self.records():
            return func(*args, **kwargs)
        kinds = [kind for kind in types if issubclass(kind, DTensor)]
        if kinds and all(issubclass(kind, (DTensor, PerRank)) for kind in types):  # the most derived one is asked, as torch does
            return self._distributed(max(kinds, key=lambda kind: len(kind.__mro__)), func, types, args, kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # it is asked itself, and its own calls come here
        if torch.is_inference_mode_enabled() and has_kernel(func.name(), "CompositeImplicitAutograd"):
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        return self._local(func, args, kwargs)

    # --- operators ------------------------------------------------------------------------------------------------------
    def _distributed(self, kind: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors((args, kwargs))
        for x in given:
            self.holdings.given(x)
        with self._begun(func, given) as operation, self:
            made = kind.__torch_dispatch__(func, types, args, kwargs)
        values = tensors(made)
        self.holdings.made(values, None, self._birth())
        return self._ended(operation, values, made)

    def _local(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors((args, kwargs))
        if func is torch.ops.aten.lift_fresh.default:  # made of Python numbers just now
            self.holdings.made(given, None, self._birth())
        rank = self._rank_of(given)
        operation = self._running[-1] if self._running else None
        own = operation is None and not self.collectives
        with self._begun(func, given) if own else nullcontext(operation) as operation:
            start = time.perf_counter_ns()
            made = func(*args, **kwargs)
            end = time.perf_counter_ns()
        values = tensors(made)
        self.holdings.resized()
        self.holdings.made(values, rank, self._birth(operation))
        if operation is not None and not self.collectives and not shows_memory(func):
            touches = facts_of(func).touches
            read, written = given if touches == "all" else [], values if touches != "nothing" else []
            reads, writes = self.holdings.touched(read), self.holdings.touched(written)
            nbytes = sum(x.numel() * x.element_size() for x in (*read, *written))
            dtype = (values or given)[0].dtype if values or given else torch.float32
            flops, pace = _flops(func, args, kwargs, made), _pace(func, args, kwargs)
            operation.calls.append(LocalCall(rank, func.name(), start, end, flops, nbytes, dtype, pace, reads, writes))
        return self._ended(operation, values, made) if own and operation is not None else made

    @contextmanager
    def _begun(self, func: Any, given: Sequence[Tensor]) -> Iterator[Operation]:
        """An operation, while it runs."""
        self._sweep()
        mesh = next((x._layout.mesh for x in given if isinstance(x, DTensor)), None)
        operation = Operation(func._schema.name, tuple(map(described, given)), *self.asked(), mesh)
        self._running.append(operation)
        try:
            yield operation
        finally:
            self._running.remove(operation)

    def _ended(self, operation: Operation, values: Sequence[Tensor], made: Any) -> Any:
        operation.results = tuple(map(described, values))
        if operation.calls and not self._running:
            self.operations.append(operation)
        elif self._running:
            self._running[-1].calls += operation.calls
        return made

    def _sweep(self) -> None:
        """After a backward pass, whose gradients are which."""
        in_backward = graph_task() != -1
        if self._in_backward and not in_backward:
            self.holdings.accumulated()
        self._in_backward = in_backward

    # --- memory ---------------------------------------------------------------------------------------------------------
    def _birth(self, operation: Operation | None = None) -> Birth:
        running = operation or (self._running[-1] if self._running else None)
        place, name = self.asked()[0] if running is None else running.place, "" if running is None else running.operator
        moving = self.collectives or any(not isinstance(cause, Cause) for cause in events.CAUSES.values())
        return Birth(place, name, BUFFERS if moving else ACTIVATIONS, self.counts)

    def _rank_of(self, given: Sequence[Tensor]) -> int | None:
        """Whose operands these are; of none the rank that a function runs for."""
        ranks = [self.holdings.given(x) for x in given]
        if RUNNING.at is not None and RUNNING.at[0].kind == "in_process":
            root, member = RUNNING.at
            return root.ranks[member]
        return next((rank for rank in ranks if rank is not None), None)


def described(x: Tensor) -> str:
    """How an operand looks and lies."""
    if isinstance(x, DTensor):
        return repr(x._layout)
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    packet = func._overloadpacket
    count = flop_registry.get(_COUNTED_AS.get(packet, packet))
    return 0 if count is None else int(count(*_with_every_head(func, args), **kwargs, out_val=made))


def _with_every_head(func: Any, args: tuple[Any, ...]) -> Sequence[Any]:
    """Arguments by which torch 2.11 counts attention: each head of the query has one of the keys and values, of which several may
    share one."""
    if not func.__name__.startswith("_scaled_dot_product"):
        return args
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    for name in {"key", "value"} & named.keys():
        batch, _, *rest = named[name].shape
        named[name] = (batch, named["query"].shape[1], *rest)
    return list(named.values())


def _pace(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Fused attention reaches about half of the rate of products (FlashAttention-2 on an H100), and a causal one, whose products
    are counted as if every row met every key, skips about half of them.
    """
    places = {argument.name: k for k, argument in enumerate(func._schema.arguments)}
    place = places.get("is_causal")
    if place is None:
        return 1.0
    return 1.0 if (args[place] if place < len(args) else kwargs.get("is_causal", False)) else 0.5
