"""Which graphs a run needs, from a dry run of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from calib.executor.buckets import (
    ASIDE,
    MOST_GRAPHS,
    MOST_PARTITIONS,
    MOST_PIECEWISE,
    decode_bucket,
    eager_passes,
    fitting,
    holds,
    row_bucket,
    wanted,
)
from calib.executor.work import Work


def work(chunk: int = 0, decodes: int = 0, lane: int = 0, sms: int = 132) -> Work:
    chunks = ((1, chunk, 0),) if chunk else ()
    return Work(lane, sms, (0, 32), chunks, tuple((i, 100) for i in range(decodes)), 0.0, 0.0, True)


def test_decode_graphs_reach_beyond_the_largest_batch_seen() -> None:
    graphs, pieces = wanted([work(decodes=40), work(decodes=3)], 256)
    assert pieces == []
    sizes = [size for _, _, size in graphs]
    assert sizes[0] == 64
    assert fitting(sizes, 61) == 64
    assert fitting(sizes, 65) is None
    assert sizes == sorted(sizes, reverse=True)


def test_never_more_sequences_than_the_policy_runs() -> None:
    graphs, _ = wanted([work(decodes=40)], 44)
    assert max(size for _, _, size in graphs) == decode_bucket(44)


def test_many_partitions_share_the_budget_of_graphs() -> None:
    works = [work(decodes=200, lane=1, sms=sms) for sms in range(20, 84, 8)]
    graphs, _ = wanted(works, 256)
    counts = Counter(sms for _, sms, _ in graphs)
    often = [n for _, n in counts.most_common(MOST_PARTITIONS)]
    assert sum(often) <= MOST_GRAPHS
    # no set is left without, and each reaches the largest batch
    assert len(counts) == len(works)
    assert all(max(size for _, at, size in graphs if at == sms) >= 200 for sms in counts)


def test_sets_that_only_a_real_run_may_use_get_graphs_too() -> None:
    works = [work(decodes=20, lane=1), work(chunk=300, sms=124)]
    graphs, pieces = wanted(works, 64, [(124, 8), (100, 32), (132, 132)])
    assert {sms for lane, sms, _ in graphs if lane == 1} == {8, 32, 132}
    assert {sms for _, sms, _ in pieces} == {124, 100, 132}
    # the set that the dry run used comes first, in case that time is short
    assert pieces[0][1] == 124


def test_parked_passes_have_buffers_and_graphs_of_their_own() -> None:
    aside = replace(work(chunk=40), aside=True)
    _, pieces = wanted([work(chunk=40), aside], 64)
    assert {slot for slot, _, _ in pieces} == {0, ASIDE}


def test_rows_are_those_of_the_simulators_grid_up_to_a_limit() -> None:
    _, pieces = wanted([work(chunk=500, decodes=12), work(chunk=9000)], 64)
    rows = [rows for _, _, rows in pieces]
    assert rows[0] == 2048
    assert all(row_bucket(n) in rows for n in (1, 17, 300, 512, 1025))


def test_with_many_sets_row_counts_that_occur_are_exact_and_others_close() -> None:
    works = [work(chunk=n, sms=sms) for sms in range(20, 132, 8) for n in (300, 777)]
    _, pieces = wanted(works, 64)
    assert len(pieces) <= MOST_PIECEWISE
    sizes = {n for _, _, n in pieces}
    assert {row_bucket(300), row_bucket(777)} <= sizes
    for n in range(1, 778):
        assert holds(fitting(sorted(sizes), row_bucket(n)), n)


def test_a_pass_is_not_run_in_graphs_for_many_more_rows() -> None:
    assert holds(512, 500)
    assert not holds(512, 400)
    assert not holds(None, 400)
    assert not holds(384, 400)


def test_passes_that_may_run_eagerly_are_known_beforehand() -> None:
    works = [
        work(chunk=3000, sms=124),
        work(chunk=3000, sms=124),
        work(chunk=50),
        work(decodes=4, lane=1, sms=8),
    ]
    assert eager_passes(works, [(124, 8), (100, 32)]) == [(0, 100, 50), (0, 124, 3000), (0, 132, 50)]
    assert eager_passes(works[3:], [(124, 8)]) == []
