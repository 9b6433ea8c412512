"""Whole steps as graph and eagerly, and whether operators measured alone add up to a layer and a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from calib.models import MODELS
from calib.report.data import Profile, looked_up, single_chunks
from calib.report.scaling import described, even
from calib.report.svg import Axis, Level, Series, chart
from calib.report.text import Section, ms, ratio, spread_of, table, tokens

BOUND = 1.05  # an eager step this much longer than its graph waits for the host
LINEAR = ("qkv", "o", "gate_up", "down")


def launches(profile: Profile) -> Section | None:
    """Graph against eager on the whole GPU."""
    found = profile.timed("steps")
    if found.empty or "host_s" not in found:
        return None
    graph = found[found.launch == "graph"].set_index("point")
    eager = found[found.launch == "eager"].set_index("point")
    other = eager[["time_s", "host_s"]].add_suffix("_eager")
    both = graph.join(other, how="inner")
    if both.empty:
        return None
    both["ratio"] = both.time_s_eager / both.time_s
    floor = float(both.host_s_eager.min())
    slow = both[both.ratio > BOUND]
    lead = (
        f"Launching a step eagerly costs at least {ms(floor)} ms of host time, so eager is slower than a graph "
        f"wherever the GPU needs less: by up to {ratio(both.ratio.max())} times, and by more than 5 % in "
        f"{len(slow)} of {len(both)} steps (whole GPU, medians of 10 runs)."
    )
    body = [_fixed(both[both.kind != "mixed_step"]), *_mixed(both[both.kind == "mixed_step"])]
    body.append(
        "Host time is what the process spends enqueueing one step; in long steps it waits for room in the launch "
        "queue, so there it is no cost of its own. `plan()` of the attention is not in it (see host costs). The "
        "clock is one reading after the step was enqueued."
    )
    return Section("Whole steps: graph and eager", lead, body)


def _fixed(both: pd.DataFrame) -> str:
    rows = []
    for _, of in both.sort_values(["kind", "attention", "m", "context_sum", "history_tokens"]).iterrows():
        rows.append(
            (
                f"{str(of.kind).replace('_', ' ')} {described(pd.DataFrame([of]))}",
                ms(of.time_s),
                ms(of.time_s_eager),
                ratio(of.ratio),
                ms(of.host_s_eager),
                tokens(of.sm_mhz),
            )
        )
    return table(("step", "graph ms", "eager ms", "eager / graph", "host ms", "MHz (graph)"), rows)


def _mixed(both: pd.DataFrame) -> list[str]:
    if both.empty:
        return []
    cells = []
    for low, high in ((0, 256), (256, 512), (512, 1024), (1024, 2048), (2048, 4096)):
        of = both[(both.m > low) & (both.m <= high)]
        if len(of):
            cells.append((f"{low + 1}–{high}", *spread_of(of.ratio), f"{ms(of.time_s.median())}"))
    head = ("tokens", "n", "eager / graph, median", "p95", "max", "graph ms, median")
    return ["Mixed steps of random shapes (one to four chunks and a decode batch):", table(head, cells)]


def composition(profile: Profile) -> Section | None:
    """Solo operators summed over a layer and over a step, against the measured whole."""
    model = MODELS.get(str(profile.run.get("model")))
    if model is None:
        return None
    times = _Times(profile)
    layers = _compared(_solo_layers(profile), times.prefill_layer)
    decode = _compared(_decode_steps(profile), lambda r: times.decode_step(r, model.layers))
    prefill = _compared(_prefill_steps(profile), lambda r: times.prefill_step(r, model.layers))
    groups = [
        ("prefill layer", layers),
        ("decode step", decode),
        ("prefill step, by layers measured alone", prefill),
    ]
    groups = [(name, rows) for name, rows in groups if len(rows)]
    if not groups:
        return None
    middle = [
        f"{name} {ratio(of.ratio.median())} (p5 {ratio(of.ratio.quantile(0.05))}, p95 "
        f"{ratio(of.ratio.quantile(0.95))}, n = {len(of)})"
        for name, of in groups
    ]
    lead = f"Measured whole over sum of parts that were measured alone: {'; '.join(middle)}."
    rows = []
    for name, of in groups:
        for label, cases in _bands(of, profile.sms):
            rows.append((f"{name}, {label}", *spread_of(cases.ratio), ratio(cases.ratio.min())))
    body = [table(("whole", "n", "median", "p95", "max", "min"), rows)]
    if len(prefill):
        body += ["Prefill steps (32 layers and the head back to back, so hot) one by one:", _each(prefill)]
    body.append(
        "Parts: four GEMMs, attention, two norms, RoPE, KV write and activation a layer; LM head a step. Only "
        "shapes whose every part was measured on the same SMs; each part was timed for some tens of "
        "milliseconds. Activations that the next kernel still finds in L2 make the whole shorter than the sum; "
        "the lower clock of long work on a hot card, and what passes between unlike kernels, make it longer. "
        "These rows do not tell the last two apart (the clock is one reading a row)."
    )
    clouds = [
        Series(name, [(float(r.time_s) * 1e3, float(r.ratio)) for r in of.itertuples()], joined=False)
        for name, of in groups
    ]
    picture = chart(
        "Measured whole over the sum of its parts",
        Axis("measured, ms", 10),
        Axis("measured / sum"),
        clouds,
        [Level(1.0, "")],
    )
    return Section(
        "Do operators add up?",
        lead,
        ["![Whole over sum of parts](IMG/composition.svg)", *body],
        {"composition": picture},
    )


class _Times:
    """Solo times by shape and SMs; a sum raises KeyError if a part was not measured."""

    def __init__(self, profile: Profile) -> None:
        self.gemm = looked_up(profile.timed("gemm"), ("label", "m", "sms"))
        self.head = looked_up(profile.timed("lm_head"), ("m", "sms"))
        chunks = single_chunks(profile.timed("prefill_attention"))
        self.prefill = looked_up(chunks, ("attention", "q", "h", "sms"))
        cached = even(profile.timed("decode_attention"))
        self.decode = looked_up(cached, ("decode_batch", "context_sum", "sms"))
        self.rows = {
            name: looked_up(profile.timed(name), ("m", "sms"))
            for name in ("norm", "rope", "activation", "kv_write")
        }
        solo = single_chunks(profile.timed("prefill_layer"))
        self.layer = looked_up(solo[solo.layers == 1], ("attention", "q", "h", "sms"))

    def _around(self, m: int, sms: int) -> float:
        linear = sum(self.gemm[(role, m, sms)] for role in LINEAR)
        others = sum(of[(m, sms)] for of in self.rows.values())
        return linear + others + self.rows["norm"][(m, sms)]  # two norms a layer

    def prefill_layer(self, row: Any) -> float:
        return self._around(row.m, row.sms) + self.prefill[(row.attention, row.q, row.h, row.sms)]

    def decode_step(self, row: Any, layers: int) -> float:
        attention = self.decode[(row.decode_batch, row.context_sum, row.sms)]
        return layers * (self._around(row.m, row.sms) + attention) + self.head[(row.m, row.sms)]

    def prefill_step(self, row: Any, layers: int) -> float:
        return layers * self.layer[(row.attention, row.q, row.h, row.sms)] + self.head[(1, row.sms)]


def _solo_layers(profile: Profile) -> pd.DataFrame:
    found = single_chunks(profile.timed("prefill_layer"))
    return found[found.layers == 1]


def _decode_steps(profile: Profile) -> pd.DataFrame:
    found = pd.concat([profile.timed("decode_step"), profile.timed("steps")])
    kept = found[(found.kind == "decode_step") & (found.launch == "graph")]
    return even(kept)


def _prefill_steps(profile: Profile) -> pd.DataFrame:
    found = single_chunks(profile.timed("steps"))
    return found[(found.kind == "prefill_step") & (found.launch == "graph")]


def _compared(rows: pd.DataFrame, total: Callable[[Any], float]) -> pd.DataFrame:
    kept = []
    for row in rows.itertuples():
        try:
            kept.append({**row._asdict(), "sum_s": total(row)})
        except KeyError:
            continue
    found = pd.DataFrame(kept)
    return found.assign(ratio=found.time_s / found.sum_s) if len(found) else found


def _bands(of: pd.DataFrame, whole: int) -> list[tuple[str, pd.DataFrame]]:
    cuts = [
        (f"all {whole} SMs", of[of.sms == whole]),
        (f"64 to {whole - 1} SMs", of[(of.sms >= 64) & (of.sms < whole)]),
        ("fewer than 64 SMs", of[of.sms < 64]),
    ]
    return [(name, rows) for name, rows in cuts if len(rows)]


def _each(of: pd.DataFrame) -> str:
    rows = [
        (
            f"{r.q} on {r.h}",
            r.attention.upper(),
            ms(r.time_s),
            ms(r.sum_s),
            ratio(r.ratio),
            tokens(r.sm_mhz),
        )
        for r in of.sort_values(["q", "h"]).itertuples()
    ]
    head = ("chunk on history", "attention", "step ms", "layers + head, ms", "ratio", "MHz in the step")
    return table(head, rows)
