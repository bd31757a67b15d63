"""Embedding bags: bags and columns are factors; the bounds of bags are replicated.

If the number of indices is a multiple of the number of bags, sharding the indices, in any blocks, shards the bags. Only the
bounds state which indices belong to which bag. So a rank gathers all indices, which are few bytes compared with what they select,
and looks up those of its bags. Of what the backward pass needs, the places of indices and the sizes of bags are replicated.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ...base.recorder_hooks import recorded_op
from ...placement import Partial
from ..call import Call
from ..declare import blockwise, kernel_rule
from ..declared_factors import by
from ..kernel_context import At, KernelContext, functional_overload, on_contiguous
from ..rule import Along, Dims, Factors, Kernel, R, Strategy, StrategyChoice

aten = torch.ops.aten
INDEX_ARGUMENTS = ("indices", "per_sample_weights")
BAG_DIMS: Dims = (("b",), ("e",))


# --- bags of one rank ---------------------------------------------------------------------------------------------------
def bags_of_member(here: At, at: KernelContext, rows: Any) -> range:
    """Return the range of bags that are in one rank's block of the first dim of layout ``rows``."""
    coordinate = at.call.mesh.coordinates[here.member]
    first = rows.local_offset(coordinate)[0]
    return range(first, first + rows.local_shape(coordinate)[0])


def has_readable_bounds(offsets: Tensor) -> bool:
    """Return True if the values of ``offsets`` (the bounds of bags) can be read: not on fake or meta tensors."""
    return type(offsets) is Tensor and not offsets.is_meta


def index_range_of_bags(bags: range, count: int, indices: Tensor, offsets: Tensor) -> slice:
    """Return the slice of the indices that belong to these of ``count`` bags."""
    end = indices.shape[0]
    start, stop = (int(offsets[bag]) if bag < len(offsets) else end for bag in (bags.start, bags.stop))
    return slice(start, end if bags.stop == count else stop)


@recorded_op  # the bounds decide, so each replay reads its own
def look_up_bags(op: Any, bags: range, count: int, weight: Tensor, **settings: Any) -> tuple[Tensor, ...]:
    """Run ``_embedding_bag`` for some bags. What backward needs of all bags (places of indices, sizes) is returned for all."""
    if not weight.shape[1]:  # a CUDA kernel does not start without columns, and then leaves the bag sizes unset
        single_column = look_up_bags(op, bags, count, weight.new_zeros((len(weight), 1)), **settings)
        return tuple(x.narrow(1, 0, 0) if x.ndim > 1 else x for x in single_column)
    if len(bags) == count:
        all_results: tuple[Tensor, ...] = op(weight, **settings)
        return all_results
    own = slice(bags.start, bags.stop)
    if not bags or not has_readable_bounds(settings["offsets"]):
        all_results_of_op = op(weight, **settings)
        return (
            all_results_of_op[0][own],
            all_results_of_op[1],
            all_results_of_op[2],
            all_results_of_op[3][own] if all_results_of_op[3].ndim > 1 else all_results_of_op[3],
        )
    _, places, sizes, largest = op(weight.narrow(1, 0, 1), **settings)  # raises for wrong bounds
    indices, offsets, weights = (settings[name] for name in ("indices", "offsets", "per_sample_weights"))
    own_indices = index_range_of_bags(bags, count, indices, offsets)
    own_settings = {
        "indices": indices[own_indices],
        "offsets": offsets[own] - own_indices.start,
        "per_sample_weights": None if weights is None else weights[own_indices],
        "include_last_offset": False,
    }
    own_results = op(weight, **settings | own_settings)
    return own_results[0], places, sizes, own_results[3] if largest.ndim > 1 else largest


