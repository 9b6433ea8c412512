"""A profile's answer for any operator or step, row by row: what `simctl profile predict` prints.

Every row is answered; one that no curve covers has no time and says why in its flags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from sim.cost.attention import AttentionMode
from sim.cost.collectives import COLLECTIVES
from sim.cost.collectives_predict import KINDS as BETWEEN_GPUS
from sim.cost.collectives_predict import TRANSFER, beside_factor, collective_row, transfer_row
from sim.cost.fused_ctas import FusedShape, Heads
from sim.cost.keyed import Keyed
from sim.cost.launching import LAYER_KERNELS, Launching, layer_launches
from sim.cost.measured import MeasuredCurve
from sim.cost.measured_fused import FusedSurface
from sim.cost.model import load_model
from sim.cost.parallel import EXTRAPOLATED_SD, GroupCurve, shard, with_group
from sim.cost.predict_rows import launch_of, numbers, one_of, product_of, shape_of, whole
from sim.cost.profile import CurveProfile
from sim.cost.profiled import ProfiledCost
from sim.cost.quantised import with_weights
from sim.cost.shapes import Gemm, Launch, Shape
from sim.errors import SimctlError
from sim.suggest import nearest

KINDS = ("gemm", "moe", "prefill_attention", "decode_attention", "fused_attention", "step", *BETWEEN_GPUS)
SHAPE_COLUMNS = ("m", "n", "k", "prefill_tokens", "history_tokens", "decode_contexts", "bytes", "sms")
COLUMNS = (
    "kind",
    "model",
    "tp",
    "gpus",
    *SHAPE_COLUMNS,
    "attention",
    "launch",
    "neighbour_kind",
    *(f"neighbour_{name}" for name in SHAPE_COLUMNS),
)
BACKENDS = ("fa2", "fa3", "pod")
LAUNCHES = ("graph", "eager")
POD, POD_BATCHED = "pod", "batch_pod"  # variants of the surface, for one chunk and for several
# relative error of a curve that nothing was measured for: the spec profile's, see `profile diff`
SPEC_SD = 0.2
CONTENTION_SD = 0.05  # of a measured surface on splits that it has not seen
SMALL_SHARE = 0.01  # parts of a step below this share leave its label alone


@dataclass(frozen=True)
class Answer:
    """`gpu_s`: first launch to last kernel's end; `step_s`: with host time; `sd_s`: standard error of `gpu_s`."""

    gpu_s: float | None
    step_s: float | None
    sd_s: float | None
    label: str | None
    flags: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """A JSON-like mapping."""
        return {
            "gpu_s": self.gpu_s,
            "step_s": self.step_s,
            "sd_s": self.sd_s,
            "label": self.label,
            "flags": list(self.flags),
        }


def refused(reason: str) -> Answer:
    """No answer, and why."""
    return Answer(None, None, None, None, (reason,))


