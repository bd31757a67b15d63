"""Samples of indexing operators: reads and writes by index or by mask, embedding bags and segments."""

from __future__ import annotations

import torch

from .sample import Samples
from .sample_syntax import RandomIntegers, distinct_integers, sample_table
from .schema_samples import make_tensor

ROWS = torch.stack([distinct_integers(5, 3) for _ in range(6)], 1)
MASK = torch.tensor([True, False, True, True, False])
SORTED = torch.tensor([-1.5, -0.5, 0.0, 0.5, 0.5, 1.0, 2.0], dtype=torch.float64)

INDEXING = sample_table(
    """
embedding: f[7, 3], {below(7)[5, 2]/below(7)[()]/below(7)[5, 0]/t([0, 7])/below(7)[5].int()} | f[7, 3], below(7)[5], padding_idx=2
 | f[7, 3], below(7)[5, 4], scale_grad_by_freq=True
embedding_dense_backward: f[5, 2, 3], below(7)[5, 2], 7, -1, False | f[5, 3], below(7)[5], 7, 2, False
 | !f[5, 3], below(3)[5], 7, -1, True
embedding_renorm_!: f[6, 7], {below(6)[4], 1.5, 2.0/below(6)[2, 3], 3.0, 1.0}
index_select: f[5, 6], {0, below(5)[7]/-1, below(6)[3]/0, below(5)[()]/0, below(5)[0]/0, t([5])} | i[5, 6], 1, below(6)[4]
 | b[5, 6], 0, below(5)[4] | f[()], 0, below(1)[1] | f[5] / 0.0, 0, below(5)[4]
gather: f[5, 6], {0, below(5)[7, 6]/-1, below(6)[5, 3]/1, below(6)[3, 7]/0, below(5)[0, 6]} | i[5, 6], 0, below(5)[2, 4]
 | f[5, 6, 3], 1, below(6)[5, 2, 2] | f[()], 0, below(1)[()] | f[5], 0, t([1, 5])
take: f[5, 6], below(30, -30)[7, 2] | i[5, 6, 3], below(90)[7] | f[()], below(1)[2] | f[5], {below(5)[()]/t([5])}
index: f[5, 6], {[below(5, -5)[7]]/[None, below(6)[7]]/[below(5, -5)[7], below(6)[7]]/[below(5)[()]]/[below(5)[0]]/[t([0,
 5])]/[MASK]}
 | f[5, 6, 3], {[below(5, -5)[7], None, below(3)[7]]/[None, below(6)[7], below(3)[2, 1]]} | i[5, 6], [below(5)[2, 3]]
_unsafe_index: f[5, 6], {[below(5, -5)[7]]/[None, below(6)[7]]/[below(5, -5)[7], below(6)[7]]}
 | f[5, 6, 3], [below(5, -5)[7], None, below(3)[7]]
bucketize: f[5, 6], SORTED | f[5], SORTED, right=True, out_int32=True | 0.5, SORTED
searchsorted: SORTED, {f[5, 6]/0.5, side="right"} | f[5, 7].sort(-1).values, f[5, 3]
 | (x := f[5, 7]), f[5, 3], sorter=x.argsort(-1)
scatter scatter_add: f[5, 6], {0, ROWS, f[3, 6]/1, ROWS.t()[:5], f[5, 4]/0, ROWS[:0], f[0, 6]} | i[5, 6], 0, ROWS[:2, :4], i[2, 4]
 | f[()], 0, t(0), f[()]
scatter: f[5, 6], 0, below(5)[3, 6], 2.5 | !f[5, 6], {0, below(5)[7, 6], f[7, 6], reduce="add"/1, below(6)[5, 3], 2.0,
 reduce="multiply"}
scatter_add: f[5, 6], {0, below(5)[7, 6], f[7, 6]/1, below(6)[5, 9], f[5, 9]}
scatter_reduce: f[5, 6], {0, ROWS, f[3, 6]/1, ROWS.t()[:5], f[5, 4]/0, ROWS[:0], f[0, 6]}, "sum"
 | i[5, 6], 0, ROWS[:2, :4], i[2, 4], "sum"
 | f[()], 0, t(0), f[()], "sum" | f[5, 6], 0, below(5)[7, 6], f[7, 6], {"sum"/"prod"/"mean"/"amax"/"amin"},
 include_self={True/False}
index_add index_copy: f[5, 6], {0, distinct(5, 3), f[3, 6]/-1, distinct(6, 4), f[5, 4]/0, distinct(5, 0), f[0, 6]}
 | i[5, 6], 0, distinct(5, 3), i[3, 6]
index_add: f[5, 6], 0, below(5)[7], f[7, 6], alpha=-2
index_fill: f[5, 6], {0, below(5)[3], 2.5/-1, below(6)[3], f[()]} | i[5, 6], 0, below(5)[3], 7
index_reduce: f[5, 6], 0, below(5)[7], f[7, 6], {"prod"/"mean"/"amax"/"amin"}
index_put _index_put_impl _unsafe_index_put: f[5, 6, 3], [distinct(5, 3), None, distinct(3, 3)], f[3, 6]
 | f[5, 6], {[distinct(5, 3)], f[3, 6]/[None, distinct(6, 3)], f[5, 3]/[distinct(5, 3) - 5, distinct(6, 3)], f[3]}
 | f[5, 6], {[distinct(5, 3), distinct(6, 3)], f[1]/[below(5)[7]], f[7, 6], True}
index_put: i[5, 6], [below(5)[7], below(6)[7]], i[()], True | f[5, 6], {[MASK], f[()]/[f[5, 6] > 0], f[()]/[distinct(5, 0)],
 f[0, 6]}
 | f[5, 6], [None, t([True, True, False, False, False, False])], f[5, 2]
put: f[5, 6], {distinct(30, 7) - 15, f[7]/below(30)[7], f[7], True} | i[5, 6], distinct(30, 6).view(2, 3), i[6]
masked_select: f[5, 6], b[{5, 6/6}] | f[()], t(True)
masked_scatter: f[5, 6], {b[5, 6], f[4, 9]/b[6], f[40]}
masked_scatter_backward!: f[5, 6], b[5, 6], (4, 9)
_unsafe_masked_index: f[5, 6], {b[7, 7], [below(7, -2)[7, 1], below(7, -2)[7]], 0.5/b[7, 6], [below(7, -2)[7], None], 1}
_unsafe_masked_index_put_accumulate: f[5, 6], b[7, 7], [below(7, -2)[7, 1], below(7, -2)[7]], f[7, 7]
segment_reduce: f[6, 5], {"sum"/"mean"}, lengths=LENGTHS, initial=1.0
 | !f[6, 5], {"max"/"min"/"prod"}, lengths=LENGTHS, initial=1.0
 | !f[6], {"sum"/"mean"/"max"/"min"/"prod"}, offsets=t([0, 2, 2, 5, 6])
 | !f[3, 6], "sum", lengths=LENGTHS.expand(3, 4).contiguous(), axis=1, initial=0.0
_segment_reduce_backward!: f[4, 5], torch.segment_reduce(x := f[6, 5], {"sum"/"mean"/"max"/"min"/"prod"}, lengths=LENGTHS,
 initial=1.0),
 x, {"sum"/"mean"/"max"/"min"/"prod"}, lengths=LENGTHS, initial=1.0
""",
    ROWS=ROWS,
    MASK=MASK,
    SORTED=SORTED,
    LENGTHS=torch.tensor([2, 0, 3, 1]),
)