def embedding_bag_of_blocks(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """All-gather sharded indices, and look up each rank's own bags (a kernel)."""
    op, result, arguments = at.compute_once(functional_overload), at.results[0], at.arguments_by_name(args, kwargs)
    assert result is not None
    weight, offsets = arguments.pop("weight"), arguments.pop("offsets")
    indices, weights = (_all_gather_indices(at, name, arguments.pop(name, None)) for name in INDEX_ARGUMENTS)

    def look_up_own_bags(
        here: At, weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Look up the bags that are in one rank's block of the result."""
        own = bags_of_member(here, at, result)
        bounds_and_weights = {"offsets": offsets, "per_sample_weights": weights}
        return look_up_bags(op, own, result.shape[0], weight, indices=indices, **bounds_and_weights, **arguments)

    return at.map(look_up_own_bags, weight, indices, offsets, weights)


def _all_gather_indices(at: KernelContext, name: str, x: Any) -> Any:
    """All-gather the indices, or the weights of indices, if they are sharded."""
    layout = None if x is None else at.operands[at.call.names.index(name)]
    if layout is None or layout.splits[0] is None:
        return x
    blocks = at.comm.all_gather(x, layout.splits[0].mesh_dims, layout.shape_of).wait()
    return at.map(lambda here, *parts: torch.cat(parts), *blocks)


@recorded_op
def gradient_of_bags(op: Any, bags: range, count: int, grad: Tensor, **settings: Any) -> Tensor:
    """Compute the gradient that some bags contribute: of the table, or of each index's weight (zeros for other bags)."""
    indices, offsets = settings["indices"], settings["offsets"]
    if len(bags) == count:
        return cast(Tensor, op(grad, **settings))
    if not bags or not has_readable_bounds(offsets):
        embedded = _embed_in_zeros(grad, bags, count)
        largest = settings.get("maximum_indices")
        embedded_maximum = (
            {} if largest is None or largest.ndim < 2 else {"maximum_indices": _embed_in_zeros(largest, bags, count)}
        )
        return cast(Tensor, op(embedded, **settings | embedded_maximum))
    own_indices, own = index_range_of_bags(bags, count, indices, offsets), slice(bags.start, bags.stop)
    places = settings["offset2bag"]
    own_arguments = {
        "indices": indices[own_indices],
        "offsets": offsets[own] - own_indices.start,
        "offset2bag": places[own_indices] - bags.start if len(places) else places,
    }
    if "bag_size" in settings:
        own_arguments["bag_size"] = settings["bag_size"][own]
    if settings.get("per_sample_weights") is not None:
        own_arguments["per_sample_weights"] = settings["per_sample_weights"][own_indices]
    if settings.get("scale_grad_by_freq"):
        own_arguments["scale_grad_by_freq"] = False
    gradient: Tensor = op(grad, **settings | own_arguments)
    if settings.get("scale_grad_by_freq"):  # divide by the frequency in all bags
        gradient /= torch.bincount(indices, minlength=len(gradient)).clamp_(min=1)[:, None]
    if gradient.ndim > 1:
        return gradient
    embedded = gradient.new_zeros(indices.shape)
    embedded[own_indices] = gradient
    return embedded


def _embed_in_zeros(block: Tensor, bags: range, count: int) -> Tensor:
    """Return zeros for ``count`` bags, with ``block`` in the place of its bags."""
    embedded = block.new_zeros((count, *block.shape[1:]))
    embedded[bags.start : bags.stop] = block
    return embedded


def embedding_bag_gradients(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """Compute the gradient that each rank's own bags contribute (a kernel)."""
    op, grad_layout, arguments = at.compute_once(functional_overload), at.operands[0], at.arguments_by_name(args, kwargs)
    names = tuple(arguments)[1:]

    def gradient_of_own_bags(here: At, grad: Tensor, *values: Any) -> Tensor:
        """Compute the gradient that the bags in one rank's block of ``grad`` contribute."""
        return gradient_of_bags(
            op, bags_of_member(here, at, grad_layout), grad_layout.shape[0], grad, **dict(zip(names, values, strict=True))
        )

    return at.map(gradient_of_own_bags, *arguments.values())


# --- declarations -------------------------------------------------------------------------------------------------------
def embedding_bag_factors(call: Call) -> Factors | None:
    """Return the factors of ``_embedding_bag``. If bags divide the number of indices, both can be sharded together."""
    results = [meta for meta in call.results if meta is not None]
    if len(results[0].shape) != 2 or len(call["indices"].shape) != 1:
        return None  # torch raises for these
    (bags, columns), (count,) = results[0].shape, call["indices"].shape
    dims: dict[str, Dims] = {"weight": ((), ("e",)), "offsets": ((),), **dict.fromkeys(INDEX_ARGUMENTS, (("i",),))}
    gathered = sum(name in call.names for name in INDEX_ARGUMENTS)
    kernel = Kernel(embedding_bag_of_blocks, collectives=gathered, nbytes=_index_bytes, joint=True)
    shard_bags = Strategy(
        tuple(Along("i") if name in INDEX_ARGUMENTS else R for name in call.names),
        tuple(Along("b") if len(meta.shape) > 1 else R for meta in results),
        "b",
        kernel,
    )
    return Factors(
        tuple(dims[name] for name in call.names),
        tuple(BAG_DIMS if len(meta.shape) > 1 else ((),) for meta in results),
        {"b": bags, "e": columns, "i": count},
        unsharded=frozenset("bi"),
        kernels={"e": Kernel(embedding_bag_of_blocks, joint=True)},
        listed_strategies=(shard_bags,) if bags and count % bags == 0 else (),
    )


def _index_bytes(call: Call) -> int:
    """Return the bytes of one rank's indices and their weights, which the all-gathers send."""
    listed = [layout for layout, name in zip(call.operands, call.names, strict=True) if name in INDEX_ARGUMENTS]
    return sum(layout.max_local_nbytes for layout in listed)


BAG_PARTIALS = tuple(f"{op},finite,finite{weights} -> {op},R,R,R" for op in ("sum", "avg") for weights in ("", ",finite"))
kernel_rule(
    "_embedding_bag _embedding_bag_forward_only",
    embedding_bag_factors,
    partials=by("mode", {0: BAG_PARTIALS, 1: BAG_PARTIALS}),  # linear in the table, except for mode 2 (max)
    plain=("offsets",),
)


def has_dense_gradient(choice: StrategyChoice) -> bool:
    return not choice.call.get("sparse")


BAG_KERNELS = {"b": Kernel(embedding_bag_gradients, lacking=Partial("sum"))}
BAG_OPERANDS = "offset2bag: [], bag_size: [], per_sample_weights: [], maximum_indices:"
INDEX_OPERANDS = "indices: [], offsets: []"
blockwise(
    "_embedding_bag_backward",
    f"grad: [b] e, {INDEX_OPERANDS}, {BAG_OPERANDS} [b] e -> [] e | grad: [b] e, {INDEX_OPERANDS}, {BAG_OPERANDS} [] -> [] e",
    kernels=BAG_KERNELS,
    when=has_dense_gradient,
)
blockwise(
    "_embedding_bag_dense_backward",
    f"grad: [] e, indices: [], {BAG_OPERANDS} [] e -> [] e | grad: [] e, indices: [], {BAG_OPERANDS} [] -> [] e",
    local=on_contiguous(aten._embedding_bag_dense_backward.default),
)
blockwise(
    "_embedding_bag_per_sample_weights_backward",
    f"grad: [b] e, weight: [] e, {INDEX_OPERANDS}, offset2bag: [] -> []",
    kernels=BAG_KERNELS,
    sums="e",
)
