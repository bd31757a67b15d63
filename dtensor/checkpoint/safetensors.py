"""Models in the Hugging Face layout: ``safetensors`` files and, where there are several, an index of what is in which.

In a file tensors stand row-major, without gaps, behind a header that says where (see ``header``). So every rank writes the blocks
that it holds to their places in the files, and reads those that it needs: no rank ever holds a whole model, or a whole tensor
that is not its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..tensor.views.block_owners import Held, held_here, piece_of
from .async_save import finish_pending
from .block_io import write_box
from .coordinator import Parts, Ranks
from .digest import MASK, digest
from .files import check_name, present, read_regular, replace_file, strict_json, sync_folder
from .manifest import Entry, Manifest, check_entries
from .remote import Address, local_of
from .safetensors_header import NAME_OF, Place, header_of, read_header
from .saving import parts_of, reduced, row_major, with_values
from .stateful import expand
from .tree import Stored, encode, named_tensors
from .two_phase_commit import in_two_steps

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


# --- reading ---------------------------------------------------------------------------------------------------------------
def is_file(path: Address) -> bool:
    """Whether ``path`` is a single file of this layout, rather than a folder."""
    return path.suffix == ".safetensors" and not path.is_dir()


def is_model(path: Address) -> bool:
    """Whether ``path`` is a model in this layout: a folder with an index or a single file, or such a file."""
    return is_file(path) or present(path / INDEX) or present(path / SINGLE)


def read_model(path: Address) -> Manifest:
    """What the files hold, and where, with their checksums where this library wrote them.

    Raises:
        CheckpointError: a file is missing, truncated or damaged, or lacks what the index says.
    """
    if is_file(path):
        return _joined(path.parent, {path.name: None})
    if not present(path / INDEX):
        return _joined(path, {SINGLE: None})
    files: dict[str, set[str] | None] = {}
    for name, file in strict_json(read_regular(path / INDEX, links=True), numbers=False)["weight_map"].items():
        files.setdefault(check_name(file, path / INDEX), set()).add(name)  # type: ignore[union-attr]  # a set, just made
    return _joined(path, files)


def _joined(folder: Address, files: Mapping[str, set[str] | None]) -> Manifest:
    tensors: dict[str, Entry] = {}
    sizes = {}
    for file, expected in files.items():
        entries, sizes[file] = read_header(folder / file)
        wanted = entries.keys() if expected is None else expected
        if wanted - entries.keys():
            raise CheckpointError(
                f"{folder / file} does not have {sorted(wanted - entries.keys())[:4]}, which {INDEX} says are in it"
            )
        tensors |= {name: entry for name, entry in entries.items() if name in wanted}
    manifest = Manifest(tensors, encode({name: Stored(name) for name in tensors}), sizes, links=True)
    check_entries(manifest, folder)
    return manifest


# --- writing ---------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _File:
    """A file to be written: its tensors, and in bytes how long its header and the whole are."""

    name: str
    places: tuple[Place, ...]
    header: int
    size: int


def save_safetensors(
    state: Any, path: str | os.PathLike[str], *, max_shard_size: int = 5_000_000_000, process_group: Any = None
) -> None:
    """Export tensors to the folder ``path`` in the Hugging Face layout, for other programs to read.

    All ranks call it. Every rank writes its own blocks to their places in the files; nothing is gathered. Parameters that a
    module knows by several names are written once, by the first of them. :func:`load` reads such a folder (or a single file).

    Args:
        state: a module, or a (nested) dict of tensors; keys are joined by dots.
        max_shard_size: bytes of tensors in a file. If one suffices it is ``model.safetensors``, otherwise there are
            ``model-00001-of-00003.safetensors`` ... and ``model.safetensors.index.json``.
        process_group: the ranks that save together, default all.

    Raises:
        CheckpointError: on all ranks, with the same words: a folder that holds a model already or cannot be written, a full disk,
            something that is no tensor, a dtype that the format lacks.

    >>> import tempfile, dtensor as dt
    >>> mesh, folder = dt.init_device_mesh("cpu", (2,)), tempfile.mkdtemp()
    >>> dt.checkpoint.save_safetensors({"w": dt.ones(5, 3, device_mesh=mesh, placements=[dt.Shard(0)])}, folder)
    >>> state = {"w": dt.zeros(5, 3, device_mesh=mesh, placements=[dt.Shard(1)])}
    >>> dt.checkpoint.load(state, folder).bytes_read, state["w"].sum().item()
    (60, 15.0)
    """
    finish_pending()
    ranks, folder = Ranks("checkpoint.save_safetensors", process_group), local_of(path)
    what = f"exporting to {folder}"
    tensors: dict[str, Any] = {}
    files: list[_File] = []
    parts: Parts | Exception
    try:
        tensors = with_values(unique_tensors(state))
        files = _plan(tensors, max_shard_size)
        parts = parts_of(tensors, max_shard_size=max_shard_size)
    except Exception as error:  # told when the ranks meet
        parts = error
    else:
        tensors = reduced(tensors, parts, ranks, what)
    in_two_steps(
        ranks,
        folder,
        what,
        parts,
        begin=lambda token: _begin(folder, files, token),
        write=lambda token: _write(tensors, files, _parts(folder, files, token), ranks),
        commit=lambda sums, token: _publish(folder, files, _parts(folder, files, token), sums),
        discard=lambda token: _discard(_parts(folder, files, token), ranks),
        left="the folder holds a complete model or none",
    )


def _begin(folder: Path, files: list[_File], token: str) -> None:
    if is_model(folder):
        raise CheckpointError(f"{folder} has a model already; export into a new folder")
    for left in folder.glob(".model*.safetensors.*"):  # by an export that was killed
        left.unlink()
    _allocate(_parts(folder, files, token), files)


def _parts(folder: Path, files: Iterable[_File], token: str) -> list[Path]:
    """Where the files are written, aside."""
    return [folder / f".{file.name}.{token}" for file in files]


def _discard(parts: Iterable[Path], ranks: Ranks) -> None:
    for part in parts if ranks.coordinates else ():
        part.unlink(missing_ok=True)


def unique_tensors(state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of ``state`` by dotted name; parameters that a module knows by several names only by the first.

    Raises:
        CheckpointError: ``state`` has other values than tensors.
    """
    tree = expand(state).tree
    tensors = named_tensors(tree)
    others = sorted(set(_leaves(tree)) - tensors.keys())
    if others:
        raise CheckpointError(
            f"{others[:4]} are not tensors, and this file format stores tensors only; export the state dict of the model alone"
        )
    if isinstance(state, torch.nn.Module):
        first = dict(state.named_parameters())
        tied = {name for name, _ in state.named_parameters(remove_duplicate=False)} - first.keys()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    return tensors


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterable[str]:
    if isinstance(tree, Mapping):
        for key, item in tree.items():
            yield from _leaves(item, (*path, str(key)))
    else:
        yield ".".join(path)


