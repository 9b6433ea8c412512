"""The prediction that measured layers and steps of a tensor-parallel group are compared with."""

from __future__ import annotations

from pathlib import Path

import fake_collectives as fake
import pytest

from sim.cost import load_cost
from sim.cost.gpu import load_gpu
from sim.cost.parallel_checks import predicted
from sim.cost.profile import CurveProfile, load_folder
from sim.cost.shapes import Launch
from sim.errors import SimctlError

MODEL, ROW = "llama-3.1-70b", 8192 * 2
DECODE, PROMPT = Launch((), 32, 32 * 1024, 1024), Launch(((2048, 0),))


@pytest.fixture
def profile(tmp_path: Path) -> CurveProfile:
    return load_folder(fake.folder(tmp_path), load_gpu("h200-sxm"))


def test_a_layer_without_its_joints_is_a_layer_with_them_less_two_all_reduces(profile: CurveProfile) -> None:
    for launch, tokens in ((DECODE, 32), (PROMPT, 2048)):
        layer = Launch(
            launch.chunks, launch.decode_batch, launch.decode_context_sum, launch.decode_context_max, (1, 2)
        )
        joined, apart = (predicted(profile, MODEL, 2, layer, joined=how) for how in (True, False))
        # under a graph whatever the size
        reduces = 2 * (fake.LATENCY_S + tokens * ROW / fake.RATE)
        assert joined.collectives_s == pytest.approx(reduces, rel=1e-9)
        assert apart.collectives_s == 0
        assert joined.seconds - apart.seconds == pytest.approx(reduces, rel=1e-9)
        assert not any(name.startswith("all") for name in apart.labels)
        assert joined.labels["allreduce/ffn"] == "measured"


def test_a_step_is_what_a_run_pays_for_a_captured_size(profile: CurveProfile, tmp_path: Path) -> None:
    cost = load_cost(MODEL, "h200-sxm", str(tmp_path), {"tp": 2})
    step = predicted(profile, MODEL, 2, DECODE)
    assert step.seconds == pytest.approx(
        cost.solo(Launch((), 32, 32 * 1024, 1024, graph=True)).gpu_s, rel=1e-9
    )
    assert step.collectives_s == pytest.approx(
        161 * (fake.LATENCY_S + 32 * ROW / fake.RATE) + fake.LATENCY_S + 32 * 128256 * 2 / fake.RATE, rel=1e-9
    )


def test_eager_and_captured_steps_differ_by_the_collectives_and_other_sizes_are_not_padded(
    profile: CurveProfile,
) -> None:
    odd = Launch((), 33, 33 * 1024, 1024)
    eager, graph = (predicted(profile, MODEL, 2, odd, mode=mode) for mode in ("eager", "graph"))
    assert eager.seconds - graph.seconds == pytest.approx(162 * (fake.EAGER_S - fake.LATENCY_S), rel=1e-9)
    ring = 161 * (fake.LATENCY_S + 40 * ROW / fake.RATE)  # the grid's next size
    assert graph.collectives_s == pytest.approx(ring + fake.LATENCY_S + 40 * 128256 * 2 / fake.RATE, rel=1e-9)


def test_an_eager_step_waits_for_its_host(profile: CurveProfile) -> None:
    """Layers x the host's launches, two collectives each, where the GPU is sooner done."""
    terms = profile.host
    small = predicted(profile, MODEL, 2, Launch((), 1, 64, 64), mode="eager")
    host = 80 * (terms.eager_layer_s + 2 * fake.HOST_S) + terms.eager_base_s + 2 * fake.HOST_S
    assert small.step_s == pytest.approx(host, rel=1e-9)
    assert small.step_s > small.seconds
    layer = predicted(profile, MODEL, 2, Launch((), 1, 64, 64, (1, 2)), mode="eager")
    assert layer.step_s == pytest.approx(terms.eager_layer_s + 2 * fake.HOST_S, rel=1e-9)
    for long in (predicted(profile, MODEL, 2, PROMPT, mode="eager"), predicted(profile, MODEL, 2, DECODE)):
        assert long.step_s == long.seconds


def test_the_back_end_of_attention_is_chosen_and_impossible_cuts_are_refused() -> None:
    folder = Path(load_folder.__code__.co_filename).parents[2] / "calib" / "profiles" / "h200-sxm"
    profile = load_folder(folder, load_gpu("h200-sxm"))
    long = Launch(((8192, 0),), layers=(1, 2))
    fa2, fa3 = (predicted(profile, MODEL, 2, long, attention=name) for name in ("fa2", "fa3"))
    assert fa2.seconds > 1.05 * fa3.seconds
    with pytest.raises(SimctlError, match="tp = 3 does not divide"):
        predicted(profile, MODEL, 3, DECODE)
