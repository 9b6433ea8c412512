"""Where and when each CTA of a fused kernel ran: SM and the GPU's clock at its start and end, by scheduling rule.

`python -m calib.timeline OUT.csv.gz` runs one mix of synthetic CTAs (`calib.kernels.tickets`) by every rule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from calib.kernels.tickets import END, JOB, KIND, RULES, SM, START, Mix
from calib.rows import write_csv

if TYPE_CHECKING:
    from calib.lab import GpuLab

COMPUTE, BANDWIDTH, BOTH = range(3)  # kinds of a CTA
COLUMNS = ("rule", "cta", "kind", "job", "sm", "start_ns", "end_ns")
# three to four waves of both kinds, each kind about half of the time, two CTAs an SM
COMPUTES, BANDWIDTHS, COMPUTE_WORK, BANDWIDTH_WORK = 420, 560, 160, 60


def mixes() -> list[Mix]:
    """The same work by every rule, and four CTAs an SM of one kind: in which order SMs get theirs."""
    made = [Mix(rule, COMPUTES, BANDWIDTHS, COMPUTE_WORK, BANDWIDTH_WORK) for rule in RULES]
    return [*made, Mix("compute_alone", 528, 0, COMPUTE_WORK, BANDWIDTH_WORK, ctas_per_sm=4)]


def ctas(mix: Mix, log: Any) -> list[dict[str, Any]]:
    """A row a CTA of a run's log, in the order of block indices, times since the first start; a CTA that found no job
    is left out."""
    first = int(log[:, START].min())
    found = []
    for block, one in enumerate(np.asarray(log)):
        kind = int(one[KIND])
        if mix.rule in ("intra_thread", "horizontal"):
            # a CTA of these has a job of each kind as long as there are any
            kind, job = BOTH, block
            if block >= min(mix.computes, mix.bandwidths):
                kind = BANDWIDTH if mix.bandwidths > mix.computes else COMPUTE
        elif (job := int(one[JOB])) < 0:
            continue
        values = (mix.rule, block, kind, job)
        times = (int(one[SM]), int(one[START]) - first, int(one[END]) - first)
        found.append(dict(zip(COLUMNS, (*values, *times), strict=True)))
    return found


def run(lab: GpuLab) -> list[dict[str, Any]]:
    """CTAs of the mix by every rule on the whole GPU."""
    return [row for mix in mixes() for row in ctas(mix, lab.mix(mix, lab.facts.sms).log)]


def write(rows: Iterable[dict[str, Any]], path: Path, card: str = "") -> None:
    """Write CTAs as gzipped CSV with the card that they ran on."""
    write_csv(pd.DataFrame(list(rows), columns=list(COLUMNS)).assign(card=card), path)


def read(path: Path) -> pd.DataFrame:
    """A table written by `write`."""
    return pd.read_csv(path, dtype={"rule": str, "card": str})


def main(arguments: list[str]) -> int:
    from calib.lab import GpuLab
    from calib.measure import QUICK
    from calib.models import model_shape
    from calib.sweep import CARD

    lab = GpuLab(model_shape("llama-3.1-8b"), QUICK, 0)
    found = run(lab)
    write(found, Path(arguments[0]), lab.facts.uuid[:CARD])
    print(f"{len(found)} CTAs to {arguments[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
