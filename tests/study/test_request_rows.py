"""How many rows of `requests.parquet` a run keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim.study.plan import prepare
from sim.study.run import run_study

EXPERIMENT = {
    "workload": {"arrivals": "poisson", "num_prompts": 40, "prompt_tokens": 300, "output_tokens": 8},
    "model": "llama-3.1-8b",
    "gpu": "h200-sxm",
    "profile": "spec",
    "policies": ["vllm"],
    "sweep": {"request_rate": [20.0]},
}


def run(rows: int | None, folder: Path) -> tuple[dict[str, Any], pd.DataFrame | None]:
    (summary,) = run_study(prepare({**EXPERIMENT, "measure": {"request_rows": rows}}), folder)
    table = folder / "requests.parquet"
    return summary, pd.read_parquet(table) if table.is_file() else None


def test_rows_are_kept_evenly_and_the_summary_is_of_all(tmp_path: Path) -> None:
    everything, table = run(None, tmp_path / "all")
    fewer, sample = run(8, tmp_path / "some")
    assert table is not None
    assert sample is not None
    pd.testing.assert_frame_equal(sample, table.iloc[::5].reset_index(drop=True))
    assert fewer.pop("notes") == [*everything.pop("notes"), "requests.parquet holds 8 of 40 requests"]
    assert fewer == everything


@pytest.mark.parametrize(("rows", "kept"), [(0, None), (40, 40), (1000, 40)])
def test_none_and_more_than_there_are(rows: int, kept: int | None, tmp_path: Path) -> None:
    _, table = run(rows, tmp_path / "out")
    assert (None if table is None else len(table)) == kept
