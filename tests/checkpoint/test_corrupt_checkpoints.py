"""Corrupt checkpoints: loading is correct, or raises an error and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import socket
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import Shard
from dtensor.checkpoint import load, read_tensors, read_tree, save, save_safetensors
from dtensor.checkpoint.block_io import CheckpointFiles, CommonBox
from dtensor.checkpoint.manifest import StoredBlock, is_tiling
from dtensor.errors import CheckpointError

X = torch.arange(35.0).reshape(7, 5)
N = torch.arange(6, dtype=torch.int16)
ROUNDS = int(os.environ.get("DTENSOR_ROUNDS", "50"))


def state(fill: float = 0.0) -> dict[str, Any]:
    mesh = dt.init_device_mesh("cpu", (3,))
    x = dt.distribute_tensor(X if fill == 1.0 else torch.zeros(7, 5), mesh, [Shard(0)])
    return {"x": x, "n": N.clone() if fill == 1.0 else torch.zeros_like(N), "step": 7 if fill == 1.0 else 0}


def tensors(fill: float = 0.0) -> dict[str, Any]:
    return {key: value for key, value in state(fill).items() if key != "step"}


def has_values(found: dict[str, Any], fill: float) -> bool:
    asked = state(fill)
    return all(
        torch.equal(value.full_tensor(), asked[key].full_tensor()) if isinstance(value, dt.DTensor) else
        torch.equal(value, asked[key]) if isinstance(value, torch.Tensor) else value == asked[key]
        for key, value in found.items()
    )  # fmt: skip


def assert_load_raises(folder: Path, words: str, make: Callable[[], dict[str, Any]] = state) -> None:
    target = make()
    with pytest.raises(CheckpointError, match=words):
        load(target, folder)
    assert has_values(target, 0.0)


# --- manifest of dtensor ------------------------------------------------------------------------------------------------
def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest and update its checksum."""
    path = folder / "manifest.json"
    outer = json.loads(path.read_text())
    body = json.loads(outer["body"])
    outer["body"] = json.dumps(change(body) or body)
    outer["sha256"] = hashlib.sha256(outer["body"].encode()).hexdigest()
    path.write_text(json.dumps(outer))


def point_blocks_to_outside_file(folder: Path, *, outside: str) -> None:
    def change(body: Any) -> None:
        (block, *_) = body["tensors"]["x"]["blocks"]
        body["files"][outside] = body["files"][block["file"]]
        for each in body["tensors"]["x"]["blocks"]:
            each["file"] = outside

    rewrite(folder, change)


@pytest.mark.parametrize("name", ["../secret", "{here}/secret", "a/../../secret", "./__link", ".", "..", "", "a\x00b", "x" * 300])
def test_manifest_that_names_files_outside_its_folder_raises(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "c"
    save(state(1.0), folder)
    data = folder / read_tensors(folder)["x"].blocks[0].file
    (tmp_path / "secret").write_bytes(data.read_bytes())
    point_blocks_to_outside_file(folder, outside=name.format(here=tmp_path))
    assert_load_raises(folder, r"outside of its folder|File name too long")


@pytest.mark.parametrize("kind", ["symlink", "dangling", "directory", "fifo", "socket", "device"])
@pytest.mark.parametrize("which", ["manifest.json", "data", ".metadata", "model.safetensors", "model.safetensors.index.json"])
def test_load_of_non_regular_files_raises_except_for_linked_safetensors(
    tmp_path: Path, kind: str, which: str, monkeypatch: Any
) -> None:
    folder = tmp_path / "c"
    make: Callable[..., dict[str, Any]] = state
    if which.startswith("model"):
        make = tensors
        save_safetensors(tensors(1.0), folder, max_shard_size=50 if "index" in which else 10**6)
    else:
        save(state(1.0), folder)
    if which == ".metadata":
        (folder / "manifest.json").unlink()
    path = folder / (read_tensors(folder)["x"].blocks[0].file if which == "data" else which)
    kept = path.rename(tmp_path / "kept")
    if kind == "symlink":
        path.symlink_to(kept)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "gone")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(folder)
        with socket.socket(socket.AF_UNIX) as ear:
            ear.bind(path.name)
    else:
        path.symlink_to("/dev/zero")
    if kind == "symlink" and which.startswith("model"):
        target = make()
        load(target, folder)  # caches of model hubs consist of links
        assert has_values(target, 1.0)
        return
    assert_load_raises(folder, r"is missing|no regular file|no complete checkpoint|symbolic link", make)


