"""The page's sections of several GPUs: rates, SMs held, slowdowns, KV transfers, shards, out of known rows."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from calib.collectives.curves import host_bound
from calib.collectives.factors import beside, beside_elsewhere, ctas, sms_given
from calib.collectives.joins import IN_STEPS, host_in_step, in_step
from calib.collectives.moves import default_of
from calib.report import group, shards
from calib.report.data import Profile
from calib.rows import row

RUN: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": {"name": "NVIDIA Test", "sms": 132},
    "group": {"gpus": 2, "nccl": "9.9", "link": {"links": 18, "gb_s_per_link": 25.0, "gb_s_one_way": 450.0}},
}


def timed(sweep: str, time_s: float, **columns: Any) -> dict[str, Any]:
    times = {"time_s": time_s, "p25_s": time_s, "p75_s": time_s, "mean_s": time_s, "count": 10, "gpus": 2}
    return row(sweep, **{"launch": "graph", **times, **columns})


def profile(**sweeps: list[dict[str, Any]]) -> Profile:
    return Profile("test", RUN, {name: pd.DataFrame(rows) for name, rows in sweeps.items()})


def reduced(size: int, time_s: float, launch: str = "graph") -> dict[str, Any]:
    return timed("allreduce", time_s, kind="allreduce", message_bytes=size, launch=launch)


def test_bus_bandwidth_is_held_against_the_link() -> None:
    rows = [reduced(1 << 10, 6e-6), reduced(1 << 10, 3e-5, "eager"), reduced(256 << 20, (256 << 20) / 225e9)]
    section = group.collectives(profile(allreduce=rows))
    assert section is not None
    assert "reaches 225 GB/s, 50 % of 450 GB/s" in section.lead
    assert "6.00 µs in a CUDA graph and 30.0 µs launched eagerly" in section.lead
    assert "| allreduce | 256 MiB |" in section.body[1]
    assert "collectives" in section.pictures


def test_without_rows_there_is_no_section() -> None:
    empty = profile()
    for make in (group.collectives, group.holds, group.beside, group.moved, shards.tensor_parallel):
        assert make(empty) is None


def test_ctas_are_counted_from_the_grid_of_nccls_kernels() -> None:
    assert ctas("24x1x1") == 24
    rows = [
        row("collective_kernels", kind="allreduce", message_bytes=size, kernel=name, grid=grid)
        for size, name, grid in (
            (4096, "ncclDevKernel", "1x1x1"),
            (1 << 20, "ncclDevKernel", "24x1x1"),
            (1 << 20, "elementwise", "999x1x1"),
        )
    ]
    section = group.holds(profile(collective_kernels=rows))
    assert section is not None
    assert "holds 1 SMs for the smallest messages and 24 for the largest" in section.lead
    assert "999" not in section.body[0]


def corun(point: str, kind: str, slow: float, sms: int, **more: Any) -> dict[str, Any]:
    return timed("collective_corun", slow * 1e-3, alone_s=1e-3, kind=kind, point=point, sms=sms, **more)


def corun_rows(
    sms: int, mine: float, theirs: float, kind: str = "gemm", **limit: Any
) -> list[dict[str, Any]]:
    """Both sides of one point: compute on `sms` SMs, the all-reduce on the others or on all."""
    mode, other = ("streams", 132) if sms == 132 else ("disjoint", 132 - sms)
    point = f"{kind}{sms}{limit}"
    as_other = {"neighbour_kind": "allreduce", "neighbour_message_bytes": 2 << 20, "neighbour_sms": other}
    as_mine = {"neighbour_kind": kind, "neighbour_sms": sms, "message_bytes": 2 << 20, **limit}
    return [
        corun(point, kind, mine, sms, m=64, neighbour_mode=mode, **as_other),
        corun(point, "allreduce", theirs, other, neighbour_mode=mode, **as_mine),
    ]


def test_slowdowns_of_both_sides_stand_side_by_side() -> None:
    rows = [*corun_rows(132, 1.8, 2.5), *corun_rows(124, 1.1, 1.4), *corun_rows(132, 1.2, 1.9, max_ctas=4)]
    section = group.beside(profile(collective_corun=rows))
    assert section is not None
    assert "| gemm, 64 tokens | 2 MiB | 1.80 / 2.50 | 1.10 / 1.40 |" in section.body[0]
    assert "| gemm, 64 tokens | 2 MiB | at most 4 | 1.20 | 1.90 |" in section.body[2]


def test_factors_of_the_profile_leave_limited_communicators_out() -> None:
    rows = [*corun_rows(132, 1.8, 2.5), *corun_rows(132, 1.2, 1.9, max_ctas=4), *corun_rows(124, 0.98, 1.4)]
    made = beside({"collective_corun": pd.DataFrame(rows)})
    found = {(one["overlap"], one["compute_sms"]): one for one in made}
    assert found["shared", 132]["collective_factor"] == 2.5
    assert found["shared", 132]["compute_factor"] == 1.8
    assert found["disjoint", 124]["compute_factor"] == 1.0  # never a gain
    assert {one["points"] for one in made} == {1}


def test_the_mean_says_what_iterations_of_two_kinds_get_done() -> None:
    rows = [{**one, "mean_s": 2 * one["time_s"]} for one in corun_rows(132, 1.0, 1.5)]
    made = beside({"collective_corun": pd.DataFrame(rows).assign(max_ctas=float("nan"))})
    assert (made[0]["compute_factor"], made[0]["collective_factor"]) == (2.0, 3.0)


def test_factors_are_held_against_those_of_another_run() -> None:
    first, second = (
        beside({"collective_corun": pd.DataFrame(corun_rows(132, *factors)).assign(max_ctas=float("nan"))})
        for factors in ((2.2, 1.5), (2.0, 1.5))
    )
    found = beside_elsewhere(first, second)
    assert found["compute"]["median"] == pytest.approx(0.1)
    assert found["collective"]["median"] == 0.0
    assert beside_elsewhere(first, []) == {}


def test_a_stream_of_few_sms_is_held_against_all_of_them() -> None:
    rows = [timed("collective_limits", t, message_bytes=4 << 20, sms=s) for s, t in ((8, 3e-5), (64, 1e-5))]
    knots = pd.Series({4 << 20: 1e-5})
    assert sms_given({"collective_limits": pd.DataFrame(rows)}, knots, 2, 132) == [
        [8, 3.0],
        [64, 1.0],
        [132, 1.0],
    ]


def test_calls_that_wait_for_the_host_cost_the_same_at_any_size() -> None:
    graph = pd.Series({1024: 5e-6, 2048: 6e-6, 1 << 28: 9e-4})
    eager = pd.Series({1024: 3e-5, 2048: 5e-5, 1 << 28: 9.01e-4})
    assert host_bound(eager, graph).tolist() == pytest.approx([4e-5, 4e-5, 9e-4])


def test_the_default_transfer_is_the_soonest_for_pages_of_full_size() -> None:
    def way(method: str, layout: str, piece: int, seconds: float) -> dict[str, Any]:
        points = [[1 << 16, seconds / 100], [1 << 26, seconds]]
        return {"method": method, "layout": layout, "piece_bytes": piece, "points": points}

    ways = [
        way("copy", "contiguous", 0, 1e-4),
        way("copy", "blocks", 65536, 3e-3),
        way("kernel", "blocks", 65536, 2e-4),
        way("kernel", "blocks", 32768, 1e-4),
    ]
    assert default_of(ways) is ways[2]
    assert default_of(ways[:1]) is ways[0]


def test_kv_is_shown_alone_layer_after_layer_and_beside_compute() -> None:
    way = {"kind": "kv_transfer", "label": "copy/contiguous", "message_bytes": 1 << 20}
    rows = [
        timed("kv_transfer", 1e-5, **way, layers=1),
        timed("kv_transfer", 4e-5, **{**way, "message_bytes": 4 << 20}, layers=1),
        timed("kv_transfer", 3.2e-4, **way, layers=32),
    ]
    beside_rows = [
        timed("kv_corun", 1.1e-4, alone_s=1e-4, point="a", neighbour_kind="prefill_layer", layers=4, **way),
        timed(
            "kv_corun",
            1.2e-3,
            alone_s=1e-3,
            point="a",
            kind="prefill_layer",
            m=2048,
            neighbour_kind="kv_transfer",
            neighbour_label="copy/contiguous",
        ),
    ]
    section = group.moved(profile(kv_transfer=rows, kv_corun=beside_rows))
    assert section is not None
    assert "copy contiguous 105" in section.lead
    text = "\n".join(section.body)
    assert "| copy, contiguous | whole | graph | 32 × 1 MiB | 320 | 1.00 |" in text
    assert "| copy, contiguous | prefill on the sender, 2048 tokens | 1.10 | 1.20 |" in text


def step(seconds: float, joined: int, **more: Any) -> dict[str, Any]:
    shape = {"kind": "decode_step", "decode_batch": 8, "context_max": 1024, "m": 8, "layers": 80}
    return timed("tp_steps", seconds, **{**shape, "allreduces": joined, **more})


def test_what_joins_the_shards_is_the_rest_of_a_step() -> None:
    layer = {"kind": "decode_layer", "layers": 1}
    rows = [step(0.02, 1), step(0.018, 0), step(3e-4, 1, **layer), step(2.8e-4, 0, **layer)]
    alone = [reduced(1 << 16, 8e-6), reduced(1 << 18, 8e-6)]
    section = shards.tensor_parallel(profile(tp_steps=rows, allreduce=alone))
    assert section is not None
    assert "| decode   8 × 1024 | graph | 20.0 | – | – | 18.0 | 10 % |" in section.body[0]
    assert "| decode   8 × 1024 | 0.300 | 0.280 | 0.02 | 0.016 | 1.25 |" in section.body[1]


def test_a_steps_shape_is_what_predict_asks_for() -> None:
    asked = shards.shape_of(pd.Series(step(0.02, 1)))
    assert asked["decode_contexts"] == ";".join(["1024"] * 8)
    assert (asked["tp"], asked["launch"], asked["model"]) == ("2", "graph", "llama-3.1-70b")
    prefill = step(0.02, 1, kind="prefill_step", q_tokens="512", history_tokens="0")
    assert shards.shape_of(pd.Series(prefill))["prefill_tokens"] == "512"


def test_the_links_speed_is_asked_under_every_name_that_drivers_have() -> None:
    from calib.collectives.link import link_facts

    class Value:
        def __init__(self, known: bool) -> None:
            self.nvmlReturn = 0 if known else 3
            self.value = type("V", (), {"uiVal": 26562})()

    class Nvml:
        def nvmlInit(self) -> None: ...
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
            return int(link < 18)

        def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
            return 6

        def nvmlDeviceGetFieldValues(self, handle: int, fields: list[Any]) -> list[Value]:
            return [Value(isinstance(fields[0], tuple))]

        def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
            return 0

    found = link_facts([0, 1], Nvml())
    assert (found["links"], found["gb_s_per_link"], found["gb_s_one_way"]) == (18, 26.562, 478.1)
    assert (found["nvlink_pairs"], found["pairs"]) == (1, 1)
    assert link_facts([0, 1], object()) == {}


def passes(
    batch: int, launch: str, joined_s: float, apart_s: float, host: float = 0.0
) -> list[dict[str, Any]]:
    """A decode step with and without joins; `host`: seconds of host time between the two."""
    shape = {"model": "llama-3.1-70b-tp2", "decode_batch": batch, "m": batch, "launch": launch}
    return [step(joined_s, 1, host_s=0.02 + host, **shape), step(apart_s, 0, host_s=0.02, **shape)]


def test_a_call_inside_a_step_is_the_difference_of_steps_by_their_calls() -> None:
    knots = pd.Series({1 << 14: 7e-6, 1 << 20: 7e-6})
    gathers = pd.DataFrame(
        [timed("allgather", 1e-5, kind="allgather", message_bytes=s) for s in (1 << 10, 1 << 30)]
    )
    calls = 161  # two a layer and the embedding
    rows = [r for b in (1, 8, 64) for r in passes(b, "graph", 0.02 + calls * 10e-6 + 1e-5, 0.02)]
    held = {"tp_steps": pd.DataFrame(rows), "allgather": gathers}
    seconds, record = in_step(held, knots, 2)
    assert seconds == pytest.approx(3e-6, rel=1e-6)
    assert record[IN_STEPS]["median"] == pytest.approx(0.0, abs=1e-4)
    rows += passes(128, "graph", 0.02 + calls * 20e-6 + 1e-5, 0.02)
    _, record = in_step({**held, "tp_steps": pd.DataFrame(rows)}, knots, 2)
    assert record[IN_STEPS]["max"] == pytest.approx(0.5, abs=1e-3)  # the batch that is left out is not known
    assert in_step({"allgather": gathers}, knots, 2) == (0.0, {})


def test_the_host_pays_for_the_joins_and_the_gathering_of_an_eager_step() -> None:
    rows = [r for b in (1, 8) for r in passes(b, "eager", 0.04, 0.03, host=162 * 1e-4)]
    assert host_in_step({"tp_steps": pd.DataFrame(rows)}, 2) == pytest.approx(1e-4)
    assert host_in_step({}, 2) is None
