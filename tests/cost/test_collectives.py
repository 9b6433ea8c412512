"""Collectives as a profile measured them: the file, the curves of a group, whole steps, and side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_collectives as fake
import numpy as np
import pytest

from sim.cost import load_cost
from sim.cost.collectives import Knots, Measured, ring_hops, ring_share
from sim.cost.collectives_file import collectives_from_data
from sim.cost.parallel import NCCL_HOP_S, GroupCurve
from sim.cost.profile import load_profile
from sim.cost.profiled import ProfiledCost
from sim.cost.shapes import Elementwise, Launch
from sim.errors import SimctlError

MODEL, GPU = "llama-3.1-70b", "h200-sxm"
DECODE, PROMPT = Launch((), 16, 16 * 1024, graph=True), Launch(((2048, 0),))
SMALL: dict[str, Any] = {"max_tokens": 2048, "max_seqs": 32, "max_context": 4096}


def cost(folder: Path, tp: int = 2, data: Any = None, **kernels: Any) -> ProfiledCost:
    made = fake.folder(folder, data)
    return load_cost(MODEL, GPU, str(made), {"tp": tp}, kernels)


def part(price: Any, name: str) -> Any:
    return next(one for one in price.by_operator if one.name == name)


def graph_s(size: float) -> float:
    return fake.LATENCY_S + size / fake.RATE


def eager_s(size: float) -> float:
    return fake.EAGER_S + size / fake.RATE


def test_knots_are_linear_between_and_go_on_beyond() -> None:
    knots = Knots((1024.0, 2048.0, 4096.0), (1.0, 2.0, 6.0))
    assert knots.at([0, 1024, 1536, 4096, 8192]).tolist() == [1.0, 1.0, 1.5, 6.0, 14.0]
    assert knots.holds([1, 4096])
    assert not knots.holds(4097)


def test_a_decode_step_pays_two_captured_all_reduces_a_layer_and_a_gather(tmp_path: Path) -> None:
    price = cost(tmp_path).solo(DECODE)
    row = 8192 * 2
    assert [(one.name, one.calls) for one in price.by_operator if one.name.startswith("all")] == [
        ("allreduce/embedding", 1),
        ("allreduce/attention", 80),
        ("allreduce/ffn", 80),
        ("allgather/logits", 1),
    ]
    assert part(price, "allreduce/ffn").seconds == pytest.approx(80 * graph_s(16 * row), rel=1e-9)
    assert part(price, "allgather/logits").seconds == pytest.approx(graph_s(16 * 128256 * 2), rel=1e-9)
    assert {part(price, name).label for name in ("allreduce/ffn", "allgather/logits")} == {"measured"}


def test_a_large_prompt_is_launched_eagerly_and_a_small_one_from_a_graph(tmp_path: Path) -> None:
    made, row = cost(tmp_path), 8192 * 2
    assert part(made.solo(PROMPT), "allreduce/ffn").seconds == pytest.approx(
        80 * eager_s(2048 * row), rel=1e-9
    )
    small = made.solo(Launch(((256, 0),)))
    assert part(small, "allreduce/ffn").seconds == pytest.approx(80 * graph_s(256 * row), rel=1e-9)
    eager = cost(tmp_path, launch="eager").solo(DECODE)
    assert part(eager, "allreduce/ffn").seconds == pytest.approx(80 * eager_s(16 * row), rel=1e-9)


def test_an_eager_host_launches_the_collectives_too(tmp_path: Path) -> None:
    two, plain = cost(tmp_path, launch="eager"), load_cost(MODEL, GPU, "spec", {}, {"launch": "eager"})
    more = two.launching.host_s(16, False, 80) - plain.launching.host_s(16, False, 80)
    assert float(more) == pytest.approx((2 * 80 + 2) * fake.HOST_S, rel=1e-9)


def test_price_tables_are_those_of_single_steps(tmp_path: Path) -> None:
    made = cost(tmp_path)
    p = made.compile(**SMALL)
    for launch, table in ((DECODE, p.dense_graph_s), (PROMPT, p.dense_eager_s)):
        price = made.solo(launch)
        dense = sum(
            one.seconds
            for one in price.by_operator
            if one.name not in ("lm_head", "sampling", "allgather/logits", "decode_attention", "gaps")
            and not one.name.startswith("prefill")
        )
        gaps = sum(one.seconds for one in price.by_operator if one.name == "gaps")
        assert table[launch.tokens] == pytest.approx(dense + gaps, rel=1e-9)
    assert p.head_s[16] == pytest.approx(
        sum(part(made.solo(DECODE), name).seconds for name in ("lm_head", "sampling", "allgather/logits"))
    )


def test_what_a_composition_takes_from_kernels_leaves_the_link_alone() -> None:
    """The factor on chunked steps is the clock's under load: no all-reduce pays it."""
    made = load_cost(MODEL, GPU, "h200-sxm", {"tp": 2})
    assert float(made.chunked_factor(np.array([2048]), 132)[0]) > 1.02  # type: ignore[index]
    alone = made.profile.curve("allreduce").timing(Elementwise(np.array([2048]), 16384), 132).seconds[0]
    assert part(made.solo(PROMPT), "allreduce/ffn").seconds == pytest.approx(80 * alone, rel=1e-9)