def body_changes() -> dict[str, Callable[[Any], Any]]:
    def x(body: Any) -> Any:
        return body["tensors"]["x"]

    def blocks(body: Any) -> Any:
        return body["tensors"]["x"]["blocks"]

    return {
        "negative shape": lambda b: x(b).update(shape=[-7, -5]),
        "bool shape": lambda b: x(b).update(shape=[True, 5]),
        "huge shape": lambda b: x(b).update(shape=[2**62, 2**62]),
        "float shape": lambda b: x(b).update(shape=[7.0, 5]),
        "other shape": lambda b: x(b).update(shape=[8, 5]),
        "unknown dtype": lambda b: x(b).update(dtype="float31"),
        "function name of torch as dtype": lambda b: x(b).update(dtype="manual_seed"),
        "dtype list": lambda b: x(b).update(dtype=["float32"]),
        "missing block": lambda b: blocks(b).pop(),
        "one block twice and another missing": lambda b: blocks(b).__setitem__(0, blocks(b)[1]),
        "block outside": lambda b: blocks(b)[0].update(offset=[6, 0]),
        "negative offset": lambda b: blocks(b)[0].update(offset=[-1, 0]),
        "fewer dims": lambda b: blocks(b)[0].update(offset=[0]),
        "position beyond the end of the file": lambda b: blocks(b)[0].update(at=10**9),
        "negative position": lambda b: blocks(b)[0].update(at=-8),
        "position that is no number": lambda b: blocks(b)[0].update(at="0"),
        "negative stride": lambda b: blocks(b)[0].update(stride=[-5, 1]),
        "huge strides": lambda b: blocks(b)[0].update(stride=[2**62, 1]),
        "digest too large": lambda b: blocks(b)[0].update(digest=2**64),
        "digest that is no number": lambda b: blocks(b)[0].update(digest="0"),
        "file that is not listed": lambda b: blocks(b)[0].update(file="other.distcp"),
        "list as a file name": lambda b: blocks(b)[0].update(file=["x"]),
        "file sizes that are text": lambda b: b.update(files=dict.fromkeys(b["files"], "9")),
        "no tensors": lambda b: b.pop("tensors") and None,
        "tensors in a list": lambda b: b.update(tensors=[]),
        "tree that names a missing tensor": lambda b: b["tree"].update(n={"!": "tensor", "v": "gone"}),
        "tree with an unknown kind of node": lambda b: b["tree"].update(n={"!": "module", "v": 1}),
        "tree node without a value": lambda b: b["tree"].update(n={"!": "tuple"}),
        "a set of lists": lambda b: b["tree"].update(step={"!": "set", "v": [[1]]}),
        "tensor missing from the tree": lambda b: b["tree"].pop("n") and None,
        "not a dict": lambda b: [1],
        "unknown key": lambda b: b.update(beside=3),
    }


@pytest.mark.parametrize("change", body_changes())
def test_invalid_manifest_raises(tmp_path: Path, change: str) -> None:
    save(state(1.0), tmp_path)
    rewrite(tmp_path, body_changes()[change])
    assert_load_raises(tmp_path, r"damaged|unknown|asked for|in the checkpoint")
    for read in (read_tensors, read_tree):
        if change != "tensor missing from the tree":
            with pytest.raises(CheckpointError):
                read(tmp_path)


