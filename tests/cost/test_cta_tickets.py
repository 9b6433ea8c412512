"""The list schedule against CTAs of known work on an H200: kinds alone give the terms, mixes are predicted."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pandas as pd
import pytest

from sim.cost.cta_schedule import HALF, PREFILL_FIRST, Ctas, Machine, proportional, run_schedule

# of CTAs alone, per loop of a kind: a full SM's share of one compute CTA, and one by itself; a bandwidth CTA's loads
FULL_S, ALONE_S, LOAD_S, LOAD_BYTES = 0.1365e-6, 0.144e-6, 1.0e-6, 16384.0
H200 = Machine(132, 4.3e12, 115e9, 2.0, 4.0)


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    found = files("calib").joinpath("profiles/h200-sxm/measurements/tickets.csv.gz")
    if not found.is_file():
        pytest.skip("the profile of the H200 has no measurements of CTAs")
    rows = pd.read_csv(str(found))
    return rows[rows["spread"] == 0]


def errors(rows: pd.DataFrame, label: str) -> np.ndarray:
    found = []
    for row in rows[rows["label"] == label].itertuples():
        compute, loads = float(row.compute_work), float(row.bandwidth_work)
        prefill = Ctas(int(row.compute_ctas), compute * FULL_S, 0.0, 1.0, compute * ALONE_S)
        decode = Ctas(int(row.bandwidth_ctas), 1e-9 * loads, loads * LOAD_BYTES, 1.0, loads * LOAD_S)
        rule = {"proportional": proportional(prefill.count, decode.count), "half": HALF}.get(
            label, PREFILL_FIRST
        )
        made = run_schedule(H200, prefill, decode, int(row.ctas_per_sm), rule)
        found.append(made.seconds / row.span_s - 1)
    return np.abs(found)


@pytest.mark.parametrize(("label", "median", "p95"), [
    ("compute_alone", 0.03, 0.15), ("bandwidth_alone", 0.05, 0.10), ("proportional", 0.07, 0.20), ("half", 0.07, 0.20),
])  # fmt: skip
def test_makespans(measured, label, median, p95):
    found = errors(measured, label)
    assert len(found) >= 20
    assert np.median(found) < median
    assert np.quantile(found, 0.95) < p95
