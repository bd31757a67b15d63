"""Saving: every rank writes its blocks to new data files; the first rank commits them by replacing the manifest in one rename.

[Note: Order of a save]
A folder has data files with unique names for each save, the manifest with the names of the valid ones, and a ``.metadata``
file, by which ``torch.distributed.checkpoint`` reads the same data files. A save first writes the data files and syncs them to
disk. Then it renames the manifest atomically, which replaces the old checkpoint by the new one. Then it writes ``.metadata``
and removes data files of older saves. Whenever it is killed, the folder has the old checkpoint or the new one.
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

from ..base.group_by import group_by_key
from ..errors import CheckpointError
from ..tensor.dtensor import DTensor
from .async_save import PendingSave, Staging, finish_pending_saves, submit_save
from .block_io import Stream, append_tensor
from .coordinator import NESTING_PART, RankGroup, StateParts
from .digest import block_digest
from .files import StoragePath, file_size, open_for_writing, parse_path, path_exists, read_file, replace_file, sha256, sync_folder
from .load_targets import describe_load_target
from .local_blocks import block_tensor, iter_local_blocks
from .manifest import MANIFEST_NAME, Manifest, StoredBlock, StoredTensor
from .stateful import expand_state
from .tree import encode_tree, has_tensors, iter_leaves, name_of, named_tensors
from .two_phase_commit import write_and_commit

_DATA_FILE = re.compile(r"__\d+_\w+\.distcp")


@dataclass(frozen=True, slots=True)
class _SaveJob:
    """Prepared save: this rank's blocks, copied if it runs in the background, and the description of the state.

    Attributes:
        encoded, values: the plain tree of the state as JSON, and with meta tensors.
        writes: this rank's blocks, by the name of their tensor and their offset in it.
        parts: what must be equal on all ranks.
    """

    encoded: Any
    values: Any
    entries: dict[str, StoredTensor]
    writes: dict[tuple[str, tuple[int, ...]], torch.Tensor]
    parts: StateParts


@dataclass(frozen=True, slots=True)
class SaveExtras:
    """Additions to a save: notes for the manifest, and callbacks on the first rank.

    Attributes:
        notes: plain values that the manifest has in addition to the state.
        begin, done: called on the first rank, before any rank writes and when the new checkpoint is complete.
    """

    notes: Any = None
    begin: Callable[[], None] = lambda: None
    done: Callable[[], None] = lambda: None


def save(state: Any, path: str | os.PathLike[str], *, async_op: bool = False, process_group: Any = None) -> PendingSave | None:
    """Save ``state`` as a checkpoint in the folder ``path``. An older checkpoint there stays loadable until the new one is
    complete.

    All ranks call it, with the same nesting and the same plain values. Each block of a DTensor is written once, by one of the
    ranks that have it, in shares of about equal size. Of a plain tensor the first rank's value is saved. ``Partial`` tensors
    are reduced first. On several machines ``path`` is on a file system that they share, or an address of fsspec
    (``s3://bucket/folder``).

    Args:
        state: nested dicts, lists and tuples of tensors (distributed or plain), plain values (numbers, strings, bytes, None,
            dtypes, ...), modules, optimizers, and any object with ``state_dict`` and ``load_state_dict``.
        async_op: copy this rank's blocks, return at once, and write in the background. The next ``save`` or ``load`` waits for
            it.
        process_group: the ranks that save together, default all.

    Raises:
        CheckpointError: on all ranks, with the same text: a state that differs between ranks, a value that is no plain data, a
            folder that cannot be written, a full disk, another save into the folder.

    Cost: two gathers to the first rank (of a hash, and of the positions of blocks) and two broadcasts of a few bytes; with
    ``async_op`` memory for a copy of this rank's blocks.

    >>> import tempfile, dtensor as dt
    >>> mesh, folder = dt.init_device_mesh("cpu", (2,)), tempfile.mkdtemp()
    >>> dt.checkpoint.save({"w": dt.ones(5, 3, device_mesh=mesh, placements=[dt.Shard(0)]), "step": 7}, folder)
    >>> state = {"w": dt.zeros(5, 3, device_mesh=dt.init_device_mesh("cpu", (3,)), placements=[dt.Shard(1)]), "step": 0}
    >>> dt.checkpoint.load(state, folder).missing_keys
    []
    >>> state["w"].sum().item(), state["step"]
    (15.0, 7)
    """
    finish_pending_saves()
    ranks = RankGroup("checkpoint.save", process_group, separate_group=async_op)
    return start_save(state, parse_path(path), ranks, Staging() if async_op else None)


def start_save(
    state: Any, folder: StoragePath, ranks: RankGroup, staging: Staging | None, extras: SaveExtras = SaveExtras()
) -> PendingSave | None:
    """Save as :func:`save` does at once, or in the background if ``staging`` memory is given for this rank's blocks."""
    job = _prepare_save(state, folder, ranks, staging, extras.notes)
    if staging is None:
        _run_job(job, folder, ranks, extras)
        return None
    return submit_save(lambda: _run_job(job, folder, ranks, extras, staging.wait))


# --- steps of a save -------------------------------------------------------------------------------------------------------
def _prepare_save(state: Any, folder: StoragePath, ranks: RankGroup, staging: Staging | None, notes: Any) -> _SaveJob | Exception:
    """Return the save job with this rank's blocks, or the error, which all ranks raise at their next exchange."""
    try:
        tree = expand_state(state).tree
        tensors = check_savable(named_tensors(tree))
        encoded = encode_tree(tree)
        entries = {name: StoredTensor(tuple(x.shape), str(x.dtype).removeprefix("torch."), ()) for name, x in tensors.items()}
        parts = make_state_parts(tree, **{NESTING_PART: encoded, "notes beside it": notes})
    except Exception as error:  # also errors of the user's state_dict methods
        return error
    tensors = reduce_partials(tensors, parts, ranks, f"saving to {folder}")
    shards = {
        (name, held.offset): block_tensor(tensors[name], held).detach()
        for name, blocks in iter_local_blocks(tensors, ranks.rank, ranks.participants)
        for held in blocks
        if held.is_primary
    }
    writes = (
        staging.start_copies(shards) if staging is not None else {key: to_row_major_cpu(shard) for key, shard in shards.items()}
    )
    return _SaveJob(encoded, _without_tensors(tree), entries, writes, parts)


def check_savable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, detached; raise a CheckpointError for a meta, sparse or quantized one."""
    for tensor in tensors.values():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"a tensor of shape {tuple(tensor.shape)} is {'on meta: it has no values' if tensor.is_meta else tensor.layout}; "
                "only strided tensors with values are saved"
            )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def make_state_parts(tree: Any, **beside: Any) -> StateParts:
    """Return (name, text) of all that must be equal on all ranks: each leaf of a state, and the values ``beside`` them."""
    parts = []
    for path, leaf in iter_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            text = describe_load_target(leaf._layout if isinstance(leaf, DTensor) else tuple(leaf.shape), leaf.dtype)
        else:
            text = repr(encode_tree(leaf, path))
        parts.append((name_of(path), text))
    return [*parts, *((name, repr(value)) for name, value in beside.items())]


def reduce_partials(tensors: dict[str, torch.Tensor], parts: StateParts, ranks: RankGroup, what: str) -> dict[str, Any]:
    """Return the tensors with partial ones reduced, after a check that all ranks save the same tensors."""
    partials = {name: x for name, x in tensors.items() if isinstance(x, DTensor) and x._layout.is_partial}
    if partials:
        ranks.run_if_same(what, lambda: parts, lambda: None)
    return tensors | {name: x.redistribute(placements=x._layout.reduced().placements) for name, x in partials.items()}


def to_row_major_cpu(shard: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of the values on the CPU, or the tensor itself if it is that already."""
    return shard.cpu().resolve_conj().resolve_neg().contiguous()


def _without_tensors(tree: Any) -> Any:
    """Return the tree for torch's metadata: meta tensors for tensors, and lists for tuples that contain tensors."""
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
            return type(tree)(tree)  # a copy, because the caller may change it meanwhile
    return tree


def _run_job(
    job: _SaveJob | Exception,
    folder: StoragePath,
    ranks: RankGroup,
    extras: SaveExtras,
    copied: Callable[[], None] = lambda: None,
) -> None:
    """Write this rank's blocks and commit the checkpoint on all ranks together; after an error remove this rank's files."""

    def files(token: str) -> tuple[StoragePath, StoragePath]:
        return folder / f"__{ranks.rank}_{token}.distcp", folder / f"__{ranks.rank}_{token}v.distcp"

    def remove_uncommitted(token: str) -> None:
        """Remove this rank's data files of the save, unless the manifest in the folder refers to them."""
        if not _is_committed(folder, token):
            for file in files(token):
                file.unlink(missing_ok=True)

    def write(token: str) -> list[tuple[str, StoredBlock, Stream]]:
        copied()
        return _write_local_blocks(_checked_job(job), files(token)[0])

    write_and_commit(
        ranks,
        folder,
        f"saving to {folder}",
        job if isinstance(job, Exception) else job.parts,
        write=write,
        begin=lambda token: extras.begin(),
        commit=lambda shares, token: _commit_save(_checked_job(job), folder, shares, token, extras),
        discard=remove_uncommitted,
        left="the folder holds the checkpoint that it held before, or the new one",
    )


def _checked_job(job: _SaveJob | Exception) -> _SaveJob:
    """Return ``job``, which is no error here: the exchange before would have raised it on all ranks."""
    assert isinstance(job, _SaveJob)
    return job


def _write_local_blocks(job: _SaveJob, file: StoragePath) -> list[tuple[str, StoredBlock, Stream]]:
    """Write this rank's blocks to one file and sync it, while a thread computes their digests; return their positions."""
    if not job.writes:
        return []
    with ThreadPoolExecutor(1) as thread:
        digests = thread.map(block_digest, job.writes.values(), [offset for _, offset in job.writes])
        with open_for_writing(file) as out:
            streams = [append_tensor(out, data) for data in job.writes.values()]
        return [
            (name, StoredBlock(offset, tuple(data.shape), file.name, stream.at, value), stream)
            for ((name, offset), data), stream, value in zip(job.writes.items(), streams, digests, strict=True)
        ]


def _commit_save(
    job: _SaveJob, folder: StoragePath, shares: list[list[tuple[str, StoredBlock, Stream]]], token: str, extras: SaveExtras
) -> None:
    """Write the manifest of the blocks of all ranks, which makes the checkpoint valid; then remove files of older saves."""
    from . import dcp_metadata as metadata  # imports torch.distributed.checkpoint, which takes a second

    written = [item for share in shares for item in share]
    blocks = group_by_key((name, block) for name, block, _ in written)
    entries = {name: StoredTensor(entry.shape, entry.dtype, tuple(blocks.get(name, ()))) for name, entry in job.entries.items()}
    values = folder / f"__0_{token}v.distcp"
    metadata_file = metadata.encode_metadata(
        job.values, entries, {(name, block.offset): stream for name, block, stream in written}, values
    )
    metadata_path = folder / ".metadata"
    checksums = (sha256(metadata_file), *((sha256(read_file(metadata_path)),) if path_exists(metadata_path) else ()))
    files = {name: file_size(folder / name) for name in {values.name, *(block.file for _, block, _ in written)}}
    sync_folder(folder)
    Manifest(entries, job.encoded, files, checksums, notes=extras.notes).write(folder)
    try:
        replace_file(metadata_path, metadata_file)
        for path in folder.iterdir():
            if _DATA_FILE.fullmatch(path.name) and token not in path.name:
                path.unlink()
        extras.done()
    except OSError as error:
        raise CheckpointError(f"the new checkpoint is complete, but files next to it could not be updated: {error}") from error


def _is_committed(folder: StoragePath, token: str) -> bool:
    """Return True if the manifest in the folder is that of the save with this token."""
    with contextlib.suppress(OSError, CheckpointError):
        return token.encode() in read_file(folder / MANIFEST_NAME)
    return False
