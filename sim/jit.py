"""One source for the hot code: run by CPython, or compiled by numba where that pays.

The first compilation of a policy's loop takes tens of seconds, a run of a thousand requests under CPython a tenth of
one; both give the same bytes. So a process compiles only if LANESIM_JIT=1 is set, which `sim.study` does for its
workers when the work is large or the compiled code lies in the cache already; LANESIM_JIT=0 forbids it. The cache is a
folder named after a hash of all hot sources: numba by itself does not notice a change in a callee's file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SETTING = "LANESIM_JIT"
COMPILED = os.environ.get(SETTING) == "1" and find_spec("numba") is not None
WORTH_COMPILING = 200_000  # requests in a study: about a minute of CPython
HOT_FOLDERS = ("engine", "policies", "cost")
KEPT_CACHES = 4


def _cache_base() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lanesim" / "jit"


def _source_hash() -> str:
    root = Path(__file__).parent
    digest = hashlib.sha256()
    paths = [root / "columns.py", root / "columns_jit.py", root / "jit.py"]
    for folder in HOT_FOLDERS:
        paths += sorted((root / folder).glob("*.py"))
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def should_compile(requests: int, modules: Iterable[str]) -> bool:
    """Is it worth compiling for a study of so many requests under the policies of these modules?"""
    if SETTING in os.environ:
        return os.environ[SETTING] == "1" and find_spec("numba") is not None
    if find_spec("numba") is None:
        return False
    cached = [path.name for path in (_cache_base() / _source_hash()).glob("**/*.advance-*.nbi")]
    warm = all(any(name.startswith(module.rpartition(".")[2] + ".") for name in cached) for module in modules)
    return warm or requests >= WORTH_COMPILING


def _cache_dir() -> Path:
    base = _cache_base()
    try:
        chosen = base / _source_hash()
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

    import sim.columns_jit  # noqa: F401  (teaches numba what the engine's states are)

    numba.config.CACHE_DIR = str(_cache_dir())

    def jit(function: F) -> F:
        """Compile `function` (no fastmath: results equal CPython's to the bit)."""
        compiled: F = numba.njit(cache=True, error_model="python")(function)
        return compiled

else:

    def jit(function: F) -> F:
        """Leave `function` to CPython."""
        return function
