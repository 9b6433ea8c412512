"""A cost model out of fitted curves, in memory: what steps and co-runs are compared with while a profile is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from calib.fit.solo import Solo
from sim.cost.base import Curve
from sim.cost.gpu import GpuSpec
from sim.cost.launching import Launching
from sim.cost.measured import MeasuredCurve
from sim.cost.model import load_model
from sim.cost.profile import CurveProfile, spec_profile
from sim.cost.profiled import ProfiledCost

# operator that stands under a family's plain name, best first: what an engine of today would run
DEFAULTS = {
    "prefill_attention": ("prefill_attention/fa3", "prefill_attention/fa2", "prefill_attention/sdpa"),
    "sampling": ("sampling/greedy", "sampling/random"),
    "routing": ("routing/permute",),  # the weighted sum back moves rows likewise, in one kernel of an engine
}


def named_curves(solo: Mapping[str, Solo]) -> dict[str, MeasuredCurve]:
    """Curves by operator, families with variants also under their plain name."""
    return with_defaults({name: one.fitted.curve for name, one in solo.items()})


def loaded_curves(profile: CurveProfile) -> dict[str, MeasuredCurve]:
    """The measured curves of a loaded profile."""
    return {name: one for name, one in profile.curves.items() if isinstance(one, MeasuredCurve)}


def with_defaults(curves: Mapping[str, MeasuredCurve]) -> dict[str, MeasuredCurve]:
    """The curves, and each family's default variant under the family's name."""
    curves = dict(curves)
    for family, order in DEFAULTS.items():
        found = next((name for name in order if name in curves), None)
        if found is not None:
            curves[family] = curves[found]
    return curves


def cost_of(
    measured: Mapping[str, MeasuredCurve], gpu: GpuSpec, model: str, attention: str = ""
) -> ProfiledCost:
    """Prices by these curves over the spec profile, without terms of whole steps; `attention`: back end of prefill
    attention (fa2, fa3)."""
    base = spec_profile(gpu)
    curves: dict[str, Curve] = {**base.curves, **measured}
    if f"prefill_attention/{attention}" in curves:
        curves["prefill_attention"] = curves[f"prefill_attention/{attention}"]
    profile = replace(base, name="fitted", curves=curves)
    # eager: steps are priced at their own size, not at the captured one above it
    return ProfiledCost(load_model(model), profile, Launching("eager", base.host), {})
