"""Module database: each module of torch's database equals plain torch with randomly placed parameters, buffers and inputs."""

from __future__ import annotations

import os

import module_database
import pytest
from op_database import Setting
from slow_case_marks import keep_every_nth_fast

SEED = int(os.environ.get("DTENSOR_SEED", "0"))
QUICK = (
    "nn_BatchNorm2d,nn_Conv1d,nn_Conv2d,nn_ConvTranspose2d,nn_Linear,nn_Bilinear,nn_Embedding,nn_GroupNorm,nn_LayerNorm,nn_RMSNorm,"
    "nn_LSTMCell,nn_GRU,nn_LSTM,nn_MultiheadAttention,nn_TransformerDecoderLayer,nn_CrossEntropyLoss,nn_CTCLoss,nn_BCELoss,nn_PReLU,"
    "nn_GLU,nn_MaxPool2d,nn_AdaptiveAvgPool2d,nn_LocalResponseNorm,nn_InstanceNorm2d,nn_LazyConv2d,nn_FractionalMaxPool2d"
)


def check(name: str, setting: Setting, samples: int) -> None:
    (info,) = module_database.entries(name)
    for case in module_database.cases_of(info, samples):
        problems = module_database.problems_of(case, setting)
        where = f"{case.name} sample {case.position} training={case.training} {setting}"
        assert not problems or case.name in module_database.ACCEPTED, f"{where}:\n" + "\n".join(problems)


@pytest.mark.parametrize("name", keep_every_nth_fast(QUICK.split(","), 4))
def test_common_modules_with_random_placements_equal_plain_torch(name: str) -> None:
    check(name, Setting(mesh=(2, 2), seed=SEED), 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("part", range(8))
def test_all_modules_with_random_placements_equal_plain_torch(part: int, mesh: tuple[int, ...]) -> None:
    for info in module_database.entries()[part::8]:
        for seed in range(SEED, SEED + 3):
            check(info.formatted_name, Setting(mesh=mesh, seed=seed), 50)
