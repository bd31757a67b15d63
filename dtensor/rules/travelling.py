"""Elements that operands name by index, where both the elements and the names are cut: what one rank asks of another, or has for
it, goes there and nothing else travels. Nothing at all does where each rank names its own.

All ranks know all names, which are whole on each (a tensor remembers that form, so that the next call by the same names moves
none): each knows how much goes from whom to whom, and all raise or none. Where there are no values (a traced program, a dry run),
or a recording is to hold for others, whole blocks travel.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..base.recording import ACTIVE
from ..base.tracing import under_way
from ..layout.layout import Layout
from ..ranks.per_rank import shards_of
from .kernels import At, KernelContext
from .owned import Address, bound, named_in_whole, with_index, with_room, without_room, write_owned

Places = list[Tensor]  # by dim that is indexed a position for each element, in the order of the whole


def read_fetched(address: Address, op: Any, at: KernelContext, *args: Any, **named: Any) -> Any:
    """The elements that a rank's part of the names means, from who has them."""
    call, dims, lead = bound(address, op, at)
    made, block = at.results[0], args[0]
    assert made is not None
    names = _Names(address, at, dims, made, lead, args)

    def read(block: Tensor, places: Places) -> Tensor:
        given = with_index(address, args[1:], places, dims, block.ndim)
        found: Tensor = call(with_room(block, dims), *given, **named)
        return found

    def shaped(here: At, found: Tensor) -> Tensor:
        return found.unflatten(lead, made.shape_of(here.member)[lead : lead + names.ndim]) if names.ndim > 1 else found

    if names.unseen:
        parts = at.all_gather(block, at.operands[0].shape_of)
        whole = at.map(lambda here, *parts: torch.cat(parts, dims[names.which]), *parts)
        return at.map(lambda here, x, places: shaped(here, read(x, names.of(here, places))), whole, names.places)
    if names.all_own:
        own = lambda here, x, places: shaped(here, read(x, names.within(here, names.of(here, places))))  # noqa: E731
        return at.map(own, block, names.places)

    def picked(k: int, here: At, block: Tensor, places: Places, owners: Tensor) -> Tensor:
        asked = names.of(here, [owners, *places], k)
        return read(block, names.within(here, [place[asked[0] == here.index] for place in asked[1:]]))

    def joined(here: At, parts: list[Tensor], owners: Tensor) -> Tensor:
        (asked,) = names.of(here, [owners])
        return shaped(here, torch.cat(parts, lead).index_select(lead, asked.argsort(stable=True).argsort()))

    chunks = [at.map(partial(picked, k), block, names.places, names.owners) for k in range(len(at.sizes))]
    arrived = at.comm.all_to_all(chunks, at.mesh_dims, lambda giver, taker: names.shape_between(taker, giver, giver)).wait()
    return at.map(joined, arrived, names.owners)


def write_sent(address: Address, op: Any, at: KernelContext, *args: Any, **named: Any) -> Any:
    """What names mean of a block, written there: each rank gives what it has for others to them. Of an element that is named
    twice, in the order of the whole."""
    call, dims, lead = bound(address, op, at)
    given, place = at.operands[-1], address.argument + 1
    lead += given.ndim - _elements(at, dims)  # where dims before it are broadcast
    names = _Names(address, at, dims, given, lead, args)
    listed = at.map(lambda here, source: source.flatten(lead, lead + names.ndim - 1), args[place])

    def write(here: At, block: Tensor, places: Places, source: Tensor) -> Tensor:
        filled = with_index(address, args[1:], places, dims, block.ndim)
        filled[place - 1] = source
        made: Tensor = call(with_room(block, dims), *filled, **named)
        return without_room(made, block, dims)

    if names.unseen:
        parts = at.all_gather(listed, lambda member: names.shape_with(math.prod(names.made_in(member)), member))
        source = at.map(lambda here, *parts: torch.cat(parts, lead), *parts)
        places = at.map(lambda here, places: names.of_all(here, places), names.places)
        filled = with_index(address, args[1:], places, dims, at.operands[0].ndim)
        filled[place - 1] = source
        return write_owned(address, op, at, args[0], *filled, **named)
    if names.all_own:
        own = lambda here, x, places, source: write(here, x, names.within(here, names.of(here, places)), source)  # noqa: E731
        return at.map(own, args[0], names.places, listed)

    def picked(k: int, here: At, source: Tensor, owners: Tensor) -> Tensor:
        return source.index_select(lead, (names.of(here, [owners])[0] == k).nonzero()[:, 0])

    def joined(here: At, block: Tensor, parts: list[Tensor], places: Places, owners: Tensor) -> Tensor:
        starts = torch.arange(owners.shape[0], device=owners.device)
        asked = names.of_all(here, [owners, starts, *places])
        order, *mine = [each[asked[0] == here.index] for each in asked[1:]]
        source = torch.cat(parts, lead)
        if not names.in_order:
            sort = order.argsort()
            source, mine = source.index_select(lead, sort), [place[sort] for place in mine]
        return write(here, block, names.within(here, mine), source)

    chunks = [at.map(partial(picked, k), listed, names.owners) for k in range(len(at.sizes))]
    arrived = at.comm.all_to_all(chunks, at.mesh_dims, lambda giver, taker: names.shape_between(giver, taker, giver)).wait()
    return at.map(joined, args[0], arrived, names.places, names.owners)


