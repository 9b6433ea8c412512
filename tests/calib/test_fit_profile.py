"""From a calibration to a profile and back: what a fake device's profile prices, what its check finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from calib.analytic import expected_s
from calib.fake import FACTS, FakeLab
from calib.fit.__main__ import main as fit_command
from calib.fit.build import fit_run
from calib.fit.check import check
from calib.fit.randoms import held_out_folders
from calib.kernels import make
from calib.measure import QUICK
from calib.models import model_shape
from calib.run import Order, calibrate
from calib.sweeps import chosen_sweeps
from sim.cost import load_cost
from sim.cost.gpu import load_gpu
from sim.cost.profile import load_folder
from sim.cost.shapes import Launch
from sim.errors import SimctlError

SWEEPS = (
    *("gemm", "prefill_attention", "decode_attention", "norm"),
    *("prefill_layer", "decode_step", "steps", "host", "random"),
)
MODEL = model_shape("llama-3.1-8b")


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> Path:
    """A profile of the fake device, whose times are a known roofline with 1 % of noise."""
    folder = tmp_path_factory.mktemp("fake") / "fake-h200"
    lab = FakeLab(MODEL, QUICK, 0)
    calibrate(lab, Order(folder, chosen_sweeps(SWEEPS, 6, 0), time_limit_s=30.0))
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)
    fit_command([str(folder), "--gpu", "h200-sxm"], standalone_mode=False)
    return folder


@pytest.mark.parametrize(
    "point",
    [
        {"kind": "gemm", "role": "gate_up", "m": 700},
        {"kind": "gemm", "role": "o", "m": 48},
        {"kind": "prefill_attention", "q": [1500], "h": [3000], "attention": "fa3"},
        {"kind": "decode_attention", "contexts": [3000] * 40, "attention": "fa2"},
        {"kind": "norm", "m": 3000},
    ],
)
@pytest.mark.parametrize("sms", [132, 64])
def test_the_fake_devices_times_come_back_off_its_grid(profile, point, sms):
    kernel = make(MODEL, point)
    curves = load_folder(profile, load_gpu("h200-sxm")).curves
    cost = load_cost("llama-3.1-8b", "h200-sxm", profile=str(profile))
    operator, shape = _asked(cost, point)
    found = float(curves[operator].timing(shape, sms).seconds[0])
    assert found == pytest.approx(expected_s(kernel, FACTS, sms), rel=0.03)
    assert curves[operator].label == "measured"
    assert curves[operator].covered(shape, sms)


def _asked(cost, point):
    from sim.cost.operators import decode_shape, prefill_shape

    if point["kind"] == "gemm":
        name = f"gemm/{point['role']}"
        operator = next(one for one in cost.operators if one.name == name)
        return "gemm", operator.shape(np.array([point["m"]]))
    if point["kind"] == "norm":
        operator = next(one for one in cost.operators if one.name == "norm/input")
        return "norm", operator.shape(np.array([point["m"]]))
    if point["kind"] == "prefill_attention":
        return "prefill_attention", prefill_shape(cost.model, np.array(point["q"]), np.array(point["h"]))
    contexts = point["contexts"]
    shape = decode_shape(cost.model, np.array([len(contexts)]), np.array([float(sum(contexts))]))
    return "decode_attention", shape


def test_whole_steps_are_composed_as_the_fake_device_times_them(profile):
    """The fake times a step as one roofline over all of its work: far from its parts, which is what the terms hold."""
    cost = load_cost("llama-3.1-8b", "h200-sxm", profile=str(profile), kernels={"launch": "eager"})
    step = {"kind": "prefill_step", "q": [2048], "h": [0], "layers": 32, "attention": "fa3"}
    truth = expected_s(make(MODEL, step), FACTS, 132)
    assert cost.solo(Launch(((2048, 0),))).gpu_s == pytest.approx(truth, rel=0.05)
    contexts = [1024] * 64
    step = {"kind": "decode_step", "contexts": contexts, "layers": 32, "attention": "fa3"}
    truth = expected_s(make(MODEL, step), FACTS, 132)
    launch = Launch((), 64, sum(contexts), 1024, graph=True)
    assert cost.solo(launch).gpu_s == pytest.approx(truth, rel=0.1)


def test_the_price_tables_answer_as_solo_does(profile):
    from sim.cost import step

    cost = load_cost("llama-3.1-8b", "h200-sxm", profile=str(profile))
    P = cost.compile(max_tokens=2048, max_seqs=64, max_context=4096, partitions=(64,))
    batch = cost.solo(Launch((), 32, 32 * 1024, graph=True), 64)
    priced = (
        step.dense_s(P, 1, 32, True) + step.head_s(P, 1, 32) + step.decode_attention_s(P, 1, 32, 32 * 1024)
    )
    assert priced == pytest.approx(batch.gpu_s, rel=0.01)
    chunk = cost.solo(Launch(((512, 1024),)), 64)
    priced = step.dense_s(P, 1, 512, False) + step.head_s(P, 1, 1) + step.prefill_attention_s(P, 1, 512, 1024)
    assert priced == pytest.approx(chunk.gpu_s, rel=0.01)
    assert sum(part.seconds for part in batch.by_operator) == pytest.approx(batch.gpu_s)


def test_foreign_shapes_are_flagged_and_labelled(profile):
    cost = load_cost("llama-2-7b", "h200-sxm", profile=str(profile))
    labels = cost.provenance()
    assert labels["gemm/qkv"].startswith("extrapolated from fake-h200 by ")
    assert labels["decode_attention"].startswith("extrapolated from fake-h200 by ")
    flags = cost.solo(Launch(((512, 0),))).flags
    assert any(flag.startswith("gemm/qkv: outside m 1-") for flag in flags)
    assert load_cost("llama-3.1-8b", "h200-sxm", profile=str(profile)).solo(Launch(((512, 0),))).flags == ()


def test_another_gpu_is_refused(profile):
    with pytest.raises(SimctlError, match="is for h200-sxm, not for h100-sxm"):
        load_cost("llama-3.1-8b", "h100-sxm", profile=str(profile))
    with pytest.raises(SimctlError, match="Device 'Fake H200' is no built-in GPU"):
        fit_run(profile)
    with pytest.raises(SimctlError, match="a h20-sxm has 78 SMs, not 132"):
        fit_run(profile, "h20-sxm")


def test_the_check_recomputes_every_stated_error(profile):
    found = check(profile)
    assert len(found) > 80
    assert [one for one in found if not one.ok] == []


def test_the_check_finds_a_flattered_table_and_swapped_curves(profile, tmp_path):
    copy = tmp_path / "flattered"
    shutil.copytree(profile, copy)
    errors = json.loads((copy / "errors.json").read_text())
    record = errors["operators"]["norm"]
    record["errors"][record["method"]]["rows"]["p95"] /= 2
    (copy / "errors.json").write_text(json.dumps(errors))
    curves = (copy / "curves.json").read_text()
    (copy / "curves.json").write_text(curves.replace("measured", "measured") + "\n")
    wrong = [one.where for one in check(copy) if not one.ok]
    assert wrong == ["curves.json has the hash in profile.yaml", "norm / rows, p95"]
    (copy / "errors.json").unlink()
    with pytest.raises(SimctlError, match="nothing to recompute"):
        check(copy)


@pytest.mark.slow
def test_held_out_runs_are_found_and_scored_without_being_fitted(profile, tmp_path):
    copy = tmp_path / "fake-h200"
    shutil.copytree(profile, copy)
    lab = FakeLab(MODEL, QUICK, 99)
    other = copy / "heldout" / "other"
    calibrate(lab, Order(other, chosen_sweeps(("random",), 6, 99), seed=99, time_limit_s=45.0))
    assert list(held_out_folders(copy)) == ["same run", "run other"]
    fit_command([str(copy), "--gpu", "h200-sxm"], standalone_mode=False)
    assert (copy / "curves.json").read_bytes() == (profile / "curves.json").read_bytes()
    about = yaml.safe_load((copy / "profile.yaml").read_text())["about"]
    scored = about["errors"]["random_shapes"]["run other"]["operators"]
    assert scored["gemm"]["points"] == 6
    assert scored["gemm"]["median"] < 0.03
