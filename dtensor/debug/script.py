"""``python -m dtensor explain script.py``: a script as it is, and what it moved."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .explain import Explanation
from .seen import Record


def explained(script: Path, arguments: Sequence[str]) -> int:
    """Run a script as Python would, then print what it moved (rank 0 of several); its exit status.

    Where it raises, what it moved until then is printed first.
    """
    if not script.is_file():
        print(f"{script} is no file", file=sys.stderr)
        return 2
    before, path, status = sys.argv, list(sys.path), 0
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent.resolve())
    record = Record()
    try:
        with record:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv, sys.path[:] = before, path
        if os.environ.get("RANK", "0") == "0":
            print(Explanation(tuple(record.movements), None, record.get_exchange_count()), flush=True)
    return status
