"""What is set of libraries, as values that a survey or a key compares: code reads it through functions, so no walk finds it."""

from __future__ import annotations

import copyreg
import decimal
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, call
from typing import Any

import numpy
import torch

from ..base.torch_internals import context, pytree, world

# By which torch chooses operators for a function, at each call.
_CHOOSING = (
    "_get_cudnn_sdp_enabled",
    "_get_deterministic_algorithms",
    "_get_fa3_sdp_enabled",
    "_get_flash_sdp_enabled",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_overrideable_sdp_enabled",
    "_get_deterministic_algorithms_warn_only",
    "_get_cudnn_enabled",
    "_get_mkldnn_enabled",
)
# By which operators choose how they compute, at a replay as well: so they count where code asks for them.
_NAMES = (
    "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_tf32",
    "_get_cudnn_allow_tf32",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_deterministic_fill_uninitialized_memory",
    "_get_float32_matmul_precision",
    "_get_mkldnn_deterministic",
    "_get_nnpack_enabled",
    "_get_onednn_allow_tf32",
    "_get_warnAlways",
    "_is_fwd_grad_enabled",
    "_is_multithreading_enabled",
    "_is_view_replay_enabled",
    "get_num_threads",
    "is_anomaly_check_nan_enabled",
    "is_anomaly_enabled",
    "is_autocast_cache_enabled",
)
ASKING = ("get_", "is_", "are_", "_get_", "_is_")  # functions of torch by which code does


def _those(names: Sequence[str]) -> list[Callable[[], Any]]:
    return [getattr(context, name) for name in names if hasattr(context, name)]  # not all in every torch


_CHOSEN = [*_those(_CHOOSING), torch.backends.mha.get_fastpath_enabled]
_TORCHS: tuple[Callable[[], Any], ...] = (
    *_those(_NAMES),
    partial(torch.get_autocast_dtype, "cpu"),
    partial(torch.get_autocast_dtype, "cuda"),
)


def chosen() -> tuple[Any, ...]:
    """By what torch chooses operators."""
    return (*map(call, _CHOSEN),)


_HANDLERS, _FILTERS, _LEVEL = attrgetter("handlers"), attrgetter("filters"), attrgetter("level")
_LOGGER = attrgetter("name", "level", "disabled", "propagate", "parent")


def of_logger(logger: logging.Logger) -> Any:
    """What a logger lets through, and to whom; so of those above it."""
    found: list[Any] = [logger.manager.disable]
    above: logging.Logger | None = logger
    while above is not None:
        handlers = tuple((id(handler), handler.level) for handler in above.handlers)
        found.append((above.level, above.disabled, above.propagate, tuple(map(id, above.filters)), handlers))
        above = above.parent
    return found


def _of_logging() -> Any:
    held = [logging.root, *(one for one in logging.Logger.manager.loggerDict.values() if isinstance(one, logging.Logger))]
    handlers = [[*map(len, map(_HANDLERS, held))], [*chain.from_iterable(map(_HANDLERS, held))]]
    filters = [[*map(len, map(_FILTERS, held))], [*chain.from_iterable(map(_FILTERS, held))]]
    return logging.root.manager.disable, [*map(_LOGGER, held)], handlers, [*map(_LEVEL, handlers[1])], filters


def _of_threading() -> Any:
    here = threading.current_thread()
    return threading.get_ident(), here.name, here.daemon, threading.active_count()


# By the module that code names, or of whose objects it has one.
SETTINGS: dict[str, Callable[[], Any]] = {
    "_thread": _of_threading,
    "copy": lambda: tuple((id(kind), id(reduce)) for kind, reduce in copyreg.dispatch_table.items()),
    "decimal": lambda: repr(decimal.getcontext()),
    "logging": _of_logging,
    "numpy": lambda: (repr(numpy.geterr()), numpy.getbufsize(), repr(numpy.get_printoptions())),
    "threading": _of_threading,
    "torch.backends": lambda: [ask() for ask in _TORCHS],
    "torch.distributed": lambda: world.default_pg,  # which tells who and how many
    "torch.utils._pytree": lambda: len(pytree.SUPPORTED_NODES),
    "warnings": lambda: tuple(map(id, warnings.filters)),
}
