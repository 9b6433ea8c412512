"""Runs spread over processes, or over a Ray or Dask cluster; the order of completion never shows in results."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

from sim.errors import SimctlError

WATCH_S = 1.0  # how often a worker looks for its parent
BACKENDS = ("local", "ray", "dask")


def map_runs(
    work: Callable[..., Any],
    tasks: Iterable[tuple[Any, ...]],
    *,
    jobs: int = 1,
    backend: str = "local",
) -> Iterator[Any]:
    """Yield `work(*task)` as tasks finish. `jobs`: processes at a time, 0 for one a core.

    Raises SimctlError with the install line if the backend's extra is missing.
    """
    jobs = jobs or os.cpu_count() or 1
    tasks = list(tasks)
    if backend == "local" and (jobs == 1 or len(tasks) < 2):
        # no second process: nothing to pickle, and tracebacks lead to the fault
        for task in tasks:
            yield work(*task)
        return
    if backend == "local":
        yield from _processes(work, tasks, min(jobs, len(tasks)))
        return
    from joblib import Parallel, delayed, parallel_config

    calls = [delayed(work)(*task) for task in tasks]
    with parallel_config(backend=_register(backend, jobs), n_jobs=jobs):
        if backend == "ray":
            # its joblib backend returns whole lists only: a round of `jobs` runs at a time still streams
            for first in range(0, len(calls), jobs):
                yield from Parallel(batch_size=1)(calls[first : first + jobs])
        else:
            yield from Parallel(batch_size=1, return_as="generator_unordered")(calls)


def _processes(work: Callable[..., Any], tasks: list[tuple[Any, ...]], jobs: int) -> Iterator[Any]:
    """Joblib's worker processes."""
    from concurrent.futures import as_completed

    from joblib.externals.loky import get_reusable_executor

    executor = get_reusable_executor(max_workers=jobs, initializer=_die_with, initargs=(os.getpid(),))
    futures = [executor.submit(work, *task) for task in tasks]
    try:
        for future in as_completed(futures):
            yield future.result()
    except BaseException:
        executor.shutdown(wait=True, kill_workers=True)
        raise


def _die_with(parent: int) -> None:
    """End this worker once its parent is gone: one that was killed cannot say so, and workers that nobody waits for
    would go on computing and keep its output open."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    if os.name == "posix":
        threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _register(backend: str, jobs: int) -> str:
    """Make joblib's name for the backend usable. Both find a running cluster by their own environment."""
    try:
        if backend == "ray":
            import_module("ray.util.joblib").register_ray()
        else:
            # an address in DASK_SCHEDULER_ADDRESS wins over local workers
            distributed = import_module("distributed")
            address = os.environ.get("DASK_SCHEDULER_ADDRESS")
            distributed.Client(address) if address else distributed.Client(
                n_workers=jobs, threads_per_worker=1
            )
    except ImportError:
        raise SimctlError(
            f"--backend {backend} needs an extra that is not installed: pip install 'lanesim[{backend}]'"
        ) from None
    return backend
