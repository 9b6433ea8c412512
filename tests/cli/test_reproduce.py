"""`simctl reproduce`: what there is, verdicts and exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from sim.cli import cli
from sim.cost.pod_checks import Check
from sim.errors import SimctlError
from sim.study import papers


class Fake:
    title, seconds = "made up", 0

    def __init__(self, *ours: float) -> None:
        self.ours = ours

    def checks(self) -> list[Check]:
        return [Check(f"c{n}", "a paper", "1 to 2", 1.0, 2.0, x) for n, x in enumerate(self.ours)]


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in {"good": Fake(1.5), "mixed": Fake(1.0, 3.0)}.items():
        monkeypatch.setitem(papers.GROUPS, name, fake)  # type: ignore[arg-type]


def call(*words: str) -> Any:
    return CliRunner().invoke(cli, ["reproduce", *words], standalone_mode=False)


def test_groups_are_listed() -> None:
    assert {"bullet", "sarathi", "good"} <= {row["name"] for row in json.loads(call("--json").output)}
    assert "Sarathi-Serve's capacity" in call().output


def test_every_figure_has_a_verdict() -> None:
    result = call("mixed", "good", "--json")
    assert json.loads(result.output)[1] == {
        "name": "c1",
        "source": "a paper",
        "published": "1 to 2",
        "ours": 3.0,
        "interval": [1.0, 2.0],
        "verdict": "missed",
    }
    assert result.return_value == 1


def test_all_reproduced_is_zero() -> None:
    result = call("good")
    assert result.return_value == 0
    assert result.output.splitlines()[-1].split()[-1] == "reproduced"


def test_an_unknown_group_is_refused_with_the_nearest() -> None:
    result = call("sarathy")
    assert isinstance(result.exception, SimctlError)
    assert "Did you mean 'sarathi'?" in str(result.exception)


def test_groups_name_functions_that_exist() -> None:
    for name, group in papers.GROUPS.items():
        if name not in ("good", "mixed"):
            assert callable(group.function())
