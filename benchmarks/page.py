"""docs/speed.md from the results of all groups measured so far."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.groups import GROUPS
from benchmarks.measure import Row
from benchmarks.table import COLUMNS, cells
from benchmarks.verdicts import verdicts

HEAD = """# Speed

Written by `python -m benchmarks --write docs/speed.md` (`make bench`); each line of the tables is a `simctl run` in a
process of its own, or the median of several. The experiments are `benchmarks/*.yaml`. Compare lines of one table only,
and with a peer only what was measured in the same run on the same machine. Where the load at the start exceeds the
cores, others were using the machine: times are too long by up to load over cores, while ratios within a table hold.

"""
WORDS = """
## What the columns say

*By*: `python` is CPython, `compiled` the same functions as machine code (the `[fast]` extra), `auto` what `simctl`
chooses. *Dec/it*: decisions of the policy an iteration; what repeats itself is a burst and decided once. *us/it*: loop
time an iteration (under a policy of two lanes: a launch on either lane). *M tok/s*: output tokens a second of loop.
*Loop*: the simulation and its records; *start*: workload, price tables, loading machine code, imports of the command;
*process*: everything, as a shell sees it; *peak*: its memory. *Spread*: slowest minus fastest loop over the median.

## Why it is fast

- What decodes together is one cohort: a step costs the same whether it holds one request or a thousand
  (`sim/engine/cohort.py`). A request is touched when something happens to it alone.
- A plan that repeats itself, decodes or the chunks of one prompt, is priced ahead as a burst, and an arrival cuts it
  (`sim/engine/lane.py`). With bursts and without, the results are the same to the bit (`tests/engine`).
- Prices are look-ups in dense tables; nothing is interpolated or fitted during a run (`sim/cost/compile.py`).
- The replica runs ahead through its own arrivals where the router does not look at it: the clock sees an event a
  replica, not one a step (`sim/engine/replica.py`).
- The hot code is plain functions over flat arrays. CPython runs them on lists; numba turns the same source into an
  object file, once, in a process of its own, and later runs load that file without numba (`sim/native`). `simctl` does
  so for a study of {compile:,} requests and more, and uses what is there from {load:,} on.
"""


def write_page(results: Path, page: Path) -> None:
    """Write the page; groups that have never been measured are left out."""
    from sim.jit import WORTH_COMPILING, WORTH_LOADING

    parts, rows = [], []
    machine: dict[str, str] = {}
    for group, measure in GROUPS.items():
        path = results / f"{group}.json"
        if not path.is_file():
            continue
        held = json.loads(path.read_text(encoding="utf-8"))
        machine = machine or held["machine"]
        found = [Row(**row) for row in held["rows"]]
        rows += found
        parts.append(f"\n## {group.capitalize()}\n\n{measure.__doc__ or ''}\n\n" + _table(found))
    text = HEAD + "; ".join(f"{key} {value}" for key, value in machine.items()) + ".\n"
    text += "\n## Goals\n\n" + _goals(rows) + "".join(parts)
    profile = results / "profile.json"
    if profile.is_file():
        text += "\n## Where the loop's time goes\n\n" + _functions(
            json.loads(profile.read_text(encoding="utf-8"))
        )
    text += WORDS.format(compile=WORTH_COMPILING, load=WORTH_LOADING)
    page.write_text(text, encoding="utf-8")


def _goals(rows: list[Row]) -> str:
    lines = ["| goal | found | |", "| --- | --- | --- |"]
    lines += [f"| {v.goal} | {v.found} | {'met' if v.met else '**missed**'} |" for v in verdicts(rows)]
    return "\n".join(lines) + "\n"


def _table(rows: list[Row]) -> str:
    names = [name.lower() for name, _ in COLUMNS[1:]]
    lines = ["| " + " | ".join(names) + " |", "| --- | --- |" + " ---: |" * (len(names) - 2)]
    for row in rows:
        shown = cells(row)[1:] if not row.note else [row.name, row.executor, row.note]
        lines.append("| " + " | ".join([*shown, *[""] * (len(names) - len(shown))]) + " |")
    return "\n".join(lines) + "\n"


def _functions(profile: dict[str, list[dict[str, float]]]) -> str:
    """The profiler's table."""
    lines = [
        "Own time of functions under CPython's profiler, which makes calls dearer than they are; common workload, "
        "sarathi-512.",
        "",
        "| function | share | calls an iteration |",
        "| --- | ---: | ---: |",
    ]
    lines += [
        f"| `{row['name']}` | {100 * row['share']:.0f} % | {row['calls']:.2f} |"
        for row in profile["functions"]
    ]
    return "\n".join(lines) + "\n"
