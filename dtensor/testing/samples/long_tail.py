"""Samples of margins, gates, counts, places, segments, bags, sequences, and of random operations that look at values."""

from __future__ import annotations

import torch

from .of_schema import tensor
from .sample import Builder, Sample, Samples

INT = torch.int64
NONE, MEAN, SUM = 0, 1, 2


def x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return tensor(shape, dtype, seed, low, high)


def ids(count: int, *shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(seed))


def apart(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values that all differ: which of equal ones is chosen is not defined."""
    count = torch.Size(shape).numel()
    return (torch.randperm(count, generator=torch.Generator().manual_seed(seed)).double() / 8 - 2).view(shape)


def mask(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).bool()


# --- margins ---
LABELS = torch.tensor(
    [[1, 3, -1, 0, 2, 5, 6], [-1, 0, 0, 0, 0, 0, 0], [0, 6, 2, -1, 1, 1, 1], [4, -1, 0, 0, 0, 0, 0], [2, 1, 0, 3, 4, 5, 6]]
)
REDUCTIONS = (NONE, MEAN, SUM)


def margins() -> list[Builder]:
    return [
        *(Sample((x(5, 7), ids(7, 5), 1, 1.0, None, how), {}, f"reduction {how}") for how in REDUCTIONS),
        Sample((x(5, 7), ids(7, 5), 2, 0.5, x(7, seed=2, low=0.5), MEAN), {}, "weight"),
        Sample((x(7), torch.tensor(3)), {}, "one sample"),
    ]


def margin_gradients() -> list[Builder]:
    given = ((x(5, seed=2), NONE), (x(seed=2), MEAN), (x(seed=2), SUM))
    return [
        *(Sample((g, x(5, 7), ids(7, 5), 1, 1.0, None, how), {}, f"reduction {how}", gradients=False) for g, how in given),
        Sample((x(seed=2), x(5, 7), ids(7, 5), 2, 0.5, x(7, seed=4, low=0.5), MEAN), {}, "weight", gradients=False),
    ]


def label_gradients() -> list[Builder]:
    given = ((x(5, seed=2), NONE), (x(seed=2), MEAN), (x(seed=2), SUM))
    found = torch.ops.aten.multilabel_margin_loss_forward(x(5, 7), LABELS, NONE)[1]
    return [Sample((g, x(5, 7), LABELS, how, found), {}, f"reduction {how}", gradients=False) for g, how in given]


# --- bags ---
OFFSETS = torch.tensor([0, 2, 2, 6])


def bags() -> list[Builder]:
    plain = [Sample((x(6, 7), ids(6, 9), OFFSETS, False, mode), {}, f"mode {mode}", gradients=False) for mode in (0, 1, 2)]
    weighed = Sample((x(6, 7), ids(6, 9), OFFSETS, False, 0, False, x(9, seed=1)), {}, "weights", gradients=False)
    return [*plain, weighed]


def bag_gradients(dense: bool) -> list[Builder]:
    made: list[Builder] = []
    for mode in (0, 1, 2):
        _, bag, size, places = torch.ops.aten._embedding_bag(x(6, 7), ids(6, 9), OFFSETS, False, mode)
        if not bag.numel():
            bag = torch.tensor([0, 0, 2, 2, 2, 2, 3, 3, 3])
        head = (x(4, 7, seed=2), ids(6, 9), *(() if dense else (OFFSETS,)), bag, size, places, 6, False, mode)
        made.append(Sample((*head, *(() if dense else (False,)), None), {}, f"mode {mode}", gradients=False))
    return made


def bag_weight_gradients() -> list[Builder]:
    bag = torch.tensor([0, 0, 2, 2, 2, 2, 3, 3, 3])
    return [Sample((x(4, 7, seed=2), x(6, 7), ids(6, 9), OFFSETS, bag, 0), gradients=False)]


# --- sequences ---
TARGETS = torch.tensor([[1, 2, 3, 4], [2, 2, 1, 1], [4, 3, 1, 1]])
JOINED = torch.tensor([1, 2, 3, 4, 2, 2, 4, 3, 1])
STEPS, SPELLED = [7, 6, 7], [4, 2, 3]


def spoken() -> torch.Tensor:
    return x(7, 3, 5).log_softmax(-1)


def losses(lists: bool) -> list[Builder]:
    lengths = (STEPS, SPELLED) if lists else (torch.tensor(STEPS), torch.tensor(SPELLED))
    return [
        # the table has places that nobody writes
        Sample((spoken(), TARGETS, *lengths), {}, "padded", values=False),
        Sample((spoken(), JOINED, *lengths, 0, True), {}, "one after another", values=False),
    ]


def loss_gradients(lists: bool) -> list[Builder]:
    lengths = (STEPS, SPELLED) if lists else (torch.tensor(STEPS), torch.tensor(SPELLED))
    loss, alpha = torch.ops.aten._ctc_loss(spoken(), TARGETS, STEPS, SPELLED)
    return [Sample((x(3, seed=3), spoken(), TARGETS, *lengths, loss, alpha, 0), {}, "padded", gradients=False)]


# --- segments ---
LENGTHS, BOUNDS = torch.tensor([2, 0, 3, 1]), torch.tensor([0, 2, 2, 5, 6])
WAYS = ("sum", "mean", "max", "min", "prod")


def segments() -> list[Builder]:
    made: list[Builder] = [
        Sample((x(6, 5), how), {"lengths": LENGTHS, "initial": 1.0}, how, gradients=how in ("sum", "mean")) for how in WAYS
    ]
    return [
        *made,
        *(Sample((x(6), how), {"offsets": BOUNDS}, f"{how} offsets", gradients=False) for how in WAYS),
        Sample(
            (x(3, 6), "sum"), {"lengths": LENGTHS.expand(3, 4).contiguous(), "axis": 1, "initial": 0.0}, "axis", gradients=False
        ),
    ]


def segment_gradients() -> list[Builder]:
    made: list[Builder] = []
    for how in WAYS:
        reduced = torch.segment_reduce(x(6, 5), how, lengths=LENGTHS, initial=1.0)
        args = (x(4, 5, seed=2), reduced, x(6, 5), how)
        made.append(Sample(args, {"lengths": LENGTHS, "initial": 1.0}, how, gradients=False))
    return made


def sorts(*, stable: bool = False) -> list[Builder]:
    options = {"stable": True} if stable else {}
    more: list[Builder] = [Sample((x(7, 5).round(),), {**options, "dim": 0, "descending": True}, "equal ones")] if stable else []
    return [
        *more,
        *(
            Sample((x(5, 6, 7), *(() if stable else (d,))), {**options, **({"dim": d} if stable else {})}, f"dim {d}")
            for d in (0, 2)
        ),
        Sample((apart(17),), options, "1-d"),
        Sample(
            (torch.tensor([3.0, torch.nan, -0.0, 0.0, torch.inf, 3.0, -torch.inf, torch.nan, 0.0]),),
            options,
            "special",
            gradients=False,
        ),
        Sample((ids(4, 13),), {**options, "descending": True}, "integers"),
        Sample((mask(9),), options, "bools"),
        Sample((x(),), options, "0-d"),
        Sample((x(0),), options, "empty"),
    ]


SAMPLES: Samples = {
    "multi_margin_loss": margins(),
    "multi_margin_loss_backward": margin_gradients(),
    "multilabel_margin_loss_forward": [
        *(Sample((x(5, 7), LABELS, how), {}, f"reduction {how}", gradients=False) for how in REDUCTIONS),
        *(Sample((x(7), LABELS[0], how), {}, f"one sample, reduction {how}", gradients=False) for how in REDUCTIONS),
    ],
    "multilabel_margin_loss_backward": label_gradients(),
    "glu": [*(Sample((x(4, 6, 8), d)) for d in (0, 1, -1)), Sample((x(6),))],
    "glu_backward": [Sample((x(4, 3, seed=1), x(4, 6), 1)), Sample((x(2, 6, seed=1), x(4, 6), 0))],
    "glu_jvp": [Sample((x(4, 3, seed=1), x(4, 6), x(4, 6, seed=2), 1), gradients=False)],
    "glu_backward_jvp": [
        Sample((x(4, 6), x(4, 3, seed=1), x(4, 6, seed=2), x(4, 3, seed=3), x(4, 6, seed=4), 1), gradients=False)
    ],
    "histc": [
        Sample((x(5, 7), 6, -1.5, 1.0)),
        Sample((x(5, 7), 6), {}, "ends of the data"),
        Sample((torch.ones(5, dtype=torch.float64), 4), {}, "all equal"),
        Sample((x(0, 3), 4), {}, "empty"),
    ],
    "_unique2": [Sample((ids(4, 9, 2), True, False, True)), Sample((ids(4, 9), True, True, True)), Sample((x(5, 3),))],
    "_unique": [Sample((ids(4, 9, 2),)), Sample((ids(4, 9), True, True))],
    "unique_dim": [Sample((ids(2, 9, 2), 0, True, True, True)), Sample((ids(2, 3, 5), -1))],
    "unique_consecutive": [Sample((ids(2, 9, 2), True, True)), Sample((ids(2, 9, 2), False, True, 0)), Sample((ids(2, 9),))],
    "unique_dim_consecutive": [Sample((ids(2, 9, 2), 0, True, True)), Sample((ids(2, 3, 5), 1))],
    "histogram": [
        Sample((x(5, 7), 4), gradients=False),
        Sample((x(5, 7), 4), {"range": [-1.0, 1.0], "density": True}, gradients=False),
        Sample(
            (x(5, 7), torch.tensor([-1.0, 0, 0.5, 2], dtype=torch.float64)), {"weight": x(5, 7, seed=1).abs()}, gradients=False
        ),
    ],
    "geqrf": [Sample((x(3, 5, 4),), gradients=False), Sample((x(4, 5),), gradients=False)],
    "_chunk_cat": [
        Sample(([x(5, 3), x(2, 2, seed=1)], 0, 2), gradients=False),
        Sample(([x(5, 3), x(5, 4, seed=1)], 1, 3), gradients=False),
    ],
    "_has_same_storage_numel": [Sample((x(3, 5), x(5, 3))), Sample((x(3), x(5)))],
    "_new_zeros_with_same_feature_meta": [
        Sample((x(3, 5), x(5, 3)), gradients=False),
        Sample((x(2, 7), x(5, 3)), {"self_num_batch_dims": 1}, gradients=False),
    ],
    "bincount": [
        Sample((ids(6, 9),)),
        Sample((ids(6, 9), x(9)), {"minlength": 8}, "weights", gradients=False),
        Sample((ids(6, 9), ids(5, 9, seed=1)), {}, "integer weights"),
        Sample((ids(6, 0),), {"minlength": 3}, "empty"),
        Sample((torch.tensor([1, -1, 2]),), {}, "negative"),
    ],
    "isin": [
        Sample((ids(9, 5, 6), ids(9, 7, seed=1))),
        Sample((ids(9, 5, 6), ids(9, 7, seed=1)), {"invert": True}),
        Sample((ids(9, 5), 3)),
        Sample((3, ids(9, 5))),
        Sample((x(5, 3), x(2, 3))),
        Sample((ids(6, 5, 3), ids(6, 2, 3, seed=5))),
        Sample((ids(6, 5, 3), ids(6, 2, 3, seed=6)), {"invert": True}),
    ],
    "hash_tensor": [
        *(Sample((x(5, 7), dims), {"keepdim": keep}, f"{dims}") for dims, keep in (([], False), ([1], True), ([0, 1], False))),
        Sample((ids(99, 11), [0])),
    ],
    "allclose": [Sample((x(5, 7), x(5, 7))), Sample((x(5, 7), x(7))), Sample((x(5, 7), x(5, 7, seed=1)))],
    "nonzero": [
        *(Sample((given,)) for given in (ids(2, 5, 6), mask(7), x(3, 4, 5).round(), x(), mask(0, 3), torch.zeros(4, 3))),
    ],
    "repeat_interleave.Tensor": [
        Sample((torch.tensor([2, 0, 3, 1]),)),
        Sample((torch.tensor([2, 0, 3, 1]),), {"output_size": 6}, "size given"),
    ],
    "masked_select": [Sample((x(5, 6), mask(5, 6))), Sample((x(5, 6), mask(6))), Sample((x(), torch.tensor(True)))],
    "masked_scatter": [Sample((x(5, 6), mask(5, 6), x(4, 9, seed=1))), Sample((x(5, 6), mask(6), x(40, seed=1)))],
    "masked_scatter_backward": [Sample((x(5, 6), mask(5, 6), (4, 9)), gradients=False)],
    "_unsafe_masked_index": [
        Sample((x(5, 6), mask(7, 7), [ids(9, 7, 1) - 2, ids(9, 7) - 2], 0.5)),
        Sample((x(5, 6), mask(7, 6), [ids(9, 7) - 2, None], 1)),
    ],
    "_unsafe_masked_index_put_accumulate": [
        Sample((x(5, 6), mask(7, 7), [ids(9, 7, 1) - 2, ids(9, 7) - 2], x(7, 7, seed=1))),
    ],
    "nonzero_static": [Sample((ids(2, 5, 6),), {"size": 40}), Sample((ids(2, 5, 6),), {"size": 4, "fill_value": 0})],
    "resize_": [
        Sample((x(5, 6), [3, 7]), gradients=False),
        Sample((x(5, 6).t(), [4, 5]), gradients=False),
        Sample((x(5, 6), [1, 2, 3, 5]), {"memory_format": torch.channels_last}, gradients=False),
    ],
    "resize_as_": [Sample((x(5, 6), x(3, 7)), gradients=False), Sample((x(5, 6), x()), gradients=False)],
    "block_diag": [Sample(([x(2, 3), x(4), x(3, 1, seed=1)],)), Sample(([x(5, 6)],)), Sample(([x(), x(2, 3)],))],
    "renorm": [
        *(Sample((x(5, 6, 7), p, d, 1.5), {}, f"{p} {d}") for p, d in ((2, 0), (1, 1), (3, -1))),
        Sample((x(5, 6), 2, 0, 100.0), {}, "none scaled"),
    ],
    "sort": sorts(),
    "sort.stable": sorts(stable=True),
    "topk": [
        *(Sample((apart(5, 7, 6), 3, d)) for d in (0, 1)),
        Sample((apart(5, 7), 7, 1, False)),
        Sample((x(5, 7).round(), 2, 1), {}, "equal ones"),
        Sample((apart(17), 4)),
        Sample((ids(99, 17), 4), {}, "integers"),
        Sample((x(), 1), {}, "0-d"),
        Sample((apart(5, 7), 0, 1), {}, "none"),
    ],
    "bernoulli": [Sample((x(5, 7, low=0.1, high=0.9),)), Sample((x(5, 7, low=0.1, high=0.9).t(),), {}, "strides")],
    "normal.Tensor_float": [Sample((x(5, 7), 2.0)), Sample((x(3, 17).t(), 0.5))],
    "normal.float_Tensor": [Sample((0.5, x(5, 7, low=0.5)))],
    "normal.Tensor_Tensor": [Sample((x(5, 7), x(5, 7, seed=1, low=0.5))), Sample((x(7), x(5, 1, seed=1, low=0.5)))],
    "multinomial": [
        Sample((x(5, 7, low=0.1), 3), gradients=False),
        Sample((x(5, 7, low=0.1), 9, True), gradients=False),
        Sample((x(7, low=0.1), 3), gradients=False),
    ],
    "rrelu_with_noise": [
        Sample((x(5, 7), torch.zeros(5, 7, dtype=torch.float64), 0.1, 0.4, True), {}, "training", gradients=False),
        Sample((x(5, 7).t(), torch.zeros(7, 5, dtype=torch.float64), 0.1, 0.4, True), {}, "strides", gradients=False),
        Sample((x(5, 7), torch.zeros(5, 7, dtype=torch.float64), 0.1, 0.4, False), {}, "evaluation", gradients=False),
    ],
    "rrelu_with_noise_backward": [
        Sample((x(5, 7, seed=1), x(5, 7), x(5, 7, seed=2), 0.1, 0.4, train, False), gradients=False) for train in (True, False)
    ],
    "segment_reduce": segments(),
    "_segment_reduce_backward": segment_gradients(),
    "_embedding_bag": bags(),
    "_embedding_bag_forward_only": bags(),
    "_embedding_bag_backward": bag_gradients(False),
    "_embedding_bag_dense_backward": bag_gradients(True),
    "_embedding_bag_per_sample_weights_backward": bag_weight_gradients(),
    "embedding_renorm_": [
        Sample((x(6, 7), ids(6, 4), 1.5, 2.0), gradients=False),
        Sample((x(6, 7), ids(6, 2, 3), 3.0, 1.0), gradients=False),
    ],
    "_ctc_loss": losses(True),
    "_ctc_loss.Tensor": losses(False),
    "_ctc_loss_backward": loss_gradients(True),
    "_ctc_loss_backward.Tensor": loss_gradients(False),
    "as_strided_scatter": [Sample((x(5, 6), x(2, 3, seed=1), [2, 3], [7, 2], 1)), Sample((x(7), x(3, seed=1), [3], [2]))],
    "alias_copy": [Sample((x(5, 7),)), Sample((ids(5, 7),))],
}
