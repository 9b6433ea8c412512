"""The page docs/kv_link.md: kv_link.yaml over the link that was measured, the data sheet's and the network.

python experiments/kv_link.py [NUMBER OF REQUESTS] > docs/kv_link.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from sim.api import run
from sim.cost import load_cost

HERE = Path(__file__).parent
MEASURED: dict[str, Any] = {}
SHEET = {"bandwidth_gb_s": 450, "latency_us": 10}
# title, keys of `link` beside the overlap
LINKS = (("measured", MEASURED), ("data sheet", SHEET), ("network", {"kind": "network"}))
LAYERS = "layer by layer"
CASES = (("distserve", None), ("distserve", "layer"), ("splitwise", None))
COLUMNS = (
    ("transfer, ms", "median_transfer_ms", 3),
    ("p99", "p99_transfer_ms", 3),
    ("TTFT p50, ms", "median_ttft_ms", 1),
    ("p99", "p99_ttft_ms", 1),
    ("TPOT p50, ms", "median_tpot_ms", 3),
    ("p99", "p99_tpot_ms", 3),
    ("longest gap p99, ms", "p99_itl_ms", 2),
    ("link busy, %", "busy", 2),
)


def rows(requests: int | None = None) -> list[dict[str, Any]]:
    """A summary for every case, link and rate."""
    base = yaml.safe_load((HERE / "kv_link.yaml").read_text())
    if requests:
        base["workload"]["num_prompts"] = requests
    made = []
    for policy, overlap in CASES:
        for title, keys in LINKS:
            link = {**keys, **({"overlap": overlap} if overlap else {})}
            found = run({**base, "policies": [policy], **({"link": link} if link else {})})
            for one in found.summary["runs"]:
                busy = 100 * one["link"]["busy_s"] / one["duration"]
                name = f"{policy}, {LAYERS}" if overlap else policy
                made.append({**one, "case": name, "title": title, "busy": busy})
    return made


def page(found: list[dict[str, Any]], profile: str, sha256: str) -> str:
    """Markdown: what each link is, then a table for each policy."""
    rates = sorted({one["request_rate_per_gpu"] for one in found})
    count = found[0]["num_prompts"]
    lines = [
        "# KV hand-over: the measured link against the modelled one",
        "",
        f"`python experiments/kv_link.py > docs/kv_link.md`: {count:,} requests of the lengths of the Azure 2023",
        f"conversation trace, Llama-3.1-8B, a prefill and a decode H200, {_listed(rates)} requests/s per GPU,",
        f"profile `{profile}` (sha256 {sha256[:12]}).",
        "",
        "What was measured: one message against its bytes, messages layer after layer, and what a transfer and the",
        "compute on either GPU do to each other. A transfer that begins while its GPU has prompts or decodes takes",
        "longer by the measured factor, and what the compute loses is charged to the next step of that GPU. The",
        "modelled links share their bytes and slow nothing down. What splitwise sends layer by layer shows as 2 ms and",
        "150 MB at the link's rate, whatever its bytes (Splitwise, arXiv:2311.18677, section 6.2; its `handover_ms`).",
        "",
        "| link | GB/s | latency, µs | priced by |",
        "| --- | ---: | ---: | --- |",
    ]
    for title, _ in LINKS:
        link = next(one["link"] for one in found if one["title"] == title)
        lines.append(
            f"| {title} | {link['bandwidth_gb_s']:.0f} | {link['latency_us']:.1f} | {link['source']} |"
        )
    lines += ["", *_verdict(found)]
    for case in dict.fromkeys(one["case"] for one in found):
        lines += ["", f"## {case}", ""]
        lines.append(
            "| req/s per GPU | link | " + " | ".join(title for title, _, _ in COLUMNS) + " | SLO, % |"
        )
        lines.append("| ---: | --- |" + " ---: |" * (len(COLUMNS) + 1))
        for one in sorted((r for r in found if r["case"] == case), key=lambda r: r["request_rate_per_gpu"]):
            cells = [f"{one[key]:,.{digits}f}" for _, key, digits in COLUMNS]
            cells += [f"{100 * one['slo_attainment']:.1f}"]
            rate = f"{one['request_rate_per_gpu']:g}"
            lines.append(f"| {rate} | {one['title']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _verdict(found: list[dict[str, Any]]) -> list[str]:
    """By how much what users see moves when the data sheet's link, or the network, stands for the measured one."""
    lines = []
    for title, _ in LINKS[1:]:
        moved = {"median_ttft_ms": 0.0, "p99_ttft_ms": 0.0, "median_tpot_ms": 0.0, "p99_tpot_ms": 0.0}
        slower = []
        for one in found:
            if one["title"] != title:
                continue
            same = ("case", "request_rate_per_gpu")
            true = next(r for r in found if r["title"] == "measured" and all(r[k] == one[k] for k in same))
            slower.append(one["median_transfer_ms"] / true["median_transfer_ms"])
            for key in moved:
                moved[key] = max(moved[key], abs(one[key] / true[key] - 1))
        ttft, ttft99, tpot, tpot99 = (f"{100 * value:.1f} %" for value in moved.values())
        lines.append(
            f"- {title}: a median transfer takes {min(slower):.2f} to {max(slower):.2f} times as long as measured; "
            f"TTFT moves by at most {ttft} (p50) and {ttft99} (p99), TPOT by {tpot} and {tpot99}."
        )
    return lines


def _listed(values: list[float]) -> str:
    return " and ".join(f"{value:g}" for value in values)


if __name__ == "__main__":
    cost = load_cost("llama-3.1-8b", "h200-sxm")
    made = rows(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(page(made, cost.profile.name, cost.profile_hash), end="")
