"""Bags of embeddings: bags and columns are factors; the bounds of bags are whole on every rank.

Where there are as many indices for each bag on average, indices that are cut, in whatever blocks, cut the bags. Which are whose
only the bounds say: a rank gathers all of them, few bytes beside what they pick, and looks up those of its bags. Of what the
backward pass needs the places of indices and the sizes of bags are whole.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...base.recorder_hooks import site
from ...placement import Partial
from ..call import Call
from ..declare import blockwise, kernel_rule
from ..kernel_context import At, KernelContext, densely, without_out
from ..notation_rules import by
from ..rule import Along, Choice, Dims, Factors, Kernel, R, Row

aten = torch.ops.aten
PER_INDEX = ("indices", "per_sample_weights")
BAGS: Dims = (("b",), ("e",))


# --- a rank's own -------------------------------------------------------------------------------------------------------
def bags_of(here: At, at: KernelContext, rows: Any) -> range:
    """The bags that are the member's, which a layout has along its first dim."""
    coordinate = at.call.mesh.coordinates[here.member]
    first = rows.local_offset(coordinate)[0]
    return range(first, first + rows.local_shape(coordinate)[0])


def known(offsets: Tensor) -> bool:
    """Whether the bounds can be read."""
    return type(offsets) is Tensor and not offsets.is_meta


def positions(bags: range, count: int, indices: Tensor, offsets: Tensor) -> slice:
    """Where the indices of some of ``count`` bags are."""
    end = indices.shape[0]
    start, stop = (int(offsets[bag]) if bag < len(offsets) else end for bag in (bags.start, bags.stop))
    return slice(start, end if bags.stop == count else stop)


