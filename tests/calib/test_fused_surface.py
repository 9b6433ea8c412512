"""The surface of fused attention: fit and look-up on known ratios, files, and the answers made with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib.fit.fused import (
    fallbacks,
    fit_fused,
    gaussians,
    held_out,
    ratios,
    recheck_fused,
    rows_out,
    score_fused,
    shapes_of,
)
from calib.fit.points import read_rows
from calib.rows import row, write_table
from sim.cost.gpu import load_gpu
from sim.cost.measured_fused import coordinates, load_fused, stacked
from sim.errors import SimctlError

MODEL, H200 = "llama-3.1-8b", load_gpu("h200-sxm")


def known(q: float, h: float, batch: float, context: float) -> float:
    """A smooth ratio: fusing pays where the sides are alike."""
    balance = np.log2(q * (h + q / 2) / (batch * context * 300))
    return float(0.7 + 0.3 * np.tanh(abs(balance) / 3))


def rows(count: int, seed: int, sweep: str = "fused") -> list[dict[str, Any]]:
    rng, made = np.random.default_rng(seed), []
    for i in range(count):
        q, h = int(2 ** rng.integers(6, 13)), int(rng.choice([0, 1024, 4096, 16384]))
        batch, context = int(2 ** rng.integers(2, 9)), int(2 ** rng.integers(9, 15))
        serial = 1e-4 * (1 + q / 1000)
        times = {
            "serial_fa2": serial,
            "serial_fa3": 0.8 * serial,
            "streams": serial * known(q, h, batch, context),
        }
        for variant, time_s in times.items():
            shape = {"q_tokens": str(q), "history_tokens": str(h), "decode_batch": batch}
            shape |= {"context_sum": batch * context, "attention": variant, "label": variant, "sms": 132}
            made.append(
                row(
                    sweep,
                    kind="fused_attention",
                    model=MODEL,
                    time_s=time_s,
                    launch="graph",
                    point=str(i),
                    **shape,
                )
            )
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("surface")
    (made / "measurements").mkdir()
    write_table(rows(240, 1), made / "measurements" / "fused.csv.gz")
    write_table(rows(40, 2, "fused_random"), made / "measurements" / "fused_random.csv.gz")
    return made


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Any:
    return fit_fused(folder, MODEL, H200)


def test_a_known_surface_is_found_again(folder: Path, fitted: Any) -> None:
    surface, record = fitted
    assert surface is not None
    assert surface.variants == ("streams",)  # nothing else was measured
    assert surface.base("streams") == "fa2"
    assert record["streams"]["random"]["median"] < 0.02
    assert record["streams"]["random"]["points"] == 240
    scored = score_fused(folder, surface, MODEL)
    assert scored["streams"]["points"] == 40
    assert scored["streams"]["median"] < 0.02
    again = recheck_fused(folder, MODEL, H200, record, surface)
    assert again["streams"] == record["streams"]


def test_a_table_is_the_ratio_of_every_pair_of_sides(fitted: Any) -> None:
    surface, _ = fitted
    assert surface is not None
    q, h = np.array([[100.0, 512.0], [2048.0, 9.0]]), np.array([[0.0, 300.0], [4096.0, 50000.0]])
    batch, context = np.array([1.0, 33.0, 200.0]), np.array([700.0, 9000.0, 64.0])
    table = surface.table("streams", q, h, batch, context)
    assert table.shape == (2, 2, 3)
    one = surface.ratio("streams", q[..., None], h[..., None], batch, context)
    np.testing.assert_allclose(table, one, rtol=1e-12)
    # off the measured range the edge answers
    edge = surface.ratio("streams", 64, 0, 4, 512)
    assert surface.ratio("streams", 1, 0, 1, 1) == edge
    assert surface.covered("streams", 512, 4096, 32, 2048)
    assert not surface.covered("streams", 1, 4096, 32, 2048)
    assert not surface.covered("batched", 512, 4096, 32, 2048)


def test_answers_never_leave_what_was_measured(fitted: Any) -> None:
    surface, _ = fitted
    assert surface is not None
    curve = surface.curves["streams"]
    rng = np.random.default_rng(5)
    values = surface.ratio("streams", *(2 ** rng.uniform(0, 16, 200) for _ in range(4)))
    assert (values >= curve.low).all()
    assert (values <= curve.high).all()


def test_a_surface_survives_its_file(tmp_path: Path, fitted: Any) -> None:
    surface, _ = fitted
    assert surface is not None
    path = tmp_path / "fused.json"
    path.write_text(json.dumps(surface.as_data()))
    loaded = load_fused(path, "measured", "somewhere")
    assert (loaded.label, loaded.coverage) == ("measured", "somewhere")
    assert loaded.heads == surface.heads == (32, 8, 128)
    at = ("streams", 700, 3000, 20, 2500)
    assert loaded.ratio(*at) == pytest.approx(surface.ratio(*at), rel=1e-3)
    assert loaded.sigma == pytest.approx(surface.sigma, abs=1e-4)
    for broken, said in (
        ("{", "not a readable"),
        ('{"variants": {"pod": {}}, "sites": [], "heads": [1, 1, 64]}', "lacks a part"),
        (json.dumps({**surface.as_data(), "sites": [[1, 2, 3, 4]]}), "do not belong together"),
    ):
        path.write_text(broken)
        with pytest.raises(SimctlError, match=said):
            load_fused(path, "measured")


def test_errors_of_a_row_are_of_shapes_that_the_fit_did_not_see(folder: Path) -> None:
    shapes = shapes_of(read_rows(folder, "fused"), model=MODEL)
    sites = coordinates(*(shapes[name] for name in ("q", "h", "batch", "context")))
    logs, all_known = ratios(shapes, "streams", "fa2")
    assert all_known.all()
    lengths = np.array([1.0, 2.0, 2.0, 2.0])
    left, at = rows_out(sites, logs, lengths, 0)
    inner = np.unique(sites[:, 0])[1:-1]
    assert set(sites[at, 0]) == set(inner)
    assert np.abs(left).mean() > np.abs(held_out(sites, logs, lengths)).mean()
    assert gaussians(sites, lengths)[3, 3] == 1.0


def test_several_chunks_and_other_types_are_no_part_of_the_surface(tmp_path: Path) -> None:
    (tmp_path / "measurements").mkdir()
    more = rows(5, 3)
    for one in more[:9]:
        one["q_tokens"], one["history_tokens"] = "512;512", "0;0"
    for one in more[9:]:
        one["dtype"] = "float16"
    write_table(
        [*rows(70, 1), *[{**one, "point": f"x{one['point']}"} for one in more]],
        tmp_path / "measurements" / "fused.csv.gz",
    )
    assert len(shapes_of(read_rows(tmp_path, "fused"), model=MODEL)) == 70
    assert len(shapes_of(read_rows(tmp_path, "fused"), "float16", MODEL)) == 2


def test_too_few_shapes_make_no_surface(tmp_path: Path) -> None:
    (tmp_path / "measurements").mkdir()
    assert fit_fused(tmp_path, MODEL, H200) == (None, {})
    write_table(rows(20, 1), tmp_path / "measurements" / "fused.csv.gz")
    assert fit_fused(tmp_path, MODEL, H200) == (None, {})


def test_refusals_are_listed_and_missing_builds_are_not(tmp_path: Path) -> None:
    (tmp_path / "measurements").mkdir()
    made = [
        {"label": "two chunks", "attention": "pod", "skip": "ValueError: one only"},
        {"label": "float16", "attention": "pod", "skip": "MissingJITCacheError: not here"},
        {"label": "a graph", "attention": "pod", "error": 0.7},
        {"label": "a graph", "attention": "batch_pod", "error": 0.002},
    ]
    write_table(
        [row("fused_limits", **one) for one in made], tmp_path / "measurements" / "fused_limits.csv.gz"
    )
    assert fallbacks(tmp_path) == (
        ("a graph (pod)", "the result is wrong"),
        ("two chunks (pod)", "ValueError: one only"),
    )


def test_axes_are_binary_logarithms() -> None:
    np.testing.assert_allclose(coordinates(1024, 512, 8, 2048), [10, 10, 3, 11])
    assert stacked([1, 2], 4).tolist() == [[0, 2], [1, 2]]
