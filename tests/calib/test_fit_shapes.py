"""Tables for other models' shapes: what they mend, what they leave alone; activity beside counters."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from calib.fit.activity import read_counted
from calib.fit.methods import answers
from calib.fit.points import Points, merged, operator_points
from calib.fit.shapes import clause, other_points, with_shapes, with_tables, without_shapes
from calib.rows import frame, row, write_table
from sim.cost.gpu import load_gpu
from sim.cost.measured import MeasuredCurve, curve_data, curve_from_data, form_of
from sim.cost.measured_flat import FlatCurve
from sim.cost.measured_grid import Axis, Grid
from sim.cost.profile import builtin_folders, load_folder
from sim.cost.shapes import Gemm, PrefillAttention

GPU = load_gpu("h200-sxm")
M = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)


@pytest.fixture(scope="module")
def gemm() -> MeasuredCurve:
    """The shipped curve without other models' tables."""
    folder = builtin_folders()["h200-sxm"]
    curve = load_folder(folder, GPU).curves["gemm"]
    assert isinstance(curve, MeasuredCurve)
    assert isinstance(curve.form, FlatCurve)
    own = {(6144, 4096, 2), (4096, 4096, 2), (28672, 4096, 2), (4096, 14336, 2)}
    tables = {key: grid for key, grid in curve.tables.items() if key in own}
    return replace(curve, tables=tables, other=None)


def points(curve: MeasuredCurve, factor: float, n: int = 1280, k: int = 8192):
    seconds = curve.timing(Gemm(np.array(M), n, k, 2), GPU.sms).seconds * factor
    made = [
        row("shapes", kind="gemm", model="llama-3.1-70b-tp8", m=m, n=n, k=k, sms=GPU.sms, time_s=s, sd_s=0.0)
        for m, s in zip(M, seconds, strict=True)
    ]
    return operator_points(frame(made), GPU)["gemm"]


def own_points(curve: MeasuredCurve):
    return points(curve, 1.0, 4096, 4096)


def test_a_constant_error_is_mended_and_nothing_else_moves(gemm):
    there = points(gemm, 1.4)
    mended, record = with_shapes(gemm, there, own_points(gemm), GPU)
    assert record["without"]["median"] == pytest.approx(1 - 1 / 1.4, abs=1e-4)
    assert record["random"]["median"] < 0.05  # a fifth left out, the rest says it
    assert answers(mended, there) == pytest.approx(there.seconds, rel=0.02)
    own = Gemm(np.array([100, 3000]), 4096, 4096, 2)
    for sms in (64, 132):
        assert (mended.timing(own, sms).seconds == gemm.timing(own, sms).seconds).all()
    assert mended.covered(Gemm(np.array([300]), 1280, 8192, 2), 132)
    assert not mended.covered(Gemm(np.array([300]), 1280, 8192, 2), 64)  # measured on the whole GPU alone
    again = without_shapes(mended, record)
    assert set(again.tables) == set(gemm.tables)
    assert record["refitted"] == ["1280x8192"]
    assert clause(record) == "; more thinly also (n, k) 1280x8192"


def test_residuals_that_transfer_are_kept(gemm):
    there = points(gemm, 1.0)
    same, record = with_shapes(gemm, there, own_points(gemm), GPU)
    assert record["refitted"] == []
    assert same is gemm
    assert clause(record) == ""
    assert not same.covered(Gemm(np.array([300]), 1280, 8192, 2), 132)


def test_a_table_of_the_whole_gpu_changes_with_the_sms_as_the_others_do(gemm):
    mended, _ = with_shapes(gemm, points(gemm, 1.4), own_points(gemm), GPU)
    shape = Gemm(np.array([256, 2048]), 1280, 8192, 2)
    whole, part = (mended.timing(shape, sms).seconds / gemm.timing(shape, sms).seconds for sms in (132, 32))
    assert part == pytest.approx(whole, rel=1e-6)


SIZES = [(1024, 4096), (2048, 4096), (4096, 2048), (8192, 1024), (1280, 8192), (5120, 2048), (9216, 4096)]


def test_many_sizes_get_a_form_of_their_own_that_knows_unseen_ones(gemm):
    """Sizes whose time falls behind the calibrated model's by what they lack in tiles."""
    parts = [points(gemm, 1.0 + 2.0 * 2**20 / (n * k), n, k) for n, k in SIZES]
    there = merged(parts)
    mended, record = with_shapes(gemm, there, own_points(gemm), GPU)
    assert record["unseen"]["median"] < record["without"]["median"]
    assert record["random"]["median"] < record["without"]["median"]
    assert mended.other is not None
    assert dict(mended.tables) == dict(gemm.tables)
    own = Gemm(np.array([100, 3000]), 4096, 4096, 2)
    assert (mended.timing(own, 132).seconds == gemm.timing(own, 132).seconds).all()
    for n, k in SIZES:
        assert mended.covered(Gemm(np.array([300]), n, k, 2), 132)
    new = Gemm(np.array([300]), 3072, 4096, 2)
    assert not mended.covered(new, 132)
    assert mended.label_for(new) == mended.other_label
    assert mended.spread(new, 132) >= mended.spread(own, 132)
    data = curve_data(mended, asdict(mended.form.terms))
    again = curve_from_data(data, GPU, "measured", "", "flag", "here")
    for shape in (own, new, Gemm(np.array([300]), *SIZES[0], 2)):
        assert again.timing(shape, 64).seconds == pytest.approx(mended.timing(shape, 64).seconds, rel=1e-3)
    assert without_shapes(mended, record).other is None


