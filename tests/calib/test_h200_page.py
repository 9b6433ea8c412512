"""The page of a profile: sections, numbers on known data, and that the committed page is what the data gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from calib.report import load, render, write
from calib.report.__main__ import main
from calib.report.hot import settle
from calib.report.page import _anchor
from calib.rows import row, write_table
from sim.errors import SimctlError

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "calib" / "profiles").glob("*/run.yaml"))
SMS = 132
GIB = 2.0**30


def run_yaml(**more: Any) -> dict[str, Any]:
    gpu = {
        "name": "NVIDIA Test",
        "sms": SMS,
        "memory_bytes": 80 * GIB,
        "l2_bytes": 60 * 2**20,
        "max_sm_mhz": 1980,
        "power_limit_w": 700.0,
        "driver": "1.2.3",
        "cuda": "13.0",
        "libraries": {"torch": "9.9"},
    }
    base = {"model": "llama-3.1-8b", "gpu": gpu, "date": "2026-01-01", "seed": 7, "protocol": {}, "bench": {}}
    return {**base, "sweeps": {}, "partitions": [], **more}


def timed(sweep: str, time_s: float, **shape: Any) -> dict[str, Any]:
    times = {"time_s": time_s, "p25_s": time_s * 0.99, "p75_s": time_s * 1.01, "count": 10}
    return row(sweep, kind=shape.pop("kind", sweep), launch=shape.pop("launch", "graph"), **times, **shape)


def profile(folder: Path, rows: dict[str, list[dict[str, Any]]], **more: Any) -> Any:
    (folder / "measurements").mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(run_yaml(**more)))
    for name, of in rows.items():
        write_table(of, folder / "measurements" / f"{name}.csv.gz")
    return load(folder)


def page(*arguments: Any, **more: Any) -> str:
    return render(profile(*arguments, **more), "folder", "docs/test.md")[0]


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def cells(block: str, start: str) -> list[str]:
    line = next(line for line in block.splitlines() if line.startswith(f"| {start}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def pair(slow_prefill: float, slow_decode: float, sms: int, mode: str = "disjoint") -> list[dict[str, Any]]:
    """Both rows of a co-run."""
    chunk = {"m": 512, "q_tokens": "512", "history_tokens": "0"}
    batch = {"m": 8, "decode_batch": 8, "context_mean": 100, "context_sum": 800, "context_max": 100}
    other = SMS if mode == "streams" else SMS - sms
    near = {f"neighbour_{k}": v for k, v in batch.items() if k != "context_mean"}
    far = {f"neighbour_{k}": v for k, v in chunk.items()}
    a = {"kind": "prefill_layer", **chunk, "sms": sms, "neighbour_kind": "decode_step", **near}
    b = {"kind": "decode_step", **batch, "sms": other, "neighbour_kind": "prefill_layer", **far}
    common = {"neighbour_mode": mode, "alone_s": 1e-3, "throttled": 0}
    return [
        timed("corun", slow_prefill * 1e-3, **a, neighbour_sms=other, **common),
        timed("corun", slow_decode * 1e-3, **b, neighbour_sms=sms, **common),
    ]


def test_only_what_was_measured_has_a_section(tmp_path: Path) -> None:
    text = page(tmp_path / "p", {"stream_read": [timed("stream_read", 1e-3, sms=SMS, bytes=GIB)]})
    assert re.findall(r"^## (.*)$", text, re.M) == ["What was measured"]
    assert "1 rows of llama-3.1-8b shapes on one NVIDIA Test" in text
    assert "torch 9.9" in text
    assert "1.2.3, 13.0" in text


def test_knee_is_the_first_size_with_95_percent_of_the_bandwidth(tmp_path: Path) -> None:
    def bandwidth(n: int) -> float:
        return 4e12 * (0.9 if n == 64 else min(1.0, n / 40))  # a dip behind the knee

    sizes = [8, 16, 24, 32, 40, 48, 64, 96, SMS]
    rows = [timed("stream_read", GIB / bandwidth(n), sms=n, bytes=GIB) for n in sizes]
    text = page(tmp_path / "p", {"stream_read": rows})
    found = cells(section(text, "Where the bandwidth knee is"), "streaming read, 1 GiB")
    assert found[1:] == ["4.00", "4.00", "40", "30 %", "96", "90 %", "9"]
    assert "streaming read at 40" in text
    assert cells(section(text, "Time against SMs"), "streaming read, 1 GiB")[2:4] == ["5.00", "2.50"]


def test_slowdowns_are_held_against_the_papers(tmp_path: Path) -> None:
    inside = {"corun": [*pair(1.07, 1.30, 112), *pair(1.5, 1.1, 16)]}
    text = section(page(tmp_path / "in", inside), "Side by side on disjoint SMs")
    assert "prefill slows by at most 50 % and decode by at most 30 %" in text
    assert "inside Bullet's band for prefill" in text
    assert "inside MuxWise's for decode" in text
    assert cells(text, "Bullet")[1:] == ["1", "1.07", "1.07", "1.07", "100 %", "inside"]
    outside = {"corun": [*pair(1.09, 1.20, 112), *pair(1.01, 1.41, 88), *pair(1.02, 1.5, 16)]}
    text = section(page(tmp_path / "out", outside), "Side by side on disjoint SMs")
    assert cells(text, "Bullet")[1:] == ["2", "1.05", "1.09", "1.09", "50 %", "**outside**"]
    assert cells(text, "MuxWise")[1] == "2"  # 116 SMs are beyond what it measured
    assert "outside MuxWise's for decode" in text
    assert cells(text, "88 / 44")[1:] == ["1", "1.01", "1.01", "1.01", "1.41", "1.41", "1.41"]
    assert cells(text, "decode")[1] == "1.50"


def test_streams_are_told_apart_from_disjoint_sets(tmp_path: Path) -> None:
    rows = {"corun": [*pair(1.1, 1.2, 64), *pair(1.3, 6.0, SMS, "streams"), *pair(1.3, 2.0, SMS, "streams")]}
    text = page(tmp_path / "p", rows)
    found = section(text, "Overlapping sets, priorities and two-stream starvation")
    assert "slows 4.00 times in the median and 6.00 times at most (n = 2)" in found
    assert "decode by at most 20 % (n = 1 pairs" in section(text, "Side by side on disjoint SMs")


def chunk(attention: str, q: int, sms: int, time_s: float, h: int = 0) -> dict[str, Any]:
    shape = {"m": q, "q_tokens": str(q), "history_tokens": str(h), "attention": attention, "label": attention}
    return timed("prefill_attention", time_s, sms=sms, **shape, flops=1e12, bytes=1e9)


def test_attention_is_compared_shape_by_shape(tmp_path: Path) -> None:
    rows = [chunk("fa2", 1024, SMS, 100e-6), chunk("fa3", 1024, SMS, 60e-6)]
    rows += [chunk("fa2", 1024, 128, 103e-6), chunk("fa3", 1024, 128, 105e-6)]
    rows += [
        chunk("fa3", 2048, SMS, 1.0),
        chunk("fa2", 16, SMS, 10e-6, 2048),
        chunk("fa3", 16, SMS, 25e-6, 2048),
    ]
    text = page(tmp_path / "p", {"prefill_attention": rows})
    found = section(text, "Prefill attention: FA2 against FA3")
    assert "FA3 / FA2 0.60 to 0.60, n = 1 shapes" in found
    assert "up to 2.50 times slower" in found
    assert cells(found, "16")[1:3] == ["–", "2.50"]
    found = section(text, "Prefill attention when 4 SMs are missing")
    assert "FA2 1.03 times as long (range 1.03–1.03, n = 1)" in found
    assert cells(found, "FA3 | 1024")[2] == "1.75"


def test_skew_is_measured_against_the_even_batch_of_the_same_mean(tmp_path: Path) -> None:
    def decode(time_s: float, mean: float, longest: int, contexts: str = "") -> dict[str, Any]:
        shape = {"m": 4, "decode_batch": 4, "context_mean": mean, "context_sum": 4 * mean}
        more = {"context_max": longest, "decode_contexts": contexts or None, "bytes": 1e6}
        return timed("decode_attention", time_s, sms=SMS, **shape, **more)

    rows = [
        decode(10e-6, 1000, 1000),
        decode(30e-6, 2000, 2000),
        decode(25e-6, 999.75, 2000, "2000;666;666;667"),
    ]
    found = section(page(tmp_path / "p", {"decode_attention": rows}), "Decode attention: bandwidth and skew")
    assert cells(found, "4 × 1000")[1:] == ["10.0", "2.50"]


def test_parts_add_up_to_a_layer_and_a_missing_part_leaves_it_out(tmp_path: Path) -> None:
    m, sms = 256, SMS
    tables = {
        "gemm": [
            timed("gemm", 10e-6, label=r, m=m, sms=sms, n=1, k=1) for r in ("qkv", "o", "gate_up", "down")
        ],
        "prefill_attention": [chunk("fa3", m, sms, 20e-6)],
        **{name: [timed(name, 5e-6, m=m, sms=sms)] for name in ("norm", "rope", "activation", "kv_write")},
    }
    layer = {"m": m, "q_tokens": str(m), "attention": "fa3", "layers": 1, "sms": sms}
    # 4 GEMMs, attention, two norms, three others: 40 + 20 + 10 + 15 = 85 us; no part has a history of 64
    tables["prefill_layer"] = [
        timed("prefill_layer", 93.5e-6, history_tokens="0", **layer),
        timed("prefill_layer", 99e-6, history_tokens="64", **layer),
    ]
    found = section(page(tmp_path / "p", tables), "Do operators add up?")
    assert cells(found, "prefill layer, all 132 SMs")[1:4] == ["1", "1.10", "1.10"]


def test_eager_steps_are_matched_with_their_graph(tmp_path: Path) -> None:
    shape = {
        "kind": "decode_step",
        "m": 1,
        "decode_batch": 1,
        "context_sum": 512,
        "context_mean": 512,
        "sms": SMS,
    }
    rows = [
        timed("steps", 5e-3, point="a", **shape),
        timed("steps", 6e-3, point="a", launch="eager", host_s=5.9e-3, **shape),
    ]
    found = section(page(tmp_path / "p", {"steps": rows}), "Whole steps: graph and eager")
    assert cells(found, "decode step 1 × 512 tokens")[1:5] == ["5.00", "6.00", "1.20", "5.90"]
    assert "in 1 of 1 steps" in found


def test_staircase_names_edges_and_drops(tmp_path: Path) -> None:
    times = {64: 10e-6, 65: 13e-6, 128: 13e-6, 256: 10e-6}
    rows = [
        timed("gemm", t, label="qkv", m=m, n=8, k=4, sms=SMS, flops=1e9, bytes=1e8) for m, t in times.items()
    ]
    found = section(page(tmp_path / "p", {"gemm": rows}), "The GEMM staircase")
    assert "in 1 of 3 neighbouring pairs" in found
    assert "| layer | 64 → 65 |" in found
    assert cells(found, "qkv")[1] == "1.30"
    assert cells(found, "qkv | 128")[2:6] == ["13.0", "256", "10.0", "1.30"]


def test_overlap_of_a_staggered_start_gives_its_rate(tmp_path: Path) -> None:
    # alone 10 ms; from 4 ms on everything takes twice as long: 4 + 2 * 6 = 16 ms
    row_ = pair(1.0, 1.0, 16)[0]
    times = {
        "sweep": "stagger",
        "time_s": 16e-3,
        "alone_s": 10e-3,
        "min_s": 16e-3,
        "max_s": 16e-3,
        "layers": 8,
    }
    row_ = {**row_, **times, "neighbour_start_s": 4e-3, "neighbour_end_s": 30e-3}
    found = section(page(tmp_path / "p", {"stagger": [row_]}), "Staggered starts")
    assert cells(found, "16 / 116")[3:] == ["40 %", "120 %", "1.60", "0.0 %", "2.00"]


def test_settling_finds_the_time_constant() -> None:
    seconds = np.arange(0.0, 30.0, 0.25)
    found = settle(seconds, 50.0 - 5.0 * np.exp(-seconds / 3.0))
    assert found is not None
    assert found.tau_s == pytest.approx(3.0, rel=0.03)
    assert found.end == pytest.approx(50.0, rel=1e-3)
    assert found.rise == pytest.approx(5.0, rel=0.02)
    assert found.explained > 0.999
    noise = settle(seconds, np.random.default_rng(1).normal(50, 1, len(seconds)))
    assert noise is not None
    assert noise.explained < 0.5
    assert settle(seconds, np.full(len(seconds), 3.0)) is None


def test_hot_run_compares_its_first_second_with_its_last_ten(tmp_path: Path) -> None:
    shape = {"kind": "prefill_step", "m": 2048, "q_tokens": "2048", "history_tokens": "0", "point": "a"}
    rows = [
        timed(
            "hot",
            40e-3 if t < 1 else 44e-3,
            elapsed_s=t,
            sm_mhz=1980 if t < 1 else 1500,
            power_w=690,
            **shape,
        )
        for t in np.arange(0.0, 30.0, 0.5)
    ]
    found = section(page(tmp_path / "p", {"hot": rows}), "Clock and power in long hot runs")
    assert cells(found, "prefill step 2048 on 0")[2:10] == [
        "40.0", "44.0", "+10.0 %", "44.00–44.00", "1980", "1500", "690", "-1.00",
    ]  # fmt: skip


def test_proof_counts_what_was_seen(tmp_path: Path) -> None:
    rows = {"stream_read": [timed("stream_read", 1e-3, sms=SMS, bytes=GIB)]}
    proofs = [
        {"partition": "all", "sms": SMS, "nsmid": SMS},
        {"partition": "8/124", "sms": 8, "seen": [0, 1, 2, 3, 4, 5, 6, 9], "shared": 0},
        {"partition": "16/116", "sms": 16, "seen": list(range(15)), "shared": 1},
    ]
    found = section(page(tmp_path / "p", rows, partitions=proofs), "Proof of the partitions by SM ids")
    assert "1 of 2 splits ran on exactly the SMs they were promised" in found
    assert "shared 1 SMs" in found
    assert cells(found, "8/124")[1] == "0–6, 9"
    assert cells(found, "16/116")[2:4] == ["16", "15"]


def test_skipped_points_are_listed_with_their_reason(tmp_path: Path) -> None:
    rows = [timed("gemm", 1e-3, m=1, sms=SMS), row("gemm", kind="gemm", m=1, sms=4, skip="it | broke `here`")]
    found = section(page(tmp_path / "p", {"gemm": rows}), "What was measured")
    assert "| `it / broke here` | gemm | 4 | 1 |" in found


def test_errors_of_fits_are_shown_once_there_are_some(tmp_path: Path) -> None:
    rows = {"stream_read": [timed("stream_read", 1e-3, sms=SMS, bytes=GIB)]}
    folder = tmp_path / "p"
    assert "How well the fitted curves predict" not in page(folder, rows)
    leaf = {"points": 12, "median": 0.031, "p95": 0.2, "under_20us": {"points": 3, "median": 0.5}}
    about = {"errors": {"gemm": {"rows": leaf, "random": {"points": 0}}}}
    (folder / "profile.yaml").write_text(yaml.safe_dump({"about": about}))
    found = section(render(load(folder), "f", "p.md")[0], "How well the fitted curves predict")
    assert cells(found, "errors / gemm / rows")[1:] == ["12", "3.1 %", "–", "20.0 %", "–", "–"]
    assert "50.0 %" not in found


def test_no_profile_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SimctlError, match=r"run\.yaml is not readable"):
        load(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_yaml()))
    with pytest.raises(SimctlError, match="calibrate first"):
        load(tmp_path)
    (tmp_path / "measurements").mkdir()
    (tmp_path / "measurements" / "gemm.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(SimctlError, match=r"gemm\.csv\.gz is not a readable table"):
        load(tmp_path)
    assert main([str(tmp_path), "-o", str(tmp_path / "out" / "page.md")]) == 2
    assert "gemm.csv.gz" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_writing_again_gives_the_same_bytes_and_drops_stale_pictures(tmp_path: Path) -> None:
    made = profile(tmp_path / "p", {"corun": [*pair(1.1, 1.2, 64), *pair(1.2, 1.1, 16)]})
    out = tmp_path / "docs" / "page.md"
    first = {path: path.read_bytes() for path in write(made, "p", out)}
    stale = out.parent / "img" / "page" / "old.svg"
    stale.write_text("<svg/>")
    again = {path: path.read_bytes() for path in write(load(tmp_path / "p"), "p", out)}
    assert first == again
    assert not stale.exists()
    assert {path.name for path in first} == {"page.md", "side-by-side.svg"}


@pytest.mark.parametrize("run", COMMITTED, ids=lambda path: path.parent.name)
def test_every_section_of_a_committed_profile(run: Path) -> None:
    text, pictures = render(load(run.parent), "f", "docs/x.md")
    titles = re.findall(r"^## (.*)$", text, re.M)
    assert len(set(titles)) == len(titles) >= 15
    assert all(f"](#{_anchor(title)})" in text for title in titles)
    assert set(re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)) == set(pictures)
    assert "nan" not in re.sub(r"`[^`]*`", "", text).lower().split()
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_the_committed_page_is_what_the_data_gives() -> None:
    """Regenerate with: python -m calib.report calib/profiles/h200-sxm -o docs/h200.md"""
    source, out = "calib/profiles/h200-sxm", Path("docs/h200.md")
    text, pictures = render(load(ROOT / source), source, out.as_posix())
    why = f"docs/h200.md is not of these measurements: python -m calib.report {source} -o {out}"
    assert (ROOT / out).read_text(encoding="utf-8") == text, why
    held = {f"img/h200/{p.name}": p.read_text() for p in (ROOT / "docs/img/h200").glob("*.svg")}
    assert held == pictures, why


def mixed(point: str, variant: str, time_s: float, **shape: Any) -> dict[str, Any]:
    made = {"q_tokens": "1024", "history_tokens": "4096", "decode_batch": 32, "context_sum": 32 * 4096}
    made |= {"context_mean": 4096.0, "model": "llama-3.1-8b", "sms": SMS, **shape}
    return timed(
        "fused", time_s, kind="fused_attention", attention=variant, label=variant, point=point, **made
    )


def fused_rows(speeds: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Shapes whose POD is so much faster than FA2-serial and FA3-serial."""
    found = []
    for i, (two, three) in enumerate(speeds):
        times = {"serial_fa2": two * 1e-4, "serial_fa3": three * 1e-4, "pod": 1e-4, "batch_pod": 2e-4}
        found += [
            mixed(str(i), variant, time_s, decode_batch=i + 1, context_sum=(i + 1) * 4096)
            for variant, time_s in times.items()
        ]
    return found


