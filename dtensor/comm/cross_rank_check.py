"""Cross-rank check: compares between ranks what all of them must pass alike, such as the arguments of functions of plain
tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import torch

from ..base.caches import memoize
from ..base.recorder_hooks import untracked
from ..base.tracing import has_no_values
from ..errors import LayoutError, MixedTensorError
from ..mesh.device_mesh import DeviceMesh
from .flat_rows import content_bytes
from .map_ranks import communicator_of

T = TypeVar("T")

_MAX_NUMBERS = 64  # maximum number of integers in a summary
_HEADER_BYTES = (2 + _MAX_NUMBERS) * 8  # bytes before the payload
_TOTAL_PAYLOAD_BYTES = 1 << 16  # bytes of the payloads of all ranks together; measured on 4 gloo ranks, they cost no time


class RankSummaries(NamedTuple):
    """Summaries that the ranks of a mesh sent to each other, by position in the mesh.

    Attributes:
        same: whether the values that must be equal are equal.
        numbers: the integers of each rank.
        payloads: for each rank a row of bytes that begins with its payload.
    """

    same: bool
    numbers: list[tuple[int, ...]]
    payloads: torch.Tensor


def payload_bytes(mesh: DeviceMesh) -> int:
    """Return the number of payload bytes that fit in the single exchange of :func:`check_identical`."""
    return _TOTAL_PAYLOAD_BYTES // mesh.size() // 16 * 16


@untracked
def check_identical(
    mesh: DeviceMesh, what: str, make: Callable[[], T], summarize: Callable[[T], tuple[Hashable, tuple[int, ...], bytes]]
) -> tuple[T, RankSummaries | None]:
    """Return ``make()``, and the summaries of all ranks; raise on all ranks if they differ. No other process: None as summaries.

    ``summarize(result)`` returns a value that must be equal on all ranks and can be printed, up to 64 integers, and a payload of
    up to :func:`payload_bytes` bytes. On process groups this takes one exchange of a fixed form (a second one, of the texts, if
    they differ); in one process none.

    Raises:
        LayoutError: on all ranks with one text, if the values differ. The error of ``make``, if all ranks have the same.
    """
    if not communicator_of(mesh).has_other_processes or mesh.size() == 1:
        return make(), None
    problem: Exception | None = None
    text: Hashable
    numbers, payload = tuple[int, ...](), b""
    try:
        result = make()
        text, numbers, payload = summarize(result)
    except Exception as error:
        problem, text = error, f"{type(error).__name__}: {error}"
    summaries = gather_summaries(mesh, text, numbers, payload, payload_bytes(mesh))
    if not summaries.same:
        exchange_and_compare_texts(mesh, what, str(text), problem)
    if problem is not None:
        raise problem
    return result, summaries


def gather_summaries(
    mesh: DeviceMesh, text: Hashable, numbers: Sequence[int] = (), payload: bytes = b"", payload_size: int = 0
) -> RankSummaries:
    """Gather in one exchange whether ``text`` is equal on all ranks, each rank's ``numbers``, and each rank's ``payload``.

    There are at most 64 numbers. A payload has at most ``payload_size`` bytes.
    """
    row = bytearray(_HEADER_BYTES + payload_size)
    head = array("q", (_hash_text(text), len(numbers), *numbers)).tobytes()
    row[: len(head)] = head
    row[_HEADER_BYTES : _HEADER_BYTES + len(payload)] = payload
    rows = communicator_of(mesh).all_gather_rows(row, tuple(range(mesh.ndim)))
    heads = rows[:, : 2 + _MAX_NUMBERS].tolist()
    numbers_of = [tuple(head[2 : 2 + head[1]]) for head in heads]
    return RankSummaries(len({head[0] for head in heads}) == 1, numbers_of, rows[:, 2 + _MAX_NUMBERS :].view(torch.uint8))


@memoize(1024)
def _hash_text(text: Hashable) -> int:
    return int.from_bytes(hashlib.blake2b(str(text).encode(), digest_size=8).digest(), "big", signed=True)


def exchange_and_compare_texts(mesh: DeviceMesh, what: str, text: str, problem: Exception | None = None) -> None:
    """Raise LayoutError on all ranks if ``text`` differs between them, after an exchange of the texts."""
    check_texts_equal(mesh, what, communicator_of(mesh).all_gather_object(text, tuple(range(mesh.ndim))), problem)


def check_texts_equal(mesh: DeviceMesh, what: str, texts: Sequence[str], problem: Exception | None = None) -> None:
    """Raise LayoutError on all ranks unless all texts are equal; ``texts`` has the text of each position in the mesh."""
    other = next((position for position, text in enumerate(texts) if text != texts[0]), None)
    if other is None:
        return
    ranks = mesh.current_ranks()
    raise LayoutError(
        f"{what}: arguments differ between ranks: {texts[other]} on rank {ranks[other]}, {texts[0]} on rank "
        f"{ranks[0]}; pass the same arguments on all ranks of {mesh!r}"
    ) from problem


@untracked
def check_same_on_all_ranks(
    mesh: DeviceMesh,
    value: torch.Tensor,
    what: str,
    instead: str = "distribute its source with distribute_tensor(t, mesh, placements)",
) -> None:
    """Raise on all ranks if the plain tensor ``value`` differs between ranks of ``mesh``. They exchange a hash of it.

    In one process nothing is compared.

    Args:
        what: the operation, for the error.
        instead: advice for the error.

    Raises:
        MixedTensorError: on all ranks, if they have different values.
    """
    if not communicator_of(mesh).has_other_processes or has_no_values(value):
        return
    digest = hashlib.blake2b(content_bytes(value), digest_size=16).hexdigest()
    if not gather_summaries(mesh, f"{tuple(value.shape)} {value.dtype} {digest}").same:
        raise MixedTensorError(
            f"{what} mixes DTensors with a plain tensor of shape {tuple(value.shape)} that differs between ranks; {instead}"
        )