def test_a_call_within_a_decode_step_takes_longer_than_one_of_many(tmp_path: Path) -> None:
    told = fake.table()
    told["curves"][0]["in_step_s"] = 3e-6
    made, plain = cost(tmp_path / "a", data=told), cost(tmp_path / "b")
    # embedding and two a layer, in decode steps that come from a graph
    more = made.solo(DECODE).gpu_s - plain.solo(DECODE).gpu_s
    assert more == pytest.approx(161 * 3e-6, rel=1e-6)
    tables = made.compile(**SMALL), plain.compile(**SMALL)
    assert tables[0].dense_graph_s[16] - tables[1].dense_graph_s[16] == pytest.approx(161 * 3e-6, rel=1e-6)
    assert (tables[0].dense_eager_s == tables[1].dense_eager_s).all()
    assert made.solo(PROMPT).gpu_s == plain.solo(PROMPT).gpu_s
    eager = cost(tmp_path / "a", data=told, launch="eager").solo(DECODE)
    assert eager.gpu_s == cost(tmp_path / "b", launch="eager").solo(DECODE).gpu_s


@pytest.mark.parametrize("gpus", [4, 8])
def test_other_numbers_of_gpus_are_a_ring_and_flagged(tmp_path: Path, gpus: int) -> None:
    made = cost(tmp_path, gpus)
    price, row = made.solo(DECODE), 8192 * 2
    carried = 16 * row * 2 * (gpus - 1) / gpus
    expected = fake.LATENCY_S + carried / fake.RATE + 2 * (gpus - 2) * NCCL_HOP_S
    assert part(price, "allreduce/ffn").seconds == pytest.approx(80 * expected, rel=1e-9)
    assert part(price, "allreduce/ffn").label.startswith("extrapolated from two-gpus's allreduce of 2 GPUs")
    assert any(flag.startswith("allreduce") for flag in price.flags)
    assert not any(flag.startswith("allreduce") for flag in cost(tmp_path).solo(DECODE).flags)
    assert made.compile(**SMALL).cover_tokens == 0
    assert made.compile(**SMALL).cover_tokens < cost(tmp_path).compile(**SMALL).cover_tokens


def test_a_ring_of_two_is_what_was_measured() -> None:
    assert [ring_share("allreduce", n) for n in (2, 4, 8)] == [1.0, 1.5, 1.75]
    assert [ring_share("allgather", n) for n in (2, 8)] == [0.5, 0.875]
    assert [ring_hops(name, 4) for name in ("allreduce", "allgather", "sendrecv")] == [6, 3, 1]


def test_without_measurements_the_ring_by_the_data_sheet_stays(tmp_path: Path) -> None:
    bare = {"curves": [], "beside": [], "transfers": []}
    found = cost(tmp_path, data=bare).provenance()["allreduce/ffn"]
    assert found == "extrapolated from the data sheet's NVLink rate by a ring over 2 GPUs"
    assert load_cost(MODEL, GPU, "spec", {"tp": 2}).provenance()["allreduce/ffn"] == found


def test_what_only_eager_calls_were_measured_of_is_taken_for_captured_with_a_label(tmp_path: Path) -> None:
    only = fake.table(curves=[fake.curve("allreduce", "eager"), fake.curve("allgather", "graph")])
    labels = cost(tmp_path, data=only).provenance()
    assert labels["allreduce/ffn"] == "extrapolated from two-gpus by allreduce launched as eager"
    assert labels["allgather/logits"] == "measured"


def test_one_gpu_prices_as_without_the_table(tmp_path: Path) -> None:
    bare = fake.folder(tmp_path / "bare", {"curves": []})
    one, other = cost(tmp_path / "full", 1), load_cost(MODEL, GPU, str(bare))
    assert one.solo(DECODE).gpu_s == other.solo(DECODE).gpu_s
    assert one.profile.content_hash != other.profile.content_hash


def test_the_hash_follows_the_table_and_the_group(tmp_path: Path) -> None:
    faster = fake.table()
    faster["curves"][0]["points"] = fake.line(1e-6, 400e9)
    hashes = {
        cost(tmp_path / "a").profile_hash,
        cost(tmp_path / "b", data=faster).profile_hash,
        cost(tmp_path / "a", 4).profile_hash,
        cost(tmp_path / "a", 1).profile_hash,
    }
    assert len(hashes) == 4


