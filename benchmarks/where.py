"""Where the time goes: the loop's functions under CPython's profiler, and the phases of a whole process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.measure import process

FUNCTIONS = 14
SCRIPT = """
import cProfile, json, pstats, sys
from sim.engine.cluster import open_cluster
from sim.policies import make_policy
from sim.study.plan import prepare
study = prepare("benchmarks/common.yaml", settings={"workload.trace": sys.argv[1]})
run = study.runs[0]
cluster = open_cluster(study.setting.workload(None, 0), make_policy(run.policy), study.setting.cost(), compiled=False)
profiler = cProfile.Profile()
records = profiler.runcall(lambda: cluster.close(cluster.run()))
stats = pstats.Stats(profiler)
rows = [(f"{file.rpartition('/sim/')[2]}:{name}" if "/sim/" in file else name, calls, own)
        for (file, line, name), (_, calls, own, _, _) in stats.stats.items()]
print(json.dumps({"iterations": records.totals["iterations"], "total_s": stats.total_tt, "rows": rows}))
"""


def profile(trace: Path) -> dict[str, object]:
    """Share of the CPython loop's own time by function, and calls an iteration, on the common workload.

    The profiler makes calls dearer than they are: shares of small functions are too high.
    """
    said = json.loads(process([sys.executable, "-c", SCRIPT, str(trace)]).output.strip().splitlines()[-1])
    rows = sorted(said["rows"], key=lambda row: -row[2])[:FUNCTIONS]
    return {
        "functions": [
            {"name": name, "share": own / said["total_s"], "calls": calls / said["iterations"]}
            for name, calls, own in rows
        ]
    }
