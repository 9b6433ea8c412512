"""The goals, and whether the rows meet them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.measure import Row
from sim.policies import list_policies, make_policy


@dataclass(frozen=True)
class Verdict:
    """A goal as a sentence, the figure found and whether it is within the limit."""

    goal: str
    found: str
    met: bool

    @property
    def sentence(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'} {self.goal}: {self.found}"


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Every goal that the rows can speak for."""
    made = [
        _per_iteration(rows),
        _mocker(rows),
        _two_lanes(rows),
        _users_policy(rows),
        _memory(rows),
        _flat(rows),
        _replicas(rows),
        _process(rows, "simctl --help", 0.3),
        _process(rows, "1k run with report, warm", 1.5),
        _process(rows, "1k run with report, first", 10.0),
        _process(rows, "1k run, compiling", 20.0),
    ]
    return [verdict for some in made for verdict in some]


def _pick(rows: Sequence[Row], group: str, wanted: Callable[[Row], bool]) -> list[Row]:
    return [row for row in rows if row.group == group and not row.note and wanted(row)]


def _per_iteration(rows: Sequence[Row]) -> list[Verdict]:
    limits = {"python": 12.0, "compiled": 5.0}
    return [
        Verdict(
            f"sarathi-512, {row.executor}: at most {limits[row.executor]:g} us of loop an iteration",
            f"{row.us_per_iteration:.2f} us, {row.decisions / row.iterations:.2f} decisions an iteration",
            row.us_per_iteration <= limits[row.executor],
        )
        for row in _pick(rows, "peers", lambda row: row.executor in limits)
    ]


def _mocker(rows: Sequence[Row]) -> list[Verdict]:
    mocker = _pick(rows, "peers", lambda row: row.executor == "Rust")
    ours = _pick(rows, "peers", lambda row: row.executor != "Rust")
    if not mocker:
        return []
    return [
        Verdict(
            f"sarathi-512, {row.executor}: at least 1.5 times Dynamo's mocker in output tokens per loop second",
            f"{row.tokens_per_s / mocker[0].tokens_per_s:.2f} times ({row.tokens_per_s / 1e6:.1f} M against "
            f"{mocker[0].tokens_per_s / 1e6:.1f} M)",
            row.tokens_per_s >= 1.5 * mocker[0].tokens_per_s,
        )
        for row in ours
        if row.executor == "compiled"
    ]


def _two_lanes(rows: Sequence[Row]) -> list[Verdict]:
    lanes = {info.name: getattr(make_policy(info.name), "lanes", 1) for info in list_policies()}

    def spatial(row: Row) -> bool:
        return row.executor == "compiled" and lanes.get(row.name, 1) == 2

    found = _pick(rows, "policies", spatial)
    if not found:
        return []
    worst = max(found, key=lambda row: row.us_per_iteration)
    return [
        Verdict(
            "two-lane policies, compiled: at most 12 us a lane event",
            f"{worst.us_per_iteration:.2f} us for the slowest of {len(found)}, {worst.name}",
            worst.us_per_iteration <= 12,
        )
    ]


def _users_policy(rows: Sequence[Row]) -> list[Verdict]:
    found = _pick(rows, "policies", lambda row: row.name == "user's plain Python")
    return [
        Verdict(
            f"a user's policy in plain Python, engine by {row.executor}: at most 40 us a decision",
            f"{1e6 * row.loop_s / row.decisions:.1f} us",
            1e6 * row.loop_s / row.decisions <= 40,
        )
        for row in found
    ]


def _memory(rows: Sequence[Row]) -> list[Verdict]:
    return [
        Verdict(
            f"{row.requests:,} requests, {row.executor}: under 1 GiB",
            f"{row.peak_mib:.0f} MiB",
            row.peak_mib < 1024,
        )
        for row in _pick(rows, "size", lambda row: row.requests >= 1_000_000)
    ]


def _flat(rows: Sequence[Row]) -> list[Verdict]:
    made = []
    for executor in ("python", "compiled"):
        found = _pick(rows, "size", lambda row, by=executor: row.executor == by and row.requests >= 10_000)
        if len(found) > 1:
            costs = [1e6 * row.loop_s / row.requests for row in found]
            made.append(
                Verdict(
                    f"time a request the same from {found[0].requests:,} to {found[-1].requests:,}, {executor}",
                    ", ".join(f"{cost:.2f}" for cost in costs) + " us",
                    costs[-1] <= 1.3 * costs[0],
                )
            )
    return made


def _replicas(rows: Sequence[Row]) -> list[Verdict]:
    made = []
    many = _pick(rows, "replicas", lambda row: row.name.startswith("64 "))
    for row in many:
        name = row.name.removeprefix("64 ")
        one = _pick(
            rows, "replicas", lambda r, n=name, by=row.executor: r.name == f"1 {n}" and r.executor == by
        )
        if one:
            ratio = row.loop_s / (64 * one[0].loop_s)
            made.append(
                Verdict(
                    f"64 replicas ({name.removeprefix('x ')}, {row.executor}) at most 1.3 times 64 single ones",
                    f"{ratio:.2f} times",
                    ratio <= 1.3,
                )
            )
    return made


def _process(rows: Sequence[Row], name: str, limit_s: float) -> list[Verdict]:
    found = _pick(rows, "start", lambda row: row.name == name)
    return [
        Verdict(f"{name}: at most {limit_s:g} s", f"{row.process_s:.2f} s", row.process_s <= limit_s)
        for row in found
    ]
