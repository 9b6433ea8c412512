"""Seconds of FlashInfer's POD and BatchPOD kernels: the CTAs of their own plan, each with its length, on one GPU.

A plan is exact (`sim.cost.flashinfer_plan`), the schedule follows from it (`sim.cost.cta_events`), and what is left are
a dozen `FusedTerms`, which `calib.fit.fused_terms` fits to measured kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from sim.cost.cta_events import CtaRates, Launch, spans
from sim.cost.cta_schedule import proportional
from sim.cost.flashinfer_plan import Side, batch_pod_sides, pod_sides
from sim.cost.shapes import Floats

PLANS = {"pod": pod_sides, "batch_pod": batch_pod_sides}
Heads = tuple[int, int, int]  # query heads, KV heads, head dimension of one GPU


@dataclass(frozen=True)
class FusedShape:
    """A chunk of `q` tokens on `h` earlier ones beside one query for each of `contexts`."""

    q: int
    h: int
    contexts: tuple[int, ...]


@dataclass(frozen=True)
class FusedTerms:
    """Terms of one kernel on one GPU, all positive.

    `flops`: FLOP/s of all SMs full of prefill CTAs; shares of an SM of one `alone` and one `beside` decode;
    `decode_beside`: share of its rate that a decode CTA keeps beside prefill; `stream`: bytes/s of a decode CTA alone,
    `bandwidth` of all, saturating by `bandwidth_p`; `prefill_s`, `decode_s`: a CTA's start; `launch_s`; `merge_s`: a
    kernel that merges splits, `merge_row_s` a row of one head, `merge_part_s` each of its parts.
    """

    flops: float
    alone: float
    beside: float
    decode_beside: float
    stream: float
    bandwidth: float
    bandwidth_p: float
    prefill_s: float
    decode_s: float
    launch_s: float
    merge_s: float
    merge_row_s: float
    merge_part_s: float

    @property
    def rates(self) -> CtaRates:
        """What CTAs get of the GPU."""
        return CtaRates(
            min(self.alone, 1.0),
            min(self.beside, 1.0),
            min(self.decode_beside, 1.0),
            self.stream,
            self.bandwidth,
            self.bandwidth_p,
        )

    def as_data(self) -> dict[str, float]:
        """Four significant digits of each."""
        return {name: float(f"{value:.4g}") for name, value in asdict(self).items()}


NAMES = tuple(field.name for field in fields(FusedTerms))


def fused_terms(data: Any) -> FusedTerms:
    """Terms out of a mapping; ValueError for a missing, unknown or non-positive one."""
    if set(data) != set(NAMES):
        raise ValueError(f"terms must be {', '.join(NAMES)}")
    terms = FusedTerms(**{name: float(value) for name, value in data.items()})
    if min(asdict(terms).values()) <= 0:
        raise ValueError("terms must be positive")
    return terms


def plans(variant: str, shapes: Sequence[FusedShape], heads: Heads, sms: int) -> list[tuple[Side, Side]]:
    """CTAs of both sides of every shape."""
    plan = PLANS[variant]
    return [plan(one.q, one.h, one.contexts, *heads, sms) for one in shapes]


def planned_s(terms: FusedTerms, sides: Sequence[tuple[Side, Side]], head_dim: int, sms: int) -> Floats:
    """Seconds of planned kernels with the merges that follow them."""
    launches = []
    for prefill, decode in sides:
        work = 4.0 * head_dim * prefill.rows * prefill.keys / (terms.flops / sms) + terms.prefill_s
        moved = 4.0 * head_dim * decode.keys + terms.decode_s * terms.stream
        launches.append(Launch(work, moved, proportional(len(work), len(moved))))
    seconds = spans(launches, terms.rates, sms).max(axis=1) + terms.launch_s
    for side in zip(*sides, strict=True):
        rows = np.array([one.merged for one in side], dtype=np.float64)
        parts = np.array([one.parts for one in side], dtype=np.float64)
        seconds += (rows > 0) * terms.merge_s + rows * terms.merge_row_s + parts * terms.merge_part_s
    return np.asarray(seconds)


def fused_s(variant: str, terms: FusedTerms, shapes: Sequence[FusedShape], heads: Heads, sms: int) -> Floats:
    """Seconds of one layer's attention of every shape by `pod` or `batch_pod`."""
    return planned_s(terms, plans(variant, shapes, heads, sms), heads[2], sms)
