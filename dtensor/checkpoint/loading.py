"""Loading: every rank reads the parts of stored blocks that its own blocks are made of; all is verified, then changed."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..tensor.views.block_owners import Held, held_here
from . import dcp_metadata as metadata
from . import safetensors as hugging_face
from .async_save import finish_pending
from .block_io import Box, Files, RemoteFiles
from .coordinator import Parts, Ranks
from .digest import MASK, digest
from .files import present
from .key_renaming import renamed
from .lazy_transforms import Arrange, arranged
from .load_targets import Target
from .manifest import NAME, Block, Entry, Manifest, check_files, read_manifest
from .remote import Address, Remote, place_of
from .state_matching import Matched, match_trees, put_back
from .stateful import Expanded, expand
from .storage_sharing import check_shared, finish
from .tree import decode

Sums = dict[tuple[str, int], int]  # (tensor, number of the stored block) -> what this rank adds to its digest
Buffers = dict[str, dict[int | None, torch.Tensor]]


class Loaded(NamedTuple):
    """What :func:`load` did.

    Attributes:
        missing_keys: asked for, not in the checkpoint.
        unexpected_keys: in the checkpoint, not asked for.
        bytes_read: by this process, of tensors.

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
    """Fill ``state`` from the checkpoint in the folder ``path``, whatever the meshes and layouts that it was saved under.

    Tensors are filled in their own memory (those on ``meta`` are replaced by new ones with their layout), plain values replaced
    in their dicts and lists, objects given their state by ``load_state_dict``. Checkpoints of torch's DCP are read
    too, and models in the Hugging Face layout (a folder with ``model.safetensors`` or an index, or one ``.safetensors`` file).
    Everything is read and verified before anything is changed; that takes memory for one more copy of what this rank holds.

    Args:
        state: as for :func:`save`; a part of what was saved, with ``strict=False``.
        strict: raise if something is asked for that is not in the checkpoint, or the checkpoint holds what is not asked for.
        convert: floating-point and complex tensors of another dtype are converted to the one that is asked for.
        rename: a function from a key in the checkpoint to the one here, called for each string key of each dict, those of modules
            and optimizers among them. Or a dict of the keys that differ, which may be dotted names, as messages show them:
            ``{"model.0.weight": "net.0.weight"}``. At least one key of such a dict must be in the checkpoint.
        arrange: of a dict of tensors, from these to those that are asked for, by name. What it stacks, joins, cuts and turns is
            read so, each piece by who has it; the tensors that it is given have no values.
        process_group: the ranks that load together, default all.

    Raises:
        CheckpointError: on all ranks, with the same words, and nothing is changed: no checkpoint there, a truncated or corrupted
            one, other shapes or dtypes, missing or unexpected keys.

    Cost: each rank reads the bytes of its own blocks, one rank the manifest, which it broadcasts; a gather and a broadcast of
    digests.

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
    finish_pending()
    ranks, folder = Ranks("checkpoint.load", process_group), place_of(path)
    what = f"loading {folder}"
    manifest = ranks.together(what, lambda: None, lambda _: find_manifest(folder))
    if rename is not None:
        manifest = renamed(manifest, rename)
    if arrange is not None:
        manifest = arranged(manifest, arrange)
    where = folder.parent if hugging_face.is_file(folder) else folder
    return _fill_state(state, where, manifest, ranks, what, strict, convert)


def _fill_state(state: Any, folder: Address, manifest: Manifest, ranks: Ranks, what: str, strict: bool, convert: bool) -> Loaded:
    """Compare what all ranks ask for; read and verify it; change the state."""
    found: list[tuple[Expanded, Matched]] = []

    def matched() -> Parts:
        expanded = expand(state, manifest.tensors)
        found.append((expanded, match_trees(expanded, manifest, strict, convert)))
        return found[0][1].parts

    ranks.alike(what, matched, lambda: None)
    expanded, wanted = found[0]
    buffers: Buffers = {}
    with (RemoteFiles if isinstance(folder, Remote) else Files)(folder, manifest.links) as files:
        ranks.together(
            what,
            lambda: _read(wanted.targets, manifest, files, buffers, ranks),
            lambda sums: _verify(sums, manifest),
        )
        read = files.bytes_read
    finish(wanted.targets.values(), buffers)
    put_back(state, wanted.tree, expanded.installs)
    return Loaded(wanted.missing, wanted.unexpected, read)


def find_manifest(folder: Address) -> Manifest:
    """The manifest of a checkpoint: ours, torch's, or a model in the Hugging Face layout.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        if present(folder / NAME):
            return read_manifest(folder)
        if present(folder / metadata.NAME):
            return metadata.read_foreign(folder)
        if hugging_face.is_model(folder):
            return hugging_face.read_model(folder)
        there = "holds no complete checkpoint" if folder.is_dir() else "does not exist"
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror}: {error.filename})") from error
    except Exception as error:  # whatever those who parse it trip over: it is from outside
        reason = str(error).splitlines() or [""]
        raise CheckpointError(f"the checkpoint in {folder} is damaged ({type(error).__name__}: {reason[0]:.200})") from error
    raise CheckpointError(f"{folder} {there} (no {NAME}, {metadata.NAME} or {hugging_face.SINGLE})")


