"""Saving: every rank writes the blocks that it answers for, aside; the first rank then makes them the checkpoint by one rename.

A folder holds data files with names of their own for each save, the manifest that names the valid ones, and a ``.metadata`` file,
by which ``torch.distributed.checkpoint`` reads the same data files. The order of a save: data files, on the disk; the manifest,
by an atomic rename, which is the moment when the new checkpoint takes the old one's place; ``.metadata``; data files of older
saves removed. Killed anywhere, the folder holds the old checkpoint or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..tensor.blocks import held_here, piece_of
from ..tensor.dtensor import DTensor
from .block_io import Stream, append
from .coordinator import Ranks
from .digest import digest
from .files import present, read_regular, replace_file, sha256, sync_folder
from .manifest import NAME, Block, Entry, Manifest
from .stateful import expand
from .transaction import in_two_steps, same_state
from .tree import encode, named_tensors, tensors_in

_OURS = re.compile(r"__\d+_\w+\.distcp")


class PendingSave:
    """A save that goes on in the background; the saved state may be changed meanwhile.

    ``wait`` raises on all ranks what went wrong on one; it communicates as ``save`` does.

    >>> import tempfile, torch, dtensor as dt
    >>> pending = dt.checkpoint.save({"w": torch.ones(5, 3)}, tempfile.mkdtemp(), async_op=True)
    >>> pending.wait()
    >>> pending.done()
    True
    """

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self.told = False  # whether somebody has seen how it ended

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: it could not be saved.
        """
        self.told = True
        self._future.result()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()


@dataclass(frozen=True, slots=True)
class _Write:
    """A block to be written: the first rank's share is told from its name, offset and shape alone."""

    name: str
    offset: tuple[int, ...]
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Job:
    """A save with nothing left to ask of the tensors.

    Attributes:
        tree: the state's plain tree, with tensors that only say name, shape and dtype.
        print: of what must be alike on all ranks.
    """

    folder: Path
    encoded: Any
    values: Any
    entries: dict[str, Entry]
    writes: list[_Write]
    fingerprint: str


def save(state: Any, path: str | os.PathLike[str], *, async_op: bool = False, process_group: Any = None) -> PendingSave | None:
    """Save ``state`` as a checkpoint in the folder ``path``; an older one there stays loadable until the new one is complete.

    All ranks call it, with the same nesting and the same plain values. Each block of a DTensor is written once, by one of the
    ranks that hold it, in shares of about the same size; of a plain tensor the first rank's value counts. Unreduced (``Partial``)
    tensors are reduced first. On several machines ``path`` is on a file system that they share.

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
    ranks = Ranks(process_group, apart=async_op)
    prepared = _prepared(state, Path(path), ranks, copy=async_op)
    if not async_op:
        _run(prepared, Path(path), ranks)
        return None
    pending = PendingSave(_WORKER.submit(_run, prepared, Path(path), ranks))
    _PENDING.append(pending)
    return pending


# --- in the background -----------------------------------------------------------------------------------------------------
_WORKER = ThreadPoolExecutor(1, "checkpoint")  # one: saves end in the order of their calls, on all ranks
_PENDING: list[PendingSave] = []


def finish_pending() -> None:
    """Wait for saves in the background; warn of those that failed and that nobody waited for."""
    while _PENDING:
        pending = _PENDING.pop(0)
        error = pending._future.exception()
        if error is not None and not pending.told:
            warnings.warn(f"an earlier save in the background has failed: {error}", stacklevel=3)


# --- the parts of a save ---------------------------------------------------------------------------------------------------
def _prepared(state: Any, folder: Path, ranks: Ranks, copy: bool) -> _Job | Exception:
    """Everything that needs the tensors; what is wrong is told when the ranks meet."""
    try:
        tree = expand(state).tree
        tensors = with_values(named_tensors(tree))
        encoded = encode(tree)
        entries = {name: Entry(tuple(x.shape), str(x.dtype).removeprefix("torch."), ()) for name, x in tensors.items()}
        fingerprint = fingerprint_of((encoded, entries), tensors)
    except Exception as error:  # of the state's own methods too
        return error
    tensors = reduced(tensors, fingerprint, ranks, f"saving to {folder}")
    writes = [
        _Write(name, held.offset, _to_write(piece_of(tensors[name], held.member), copy))
        for name, blocks in held_here(tensors, ranks.rank)
        for held in blocks
        if held.answers
    ]
    return _Job(folder, encoded, _without_tensors(tree), entries, writes, fingerprint)


def with_values(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, detached; CheckpointError: one that cannot be saved."""
    for tensor in tensors.values():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} is {'on meta: it has no values' if tensor.is_meta else tensor.layout}; "
                "only strided tensors with values are saved"
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def fingerprint_of(what: Any, tensors: dict[str, torch.Tensor]) -> str:
    """A hash of what must be alike on all ranks."""
    told = repr((what, [(x._layout if isinstance(x, DTensor) else None) for x in tensors.values()]))
    return hashlib.sha256(told.encode()).hexdigest()


