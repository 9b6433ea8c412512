"""docs/fidelity.json and docs/fidelity.md are what the committed logs and today's prices say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from calib.validate.files import finished
from calib.validate.hosts import FILE
from calib.validate.own import own_host
from calib.validate.page import opened, write_pages
from calib.validate.sections import COMPARED
from calib.validate.study import fit_hosts_of

ROOT = Path(__file__).parents[2]
FIDELITY = ROOT / "docs" / "fidelity"
STUDIES = tuple(FIDELITY / name for name in ("cases", "blind/cases", "llama2/cases", "long/cases"))
# runs set apart, and whose host terms are fitted from them
HOSTS = {"hosts/cases": "cases", "blind/hosts/cases": "blind/cases"}
AGAIN = (
    "the pages are older than the prices: python -m calib.validate docs/fidelity/cases docs/fidelity/blind/cases "
    "docs/fidelity/llama2/cases docs/fidelity/long/cases -o docs"
)
# where a refit of the profile moves prices a little, pages need not be made again at once
SLACK = 0.02

pytestmark = pytest.mark.skipif(
    not STUDIES[0].is_dir(), reason="measured cases come with the repository only"
)


def rows(path: Path) -> dict[tuple[str, ...], Any]:
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    keys = ("study", "policy", "load", "mode", "of", "metric")
    return {tuple(str(row.get(key)) for key in keys): row for row in found}


def compare(today: dict[tuple[str, ...], Any], kept: dict[tuple[str, ...], Any]) -> None:
    assert today.keys() == kept.keys(), AGAIN
    for key, row in today.items():
        assert row["real"] == pytest.approx(kept[key]["real"], rel=1e-6), AGAIN
        assert row["real_spread"] == kept[key]["real_spread"], AGAIN
        # a tail is a single request or launch, which a small change may move past others
        slack = SLACK if "p9" not in key[-1] else 2 * SLACK
        assert row["error"] == pytest.approx(kept[key]["error"], abs=slack), f"{key}: {AGAIN}"


def test_the_smaller_studies_say_what_their_logs_say(tmp_path: Path) -> None:
    today = {}
    for folder in STUDIES[2:]:
        write_pages(folder, tmp_path)
        today |= rows(tmp_path / "fidelity.json")
    of_these = {key[0] for key in today}
    compare(today, {k: row for k, row in rows(ROOT / "docs" / "fidelity.json").items() if k[0] in of_these})


@pytest.mark.slow
def test_every_study_and_the_page_say_what_the_logs_say(tmp_path: Path) -> None:
    write_pages(STUDIES, tmp_path)
    compare(rows(tmp_path / "fidelity.json"), rows(ROOT / "docs" / "fidelity.json"))
    today, kept = (
        (folder / "fidelity.md").read_text(encoding="utf-8") for folder in (tmp_path, ROOT / "docs")
    )
    heads = [line for line in today.splitlines() if line.startswith("#")]
    assert heads == [line for line in kept.splitlines() if line.startswith("#")], AGAIN
    assert re.findall(r"fidelity-img/[^)]+", kept) == re.findall(r"fidelity-img/[^)]+", today), AGAIN


def test_the_page_has_its_notes_and_pictures() -> None:
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    for folder in STUDIES:
        notes = folder / "_notes.md"
        if finished(folder) and notes.exists():
            assert notes.read_text(encoding="utf-8").strip() in page, AGAIN
    pictures = set(re.findall(r"fidelity-img/[^)]+", page))
    assert len(pictures) > 20
    assert all((ROOT / "docs" / name).is_file() for name in pictures)


def test_the_page_and_the_json_agree() -> None:
    """The numbers of the replay tables are those of the rows."""
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    for (_, policy, load, mode, of, metric), row in rows(ROOT / "docs" / "fidelity.json").items():
        if (mode, metric) == ("replay", "step_s"):
            where = f"{float(load):g}" + (", then 1.5 x and back" if of == "load_step" else "")
            start = f"| {policy} | {where} | {row['steps']:,} | "
            told = [line for line in page.splitlines() if line.startswith(start)]
            shares = [float(line.removeprefix(start).split()[0]) / 100.0 for line in told]
            assert any(share == pytest.approx(row["error"], abs=6e-4) for share in shares)


@pytest.mark.parametrize("apart", HOSTS)
def test_host_terms_are_those_of_the_runs_set_apart(apart: str, tmp_path: Path) -> None:
    folder = FIDELITY / HOSTS[apart]
    fit_hosts_of(FIDELITY / apart, tmp_path, opened(STUDIES[0])[1])
    ours, kept = (yaml.safe_load((where / FILE).read_text(encoding="utf-8")) for where in (tmp_path, folder))
    assert ours.keys() == kept.keys() == {1, 2}
    for lanes, terms in ours.items():
        numbers = {name: value for name, value in terms.items() if name not in ("label", "gap_cools")}
        assert numbers == pytest.approx({name: kept[lanes][name] for name in numbers}, rel=1e-3), AGAIN
        # a share that a refit of the prices moves along a flat optimum
        assert terms["gap_cools"] == pytest.approx(kept[lanes]["gap_cools"], abs=0.11), AGAIN


def test_errors_with_a_runs_own_host_are_those_of_its_log() -> None:
    folder = FIDELITY / "long" / "cases"
    kept = json.loads((folder / "_own_host.json").read_text(encoding="utf-8"))
    e, cost = opened(folder)
    for name, row in zip(finished(folder), kept, strict=True):
        found = own_host(e, cost, folder, name)
        assert found.keys() == row.keys()
        for metric in COMPARED:
            assert found[metric] == pytest.approx(row[metric], abs=SLACK), AGAIN


def test_the_frozen_rows_are_told_beside_todays() -> None:
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    frozen = json.loads((FIDELITY / "blind" / "cases" / "_frozen.json").read_text(encoding="utf-8"))
    assert f"frozen before the first run ({frozen['commit']}" in page
    assert len(frozen["rows"]) > 200
