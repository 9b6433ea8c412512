"""`simctl profile`: what is listed and shown, answers row by row, exit codes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sim.cli import main
from sim.cli.profile import profile
from sim.cost import load_cost
from sim.cost.fused_ctas import FusedShape
from sim.cost.gpu import load_gpu
from sim.cost.profile import find_folder, load_folder
from sim.cost.shapes import Launch

NAME = "h200-sxm"
COLUMNS = (
    *(
        "kind",
        "model",
        "m",
        "n",
        "k",
        "prefill_tokens",
        "history_tokens",
        "decode_contexts",
        "sms",
        "attention",
    ),
    *("launch", "neighbour_kind", "neighbour_prefill_tokens", "neighbour_decode_contexts", "neighbour_sms"),
)


def call(*arguments: str):
    return CliRunner().invoke(profile, list(arguments), catch_exceptions=False, standalone_mode=False)


def rows(tmp_path: Path, *given: dict) -> str:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(given)
    return str(path)


def answers(tmp_path: Path, *given: dict) -> list[dict]:
    return json.loads(call("predict", NAME, "--points", rows(tmp_path, *given), "--json").stdout)


def test_the_built_in_profile_is_listed():
    found = json.loads(call("list", "--json").stdout)
    assert NAME in {one["name"] for one in found}
    assert NAME in call("list").stdout


def test_show_has_label_points_and_held_out_errors_of_every_operator():
    found = json.loads(call("show", NAME, "--json").stdout)
    names = {
        "gemm",
        "lm_head",
        "prefill_attention",
        "decode_attention",
        "norm",
        "rope",
        "activation",
        "kv_write",
    }
    names |= {"prefill_attention/fa3", "prefill_attention/fa2", "sampling", "decode_step"}
    names |= {
        "fused_attention",
        "fused_attention/pod",
        "fused_attention/batch_pod",
        "fused_attention/streams",
    }
    assert names <= set(found["operators"])
    for one in [*found["operators"].values(), *found["contention"].values()]:
        assert {"label", "points", "median_error", "p95_error"} <= set(one)
        assert one["points"] > 0
        assert 0 <= one["median_error"] <= one["p95_error"] < 1
    assert "disjoint/prefill" in found["contention"]
    text = call("show", NAME).stdout
    assert "gemm" in text
    assert "HELD OUT" in text


def test_the_page_works_offline(tmp_path):
    page = tmp_path / "page.html"
    call("show", NAME, "-o", str(page))
    text = page.read_text()
    assert "<h2>gemm</h2>" in text
    assert "prefill_attention/fa3" in text
    assert "<script src=" not in text
    assert call("show", NAME, "-o", str(page)).exit_code == 0
    assert page.read_text() == text


def test_every_row_is_answered_in_order(tmp_path):
    found = answers(
        tmp_path,
        {"kind": "gemm", "m": 2048, "n": 28672, "k": 4096},
        {"kind": "fused_attention", "prefill_tokens": 512, "decode_contexts": ";".join(["1024"] * 8)},
        {"kind": "decode_attention", "decode_contexts": "1024", "attention": "pod"},
        {
            "kind": "prefill_attention",
            "prefill_tokens": "512;512",
            "history_tokens": "0;1024",
            "attention": "fa2",
        },
        {"kind": "decode_attention", "decode_contexts": "1024;2048", "sms": 64},
        {"kind": "step", "prefill_tokens": 2048, "history_tokens": 0},
        {"kind": "step", "decode_contexts": "512;512", "attention": "pod"},
    )
    assert [one["gpu_s"] is None for one in found] == [False, False, True, False, False, False, False]
    assert all({"gpu_s", "step_s", "sd_s", "label", "flags"} == set(one) for one in found)
    for one in found:
        if one["gpu_s"] is None:
            assert one["flags"]
            assert one["step_s"] is None
            assert one["label"] is None
        else:
            assert 0 < one["sd_s"] < one["gpu_s"] <= one["step_s"]
            assert one["label"] == "measured"
            assert one["flags"] == []


def test_fused_attention_is_the_surface_times_the_serial_kernels(tmp_path):
    contexts = ";".join(["4096"] * 64)
    mixed = {
        "kind": "fused_attention",
        "prefill_tokens": 1024,
        "history_tokens": 4096,
        "decode_contexts": contexts,
    }
    pod, two, three, several = answers(
        tmp_path,
        mixed,
        {**mixed, "attention": "fa2"},
        {**mixed, "attention": "fa3"},
        {**mixed, "prefill_tokens": "512;512", "history_tokens": "4096;4096", "attention": "pod"},
    )
    prefill, decode = answers(
        tmp_path,
        {**mixed, "kind": "prefill_attention", "attention": "fa2"},
        {**mixed, "kind": "decode_attention"},
    )
    assert two["gpu_s"] == pytest.approx(prefill["gpu_s"] + decode["gpu_s"])
    surface = load_folder(find_folder(NAME), load_gpu(NAME)).fused
    shape = FusedShape(1024, 4096, (4096,) * 64)
    assert pod["gpu_s"] == pytest.approx(float(surface.seconds("pod", (32, 8, 128), [shape])[0]))
    # on Hopper the fused FA2 kernel beats separate FA2 kernels, and not FA3 where prefill is most of the work
    assert pod["gpu_s"] < two["gpu_s"]
    assert three["gpu_s"] < two["gpu_s"]
    assert several["flags"] == ["fused_attention: several chunks are taken for one"]
    assert answers(tmp_path, {**mixed, "sms": 64})[0]["gpu_s"] is None


def test_a_mixed_step_with_pod_differs_by_its_attention_alone(tmp_path):
    step = {
        "kind": "step",
        "prefill_tokens": 512,
        "history_tokens": 8192,
        "decode_contexts": ";".join(["4096"] * 96),
    }
    pod, two = answers(tmp_path, {**step, "attention": "pod"}, {**step, "attention": "fa2"})
    assert 0.5 * two["gpu_s"] < pod["gpu_s"] < two["gpu_s"]
    assert pod["label"] == "measured"
    plain, same = answers(
        tmp_path, *({"kind": "step", "decode_contexts": "512;512", **a} for a in ({}, {"attention": "pod"}))
    )
    assert plain["gpu_s"] == same["gpu_s"]  # nothing to fuse


def test_a_step_is_what_the_cost_model_prices(tmp_path):
    (found,) = answers(
        tmp_path, {"kind": "step", "decode_contexts": ";".join(["1024"] * 32), "launch": "graph"}
    )
    price = load_cost("llama-3.1-8b", NAME, NAME).solo(Launch((), 32, 32 * 1024, 1024, graph=True))
    assert found["gpu_s"] == pytest.approx(price.gpu_s, rel=1e-9)


def test_a_neighbour_slows_a_step_and_fewer_sms_do(tmp_path):
    beside = {
        "neighbour_kind": "step",
        "neighbour_decode_contexts": ";".join(["2048"] * 64),
        "neighbour_sms": 68,
    }
    step = {"kind": "step", "prefill_tokens": 2048}
    whole, part, slowed = answers(tmp_path, step, {**step, "sms": 64}, {**step, "sms": 64, **beside})
    assert whole["gpu_s"] < part["gpu_s"] < slowed["gpu_s"] < 2 * part["gpu_s"]
    assert slowed["sd_s"] > part["sd_s"]


def test_eager_launches_wait_for_the_host(tmp_path):
    graph, eager = answers(
        tmp_path,
        *({"kind": "step", "decode_contexts": "512", "launch": launch} for launch in ("graph", "eager")),
    )
    assert graph["gpu_s"] == eager["gpu_s"]
    assert eager["step_s"] > graph["step_s"]


def test_foreign_shapes_are_answered_flagged_and_refused_when_strict(tmp_path):
    foreign = {"kind": "gemm", "m": 64, "n": 5000, "k": 5000}
    (one,) = answers(tmp_path, foreign)
    assert one["label"].startswith(f"extrapolated from {NAME} by ")
    assert one["flags"][0].startswith("gemm: outside m 1-")
    path = rows(tmp_path, foreign)
    with pytest.raises(SystemExit) as left:
        main(["profile", "predict", NAME, "--points", path, "--strict"])
    assert left.value.code == 2
    good = rows(tmp_path, {"kind": "gemm", "m": 64, "n": 4096, "k": 4096})
    with pytest.raises(SystemExit) as left:
        main(["profile", "predict", NAME, "--points", good, "--strict"])
    assert left.value.code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind,m\ngem,1\n", "row 1: kind 'gem' is none of gemm"),
        ("kind,m\ngemm,many\n", "row 1: m 'many' is no list of whole numbers"),
        ("kind,m\ngemm,1.5\n", "row 1: m '1.5' is no list of whole numbers"),
        ("kind,m\ngemm,nan\n", "row 1: m 'nan' is no list of whole numbers"),
        ("kind,m\ngemm,64\n", "row 1: a gemm needs m, n and k"),
        ("kind,mm\ngemm,1\n", "unknown column 'mm'"),
        ("m\n1\n", "no column 'kind'"),
        ("kind,m,m,n,k\ngemm,1,2,3,4\n", "column 'm' is there twice"),
        ("kind,model,m\nmoe,qwen3,1\n", "row 1: Unknown model 'qwen3'"),
        ("kind,tp,prefill_tokens\nstep,1,5\nstep,3,5\n", "row 2: tp = 3 does not divide"),
        ("kind,attention\nstep,fa4\n", "attention 'fa4' is none of fa2, fa3, pod"),
        ("kind,prefill_tokens,history_tokens\nstep,1;2,3\n", "2 prefill_tokens and 1 history_tokens"),
        ("kind\nstep\n", "a step needs prefill_tokens or decode_contexts"),
    ],
)
def test_mistakes_name_the_row(tmp_path, capsys, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(SystemExit) as left:
        main(["profile", "predict", NAME, "--points", str(path)])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_profile_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as left:
        main(["profile", "show", "h200-smx"])
    assert left.value.code == 2
    assert "Did you mean 'h200-sxm'?" in capsys.readouterr().err


def test_diff_against_the_data_sheet():
    found = {row["operator"]: row for row in json.loads(call("diff", NAME, "spec", "--json").stdout)}
    assert {"gemm/gate_up", "prefill_attention", "decode_attention", "decode_step"} <= set(found)
    assert 0.5 < found["decode_step"]["median"] < 2
    same = json.loads(call("diff", NAME, NAME, "--json").stdout)
    assert all(row["median"] == 1.0 == row["highest"] for row in same)


def test_check_says_what_is_different_and_leaves_with_one(monkeypatch):
    import calib.fit.check as module

    findings = [module.Finding("gemm / rows, p95", 0.1, 0.1), module.Finding("norm / rows, p95", 0.1, 0.2)]
    monkeypatch.setattr(module, "check", lambda folder, tick: findings)
    found = CliRunner().invoke(profile, ["check", NAME], standalone_mode=False)
    assert found.return_value == 1
    assert "norm / rows, p95: stated 0.1, found 0.2" in found.stdout
    monkeypatch.setattr(module, "check", lambda folder, tick: findings[:1])
    assert CliRunner().invoke(profile, ["check", NAME], standalone_mode=False).return_value == 0


@pytest.mark.slow
def test_the_committed_error_table_recomputes():
    found = CliRunner().invoke(profile, ["check", NAME], standalone_mode=False)
    assert found.return_value == 0, found.stdout
