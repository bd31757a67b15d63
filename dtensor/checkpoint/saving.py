"""Saving: every rank writes the blocks that it answers for, aside; the first rank then makes them the checkpoint by one rename.

A folder holds data files with names of their own for each save, the manifest that names the valid ones, and a ``.metadata`` file,
by which ``torch.distributed.checkpoint`` reads the same data files. The order of a save: data files, on the disk; the manifest,
by an atomic rename, which is the moment when the new checkpoint takes the old one's place; ``.metadata``; data files of older
saves removed. Killed anywhere, the folder holds the old checkpoint or the new one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ..base.group_by import by_key
from ..errors import CheckpointError
from ..tensor.dtensor import DTensor
from ..tensor.views.block_owners import held_here, piece_of
from .async_save import PendingSave, Staging, finish_pending, in_background
from .block_io import Stream, append
from .coordinator import NESTING, Parts, Ranks
from .digest import digest
from .files import present, read_regular, replace_file, sha256, size_of, sync_folder, written
from .load_targets import described
from .manifest import NAME, Block, Entry, Manifest
from .remote import Address, place_of
from .stateful import expand
from .tree import encode, has_tensors, leaves, name_of, named_tensors
from .two_phase_commit import in_two_steps

_OURS = re.compile(r"__\d+_\w+\.distcp")


@dataclass(frozen=True, slots=True)
class _Job:
    """A save with nothing left to ask of the tensors.

    Attributes:
        encoded, values: the state's plain tree as JSON, and with tensors that only say shape and dtype.
        writes: this rank's blocks, by the name of their tensor and where they begin in it.
        parts: what must be alike on all ranks.
    """

    encoded: Any
    values: Any
    entries: dict[str, Entry]
    writes: dict[tuple[str, tuple[int, ...]], torch.Tensor]
    parts: Parts


@dataclass(frozen=True, slots=True)
class Beside:
    """What belongs to a save beside the state.

    Attributes:
        notes: plain values that the manifest holds beside the state.
        begin, done: called on the first rank, before any rank writes and when the new checkpoint is complete.
    """

    notes: Any = None
    begin: Callable[[], None] = lambda: None
    done: Callable[[], None] = lambda: None


def save(state: Any, path: str | os.PathLike[str], *, async_op: bool = False, process_group: Any = None) -> PendingSave | None:
    """Save ``state`` as a checkpoint in the folder ``path``; an older one there stays loadable until the new one is complete.

    All ranks call it, with the same nesting and the same plain values. Each block of a DTensor is written once, by one of the
    ranks that hold it, in shares of about the same size; of a plain tensor the first rank's value counts. Unreduced (``Partial``)
    tensors are reduced first. On several machines ``path`` is on a file system that they share, or an address that fsspec knows
    (``s3://bucket/folder``).

    Args:
        state: nested dicts, lists and tuples of tensors (distributed or plain), plain values (numbers, strings, bytes, None,
            dtypes, ...), modules, optimizers, and any object with ``state_dict`` and ``load_state_dict``.
        async_op: copy what this rank writes, return at once, and write in the background; the next ``save`` or ``load`` waits for
            it.
        process_group: the ranks that save together, default all.

    Raises:
        CheckpointError: on all ranks, with the same words: a state that differs between ranks, something that is no plain data, a
            folder that cannot be written, a full disk, another save into the folder that is under way.

    Cost: two gathers to the first rank (of a hash, and of the positions of blocks) and two broadcasts of a few bytes; with
    ``async_op`` memory for a copy of this rank's share.

    >>> import tempfile, dtensor as dt
    >>> mesh, folder = dt.init_device_mesh("cpu", (2,)), tempfile.mkdtemp()
    >>> dt.checkpoint.save({"w": dt.ones(5, 3, device_mesh=mesh, placements=[dt.Shard(0)]), "step": 7}, folder)
    >>> state = {"w": dt.zeros(5, 3, device_mesh=dt.init_device_mesh("cpu", (3,)), placements=[dt.Shard(1)]), "step": 0}
    >>> dt.checkpoint.load(state, folder).missing_keys
    []
    >>> state["w"].sum().item(), state["step"]
    (15.0, 7)
    """
    finish_pending()
    return start(state, place_of(path), Ranks("checkpoint.save", process_group, apart=async_op), Staging() if async_op else None)


def start(state: Any, folder: Address, ranks: Ranks, staging: Staging | None, beside: Beside = Beside()) -> PendingSave | None:
    """Save as :func:`save` does; in the background if there is ``staging`` for what this rank writes."""
    job = _prepared(state, folder, ranks, staging, beside.notes)
    if staging is None:
        _run(job, folder, ranks, beside)
        return None
    return in_background(lambda: _run(job, folder, ranks, beside, staging.wait))


# --- the parts of a save ---------------------------------------------------------------------------------------------------
def _prepared(state: Any, folder: Address, ranks: Ranks, staging: Staging | None, notes: Any) -> _Job | Exception:
    """Everything that needs the tensors; what is wrong is told when the ranks meet."""
    try:
        tree = expand(state).tree
        tensors = with_values(named_tensors(tree))
        encoded = encode(tree)
        entries = {name: Entry(tuple(x.shape), str(x.dtype).removeprefix("torch."), ()) for name, x in tensors.items()}
        parts = parts_of(tree, **{NESTING: encoded, "notes beside it": notes})
    except Exception as error:  # of the state's own methods too
        return error
    tensors = reduced(tensors, parts, ranks, f"saving to {folder}")
    pieces = {
        (name, held.offset): piece_of(tensors[name], held).detach()
        for name, blocks in held_here(tensors, ranks.rank, ranks.among)
        for held in blocks
        if held.answers
    }
    writes = staging.copies(pieces) if staging is not None else {key: row_major(piece) for key, piece in pieces.items()}
    return _Job(encoded, _without_tensors(tree), entries, writes, parts)


def with_values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, detached; CheckpointError: one that cannot be saved."""
    for tensor in tensors.values():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} is {'on meta: it has no values' if tensor.is_meta else tensor.layout}; "
                "only strided tensors with values are saved"
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def parts_of(tree: Any, **beside: Any) -> Parts:
    """What must be alike on all ranks: each leaf of a state, in order, how they are nested, and what is ``beside`` them."""
    told = [
        (name_of(path), _words(leaf) if isinstance(leaf, torch.Tensor) else repr(encode(leaf, path)))
        for path, leaf in leaves(tree)
    ]
    return [*told, *((name, repr(value)) for name, value in beside.items())]