@site  # the bounds decide, so each replay looks at those that it has
def looked_up(op: Any, bags: range, count: int, weight: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    """The results of these bags, and of all of them what is kept whole."""
    if not weight.shape[1]:  # a CUDA kernel does not start for no columns, and then says nothing of bags either
        one = looked_up(op, bags, count, weight.new_zeros((len(weight), 1)), **settings)
        return tuple(x.narrow(1, 0, 0) if x.ndim > 1 else x for x in one)
    if len(bags) == count:
        whole: tuple[Tensor, ...] = op(weight, **settings)
        return whole
    own = slice(bags.start, bags.stop)
    if not bags or not known(settings["offsets"]):
        made = op(weight, **settings)
        return made[0][own], made[1], made[2], made[3][own] if made[3].ndim > 1 else made[3]
    _, places, sizes, largest = op(weight.narrow(1, 0, 1), **settings)  # refuses bounds that are none
    indices, offsets, weights = (settings[name] for name in ("indices", "offsets", "per_sample_weights"))
    part = positions(bags, count, indices, offsets)
    here = {
        "indices": indices[part],
        "offsets": offsets[own] - part.start,
        "per_sample_weights": None if weights is None else weights[part],
        "include_last_offset": False,
    }
    found = op(weight, **settings | here)
    return found[0], places, sizes, found[3] if largest.ndim > 1 else largest


def own_bags(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    op, rows, given = at.once(without_out), at.results[0], at.named(args, kwargs)
    assert rows is not None
    weight, offsets = given.pop("weight"), given.pop("offsets")
    indices, weights = (_gathered(at, name, given.pop(name, None)) for name in PER_INDEX)

    def one(here: At, weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, ...]:
        own = bags_of(here, at, rows)
        beside = {"offsets": offsets, "per_sample_weights": weights}
        return looked_up(op, own, rows.shape[0], weight, indices=indices, **beside, **given)

    return at.map(one, weight, indices, offsets, weights)


def _gathered(at: KernelContext, name: str, x: Any) -> Any:
    """All of what there is for each index."""
    layout = None if x is None else at.operands[at.call.names.index(name)]
    if layout is None or layout.splits[0] is None:
        return x
    blocks = at.comm.all_gather(x, layout.splits[0].mesh_dims, layout.shape_of).wait()
    return at.map(lambda here, *parts: torch.cat(parts), *blocks)


@site
def own_part(op: Any, bags: range, count: int, grad: Tensor, **given: Any) -> Tensor:
    """What the gradient of these bags gives: for the table, or for each index, zeros for those of other bags."""
    indices, offsets = given["indices"], given["offsets"]
    if len(bags) == count:
        return cast(Tensor, op(grad, **given))
    if not bags or not known(offsets):
        whole = _among(grad, bags, count)
        largest = given.get("maximum_indices")
        there = {} if largest is None or largest.ndim < 2 else {"maximum_indices": _among(largest, bags, count)}
        return cast(Tensor, op(whole, **given | there))
    part, own = positions(bags, count, indices, offsets), slice(bags.start, bags.stop)
    places = given["offset2bag"]
    here = {
        "indices": indices[part],
        "offsets": offsets[own] - part.start,
        "offset2bag": places[part] - bags.start if len(places) else places,
    }
    if "bag_size" in given:
        here["bag_size"] = given["bag_size"][own]
    if given.get("per_sample_weights") is not None:
        here["per_sample_weights"] = given["per_sample_weights"][part]
    if given.get("scale_grad_by_freq"):
        here["scale_grad_by_freq"] = False
    found: Tensor = op(grad, **given | here)
    if given.get("scale_grad_by_freq"):  # by how often all bags have it
        found /= torch.bincount(indices, minlength=len(found)).clamp_(min=1)[:, None]
    if found.ndim > 1:
        return found
    whole = found.new_zeros(indices.shape)
    whole[part] = found
    return whole


def _among(block: Tensor, bags: range, count: int) -> Tensor:
    whole = block.new_zeros((count, *block.shape[1:]))
    whole[bags.start : bags.stop] = block
    return whole


def own_gradients(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    op, rows, given = at.once(without_out), at.operands[0], at.named(args, kwargs)
    names = tuple(given)[1:]

    def one(here: At, grad: Tensor, *values: Any) -> Tensor:
        return own_part(op, bags_of(here, at, rows), rows.shape[0], grad, **dict(zip(names, values, strict=True)))

    return at.map(one, *given.values())


# --- declarations -------------------------------------------------------------------------------------------------------
def lookup(call: Call) -> Factors | None:
    results = [meta for meta in call.results if meta is not None]
    if len(results[0].shape) != 2 or len(call["indices"].shape) != 1:
        return None  # torch says what is wrong
    (bags, columns), (count,) = results[0].shape, call["indices"].shape
    dims: dict[str, Dims] = {"weight": ((), ("e",)), "offsets": ((),), **dict.fromkeys(PER_INDEX, (("i",),))}
    moved = sum(name in call.names for name in PER_INDEX)
    kernel = Kernel(own_bags, collectives=moved, nbytes=_listed_bytes, joint=True)
    by_bags = Row(
        tuple(Along("i") if name in PER_INDEX else R for name in call.names),
        tuple(Along("b") if len(meta.shape) > 1 else R for meta in results),
        "b",
        kernel,
    )
    return Factors(
        tuple(dims[name] for name in call.names),
        tuple(BAGS if len(meta.shape) > 1 else ((),) for meta in results),
        {"b": bags, "e": columns, "i": count},
        whole=frozenset("bi"),
        kernels={"e": Kernel(own_bags, joint=True)},
        rows=(by_bags,) if bags and count % bags == 0 else (),
    )


def _listed_bytes(call: Call) -> int:
    """Of a rank's indices, and of their weights."""
    listed = [layout for layout, name in zip(call.operands, call.names, strict=True) if name in PER_INDEX]
    return sum(layout.max_local_nbytes for layout in listed)


SUMS = tuple(f"{op},finite,finite{weights} -> {op},R,R,R" for op in ("sum", "avg") for weights in ("", ",finite"))
kernel_rule(
    "_embedding_bag _embedding_bag_forward_only",
    lookup,
    partials=by("mode", {0: SUMS, 1: SUMS}),  # linear in the table, but for the largest (2)
    plain=("offsets",),
)


def is_dense(choice: Choice) -> bool:
    return not choice.call.get("sparse")


OWN = {"b": Kernel(own_gradients, lacking=Partial("sum"))}
REST = "offset2bag: [], bag_size: [], per_sample_weights: [], maximum_indices:"
BOUNDS = "indices: [], offsets: []"
blockwise(
    "_embedding_bag_backward",
    f"grad: [b] e, {BOUNDS}, {REST} [b] e -> [] e | grad: [b] e, {BOUNDS}, {REST} [] -> [] e",
    kernels=OWN,
    when=is_dense,
)
blockwise(
    "_embedding_bag_dense_backward",
    f"grad: [] e, indices: [], {REST} [] e -> [] e | grad: [] e, indices: [], {REST} [] -> [] e",
    local=densely(aten._embedding_bag_dense_backward.default),
)
blockwise(
    "_embedding_bag_per_sample_weights_backward",
    f"grad: [b] e, weight: [] e, {BOUNDS}, offset2bag: [] -> []",
    kernels=OWN,
    sums="e",
)
