"""Elements that operands name by index, where both the elements and the names are cut: what one rank asks of another, or has for
it, goes there and nothing else travels. Nothing at all does where each rank names its own.

All ranks know all names, which are whole on each (a tensor remembers that form, so that the next call by the same names moves
none): each knows how much goes from whom to whom, and all raise or none. Where there are no values (a traced program, a dry run),
or a recording is to hold for others, whole blocks travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..base.recorder_hooks import ACTIVE
from ..base.tracing import under_way
from ..layout.layout import Layout
from ..ranks.per_rank import shards_of
from .kernel_context import At, KernelContext, integers_on
from .sharded_index_local import Address, bound, on_block, positions_of, with_room, without_room


def read_fetched(address: Address, op: Any, at: KernelContext, *args: Any, **named: Any) -> Any:
    """The elements that a rank's part of the names means, from who has them."""
    made, block = at.results[0], args[0]
    assert made is not None
    names = _Names(address, op, at, made, names_lead(address, op, at), args)
    lead = names.lead

    def read(here: At, block: Tensor, asked: list[Tensor], whole: bool = False) -> Tensor:
        return names.run(block, names.within(here, asked, whole), args[1:], named)

    if names.unseen:
        parts = at.all_gather(block, at.operands[0].shape_of)
        joint = at.map(lambda here, *parts: torch.cat(parts, names.dim), *parts)
        return at.map(lambda here, x, seen: names.shaped(here, read(here, x, names.of(here, seen), True)), joint, names.seen)
    if names.all_own:
        return at.map(lambda here, x, seen: names.shaped(here, read(here, x, names.of(here, seen))), block, names.seen)

    def picked(k: int, here: At, block: Tensor, seen: list[Tensor]) -> Tensor:
        asked = names.of(here, seen, k)
        return read(here, block, [each[asked[0] == here.index] for each in asked])

    def joined(here: At, parts: list[Tensor], seen: list[Tensor]) -> Tensor:
        owners, *_ = names.of(here, seen)
        return names.shaped(here, torch.cat(parts, lead).index_select(lead, owners.argsort(stable=True).argsort()))

    chunks = [at.map(partial(picked, k), block, names.seen) for k in range(len(at.sizes))]
    arrived = at.comm.all_to_all(chunks, at.mesh_dims, lambda giver, taker: names.shape_between(taker, giver, giver)).wait()
    return at.map(joined, arrived, names.seen)


def write_sent(address: Address, op: Any, at: KernelContext, *args: Any, **named: Any) -> Any:
    """What names mean of a block, written there: each rank gives what it has for others to them. Of an element that is named
    twice, in the order of the whole."""
    given, place = at.operands[-1], address.argument
    lead = names_lead(address, op, at)
    if address.form != "elements":  # where dims before it are broadcast
        lead += given.ndim - (at.operands[0].ndim - len(address.dims(at.call) or ()) + at.once(names_ndim))
    names = _Names(address, op, at, given, lead, args)
    listed = at.map(lambda here, source: names.listed(source, lead), args[place + 1])

    def write(here: At, block: Tensor, asked: list[Tensor], source: Tensor) -> Tensor:
        rest = [*args[1 : place + 1], source, *args[place + 2 :]]
        return names.run(block, names.within(here, asked), rest, named, writing=True)

    if names.unseen:
        parts = at.all_gather(listed, lambda member: names.shape_with(math.prod(names.held(member)), member))
        source = at.map(lambda here, *parts: torch.cat(parts, lead), *parts)
        return at.map(lambda here, x, seen, source: write(here, x, names.of_all(here, seen), source), args[0], names.seen, source)
    if names.all_own:
        return at.map(lambda here, x, seen, source: write(here, x, names.of(here, seen), source), args[0], names.seen, listed)

    def picked(k: int, here: At, source: Tensor, seen: list[Tensor]) -> Tensor:
        return source.index_select(lead, (names.of(here, seen)[0] == k).nonzero()[:, 0])

    def joined(here: At, block: Tensor, parts: list[Tensor], seen: list[Tensor]) -> Tensor:
        asked = names.of_all(here, seen)
        mine, source = [each[asked[0] == here.index] for each in asked], torch.cat(parts, lead)
        if not names.in_order:
            sort = mine[1].argsort()
            source, mine = source.index_select(lead, sort), [each[sort] for each in mine]
        return write(here, block, mine, source)

    chunks = [at.map(partial(picked, k), listed, names.seen) for k in range(len(at.sizes))]
    arrived = at.comm.all_to_all(chunks, at.mesh_dims, lambda giver, taker: names.shape_between(giver, taker, giver)).wait()
    return at.map(joined, args[0], arrived, names.seen)


