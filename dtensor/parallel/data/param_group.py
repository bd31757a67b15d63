"""A flat group: parameters that one collective gathers, and whose gradients one collective reduces.

Rank r's row holds its block of every parameter, one behind the other, as bytes, so that dtypes may differ. Gathered rows are
copied into one buffer in which each parameter is whole; freeing it gives back the storage but keeps the tensors, so what autograd
saved of them is right again once the buffer is filled again in backward (Zhao et al., PyTorch FSDP, arXiv:2304.11277).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...base.recorder_hooks import ACTIVE, Between, current
from ...base.selective_checkpoint import hides_from_policies
from ...comm import Communicator, Pending, communicator_of, each_shard, expect_locals, shards_of
from ...comm.backend_base import Run
from ...comm.events import because
from ...dispatch.version_counters import Stamp, stamp
from ...errors import DTensorError, UnitError
from ...layout.layout import Layout
from ...layout.on_other_mesh import within
from ...mesh.device_mesh import DeviceMesh
from ...redistribute.flat_buffer import Rows
from ...tensor.dtensor import wrap
from ...tensor.views.block_owners import locals_of
from .all_gather_extensions import Extensions
from .custom_collectives import Settings, gather_rows, scatter_row
from .dp_modes import Axes
from .managed import Managed, is_extended
from .offload import Host
from .partial_reshard import Neighbours
from .policy import MixedPrecisionPolicy
from .unsharded_storage import Aliases, Lent, Memory, Whole

LATER = -1  # no pass of autograd's has this number
_ALIGNMENT = 16  # bytes: rows stand behind each other in a receive buffer and are read in the parameters' own dtypes


class Group:
    """Parameters gathered and reduced together.

    Attributes:
        managed: the parameters, wider dtypes first, so that every block is aligned.
        whole: what is gathered of them.
        borrows: the parameters are whole and in the right dtype as they are: nothing to gather or copy.
        live: uses whose backward has begun and still needs the gathered values, and the autograd pass that it is: a
            reentrant checkpoint runs passes of its own inside. LATER: it has ended and retained its graph.
        outstanding: recorded uses that gradients have not come of, since the last backward.
        placed: the values stand where the parameters do.
        settings: how its collectives run.
        neighbours: who keep parts between forward and backward instead of freeing all.
        held, scattered: gradients that wait to join those of a later pass: by parameter, not reduced; and by what was
            reduce-scattered together and how, to be summed over replicas.
        whose: its name in what ranks compare: blocks of a model have rows of one length, and would be taken for each other.
    """

    def __init__(self, managed: Sequence[Managed], axes: Axes, policy: MixedPrecisionPolicy, whose: str = "") -> None:
        self.whose = whose or f"unit {axes.mesh._root.next_unit(axes.mesh._dims)}"
        self.axes, self.policy, self.settings = axes, policy, Settings()
        self.managed: list[Managed] = []
        self.live, self.placed, self.outstanding = dict[Any, int](), False, 0
        self.neighbours: Neighbours | None = None
        self.held: dict[int, Any] = Between()
        self.scattered: dict[Any, Any] = Between()
        self.whole = Whole()
        self._rows: dict[int, Rows] = {}
        self._bound: dict[Any, Run] = {}
        expect_locals(axes.mesh)
        self.add(managed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        copied = [copy.deepcopy(m, memo) for m in self.managed]
        made = memo[id(self)] = Group(copied, self.axes, self.policy, self.whose)
        made.settings, made.neighbours = copy.copy(self.settings), self.neighbours
        return made

    def add(self, managed: Sequence[Managed]) -> None:
        """Take over more parameters."""
        self.managed = sorted([*self.managed, *managed], key=lambda m: -self.dtype_of(m).itemsize)
        for one in managed:
            one.owner = self
        self.forget()

    def give_up(self, one: Managed, axes: Axes) -> None:
        """Let a group over ``axes`` have a parameter of this one.

        Raises:
            UnitError: its parameters lie otherwise.
        """
        if axes != self.axes:
            raise UnitError(
                f"a parameter that two modules share is sharded over {self.axes.mesh!r} in the inner unit and "
                f"over {axes.mesh!r} in the outer one; use the same mesh and offload_policy for both"
            )
        self.managed.remove(one)
        one.owner = None
        self.forget()

    def forget(self) -> None:
        """Drop the buffer and what was computed from the list of parameters."""
        self.whole, self._rows, self._bound = Whole(seen=self.whole.seen), {}, {}
        self._sent_rows: dict[int, Rows] = {}
        self._sent: list[Any] = []  # what is gathered of them, where some say it themselves
        self.used: Any = None  # what was said last of the parameters' uses
        self._parts = Aliases()  # what rows are put together of
        self.dtypes = list(map(self.dtype_of, self.managed))
        self._extended = Extensions.of(self.managed, self.axes, self.policy, self.dtypes)
        whole = all(m.cut is None and dtype is m.stored.dtype for m, dtype in zip(self.managed, self.dtypes, strict=True))
        self.borrows = whole and self.axes.host is None and self._extended is None
        self._inside: dict[DeviceMesh | None, list[Layout | None]] = {}
        self._owners: dict[DeviceMesh | None, list[int]] = {}

    # --- what the computation sees -------------------------------------------------------------------------------
    def dtype_of(self, m: Managed) -> torch.dtype:
        """The dtype that a parameter is gathered in."""
        wanted = self.policy.param_dtype
        return wanted if wanted is not None and m.stored.dtype.is_floating_point else m.stored.dtype

    def layout_inside(self, m: Managed, distributed: DeviceMesh | None) -> Layout | None:
        """A parameter's layout while the computation sees it, with a batch on a mesh or each rank's; None: a plain tensor."""
        layout = m.inside if distributed is None else m.compute if m.inside is not None else within(m.compute, distributed)
        return None if layout is None else layout.replace(dtype=self.dtype_of(m), stride=None)

    def values(self, distributed: DeviceMesh | None) -> list[Tensor]:
        """The gathered parameters as flat outputs: one DTensor, or one plain tensor per member held here, for each."""
        flat: list[Tensor] = []
        for full, layout in zip(self.whole.full, self._layouts_inside(distributed), strict=True):
            if layout is not None:
                dtype = shards_of(full)[0].dtype  # an extension may have made it another one
                alias = each_shard(lambda shard: shard.data, full)  # no view: its own version counter
                flat.append(wrap(alias, layout if dtype is layout.dtype else layout.replace(dtype=dtype)))
            else:
                flat.extend([shard.data for shard in shards_of(full)])
        return flat

    def _layouts_inside(self, distributed: DeviceMesh | None) -> list[Layout | None]:
        """Per parameter its layout while the computation sees it; None: a plain tensor."""
        found = self._inside.get(distributed)
        if found is None:
            found = self._inside[distributed] = [self.layout_inside(m, distributed) for m in self.managed]
        return found

    def owners(self, distributed: DeviceMesh | None) -> list[int]:
        """Which parameter each flat output belongs to."""
        found = self._owners.get(distributed)
        if found is None:
            outputs = [self.pieces if layout is None else 1 for layout in self._layouts_inside(distributed)]
            found = self._owners[distributed] = [i for i, count in enumerate(outputs) for _ in range(count)]
        return found

    def regrouped(self, flat: Sequence[Tensor], distributed: DeviceMesh | None) -> list[Any]:
        """Flat outputs, one item per parameter again."""
        if not self.comm.holds_all:
            return list(flat)
        items, layouts = iter(flat), self._layouts_inside(distributed)
        return [self.comm.local([next(items) for _ in range(self.pieces)]) if x is None else next(items) for x in layouts]

    def put_parameters(self) -> None:
        """The sharded parameters where the modules have gathered ones."""
        if self.placed:
            for m in self.managed:
                m.take_back()
            self.placed = False

    # --- gather and free -----------------------------------------------------------------------------------------
    @property
    def comm(self) -> Communicator:
        return communicator_of(self.axes.mesh)

    @property
    def pieces(self) -> int:
        """How many members' tensors this process holds."""
        return max(1, len(self.comm.held))

    def stamp(self) -> Stamp:
        """Changes whenever a parameter's value does."""
        return stamp(*[m.parameter for m in self.managed])

    @hides_from_policies
    def start_gather(self, now: Stamp | None = None) -> None:
        """Issue the all-gather, unless what is gathered is still right. ``now``: the stamp, where somebody looked already."""
        if not self.managed:
            return
        if ACTIVE and (recorder := current()) is not None:
            recorder.apart(self, {"whole": Whole()})
        now = self._looked_up() if now is None else now
        if (self.whole.gathered or self.whole.pending is not None) and self.whole.seen == now:
            return
        if self.whole.seen != now:
            self.whole.lent.away()  # for good: other values come to their memory
            self.whole.lent, self.whole.recorded = Lent(), False
            if Extensions.among(self.managed) is (self._extended is None):  # locals may be given the methods, or replaced
                self.forget()
            self.whole.kept = None
            self.live = {use: began for use, began in self.live.items() if began != LATER}  # backward of old values is refused
        self.whole.seen, self.whole.gathered, self.whole.pending = now, False, None
        locals_ = [m.parameter._local for m in self.managed]  # type: ignore[attr-defined]  # DTensors
        if self.borrows:
            self.whole.full, self.whole.gathered = locals_, True
        elif self.whole.kept is not None:
            neighbours, parts = self.whole.kept
            sizes = [buffer.numel() for buffer in shards_of(self.whole.buffer)]
            size_of = sizes.__getitem__ if len(sizes) > 1 else lambda member: sizes[0]
            self.whole.pending = self._bound_to(neighbours, lambda: neighbours.gathering(size_of))(parts)
        else:
            self.whole.pending = self._gather(locals_, now)

    def _gather(self, locals_: list[Any], now: Stamp) -> Pending[Any]:
        device, host = self.axes.mesh.device_type, self.axes.host
        join: Callable[[list[Tensor]], Tensor] = torch.cat if host is None else host.joined
        if self._extended is not None:
            there = locals_ if host is None else [self._sent_there(x, host) for x in locals_]
            self._sent, join = self._extended.inputs(there), torch.cat
        if not self.axes.shard:
            return Pending.of(None)
        make = functools.partial(self.comm.map, lambda at, *own: self._sending(at).parts_of(own), *(self._sent or locals_))
        parts = make() if self._sent else self._parts.of(locals_, now, make)
        row = self.comm.map(lambda member, *own: self._sending(member).row(own, device, join), *parts)
        if host is not None:
            row = self.comm.map(lambda _, x: x.to(device, non_blocking=True), row)
        return self._bound_to(self.settings.gathers, self._gathering)(row)

    def _gathering(self) -> Run:
        """What makes this member's row those of all."""
        by, seen = self.settings.gathers, self._sending(self.comm.held[0]).seen
        if by is not None:
            return functools.partial(gather_rows, self.axes, by, lambda member: self._sending(member).lengths)
        return self.comm.bind_gather(self.axes.shard, lambda member: self._sending(member).lengths, seen, self.whose)

    def scattering(self, chosen: Sequence[int], dtype: torch.dtype, op: str) -> Run:
        """What reduces gradients of the chosen parameters, and a flag for each, to this member's part."""
        by, comm = self.settings.scatters, self.settings.scatter_comm or self.comm

        def lengths_of(member: int) -> list[int]:
            return self.rows(member).parts(chosen, len(chosen))

        def bind() -> Run:
            if by is not None:
                return functools.partial(scatter_row, self.axes, by, op, lengths_of)
            return comm.bind_scatter(self.axes.scattered, lengths_of, op, dtype, self.whose)

        return self._bound_to((tuple(chosen), dtype, op, by, comm), bind)

    def _bound_to(self, key: Any, bind: Callable[[], Run]) -> Run:
        found = self._bound.get(key)
        if found is None:
            found = self._bound[key] = bind()
        return found

    @hides_from_policies
    @functools.partial(because, "gather parameters")
    def gather(self, now: Stamp | None = None) -> None:
        """The parameters, whole, in the buffer; as :meth:`start_gather`."""
        self.start_gather(now)
        if self.whole.pending is None:
            return
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():  # for passes that may train
            rows = self.whole.pending.wait()
            self._allocate()
            if self.whole.kept is not None:
                self.whole.kept[0].fill(rows, self.whole.buffer)
            else:
                locals_ = self._sent or [self._beside(m) for m in self.managed]
                self.comm.map(lambda member, *a: self._sending(member).unpack(*a), rows, locals_, self.whole.targets)
            if self._extended is not None:
                locals_ = [m.parameter._local for m in self.managed]  # type: ignore[attr-defined]  # DTensors
                self.whole.full = self._extended.wholes(locals_, self.whole.views)
                self.whole.memory.add(self._extended.inner)
        self.whole.pending, self.whole.kept, self.whole.gathered, self._sent = None, None, True, []
        self.whole.lent.back()

    def _beside(self, m: Managed) -> Any:
        """A parameter's local where it is copied from, if it is whole: on the device."""
        local, host = m.parameter._local, self.axes.host  # type: ignore[attr-defined]  # a DTensor
        return local if host is None or m.cut is not None else self._sent_there(local, host)

    def _sent_there(self, local: Any, host: Host) -> Any:
        device = self.axes.mesh.device_type
        return self.comm.map(lambda _, x: x.to(device, non_blocking=True) if is_extended(x) else host.sent(x, device), local)

    def _allocate(self) -> None:
        if self.whole.buffer is None:
            made = self.comm.map(lambda member: self._sending(member).buffer(self.axes.mesh.device_type))
            self.whole.buffer, self.whole.full = made[0], list(made[1:])
            self.whole.views = self.whole.full
            # writing through .data leaves the version counters alone that autograd checks its saved tensors by
            targets = self.comm.map(lambda at, full: self._sending(at).targets([x.data for x in full]), self.whole.full)
            self.whole.targets = targets
            self.whole.memory = Memory(shards_of(self.whole.buffer))
            self.whole.memory.note_own_uses()
        self.whole.memory.take()

    def keep_part(self) -> None:
        """Give the gathered values' memory back but for this rank's part, from which neighbours make them whole again."""
        if self.neighbours is not None and self.whole.gathered and not self.borrows:
            kept = self.neighbours, self.neighbours.keep(self.whole.buffer)
            self.free()
            self.whole.kept = kept

    @hides_from_policies
    def free(self) -> None:
        """Give the gathered values' memory back."""
        self.whole.kept = None
        if self.whole.pending is not None:
            self.whole.pending.wait()  # all ranks drop it at the same point
            self.whole.pending = None
        if self.whole.gathered and not self.borrows:
            if self.is_used_by_program():
                self.whole.buffer = None  # the program's tensors keep the old memory
                self._allocate()
            self.whole.memory.give_back()
            self.whole.lent.away()
        self.whole.gathered = False

    def is_used_by_program(self) -> bool:
        """Return True if the program has tensors in the gathered values' memory, and no graph has any.

        To read them after the memory was given back would end the process. What a graph has saved is gathered again in backward.
        Tensors of an extension or of a recorder are not counted: they are not the program's.
        """
        if self.whole.recorded or self.borrows or not self.whole.gathered or self._extended is not None or ACTIVE:
            return False
        return self.whole.memory.has_other_uses()

    def check_not_registered(self, whole: list[Any], memory: Memory) -> None:
        """Raise UnitError if a module of the group has registered one of the gathered values, or a view of one, in its forward.

        ``whole``, ``memory``: the values, and their memory, which was left to the program.
        """
        modules = dict.fromkeys(module for m in self.managed for module, _ in m.places)
        for m, value in zip(self.managed, whole, strict=True):
            inside = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in shards_of(value)]
            for module in modules:
                for name, x in [*module._parameters.items(), *module._buffers.items()]:
                    pieces = [] if x is None else locals_of(x)
                    if any(piece in memory and piece.data_ptr() in at for piece, at in zip(pieces, inside, strict=False)):
                        raise UnitError(
                            f"{type(module).__name__} registered {name!r} in its forward, which is {m.described()}, gathered, or "
                            "a view of it. The optimizer does not update that: it would keep the values of this forward. Write "
                            f"self.{name} = self.{m.places[0][1]}.clone() for a copy, or tie both before fully_shard or replicate"
                        )

    def _sending(self, member: int) -> Rows:
        """Where what is gathered stands, as one member sees it."""
        if self._extended is None:
            return self.rows(member)
        if member not in self._sent_rows:
            self._sent_rows[member] = self._extended.rows(member, _ALIGNMENT)
        return self._sent_rows[member]

    def rows(self, member: int) -> Rows:
        """Where the blocks stand, as one member sees it."""
        if member not in self._rows:
            group = self.axes.mesh.members_of(self.axes.shard, member)
            pairs = [(m.stored, m.compute) for m in self.managed]
            cut = [m.cut is not None for m in self.managed]
            self._rows[member] = Rows.of(pairs, self.dtypes, cut, member, group, _ALIGNMENT)
        return self._rows[member]

    def _looked_up(self) -> Stamp:
        if sum(map(Managed.refresh, self.managed)):
            self.used = None
        return self.stamp()

    def check_unchanged(self, stamp: Stamp | None) -> Stamp:
        """The stamp: backward needs the values that forward saw.

        Raises:
            DTensorError: a parameter was written to in between.
        """
        now = self._looked_up()
        if stamp != now:
            raise DTensorError(
                "backward needs the parameters of forward, but one was written to in between (by an optimizer "
                "step?), or replaced (by torch.func.functional_call?). Call backward() before step(), or "
                "recompute the forward pass"
            )
        return now