def test_a_collective_holds_its_sms_and_needs_them(tmp_path: Path) -> None:
    made = cost(tmp_path)
    shape = Elementwise(np.array([64]), 16384)
    whole, few = (made.profile.curve("allreduce").timing(shape, sms) for sms in (132, 8))
    assert whole.sm_s[0] == pytest.approx(16 * whole.seconds[0])
    assert few.seconds[0] == pytest.approx(2 * whole.seconds[0])
    assert few.sm_s[0] == pytest.approx(8 * few.seconds[0])
    given = fake.table()
    given["curves"][0] |= {"sms_given": [[8, 1.5], [132, 1.0]], "sms_by_bytes": [[0, 2], [2**20, 20]]}
    told = cost(tmp_path / "told", data=given).profile.curve("allreduce")
    assert told.timing(shape, 8).seconds[0] == pytest.approx(1.5 * whole.seconds[0])
    assert told.timing(shape, 14).seconds[0] == pytest.approx(
        1.5 * whole.seconds[0] - 6 / 124 * 0.5 * whole.seconds[0]
    )
    # as many SMs as it holds are enough
    assert told.timing(shape, 20).seconds[0] == pytest.approx(whole.seconds[0])
    small = Elementwise(np.array([1]), 16384)
    assert told.timing(small, 8).seconds[0] == pytest.approx(told.timing(small, 132).seconds[0])
    sizes = Elementwise(np.array([1, 64]), 16384)
    found = told.timing(sizes, 132)
    assert (found.sm_s / found.seconds).tolist() == pytest.approx([2, 20])


def shares(made: ProfiledCost, launch: Launch, sms: int) -> float:
    price = made.solo(launch, sms)
    return sum(one.seconds for one in price.by_operator if one.name.startswith("all")) / price.gpu_s


def test_compute_beside_a_collective_slows_down_as_measured(tmp_path: Path) -> None:
    """Mean over either's share of time in collectives: on disjoint sets everything else leaves decode alone here."""
    rows = [fake.beside("gemm", "disjoint", 1.5, 1.2), fake.beside("decode_attention", "disjoint", 1.4, 1.3)]
    split = (96, 36)
    plain, told = cost(tmp_path / "a"), cost(tmp_path / "b", data=fake.table(beside=rows))
    before, after = plain.slowdown(PROMPT, DECODE, split), told.slowdown(PROMPT, DECODE, split)
    w_prompt, w_decode = shares(plain, PROMPT, 96), shares(plain, DECODE, 36)
    assert 0.01 < w_decode < w_prompt < 0.2
    more_decode = (1 - w_decode) * w_prompt * 0.4 + w_decode * (1 - w_prompt) * 0.2
    more_prompt = (1 - w_prompt) * w_decode * 0.5 + w_prompt * (1 - w_decode) * 0.3
    assert after[1] - before[1] == pytest.approx(more_decode, rel=0.02)
    assert after[0] - before[0] == pytest.approx(more_prompt, rel=0.02)
    assert plain.provenance()["contention/collectives"].startswith("extrapolated from two-gpus by the SMs")
    assert told.provenance()["contention/collectives"] == "measured"


def test_on_shared_sms_a_collective_takes_those_that_it_holds(tmp_path: Path) -> None:
    made = cost(tmp_path)
    free = fake.table()
    for row in free["curves"]:
        row["sms"] = 0
    lighter = cost(tmp_path / "free", data=free)
    held, none = (c.slowdown(PROMPT, DECODE, (132, 132), 132)[1] for c in (made, lighter))
    w_prompt, w_decode = shares(made, PROMPT, 132), shares(made, DECODE, 132)
    assert held - none == pytest.approx((1 - w_decode) * w_prompt * (132 / 116 - 1), rel=0.02)


def test_two_collectives_at_once_share_the_link(tmp_path: Path) -> None:
    """Their fixed costs run beside each other, their bytes one after the other."""
    only = Launch(((2048, 0),), layers=(0, 1))
    made = cost(tmp_path)
    rows = [fake.beside("allreduce", "shared", 1.0, 3.0)]
    told = cost(tmp_path / "b", data=fake.table(beside=rows))
    before, after = (c.slowdown(only, PROMPT, (96, 36))[1] for c in (made, told))
    a, b = shares(made, only, 96), shares(made, PROMPT, 36)
    size = 2048 * 8192 * 2
    alone = 2.0 - fake.LATENCY_S / eager_s(size)
    assert after - before == pytest.approx(a * b * (3.0 - alone), rel=0.02)


