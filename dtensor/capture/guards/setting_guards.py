"""Setting guards: the settings of libraries, as values that are compared.

Code reads settings through functions, so guard discovery does not reach them as objects.
"""

from __future__ import annotations

import copyreg
import decimal
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, call
from typing import Any

import numpy
import torch

from ...base.torch_internals import context, pytree, world

# Torch chooses operators by these settings at each call.
_OPERATOR_CHOICE_GETTERS = (
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
# Operators choose their algorithm by these settings, at a replay as well. So they are guarded only if code reads them.
_ALGORITHM_GETTERS = (
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
_SETTING_GETTER_PREFIXES = ("get_", "is_", "are_", "_get_", "_is_")  # of the functions of torch that return settings


def _existing_getters(names: Sequence[str]) -> list[Callable[[], Any]]:
    """Return these functions, except those that this version of torch lacks."""
    return [getattr(context, name) for name in names if hasattr(context, name)]


_OPERATOR_CHOICES = [*_existing_getters(_OPERATOR_CHOICE_GETTERS), torch.backends.mha.get_fastpath_enabled]
_TORCH_SETTINGS: tuple[Callable[[], Any], ...] = (
    *_existing_getters(_ALGORITHM_GETTERS),
    partial(torch.get_autocast_dtype, "cpu"),
    partial(torch.get_autocast_dtype, "cuda"),
)


def operator_choice_settings() -> tuple[Any, ...]:
    """Return the settings by which torch chooses operators."""
    return (*map(call, _OPERATOR_CHOICES),)


_HANDLERS, _FILTERS, _LEVEL = attrgetter("handlers"), attrgetter("filters"), attrgetter("level")
_LOGGER_FIELDS = attrgetter("name", "level", "disabled", "propagate", "parent")


def _logging_settings() -> Any:
    """Return the levels, handlers and filters of all loggers, to compare them at the next call."""
    registered = logging.Logger.manager.loggerDict.values()
    loggers = [logging.root, *(one for one in registered if isinstance(one, logging.Logger))]
    handlers = [[*map(len, map(_HANDLERS, loggers))], [*chain.from_iterable(map(_HANDLERS, loggers))]]
    filters = [[*map(len, map(_FILTERS, loggers))], [*chain.from_iterable(map(_FILTERS, loggers))]]
    return logging.root.manager.disable, [*map(_LOGGER_FIELDS, loggers)], handlers, [*map(_LEVEL, handlers[1])], filters


def _thread_settings() -> Any:
    thread = threading.current_thread()
    return threading.get_ident(), thread.name, thread.daemon, threading.active_count()


# By the name of the module that code refers to, or of the class of an object that it has.
_SETTINGS: dict[str, Callable[[], Any]] = {
    "_thread": _thread_settings,
    "copy": lambda: tuple((id(kind), id(reduce)) for kind, reduce in copyreg.dispatch_table.items()),
    "decimal": lambda: repr(decimal.getcontext()),
    "logging": _logging_settings,
    "numpy": lambda: (repr(numpy.geterr()), numpy.getbufsize(), repr(numpy.get_printoptions())),
    "threading": _thread_settings,
    "torch.backends": lambda: [read() for read in _TORCH_SETTINGS],
    "torch.distributed": lambda: world.default_pg,  # it determines the rank and the world size
    "torch.utils._pytree": lambda: len(pytree.SUPPORTED_NODES),
    "warnings": lambda: tuple(map(id, warnings.filters)),
}


def settings_of(module: str, names: Iterable[str] = ()) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield ``(library, function that returns its settings)`` for a module of libraries.

    Args:
        module: name of the module.
        names: attributes of the module that code names. Some functions of torch return settings.
    """
    returns_settings = module.partition(".")[0] in ("torch", "") and any(
        name.startswith(_SETTING_GETTER_PREFIXES) for name in names
    )
    for name, get_settings in _SETTINGS.items():
        if module == name or module.startswith(name + ".") or (returns_settings and name == "torch.backends"):
            yield name, get_settings
