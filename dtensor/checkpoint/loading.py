"""Loading: every rank reads the parts of stored blocks that its own blocks are made of. All is verified before anything is
changed.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from . import dcp_metadata as metadata
from . import safetensors as hugging_face
from .async_save import finish_pending_saves
from .block_io import CheckpointFiles, CommonBox, RemoteCheckpointFiles
from .coordinator import RankGroup, StateParts
from .digest import MASK, block_digest
from .files import RemotePath, StoragePath, damage_error, parse_path, path_exists
from .load_targets import Target, check_shared_memory, write_all_targets
from .local_blocks import LocalBlock, iter_local_blocks
from .manifest import MANIFEST_NAME, Manifest, StoredBlock, StoredTensor, check_files, read_manifest
from .manifest_transforms import Arrange, arrange_manifest, rename_manifest
from .state_matching import MatchResult, assign_values, match_trees
from .stateful import Expanded, expand_state
from .tree import decode_tree

Sums = dict[tuple[str, int], int]  # (tensor, index of the stored block) -> digest of the parts that this rank read
Buffers = dict[str, dict[int | None, torch.Tensor]]


class Loaded(NamedTuple):
    """Result of :func:`load`.

    Attributes:
        missing_keys: requested keys that are not in the checkpoint.
        unexpected_keys: keys of the checkpoint that were not requested.
        bytes_read: bytes of tensors that this process read.

    >>> import tempfile, torch, dtensor as dt
    >>> folder = tempfile.mkdtemp()
    >>> dt.checkpoint.save({"w": torch.ones(5, 3), "step": 7}, folder)
    >>> dt.checkpoint.load({"w": torch.zeros(5, 3)}, folder, strict=False).unexpected_keys
    ['step']

    A record: no communication.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    bytes_read: int


def load(
    state: Any,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    convert: bool = False,
    rename: Callable[[str], str] | Mapping[str, str] | None = None,
    arrange: Arrange | None = None,
    process_group: Any = None,
) -> Loaded:
    """Fill ``state`` from the checkpoint in the folder ``path``, which may have been saved under other meshes and layouts.

    Tensors are filled in their own memory. Tensors on ``meta`` are replaced by new ones with their layout, plain values are
    replaced in their dicts and lists, and objects get their state by ``load_state_dict``. Checkpoints of torch's DCP can be
    loaded too, and models in the Hugging Face layout (a folder with ``model.safetensors`` or an index, or one ``.safetensors``
    file). Everything is read and verified before anything is changed. That needs memory for one more copy of this rank's local
    tensors.

    Args:
        state: as for :func:`save`; with ``strict=False`` it may be a part of what was saved.
        strict: raise if a requested key is not in the checkpoint, or the checkpoint has a key that is not requested.
        convert: convert floating-point and complex tensors of another dtype to the requested one.
        rename: a function from a key in the checkpoint to the key here, called for each string key of each dict, also those of
            modules and optimizers. Or a dict of the keys that differ, which may be dotted names as in messages:
            ``{"model.0.weight": "net.0.weight"}``. At least one key of such a dict must be in the checkpoint.
        arrange: a function from a dict of the stored tensors to a dict of the requested tensors, by name. It may stack,
            concatenate, slice and transpose them, and each rank reads only its part of the results. Its arguments have no
            values.
        process_group: the ranks that load together, default all.

    Raises:
        CheckpointError: on all ranks, with the same text, and nothing is changed: no checkpoint, a truncated or corrupted one,
            other shapes or dtypes, missing or unexpected keys.

    Cost: each rank reads the bytes of its own blocks, and one rank reads the manifest and broadcasts it; a gather and a
    broadcast of digests.

    >>> import tempfile, dtensor as dt
    >>> mesh, folder = dt.init_device_mesh("cpu", (2,)), tempfile.mkdtemp()
    >>> dt.checkpoint.save({"w": dt.ones(5, 3, device_mesh=mesh, placements=[dt.Shard(0)])}, folder)
    >>> state = {"w": dt.zeros(5, 3, device_mesh=mesh, placements=[dt.Shard(1)])}
    >>> dt.checkpoint.load(state, folder).bytes_read, state["w"].sum().item()
    (60, 15.0)
    >>> import torch
    >>> folder = tempfile.mkdtemp()
    >>> dt.checkpoint.save({"module.w": dt.ones(3, 4, device_mesh=mesh, placements=[dt.Shard(0)])}, folder)
    >>> state = {"w": torch.zeros(3, 4, dtype=torch.bfloat16)}
    >>> dt.checkpoint.load(state, folder, convert=True, rename=lambda key: key.removeprefix("module.")).missing_keys
    []
    >>> state["w"].sum()
    tensor(12., dtype=torch.bfloat16)
    """
    finish_pending_saves()
    ranks, folder = RankGroup("checkpoint.load", process_group), parse_path(path)
    what = f"loading {folder}"
    manifest = ranks.run_on_all(what, lambda: None, lambda _: find_manifest(folder))
    if rename is not None:
        manifest = rename_manifest(manifest, rename)
    if arrange is not None:
        manifest = arrange_manifest(manifest, arrange)
    data_folder = folder.parent if hugging_face.is_safetensors_file(folder) else folder
    return _fill_state(state, data_folder, manifest, ranks, what, strict, convert)


