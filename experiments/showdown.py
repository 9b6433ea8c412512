"""The page docs/showdown.md from the result folder of showdown.yaml.

simctl run experiments/showdown.yaml -o out/showdown --jobs 2
python experiments/showdown.py out/showdown > docs/showdown.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sim.report.points import points_of
from sim.report.verdict import Verdict, verdicts_of
from sim.report.words import per_cent

SHOWN_RATE = 15.0  # requests/s and GPU at which the classes of SM time are told
LOSERS = 3  # told beside each winner
CLASSES = (
    ("active", "active"),
    ("wave tail", "wave_tail"),
    ("attention", "attention_bound"),
    ("lockstep", "lockstep"),
    ("contention", "contention"),
    ("host", "host"),
    ("switch", "switch"),
    ("idle lane", "idle_lane"),
    ("empty", "empty"),
)
CARE = """\
Read with care: one trace, one model, one profile; past saturation (30 everywhere) latencies depend on how long the
trace is, and up to {flagged:.0f} % of a policy's steps lie outside what the profile covers (the report counts them).
Bullet, Nexus and semi-PD carry choices that their papers leave open; `simctl policies --json` names each. What each
policy costs to simulate is in [speed.md](speed.md), how well such runs agree with a real GPU in
[fidelity.md](fidelity.md)."""
HEAD = """\
`simctl run experiments/showdown.yaml -o out/showdown --jobs 2`: {completed:,} requests, Llama-3.1-8B, one H200 each
(the disaggregated policies two, offered twice the rate), five rates per GPU, SLO TTFT 1 s and TPOT 50 ms for 99 % of
the requests. Prices are the profile `h200-sxm` (sha256 {sha256:.12}); {measured:.0f} % of the simulated GPU time rests
on measured curves. `python experiments/showdown.py out/showdown` makes this page."""


def table(head: list[str], rows: list[list[str]], cells: str = "---:") -> str:
    rule = ["---", *[cells] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))


def attained(runs: list[dict[str, Any]], rates: list[float]) -> str:
    """SLO attainment by policy and rate per GPU, the best of each rate bold, and the best goodput."""
    best = {
        rate: max(r["slo_attainment"] for r in runs if r["request_rate_per_gpu"] == rate) for rate in rates
    }
    rows = []
    for policy in dict.fromkeys(run["policy"] for run in runs):
        mine = {run["request_rate_per_gpu"]: run for run in runs if run["policy"] == policy}
        found = [(mine[rate]["slo_attainment"], best[rate]) for rate in rates]
        cells = [f"**{per_cent(value)}**" if value == most else per_cent(value) for value, most in found]
        goodput = max(run["request_goodput_per_gpu"] for run in mine.values())
        rows.append([policy, *cells, f"{goodput:.3g}"])
    return table(["policy", *(f"{r:g}" for r in rates), "goodput at best, req/s per GPU"], rows)


def told(verdict: Verdict) -> list[str]:
    winner = verdict.winner
    won = f"{winner.policy} {per_cent(winner.mean('slo_attainment') or 0.0)} %"
    losses = [
        f"{loss.policy} {per_cent(loss.attainment or 0.0)} %, {loss.cause}: {loss.evidence}"
        for loss in verdict.losses[:LOSERS]
    ]
    return [f"{verdict.rate:g}", won, "<br>".join(losses)]


def where(runs: list[dict[str, Any]]) -> str:
    """Classes of SM time at one rate, in per cent of SMs x window."""
    rows = [
        [
            run["policy"],
            *(f"{run['sm_time_pct'][key]:.1f}" for _, key in CLASSES),
            f"{run['sm_lent_pct']:.1f}",
        ]
        for run in runs
        if run["request_rate_per_gpu"] == SHOWN_RATE
    ]
    return table(["policy", *(title for title, _ in CLASSES), "lent"], rows)


def page(folder: Path) -> str:
    summary = json.loads((folder / "summary.json").read_text())
    runs = summary["runs"]
    rates = sorted({run["request_rate_per_gpu"] for run in runs})
    measured = sum(run["provenance"].get("measured", 0.0) for run in runs) / len(runs)
    flagged = max(100 * run["flagged_steps"] / run["iterations"] for run in runs)
    verdicts = table(
        ["rate", "winner", "others, SLO met, cause: evidence"],
        [told(v) for v in verdicts_of(points_of(runs))],
        "---",
    )
    head = HEAD.format(
        completed=runs[0]["completed"], sha256=summary["profile"]["sha256"], measured=100 * measured
    )
    return f"""# Showdown: every policy on the Azure 2023 conversation trace

{head}

SLO attainment in per cent, by offered requests per second and GPU; the best of each column is bold.

{attained(runs, rates)}

## Who wins, and what the next three lose by

{verdicts}

## Where the SM time went at {SHOWN_RATE:g} requests/s and GPU, %

{where(runs)}

{CARE.format(flagged=flagged)}"""


if __name__ == "__main__":
    print(page(Path(sys.argv[1])))
