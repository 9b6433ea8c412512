"""One source for the hot code: compiled by numba where it is installed, run by CPython otherwise.

Set LANESIM_JIT=0 to use CPython although numba is present. Compiled code is cached in a folder named after a
hash of all hot sources, because numba by itself does not notice when a callee in another file has changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

COMPILED = os.environ.get("LANESIM_JIT", "1") != "0" and find_spec("numba") is not None
HOT_FOLDERS = ("engine", "policies", "cost")
KEPT_CACHES = 4


def _cache_dir() -> Path:
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in HOT_FOLDERS:
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.read_bytes())
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lanesim" / "jit"
    try:
        chosen = base / digest.hexdigest()[:16]
        chosen.mkdir(parents=True, exist_ok=True)
        stale = sorted((p for p in base.iterdir() if p != chosen), key=lambda p: p.stat().st_mtime)
        for old in stale[: max(0, len(stale) - KEPT_CACHES)]:
            shutil.rmtree(old, ignore_errors=True)
        if os.access(chosen, os.W_OK):
            return chosen
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="lanesim-jit-"))


if COMPILED:
    import numba

    numba.config.CACHE_DIR = str(_cache_dir())

    def jit(function: F) -> F:
        """Compile `function` (no fastmath: results equal CPython's to the bit)."""
        compiled: F = numba.njit(cache=True, error_model="python")(function)
        return compiled

else:

    def jit(function: F) -> F:
        """Leave `function` to CPython."""
        return function