def test_is_tiling_accepts_grids_and_nested_blocks_but_no_holes_or_overlaps() -> None:
    grid = [((row * 2, column * 3), (2, 3)) for row in range(3) for column in range(2)]
    nested = [((0, 0), (3, 6)), ((3, 0), (3, 2)), ((3, 2), (1, 4)), ((4, 2), (2, 4))]
    for boxes in (grid, nested, [((0, 0), (6, 6))]):
        assert is_tiling((6, 6), boxes)
        assert is_tiling((6, 6), boxes[::-1])
        assert not is_tiling((6, 6), boxes[1:])
        assert not is_tiling((6, 6), [*boxes, boxes[0]])
    assert not is_tiling((6, 6), [*grid[1:], grid[1]])
    assert not is_tiling((6, 6), [((0, 0), (6, 3)), ((0, 2), (6, 3))])  # the right number of elements, but with a hole
    assert not is_tiling((4, 2), [((0, 0), (3, 1)), ((0, 1), (3, 1)), ((2, 0), (1, 2))])
    assert is_tiling((), [((), ())])
    assert is_tiling((0, 3), [])
    assert not is_tiling((), [])


def test_manifest_with_invalid_text_raises(tmp_path: Path) -> None:
    save(state(1.0), tmp_path)
    path = tmp_path / "manifest.json"
    good = path.read_text()
    deep = "[" * 100_000 + "]" * 100_000
    tree = json.dumps({"format": "dtensor checkpoint 1", "sha256": hashlib.sha256(deep.encode()).hexdigest(), "body": deep})
    double = good[:-1] + ', "body": "{}"}'
    for text in (
        b"",
        b"\xff\xfe",
        b"null",
        b"3",
        deep.encode(),
        tree.encode(),
        double.encode(),
        b'{"body": 3}',
        good.encode()[1:],
    ):
        path.write_bytes(text)
        assert_load_raises(tmp_path, "damaged")
        with pytest.raises(CheckpointError, match="damaged"):
            read_tree(tmp_path)


def test_files_without_read_permission_raise(tmp_path: Path, monkeypatch: Any) -> None:
    save(state(1.0), tmp_path)
    real = os.open

    def denied(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith((".distcp", ".json")):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", denied)
    assert_load_raises(tmp_path, "Permission denied")
    with pytest.raises(CheckpointError, match="Permission denied"):
        read_tensors(tmp_path)


# --- safetensors ------------------------------------------------------------------------------------------------------------
def write_safetensors(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path.parent


def entry(dtype: Any, shape: Any, first: Any, last: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


F = entry("F32", [2], 0, 8)
HEADERS: dict[str, Any] = {
    "hole before the first tensor": ({"a": entry("F32", [2], 4, 12)}, 12),
    "hole between two tensors": ({"a": F, "b": entry("F32", [1], 12, 16)}, 16),
    "extra bytes at the end": ({"a": F}, 12),
    "too few bytes": ({"a": F}, 7),
    "overlapping": ({"a": F, "b": entry("F32", [2], 4, 12)}, 12),
    "two tensors at one offset": ({"a": F, "b": F}, 8),
    "a key twice": (b'{"a": %s, "a": %s}' % ((json.dumps(F).encode(),) * 2), 8),
    "a key of an entry twice": (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8),
    "metadata in a list": ({"__metadata__": ["x"], "a": F}, 8),
    "metadata of numbers": ({"__metadata__": {"x": 1}, "a": F}, 8),
    "metadata null": ({"__metadata__": None, "a": F}, 8),
    "unknown dtype": ({"a": entry("F31", [2], 0, 8)}, 8),
    "dtype list": ({"a": entry(["F32"], [2], 0, 8)}, 8),
    "negative shape": ({"a": entry("F32", [-1, -2], 0, 8)}, 8),
    "bool shape": ({"a": entry("F32", [True, 2], 0, 8)}, 8),
    "float shape": ({"a": entry("F32", [2.0], 0, 8)}, 8),
    "a shape that overflows": ({"a": entry("F32", [2**33, 2**33], 0, 8)}, 8),
    "empty tensor with overflowing shape": ({"a": entry("F32", [2**40, 2**40, 0], 0, 0)}, 0),
    "shape null": ({"a": entry("F32", None, 0, 8)}, 8),
    "three offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, 8),
    "offsets backwards": ({"a": entry("F32", [2], 8, 0)}, 8),
    "an offset that is no number": (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, NaN]}}', 8),
    "infinite size": (b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}', 8),
    "unknown key in an entry": ({"a": F | {"stride": [1]}}, 8),
    "list as header": ([F], 8),
    "number as an entry": ({"a": 3}, 8),
    "invalid json": (b"{", 8),
    "leading spaces": (b"  " + json.dumps({"a": F}).encode(), 8),
    "not utf-8": (b'{"\xff": 1}', 8),
    "deeply nested json": (b'{"a":' * 60_000, 8),
    "size of 5000 digits": (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', 8),
    "empty header": (b"", 0),
}


@pytest.mark.parametrize("name", HEADERS)
def test_invalid_safetensors_header_raises(tmp_path: Path, name: str) -> None:
    header, count = HEADERS[name]
    folder = write_safetensors(tmp_path / "model.safetensors", header, bytes(range(count)))
    asked = {"a": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"damaged|truncated|no safetensors"):
        load(asked, folder, strict=False)
    assert asked["a"].tolist() == [0, 0]
    with pytest.raises(CheckpointError):
        read_tensors(folder)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 10**8, 10**4])
