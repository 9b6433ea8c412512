"""A profile's answer for rows of collectives and of KV transfers; see `sim.cost.measured_predict`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sim.cost.collectives import COLLECTIVES, Collectives
from sim.cost.parallel import EXTRAPOLATED_SD, MAX_GROUP, GroupCurve, group_curve
from sim.cost.profile import CurveProfile
from sim.cost.shapes import Elementwise, Timing

TRANSFER = "kv_transfer"
KINDS = (*COLLECTIVES, TRANSFER)


class Found(NamedTuple):
    """Seconds on the GPU and with the host, relative standard error, label and flags."""

    gpu_s: float
    step_s: float
    sd: float
    label: str
    flags: tuple[str, ...] = ()


def collective_row(
    profile: CurveProfile, kind: str, size: int, gpus: int, launch: str, sms: int
) -> Found | str:
    """One call of a collective of `size` bytes; the reason in words where there is no answer."""
    if not 2 <= gpus <= MAX_GROUP:
        return f"{gpus} GPUs: a group is 2 to the {MAX_GROUP} GPUs of one machine"
    curve = group_curve(profile, kind, gpus)
    shape = Elementwise(np.array([1]), size)
    if not isinstance(curve, GroupCurve):
        seconds = float(curve.timing(shape, sms).seconds[0])
        # a profile that measured others does not cover this one; a data sheet's claims all by extrapolation
        flags = () if profile.collectives is None else (f"{kind}: was not measured",)
        return Found(seconds, seconds, EXTRAPOLATED_SD, curve.label, flags)
    if launch == "eager" and curve.uncaptured is not None:
        curve = curve.uncaptured
    timing: Timing = curve.timing(shape, sms)
    seconds = float(timing.seconds[0])
    flags = () if curve.covered(shape, sms) else (f"{kind}: outside {curve.coverage}",)
    # eager calls were timed one after the other: what the host takes is in the curve
    return Found(seconds, seconds, curve.spread(shape, sms), curve.label, flags)


def transfer_row(profile: CurveProfile, size: int) -> Found | str:
    """One message of KV between two GPUs, by the transfer that hand-overs are priced by."""
    source = profile.collectives
    if source is None or source.default is None:
        return "no curve for KV transfers; the link of a run is modelled"
    curve = source.default
    seconds = float(curve.knots.at(size))
    inside = curve.knots.holds(size)
    flags = () if inside else (f"{TRANSFER}: outside messages to {curve.knots.sizes[-1] / 2**20:g} MiB",)
    return Found(seconds, seconds, curve.sd, source.label, flags)


def beside_factor(
    source: Collectives | None, kind: str, neighbour: str, size: int, shared: bool
) -> float | str:
    """Factor on `kind` all of whose time a `neighbour` runs beside: a collective next to compute, or the other way
    round, for messages of `size` bytes; the reason in words where that was not measured."""
    own = kind in COLLECTIVES
    compute = neighbour if own else kind
    rows = [] if source is None else source.beside_rows((compute,), "shared" if shared else "disjoint")
    if not rows:
        return f"{kind} beside {neighbour} was not measured"
    factors = [one.collective_factor if own else one.compute_factor for one in rows]
    at = np.log2([max(one.size, 1.0) for one in rows])
    return float(np.interp(np.log2(max(size, 1)), at, factors))
