"""Which CUDA graphs a run needs: decode steps by batch size, passes with prompts by rows, each per SM set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from calib.executor.work import Work
from sim.cost.launching import captured_tokens, grid_tokens

MOST_PARTITIONS = 6  # decode graphs are kept for the SM sets used most
MOST_GRAPHS = 60
MOST_PIECEWISE = 140  # row counts x SM sets
MOST_ROWS = 2048  # larger passes keep the GPU longer than the host needs to launch every kernel
HEADROOM = 1.5  # batches grow beyond a dry run's where the device is slower than its tables

Key = tuple[int, int, int]  # lane, SMs, size


def row_bucket(rows: int) -> int:
    """Rows of the graphs that a pass with prompts replays: the grid at which the simulator prices it."""
    return int(grid_tokens(rows))


def decode_bucket(batch: int) -> int:
    """Batch size of the decode graph for `batch` sequences, padded as servers and the simulator do."""
    return int(captured_tokens(batch))


def wanted(works: Sequence[Work], sequences: int) -> tuple[list[Key], list[Key]]:
    """(decode graphs, piecewise graphs) for a run like `works`, largest first; up to `sequences` decodes.

    Every batch size up to one and a half times the largest, thinned where the graphs would be too many; the row
    counts that occur, and all smaller ones that a pass may shrink to.
    """
    decodes = [work for work in works if not work.chunks]
    sets = [key for key, _ in Counter((w.lane, w.sms) for w in decodes).most_common(MOST_PARTITIONS)]
    most = max((len(work.decodes) for work in decodes), default=0)
    top = min(sequences, int(HEADROOM * most) + 1)
    sizes = sorted({decode_bucket(n) for n in range(1, top + 1)})
    per_set = max(1, MOST_GRAPHS // max(1, len(sets)))
    sizes = _thinned(sizes, per_set)
    graphs = [(lane, sms, size) for lane, sms in sets for size in sizes] if most else []
    prompts = {(work.lane, work.sms) for work in works if work.chunks}
    largest = max((row_bucket(work.rows) for work in works if work.chunks), default=0)
    rows = sorted({row_bucket(n) for n in range(1, min(largest, MOST_ROWS) + 1)})
    rows = _thinned(rows, max(1, MOST_PIECEWISE // max(1, len(prompts))))
    pieces = [(lane, sms, n) for lane, sms in sorted(prompts) for n in rows]
    return sorted(graphs, key=lambda key: -key[2]), sorted(pieces, key=lambda key: -key[2])


def _thinned(sizes: list[int], most: int) -> list[int]:
    """At most `most` of them: every other one is dropped until they fit, the largest kept."""
    while len(sizes) > most:
        sizes = sorted(sizes[::-1][::2])
    return sizes


def fitting(sizes: Sequence[int], size: int) -> int | None:
    """The smallest captured size that holds `size`; None if none does."""
    return min((held for held in sizes if held >= size), default=None)
