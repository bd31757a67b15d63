"""Writing by index. Along a sharded dim each rank writes what belongs to its own block; what belongs to others goes to a scratch
row.

Additions may also be shared out among ranks by the index: their sums are the terms of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...placement import REDUCE_OPS
from ..call import Call
from ..kernels import At, KernelContext
from ..owned import located, with_scratch
from ..rule import Choice, Dims, Factors, Kernel
from ..verbs import kernel_rule
from .indexing import aligned_index, by_number, has_masks, index_places, index_shape, indexed_dims, located_flat, located_in_dims
from .views import own_factors

REPLACED = tuple(f"{op},R,{op} -> {op}" for op in REDUCE_OPS) + tuple(
    row for op in ("avg", "max", "min") for row in (f"{op},R,R -> {op}", f"R,R,{op} -> {op}")
)
ADDED = ("sum,R,sum -> sum", "avg,R,avg -> avg", "avg,R,R -> avg", "R,R,avg -> avg")


# --- scatter: one index for each element ---
def scattered(call: Call) -> Factors:
    """Dims other than ``dim`` go together; index and source may be shorter there, windows of them."""
    dims, sizes = own_factors(call)
    shapes = [call.shape(i) for i in range(1, len(call.operands))]
    if not dims or any(len(shape) != len(dims) for shape in shapes):
        return Factors((((),) * len(dims), *(((),) * len(shape) for shape in shapes)), (((),) * len(dims),), {})
    at = call["dim"] % len(dims)
    sizes["i"] = max(shape[at] for shape in shapes)
    own = tuple(("i",) if d == at else dim for d, dim in enumerate(dims))
    windows, whole = {}, set()
    for i, shape in enumerate(shapes, 1):
        for d, (name,) in enumerate(own):
            if shape[d] > sizes[name]:
                whole.add(name)  # a source that is longer than the tensor
            elif shape[d] < sizes[name]:
                windows["operand", i, name] = range(shape[d])
    reduced, additive = _combination(call)
    whole |= set() if reduced else {"i"}
    kernels = {f"d{at}": Kernel(scatter_owned)}
    return Factors((dims, *(own,) * len(shapes)), (dims,), sizes, frozenset(whole), reduced, additive, kernels, windows=windows)


def _combination(call: Call) -> tuple[dict[str, str], frozenset[int]]:
    """How the results of ranks that scatter parts of the source combine; ``{}`` where they do not."""
    name = call.func._schema.name.removesuffix("_")
    how = "sum" if name == "aten::scatter_add" else call.get("reduce")
    if how in ("sum", "add") and call.get("include_self", True):
        return {"i": "sum"}, frozenset({0})
    if how in ("amax", "amin") and call.get("include_self", True):
        return {"i": how[1:]}, frozenset()  # every rank counts the tensor itself, which changes no maximum
    return {}, frozenset()


def scatter_owned(at: KernelContext, x: Any, dim: int, index: Any, src: Any, *options: Any, **named: Any) -> Any:
    dim %= len(at.call.shape(0))
    scatter = _function(at)

    def owned(here: At, block: torch.Tensor, chosen: torch.Tensor, values: Any) -> torch.Tensor:
        inside, position = located(chosen, here.offset, here.size, at.total, negative=False, error=RuntimeError)
        position = torch.where(inside, position, here.size)
        return scatter(with_scratch(block, dim), dim, position, values, *options, **named).narrow(dim, 0, here.size)

    return at.map(owned, x, index, src)


def _function(at: KernelContext) -> Callable[..., Any]:
    """The operator that gives a new tensor, whatever variant is called."""
    return getattr(torch.ops.aten, at.call.func._schema.name.removeprefix("aten::").removesuffix("_"))


def scatter_partials(call: Call) -> tuple[str, ...]:
    name = call.func._schema.name.removesuffix("_")
    if len(call.operands) == 2:  # a number is scattered
        return () if call.get("reduce") else ("avg,R -> avg", "max,R -> max", "min,R -> min")
    if name == "aten::scatter_add" or (call.get("reduce") in ("sum", "add") and call.get("include_self", True)):
        return ADDED
    return () if call.get("reduce") else REPLACED


kernel_rule("scatter scatter_add scatter_reduce", scattered, partials=scatter_partials)


# --- index_add, index_copy, index_fill, index_reduce: one index for each row ---
def rows_written(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    index, rest = call.shape(1), call.operands[2:]
    if not dims or not index:
        return Factors((((),) * len(dims), ((),) * len(index), *(((),) * len(x.shape) for x in rest)), (((),) * len(dims),), {})
    d = call["dim"] % len(dims)
    sizes["i"] = index[0]
    if call.func._schema.name.startswith("aten::index_reduce") and rest[0].shape != (
        *call.shape(0)[:d],
        *index,
        *call.shape(0)[d + 1 :],
    ):
        raise RuntimeError(  # torch's inference does not look
            f"index_reduce(): source {tuple(rest[0].shape)} is not self {call.shape(0)} with {index[0]} rows along dim {d}"
        )
    rows = tuple(("i",) if k == d else dim for k, dim in enumerate(dims))
    sources: list[Dims] = [rows if len(x.shape) == len(dims) else ((),) * len(x.shape) for x in rest]
    adds = call.func._schema.name.removesuffix("_") == "aten::index_add"
    reduced = {"i": "sum"} if adds else {}
    whole = frozenset() if adds else frozenset({"i"})
    kernels = {f"d{d}": Kernel(write_owned_rows)}
    return Factors((dims, (("i",),), *sources), (dims,), sizes, whole, reduced, frozenset({0} if adds else ()), kernels)


def write_owned_rows(at: KernelContext, x: Any, dim: int, index: Any, source: Any, *options: Any, **named: Any) -> Any:
    dim %= len(at.call.shape(0))
    write = _function(at)

    def owned(here: At, block: torch.Tensor, rows: torch.Tensor, values: Any) -> torch.Tensor:
        inside, position = located(rows, here.offset, here.size, at.total, negative=False, error=IndexError)
        position = torch.where(inside, position, here.size)
        return write(with_scratch(block, dim), dim, position, values, *options, **named).narrow(dim, 0, here.size)

    return at.map(owned, x, index, source)


def fill_partials(call: Call) -> tuple[str, ...]:
    return tuple(f"{op}{',R' * (len(call.operands) - 1)} -> {op}" for op in ("avg", "max", "min"))


kernel_rule("index_add", rows_written, partials=ADDED, plain=("index",))
kernel_rule("index_copy", rows_written, partials=REPLACED, plain=("index",))
kernel_rule("index_fill", rows_written, partials=fill_partials, plain=("index",))


def rows_multiply(choice: Choice) -> bool:
    """torch cannot multiply rows of one element in half precision: no block has such rows where the whole has longer ones."""
    call = choice.call
    if call["reduce"] != "prod" or call.operands[0].dtype not in (torch.float16, torch.bfloat16) or not choice.splits:
        return True
    others = set(range(len(call.shape(0)))) - {call["dim"] % len(call.shape(0))}
    return not all(1 in choice.sizes(f"d{d}") for d in others)


kernel_rule("index_reduce", rows_written, when=rows_multiply)


# --- index_put: advanced indexing ---
def put(call: Call) -> Factors | None:
    places = index_places(call)
    if not places:
        return _masked(call)
    dims, sizes = own_factors(call)
    common = index_shape(call)
    sizes |= {f"i{d}": size for d, size in enumerate(common)}
    chosen, _ = indexed_dims(dims, places, tuple((f"i{d}",) for d in range(len(common))))
    positions = call.operands_of("values")[0]
    values = call.shape(positions)
    if len(values) > len(chosen):
        return None
    aligned = chosen[len(chosen) - len(values) :]
    source = tuple(dim if size != 1 or sizes[dim[0]] == 1 else () for dim, size in zip(aligned, values, strict=True))
    adds = bool(call.get("accumulate"))
    names = [f"i{d}" for d in range(len(common))]
    operands = (dims, *(aligned_index(call.shape(i), common) for i in call.operands_of("indices")), source)
    kernels = {f"d{d}": Kernel(put_owned, joint=True) for d in places}
    whole, additive = frozenset(() if adds else names), frozenset({0} if adds else ())
    return Factors(operands, (dims,), sizes, whole, dict.fromkeys(names, "sum") if adds else {}, additive, kernels)


def _masked(call: Call) -> Factors | None:
    """One value for all elements that a mask picks: element by element."""
    given = [(d, item) for d, item in enumerate(call["indices"]) if item is not None]
    if len(given) != 1 or given[0][1].dtype not in (torch.bool, torch.uint8) or math.prod(call["values"].shape) != 1:
        return None
    dims, sizes = own_factors(call)
    first, mask = given[0]
    own = dims[first : first + len(mask.shape)]
    return Factors((dims, own, ((),) * len(call["values"].shape)), (dims,), sizes)


def put_owned(at: KernelContext, x: Any, indices: list[Any], values: Any, accumulate: bool = False, *options: Any) -> Any:
    places = index_places(at.call) or []

    def owned(here: At, block: torch.Tensor, source: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        inside, positions = located_in_dims(at.operands[0], here.member, places, given)
        if 0 in (block.shape[d] for d in places[1:]):
            return block.clone()
        first = places[0]
        chosen: list[Any] = [None] * block.ndim
        for d, position in zip(places, positions, strict=True):
            chosen[d] = position
        chosen[first] = torch.where(inside, chosen[first], block.shape[first])
        made = torch.ops.aten.index_put(with_scratch(block, first), chosen, source, accumulate)
        return made.narrow(first, 0, block.shape[first])

    return at.map(owned, x, values, *(index for index in indices if index is not None))


def put_partials(call: Call) -> tuple[str, ...]:
    indices = ",R" * len(call.operands_of("indices"))
    if call.get("accumulate"):
        return tuple(row.replace(",R,", f"{indices},") for row in ADDED)
    return tuple(row.replace(",R,", f"{indices},") for row in REPLACED)


def put_by_number(x: Any, indices: Any, values: Any, accumulate: bool = False, *options: Any) -> Any:
    return torch.ops.aten.index_put.default(x, by_number(indices), values, accumulate)


kernel_rule(
    "index_put _index_put_impl _unsafe_index_put",
    put,
    partials=put_partials,
    decompose=put_by_number,
    decomposes=lambda call: has_masks(call) and _masked(call) is None,
    plain=("indices",),
)


# --- put: elements of the flattened tensor ---
def put_flat(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    names = [f"i{d}" for d in range(len(call.shape(1)))]
    kernels = dict.fromkeys(sizes, Kernel(put_flat_owned, joint=True))
    sizes |= dict(zip(names, call.shape(1), strict=True))
    made: Dims = tuple((name,) for name in names)
    same = call.shape(1) == call.shape(2)
    adds = bool(call["accumulate"]) and same
    operands = (dims, made, made if same else ((),) * len(call.shape(2)))
    whole, additive = frozenset(() if adds else names), frozenset({0} if adds else ())
    return Factors(operands, (dims,), sizes, whole, dict.fromkeys(names, "sum") if adds else {}, additive, kernels)


def put_flat_owned(at: KernelContext, x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    def owned(here: At, block: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        inside, position = located_flat(at.operands[0], here.member, chosen)
        position = torch.where(inside, position, block.numel())
        made = with_scratch(block.reshape(-1), 0).put(position, values, accumulate)
        return made[: block.numel()].view(block.shape)

    return at.map(owned, x, index, source)


def put_flat_partials(call: Call) -> tuple[str, ...]:
    return ADDED if call["accumulate"] else REPLACED


kernel_rule("put", put_flat, partials=put_flat_partials)
