"""The price of one launch alone: its operators by the curves, composed into a step with the host's time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.cost.attention import AttentionMode
from sim.cost.base import Curve
from sim.cost.collectives import is_collective
from sim.cost.fused import fused_label, solo_ratio
from sim.cost.launching import grid_tokens
from sim.cost.operators import calls, decode_shape, flops, hbm_bytes, layer_span, prefill_shape
from sim.cost.shapes import Demand, Launch, OperatorCost, Shape, StepCost, Timing
from sim.errors import SimctlError

if TYPE_CHECKING:
    from sim.cost.profiled import ProfiledCost


def price_alone(cost: ProfiledCost, launch: Launch, sms: int, clock: float) -> StepCost:
    """Price of a launch alone on `sms` SMs at an SM clock, a share of the profile's own.

    SimctlError outside what a curve covers where the profile refuses that, else flags."""
    flags: list[str] = []
    parts = [
        *_linear_parts(cost, launch, sms, clock, flags),
        *_attention_parts(cost, launch, sms, clock, flags),
        *_gaps(cost, launch, sms),
    ]
    return _compose(cost, launch, tuple(parts), tuple(flags))


def _linear_parts(
    cost: ProfiledCost, launch: Launch, sms: int, clock: float, flags: list[str]
) -> list[OperatorCost]:
    # time is that of the padded size, work that of the real one
    real = {"tokens": np.array([launch.tokens]), "sequences": np.array([launch.sequences])}
    sizes = {
        "tokens": grid_tokens(cost.launching.padded([launch.tokens], launch.graph)),
        "sequences": grid_tokens([launch.sequences]),
    }
    parts = []
    for operator in cost.operators:
        times = calls(operator, cost.model, launch.layers)
        count = sizes[operator.rows]
        if times and count[0]:
            shape = operator.shape(count)
            timing = cost.timing(operator.name, shape, sms, clock)
            if operator.rows == "tokens" and is_collective(operator.name):
                if not launch.chunks:
                    more = cost.in_step_s(operator.name, count)
                    timing = Timing(timing.seconds + more, timing.sm_s)
            elif launch.chunks and operator.rows == "tokens":
                factor = cost.linear_factor(count, sms)
                timing = Timing(timing.seconds * factor, timing.sm_s * factor)
            _check(cost, operator.name, shape, sms, flags)
            parts.append(_part(cost, operator.name, times, operator.shape(real[operator.rows]), timing))
    return parts


def _gaps(cost: ProfiledCost, launch: Launch, sms: int) -> list[OperatorCost]:
    """What a decode-only step takes beyond its operators, as an operator without work."""
    found = cost.profile.composition
    if found is None or launch.chunks or not launch.decode_batch:
        return []
    layers, _, _ = layer_span(cost.model, launch.layers)
    tokens = grid_tokens(cost.launching.padded([launch.tokens], launch.graph))
    seconds = layers * float(np.sum(cost.gap_s(tokens, sms)))
    return [OperatorCost("gaps", layers, seconds, 0.0, 0.0, 0.0, found.label)]


def _attention_parts(
    cost: ProfiledCost, launch: Launch, sms: int, clock: float, flags: list[str]
) -> list[OperatorCost]:
    layers, _, _ = layer_span(cost.model, launch.layers)
    parts = []
    if launch.chunks:
        q, h = (np.array(column, dtype=np.int64) for column in zip(*launch.chunks, strict=True))
        shape: Shape = prefill_shape(cost.model, q, h)
        timing = cost.prefill(q, h, sms, clock)
        shared = (len(q) - 1) * cost.prefill_fixed_s()
        _check(cost, "prefill_attention", shape, sms, flags)
        parts.append(_part(cost, "prefill_attention", layers, shape, timing, shared))
    if launch.decode_batch:
        batch = np.array([launch.decode_batch], dtype=np.int64)
        context = np.array([launch.decode_context_sum], dtype=np.float64)
        longest = np.array([launch.decode_context_max or np.nan])
        shape = decode_shape(cost.model, batch, context, None if np.isnan(longest[0]) else longest)
        _check(cost, "decode_attention", shape, sms, flags)
        timing = cost.timing("decode_attention", shape, sms, clock)
        parts.append(_part(cost, "decode_attention", layers, shape, timing))
    mode = cost.attention if launch.attention == cost.attention.mode else AttentionMode(launch.attention)
    if mode.mode != "serial" and launch.chunks and launch.decode_batch:
        return [_fused_part(cost, launch, mode, parts)]
    return parts


def _fused_part(
    cost: ProfiledCost, launch: Launch, mode: AttentionMode, apart: list[OperatorCost]
) -> OperatorCost:
    """Both attentions in one, by what the mode takes of the seconds of separate kernels."""
    seconds = sum(part.seconds for part in apart) * solo_ratio(cost, mode, launch)
    active = min(sum(part.sm_s for part in apart), seconds * cost.gpu.sms)
    work, moved = sum(part.flops for part in apart), sum(part.hbm_bytes for part in apart)
    label, joules = fused_label(cost, mode), sum(part.joules for part in apart)
    return OperatorCost("fused_attention", apart[0].calls, seconds, active, work, moved, label, joules)


def _check(cost: ProfiledCost, operator: str, shape: Shape, sms: int, flags: list[str]) -> None:
    curve: Curve = cost.profile.curve(operator)
    if curve.covered(shape, sms):
        return
    if curve.extrapolation == "raise":
        raise SimctlError(
            f"{operator} on {sms} SMs is outside what profile '{cost.profile.name}' covers: {curve.coverage}."
        )
    flags.append(f"{operator}: outside {curve.coverage}")


def _part(
    cost: ProfiledCost, name: str, times: int, shape: Shape, timing: Timing, shared_s: float = 0.0
) -> OperatorCost:
    work, moved = times * float(np.sum(flops(shape))), times * float(np.sum(hbm_bytes(shape)))
    return OperatorCost(
        name=name,
        calls=times,
        seconds=times * (float(np.sum(timing.seconds)) - shared_s),
        sm_s=times * float(np.sum(timing.sm_s)),
        flops=work,
        hbm_bytes=moved,
        label=cost.profile.curve(name).label_for(shape),
        joules=float(cost.energy.work_j(name, work, moved)),
    )


def _compose(
    cost: ProfiledCost, launch: Launch, parts: tuple[OperatorCost, ...], flags: tuple[str, ...]
) -> StepCost:
    gpu_s = sum(part.seconds for part in parts)
    work, moved = sum(part.flops for part in parts), sum(part.hbm_bytes for part in parts)
    layers, _, _ = layer_span(cost.model, launch.layers)
    host = float(cost.launching.host_s(launch.sequences, launch.graph, layers))
    step_s = max(host, gpu_s) + float(cost.launching.gap_s(launch.sequences, launch.graph))
    joules = sum(part.joules for part in parts)
    return StepCost(
        gpu_s=gpu_s,
        step_s=step_s,
        demand=_demand(cost, gpu_s, work, moved, joules),
        sm_active=sum(part.sm_s for part in parts),
        tensor_active=work / cost.gpu.peak_flops * cost.gpu.sms,
        hbm_bytes=moved,
        flops=work,
        watts=cost.energy.board_w(step_s, gpu_s, joules),
        by_operator=parts,
        flags=flags,
    )


def _demand(cost: ProfiledCost, gpu_s: float, work: float, moved: float, joules: float) -> Demand:
    if gpu_s <= 0:
        return Demand(0.0, 0.0, 0.0, 0.0)
    power = cost.energy.board_w(gpu_s, gpu_s, joules) / cost.energy.cap_w
    hbm = min(moved / gpu_s / cost.gpu.hbm_bytes_per_s, 1.0)
    # nothing is known yet of traffic that stays in L2: what comes from memory passes through it
    return Demand(hbm=hbm, l2=hbm, tensor=work / gpu_s / cost.gpu.peak_flops, power=power)
