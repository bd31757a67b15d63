"""Samples of operators on dims: views, splits, concatenation, repetition, permutation and padding."""

from __future__ import annotations

from .sample import Samples
from .sample_syntax import sample_table

VIEWS = sample_table("""
view _unsafe_view: {f/i/b/c}[5, 6], [30] | f[5, 6], {[30]/[5, 2, 3]/[5, 1, 6, 1]} | f[30], [5, 6] | f[2, 3, 7], [6, 7]
 | f[4, 6], [6, 4] | f[4, 6, 5], [8, 15] | f[1, 5], [5] | f[5, 1, 6], [30] | f[0, 4], [4, 0] | f[3, 0], [3, 0, 2] | f[1], []
 | f[()], [1, 1]
transpose: {f/i/b/c}[5, 6, 7], 0, 2 | f[5, 6], -1, -2 | f[{5/()}], 0, -1
t: {f/i/b/c}[5, 6] | f[{5/()}]
permute: {f/i/b/c}[5, 6, 7], [2, 0, 1] | f[5, 6], [-1, 0] | f[()], []
unsqueeze: {f/i/b/c}[5, 6], 1 | f[5, 6], -1 | f[()], 0 | f[0, 3], 2
squeeze: f[5, 1, 6] | f[1, 1] | f[5, 1, 6], {1/-1} | f[1, 5, 1], {[0, 2]/[]} | f[()], 0
expand: f[5, 1], {[5, 7]/[-1, 7]} | f[5, 6], [3, 5, 6] | f[1, 6], [4, 1, 6] | f[()], [3] | f[0, 1], [2, 0, 3]
detach: f[{5, 6/()}]
_reshape_alias: f[5, 6], {[30], [1]/[5, 2, 3], [6, 3, 1]} | f[6, 5].t(), [5, 6], [1, 5]
view_as_real: c[{5, 6/()}]
view_as_complex: f[{5, 2/5, 6, 2}]
as_strided: f[5, 6], {[5, 6], [6, 1]/[3, 2], [7, 1], 2} | !f[5, 6], [4, 3], [1, 2] | i[5, 6].t(), [6], [5], 1
as_strided_scatter: f[5, 6], f[2, 3], [2, 3], [7, 2], 1 | f[7], f[3], [3], [2]
view.dtype view_copy.dtype: !f[5, 6], float32 | !s[5, 6], float64 | !f[5, 6], int64 | f[5, 6], float64 | i[5, 6], int16
alias_copy: {f/i}[5, 7]
resize_!: f[5, 6], [3, 7] | f[5, 6].t(), [4, 5] | f[5, 6], [1, 2, 3, 5], memory_format=torch.channels_last
resize_as_!: f[5, 6], f[{3, 7/()}]
is_same_size _has_same_storage_numel: f[5, 7], f[{5, 7/7}]
_has_same_storage_numel: f[3, 5], f[5, 3]
""")

PARTS = sample_table("""
slice: {f/i/b/c}[7, 5], 0, 1, 6, 2 | f[7, 5]
 | f[5, 6], {0, 1, 4/1, -4, -1/0, None, 3/-1, 2/0, 4, 2/0, 9, 12/0, -9, 2/1, 0, 6} | f[7], 0, 1, 7, 3 | f[0, 3], 0, 0, 2
split unsafe_split: {f/i/b/c}[7, 5], 3 | f[5, 6], {4, 1/5/1, -1} | f[0, 3], 2
split_with_sizes unsafe_split_with_sizes: {f/i/b/c}[7, 5], [3, 0, 4] | f[5, 6], {[1, 2, 3], 1/[5]} | f[0, 3], [0, 0], -2
select: {f/i/b/c}[5, 6], 0, 3 | f[5, 6], -1, -2 | f[5], 0, 4 | f[5, 1, 6], 1, 0 | f[2, 0], 0, 1
unbind: {f/i/b/c}[5, 6] | f[5, 6], 1 | f[5, 3, 6], -2 | f[2, 0]
diagonal: {f/i/b/c}[5, 6] | f[5, 6], {0/2/-1/4, 1, 0/9/-7} | f[5, 6, 7], {1, 2, 0/-1, -1, 1}
unfold: {f/i/b/c}[7, 5], 0, 3, 2 | f[5, 6], {-1, 2, 2/1, 6, 1} | f[()], 0, 1, 1
narrow_copy: {f/i/b/c}[7, 5], 0, 2, 4 | f[5, 6], {-1, -3, 2/0, 5, 0}
slice_scatter: f[7, 5], {f[3, 5], 0, 1, 6, 2/f[7, 2], -1, -3, -1/f[7, 5]/f[0, 5], 0, 4, 2}
slice_backward: {f/i/b/c}[3, 5], [7, 5], 0, 1, 6, 2 | f[7, 2], [7, 5], -1, -3, -1, 1 | f[0, 5], [7, 5], 0, 4, 2, 1
 | f[2, 5], [7, 5], 0, 5, 2**63 - 1, 1
select_scatter: f[5, 6], {f[6], 0, 3/f[5], -1, -2} | f[5], f[()], 0, 1
select_backward: {f/i/b/c}[6], [5, 6], 0, 3 | f[5], [5, 6], -1, -2 | f[()], [5], 0, 4
diagonal_scatter: f[5, 6], f[4], 2 | f[5, 6, 7], f[6, 5], -1, 2, 0
diagonal_backward: {f/i/b/c}[4], [5, 6], 2, 0, 1 | f[6, 5], [5, 6, 7], -1, 2, 0 | f[0], [5, 6], 9, 0, 1
unfold_backward: f[3, 5, 3], [7, 5], 0, 3, 2 | f[5, 3, 2], [5, 6], -1, 2, 2
""")