def test_safetensors_header_of_impossible_length_raises(tmp_path: Path, length: int) -> None:
    folder = write_safetensors(tmp_path / "model.safetensors", {"a": F}, bytes(8), length)
    with pytest.raises(CheckpointError, match=r"damaged|truncated|no safetensors"):
        load({"a": torch.zeros(2)}, folder)


def test_valid_unusual_safetensors_header_loads(tmp_path: Path) -> None:
    header = {"b": entry("I16", [2], 8, 12), "__metadata__": {"format": "pt"}, "a": F, "e": entry("F32", [0, 3], 8, 8)}
    folder = write_safetensors(
        tmp_path / "model.safetensors", json.dumps(header).encode() + b"   ", struct.pack("<ffhh", 1, 2, 3, 4)
    )
    asked = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.int16), "e": torch.ones(0, 3)}
    load(asked, folder)
    assert [asked["a"].tolist(), asked["b"].tolist()] == [[1, 2], [3, 4]]


INVALID_INDEXES = [
    "[]",
    "{}",
    '{"weight_map": []}',
    '{"weight_map": {"x": 3}}',
    '{"weight_map": {"x": "../m"}}',
    '{"weight_map": {"x": "a", "x": "b"}}',
    '{"weight_map": {"x": ""}}',
    "[" * 10**5,
    "NaN",
    "\udcff",
]


@pytest.mark.parametrize("text", INVALID_INDEXES)
def test_invalid_safetensors_index_raises(tmp_path: Path, text: str) -> None:
    save_safetensors(tensors(1.0), tmp_path, max_shard_size=50)
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode(errors="surrogateescape"))
    assert_load_raises(tmp_path, r"damaged|outside of its folder|missing", tensors)


def test_flipped_bits_in_safetensors_raise_or_load_the_saved_values(tmp_path: Path) -> None:
    save_safetensors(tensors(1.0), tmp_path)
    path = tmp_path / "model.safetensors"
    good = path.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    for at in (*range(start, len(good), 7), *range(0, start, 11)):
        bad = bytearray(good)
        bad[at] ^= 1
        path.write_bytes(bad)
        target = tensors()
        try:
            load(target, tmp_path)
        except CheckpointError:
            assert has_values(target, 0.0)
        else:
            assert at < start, "flipped data"
            assert has_values(target, 1.0)
    path.write_bytes(good)
    load(target := tensors(), tmp_path)
    assert has_values(target, 1.0)


