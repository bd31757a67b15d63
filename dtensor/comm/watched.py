"""What goes around a collective on process groups: compared with other ranks' before anything is sent; its wait is watched."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist

from ..mesh.groups import Group
from ..watch.chain import Chain
from ..watch.levels import Level, refuse_child
from ..watch.verdict import differing_words
from ..watch.watching import chain_among, explained, refuse, waited
from .pending import Pending
from .regions import Transfer
from .rows import gathered
from .transfer import Issue, bind_direct, bind_transfer

_KEPT = 1024  # descriptions of a collective's operands
_WORDS = 1024  # bytes in which a rank says what it does


def watched(group: Group, said: str, run: Issue, shaped: bool = False) -> Issue:
    """``run``; ``said`` is what all ranks of the group say of it, besides the dtype, and the shape where that is ``shaped``."""
    chain = chain_among(ranks_of(group), group.handle, group.backend)
    if chain is None:
        return run
    known: dict[Any, tuple[int, int]] = {}

    def issue(x: torch.Tensor) -> Pending[torch.Tensor]:
        if (level := Level.now) == "off":
            return run(x)
        key = (x.dtype, x.shape) if shaped else x.dtype
        found = known.get(key)
        if found is None:
            found = _described(chain, known, key, f"{said.rstrip()} {_operand(x, shaped)}")
        admitted(chain, group, level, found)
        number = chain.count
        try:
            pending = run(x)
        except RuntimeError as error:
            raise explained(chain, number, error) from error
        return pending.within(functools.partial(waited, chain, number))

    return issue


def ranks_of(group: Group) -> list[int]:
    """Torch's rank at each position of a group."""
    in_torch = dist.get_process_group_ranks(group.handle)
    return [in_torch[k] for k in group.order or range(group.size)]


def admitted(chain: Chain, group: Group, level: str, found: tuple[int, int]) -> None:
    """Takes down a collective.

    Raises:
        DivergenceError: other ranks mean another one; nothing was sent.
    """
    if level == "forked" and chain.board.pid != os.getpid():
        refuse_child()
    if not chain.take_down(*found):
        raise refuse(chain)
    if level == "strict" or (chain.apart and group.backend == "gloo"):  # gloo ends a process that gets too long a message
        _exchanged(chain, group)


def _described(chain: Chain, known: dict[Any, tuple[int, int]], key: Any, said: str) -> tuple[int, int]:
    if len(known) >= _KEPT:
        known.clear()
    found = known[key] = chain.described(said)
    return found


def _operand(x: torch.Tensor, shaped: bool) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, x.shape))}]" if shaped else dtype


def _exchanged(chain: Chain, group: Group) -> None:
    """All ranks of the group tell each other number and hash; where they differ, in a second exchange, what they mean."""
    number = chain.count
    mine = torch.tensor([number, chain.hash - 2**63])
    told = _told(chain, group, number, mine).view(-1, 2).tolist()
    if len({hashed for _, hashed in told}) == 1:
        return
    words = torch.frombuffer(bytearray(chain.last().encode()[:_WORDS].ljust(_WORDS)), dtype=torch.uint8)
    rows = _told(chain, group, number, words).view(-1, _WORDS)
    ranks = ranks_of(group)
    said = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
    by_rank = {rank: (hashed, what) for rank, (_, hashed), what in zip(ranks, told, said, strict=True)}
    raise refuse(chain, differing_words(chain.ranks, number, by_rank))


def _told(chain: Chain, group: Group, number: int, row: torch.Tensor) -> torch.Tensor:
    """Every rank's row, by group position."""
    length, key = len(row), (len(row), group.order)
    if key not in chain.kept:
        route = gathered([(length,)] * group.size, group.position)
        whole = group.handle.size() == group.size
        transfer = Transfer(lambda _: route, row.dtype, "all_gather")
        chain.kept[key] = bind_transfer(group, transfer) if whole else bind_direct(group, route)
    pending: Pending[torch.Tensor] = chain.kept[key](row)
    return waited(chain, number, pending.wait)