def test_pod_is_counted_against_both_serial_ways(tmp_path: Path) -> None:
    rows = fused_rows([(1.2, 0.9), (1.1, 0.8), (0.9, 1.5), (1.4, 0.7)])
    text = section(page(tmp_path, {"fused": rows}), "Fused attention: POD against separate kernels")
    assert (
        "faster than separate FA2 kernels in 75 % of 4 shapes (median 1.15×, most 1.40×, least 0.90×)" in text
    )
    assert "only in 25 % (median 0.85×, most 1.50×, least 0.70×)" in text
    assert cells(text, "POD |")[2:6] == ["75 %", "0.93", "1.15", "1.37"]
    assert cells(text, "POD over FA3-serial, largest win")[1:4] == ["1.50", "1024 on 4096", "3 × 4096"]
    assert cells(text, "BatchPOD |")[2] == "0 %"


def test_attentions_share_is_that_of_the_layer_of_the_same_shape(tmp_path: Path) -> None:
    rows = []
    for context, layer, attention in ((4096, 1e-3, 4e-4), (32768, 2e-3, 1.5e-3)):
        shape = {"decode_batch": 16, "context_mean": float(context), "sms": SMS}
        rows.append(
            timed("attention_share", layer, kind="mixed_layer", attention="fa3", label="fa3", **shape)
        )
        rows.append(
            timed(
                "attention_share",
                attention,
                kind="fused_attention",
                label="serial_fa3",
                attention="x",
                **shape,
            )
        )
    text = section(page(tmp_path, {"attention_share": rows}), "Attention's share of a mixed layer")
    assert "40 % to 40 % of a mixed layer at contexts of 4096 and 75 % to 75 % at 32768" in text
    assert cells(text, "FA3 | 16 × 32768")[-1] == "75 %"