def _plan(tensors: Mapping[str, Any], most: int) -> list[_File]:
    """Tensors dealt to files in order, as many to each as it may hold."""
    groups: list[list[str]] = [[]]
    held = 0
    for name, x in tensors.items():
        if x.dtype not in NAME_OF:
            raise CheckpointError(f"{name!r} is {str(x.dtype).removeprefix('torch.')}, which safetensors files do not have")
        nbytes = x.numel() * x.dtype.itemsize
        if groups[-1] and held + nbytes > most:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += nbytes
    count = len(groups)
    names = [SINGLE] if count == 1 else [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
    return [_layout(file, {name: tensors[name] for name in group}) for file, group in zip(names, groups, strict=True)]


def _layout(file: str, tensors: Mapping[str, Any]) -> _File:
    places, at = [], 0
    for name, x in tensors.items():
        places.append(Place(at, at + x.numel() * x.dtype.itemsize, name, x.dtype, tuple(x.shape)))
        at = places[-1].last
    length = len(header_of(places, {}))
    return _File(file, tuple(places), length, length + at)


def _allocate(parts: list[Path], files: Iterable[_File]) -> None:
    """Files of their full size, so that a full disk is found out before anybody writes."""
    made = []
    try:
        for part, file in zip(parts, files, strict=True):
            made.append(part)
            with open(part, "xb") as out:
                os.posix_fallocate(out.fileno(), 0, file.size)
    except OSError:
        for path in made:
            path.unlink(missing_ok=True)
        raise


def _write(tensors: Mapping[str, Any], files: Iterable[_File], parts: Iterable[Path], ranks: Ranks) -> dict[str, int]:
    """This rank's blocks to their places; what they add to the digests of their tensors."""
    blocks: dict[str, list[Held]] = {
        name: [h for h in held if h.answers] for name, held in held_here(tensors, ranks.rank, ranks.among)
    }
    sums: dict[str, int] = {}
    for file, part in zip(files, parts, strict=True):
        if any(blocks[place.name] for place in file.places):
            with open(part, "r+b") as out:
                for place in file.places:
                    for held in blocks[place.name]:
                        piece = row_major(piece_of(tensors[place.name], held).detach())
                        write_box(piece, out, file.header + place.first, place.shape, held.offset)
                        sums[place.name] = (sums.get(place.name, 0) + digest(piece, held.offset)) & MASK
                out.flush()
                os.fsync(out.fileno())
    return sums


def _publish(folder: Path, files: list[_File], parts: list[Path], sums: list[dict[str, int]]) -> None:
    """Headers, with what all ranks say of the tensors; the index last: without it, the files of a larger model are none."""
    for file, part in zip(files, parts, strict=True):
        digests = {place.name: sum(each.get(place.name, 0) for each in sums) & MASK for place in file.places}
        with open(part, "r+b") as out:
            out.write(header_of(file.places, digests))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, folder / file.name)
    sync_folder(folder)
    if len(files) > 1:
        total = sum(file.size - file.header for file in files)
        held = {place.name: file.name for file in files for place in file.places}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": held}, indent=2)
        replace_file(folder / INDEX, text.encode())
