"""The common workload: the same file for every simulator that is measured beside ours.

numpy's default generator draws, in this order, exponential gaps of mean 1/5.5 s (summed; the first arrival moved to
1.0 s), prompts of exp(Normal(ln 1000, 0.8)) tokens rounded and held to 1..6000, and outputs of
exp(Normal(ln 150, 0.7)) rounded and held to 2..1024.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

RATE = 5.5  # requests/s
SEEDS = {1_000: 11, 10_000: 12}  # 10,000 requests: 1,932,652 output tokens
HASH_BLOCK = 512  # tokens of a Mooncake block


def common_workload(requests: int, folder: Path) -> tuple[Path, Path]:
    """Write the workload as CSV with Vidur's columns and as Mooncake's JSON lines; returns both paths."""
    rng = np.random.default_rng(SEEDS.get(requests, 12))
    arrival = np.cumsum(rng.exponential(1 / RATE, requests))
    arrival += 1.0 - arrival[0]
    prompt = np.clip(np.rint(np.exp(rng.normal(np.log(1000), 0.8, requests))), 1, 6000).astype(int)
    output = np.clip(np.rint(np.exp(rng.normal(np.log(150), 0.7, requests))), 2, 1024).astype(int)
    folder.mkdir(parents=True, exist_ok=True)
    table, lines = folder / f"common-{requests}.csv", folder / f"common-{requests}.jsonl"
    with table.open("w", encoding="utf-8") as file:
        file.write("arrived_at,num_prefill_tokens,num_decode_tokens\n")
        for row in zip(arrival.tolist(), prompt.tolist(), output.tolist(), strict=True):
            file.write("{!r},{},{}\n".format(*row))
    with lines.open("w", encoding="utf-8") as file:
        block = 0
        for at, p, o in zip(arrival.tolist(), prompt.tolist(), output.tolist(), strict=True):
            ids = list(range(block, block - -p // HASH_BLOCK))  # no prefix is shared
            block = ids[-1] + 1
            entry = {"timestamp": round(at * 1e3), "input_length": p, "output_length": o, "hash_ids": ids}
            file.write(json.dumps(entry) + "\n")
    return table, lines