def test_what_was_not_built_is_no_refusal(tmp_path: Path) -> None:
    asked = [
        {"label": "a", "attention": "pod", "skip": "MissingJITCacheError: not here"},
        {"label": "b", "attention": "pod", "skip": "ValueError: no"},
        {"label": "c", "attention": "batch_pod", "error": 0.9},
        {"label": "d", "attention": "batch_pod", "error": 0.001},
    ]
    rows = [row("fused_limits", sms=SMS, **one) for one in asked]
    text = section(page(tmp_path, {"fused_limits": rows}), "What the fused wrappers refuse")
    assert "2 of 3 requests were refused or answered wrongly" in text
    assert "| a |" not in text


def test_hot_is_compared_with_rested(tmp_path: Path) -> None:
    shape = {"kind": "gemm", "label": "down", "m": 512, "sms": SMS, "point": "p"}
    rows = [
        timed("power", 1e-3, elapsed_s=0.0, power_w=300.0, sm_mhz=1980, **shape),
        timed(
            "power",
            1.25e-3,
            elapsed_s=1.6,
            power_w=690.0,
            sm_mhz=1400,
            energy_j=0.8625,
            sm_active=0.9,
            **shape,
        ),
    ]
    text = section(page(tmp_path, {"power": rows}), "Watts and clock by operator")
    assert "1 of 1 kernels and steps run at the power limit" in text
    assert cells(text, "gemm down m 512")[1:8] == ["132", "1.25", "1.25", "1400", "690", "862", "90 %"]


