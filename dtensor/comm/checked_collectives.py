"""What goes around a collective on process groups: compared with other ranks' before anything is sent; its wait is watched."""

from __future__ import annotations

import functools
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from ..base.caches import Bounded, remembered
from ..base.generators import state_now
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..mesh.process_groups import BEFORE, Group
from ..mesh.root import LAID_OUT
from ..watchdog.collective_hooks import begin, chain_among, come_to_next, left_out, meet, operations_among, refuse, waited
from ..watchdog.collective_log import Chain, Deed, read_lengths, told_lengths, unfitting
from ..watchdog.diagnosis import Said, differing_words, said_of, unfit_words
from ..watchdog.flight_recorder import ISSUED, Trail, fingerprint
from ..watchdog.levels import Level, computed_in, refuse_child
from .flat_rows import gathered
from .pack import Route, Transfer
from .pending import Pending
from .transfer import Issue, bind_direct, bind_transfer

P = ParamSpec("P")
T = TypeVar("T")

BEFORE.append(meet)
LAID_OUT.append(begin)
_MAIN = threading.main_thread().ident
_KEPT = 1024  # descriptions of a collective's operands
_WORDS = 1024  # bytes in which a rank says what it does


def watched(
    group: Group,
    said: str,
    over: str,
    run: Issue,
    shaped: bool = False,
    own: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Issue:
    """``run``; ``said`` is what all ranks of the group say of it, besides the dtype, whether there are data, and the shape where
    that is ``shaped``.

    ``over`` names the mesh dims. Where ranks do not know each other's lengths, ``own`` is how many numbers this rank sends to
    each of the group, and how many it expects of each.
    """
    ranks = ranks_of(group)
    chain = chain_among(ranks, group.handle, group.backend)
    if chain is None:
        return run
    known: Bounded[Any, Deed] = Bounded(_KEPT)
    if list(chain.ranks) != ranks:
        over = f"{over} of ranks {', '.join(map(str, ranks))}"
    at = {rank: position for position, rank in enumerate(ranks)}
    lengths = "" if own is None else told_lengths(*([side[at[rank]] for rank in chain.ranks] for side in own))

    def issue(x: torch.Tensor) -> Pending[torch.Tensor]:
        if (level := Level.now) == "off":
            return run(x)
        key = (x.dtype, x.is_meta, x.shape) if shaped else (x.dtype, x.is_meta)
        deed = known.get(key)
        if deed is None:
            deed = known.keep(key, Deed.of(f"{said} {_operand(x, shaped)}", over, lengths))
        admitted(chain, group, ranks, level, deed)
        number = chain.count
        try:
            pending = run(x)
        except BaseException as error:
            raise left_out(chain, number, error) from error
        chain.words[ISSUED] = number
        return pending.within(functools.partial(waited, chain, number), rounds=True)

    return issue


def lengths_of(route: Route) -> tuple[list[int], list[int]]:
    """How many numbers a rank sends to each of its group, and how many it expects of each."""
    leaving, arriving = ([0 if box is None else box.numel for box in side] for side in (route.sends, route.receives))
    return leaving, arriving


def ranks_of(group: Group) -> list[int]:
    """Torch's rank at each position of a group."""
    in_torch = dist.get_process_group_ranks(group.handle)
    return [in_torch[k] for k in group.order or range(group.size)]


@remembered(256)
def holders(mesh: DeviceMesh, dims: tuple[int, ...] | None = None) -> frozenset[int]:
    """The ranks that hold a tensor together with this one, of those along some mesh dims; none where they are no processes."""
    if mesh.kind != "process_group":
        return frozenset()
    along = range(mesh.ndim) if dims is None else dims
    return frozenset(mesh.ranks[member] for member in mesh.members_of(along, mesh.current_member() or 0))


def together(layouts: Sequence[Layout]) -> frozenset[int]:
    """Return the ranks along all mesh dims over which some of these tensors are sharded or partial.

    No ranks where they are no processes, and where ranks could disagree which ones they are: a tensor of a slice of one mesh and
    a tensor of another mesh are on other ranks for each copy of the slice.
    """
    dims: dict[DeviceMesh, set[int]] = {}
    for layout in layouts:
        own = layout.mesh.group_id(dim for dim in range(layout.mesh.ndim) if not layout.placements[dim].is_replicate())
        if own:
            dims.setdefault(layout.mesh._get_root_mesh(), set()).update(own)
    if len(dims) > 1 and any(root.size_of(own) != root.size() for root, own in dims.items()):
        return frozenset()
    return frozenset[int]().union(*(holders(root, tuple(sorted(own))) for root, own in dims.items()))


def trail_of(layouts: Sequence[Layout]) -> Trail | None:
    """Return the trail of the ranks that compute with these tensors :func:`together`; None where there are no two."""
    ranks = together(layouts)
    return computed_in(layouts[0].mesh._root.world).trail_of(ranks) if len(ranks) > 1 else None


def counted_with(layouts: Sequence[Layout], mesh_dims: Sequence[int], said: str, run: Callable[P, T]) -> Callable[P, T]:
    """Return ``run``, a collective over ``mesh_dims`` of one mesh, whose calls count as operations on tensors of these layouts.

    Ranks that share such tensors issue the collectives of their different groups in one order. Where the tensors are sharded
    over ``mesh_dims`` alone, the group itself compares all of it, and ``run`` is returned as it is.
    """
    mesh = layouts[0].mesh
    trail = trail_of(layouts) if len(together(layouts)) > mesh.size_of(mesh_dims) else None
    if trail is None:
        return run
    step = fingerprint(f"{said} {mesh.named(mesh_dims)}")

    def counted(*args: P.args, **kwargs: P.kwargs) -> T:
        if Level.now != "off" and threading.get_ident() == _MAIN:
            trail.hash = hash((trail.hash, step))
        return run(*args, **kwargs)

    return counted


def draws(mesh: DeviceMesh, generator: torch.Generator, how: str) -> None:
    """The state from which all ranks draw, and how, is a part of what they compare."""
    if _compares(mesh):
        state = zlib.crc32(how.encode(), zlib.crc32(state_now(generator).numpy().data))
        _compared(mesh, state, f"{how} from the generator in state {state:x}")


def says(mesh: DeviceMesh, words: str) -> None:
    """What ranks of ``mesh`` do with local tensors between collectives, and must do alike, is a part of what they compare."""
    if _compares(mesh):
        _compared(mesh, fingerprint(words), words)


def _compares(mesh: DeviceMesh) -> bool:
    return Level.now in ("watch", "strict") and len(holders(mesh)) > 1 and threading.get_ident() == _MAIN


def _compared(mesh: DeviceMesh, hashed: int, words: str) -> None:
    if Level.now == "watch":
        trail = computed_in(mesh._root.world).trail_of(holders(mesh))
        trail.hash, trail.last = hash((trail.hash, hashed)), words
    elif (ring := operations_among(mesh._root.world, holders(mesh))) is not None:
        ring.mix(hashed)


def admitted(chain: Chain, group: Group, ranks: list[int], level: str, deed: Deed) -> None:
    """Takes down a collective.

    Raises:
        DivergenceError: other ranks mean another one; nothing was sent.
    """
    if level == "forked" and chain.board.pid != os.getpid():
        refuse_child()
    if not chain.take_down(deed):
        raise refuse(chain)
    if chain.left_out:
        come_to_next(chain)
    if level == "strict" or (chain.apart and group.backend == "gloo"):  # gloo ends a process that gets too long a message
        _exchanged(chain, group, ranks, deed)


def _operand(x: torch.Tensor, shaped: bool) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    operand = f"{dtype}[{', '.join(map(str, x.shape))}]" if shaped else dtype
    return f"{operand} without data" if x.is_meta else operand  # of which torch sends nothing


def _exchanged(chain: Chain, group: Group, ranks: list[int], deed: Deed) -> None:
    """All ranks of the group tell each other number and hash; where they differ, in a second exchange, what they mean."""
    number = chain.count
    told = _told(chain, group, number, torch.tensor([number, chain.hash - 2**63], device="cpu")).view(-1, 2).tolist()
    if len({hashed for _, hashed in told}) > 1:
        if not chain.apart:
            raise refuse(chain)
        said = _words_told(chain, group, ranks, [hashed for _, hashed in told])
        raise refuse(chain, differing_words(number, said))
    if deed.lengths:
        mine = read_lengths(deed.lengths)
        rows = _told(chain, group, number, torch.tensor([*mine[0], *mine[1]], device="cpu")).view(len(ranks), 2, -1).tolist()
        lengths = {rank: (leaving, arriving) for rank, (leaving, arriving) in zip(ranks, rows, strict=True)}
        if unfitting(chain.ranks, lengths):
            raise refuse(chain, unfit_words(chain.ranks, number, lengths, _words_told(chain, group, ranks, [0] * len(ranks))))


def _words_told(chain: Chain, group: Group, ranks: list[int], hashes: list[int]) -> dict[int, Said]:
    """What each rank says that it does."""
    own = said_of(chain.last())
    mine = f"{own.over}\n{own.words}".encode()[:_WORDS].ljust(_WORDS)
    rows = _told(chain, group, chain.count, torch.frombuffer(bytearray(mine), dtype=torch.uint8)).view(-1, _WORDS)
    said = [bytes(row.tolist()).decode(errors="replace").strip().partition("\n") for row in rows]
    return {rank: Said(hashed, over, what) for rank, hashed, (over, _, what) in zip(ranks, hashes, said, strict=True)}


def _told(chain: Chain, group: Group, number: int, row: torch.Tensor) -> torch.Tensor:
    """Every rank's row, by group position."""
    length, key = len(row), (len(row), group.order)
    if key not in chain.kept:
        route = gathered([(length,)] * group.size, group.position)
        whole = group.handle.size() == group.size
        transfer = Transfer(lambda _: route, row.dtype, "all_gather", blocking=True)
        chain.kept[key] = bind_transfer(group, transfer) if whole else bind_direct(group, route)
    pending: Pending[torch.Tensor] = chain.kept[key](row)
    return waited(chain, number, pending.wait)
