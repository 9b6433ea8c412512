"""One measurement: a process, what it cost, and what it says of itself."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[1]
EXECUTORS = {"python": "0", "compiled": "1"}  # of LANESIM_JIT; "auto" leaves it to simctl


@dataclass
class Row:
    """One line of a table. Times in seconds are medians of the repetitions; `spread`: (slowest - fastest) / median
    of the loop."""

    group: str
    name: str
    executor: str
    requests: int = 0
    iterations: int = 0
    decisions: int = 0
    output_tokens: int = 0
    loop_s: float = 0.0
    startup_s: float = 0.0
    process_s: float = 0.0
    peak_mib: float = 0.0
    spread: float = 0.0
    note: str = ""
    loops_s: list[float] = field(default_factory=list)

    @property
    def us_per_iteration(self) -> float:
        return 1e6 * self.loop_s / self.iterations if self.iterations else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.loop_s if self.loop_s else 0.0


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    seconds: float
    peak_mib: float
    output: str


def process(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Cost:
    """Run a program to its end; RuntimeError with what it said if it fails."""
    with tempfile.TemporaryFile("w+") as said:
        began = perf_counter()
        child = subprocess.Popen(
            arguments,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(child.pid, 0)
        seconds = perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read()
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)} ended with {child.returncode}: {output.strip()[-1500:]}")
    return Cost(seconds, _mib(usage), output)


def _mib(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def simctl(*arguments: str) -> list[str]:
    """The command line of this interpreter's simctl."""
    return [sys.executable, "-c", "from sim.cli import main; main()", *arguments]


def run(
    group: str,
    name: str,
    executor: str,
    experiment: str,
    settings: Mapping[str, object],
    *,
    repeats: int = 1,
    report: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Row:
    """Run an experiment of this folder `repeats` times and take the medians."""
    variables = dict(environment or {})
    if executor in EXECUTORS:
        variables["LANESIM_JIT"] = EXECUTORS[executor]
    costs, timings = [], []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        words = ["run", f"benchmarks/{experiment}", "-o", str(out), "--force", "-q"]
        words += [] if report else ["--no-report"]
        for key, value in settings.items():
            words += ["--set", f"{key}={json.dumps(value)}"]
        for _ in range(repeats):
            costs.append(process(simctl(*words), variables))
            timings.append(json.loads((out / "timing.json").read_text()))
        runs = json.loads((out / "summary.json").read_text())["runs"]
    loops = [timing["loop_s"] for timing in timings]
    middle = statistics.median(loops)
    return Row(
        group,
        name,
        executor,
        requests=sum(run["num_prompts"] for run in runs),
        iterations=timings[0]["iterations"],
        decisions=timings[0]["decisions"],
        output_tokens=sum(run["total_output_tokens"] for run in runs),
        loop_s=middle,
        startup_s=statistics.median(timing["startup_s"] for timing in timings),
        process_s=statistics.median(cost.seconds for cost in costs),
        peak_mib=max(cost.peak_mib for cost in costs),
        spread=(max(loops) - min(loops)) / middle if middle else 0.0,
        loops_s=loops,
    )
