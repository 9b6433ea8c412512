"""Terms of fused kernels: found again from times that they made, files, look-ups, and the shipped ones on the H200."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib.fit import fused, fused_terms
from calib.fit.fused import fit_fused, recheck_fused, score_fused
from calib.fit.fused_terms import START, chosen, fit_terms
from calib.rows import row, write_table
from sim.cost.fused_ctas import NAMES, FusedShape, fused_s
from sim.cost.fused_ctas import fused_terms as read_terms
from sim.cost.fused_table import AXES, SHAPE, cells, looked_up, packed, shape_of, unpacked
from sim.cost.gpu import load_gpu
from sim.cost.measured_fused import load_fused
from sim.cost.profile import load_folder
from sim.errors import SimctlError

H200, MODEL, HEADS = load_gpu("h200-sxm"), "llama-3.1-8b", (32, 8, 128)
PROFILE = Path(str(files("calib").joinpath("profiles/h200-sxm")))
TRUE = replace(START, flops=330e12, bandwidth=4.1e12, launch_s=9e-6, merge_row_s=2e-9, beside=0.5)


def shapes(count: int, seed: int) -> list[FusedShape]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        q, h = int(2 ** rng.uniform(6, 9.5)), int(2 ** rng.uniform(8, 12))
        made.append(FusedShape(q, h, (int(2 ** rng.uniform(9, 12)),) * int(2 ** rng.uniform(2, 5.5))))
    return made


def rows(made: list[FusedShape], sweep: str, model: str = MODEL, heads: Any = HEADS) -> list[dict[str, Any]]:
    """Rows of both variants whose times are those of `TRUE`."""
    found = []
    for variant in ("pod", "batch_pod"):
        for i, (one, time_s) in enumerate(zip(made, fused_s(variant, TRUE, made, heads, 132), strict=True)):
            columns = {
                "q_tokens": str(one.q),
                "history_tokens": str(one.h),
                "decode_batch": len(one.contexts),
            }
            columns |= {"context_sum": sum(one.contexts), "attention": variant, "point": f"{sweep}{model}{i}"}
            found.append(
                row(
                    sweep,
                    kind="fused_attention",
                    model=model,
                    time_s=time_s,
                    launch="graph",
                    sms=132,
                    **columns,
                )
            )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("profile")
    (made / "measurements").mkdir()
    for sweep, count, seed in (("fused", 64, 1), ("fused_scatter", 12, 2), ("fused_random", 6, 3)):
        write_table(rows(shapes(count, seed), sweep), made / "measurements" / f"{sweep}.csv.gz")
    other = rows(shapes(6, 4), "fused_heads", "llama-2-7b", (32, 32, 128))
    write_table(other, made / "measurements" / "fused_heads.csv.gz")
    return made


def test_terms_are_found_again_and_hold_for_other_heads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_terms, "FITTED", 16)
    monkeypatch.setattr(fused_terms, "MOST_TURNS", 6)
    monkeypatch.setattr(fused, "grid_of", lambda variant, terms, heads, sms: np.full(SHAPE, 1e-4))
    surface, record = fit_fused(folder, MODEL, H200)
    assert surface is not None
    assert set(surface.variants) == {"pod", "batch_pod"}
    assert surface.measured == ((32, 8, 128), (32, 32, 128))
    made = shapes(40, 8)
    for variant in ("pod", "batch_pod"):
        assert record[variant]["fitted"] == 28  # 16 of the grid, all 12 others
        assert record[variant]["random"]["points"] == 48
        at_first = np.abs(
            fused_s(variant, START, made, HEADS, 132) / fused_s(variant, TRUE, made, HEADS, 132) - 1
        )
        assert record[variant]["random"]["median"] < 0.5 * np.median(at_first)
        assert record[variant]["random"]["median"] < 0.06
        assert record[variant]["heads"]["llama-2-7b"]["median"] < 0.06
        scored = score_fused(folder, surface, MODEL)
        assert scored[variant]["median"] < 0.06
        assert scored[f"{variant}, mean context"] == scored[variant]  # contexts are alike
    assert recheck_fused(folder, MODEL, H200, record, surface) == record
    path = folder / "fused.json"
    data = json.loads(json.dumps(surface.as_data()))
    path.write_text(json.dumps(data))
    loaded = load_fused(path, "measured")
    assert {at: one.terms for at, one in loaded.ctas.items()} == {
        at: one.terms for at, one in surface.ctas.items()
    }
    assert loaded.sigma == pytest.approx(surface.sigma, abs=1e-5)
    assert loaded.answers("pod", (64, 4, 128))
    assert not loaded.answers("pod", (32, 8, 64))
    assert loaded.label_of("pod", (32, 32, 128)) == "measured"
    assert loaded.label_of("pod", (64, 4, 128)).startswith("extrapolated from other heads of 128")
    for broken in ({"terms": {"flops": 1.0}}, {"head_dim": "x"}):
        path.write_text(json.dumps({**data, "kernels": [{**data["kernels"][0], **broken}]}))
        with pytest.raises(SimctlError, match="lacks a part"):
            load_fused(path, "measured")


def test_an_outlier_bends_nothing() -> None:
    made = shapes(16, 5)
    seconds = fused_s("pod", TRUE, made, HEADS, 132)
    seconds[3] *= 3.0
    terms = fit_terms("pod", made, seconds, HEADS, 132, START)
    off = np.delete(fused_s("pod", terms, made, HEADS, 132) / seconds - 1, 3)
    assert np.median(np.abs(off)) < 0.02


def test_as_many_of_each_source_are_fitted() -> None:
    picked = chosen([0] * 300 + [1] * 70)
    assert (picked[:300].sum(), picked[300:].sum()) == (60, 60)
    assert (chosen([0] * 10)).all()


def test_terms_of_a_file() -> None:
    data = START.as_data()
    assert read_terms(data) == START
    assert tuple(data) == NAMES
    for broken in (
        {**data, "alone": 0.0},
        {**data, "more": 1.0},
        {k: v for k, v in data.items() if k != "alone"},
    ):
        with pytest.raises(ValueError, match="terms must be"):
            read_terms(broken)


def test_a_grid_is_met_at_its_knots_and_between_its_neighbours() -> None:
    rng = np.random.default_rng(6)
    grid = unpacked(packed(np.exp(rng.uniform(-10, -7, SHAPE))))
    np.testing.assert_allclose(looked_up(grid, *AXES), grid, rtol=1e-9)
    one = looked_up(grid, [90], [700], [10], [5000])
    assert one.shape == (1, 1, 1, 1)
    near = grid[0:2, 1:3, 2:4, 3:5]
    assert near.min() < one.item() < near.max()
    assert looked_up(grid, [1], [1], [1], [1]).item() == pytest.approx(grid[0, 0, 0, 0])
    every = list(cells())
    assert len(every) == np.prod(SHAPE)
    assert every[-1] == shape_of(*(axis[-1] for axis in AXES))
    with pytest.raises(ValueError, match="reshape"):
        unpacked([1, 2, 3])


@pytest.fixture(scope="module")
def shipped() -> Any:
    if not (PROFILE / "heldout").is_dir():
        pytest.skip("the profile of the H200 has no measurements")
    return load_folder(PROFILE, H200).fused


@pytest.mark.parametrize(
    ("where", "name", "median", "p95"),
    [
        ("second-machine", "pod", 0.05, 0.12),
        ("second-machine", "batch_pod", 0.05, 0.12),
        ("other-heads", "pod (llama-2-7b)", 0.05, 0.12),
        ("other-heads", "batch_pod (llama-2-7b)", 0.05, 0.12),
    ],
)
def test_random_shapes_of_another_card_are_met(
    shipped: Any, where: str, name: str, median: float, p95: float
) -> None:
    found = score_fused(PROFILE / "heldout" / where, shipped, MODEL)[name]
    assert found["points"] >= 27
    assert found["median"] < median
    assert found["p95"] < p95