JOINED = sample_table("""
cat: [f[5, 6], f[3, 6]] | [f[5, 6], f[5, 2], f[5, 7]], 1 | [i[5, 6], i[1, 6]], -2 | [f[5, 6], i[2, 6]] | [f[4], f[0], f[3]]
 | [f[2, 3], f[0], f[5, 3]] | [f[5, 6]]
stack: [f[5, 6], f[5, 6]] | [f[5, 6], f[5, 6], f[5, 6]], -1 | [i[5, 6], i[5, 6]], 1 | [f[()], f[()]]
_chunk_cat!: [f[5, 3], f[2, 2]], 0, 2 | [f[5, 3], f[5, 4]], 1, 3
block_diag: [f[2, 3], f[4], f[3, 1]] | [f[5, 6]] | [f[()], f[2, 3]]
repeat: {f/i/b/c}[5, 6], [1, 2] | f[5, 6], [3, 1, 1] | f[5], {[2]/[0]} | f[()], [2, 3]
roll: {f/i/b/c}[5, 6], [2], [0] | f[5, 6], {[1, -2], [0, 1]/[4]/[7], [-1]}
flip: {f/i/b/c}[5, 6], [0] | f[5, 6], {[0, -1]/[]}
rot90: f[5, 6] | f[5, 6, 7], {2, [0, 2]/3, [1, -1]} | f[5, 6], 4
pixel_shuffle: f[{3, 8, 2, 5/8, 3, 2}], 2
pixel_unshuffle: f[{3, 2, 4, 6/2, 6, 4}], 2
channel_shuffle: f[3, 6, 2, 2], 2
constant_pad_nd: f[5, 6], {[1, 2]/[0, 0, 3, 1]/[-1, 2]/[2, -3, -1, 0]/[0, -6]/[-7, 9]/[4, 0, -5, 5]/[1, 1], 2.5/[1, 1], 1}
 | i[5, 6], [2, 1, 1, 0], -3 | f[0, 6], [0, 0, 2, 1]
tril triu: {f/i/b/c}[5, 6] | f[6, 5], {-2/1/7/-9} | f[3, 5, 4], 1 | f[0, 3]
diag_embed: {f/i/b/c}[5] | f[3, 5], {1/-2, 0, 2}
trace: f[5, 6] | i[6, 5] | c[5, 5]
repeat_interleave.Tensor: t([2, 0, 3, 1]) | t([2, 0, 3, 1]), output_size=6
""")


def _with_copy(samples: Samples, names: str) -> Samples:
    """Return the samples, and the same samples for the ``_copy`` variants of the named operators."""
    return {**samples, **{f"{name}_copy": samples[name] for name in names.split()}}


SAMPLES: Samples = (
    _with_copy(
        VIEWS,
        "view transpose t permute unsqueeze squeeze expand detach _reshape_alias view_as_real view_as_complex as_strided",
    )
    | _with_copy(PARTS, "slice split split_with_sizes select unbind diagonal unfold")
    | JOINED
)