def _fill_state(
    state: Any, folder: StoragePath, manifest: Manifest, ranks: RankGroup, what: str, strict: bool, convert: bool
) -> Loaded:
    """Match the state with the manifest on all ranks, read and verify the values, and write them into the state."""
    results: list[tuple[Expanded, MatchResult]] = []

    def match_state() -> StateParts:
        """Match the state with the manifest, keep the match in ``results``, and return what must be equal on all ranks."""
        expanded = expand_state(state, manifest.tensors)
        results.append((expanded, match_trees(expanded, manifest, strict, convert)))
        return results[0][1].parts

    ranks.run_if_same(what, match_state, lambda: None)
    expanded, match = results[0]
    buffers: Buffers = {}
    with (RemoteCheckpointFiles if isinstance(folder, RemotePath) else CheckpointFiles)(folder, manifest.links) as files:
        ranks.run_on_all(
            what,
            lambda: _read_targets(match.targets, manifest, files, buffers, ranks),
            lambda sums: _verify_digests(sums, manifest, folder),
        )
        bytes_read = files.bytes_read
    write_all_targets(match.targets.values(), buffers)
    assign_values(state, match.tree, expanded.installs)
    return Loaded(match.missing, match.unexpected, bytes_read)


def find_manifest(folder: StoragePath) -> Manifest:
    """Read the manifest of a checkpoint of this library or of torch's DCP, or of a model in the Hugging Face layout.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        if path_exists(folder / MANIFEST_NAME):
            return read_manifest(folder)
        if path_exists(folder / metadata.METADATA_NAME):
            return metadata.read_dcp_manifest(folder)
        if hugging_face.is_safetensors_model(folder):
            return hugging_face.read_safetensors_manifest(folder)
        problem = "holds no complete checkpoint" if folder.is_dir() else "does not exist"
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}: {error.filename})") from error
    except Exception as error:  # parsers raise many types for damaged files
        reason = str(error).splitlines() or [""]
        raise damage_error(f"the checkpoint in {folder} is damaged ({type(error).__name__}: {reason[0]:.200})") from error
    raise CheckpointError(f"{folder} {problem} (no {MANIFEST_NAME}, {metadata.METADATA_NAME} or {hugging_face.SINGLE_FILE_NAME})")


def read_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return shape, dtype and stored blocks of every tensor in a checkpoint, by name. Nothing is loaded.

    Each caller reads the manifest; no communication.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.

    >>> import tempfile, torch, dtensor as dt
    >>> folder = tempfile.mkdtemp()
    >>> dt.checkpoint.save({"w": torch.ones(5, 3), "step": 7}, folder)
    >>> {name: (entry.shape, entry.dtype) for name, entry in dt.checkpoint.read_tensors(folder).items()}
    {'w': ((5, 3), 'float32')}
    """
    return find_manifest(parse_path(path)).tensors


def read_tree(path: str | os.PathLike[str]) -> Any:
    """Return the plain values of a checkpoint in their nesting, with meta tensors in place of tensors.

    Each caller reads the manifest; no communication.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.

    >>> import tempfile, torch, dtensor as dt
    >>> folder = tempfile.mkdtemp()
    >>> dt.checkpoint.save({"w": torch.ones(5, 3), "step": 7}, folder)
    >>> tree = dt.checkpoint.read_tree(folder)
    >>> tree["step"], tree["w"].device.type, tuple(tree["w"].shape)
    (7, 'meta', (5, 3))
    """
    manifest = find_manifest(parse_path(path))
    tensors = {n: torch.empty(e.shape, dtype=e.torch_dtype, device="meta") for n, e in manifest.tensors.items()}
    return decode_tree(manifest.tree, tensors)


