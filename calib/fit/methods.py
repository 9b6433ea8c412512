"""Ways to predict an operator's time: form x residual in its variants, and the baselines that it has to beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from calib.fit.forms import Form, fit_form, form_names, form_seconds
from calib.fit.points import Floats, Points
from calib.fit.surface import Smoothness, fit_grid
from sim.cost.gpu import GpuSpec
from sim.cost.measured import FEATURES, Key, MeasuredCurve
from sim.cost.measured_grid import Axis, Grid
from sim.cost.operators import flops, hbm_bytes

SCALE_OF = {"h": "log2p256"}
# residuals of different axes: along SMs neighbours differ by whole waves, so little is shared
SMOOTH = {
    "gemm": (
        Smoothness(walk=0.08, walks={"sms": 0.25}),
        Smoothness(walk=0.2, walks={"sms": 0.2}),
        Smoothness(walk=0.2, walks={"sms": 0.6}),
    ),
    "other": (
        Smoothness(walk=0.08, walks={"sms": 0.15}),
        Smoothness(walk=0.08, walks={"sms": 0.5}),
        Smoothness(walk=0.3, bend=0.2, walks={"sms": 0.3}),
    ),
}


PLAIN = Smoothness(walk=1.5, pull=20.0)  # nothing but lines between the measured times
SRM_ALPHA = "srm x alpha"
TITLES = {"flat": "roofline"}  # how forms are called in error tables


class Predictor(Protocol):
    """A fitted method."""

    def seconds(self, points: Points) -> Floats:
        """Predicted seconds of each point, at the point's clock."""
        ...


@dataclass(frozen=True)
class FittedCurve:
    """A measured curve as a predictor; `form` is kept for refits and for the profile's record."""

    curve: MeasuredCurve
    form: Form

    def seconds(self, points: Points) -> Floats:
        """Answers of the very curve that a profile ships."""
        found = np.zeros(len(points))
        for key, mask in points.groups().items():
            part = points.take(mask)
            found[mask] = self.curve.timing(part.shape(key), part.sms, part.clock).seconds  # type: ignore[arg-type]
        return found


def answers(curve: MeasuredCurve, points: Points) -> Floats:
    """Seconds by the curve, at the profile's clock."""
    found = np.zeros(len(points))
    for key, mask in points.groups().items():
        part = points.take(mask)
        found[mask] = curve.timing(part.shape(key), part.sms).seconds  # type: ignore[arg-type]
    return found


def axes_of(points: Points, most: int = 400) -> tuple[Axis, ...]:
    """One axis a feature and one for SMs, knots where something was measured (nearby ones merged beyond `most`)."""
    found = []
    for name, values in zip((*FEATURES[points.kind], "sms"), points.coordinates(), strict=True):
        knots = np.unique(values)
        if name == "context":
            # a mean of ragged contexts is anything: knots within 3 % are one
            knots = _spaced(knots, 0.03)
        found.append(Axis(name, tuple(float(k) for k in knots[:most]), SCALE_OF.get(name, "log2")))
    return tuple(found)


def _spaced(knots: Floats, gap: float) -> Floats:
    kept = [knots[0]]
    for knot in knots[1:]:
        if knot > kept[-1] * (1.0 + gap):
            kept.append(knot)
    return np.array(kept)


@dataclass(frozen=True)
class Recipe:
    """How a curve is built: on the form `waves` or `flat`, with a `residual` table for each set of constants, and
    one `pooled` for others. `method` `table`: plain interpolation of the logarithm of time."""

    name: str
    form: str = "waves"
    residual: bool = True
    pooled: bool = False
    stairs: bool = False
    method: str = "form"
    beyond: str = "hold"
    smoothness: Smoothness = field(default_factory=Smoothness)


def fit_curve(
    points: Points,
    gpu: GpuSpec,
    recipe: Recipe,
    form: Form | None = None,
) -> FittedCurve:
    """Form and tables of one operator by a recipe. `form`: fitted to these points before, if it was."""
    form = form or fit_form(points, gpu, recipe.form)
    base = np.log(form_seconds(form.curve, points))
    clocked = (
        base if recipe.method == "form" else base - np.log(form_seconds(form.curve, at_top_clock(points)))
    )
    errors = np.log(points.seconds) - clocked
    tables: dict[Key, Grid] = {}
    for key, mask in points.groups().items():
        if recipe.residual:
            part = points.take(mask)
            own = axes_of(part)
            tables[key] = fit_grid(own, part.coordinates(), errors[mask], recipe.smoothness, recipe.beyond)
        else:
            tables[key] = _empty(points)
    pooled = None
    if recipe.pooled:
        # what measured constants share: each one's own deviation counts as noise
        shared = replace(recipe.smoothness, noise=0.08)
        pooled = fit_grid(axes_of(points), points.coordinates(), errors, shared)
    stairs = tuple(int(m) for m in np.unique(points.features["m"])) if recipe.stairs else ()
    curve = MeasuredCurve(
        form.curve, tables, "measured", "", method=recipe.method, stairs=stairs, pooled=pooled
    )
    return FittedCurve(curve, form)