def test_rules_are_scored_against_both_kinds_alone(tmp_path: Path) -> None:
    mix = {"compute_ctas": 100, "bandwidth_ctas": 50, "compute_work": 9, "bandwidth_work": 8}
    mix |= {"spread": 0.0, "ctas_per_sm": 2, "seed": 3, "sms": SMS, "kind": "tickets"}
    spans = {
        "proportional": 2e-4,
        "half": 2.5e-4,
        "cta_parallel": 3e-4,
        "intra_thread": 6e-4,
        "horizontal": 4e-4,
    }
    rows = [timed("tickets", s, span_s=s, label=rule, **mix) for rule, s in spans.items()]
    rows.append(timed("tickets", 2e-4, span_s=2e-4, label="compute_alone", **{**mix, "bandwidth_ctas": 0}))
    rows.append(timed("tickets", 1e-4, span_s=1e-4, label="bandwidth_alone", **{**mix, "compute_ctas": 0}))
    rows.append(timed("tickets", 1e-4, span_s=1e-4, label="half", **{**mix, "sms": 8}))
    text = section(page(tmp_path, {"tickets": rows}), "Synthetic CTAs by scheduling rule")
    assert cells(text, "proportional")[1:3] == ["1", "1.50"]
    assert cells(text, "intra_thread")[2] == "0.50"
    assert "on 8 SMs" in text