def reduced(tensors: dict[str, torch.Tensor], fingerprint: str, ranks: Ranks, what: str) -> dict[str, Any]:
    """The tensors without terms. Before any are added up the ranks make sure that all have come, with the same tensors."""
    terms = {name: x for name, x in tensors.items() if isinstance(x, DTensor) and x._layout.is_partial}
    if terms:
        ranks.together(what, lambda: fingerprint, same_state)
    return tensors | {name: x.redistribute(placements=x._layout.reduced().placements) for name, x in terms.items()}


def _to_write(piece: torch.Tensor, copy: bool) -> torch.Tensor:
    data = piece.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return data.clone() if copy and data.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr() else data


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
            return items if isinstance(tree, list) or any(tensors_in(tree)) else tuple(items)
        case set() | frozenset():
            return type(tree)(tree)  # the caller may change it while it is written
    return tree


def _run(job: _Job | Exception, folder: Path, ranks: Ranks) -> None:
    def files(token: str) -> tuple[Path, Path]:
        return folder / f"__{ranks.rank}_{token}.distcp", folder / f"__{ranks.rank}_{token}v.distcp"

    def left_over(token: str) -> None:
        if not _committed(folder, token):
            for file in files(token):
                file.unlink(missing_ok=True)

    in_two_steps(
        ranks,
        folder,
        f"saving to {folder}",
        job if isinstance(job, Exception) else job.fingerprint,
        write=lambda token: _written(_known(job), files(token)[0]),
        commit=lambda shares, token: _commit(_known(job), shares, token),
        discard=left_over,
        left="the folder holds the checkpoint that it held before, or the new one",
    )


def _known(job: _Job | Exception) -> _Job:
    """A job that has not failed, as the ranks have agreed by now."""
    assert isinstance(job, _Job)
    return job


def _written(job: _Job, file: Path) -> list[tuple[str, Block, Stream]]:
    """Write this rank's share and bring it to the disk."""
    if not job.writes:
        return []
    share = []
    with open(file, "w+b") as out:
        for write in job.writes:
            stream = append(out, write.data)
            block = Block(write.offset, tuple(write.data.shape), file.name, stream.at, digest(write.data, write.offset))
            share.append((write.name, block, stream))
        out.flush()
        os.fsync(out.fileno())
    return share


def _commit(job: _Job, shares: list[list[tuple[str, Block, Stream]]], token: str) -> None:
    """Make what was written the checkpoint."""
    from . import dcp_metadata as metadata  # imports torch.distributed.checkpoint, which takes a second

    written = [item for share in shares for item in share]
    blocks: dict[str, list[Block]] = {name: [] for name in job.entries}
    for name, block, _ in written:
        blocks[name].append(block)
    entries = {name: Entry(entry.shape, entry.dtype, tuple(blocks[name])) for name, entry in job.entries.items()}
    values = job.folder / f"__0_{token}v.distcp"
    beside = metadata.encode(job.values, entries, {(name, block.offset): stream for name, block, stream in written}, values)
    older = job.folder / ".metadata"
    prints = (sha256(beside), *((sha256(read_regular(older)),) if present(older) else ()))
    files = {name: (job.folder / name).stat().st_size for name in {values.name, *(block.file for _, block, _ in written)}}
    sync_folder(job.folder)
    Manifest(entries, job.encoded, files, prints).write(job.folder)
    try:
        replace_file(older, beside)
        for path in job.folder.iterdir():
            if _OURS.fullmatch(path.name) and token not in path.name:
                path.unlink()
    except OSError as error:
        raise CheckpointError(f"the new checkpoint is complete, but what is beside it is not in order: {error}") from error


def _committed(folder: Path, token: str) -> bool:
    with contextlib.suppress(OSError, CheckpointError):
        return token.encode() in read_regular(folder / NAME)
    return False
