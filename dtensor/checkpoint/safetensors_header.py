"""The header of a ``safetensors`` file: which tensors the file holds, and where.

A file is the length of its header in 8 bytes, the header in JSON (name -> dtype, shape, first and last byte), then the tensors,
row-major, without gaps (https://huggingface.co/docs/safetensors). Where this library writes one, the header also holds the
digests of the tensors and a checksum of what it says, in its map of strings for free use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from .files import opened, sha256, size_of, strict_json
from .manifest import Block, Entry
from .remote import Address

_LONGEST = 100_000_000  # bytes of a header: the format's own bound

_NAMES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DIGESTS = "dtensor.digests"  # in a header's __metadata__: the checksums of its tensors, and of itself
NAME_OF = {dtype: name for name, dtype in _NAMES.items()}


class Place(NamedTuple):
    """What a header says of a tensor: its first byte, and that behind its last, behind the header."""

    first: int
    last: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def entry(self, file: str, start: int, found: int | None) -> Entry:
        """The stored tensor, in a file whose header is ``start`` bytes long, with its digest."""
        block = Block((0,) * len(self.shape), self.shape, file, start + self.first, found)
        return Entry(self.shape, str(self.dtype).removeprefix("torch."), (block,) if self.last > self.first else ())


# --- writing ---------------------------------------------------------------------------------------------------------------
def header_of(places: Sequence[Place], digests: Mapping[str, int]) -> bytes:
    """What a file with these tensors begins with; as long whatever the digests are."""
    entries = {p.name: {"dtype": NAME_OF[p.dtype], "shape": list(p.shape), "data_offsets": [p.first, p.last]} for p in places}
    known = {place.name: digests.get(place.name, 0) for place in places}
    told = {"header": _print(entries, known), "tensors": {name: f"{value:016x}" for name, value in known.items()}}
    header = {"__metadata__": {"format": "pt", _DIGESTS: json.dumps(told, separators=(",", ":"))}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _print(entries: Mapping[str, Any], digests: Mapping[str, int]) -> str:
    return sha256(json.dumps([entries, digests], sort_keys=True).encode())


# --- reading ---------------------------------------------------------------------------------------------------------------
def read_header(path: Address) -> tuple[dict[str, Entry], int]:
    """The tensors of one file, and the bytes that it has."""
    size = size_of(path, links=True)
    with opened(path, links=True) as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_LONGEST, size - 8):
            raise CheckpointError(f"{path} is truncated, or is not a safetensors file")
        text = file.read(length)
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with a brace")
        header = strict_json(text, numbers=False)
        digests = _digests_in(header)
        places = [_place(name, said) for name, said in header.items() if name != "__metadata__"]
        _check_places(places, size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged or truncated: its header cannot be read ({type(error).__name__}: {error})"
        ) from error
    return {place.name: place.entry(path.name, 8 + length, digests.get(place.name)) for place in places}, size


def _place(name: str, said: Mapping[str, Any]) -> Place:
    dtype, shape, (first, last) = _NAMES[said["dtype"]], tuple(said["shape"]), said["data_offsets"]
    if len(said) != 3 or any(type(n) is not int or n < 0 for n in (*shape, first, last)):
        raise ValueError(f"the entry of {name!r} is {dict(said)}")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r}: dtype {dtype} and shape {shape} do not need bytes {first} to {last}")
    return Place(first, last, name, dtype, shape)


def _check_places(places: Iterable[Place], size: int) -> None:
    """Tensors stand one behind the other, and fill the file."""
    end = 0
    for place in sorted(places):
        if place.first != end:
            raise ValueError(f"{place.name!r} begins at byte {place.first}, but the entry before it ends at byte {end}")
        end = place.last
    if end != size:
        raise ValueError(f"it describes {end:,} bytes, but the file has {size:,}")


def _digests_in(header: Mapping[str, Any]) -> dict[str, int]:
    """The checksums that :func:`save_safetensors` put into a header; none in those of other programs."""
    said = header.get("__metadata__", {})
    if not isinstance(said, dict) or not all(isinstance(item, str) for item in said.values()):
        raise TypeError("__metadata__ is not a map of strings")
    if _DIGESTS not in said:
        return {}
    told = strict_json(said[_DIGESTS])
    digests = {name: int(value, 16) for name, value in told["tensors"].items()}
    if told["header"] != _print({name: item for name, item in header.items() if name != "__metadata__"}, digests):
        raise ValueError(
            f"it does not match its checksum; if another program has changed the file, remove {_DIGESTS!r} from its __metadata__"
        )
    return digests
