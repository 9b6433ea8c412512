"""The physics forms under every curve: which parameters each family has, their bounds, and how they are fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from calib.fit.points import Floats, Points
from calib.fit.robust import Bound, Fitted, fit
from sim.cost.gpu import GpuSpec
from sim.cost.measured import Form as FormCurve
from sim.cost.measured import form_of
from sim.cost.shapes import Gemm

MOST_POINTS = 700  # of a fit of a handful of parameters; more would only cost time

# parameters of `sim.cost.spec.Roofline`; the fallback is what says the least when the data say nothing
COMMON = {
    "launch_s": Bound(3e-7, 4e-5, 3e-6),
    "bandwidth_efficiency": Bound(0.2, 1.0, 0.85),
    "sm_bytes_per_clock": Bound(5.0, 400.0, 58.0),
    "bandwidth_p": Bound(0.8, 12.0, 2.0),
}
BOUNDS: dict[str, dict[str, Bound]] = {
    "gemm": {
        **COMMON,
        "efficiency": Bound(0.1, 1.0, 0.83),
        "wave_s": Bound(1e-8, 1e-5, 2e-7, 0.0),
        "overlap_p": Bound(1.0, 20.0, 6.0),
    },
    "experts": {
        **COMMON,
        "efficiency": Bound(0.1, 1.0, 0.83),
        "wave_s": Bound(1e-8, 2e-5, 2e-6, 0.0),
        "overlap_p": Bound(1.0, 20.0, 4.0),
    },
    "prefill": {
        **COMMON,
        "efficiency": Bound(0.1, 1.0, 0.66),
        "wave_s": Bound(1e-7, 2e-5, 2e-6, 0.0),
        "overlap_p": Bound(1.0, 20.0, 4.0),
        "tail": Bound(1e-2, 3.0, 0.3, 0.0),
        "split_s": Bound(1e-7, 3e-5, 3e-6, 0.0),
    },
    "decode": {
        **COMMON,
        "efficiency": Bound(0.05, 1.0, 0.5),
        "wave_s": Bound(1e-7, 2e-5, 2e-6, 0.0),
        "overlap_p": Bound(1.0, 20.0, 4.0),
        "split_s": Bound(1e-8, 3e-5, 5e-7, 0.0),
    },
    "elementwise": COMMON,
}
FLAT = {
    "fixed_s": Bound(1e-7, 5e-5, 3e-6),
    "compute": Bound(0.01, 1.2, 0.7),
    "memory": Bound(0.02, 3.0, 0.7),  # above 1 where the data stay in L2
    "knee": Bound(0.03, 1.0, 0.4),
}
BLOCKS = {
    "fixed_s": Bound(1e-7, 4e-5, 5e-6),
    "efficiency": Bound(0.05, 1.0, 0.6),
    "wave_s": Bound(1e-8, 2e-5, 1e-6, 0.0),
    "memory": Bound(0.05, 3.0, 0.7),
    "knee": Bound(0.03, 1.0, 0.4),
}
SPLIT = {"split_s": Bound(1e-7, 4e-5, 3e-6, 0.0), "merge_s": Bound(3e-12, 3e-8, 1e-9, 0.0)}
WHOLE = {"split_s": 0.0, "merge_s": 0.0, "split": 0.0}
# kinds of attention kernels: these are no matter of degree, so each is a form of its own
KERNELS = ("blocks", "persistent", "split")
OTHERS = {"prefill": ("flat", *KERNELS)}


def form_names(kind: str) -> tuple[str, ...]:
    """The forms that are tried for a family."""
    return ("waves", *OTHERS.get(kind, ("flat",)))


def bounds_of(family: str, name: str, gpu: GpuSpec) -> tuple[dict[str, Bound], dict[str, float]]:
    """(bounds of what is fitted, terms that are given) of a form by its name in `form_names`."""
    if name == "flat":
        return dict(FLAT), {}
    if name == "blocks":
        return dict(BLOCKS), {**WHOLE, "packed": 0.0, "workers": 0.0}
    if name == "persistent":
        return dict(BLOCKS), {**WHOLE, "packed": 0.0, "workers": float(gpu.sms)}
    if name == "split":
        # two CTAs an SM
        return {**BLOCKS, **SPLIT}, {"packed": 1.0, "workers": 0.0, "split": 2.0 * gpu.sms}
    return dict(BOUNDS[family]), {}


@dataclass(frozen=True)
class Form:
    """A fitted physics form and what is known of its parameters."""

    kind: str
    curve: FormCurve
    terms: Mapping[str, float]
    fitted: Fitted


def form_seconds(curve: FormCurve, points: Points) -> Floats:
    """What the form says for each point, at the clock of the point."""
    if points.kind == "gemm" and len({key[2] for key in points.keys}) == 1:
        # one call for all sizes: the form broadcasts over n and k
        n, k = (np.array([key[i] for key in points.keys], dtype=np.int64) for i in (0, 1))
        shape = Gemm(points.features["m"].astype(np.int64), n, k, points.keys[0][2])  # type: ignore[arg-type]
        return np.asarray(curve.timing(shape, points.sms, points.clock).seconds)  # type: ignore[arg-type]
    found = np.zeros(len(points))
    for key, mask in points.groups().items():
        part = points.take(mask)
        found[mask] = curve.timing(part.shape(key), part.sms, part.clock).seconds  # type: ignore[arg-type]
    return found


def fit_form(points: Points, gpu: GpuSpec, kind: str = "waves", start: Form | None = None) -> Form:
    """The terms of the form `waves` or `flat` that fit the points, on logarithms of time with a soft-L1 loss.

    With `start` (an earlier fit) only what that one identified is fitted again, from its values.
    """
    base = "blocks" if kind in KERNELS else kind
    bounds, fixed = bounds_of(points.kind, kind, gpu)
    sample = thinned(points, MOST_POINTS)
    logs = np.log(sample.seconds)
    if start is not None:
        fixed |= {name: start.terms[name] for name in start.fitted.rejected}
        bounds = {name: bound for name, bound in bounds.items() if name not in fixed}

    def error(terms: Mapping[str, float]) -> Floats:
        predicted = form_seconds(
            form_of(gpu, "blocks" if kind in KERNELS else kind, {**fixed, **terms}, "measured"), sample
        )
        return np.asarray(np.log(predicted) - logs)

    fitted = fit(error, bounds, start.terms if start else None, reject=start is None)
    terms = {**fixed, **fitted.values}
    return Form(kind, form_of(gpu, base, terms, "measured"), terms, fitted)


def thinned(points: Points, most: int) -> Points:
    """At most `most` points, the same for the same points: every so-manieth in an order mixed by a fixed seed."""
    if len(points) <= most:
        return points
    kept = np.zeros(len(points), dtype=bool)
    kept[np.random.default_rng(5).permutation(len(points))[:most]] = True
    return points.take(kept)