def read_tensors(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """Name -> shape, dtype and stored blocks of every tensor in a checkpoint; nothing is loaded.

    Each caller reads the manifest; no communication.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest is damaged.

    >>> import tempfile, torch, dtensor as dt
    >>> folder = tempfile.mkdtemp()
    >>> dt.checkpoint.save({"w": torch.ones(5, 3), "step": 7}, folder)
    >>> {name: (entry.shape, entry.dtype) for name, entry in dt.checkpoint.read_tensors(folder).items()}
    {'w': ((5, 3), 'float32')}
    """
    return find_manifest(place_of(path)).tensors


def read_tree(path: str | os.PathLike[str]) -> Any:
    """The plain values of a checkpoint in their nesting, meta tensors in the places of tensors.

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
    manifest = find_manifest(place_of(path))
    tensors = {n: torch.empty(e.shape, dtype=e.torch_dtype, device="meta") for n, e in manifest.tensors.items()}
    return decode(manifest.tree, tensors)


# --- reading ---------------------------------------------------------------------------------------------------------------
def _read(targets: Mapping[str, Target], manifest: Manifest, files: Files, buffers: Buffers, ranks: Ranks) -> Sums:
    check_files(manifest, files.folder)
    sums: Sums = {}
    for name, held in held_here({name: target.like for name, target in targets.items()}, ranks.rank, ranks.among):
        target, entry = targets[name], manifest.tensors[name]
        own, known = target.buffers(entry.torch_dtype), dict[Any, Held]()
        for piece in sorted(held, key=lambda piece: not piece.answers):
            first = known.setdefault((piece.offset, piece.shape), piece)
            block = target.block(own, piece)
            if first is not piece:  # in one process replicas are read once and copied
                block.copy_(target.block(own, first))
                continue
            boxes = list(_boxes(piece, entry))
            mapped = _mapped(target, piece, boxes, entry, files)
            if mapped is None:
                _fill(block, boxes, name, files)
            else:
                own[piece.member] = block = mapped
            _account(block, piece, boxes, name, files, sums)
        buffers[name] = {member: read.to(target.dtype) for member, read in own.items()}
    check_shared(targets.values(), buffers)
    return sums


def _boxes(piece: Held, entry: Entry) -> Iterator[Box]:
    for number, block in enumerate(entry.blocks):
        start = tuple(max(a, b) for a, b in zip(piece.offset, block.offset, strict=True))
        ends = zip(piece.offset, piece.shape, block.offset, block.shape, strict=True)
        size = tuple(min(a + n, b + m) - s for (a, n, b, m), s in zip(ends, start, strict=True))
        if all(length > 0 for length in size):
            here, there = (tuple(a - b for a, b in zip(start, whole.offset, strict=True)) for whole in (piece, block))
            yield Box(number, block, start, size, here, there)


def _mapped(target: Target, piece: Held, boxes: list[Box], entry: Entry, files: Files) -> torch.Tensor | None:
    """A block of ours as it lies in a file, if it lies in one stored block and is copied to the memory of what was asked for."""
    if (
        target.asked is None
        or target.asked.is_meta
        or piece.part is not None
        or len(boxes) != 1
        or boxes[0].size != tuple(piece.shape)
    ):
        return None
    return files.mapped_box(entry.torch_dtype, boxes[0])


def _fill(out: torch.Tensor, boxes: list[Box], name: str, files: Files) -> None:
    """Read one block of ours from all stored blocks that it meets."""
    dense = out if out.is_contiguous() else out.new_empty(out.shape)
    for box in boxes:
        files.read_box(dense, box)
    if dense is not out:
        out.copy_(dense)
    left = out.numel() - sum(math.prod(box.size) for box in boxes)
    if left:
        raise CheckpointError(f"the stored blocks of {name!r} do not cover {left} of its elements")


def _account(read: torch.Tensor, piece: Held, boxes: list[Box], name: str, files: Files, sums: Sums) -> None:
    """A block that was read entirely is verified at once; of others, ranks add up what each has read, replicas once."""
    for box in boxes:
        if box.block.digest is None:
            continue
        part = read[tuple(slice(a, a + n) for a, n in zip(box.here, box.size, strict=True))]
        found = digest(part, box.start)
        if box.size == box.block.shape:
            if found != box.block.digest:
                raise _corrupted(name, box.block, files.folder)
        elif piece.answers:
            sums[name, box.number] = (sums.get((name, box.number), 0) + found) & MASK


def _verify(sums: list[Sums], manifest: Manifest) -> None:
    total = Counter[tuple[str, int]]()
    for one in sums:
        total.update(one)
    for (name, number), value in total.items():
        block = manifest.tensors[name].blocks[number]
        if value & MASK != block.digest:
            raise _corrupted(name, block, None)


def _corrupted(name: str, block: Block, folder: Address | None) -> CheckpointError:
    file = block.file if folder is None else folder / block.file
    return CheckpointError(f"{name!r} is corrupted: its block at {block.offset} in {file} does not match its checksum")