def _empty(points: Points) -> Grid:
    """A table of nothing that spans the measured range."""
    axes = tuple(
        Axis(
            name,
            (float(values.min()), float(max(values.max(), values.min() + 1))),
            SCALE_OF.get(name, "log2"),
        )
        for name, values in zip((*FEATURES[points.kind], "sms"), points.coordinates(), strict=True)
    )
    return Grid(axes, np.zeros([2] * len(axes)))


def at_top_clock(points: Points) -> Points:
    """The same points at the data sheet's clock."""
    return replace(points, clock=np.ones(len(points)))


@dataclass(frozen=True)
class Baseline:
    """Any function of points as a predictor."""

    call: Callable[[Points], Floats]

    def seconds(self, points: Points) -> Floats:
        return self.call(points)


def work_of(points: Points) -> tuple[Floats, Floats]:
    """FLOPs and bytes of each point."""
    work, moved = np.zeros(len(points)), np.zeros(len(points))
    for key, mask in points.groups().items():
        shape = points.take(mask).shape(key)
        work[mask], moved[mask] = flops(shape), hbm_bytes(shape)
    return work, moved


def fit_srm_alpha(points: Points, gpu: GpuSpec) -> Baseline:
    """Bullet's SM-scaling roofline times alpha (arXiv:2504.19516, section 3.2): compute linear in SMs, bandwidth
    linear to an inflection; alpha a linear table over sparse sizes and two SM counts, for each measured shape."""
    logs = np.log(points.seconds)

    def roof(these: Points, knee: float) -> Floats:
        work, moved = work_of(these)
        share = these.sms / gpu.sms
        return np.maximum(
            work / (gpu.peak_flops * share), moved / (gpu.hbm_bytes_per_s * np.minimum(1.0, share / knee))
        )

    def tables(knee: float) -> tuple[dict[Key, Grid], float]:
        made, errors = {}, []
        for key, mask in points.groups().items():
            part = points.take(mask)
            values = logs[mask] - np.log(roof(part, knee))
            axes = tuple(_sparse(axis) for axis in axes_of(part))
            made[key] = fit_grid(
                axes, part.coordinates(), values, Smoothness(walk=2.0, pull=10.0, noise=0.05), "line"
            )
            errors.append(np.abs(made[key].at(part.coordinates()) - values))
        return made, float(np.mean(np.concatenate(errors)))

    knee = min((0.15, 0.28, 0.4, 0.6), key=lambda k: tables(k)[1])
    alpha, _ = tables(knee)

    def predict(these: Points) -> Floats:
        found = np.zeros(len(these))
        for key, mask in these.groups().items():
            part = these.take(mask)
            near = alpha.get(key) or next(iter(alpha.values()))
            found[mask] = roof(part, knee) * np.exp(near.at(part.coordinates()))
        return found

    return Baseline(predict)


def _sparse(axis: Axis) -> Axis:
    """The axis with two knots for SMs, and a factor of at least four between other knots."""
    if axis.name == "sms":
        return Axis(axis.name, (axis.knots[0], axis.knots[-1]), axis.scale) if len(axis.knots) > 1 else axis
    kept = [axis.knots[0]]
    for knot in axis.knots[1:-1]:
        if knot >= 4 * max(kept[-1], 64 if axis.name == "h" else 1) and axis.knots[-1] >= 2 * knot:
            kept.append(knot)
    return Axis(axis.name, (*kept, axis.knots[-1]) if len(axis.knots) > 1 else axis.knots, axis.scale)


def recipes(kind: str) -> list[Recipe]:
    """The candidates of a family and its baselines; candidates of one name differ in smoothness only."""
    smooth = SMOOTH["gemm" if kind == "gemm" else "other"]
    found = []
    for form in form_names(kind):
        found += [Recipe(f"{TITLES.get(form, form)} x residual", form, smoothness=one) for one in smooth]
        found.append(Recipe(TITLES.get(form, form), form, residual=False))
    if kind == "gemm":
        found += [Recipe("stairs x residual", stairs=True, smoothness=one) for one in smooth]
    return [*found, Recipe("interpolation", "flat", method="table", beyond="line", smoothness=PLAIN)]
