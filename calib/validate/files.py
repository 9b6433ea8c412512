"""The small files that a measured case leaves: a row a launch, a row a request, and what was measured on what."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd

REQUESTS = (
    *("request_id", "arrival_s", "prompt_tokens", "output_tokens", "status"),
    *("first_token_s", "finish_s", "max_itl_s", "preemptions"),
)

# decimals of seconds: clocks, and what the host spends
STEP_DECIMALS = dict.fromkeys(("start_s", "end_s", "gpu_s", "table_s"), 7) | dict.fromkeys(
    ("decide_s", "plan_s", "launch_s", "read_s"), 6
)


def write_case(
    folder: Path, name: str, facts: dict[str, Any], steps: pd.DataFrame, requests: pd.DataFrame
) -> None:
    """Write NAME.steps.csv.gz, NAME.requests.csv.gz and, last, NAME.json, which says that the case is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(folder / f"{name}.steps.csv.gz", steps.round(STEP_DECIMALS))
    _write_table(folder / f"{name}.requests.csv.gz", requests[[c for c in REQUESTS if c in requests.columns]])
    part = folder / f"{name}.json.part"
    part.write_text(json.dumps(facts, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(folder / f"{name}.json")


def _write_table(path: Path, table: pd.DataFrame) -> None:
    text = table.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
        packed.write(text.encode())


def finished(folder: Path) -> list[str]:
    """Names of the cases that are whole, in order."""
    return sorted(path.stem for path in folder.glob("*.json") if not path.stem.startswith("_"))


def read_case(folder: Path, name: str) -> tuple[dict[str, Any], pd.DataFrame, pd.DataFrame]:
    """(facts, steps, requests) of a case."""
    facts = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    text = {"q_tokens": str, "history_tokens": str}
    steps = pd.read_csv(folder / f"{name}.steps.csv.gz", dtype=text, keep_default_na=True)
    steps[list(text)] = steps[list(text)].fillna("")
    return facts, steps, pd.read_csv(folder / f"{name}.requests.csv.gz")
