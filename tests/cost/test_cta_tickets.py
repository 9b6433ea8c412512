"""The schedule of CTAs against CTAs of known work on an H200: each kind alone gives the terms, mixes are predicted."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from calib.fit.points import read_rows
from calib.fit.tickets import (
    RULES,
    TicketTerms,
    fit_tickets,
    fitted_rows,
    mix_errors,
    predicted_s,
)
from calib.sweeps.power import MIXES

PROFILE = Path(str(files("calib").joinpath("profiles/h200-sxm")))


@pytest.fixture(scope="module")
def rows() -> Any:
    if not (PROFILE / "measurements" / "tickets.csv.gz").is_file():
        pytest.skip("the profile of the H200 has no measurements of CTAs")
    rows = read_rows(PROFILE, "tickets")
    return rows[rows["sms"] == 132].reset_index(drop=True)


@pytest.fixture(scope="module")
def terms(rows: Any) -> TicketTerms:
    return fit_tickets(rows)


def test_kinds_alone_are_met(rows: Any, terms: TicketTerms) -> None:
    for label in ("compute_alone", "bandwidth_alone"):
        part = rows[(rows["label"] == label) & (rows["spread"] == 0)].reset_index(drop=True)
        off = (predicted_s(part, terms) / part["span_s"] - 1).abs()
        assert off.median() < 0.015
        assert off.quantile(0.9) < 0.08


def test_the_fit_sees_no_random_mix(rows: Any) -> None:
    alone, beside = fitted_rows(rows)
    assert len(alone) == 80
    assert ((alone["compute_ctas"] == 0) | (alone["bandwidth_ctas"] == 0)).all()
    assert len(beside) == 32
    assert (beside["seed"] >= MIXES).all()


def test_makespans_of_fifty_random_mixes_are_within_five_per_cent(rows: Any, terms: TicketTerms) -> None:
    found = mix_errors(rows, terms)
    for rule in RULES:
        assert found[rule]["all"]["points"] == 50
        assert found[rule]["all"]["median"] < 0.05
        assert found[rule]["alike"]["median"] < 0.03
    # jobs alike: nearly every mix, of the rules that servers use
    for rule in ("proportional", "half"):
        assert found[rule]["alike"]["p95"] < 0.06
