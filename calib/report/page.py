"""The page: its sections in order, and the one step that writes it with its pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from calib.report import (
    activity,
    attention,
    corun,
    experts,
    fits,
    fused,
    fused_counters,
    gemm,
    group,
    host,
    hot,
    neighbours,
    power,
    scaling,
    setting,
    shapes,
    shards,
    steps,
    tickets,
    timeline,
    warm,
    watts,
)
from calib.report.data import Profile
from calib.report.text import Section

SECTIONS: tuple[Callable[[Profile], Section | None], ...] = (
    setting.measured,
    setting.partitions,
    setting.errors,
    scaling.scaling,
    scaling.knee,
    gemm.staircase,
    attention.prefill,
    attention.missing_sms,
    attention.decode,
    fused.fused,
    fused.others,
    fused.limits,
    fused.share,
    fused_counters.counted,
    fused_counters.joules,
    tickets.rules,
    timeline.timelines,
    shapes.others,
    experts.experts,
    shapes.fp8,
    steps.launches,
    steps.composition,
    corun.side_by_side,
    corun.modes,
    neighbours.pairs,
    neighbours.stagger,
    hot.hot,
    warm.warm,
    group.collectives,
    group.holds,
    group.beside,
    group.moved,
    shards.tensor_parallel,
    power.power,
    watts.law,
    watts.pauses,
    watts.reaction,
    activity.activity,
    host.costs,
    fits.held_out,
)


def render(profile: Profile, source: str, page: str) -> tuple[str, dict[str, str]]:
    """(Markdown, SVG text by path relative to the page's folder) of a profile.

    `source` and `page` are how the command that makes the page names the profile folder and the page.
    """
    images = f"img/{Path(page).stem}"
    sections = [section for make in SECTIONS if (section := make(profile)) is not None]
    blocks = [
        f"# What the {profile.run['gpu']['name']} measurements show",
        f"Made from the measured rows by `python -m calib.report {source} -o {page}`; edit nothing here, run it "
        "again. Every number of a sweep is of one card. *n* counts rows; *slowdown* is time over time alone on the "
        "same SMs; *ratio* tables compare equal shapes only.",
        "\n".join(f"- [{s.title}](#{_anchor(s.title)})" for s in sections),
    ]
    for section in sections:
        blocks += [f"## {section.title}", section.lead, *section.body]
    text = "\n\n".join(blocks).replace("(IMG/", f"({images}/") + "\n"
    pictures = {f"{images}/{name}.svg": svg for s in sections for name, svg in s.pictures.items()}
    return text, pictures


def _anchor(title: str) -> str:
    """GitHub's anchor of a heading."""
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def write(profile: Profile, source: str, page: Path) -> list[Path]:
    """Write the page and its pictures, the page last; pictures of an earlier run that are no longer made go."""
    text, pictures = render(profile, source, page.as_posix())
    written = []
    for name, svg in sorted(pictures.items()):
        written.append(_put(page.parent / name, svg))
    for stale in (page.parent / "img" / page.stem).glob("*.svg"):
        if stale not in written:
            stale.unlink()
    return [*written, _put(page, text)]


def _put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(path)
    return path