def test_one_gpu_is_slowed_down_as_before() -> None:
    one = load_cost("llama-3.1-8b", GPU, "h200-sxm")
    assert "contention/collectives" not in one.provenance()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curves": [{"collective": "allreduce"}]}, "curves.0.: key 'gpus' is missing"),
        ({"curve": []}, "unknown key 'curve'.* Did you mean 'curves'"),
        ({"curves": [{**fake.curve("allreduce", "graph"), "gpus": 1}]}, "gpus must be a whole number from 2"),
        ({"curves": [{**fake.curve("allreduce", "graph"), "launch": "grpah"}]}, "launch 'grpah' is none of"),
        ({"curves": [{**fake.curve("allreduce", "graph"), "points": [[1, 1e-6]]}]}, "at least two pairs"),
        (
            {"curves": [{**fake.curve("allreduce", "graph"), "points": [[2, 1e-6], [1, 1e-6]]}]},
            "'points' must have ascending first numbers",
        ),
        (
            {"curves": [{**fake.curve("allreduce", "graph"), "points": [[2, "x"]]}]},
            "list of pairs of numbers",
        ),
        ({"curves": [fake.curve("allreduce", "graph")] * 2}, "curves hold 'allreduce/graph-2' twice"),
        ({"curves": [], "transfers": [fake.COPY] * 2}, "twice"),
        ({"curves": [], "transfers": [{**fake.COPY, "default": False}]}, "one of the transfers must be"),
        (
            {"curves": [], "beside": [{**fake.beside("gemm", "shared", 1, 1), "compute_factor": 0}]},
            "compute_factor must be a factor above 0",
        ),
        ({"curves": [], "transfers": [{**fake.COPY, "beside": {"prefil": {}}}]}, "unknown key 'prefil'"),
        ({"curves": 3}, "'curves' must be a list"),
        ([], "must be an object"),
    ],
)
def test_a_table_that_cannot_be_is_refused_with_the_place(change: Any, message: str) -> None:
    with pytest.raises(SimctlError, match=message) as refused:
        collectives_from_data(change, "measured", "", "collectives.json")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("collectives.json")


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    made = fake.folder(tmp_path)
    (made / "collectives.json").write_text("{")
    with pytest.raises(SimctlError, match=r"collectives.json' is not a readable file of collectives"):
        load_cost(MODEL, GPU, str(made), {"tp": 2})
    (made / "collectives.json").unlink()
    with pytest.raises(SimctlError, match=r"collectives.json' is not a readable"):
        load_cost(MODEL, GPU, str(made), {"tp": 2})


def test_what_stands_under_about_is_not_read() -> None:
    found = collectives_from_data(fake.table(about={"anything": [1, {"x": None}]}), "measured", "", "f")
    assert json.dumps([one.name for one in found.curves]) == json.dumps(
        ["allreduce/graph-2", "allreduce/eager-2", "allgather/graph-2", "allgather/eager-2"]
    )
    assert found.default is not None
    assert found.default.name == "kv_transfer/copy-contiguous"


def test_a_profile_without_collectives_has_none() -> None:
    from sim.cost.gpu import load_gpu

    assert load_profile("spec", load_gpu(GPU)).collectives is None


PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "calibration" / "public" / "aiconfigurator"
TABLES = {"h200_sxm": "nccl_2.26.2", "h100_sxm": "nccl_2.27.3", "a100_sxm": "nccl_2.27.3"}


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public tables of NCCL are not here")
@pytest.mark.parametrize(("gpus", "median", "p95"), [(4, 0.09, 0.27), (8, 0.13, 0.42)])
def test_public_tables_of_more_gpus_are_near_the_ring_of_their_own_two(
    gpus: int, median: float, p95: float
) -> None:
    import pandas as pd

    from sim.cost.gpu import load_gpu

    found: list[float] = []
    for device, version in TABLES.items():
        table = pd.read_csv(PUBLIC / device / version / "nccl_perf.csv.gz")
        table = table[table.nccl_dtype == "half"]
        for public, name in (("all_reduce", "allreduce"), ("all_gather", "allgather")):
            times = table[table.op_name == public].groupby(["num_gpus", "message_size"]).latency.median()
            two, more = 1e-3 * times[2], 1e-3 * times[gpus]
            knots = Knots(tuple(map(float, two.index)), tuple(map(float, two)))
            curve = GroupCurve(load_gpu("h200-sxm"), Measured(name, 2, "graph", knots), gpus, "", "")
            largest = two.index.max() * ring_share(name, 2) / ring_share(name, gpus)
            more = more[(more.index >= 1024) & (more.index <= largest)]
            shape = Elementwise(more.index.to_numpy(), 1)
            found += (curve.timing(shape, 132).seconds / more.to_numpy() - 1).tolist()
    assert np.median(np.abs(found)) < median
    assert np.quantile(np.abs(found), 0.95) < p95