def test_known_constants_and_too_few_points_change_nothing(gemm):
    own = own_points(gemm)
    assert with_shapes(gemm, points(gemm, 1.4, 4096, 4096), own, GPU) == (gemm, {})
    few = points(gemm, 1.4).take(np.arange(len(M)) < 4)
    assert with_shapes(gemm, few, own, GPU) == (gemm, {})
    assert with_shapes(gemm, None, own, GPU) == (gemm, {})


def test_interpolated_logs_of_time_get_times_of_their_own(gemm):
    table = Grid((Axis("m", (1.0, 4096.0)), Axis("sms", (8.0, 132.0))), np.zeros((2, 2)))
    plain = replace(gemm, method="table", tables={(1, 1, 2): table})
    there = points(gemm, 1.4)
    mended, _ = with_shapes(plain, there, own_points(gemm), GPU)
    assert answers(mended, there) == pytest.approx(there.seconds, rel=0.02)


def test_shards_of_a_group_are_known_by_their_own_heads(tmp_path: Path):
    (tmp_path / "measurements").mkdir()
    made = row(
        "shapes",
        kind="decode_attention",
        model="llama-3.1-70b-tp8",
        decode_batch=4,
        context_sum=4096,
        context_max=1024,
        attention="fa2",
        sms=132,
        time_s=1e-5,
    )
    write_table([made], tmp_path / "measurements" / "shapes.csv.gz")
    assert other_points(tmp_path, GPU)["decode_attention"].keys == ((8, 1, 128, 2),)


def test_activity_is_compared_for_kernels_that_a_curve_covers(tmp_path: Path, gemm):
    (tmp_path / "measurements").mkdir()
    shares = {"sm_active": 0.9, "tensor_active": 0.7, "dram_active": 0.2, "time_s": 1e-4, "count": 1}
    made = [
        row("counters", kind="gemm", model="llama-3.1-8b", label="qkv", m=512, n=6144, k=4096, **shares),
        row("counters", kind="norm", model="llama-3.1-8b", m=512, **shares),
        row("counters", kind="fused_attention", model="llama-3.1-8b", m=512, **shares),
    ]
    write_table(made, tmp_path / "measurements" / "counters.csv.gz")
    (found,) = read_counted(tmp_path, GPU, {"gemm": gemm})
    seconds = float(gemm.timing(Gemm(np.array([512]), 6144, 4096, 2), 132).seconds[0])
    assert found.what == "gemm qkv, m 512"
    assert float(found.timing.seconds[0]) == pytest.approx(seconds)
    assert (found.sm, found.row["tensor_active"]) == (0.9, 0.7)


def test_what_heads_share_stays_between_the_few_sizes_that_were_measured():
    """A shard's residual is what all heads share, at as many blocks, times its own."""
    axes = (Axis("q", (16.0, 256.0, 384.0, 512.0, 4096.0)), Axis("h", (0.0, 8192.0), "log2p256"))
    shared = np.log(np.array([1.0, 1.0, 1.6, 1.0, 1.0]))[:, None, None] * np.ones((1, 2, 1))
    flat = form_of(GPU, "flat", {"fixed_s": 3e-6, "compute": 0.5, "memory": 0.8, "knee": 0.4}, "measured")
    curve = MeasuredCurve(flat, {}, "measured", "", pooled=Grid((*axes, Axis("sms", (132.0,))), shared))

    def shape(q, h):
        return PrefillAttention(np.atleast_1d(q), np.atleast_1d(h), 8, 1, 128, 2, None)

    q, h = (grid.ravel() for grid in np.meshgrid([64, 256, 1024, 2048, 4096, 8192], [0, 1024, 4096]))
    ones, key = np.ones(len(q)), (8, 1, 128, 2)
    there = Points(
        kind="prefill",
        operator="prefill_attention/fa3",
        keys=(key,) * len(q),
        features={"q": q.astype(float), "h": h.astype(float)},
        sms=132 * ones,
        clock=ones,
        seconds=1.25 * curve.timing(shape(q, h), 132).seconds,
        spread=0 * ones,
        extra={},
    )
    mended = with_tables(curve, there)
    for size in (300, 1536, 3000):
        one = shape(size, 1024)
        alone = curve.timing(one, 132).seconds
        assert mended.timing(one, 132).seconds == pytest.approx(1.25 * alone, rel=0.02), size
        assert mended.covered(one, 132)