IDS, OFFSETS, PLACES = RandomIntegers(6)[9], torch.tensor([0, 2, 2, 6]), torch.tensor([0, 0, 2, 2, 2, 2, 3, 3, 3])


def bag_results(mode: int) -> tuple[torch.Tensor, ...]:
    """Return the results of a forward pass over embedding bags that the backward pass reads."""
    _, bags, sizes, places = torch.ops.aten._embedding_bag(make_tensor((6, 7)), IDS, OFFSETS, False, mode)
    return (bags if bags.numel() else PLACES), sizes, places


BAGS = sample_table(
    """
_embedding_bag! _embedding_bag_forward_only!: f[6, 7], IDS, OFFSETS, False, {0/1/2} | f[6, 7], IDS, OFFSETS, False, 0, False, f[9]
 | f[6, 7], IDS[:8], OFFSETS, False, {0/1/2}, False, None, False, 1 | f[6, 7], IDS[:8], OFFSETS, False, 0, False, f[8]
_embedding_bag_backward!: f[4, 7], IDS, OFFSETS, *bag_results({0/1/2}), 6, False, {0/1/2}, False, None
 | f[4, 7], IDS, OFFSETS, *bag_results(0), 6, True, 0, False, f[9]
_embedding_bag_dense_backward!: f[4, 7], IDS, *bag_results({0/1/2}), 6, False, {0/1/2}, None
_embedding_bag_per_sample_weights_backward!: f[4, 7], f[6, 7], IDS, OFFSETS, PLACES, 0
""",
    IDS=IDS,
    OFFSETS=OFFSETS,
    PLACES=PLACES,
    bag_results=bag_results,
)
SAMPLES: Samples = INDEXING | BAGS
