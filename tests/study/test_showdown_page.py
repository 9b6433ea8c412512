"""The page of the showdown is made from result files: every policy, the best of each rate, the winner, SM time."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from sim.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "experiments" / "showdown.py"

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="experiments/ is part of a checkout only")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("showdown") / "out"
    keys = ["workload={trace: sample-conv, max_requests: 40}", "policies=[vllm, fixed-50-50]"]
    options = [word for key in [*keys, "sweep.request_rate=[15, 40]"] for word in ("--set", key)]
    study = [
        "run",
        str(ROOT / "experiments" / "showdown.yaml"),
        *options,
        "-o",
        str(folder),
        "--no-report",
        "-q",
    ]
    with pytest.raises(SystemExit) as left:
        main(study)
    assert not left.value.code
    spec = importlib.util.spec_from_file_location("showdown", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.page(folder))


def test_each_policy_has_its_row_and_each_rate_its_best(page: str) -> None:
    attained, verdicts, where = page.split("## ")[0], page.split("## ")[1], page.split("## ")[2]
    for policy in ("vllm", "fixed-50-50"):
        assert f"| {policy} |" in attained
        assert f"| {policy} |" in where
    assert len(re.findall(r"\*\*[\d.]+\*\*", attained)) >= 2
    assert re.search(r"\| 15 \| \S+ [\d.]+ % \|", verdicts)
    assert re.search(r"\| 40 \| \S+ [\d.]+ % \|", verdicts)


def test_classes_of_sm_time_add_up(page: str) -> None:
    for row in re.findall(r"^\| (?:vllm|fixed-50-50) \|(.*)\|$", page.split("## ")[2], re.MULTILINE):
        *classes, _lent = map(float, row.split("|"))
        assert sum(classes) == pytest.approx(100, abs=0.5)