@dataclass(frozen=True)
class Predictor:
    """Answers of one profile; `default_model` prices rows that name none."""

    profile: CurveProfile
    default_model: str

    def answer(self, row: Mapping[str, str], where: str) -> Answer:
        """The answer for a row of text cells (empty: absent); SimctlError names `where` for unreadable cells."""
        kind = row.get("kind", "")
        if kind not in KINDS:
            raise SimctlError(f"{where}: kind '{kind}' is none of {', '.join(KINDS)}.{nearest(kind, KINDS)}")
        backend = one_of(row, "attention", BACKENDS, where)
        mode = one_of(row, "launch", LAUNCHES, where) or "graph"
        sms = whole(row, "sms", where) or self.profile.gpu.sms
        if not 0 < sms <= self.profile.gpu.sms:
            return refused(f"{sms} SMs: {self.profile.gpu.name} has {self.profile.gpu.sms}")
        if kind in BETWEEN_GPUS:
            return self._between_gpus(kind, row, sms, mode, where)
        fused = kind == "fused_attention" or backend == "pod"
        if fused and self.profile.fused is None:
            return refused("no curve for fused attention")
        tp = whole(row, "tp", where) or 1
        if kind == "fused_attention":
            return self._mixed(self._cost(row, "", tp, mode), row, sms, backend, where)
        if fused and kind != "step":
            return refused("POD is of mixed attention: ask for fused_attention, or for a step")
        if backend and backend != "pod" and f"prefill_attention/{backend}" not in self.profile.curves:
            return refused(f"no curve for prefill attention by {backend}")
        cost = self._cost(row, backend, tp, mode)
        if kind == "step":
            return self._step(cost, row, sms, mode, where)
        if kind == "moe":
            return self._experts(cost, row, sms, mode, where)
        neighbour = row.get("neighbour_kind", "")
        if neighbour and neighbour not in COLLECTIVES:
            return refused("no contention surface of single operators; whole steps have one")
        return self._beside(self._operator(cost, kind, row, sms, mode, where), kind, row, where)

    def _cost(self, row: Mapping[str, str], backend: str, tp: int, mode: str) -> ProfiledCost:
        # without a group nothing but host time tells a captured launch from an eager one
        launch = mode if tp > 1 else "eager"
        return _cost_of(
            Keyed(self.profile, self.profile.content_hash),
            row.get("model") or self.default_model,
            backend,
            tp,
            launch,
        )

    def _between_gpus(self, kind: str, row: Mapping[str, str], sms: int, mode: str, where: str) -> Answer:
        """A collective, or KV from one GPU to another."""
        size = whole(row, "bytes", where)
        if not size:
            raise SimctlError(f"{where}: a row of kind {kind} needs bytes above 0.")
        if kind == TRANSFER:
            found = transfer_row(self.profile, size)
        else:
            gpus = whole(row, "gpus", where) or whole(row, "tp", where) or 2
            found = collective_row(self.profile, kind, size, gpus, mode, sms)
        if isinstance(found, str):
            return refused(found)
        answer = Answer(found.gpu_s, found.step_s, found.sd * found.gpu_s, found.label, found.flags)
        return self._beside(answer, kind, row, where)

    def _beside(self, alone: Answer, kind: str, row: Mapping[str, str], where: str) -> Answer:
        """The answer where compute and a collective run at once all of the time."""
        neighbour = row.get("neighbour_kind")
        if not neighbour or alone.gpu_s is None or alone.step_s is None or alone.sd_s is None:
            return alone
        size = whole(row, "bytes" if kind in COLLECTIVES else "neighbour_bytes", where)
        shared = (whole(row, "neighbour_sms", where) or self.profile.gpu.sms) == self.profile.gpu.sms
        factor = beside_factor(self.profile.collectives, kind, neighbour, size, shared)
        if isinstance(factor, str):
            return refused(factor)
        gpu_s, sd_s = alone.gpu_s * factor, float(np.hypot(alone.sd_s * factor, CONTENTION_SD * alone.gpu_s))
        return Answer(gpu_s, max(alone.step_s, gpu_s), sd_s, alone.label, alone.flags)

    def _operator(
        self, cost: ProfiledCost, kind: str, row: Mapping[str, str], sms: int, mode: str, where: str
    ) -> Answer:
        shape = shape_of(cost, kind, row, where)
        operator = product_of(cost.model, shape.n, shape.k) if isinstance(shape, Gemm) else kind
        curve = cost.profile.curve(operator)
        outside = f"{operator}: outside {curve.coverage or 'anything measured'}"
        flags = () if curve.covered(shape, sms) else (outside,)
        seconds = float(np.sum(curve.timing(shape, sms).seconds))
        chunks = np.size(getattr(shape, "q", 1))
        seconds -= (chunks - 1) * curve.fixed_s(shape)
        host = self.profile.host.eager_layer_s / LAYER_KERNELS
        step = max(seconds, host) if mode == "eager" else seconds
        return Answer(seconds, step, _spread(curve, shape, sms) * seconds, curve.label_for(shape), flags)

    def _experts(self, cost: ProfiledCost, row: Mapping[str, str], sms: int, mode: str, where: str) -> Answer:
        """The grouped products of one layer's experts over m tokens: both, or the one of n and k."""
        m, n, k = (whole(row, name, where) for name in ("m", "n", "k"))
        if not m:
            raise SimctlError(f"{where}: moe needs m above 0.")
        products = [operator for operator in cost.operators if operator.experts]
        chosen = [one for one in products if n in (0, one.n) and k in (0, one.k)]
        if not products:
            return refused(f"{cost.model.name} has no experts: name a model that has some")
        if not chosen:
            known = " and ".join(f"{one.n} x {one.k}" for one in products)
            return refused(f"the experts of {cost.model.name} have products of {known}")
        seconds, spreads, flags = 0.0, [], []
        for operator in chosen:
            curve, shape = cost.profile.curve(operator.name), operator.shape(np.array([m]))
            part = float(curve.timing(shape, sms).seconds[0])
            seconds += part
            spreads.append(_spread(curve, shape, sms) * part)
            if not curve.covered(shape, sms):
                flags.append(f"{operator.name}: outside {curve.coverage or 'anything measured'}")
        host = len(chosen) * self.profile.host.eager_layer_s / LAYER_KERNELS
        step = max(seconds, host) if mode == "eager" else seconds
        label = curve.label_for(shape)
        return Answer(seconds, step, float(np.sqrt(np.sum(np.square(spreads)))), label, tuple(flags))

    def _mixed(
        self, cost: ProfiledCost, row: Mapping[str, str], sms: int, backend: str, where: str
    ) -> Answer:
        """One layer's attention of a chunk and a decode batch: fused, or with `fa2` or `fa3` one after the other."""
        launch, surface, model = launch_of(row, "", where), cost.profile.fused, cost.model
        if not launch.chunks or not launch.decode_batch or surface is None:
            raise SimctlError(f"{where}: fused_attention needs prefill_tokens and decode_contexts.")
        fused = backend in ("", "pod")
        wanted = POD_BATCHED if len(launch.chunks) > 1 else POD
        heads = (model.q_heads, model.kv_heads, model.head_dim)
        if fused and not surface.answers(wanted, heads):
            known = "{} query and {} KV heads of {}".format(*surface.heads)
            return refused(f"fused attention was measured with {known}")
        if sms != cost.profile.gpu.sms or row.get("neighbour_kind"):
            return refused("fused attention was measured on the whole GPU with nothing beside it")
        if fused and surface.of_ctas(wanted):
            return _of_ctas(surface, wanted, heads, launch, numbers(row, "decode_contexts", where))
        base = surface.base(wanted) if fused else backend
        serial = self._serial(cost, base, row, sms, where)
        return _fused(surface, wanted, launch, serial) if fused else serial

    @staticmethod
    def _serial(cost: ProfiledCost, base: str, row: Mapping[str, str], sms: int, where: str) -> Answer:
        """Prefill attention by `base` and then decode attention."""
        seconds, spreads, flags = 0.0, [], []
        kinds = {f"prefill_attention/{base}": "prefill_attention", "decode_attention": "decode_attention"}
        for name, kind in kinds.items():
            curve, shape = cost.profile.curve(name), shape_of(cost, kind, row, where)
            part = float(np.sum(curve.timing(shape, sms).seconds))
            seconds += part
            spreads.append(_spread(curve, shape, sms) * part)
            if not curve.covered(shape, sms):
                flags.append(f"{name}: outside {curve.coverage}")
        sd = float(np.sqrt(np.sum(np.square(spreads))))
        return Answer(seconds, seconds, sd, "measured", tuple(flags))

    def _step(self, cost: ProfiledCost, row: Mapping[str, str], sms: int, mode: str, where: str) -> Answer:
        launch = launch_of(row, "", where)
        if row.get("attention") == "pod":
            launch = replace(launch, attention="pod")
        if not launch.tokens:
            raise SimctlError(f"{where}: a step needs prefill_tokens or decode_contexts.")
        price = cost.solo(launch, sms)
        flags, factor, extra = list(price.flags), 1.0, 0.0
        if row.get("neighbour_kind"):
            if row["neighbour_kind"] != "step":
                return refused("no contention surface of single operators; whole steps have one")
            other, beside = launch_of(row, "neighbour_", where), whole(row, "neighbour_sms", where)
            beside = beside or self.profile.gpu.sms
            if not other.tokens or not 0 < beside <= self.profile.gpu.sms:
                return refused("the neighbour has no tokens or an impossible number of SMs")
            overlap = max(0, sms + beside - self.profile.gpu.sms)
            factor = cost.slowdown(launch, other, (sms, beside), overlap)[0]
            extra = CONTENTION_SD
            if bool(launch.chunks) == bool(other.chunks):
                flags.append("contention: two launches of one kind were not measured side by side")
        gpu_s = price.gpu_s * factor
        graph = mode == "graph"
        hosts = Launching(mode, cost.launching.terms)
        plain = graph and not launch.chunks
        host = float(hosts.host_s(launch.sequences, plain, cost.model.layers))
        step_s = max(host, gpu_s) + float(hosts.gap_s(launch.sequences, plain))
        sd, label = self._judged(cost, price.by_operator, price.gpu_s, flags)
        return Answer(gpu_s, step_s, gpu_s * float(np.hypot(sd, extra)), label, tuple(flags))

    def _judged(
        self, cost: ProfiledCost, parts: Sequence[Any], total: float, flags: list[str]
    ) -> tuple[float, str]:
        """(relative standard error, label) of a composed step: parts off coverage add theirs to that of steps."""
        flagged = {flag.split(":")[0] for flag in flags}
        composition = self.profile.composition
        variance = (composition.sigma if composition else 0.0) ** 2
        labels: dict[str, float] = {}
        for part in parts:
            share = abs(part.seconds) / total
            labels[part.label] = labels.get(part.label, 0.0) + share
            if part.name == "gaps":
                continue
            if part.name == "fused_attention":
                fused = cost.profile.fused
                variance += ((fused.sigma.get(POD, SPEC_SD) if fused else SPEC_SD) * share) ** 2
                continue
            curve = cost.profile.curve(part.name)
            if isinstance(curve, GroupCurve):
                variance += (curve.measured.sd * share) ** 2 if curve.same else (EXTRAPOLATED_SD * share) ** 2
            elif not isinstance(curve, MeasuredCurve):
                variance += (SPEC_SD * share) ** 2
            elif part.name in flagged or part.label != curve.label:
                variance += (max(curve.sigma, curve.sigma_off) * share) ** 2
        foreign = {
            label: share for label, share in labels.items() if label != "measured" and share > SMALL_SHARE
        }
        label = max(foreign, key=lambda one: foreign[one]) if foreign else "measured"
        return float(np.sqrt(variance)), label


