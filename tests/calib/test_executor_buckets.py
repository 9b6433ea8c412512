"""Which graphs a run needs, from a dry run of it."""

from __future__ import annotations

from calib.executor.buckets import MOST_GRAPHS, decode_bucket, fitting, row_bucket, wanted
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
    assert len(graphs) <= MOST_GRAPHS
    assert len({sms for _, sms, _ in graphs}) == 6
    assert max(size for _, _, size in graphs) >= 200


def test_rows_are_those_of_the_simulators_grid_up_to_a_limit() -> None:
    _, pieces = wanted([work(chunk=500, decodes=12), work(chunk=9000)], 64)
    rows = [rows for _, _, rows in pieces]
    assert rows[0] == 2048
    assert all(row_bucket(n) in rows for n in (1, 17, 300, 512, 1025))
