"""The cache of machine code: which object file belongs to a function, its making, its loading.

A file is named after the function, a hash of everything that the function reaches (code, constants, argument types)
and a hash of the machine and the compiler: a change of any of them is another file. Old ones go.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from sim.errors import SimctlError

# a scalar or an array by its kind, or the name of a `Columns` class with its fields and their kinds
Argument = str | tuple[str, tuple[tuple[str, str], ...]]
ENTRY = "entry"  # the one symbol of an object file
KEPT = 100  # object files, a few for each policy
_engines: list[Any] = []  # machine code lives as long as its engine


@dataclass(frozen=True)
class Request:
    """A function to be compiled for arguments of these kinds."""

    function: Callable[..., Any]
    arguments: tuple[Argument, ...]


def available() -> bool:
    """Is numba there to compile?"""
    return find_spec("numba") is not None and find_spec("llvmlite") is not None


def is_cached(function: Callable[..., Any]) -> bool:
    """Has the function, as it stands, been compiled for some arguments?"""
    # what machine this is, is asked only if there is something: it takes as long as a thousand requests
    return available() and any(
        path.stem.endswith(_machine()) for path in _folder().glob(f"{_name(function)}-*.o")
    )


def compile_missing(requests: Sequence[Request]) -> None:
    """Compile those that the cache does not hold; SimctlError if that fails."""
    if not available():
        raise SimctlError("machine code needs numba: pip install 'lanesim[fast]'")
    if all(_path(request).is_file() for request in requests):
        return
    with _lock(_path(requests[0])):
        missing = {_path(request): request for request in requests if not _path(request).is_file()}
        if missing:
            _compile(missing)


def machine_code(request: Request) -> int:
    """Address of the compiled function, from the cache or compiled now."""
    compile_missing([request])
    return _load(_path(request))


def reaches(function: Callable[..., Any]) -> str:
    """Hash of a function's code and of the functions and constants of modules that it uses, all the way down."""
    digest = hashlib.sha256()
    seen: set[int] = set()

    def walk(code: CodeType, names: dict[str, Any]) -> None:
        digest.update(code.co_code)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                walk(constant, names)
            else:
                digest.update(repr(constant).encode())
        for name in code.co_names:
            value = names.get(name)
            digest.update(name.encode())
            if isinstance(value, FunctionType):
                if id(value) not in seen:
                    seen.add(id(value))
                    walk(value.__code__, value.__globals__)
            elif isinstance(value, int | float | str | tuple):
                digest.update(repr(value).encode())

    assert isinstance(function, FunctionType)
    walk(function.__code__, function.__globals__)
    return digest.hexdigest()[:16]


@lru_cache(maxsize=256)
def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__name__}-{reaches(function)}"


@lru_cache(maxsize=1)
def _machine() -> str:
    """Hash of the processor, the versions of what compiles, and how."""
    import llvmlite.binding as llvm

    here = Path(__file__).parent
    parts = [
        sys.version,
        version("numba"),
        version("llvmlite"),
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        *((here / name).read_text(encoding="utf-8") for name in ("compiler.py", "numba_types.py")),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _path(request: Request) -> Path:
    digest = hashlib.sha256(repr(request.arguments).encode()).hexdigest()[:12]
    return _folder() / f"{_name(request.function)}-{digest}-{_machine()}.o"


def _folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lanesim" / "native"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if os.access(base, os.W_OK):
            return base
    except OSError:
        pass
    return _temporary()


@lru_cache(maxsize=1)
def _temporary() -> Path:
    """Where no cache can be written, each process compiles for itself."""
    return Path(tempfile.mkdtemp(prefix="lanesim-native-"))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process compiles a function, the others wait for it; where there are no locks, each compiles."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with path.with_suffix(".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    path.with_suffix(".lock").unlink(missing_ok=True)


def _compile(requests: Mapping[Path, Request]) -> None:
    """Compile in a process of its own, in which numba decorates the very same sources."""
    entries = [
        (request.function.__module__, request.function.__name__, request.arguments, str(path))
        for path, request in requests.items()
    ]
    job = {"path": sys.path, "entries": entries}
    start = "import json, sys; job = json.load(sys.stdin); sys.path[:] = job['path']; "
    done = subprocess.run(
        [sys.executable, "-c", start + "from sim.native.compiler import main; main(job)"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        names = ", ".join(f"{module}.{name}" for module, name, *_ in entries)
        told = done.stderr.strip()[-2000:] or f"exit code {done.returncode}"
        raise SimctlError(
            f"cannot compile {names}; set LANESIM_JIT=0 to run by CPython. The compiler said: {told}"
        )
    stale = sorted(_folder().glob("*.o"), key=lambda other: other.stat().st_mtime)
    for old in stale[: max(0, len(stale) - KEPT)]:
        old.unlink(missing_ok=True)


def target_machine() -> Any:
    """LLVM's description of this machine, the same for emitting and for loading."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
    )


def _load(path: Path) -> int:
    import llvmlite.binding as llvm

    machine = target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(path.read_bytes()))
    engine.finalize_object()
    _engines.append(engine)
    os.utime(path)  # used last: goes last
    address: int = engine.get_function_address(ENTRY)
    return address
