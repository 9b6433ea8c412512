"""Which CUDA graphs a run needs: decode steps by batch size, passes with prompts by rows, each per SM set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from calib.executor.work import Work
from sim.cost.launching import captured_tokens, grid_tokens
from sim.engine.layout import DECODE_LANE, PREFILL_LANE

MOST_PARTITIONS = 6  # every decode batch size is captured for the SM sets used most, few sizes for the others
COARSE = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_GRAPHS = 60  # of the SM sets used most
MOST_PIECEWISE = 480  # row counts x SM sets
MOST_ROWS = 2048  # larger passes keep the GPU longer than the host needs to launch every kernel
# a pass is not run in a graph for more rows than this times its own, and these
PADDING, SPARE_ROWS = 1.125, 16
HEADROOM = 1.5  # batches grow beyond a dry run's where the device is slower than its tables
ASIDE = 2  # slot of passes in front of a parked one

Key = tuple[int, int, int]  # slot of the buffers, SMs, size


def row_bucket(rows: int) -> int:
    """Rows of the graphs that a pass with prompts replays: the grid at which the simulator prices it."""
    return int(grid_tokens(rows))


def decode_bucket(batch: int) -> int:
    """Batch size of the decode graph for `batch` sequences, padded as servers and the simulator do."""
    return int(captured_tokens(batch))


def wanted(
    works: Sequence[Work], sequences: int, pairs: Sequence[tuple[int, int]] = ()
) -> tuple[list[Key], list[Key]]:
    """(decode graphs, piecewise graphs) for a run like `works`, the most useful first; up to `sequences` decodes.

    Decodes: every batch size up to one and a half times the largest, thinned where the graphs would be too many. Passes
    with prompts: every row count up to the largest; where SM sets are many, those that occur and others in wider steps.
    `pairs`: (prefill SMs, decode SMs) that the policy may use, beside those in `works`:
    where a real run is slower or faster than a dry one, other sets come up.
    """
    decodes = [work for work in works if not work.chunks]
    sets = [key for key, _ in Counter((w.lane, w.sms) for w in decodes).most_common(MOST_PARTITIONS)]
    most = max((len(work.decodes) for work in decodes), default=0)
    top = min(sequences, int(HEADROOM * most) + 1)
    sizes = sorted({decode_bucket(n) for n in range(1, top + 1)})
    sizes = _thinned(sizes, max(1, MOST_GRAPHS // max(1, len(sets))))
    graphs = [(lane, sms, size) for lane, sms in sets for size in sorted(sizes, reverse=True)] if most else []
    seen = {(w.lane, w.sms) for w in decodes} | {(DECODE_LANE, sms) for _, sms in pairs}
    few = [size for size in COARSE if size < top] + [sizes[-1]] if sizes else []
    others = sorted(seen - set(sets), key=lambda key: -key[1]) if most else []
    graphs += [(lane, sms, size) for lane, sms in others for size in sorted(set(few), reverse=True)]
    return graphs, _pieces(works, pairs)


def _pieces(works: Sequence[Work], pairs: Sequence[tuple[int, int]]) -> list[Key]:
    prompts = [work for work in works if work.chunks]
    used = Counter((ASIDE if work.aside else work.lane, work.sms) for work in prompts)
    if not prompts:
        return []
    declared = {(PREFILL_LANE, sms) for sms, _ in pairs}
    sets = [key for key, _ in used.most_common()] + sorted(declared - set(used), key=lambda key: -key[1])
    largest = min(max(row_bucket(work.rows) for work in prompts), MOST_ROWS)
    rows = sorted({row_bucket(n) for n in range(1, largest + 1)})
    if len(sets) * len(rows) > MOST_PIECEWISE:
        seen = {row_bucket(work.rows) for work in prompts}
        rows = sorted({n for n in seen if n <= MOST_ROWS} | set(_spread(rows)))
    sets = sets[: max(1, MOST_PIECEWISE // len(rows))]
    return [(slot, sms, n) for slot, sms in sets for n in reversed(rows)]


def eager_passes(works: Sequence[Work], pairs: Sequence[tuple[int, int]] = ()) -> list[Key]:
    """Passes with prompts that graphs may not hold: row counts that occur, on the sets that they occur on, and one of
    them on each other prefill set of `pairs`."""
    passes = [work for work in works if work.chunks]
    found = {(ASIDE if work.aside else work.lane, work.sms, work.rows) for work in passes}
    used = {sms for _, sms, _ in found}
    fewest = min((work.rows for work in passes), default=0)
    found |= {(PREFILL_LANE, sms, fewest) for sms, _ in pairs if fewest and sms not in used}
    return sorted(found)


def holds(size: int | None, rows: int) -> bool:
    """May a pass of `rows` rows run in graphs for `size`?"""
    return size is not None and rows <= size <= PADDING * row_bucket(rows) + SPARE_ROWS


def _spread(sizes: list[int]) -> list[int]:
    """Of ascending sizes as few as hold all of them."""
    kept = [sizes[-1]]
    for n in reversed(sizes):
        if not holds(kept[-1], n):
            kept.append(n)
    return kept[::-1]


def _thinned(sizes: list[int], most: int) -> list[int]:
    """At most `most` of them: every other one is dropped until they fit, the largest kept."""
    while len(sizes) > most:
        sizes = sorted(sizes[::-1][::2])
    return sizes


def fitting(sizes: Sequence[int], size: int) -> int | None:
    """The smallest captured size that holds `size`; None if none does."""
    return min((held for held in sizes if held >= size), default=None)
