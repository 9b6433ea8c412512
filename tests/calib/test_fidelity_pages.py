"""docs/fidelity.json and docs/fidelity.md are what the committed logs and today's prices say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from calib.validate.hosts import FILE
from calib.validate.page import opened, write_pages
from calib.validate.study import fit_hosts_of

ROOT = Path(__file__).parents[2]
CASES = ROOT / "docs" / "fidelity" / "cases"
HOSTS = ROOT / "docs" / "fidelity" / "hosts" / "cases"
AGAIN = (
    "the pages are older than the prices: python -m calib.validate docs/fidelity/cases -o docs "
    "--hosts-from docs/fidelity/hosts/cases"
)
# where a refit of the profile moves prices a little, pages need not be made again at once
SLACK = 0.02

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="measured cases come with the repository only")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of today."""
    out = tmp_path_factory.mktemp("fidelity")
    write_pages(CASES, out)
    return out


def rows(path: Path) -> dict[tuple[str, ...], Any]:
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {
        tuple(str(row.get(key)) for key in ("policy", "load", "mode", "of", "metric")): row for row in found
    }


def test_the_json_says_what_the_logs_say(made: Path) -> None:
    today, kept = rows(made / "fidelity.json"), rows(ROOT / "docs" / "fidelity.json")
    assert today.keys() == kept.keys(), AGAIN
    for key, row in today.items():
        assert row["real"] == pytest.approx(kept[key]["real"], rel=1e-6), AGAIN
        assert row["real_spread"] == kept[key]["real_spread"], AGAIN
        assert row["error"] == pytest.approx(kept[key]["error"], abs=SLACK), f"{key}: {AGAIN}"


def test_the_page_has_the_same_tables_and_pictures(made: Path) -> None:
    today, kept = ((folder / "fidelity.md").read_text(encoding="utf-8") for folder in (made, ROOT / "docs"))
    heads = [line for line in today.splitlines() if line.startswith("#")]
    assert heads == [line for line in kept.splitlines() if line.startswith("#")], AGAIN
    notes = (CASES / "_notes.md").read_text(encoding="utf-8").strip()
    assert notes in kept, AGAIN
    pictures = set(re.findall(r"fidelity-img/[^)]+", kept))
    assert pictures == set(re.findall(r"fidelity-img/[^)]+", today)), AGAIN
    assert all((ROOT / "docs" / name).is_file() for name in pictures)


def test_the_page_and_the_json_agree() -> None:
    """The numbers of the replay table are those of the rows."""
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    for (policy, load, mode, of, metric), row in rows(ROOT / "docs" / "fidelity.json").items():
        if (mode, metric) == ("replay", "step_s"):
            where = f"{float(load):g}" + (", then 1.5 x and back" if of == "load_step" else "")
            start = f"| {policy} | {where} | {row['steps']:,} | "
            (line,) = (line for line in page.splitlines() if line.startswith(start))
            told = float(line.removeprefix(start).split()[0]) / 100.0
            assert told == pytest.approx(row["error"], abs=6e-4)


def test_host_terms_are_those_of_the_runs_set_apart(tmp_path: Path) -> None:
    fit_hosts_of(HOSTS, tmp_path, opened(CASES)[1])
    ours, kept = (yaml.safe_load((folder / FILE).read_text(encoding="utf-8")) for folder in (tmp_path, CASES))
    assert ours.keys() == kept.keys() == {1, 2}
    for lanes, terms in ours.items():
        numbers = {name: value for name, value in terms.items() if name != "label"}
        assert numbers == pytest.approx({name: kept[lanes][name] for name in numbers}, rel=1e-3), AGAIN