def _words(x: torch.Tensor) -> str:
    return described(x._layout if isinstance(x, DTensor) else tuple(x.shape), x.dtype)


def reduced(tensors: dict[str, torch.Tensor], parts: Parts, ranks: Ranks, what: str) -> dict[str, Any]:
    """The tensors without terms. Before any are added up the ranks make sure that all have come, with the same tensors."""
    terms = {name: x for name, x in tensors.items() if isinstance(x, DTensor) and x._layout.is_partial}
    if terms:
        ranks.alike(what, lambda: parts, lambda: None)
    return tensors | {name: x.redistribute(placements=x._layout.reduced().placements) for name, x in terms.items()}


def row_major(piece: torch.Tensor) -> torch.Tensor:
    """Its values on the CPU as they are written."""
    return piece.cpu().resolve_conj().resolve_neg().contiguous()


def _without_tensors(tree: Any) -> Any:
    """The tree as torch's metadata has it: meta tensors, which keep nothing alive, and in lists, since it looks into no tuple."""
    match tree:
        case torch.Tensor():
            return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
        case dict():
            return {key: _without_tensors(item) for key, item in tree.items()}
        case torch.Size():
            return tree
        case list() | tuple():
            items = [_without_tensors(item) for item in tree]
            return items if isinstance(tree, list) or has_tensors(tree) else tuple(items)
        case set() | frozenset():
            return type(tree)(tree)  # the caller may change it while it is written
    return tree


def _run(job: _Job | Exception, folder: Address, ranks: Ranks, beside: Beside, copied: Callable[[], None] = lambda: None) -> None:
    def files(token: str) -> tuple[Address, Address]:
        return folder / f"__{ranks.rank}_{token}.distcp", folder / f"__{ranks.rank}_{token}v.distcp"

    def left_over(token: str) -> None:
        if not _committed(folder, token):
            for file in files(token):
                file.unlink(missing_ok=True)

    def write(token: str) -> list[tuple[str, Block, Stream]]:
        copied()
        return _written(_known(job), files(token)[0])

    in_two_steps(
        ranks,
        folder,
        f"saving to {folder}",
        job if isinstance(job, Exception) else job.parts,
        write=write,
        begin=lambda token: beside.begin(),
        commit=lambda shares, token: _commit(_known(job), folder, shares, token, beside),
        discard=left_over,
        left="the folder holds the checkpoint that it held before, or the new one",
    )


def _known(job: _Job | Exception) -> _Job:
    """A job that has not failed, as the ranks have agreed by now."""
    assert isinstance(job, _Job)
    return job


def _written(job: _Job, file: Address) -> list[tuple[str, Block, Stream]]:
    """Write this rank's share and bring it to the disk; its digests are computed meanwhile."""
    if not job.writes:
        return []
    with ThreadPoolExecutor(1) as aside:
        digests = aside.map(digest, job.writes.values(), [offset for _, offset in job.writes])
        with written(file) as out:
            streams = [append(out, data) for data in job.writes.values()]
        return [
            (name, Block(offset, tuple(data.shape), file.name, stream.at, found), stream)
            for ((name, offset), data), stream, found in zip(job.writes.items(), streams, digests, strict=True)
        ]


def _commit(job: _Job, folder: Address, shares: list[list[tuple[str, Block, Stream]]], token: str, beside: Beside) -> None:
    """Make what was written the checkpoint."""
    from . import dcp_metadata as metadata  # imports torch.distributed.checkpoint, which takes a second

    everything = [item for share in shares for item in share]
    blocks = by_key((name, block) for name, block, _ in everything)
    entries = {name: Entry(entry.shape, entry.dtype, tuple(blocks.get(name, ()))) for name, entry in job.entries.items()}
    values = folder / f"__0_{token}v.distcp"
    metadata_file = metadata.encode(
        job.values, entries, {(name, block.offset): stream for name, block, stream in everything}, values
    )
    older = folder / ".metadata"
    prints = (sha256(metadata_file), *((sha256(read_regular(older)),) if present(older) else ()))
    files = {name: size_of(folder / name) for name in {values.name, *(block.file for _, block, _ in everything)}}
    sync_folder(folder)
    Manifest(entries, job.encoded, files, prints, notes=beside.notes).write(folder)
    try:
        replace_file(older, metadata_file)
        for path in folder.iterdir():
            if _OURS.fullmatch(path.name) and token not in path.name:
                path.unlink()
        beside.done()
    except OSError as error:
        raise CheckpointError(f"the new checkpoint is complete, but files next to it could not be updated: {error}") from error


def _committed(folder: Address, token: str) -> bool:
    with contextlib.suppress(OSError, CheckpointError):
        return token.encode() in read_regular(folder / NAME)
    return False