# --- metadata of torch --------------------------------------------------------------------------------------------------
class _Calls:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_invalid_or_malicious_metadata_pickle_raises(tmp_path: Path) -> None:
    save(state(1.0), tmp_path)
    (tmp_path / "manifest.json").unlink()
    good = (tmp_path / ".metadata").read_bytes()
    deep: Any = ()
    for _ in range(100_000):
        deep = (deep,)
    nested = b"\x80\x04" + b"(" * 10 + b")" + b"\x85" * 200_000 + b"."
    for content in (b"", b"x", good[:-9], pickle.dumps(_Calls()), pickle.dumps(3), pickle.dumps({"a": 1}), nested):
        (tmp_path / ".metadata").write_bytes(content)
        assert_load_raises(tmp_path, r"damaged|does not belong in a checkpoint")
        with pytest.raises(CheckpointError):
            read_tree(tmp_path)


# --- random mutations ---------------------------------------------------------------------------------------------------
def _mutated(content: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(content))
    match dice.randrange(6):
        case 0:
            return content[:at] + bytes([content[at] ^ (1 << dice.randrange(8))]) + content[at + 1 :]
        case 1:
            return content[:at]
        case 2:
            return content[:at] + dice.randbytes(dice.randrange(1, 9)) + content[at:]
        case 3:
            return content[:at] + content[at + dice.randrange(1, 9) :]
        case 4:
            return content[:at] + dice.randbytes(4) + content[at + 4 :]
    there = dice.randrange(len(content))
    return content[:at] + content[there : there + 8] + content[at + 8 :]


@pytest.mark.parametrize("kind", ["ours", "torch", "safetensors", "index"])
def test_randomly_mutated_checkpoint_loads_correctly_or_raises(tmp_path: Path, kind: str) -> None:
    make: Callable[..., dict[str, Any]] = state if kind in ("ours", "torch") else tensors
    if make is state:
        save(state(1.0), tmp_path)
    else:
        save_safetensors(tensors(1.0), tmp_path, max_shard_size=50 if kind == "index" else 10**6)
    if kind == "torch":
        (tmp_path / "manifest.json").unlink()
    files = [path for path in sorted(tmp_path.iterdir()) if path.name != ".lock" and (kind != "ours" or path.name != ".metadata")]
    dice, right = random.Random(f"{kind}{ROUNDS}"), 0
    for _ in range(ROUNDS):
        path = dice.choice(files)
        if kind == "torch" and path.name != ".metadata":
            path = tmp_path / ".metadata"  # torch's format has no checksums of the data
        good = path.read_bytes()
        path.write_bytes(_mutated(good, dice))
        target = make()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(target, tmp_path)
        except CheckpointError:
            assert has_values(target, 0.0)
        else:
            right += 1
            assert kind == "torch" or has_values(target, 1.0)
        path.write_bytes(good)
    assert right < ROUNDS
    load(target := make(), tmp_path)
    assert has_values(target, 1.0)


# --- memory-mapped blocks -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("meta", [False, True], ids=["memory", "meta"])
def test_loaded_tensors_do_not_change_when_the_file_is_overwritten(tmp_path: Path, meta: bool) -> None:
    save(state(1.0), tmp_path)
    target = state()
    if meta:
        target |= {key: target[key].to("meta") for key in ("x", "n")}
    load(target, tmp_path)
    for file in tmp_path.glob("*.distcp"):
        file.write_bytes(bytes(file.stat().st_size))
    assert has_values(target, 1.0)


def test_aligned_blocks_are_memory_mapped_and_misaligned_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3) + X.numpy().tobytes() + bytes(1) + X.numpy().tobytes())
    with CheckpointFiles(tmp_path) as files:
        block = StoredBlock((0, 0), (7, 5), "file", 144)
        box = CommonBox(0, block, (1, 2), (4, 2), (0, 0), (1, 2))
        found = files.mapped_box(X.dtype, box)
        assert torch.equal(found, X[1:5, 2:4])
        assert files.mapped_box(X.dtype, box._replace(block=replace(block, at=3))) is None
        assert files.mapped_box(X.dtype, box._replace(size=(7, 4))) is None  # beyond the end
        assert files.bytes_read == 32