def _of_ctas(
    surface: FusedSurface, wanted: str, heads: Heads, launch: Launch, contexts: Sequence[int]
) -> Answer:
    """The fused kernel's own seconds with each decode's context; several chunks count as one of their mean history."""
    tokens, flags = sum(q for q, _ in launch.chunks), []
    history = sum(q * h for q, h in launch.chunks) // tokens
    seconds = float(surface.seconds(wanted, heads, (FusedShape(tokens, history, tuple(contexts)),))[0])
    if len(launch.chunks) > 1:
        flags.append("fused_attention: several chunks are taken for one")
    if not surface.covered(wanted, tokens, history, len(contexts), sum(contexts) / len(contexts)):
        flags.append(f"fused_attention: outside {surface.coverage}")
    label = surface.label_of(wanted, heads)
    return Answer(seconds, seconds, seconds * surface.sigma[wanted], label, tuple(flags))


def _fused(surface: FusedSurface, wanted: str, launch: Launch, serial: Answer) -> Answer:
    """The answer for separate kernels, times the surface's ratio; several chunks count as one of their mean history."""
    assert serial.gpu_s is not None
    tokens, flags = sum(q for q, _ in launch.chunks), list(serial.flags)
    history = sum(q * h for q, h in launch.chunks) / tokens
    at = (tokens, history, launch.decode_batch, launch.decode_context_sum / launch.decode_batch)
    seconds = serial.gpu_s * float(surface.ratio(wanted, *at))
    if len(launch.chunks) > 1:
        flags.append("fused_attention: several chunks are taken for one")
    if not surface.covered(wanted, *at):
        flags.append(f"fused_attention: outside {surface.coverage}")
    return Answer(seconds, seconds, seconds * surface.sigma[wanted], surface.label, tuple(flags))


@lru_cache(maxsize=32)
def _cost_of(held: Keyed[CurveProfile], model: str, backend: str, tp: int, launch: str) -> ProfiledCost:
    profile, attention = with_group(held.value, tp), AttentionMode("serial")
    if backend == "pod":
        attention = AttentionMode("pod", "flashinfer")
    elif backend:
        chosen = {"prefill_attention": profile.curves[f"prefill_attention/{backend}"]}
        profile = replace(profile, curves={**profile.curves, **chosen})
    # steps are priced at their own size, not at a captured one above it
    part = shard(load_model(model), tp)
    launching = Launching(launch, layer_launches(profile.host, part), pads=False)
    return ProfiledCost(part, with_weights(profile, part), launching, {}, tp, attention=attention)


def _spread(curve: Any, shape: Shape, sms: int) -> float:
    return curve.spread(shape, sms) if isinstance(curve, MeasuredCurve) else SPEC_SD
