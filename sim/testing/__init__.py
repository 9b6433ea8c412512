"""Conformance of a scheduling policy: what every policy must hold, checked on yours by `check_policy`.

    from sim.testing import check_policy
    check_policy(MyPolicy())            # or "module:MyPolicy", or {"name": "sarathi", "token_budget": 256}

It raises `PolicyCheckError`, an AssertionError whose text names each law that is broken, on which load, and how; put
the call into a test of your own. A finding is run again by `scenarios()["rush"].run(policy)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sim.errors import SimctlError
from sim.testing.laws import LAWS, Trial, Untried, digest
from sim.testing.scenarios import Scenario, fresh, scenarios

__all__ = ["LAWS", "Finding", "PolicyCheckError", "Report", "Scenario", "check_policy", "digest", "scenarios"]

SHOWN = 2  # findings of one law that a report spells out


@dataclass(frozen=True)
class Finding:
    """A law that a policy breaks: its name, the scenario's, and what happened."""

    law: str
    scenario: str
    what: str


@dataclass(frozen=True)
class Report:
    """The laws that a policy keeps, and its findings; `skipped`: laws that could not be tried, with the reason."""

    policy: str
    kept: tuple[str, ...]
    findings: tuple[Finding, ...]
    skipped: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        tried = len(self.kept) + len({finding.law for finding in self.findings})
        lines = [f"policy '{self.policy}' keeps {len(self.kept)} of {tried} laws"]
        for law in dict.fromkeys(finding.law for finding in self.findings):
            mine = [finding for finding in self.findings if finding.law == law]
            lines.append(f"- {law}: {LAWS[law][0]}")
            for found in mine[:SHOWN]:
                about = scenarios()[found.scenario].about
                lines.append(f"    scenario '{found.scenario}' ({about}): {found.what}")
            if len(mine) > SHOWN:
                lines.append(f"    and in {', '.join(found.scenario for found in mine[SHOWN:])}")
            lines.append(f'    again: sim.testing.scenarios()["{mine[0].scenario}"].run(policy)')
        lines += [f"- {law}: not tried: {why}" for law, why in self.skipped.items()]
        return "\n".join(lines)


class PolicyCheckError(AssertionError):
    """A policy breaks a law; the text is the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def check_policy(policy: Any, *, laws: Iterable[str] | None = None, raises: bool = True) -> Report:
    """Run a policy through all scenarios and check the laws (or only those named) on what comes out.

    `policy`: an object with `plan(view)`, its class, or an entry as in an experiment file. It is copied for each run.
    Raises PolicyCheckError if a law is broken (with `raises`), SimctlError for an entry that does not exist.
    """
    label = str(getattr(fresh(policy), "label", None) or type(fresh(policy)).__name__)
    chosen = list(LAWS) if laws is None else list(laws)
    unknown = [law for law in chosen if law not in LAWS]
    if unknown:
        raise SimctlError(f"no law is called '{unknown[0]}'; there are {', '.join(LAWS)}")
    kept, findings, skipped = [], [], {}
    trial = Trial(policy)
    for law in chosen:
        try:
            broken = [Finding(law, scenario, what) for scenario, what in LAWS[law][1](trial)]
        except Untried as reason:
            skipped[law] = str(reason)
            continue
        findings += broken
        if not broken:
            kept.append(law)
    report = Report(label, tuple(kept), tuple(findings), skipped)
    if raises and findings:
        raise PolicyCheckError(report)
    return report