def names_lead(address: Address, op: Any, at: KernelContext) -> int:
    """Where the dims of the names begin in what they name."""
    return 0 if address.form == "elements" else bound(address, op, at)[2]


def names_ndim(call: Any) -> int:
    """How many dims the indices have together."""
    return max(call.operands[i].ndim for i, name in enumerate(call.names) if name in ("index", "indices"))


class _Names:
    """What each group position names.

    Attributes:
        seen: on each rank, of each element that is named, of the rank's block of the other dims: which group position has it, its
            place among them, and by dim that is indexed a position.
        dim: the indexed dim that is cut.
        lead: where the dims of the names begin in ``layout``, of what is cut as they are; ndim: how many; first: the cut one.
        unseen: there are no values to look at, or others' may come.
        all_own: all name what they have.
        in_order: what comes from each group position comes after what comes from those before it.
    """

    def __init__(self, address: Address, op: Any, at: KernelContext, layout: Layout, lead: int, args: tuple[Any, ...]) -> None:
        self.address, self.at, self.layout, self.lead = address, at, layout, lead
        self.runs = bound(address, op, at)
        self.dims = self.runs[1]
        (factor,) = at.splits
        self.dim, self.ndim = int(factor[1:]), at.once(names_ndim)
        self.first = self.dim if address.form == "elements" else 0
        self.unseen = bool(ACTIVE) or under_way() or any(x.is_meta for x in shards_of(args[0]))
        self.ends = list(accumulate(at.sizes))
        starts = [span.start for span in self._spans(at.comm.held[0])]
        self.in_order = starts == sorted(starts)
        self.seen = at.map(self._seen, args[0], args[address.argument])
        if self.unseen:
            return
        counts = at.map(self._counts, self.seen)
        self._table = dict(zip(at.comm.held, [own.tolist() for own in shards_of(counts)], strict=True))
        tables = self._table.values()
        self.all_own = not any(n for table in tables for k, row in enumerate(table) for j, n in enumerate(row) if j != k)

    def _seen(self, here: At, block: Tensor, given: Any) -> list[Tensor]:
        offset, found = self.layout.local_offset(self.at.call.mesh.coordinates[here.member]), []
        for place in positions_of(self.address, given, [self.at.operands[0].shape[d] for d in self.dims], block.device):
            for d, size in enumerate(self.held(here.member)):
                if d != self.first and size != place.shape[d]:
                    place = place.narrow(d, offset[self.lead + d], size)
            found.append(self.listed(place))
        cut = found[self.dims.index(self.dim)]
        return [_owners(cut, self.ends), torch.arange(cut.shape[0], device=cut.device), *found]

    def held(self, member: int) -> tuple[int, ...]:
        """The sizes of a member's block along the dims of the names."""
        return tuple(self.layout.shape_of(member)[self.lead : self.lead + self.ndim])

    def listed(self, x: Tensor, lead: int = 0) -> Tensor:
        """The dims of names, which begin at ``lead``, as one: the one that is cut before the others."""
        x = x.movedim(lead + self.first, lead) if self.first else x
        return x.flatten(lead, lead + self.ndim - 1) if self.ndim > 1 else x

    def shaped(self, here: At, x: Tensor) -> Tensor:
        """What is listed of a member's block, as it is there."""
        if self.ndim == 1:
            return x
        first, *others = self.held(here.member)[self.first], *self._others(here.member)
        x = x.unflatten(self.lead, (first, *others))
        return x.movedim(self.lead, self.lead + self.first).contiguous() if self.first else x

    def _others(self, member: int) -> tuple[int, ...]:
        held = self.held(member)
        return (*held[: self.first], *held[self.first + 1 :])

    def _spans(self, member: int) -> list[range]:
        """By group position which of the elements it names."""
        key = "spans", member
        found: list[range] | None = self.at.known.get(key)
        if found is None:
            mesh, rows, d = self.at.call.mesh, math.prod(self._others(member)), self.lead + self.first
            found = self.at.known[key] = []
            for other in mesh.members_of(self.at.mesh_dims, member):
                coordinate = mesh.coordinates[other]
                start = self.layout.local_offset(coordinate)[d] * rows
                found.append(range(start, start + self.layout.local_shape(coordinate)[d] * rows))
        return found

    def of(self, here: At, each: list[Tensor], position: int | None = None) -> list[Tensor]:
        """The part of these that a group position names, or the rank itself."""
        span = self._spans(here.member)[here.index if position is None else position]
        return [x[span.start : span.stop] for x in each]

    def of_all(self, here: At, each: list[Tensor]) -> list[Tensor]:
        """Those that the group names, by group position."""
        spans = self._spans(here.member)
        return [torch.cat([x[span.start : span.stop] for span in spans]) for x in each]

    def within(self, here: At, asked: list[Tensor], whole: bool = False) -> list[Tensor]:
        """The same with positions in the rank's own block, or in the whole; of what it has not, behind its end."""
        places = dict(zip(self.dims, asked[2:], strict=True))
        if not whole:
            own = places[self.dim] - here.offset if here.offset else places[self.dim]
            places[self.dim] = torch.where(asked[0] == here.index, own, here.size) if self.unseen else own
        return [*asked[:2], *places.values()]

    def run(self, block: Tensor, asked: list[Tensor], rest: Sequence[Any], named: Any, writing: bool = False) -> Tensor:
        """What the operator gives of a block where these are its positions."""
        dropped = int(self.unseen) if writing else None
        if self.address.form != "elements":
            return on_block(self.runs, self.address, block, asked[2:], rest, named, dropped)
        moved = with_room(block, self.dims, dropped or 0).movedim(self.dim, 0)  # one dim for all: a row after the other
        rows, given = math.prod(moved.shape[1:]), list(rest)
        given[0], given[self.address.argument - 1] = 0, asked[2] * rows + asked[1].remainder(max(1, rows))
        made: Tensor = self.runs[0](moved.reshape(-1), *given, **named)
        return without_room(made.reshape(moved.shape).movedim(0, self.dim), block, self.dims).contiguous() if writing else made

    def _counts(self, here: At, seen: list[Tensor]) -> Tensor:
        count = len(self.at.sizes)
        return torch.stack([seen[0][span.start : span.stop].bincount(minlength=count) for span in self._spans(here.member)])

    def shape_with(self, count: int, member: int) -> tuple[int, ...]:
        """Of so many elements as a member holds those that are named."""
        shape = self.layout.shape_of(member)
        return (*shape[: self.lead], count, *shape[self.lead + self.ndim :])

    def shape_between(self, namer: int, owner: int, giver: int) -> tuple[int, ...]:
        """Of those that one member names and another has, as the giver of both holds them."""
        mesh = self.at.call.mesh
        k, j = (mesh.index_over(self.at.mesh_dims, mesh.coordinates[member]) for member in (namer, owner))
        known = self._table.get(giver) or next(iter(self._table.values()))  # where one rank's is here, its group is asked about
        return self.shape_with(known[k][j], giver)


def _owners(index: Tensor, ends: list[int]) -> Tensor:
    """Of positions along a dim whose blocks end there, which block each is in."""
    return torch.searchsorted(integers_on(index.device, ends), index, right=True)
