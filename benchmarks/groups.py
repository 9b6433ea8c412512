"""What is measured, by group; each yields its rows as they are done."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks import dynamo
from benchmarks.measure import ROOT, Row, process, run, simctl
from benchmarks.workload import common_workload
from sim.policies import list_policies

CAPACITY = 7.0  # requests/s of one GPU, see load.yaml
LOADS = (0.3, 0.8, 1.1)
REPLICAS = (1, 4, 16, 64)
ROUTERS = ("round-robin", "least-outstanding")
BOTH = ("python", "compiled")


@dataclass(frozen=True)
class Options:
    """`sizes`: requests of the size group; `requests`: of the others; `slow`: CPython even where it takes minutes;
    `mocker`: an interpreter that has Dynamo's mocker; `executors`: who runs the hot code."""

    folder: Path
    sizes: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    requests: int = 10_000
    repeats: int = 3
    slow: bool = False
    mocker: str | None = None
    executors: tuple[str, ...] = BOTH

    def trace(self, requests: int) -> Path:
        """The common workload as CSV, written once."""
        path = self.folder / f"common-{requests}.csv"
        return path if path.is_file() else common_workload(requests, self.folder)[0]


def _common(options: Options, requests: int, **more: object) -> dict[str, object]:
    return {"workload.trace": str(options.trace(requests)), **more}


def peers(options: Options) -> Iterator[Row]:
    """The common workload under sarathi-512, and Dynamo's mocker on the same file."""
    n = options.requests
    settings = _common(options, n)
    for executor in options.executors:
        yield run("peers", "lanesim sarathi-512", executor, "common.yaml", settings, repeats=options.repeats)
    interpreter = options.mocker or dynamo.python()
    if interpreter is None:
        yield Row("peers", "Dynamo mocker", "Rust", note=dynamo.ABSENT)
        return
    yield dynamo.run("peers", options.trace(n).with_suffix(".jsonl"), n, interpreter, options.repeats)


def size(options: Options) -> Iterator[Row]:
    """From a thousand to a million requests."""
    for n in options.sizes:
        for executor in options.executors:
            if executor == "compiled" or n <= 100_000 or options.slow:
                repeats = options.repeats if n <= 10_000 else 1
                settings = _common(options, n)
                yield run("size", f"{n:,} requests", executor, "common.yaml", settings, repeats=repeats)


def policies(options: Options) -> Iterator[Row]:
    """Every policy and preset on the common workload, and one in a user's plain Python."""
    small, full = _common(options, 1_000), _common(options, options.requests)
    for info in list_policies():
        for executor in options.executors:
            try:
                if executor == "compiled":
                    run("policies", info.name, executor, "common.yaml", {**small, "policies": [info.name]})
                settings = {**full, "policies": [info.name]}
                yield run("policies", info.name, executor, "common.yaml", settings)
            except RuntimeError as error:
                yield Row("policies", info.name, executor, note=str(error).splitlines()[-1][-300:])
    path = {"PYTHONPATH": str(ROOT)}
    for executor in options.executors:
        settings = {**full, "policies": [{"name": "benchmarks.user_policy:Chunked"}]}
        yield run("policies", "user's plain Python", executor, "common.yaml", settings, environment=path)


def replicas(options: Options) -> Iterator[Row]:
    """As many times the load as replicas; each row's time is to be held against that of one replica."""
    each = max(1, options.requests // 10)
    for router in ROUTERS:
        for executor in options.executors:
            for count in REPLICAS:
                settings = {
                    "replicas": count,
                    "router": router,
                    "workload.num_prompts": each * count,
                    "sweep.request_rate": [5.6 * count],
                }
                repeats = options.repeats if count == 1 else 1
                yield run("replicas", f"{count} x {router}", executor, "load.yaml", settings, repeats=repeats)


def load(options: Options) -> Iterator[Row]:
    """Idle, busy and overloaded."""
    for share in LOADS:
        for executor in options.executors:
            settings = {
                "sweep.request_rate": [round(CAPACITY * share, 3)],
                "workload.num_prompts": options.requests,
            }
            yield run("load", f"load {share:g}", executor, "load.yaml", settings, repeats=options.repeats)


def start(options: Options) -> Iterator[Row]:
    """Start-up: `simctl --help`, a small run warm, the same as the first after an installation, and a compilation."""
    help_s = []
    for _ in range(max(5, options.repeats)):
        began = perf_counter()
        process(simctl("--help"))
        help_s.append(perf_counter() - began)
    yield Row("start", "simctl --help", "auto", process_s=statistics.median(help_s))
    settings = _common(options, 1_000)
    run("start", "warm up", "auto", "common.yaml", settings, report=True)
    yield run(
        "start",
        "1k run with report, warm",
        "auto",
        "common.yaml",
        settings,
        repeats=options.repeats,
        report=True,
    )
    with tempfile.TemporaryDirectory() as cache:
        # neither bytecode nor price tables nor machine code
        bare = {"XDG_CACHE_HOME": cache, "PYTHONPYCACHEPREFIX": str(Path(cache) / "bytecode")}
        yield run(
            "start",
            "1k run with report, first",
            "auto",
            "common.yaml",
            settings,
            report=True,
            environment=bare,
        )
        yield run("start", "1k run, compiling", "compiled", "common.yaml", settings, environment=bare)
        yield run("start", "1k run, compiled before", "compiled", "common.yaml", settings, environment=bare)


GROUPS: dict[str, Callable[[Options], Iterator[Row]]] = {
    group.__name__: group for group in (peers, size, policies, replicas, load, start)
}


def machine() -> dict[str, str]:
    """What the figures depend on beside the code."""
    import os
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"Python": platform.python_version()}
    for name in ("lanesim", "numpy", "numba", "llvmlite", "pandas", "simpy", "ai-dynamo-runtime"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        cpu = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x), cpu)
    load_now = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return {
        "CPU": f"{cpu}, {os.cpu_count()} cores",
        "system": sys.platform,
        "load at start": load_now,
        **found,
    }
