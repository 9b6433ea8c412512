"""A study that is killed leaves nobody behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WORK = """
import sys, time
from sim.study.pool import map_runs
results = map_runs(time.sleep, [(0.01,), (0.01,), (600,), (600,)], jobs=2)
next(results)
print("at work", flush=True)
next(results), next(results)
"""


@pytest.mark.skipif(os.name != "posix", reason="processes have no parent to ask for elsewhere")
def test_workers_end_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as study:
        assert study.stdout is not None
        assert study.stdout.readline() == "at work\n"
        study.kill()
        # whoever is left holds the pipe open: the end comes when the last of them is gone
        study.communicate(timeout=60)
