"""Values for the configurations that ``shrinking`` leaves unfit, found by trying, and kept in ``found.json``.

    python tests/hf/searching.py [--part 0/2] [--seconds 60] [MODEL_TYPE ...]

A configuration is as fit as its model comes far: how many modules have run when it fails. One value at a time is changed, and
kept where the model comes farther; a model with too many parameters comes the farther the fewer it has.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import math
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from eating import parts
from shrinking import _SIZES, FOUND, NotShrunk, Shrunk, classes_of, scaled
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

_INTEGERS = (1, 2, 4, 8, 16, 32, 64)
_EATEN = {
    "image": (16, 32, 64, 224),
    "images": (1, 4, 16),
    "frames": (1, 2, 8),
    "sound": (20, 80, 100, 200, 512, 3000),
    "turned": (True,),
    "labelled": (False,),
    "single": (True,),
}


@dataclass
class Tried:
    """How far a family comes (infinite: it takes a step), and the code in which it fails, the innermost first."""

    far: float
    code: list[str]

    def rank(self, name: str) -> int:
        """How near to the failure a value's name is written."""
        word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
        return next((i for i, text in enumerate(self.code) if word.search(text)), len(self.code))


def tried(family: Shrunk) -> Tried:
    """A step on one device. How far: kinds of modules that have run."""
    ran: set[str] = set()
    family.watch = lambda name: ran.add(re.sub(r"\d+", "", name))
    try:
        family.runs()
    except NotShrunk as reason:
        return Tried(-math.log(reason.parameters) if reason.parameters else len(ran), code_of(reason))
    except Exception as error:
        return Tried(len(ran), code_of(error))
    finally:
        family.watch = None
    return Tried(math.inf, [])


def code_of(error: BaseException) -> list[str]:
    """The functions that raised, then their classes."""
    functions, classes = [], []
    while error is not None:
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            if "transformers" in frame.f_code.co_filename:
                with contextlib.suppress(OSError, TypeError):
                    functions.append(inspect.getsource(frame.f_code))
                    classes.append(inspect.getsource(type(frame.f_locals["self"])) if "self" in frame.f_locals else "")
        error = error.__context__  # type: ignore[assignment]
    return functions + classes


def choices(config: PretrainedConfig) -> Iterator[tuple[str, list[Any]]]:
    """What may be changed: the path of a value and others for it, the default among them."""
    for path, part in parts(config):
        for name, value in vars(part).items():
            if name.startswith("_") or isinstance(value, (bool, str, float, PretrainedConfig)) or name in ("model_type", "dtype"):
                continue
            others: list[Any] = []
            if isinstance(value, int):
                others = [value, *(value // d for d in (2, 4, 8, 16, 32) if value % d == 0 and value > d), *_INTEGERS]
            elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
                others = [
                    value,
                    *(scaled(value, d) for d in (2, 4, 8, 16, 32)),
                    value[:2],
                    value[:1],
                    type(value)(1 for _ in value),
                ]
            elif isinstance(value, (list, tuple)) and value:
                others = [value, value[:2], value[-2:]]
            elif isinstance(value, dict) and "mrope_section" in value:
                others = [
                    value,
                    *({**value, "mrope_section": s} for s in ([1, 1, 0], [1, 1, 1], [2, 1, 1], [1, 1, 2], [4, 2, 2])),
                ]
            elif value is None and name.startswith(("num_", "n_", "moe_", "hidden", "intermediate", "head", "topk")):
                others = [1, 2, 4, 8, 32]
            if others:
                yield f"{path}{name}", list({repr(other): other for other in others}.values())


def search(model_type: str, seconds: float) -> Shrunk:
    """The first found in so many seconds."""
    end = time.monotonic() + seconds
    best, most = Shrunk(model_type), Tried(-math.inf, [])
    for model in classes_of(model_type)[:2]:
        for divisor, image in _SIZES[:4]:
            made = Shrunk(model_type, model, divisor, image)
            now = tried(made)
            if now.far > most.far:
                best, most = made, now
    eaten: list[tuple[str, list[Any]]] = [(f".{name}", list(values)) for name, values in _EATEN.items()]
    while most.far < math.inf:
        given = [*eaten, *choices(CONFIG_MAPPING[model_type]())]
        given.sort(key=lambda item: most.rank(item[0]))
        for made in (best.changed(name, value) for name, values in given for value in values):
            if time.monotonic() > end:
                raise NotShrunk(f"farthest {most.far}: {best.described()}")
            now = tried(made)
            if now.far > most.far:
                best, most = made, now
                break
        else:
            raise NotShrunk(f"nothing better than {most.far}: {best.described()}")
    return best


def known() -> dict[str, Any]:
    """What is kept."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    first, step = map(int, options.part.split("/"))
    names = options.names or [name for name in CONFIG_MAPPING_NAMES if classes_of(name)]
    for name in names[first::step]:
        if name in known():
            continue
        try:
            family = search(name, options.seconds)
        except Exception as error:
            print(name, type(error).__name__, str(error)[:300], file=sys.stderr, flush=True)
            continue
        FOUND.write_text(json.dumps(known() | {name: family.described()}, indent=0, sort_keys=True) + "\n")
        print(name, family.described(), flush=True)


if __name__ == "__main__":
    main()
