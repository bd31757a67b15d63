"""Lower bound of ``redistribute.py``: a hand-written exchange of only the missing elements. The messages are computed beforehand
from the blocks. Small ones are sent in one all-to-all of rows, large ones as separate messages, whichever is faster. Only for
pairs without partial values to reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from redistributing.cases import Block, Case, make_local_tensor

SEPARATE_MESSAGE_BYTES = 1 << 17  # bytes; pieces of this size go one by one
Bare = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Message:
    """The elements that ``sender`` has and ``receiver`` needs, as a block of the global tensor."""

    sender: int
    receiver: int
    block: Block

    def of(self, value: torch.Tensor, held: Block) -> torch.Tensor:
        """Return the message's elements as a view of the local tensor ``value``, which is the block ``held``."""
        (i, j), (m, n) = self.block.start, self.block.size
        return value[i - held.start[0] :, j - held.start[1] :][:m, :n]


def list_messages(case: Case) -> Iterator[Message]:
    """Yield each part of each rank's new block once, sent by the rank itself if it has it, else by its holders in turn."""
    old, new = case.blocks(case.src), case.blocks(case.dst)
    holders: dict[Block, list[int]] = {}
    for rank, block in enumerate(old):
        holders.setdefault(block, []).append(rank)
    for receiver, wanted in enumerate(new):
        for block, ranks in holders.items():
            starts = [max(a, b) for a, b in zip(block.start, wanted.start, strict=True)]
            ends = [min(block.edges(dim)[1], wanted.edges(dim)[1]) for dim in (0, 1)]
            size = (ends[0] - starts[0], ends[1] - starts[1])
            if min(size) > 0:
                sender = receiver if receiver in ranks else ranks[receiver % len(ranks)]
                yield Message(sender, receiver, Block((starts[0], starts[1]), size))


def make_bare_exchange(case: Case, rank: int) -> Bare | None:
    """Return a function that exchanges this rank's missing elements, or None if values are partial. All ranks must call it."""
    if "P" in (*case.src, *case.dst):
        return None
    every = list(list_messages(case))
    ranks, group = _get_exchange_group(case, every, rank)
    sent = sorted((p for p in every if p.sender == rank != p.receiver), key=lambda p: p.receiver)
    come = sorted((p for p in every if p.receiver == rank != p.sender), key=lambda p: p.sender)
    kept = [p for p in every if p.sender == p.receiver == rank]
    old, new, x = case.blocks(case.src)[rank], case.blocks(case.dst)[rank], make_local_tensor(case, rank)

    def placed() -> torch.Tensor:
        result = x.new_empty(new.size)
        for piece in kept:
            piece.of(result, new).copy_(piece.of(x, old))
        return result

    leaving = [sum(_count_elements(p) for p in sent if p.receiver == other) for other in ranks]
    arriving = [sum(_count_elements(p) for p in come if p.sender == other) for other in ranks]

    def in_rows() -> torch.Tensor:
        row = torch.cat([p.of(x, old).reshape(-1) for p in sent]) if sent else x.new_empty(0)
        buffer = x.new_empty(sum(arriving))
        dist.all_to_all_single(buffer, row, arriving, leaving, group=group)
        result = placed()
        for piece, part in zip(come, buffer.split([_count_elements(p) for p in come]), strict=True):
            piece.of(result, new).copy_(part.view(piece.block.size))
        return result

    def one_by_one() -> torch.Tensor:
        parts = [x.new_empty(p.block.size) for p in come]
        works = [dist.irecv(part, piece.sender, group) for part, piece in zip(parts, come, strict=True)]
        works += [dist.isend(p.of(x, old).contiguous(), p.receiver, group) for p in sent]
        result = placed()
        for work in works:
            if work is not None:
                work.wait()
        for piece, part in zip(come, parts, strict=True):
            piece.of(result, new).copy_(part)
        return result

    moving = [p for p in every if p.sender != p.receiver and p.sender in ranks]
    if not moving:
        return placed
    return one_by_one if 4 * max(_count_elements(p) for p in moving) >= SEPARATE_MESSAGE_BYTES else in_rows


def _count_elements(piece: Message) -> int:
    return piece.block.size[0] * piece.block.size[1]


_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _get_exchange_group(case: Case, every: list[Message], rank: int) -> tuple[tuple[int, ...], dist.ProcessGroup | None]:
    """Return the ranks that exchange data with this one, directly or through others, and their process group (None for all
    ranks).
    """
    parts = [{r} for r in range(case.ranks)]
    for piece in every:
        a, b = (next(part for part in parts if r in part) for r in (piece.sender, piece.receiver))
        if a is not b:
            parts.remove(b)
            a |= b
    mine: tuple[int, ...] = ()
    for part in parts:
        ranks = tuple(sorted(part))
        if 1 < len(ranks) < case.ranks and ranks not in _GROUPS:
            _GROUPS[ranks] = dist.new_group(list(ranks))  # all ranks make all groups
        mine = ranks if rank in part else mine
    return mine, _GROUPS.get(mine)