# --- reading ---------------------------------------------------------------------------------------------------------------
def _read_targets(
    targets: Mapping[str, Target], manifest: Manifest, files: CheckpointFiles, buffers: Buffers, ranks: RankGroup
) -> Sums:
    """Read this rank's blocks of all targets into ``buffers``; return digests of the parts of incompletely read blocks."""
    check_files(manifest, files.folder)
    sums: Sums = {}
    for name, held in iter_local_blocks({name: target.like for name, target in targets.items()}, ranks.rank, ranks.participants):
        target, entry = targets[name], manifest.tensors[name]
        own, known = target.allocate_buffers(entry.torch_dtype), dict[Any, LocalBlock]()
        for local_block in sorted(held, key=lambda local_block: not local_block.is_primary):
            first = known.setdefault((local_block.offset, local_block.shape), local_block)
            block = target.block_buffer(own, local_block)
            if first is not local_block:  # in one process replicas are read once and copied
                block.copy_(target.block_buffer(own, first))
                continue
            boxes = list(_common_boxes(local_block, entry))
            mapped = _map_block(target, local_block, boxes, entry, files)
            if mapped is None:
                _read_block(block, boxes, name, files)
            else:
                own[local_block.member] = block = mapped
            _add_digests(block, local_block, boxes, name, files, sums)
        buffers[name] = {member: read.to(target.dtype) for member, read in own.items()}
    check_shared_memory(targets.values(), buffers)
    return sums


def _common_boxes(local_block: LocalBlock, entry: StoredTensor) -> Iterator[CommonBox]:
    """Yield the intersections of a local block with the stored blocks of its tensor."""
    for number, block in enumerate(entry.blocks):
        start = tuple(max(a, b) for a, b in zip(local_block.offset, block.offset, strict=True))
        ends = zip(local_block.offset, local_block.shape, block.offset, block.shape, strict=True)
        size = tuple(min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, start, strict=True))
        if all(length > 0 for length in size):
            here, there = (tuple(a - b for a, b in zip(start, outer.offset, strict=True)) for outer in (local_block, block))
            yield CommonBox(number, block, start, size, here, there)


def _map_block(
    target: Target, local_block: LocalBlock, boxes: list[CommonBox], entry: StoredTensor, files: CheckpointFiles
) -> torch.Tensor | None:
    """Return a local block as a view of the mapped file; None unless it is one stored block, to be copied to a given tensor."""
    if (
        target.requested is None
        or target.requested.is_meta
        or local_block.part is not None
        or len(boxes) != 1
        or boxes[0].size != tuple(local_block.shape)
    ):
        return None
    return files.mapped_box(entry.torch_dtype, boxes[0])


def _read_block(out: torch.Tensor, boxes: list[CommonBox], name: str, files: CheckpointFiles) -> None:
    """Read a local block into ``out`` from all stored blocks that intersect it; raise if they do not cover it."""
    dense = out if out.is_contiguous() else out.new_empty(out.shape)
    for box in boxes:
        files.read_box(dense, box)
    if dense is not out:
        out.copy_(dense)
    uncovered = out.numel() - sum(math.prod(box.size) for box in boxes)
    if uncovered:
        raise damage_error(f"{files.folder}: the stored blocks of {name!r} do not cover {uncovered} of its elements")


def _add_digests(
    read: torch.Tensor, local_block: LocalBlock, boxes: list[CommonBox], name: str, files: CheckpointFiles, sums: Sums
) -> None:
    """Verify stored blocks that were read completely; of others add the digest of the read part to ``sums``."""
    for box in boxes:
        if box.block.digest is None:
            continue
        part = read[tuple(slice(a, a + n) for a, n in zip(box.here, box.size, strict=True))]
        part_digest = block_digest(part, box.start)
        if box.size == box.block.shape:
            if part_digest != box.block.digest:
                raise _corrupted_error(name, files.folder, box.block)
        elif local_block.is_primary:
            sums[name, box.number] = (sums.get((name, box.number), 0) + part_digest) & MASK


def _verify_digests(sums: list[Sums], manifest: Manifest, folder: StoragePath) -> None:
    """Raise if the digests of the parts that all ranks read do not add up to the digest of a stored block."""
    total = Counter[tuple[str, int]]()
    for rank_sums in sums:
        total.update(rank_sums)
    for (name, number), value in total.items():
        block = manifest.tensors[name].blocks[number]
        if value & MASK != block.digest:
            raise _corrupted_error(name, folder, block)


def _corrupted_error(name: str, folder: StoragePath, block: StoredBlock) -> CheckpointError:
    """Return the CheckpointError for a stored block that does not match its digest."""
    return damage_error(
        f"{name!r} is corrupted: its block at {block.offset} in {folder / block.file} does not match its checksum"
    )