def test_sweeps_of_another_card_are_named(tmp_path: Path) -> None:
    state = {"points": 1, "measured": 1, "rows": 1, "skipped": 0}
    sweeps = {"gemm": state, "fused": {**state, "card": "abcd1234"}}
    rows = {"fused": fused_rows([(1.2, 0.9)])}
    text = page(tmp_path, rows, sweeps=sweeps)
    assert (
        "Other cards of the same kind, by the start of their uuid, were used for fused on one (abcd1234)."
        in text
    )


def test_what_watts_follow_from_and_how_well(tmp_path: Path) -> None:
    leaf = {"points": 4, "median": 0.02, "p95": 0.06, "bias": -0.01}
    power = {"held_out": {"all": leaf, "mixed_step": leaf}, "clock": {"all": leaf, "mixed_step": leaf}}
    about = {"errors": {"power": {**power, "fitted": {"all": leaf}}}}
    energy = {
        "idle_w": 122.0, "active_w": 34.0, "j_per_flop": 1e-12, "more_per_prefill_flop": 1e-13,
        "more_per_decode_flop": 5e-12, "j_per_byte": 9e-11, "more_per_element_byte": 2e-11, "clock_power": 1.6,
        "slowest_clock": 0.7, "cap_w": 690.0, "react_s": 0.04, "label": "made up",
    }  # fmt: skip
    shape = {"kind": "decode_step", "decode_batch": 8, "m": 8, "layers": 32, "context_sum": 8000, "sms": SMS}
    duty = [
        timed("power_duty", 5e-3, gap_s=gap, power_w=watts, sm_mhz=1980, **shape)
        for gap, watts in ((1e-5, 480.0), (5e-3, 300.0), (0.3, 127.0))
    ]
    steps = [
        timed("clock_step", 1e-3 * (1.2 if t > 0.05 and phase else 1.0), elapsed_s=t, phase=phase, point="a",
              power_w=700, sm_mhz=1600, kind="gemm", m=2048, sms=SMS)
        for phase in (0, 1) for t in np.arange(0.005, 0.4, 0.01)
    ]  # fmt: skip
    turns = [
        timed(
            "clock_step",
            1e-3,
            elapsed_s=0.02,
            phase=3,
            point="b",
            kind=kind,
            power_w=690,
            sm_mhz=1700,
            sms=SMS,
        )
        for kind in ("prefill_layer", "decode_step")
    ]
    folder = tmp_path / "p"
    page(folder, {"power_duty": duty, "clock_step": steps + turns})
    (folder / "profile.yaml").write_text(yaml.safe_dump({"about": about, "energy": energy}))
    run = yaml.safe_load((folder / "run.yaml").read_text())
    run["gpu"]["name"] = "NVIDIA H200"
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    text = render(load(folder), "p", "page.md")[0]
    law = section(text, "What watts follow from")
    assert "watts of 4 runs" in law
    assert "1.00 pJ for a FLOP" in law
    assert cells(law, "mixed step")[1:4] == ["4", "2.0 %", "6.0 %"]
    paused = section(text, "Pauses of the host")
    assert "127 W at pauses of 300 ms" in paused
    assert cells(paused, "decode step × 8, 32 layers")[3:6] == ["50 %", "300", "301"]
    followed = section(text, "How fast the clock follows")
    assert "it needs about 40.0 ms" in followed
    assert cells(followed, "20 / 20")[1:4] == ["1000", "1000", "690"]
