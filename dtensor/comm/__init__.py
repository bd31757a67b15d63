"""Communication: one interface (``Communicator``) for process groups, for all ranks in one process, and for dry runs."""

from __future__ import annotations

from ..ranks.per_rank import PerRank, each_shard, per_rank, reordered, shards_of
from ..ranks.rank_values import RankNumber, RankValues
from . import events
from .communicator import Communicator, Local
from .events import Event
from .local_reduce import fold
from .map_ranks import BACKENDS, communicator_of, expect_locals, map_ranks
from .pending import Pending

__all__ = [
    "BACKENDS",
    "Communicator",
    "Event",
    "Local",
    "Pending",
    "PerRank",
    "RankNumber",
    "RankValues",
    "communicator_of",
    "each_shard",
    "events",
    "expect_locals",
    "fold",
    "map_ranks",
    "per_rank",
    "reordered",
    "shards_of",
]