def _elements(at: KernelContext, dims: tuple[int, ...]) -> int:
    """How many dims there are of what indices name."""
    return at.operands[0].ndim - len(dims) + at.once(names_ndim)


def names_ndim(call: Any) -> int:
    """How many dims the indices have together."""
    return max(call.operands[i].ndim for i, name in enumerate(call.names) if name in ("index", "indices"))


class _Names:
    """What each group position names.

    Attributes:
        places: on each rank, of all elements that are named.
        owners: on each rank, which group position has each of them.
        which: which of the indexed dims is cut; ndim: how many dims the names have.
        unseen: there are no values to look at, or others' may come.
        all_own: all name what they have.
        in_order: what comes from each group position comes after what comes from those before it.
    """

    def __init__(
        self, address: Address, at: KernelContext, dims: tuple[int, ...], layout: Layout, lead: int, args: tuple[Any, ...]
    ) -> None:
        self.at, self.layout, self.lead = at, layout, lead
        (factor,) = at.splits
        self.which, self.ndim = dims.index(int(factor[1:])), at.once(names_ndim)
        shape = tuple(at.operands[0].shape)
        found = named_in_whole(address, at, args[address.argument], dims, [shape[d] for d in dims], args[0])
        self.places = found
        self.unseen = bool(ACTIVE) or under_way() or any(x.is_meta for x in shards_of(args[0]))
        starts = [span.start for span in self._spans(at.comm.held[0])]
        self.in_order = starts == sorted(starts)
        if self.unseen:
            return
        ends = list(accumulate(at.sizes))
        self.owners = at.map(lambda here, places: _owners(places[self.which], ends), found)
        counts = at.map(self._counts, self.owners)
        self._table = dict(zip(at.comm.held, [own.tolist() for own in shards_of(counts)], strict=True))
        tables = self._table.values()
        self.all_own = not any(n for table in tables for k, row in enumerate(table) for j, n in enumerate(row) if j != k)

    def _spans(self, member: int) -> list[range]:
        """By group position which of the elements it names."""
        key = "spans", member
        found: list[range] | None = self.at.known.get(key)
        if found is None:
            mesh, rows = self.at.call.mesh, math.prod(self.layout.shape[self.lead + 1 : self.lead + self.ndim])
            found = self.at.known[key] = []
            for other in mesh.members_of(self.at.mesh_dims, member):
                coordinate = mesh.coordinates[other]
                start = self.layout.local_offset(coordinate)[self.lead] * rows
                found.append(range(start, start + self.layout.local_shape(coordinate)[self.lead] * rows))
        return found

    def of(self, here: At, each: list[Tensor], position: int | None = None) -> list[Tensor]:
        """The part of these that a group position names, or the rank itself."""
        span = self._spans(here.member)[here.index if position is None else position]
        return [x[span.start : span.stop] for x in each]

    def of_all(self, here: At, each: list[Tensor]) -> list[Tensor]:
        """Those that the group names, by group position."""
        spans = self._spans(here.member)
        return [torch.cat([x[span.start : span.stop] for span in spans]) for x in each]

    def within(self, here: At, places: Places) -> Places:
        """Places in the rank's own block."""
        return [place - here.offset if d == self.which and here.offset else place for d, place in enumerate(places)]

    def _counts(self, here: At, owners: Tensor) -> Tensor:
        count = len(self.at.sizes)
        spans = self._spans(here.member)
        return torch.stack([owners[span.start : span.stop].bincount(minlength=count) for span in spans])

    def made_in(self, member: int) -> tuple[int, ...]:
        return tuple(self.layout.shape_of(member)[self.lead : self.lead + self.ndim])

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
    return torch.searchsorted(torch.tensor(ends, device=index.device), index, right=True)
