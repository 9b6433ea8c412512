"""Touches every kernel and mechanism once on the real GPU, in under a minute: what works here and what does not."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calib.bench import Bench, Side
from calib.hostcost import LABELS
from calib.kernels import make
from calib.partition import HIGH
from calib.sweep import Point
from calib.sweeps.common import near_sizes
from calib.sweeps.corun import decode_shape, prefill_shape
from calib.sweeps.others import ErrorSweep
from calib.sweeps.steps import decode_point

ERROR_LIMIT = 2e-2


@dataclass
class Check:
    """Outcome of one check: a value to show, or the reason of the failure with its traceback."""

    name: str
    ok: bool
    shown: str
    seconds: float
    trace: str = ""


def smoke(lab: Bench) -> list[Check]:
    """Run all checks; a failing one does not stop the rest, unless it breaks the CUDA context."""
    done = []
    for name, call in [*_errors(lab), *_times(lab), *_together(lab), *_others(lab)]:
        start = lab.clock()
        try:
            shown, ok, trace = call(), True, ""
        except Exception as error:  # what is looked for here
            shown, ok, trace = f"{type(error).__name__}: {error}"[:300], False, traceback.format_exc()
        if ok and shown.startswith("error "):
            value = float(shown.split()[1])
            ok = value <= ERROR_LIMIT
        done.append(Check(name, ok, shown, lab.clock() - start, trace))
        if not lab.healthy():
            done.append(Check("CUDA context", False, f"broken by '{name}'; the rest was not run", 0.0))
            break
    return done


def _microseconds(sample: Any) -> str:
    text = f"{sample.median_s * 1e6:.1f} us (n={len(sample.times_s)})"
    if sample.host_s:
        text += f", host {sample.host_s * 1e6:.1f} us"
    reading = sample.readings[0] if sample.readings else None
    return text + (f", {reading.sm_mhz} MHz, {reading.power_w} W" if reading else "")


def _errors(lab: Bench) -> list[tuple[str, Callable[[], str]]]:
    def check(point: Point) -> Callable[[], str]:
        return lambda: f"error {lab.error(make(lab.model, point)):.2g} against float32"

    points = ErrorSweep().points(lab, False)
    return [
        (" ".join(str(p[key]) for key in ("kind", "role", "attention") if key in p), check(p)) for p in points
    ]


def _times(lab: Bench) -> list[tuple[str, Callable[[], str]]]:
    total, layers = lab.facts.sms, lab.model.layers
    small = near_sizes(lab)[-1]
    gemm: Point = {"kind": "gemm", "role": "gate_up", "m": 2048}
    prefill: Point = {"kind": "prefill_attention", "q": [2048], "h": [4096], "attention": "fa3"}
    decode: Point = {"kind": "decode_attention", "contexts": [8192] * 32, "attention": "fa2"}
    step = decode_point(32, 2048, layers, total)
    mixed = {"kind": "mixed_step", "q": [512], "h": [512], "contexts": [1024] * 32, "layers": layers}
    cases: list[tuple[Point, int, str]] = [
        (gemm, total, "graph"),
        (gemm, total, "eager"),
        (gemm, small, "graph"),
        (gemm, total - small, "graph"),
        (prefill, total, "graph"),
        ({**prefill, "attention": "fa2"}, total, "graph"),
        ({**prefill, "q": [512] * 4, "h": [512] * 4}, small, "graph"),
        (decode, total, "graph"),
        (decode, total, "eager"),
        (decode, total - small, "graph"),
        ({"kind": "lm_head", "m": 64}, total, "graph"),
        ({"kind": "sampling", "m": 64, "label": "random"}, total, "graph"),
        ({"kind": "kv_write", "m": 512}, total, "graph"),
        ({"kind": "stream_read", "size": 1 << 30}, total, "graph"),
        ({"kind": "prefill_layer", "q": [1024], "h": [1024], "attention": "fa3"}, small, "graph"),
        (step, total, "graph"),
        (step, total, "eager"),
        (step, total - small, "graph"),
        ({**mixed, "attention": "fa3"}, total, "graph"),
        ({**mixed, "attention": "fa3"}, total, "eager"),
        ({**mixed, "attention": "fa2"}, total, "eager"),
    ]

    def check(point: Point, sms: int, launch: str) -> Callable[[], str]:
        return lambda: _microseconds(lab.time(make(lab.model, point), sms, launch))

    return [
        (f"time {p['kind']} {p.get('attention', '')} {s} SMs {how}", check(p, s, how)) for p, s, how in cases
    ]


def _together(lab: Bench) -> list[tuple[str, Callable[[], str]]]:
    total = lab.facts.sms
    large = near_sizes(lab)[-1]
    near = near_sizes(lab)[len(near_sizes(lab)) // 2]

    def sides(sms: int, beside: int, priority: str) -> tuple[Side, Side]:
        a, b = make(lab.model, prefill_shape(1024, 0)), make(lab.model, decode_shape(lab, 32, 1024))
        return Side(a, sms), Side(b, beside, priority)

    def pair(sms: int, beside: int, mode: str, priority: str) -> Callable[[], str]:
        def call() -> str:
            result = lab.pair(*sides(sms, beside, priority), mode)
            a, b = result.a, result.b
            return (
                f"slowdown {a.median_s / result.alone_a.median_s:.2f} / {b.median_s / result.alone_b.median_s:.2f}"
                f" (n={len(a.times_s)} / {len(b.times_s)}, {result.shared_sms} SMs shared)"
            )

        return call

    def stagger() -> str:
        result = lab.stagger(*sides(near, total - near, "normal"), "disjoint", 1e-3, 0.5)
        return (
            f"{result.a.median_s * 1e6:.0f} us, alone {result.alone_a.median_s * 1e6:.0f} us, neighbour from "
            f"{result.start_s * 1e6:.0f} to {result.end_s * 1e6:.0f} us"
        )

    cases = [
        (near, total - near, "disjoint", "normal"),
        (large, total - large // 2, "half", HIGH),
        (near, total, "whole", "normal"),
        (near, total, "whole", HIGH),
        (total, total, "streams", "normal"),
        (total, total, "streams", HIGH),
    ]
    return [*((f"pair {m} {s}/{b} {p}", pair(s, b, m, p)) for s, b, m, p in cases), ("stagger", stagger)]


def _others(lab: Bench) -> list[tuple[str, Callable[[], str]]]:
    def host(label: str) -> Callable[[], str]:
        return lambda: _microseconds(lab.host_costs(label, 64)[1])

    def hot() -> str:
        kernel = make(lab.model, {"kind": "prefill_layer", "q": [2048], "h": [0], "attention": "fa3"})
        samples = lab.sustained(kernel, lab.facts.sms, "graph", 1.0)
        return f"{len(samples)} windows, last {_microseconds(samples[-1][1])}"

    def launched() -> str:
        found = lab.launched([make(lab.model, {"kind": "gemm", "role": "qkv", "m": 256})])
        return (
            f"{found[0][0]['kernel'][:60]} grid {found[0][0]['grid']}"
            if found[0]
            else "error nan no kernel seen"
        )

    return [*((f"host {label}", host(label)) for label in LABELS), ("sustained", hot), ("launched", launched)]
