"""Attention of mixed batches: POD against separate kernels, what it refuses, attention's share of a layer."""

from __future__ import annotations

from typing import Any

import pandas as pd

from calib.fit.fused import shapes_of
from calib.fit.fused_terms import VARIANTS, heads_of
from calib.report.data import Profile
from calib.report.svg import Axis, Series, chart
from calib.report.text import Section, number, percent, ratio, table, tokens, us
from sim.cost.fused_ctas import FusedShape
from sim.cost.measured_fused import FusedSurface, load_fused

NAMES = {
    "serial_fa2": "FA2, then decode",
    "serial_fa3": "FA3, then decode",
    "batched": "one FA2 call for all rows",
    "streams": "FA2 and decode, two streams",
    "streams_fa3": "FA3 and decode, two streams",
    "pod": "POD",
    "batch_pod": "BatchPOD",
}
SERIAL = ("serial_fa2", "serial_fa3")
OTHERS = tuple(name for name in NAMES if name != "serial_fa2")
NAMED = 9  # shapes of the sweep that others published or looked at
SHARES = ((0.0, 0.2), (0.2, 0.4), (0.4, 0.6), (0.6, 0.8), (0.8, 1.01))
LEAST_SHARE = 0.2  # POD-Attention's own sweep keeps shapes where each side has as much of the serial time
# relative error against float32 above which a result counts as wrong
WRONG = 2e-2


def fused(profile: Profile) -> Section | None:
    """Every way to run a mixed batch's attention against the two serial ones."""
    shapes = _shapes(profile)
    if shapes.empty or not {"pod", *SERIAL} <= set(shapes.columns):
        return None
    two, three = (shapes[base] / shapes.pod for base in SERIAL)
    lead = (
        f"POD is faster than separate FA2 kernels in {percent((two > 1).mean())} of {len(two)} shapes (median "
        f"{ratio(two.median())}×, most {ratio(two.max())}×, least {ratio(two.min())}×), but than FA3 and then decode, "
        f"what a server on this card would run, only in {percent((three > 1).mean())} (median "
        f"{ratio(three.median())}×, most {ratio(three.max())}×, least {ratio(three.min())}×)"
    )
    streams = _against(shapes, "streams_fa3", "serial_fa3")
    if len(streams):
        best = _against(shapes, "pod", "streams_fa3")
        lead += (
            f"; FA3 beside decode on two streams is {ratio(streams.median())}× FA3-serial and beats POD in "
            f"{percent((best < 1).mean())}"
        )
    blocks = [_wins(shapes), _balanced(shapes), _by_share(shapes), _extremes(shapes), _published(profile)]
    blocks.append(_prices(profile))
    note = (
        "Speed-up is serial time over this time, all variants of a shape measured in one block on the whole GPU, bf16, "
        "32 query and 8 KV heads of 128, one chunk beside a decode batch of equal contexts, on a grid and scattered "
        "between its sizes. Serial, batched, streams "
        "and BatchPOD are replays of a graph; POD clears its tickets by a call on the default stream and is timed from "
        "a filled queue. Decode is FlashInfer's tensor-core FA2 kernel everywhere."
    )
    picture = _picture(shapes)
    body = [f"![{name}](IMG/{name}.svg)" for name in picture]
    return Section(
        "Fused attention: POD against separate kernels",
        f"{lead}.",
        [*body, *(b for b in blocks if b), note],
        picture,
    )


def _shapes(profile: Profile) -> pd.DataFrame:
    """Shapes of the grid and those scattered between its sizes."""
    parts = [profile.timed(sweep) for sweep in ("fused", "fused_scatter")]
    made = [shapes_of(part, model=str(profile.run["model"])) for part in parts if len(part)]
    return pd.concat(made, ignore_index=True) if made else pd.DataFrame()


def _against(shapes: pd.DataFrame, name: str, base: str) -> pd.Series:
    """Speed-up of `name` over `base`, shapes where both were measured."""
    if name not in shapes or base not in shapes:
        return pd.Series(dtype=float)
    return (shapes[base] / shapes[name]).dropna()


def _wins(shapes: pd.DataFrame) -> str:
    rows = []
    for name in OTHERS:
        cells: list[str] = []
        for base in SERIAL:
            speed = _against(shapes, name, base)
            if name == base or speed.empty:
                cells += ["–"] * 4
                continue
            cells += [percent((speed > 1).mean()), *(ratio(speed.quantile(q)) for q in (0.05, 0.5, 0.95))]
        rows.append((NAMES[name], len(_against(shapes, name, SERIAL[0])), *cells))
    parts = ("faster in", "p5", "median", "p95")
    head = ("how", "n", *(f"{part} (over {base[-3:].upper()}-serial)" for base in SERIAL for part in parts))
    return table(head, rows)


def _balanced(shapes: pd.DataFrame) -> str:
    share = prefill_share(shapes)
    kept = shapes[(share >= LEAST_SHARE) & (share <= 1 - LEAST_SHARE)]
    if kept.empty:
        return ""
    parts = []
    for name in ("pod", "batch_pod", "streams_fa3"):
        speeds = [_against(kept, name, base) for base in SERIAL]
        if min(map(len, speeds)):
            middle = " and ".join(
                f"{ratio(s.mean())}× (most {ratio(s.max())}×) over {base[-3:].upper()}-serial"
                for s, base in zip(speeds, SERIAL, strict=True)
            )
            parts.append(f"{NAMES[name]} {middle}")
    return (
        f"Where each side has at least {percent(LEAST_SHARE)} of the FA2-serial time (as in POD-Attention's own sweep "
        "on an A100: mean 1.28×, most 1.59× over FA2-serial, never slower), the mean is "
        f"(n = {len(kept)}): {'; '.join(parts)}."
    )


def prefill_share(shapes: pd.DataFrame) -> pd.Series:
    """About which share of the serial FA2 time prefill has: by its FLOPs at FA2's rate and decode's bytes at the
    bandwidth that decode reaches here."""
    work = 4.0 * 32 * 128 * (shapes.q * shapes.h + shapes.q * (shapes.q + 1) / 2) / 300e12
    moved = shapes.batch * shapes.context * 4096 / 4.2e12
    return work / (work + moved)


def _by_share(shapes: pd.DataFrame) -> str:
    share, rows = prefill_share(shapes), []
    for low, high in SHARES:
        part = shapes[(share >= low) & (share < high)]
        if part.empty:
            continue
        cells = []
        for name in ("pod", "batch_pod", "streams_fa3"):
            cells += [ratio(_against(part, name, base).median()) for base in SERIAL]
        rows.append((f"{percent(low)}–{percent(min(high, 1.0))}", len(part), *cells))
    head = ["prefill's share", "n"]
    for name in ("POD", "BatchPOD", "FA3 on streams"):
        head += [f"{name} over {base}-serial" for base in ("FA2", "FA3")]
    return "Median speed-up by prefill's share of the serial time:\n\n" + table(head, rows)


def _extremes(shapes: pd.DataFrame) -> str:
    rows = []
    for name in ("pod", "batch_pod"):
        for base in SERIAL:
            speed = _against(shapes, name, base)
            for which, at in (("largest win", speed.idxmax()), ("largest loss", speed.idxmin())):
                one = shapes.loc[at]
                rows.append(
                    (
                        f"{NAMES[name]} over {base[-3:].upper()}-serial, {which}",
                        ratio(speed[at]),
                        f"{tokens(one.q)} on {tokens(one.h)}",
                        f"{tokens(one.batch)} × {tokens(one.context)}",
                        us(one[base]),
                        us(one[name]),
                    )
                )
    head = ("of", "speed-up", "chunk on history", "decode batch × context", "serial µs", "fused µs")
    return table(head, rows)


def _published(profile: Profile) -> str:
    found = profile.timed("fused")
    order = list(dict.fromkeys(found.point))[:NAMED]
    rows = []
    for point in order:
        part = found[found.point == point].drop_duplicates("attention").set_index("attention")
        one = part.iloc[0]
        shape = f"{one.q_tokens.replace(';', ' + ')} on {one.history_tokens.replace(';', ' + ')}"
        times = [us(part.time_s[name]) if name in part.index else "–" for name in NAMES]
        rows.append((shape, f"{tokens(one.decode_batch)} × {tokens(one.context_mean)}", *times))
    head = ("chunk on history", "decode batch × context", *(f"{NAMES[name]}, µs" for name in NAMES))
    return "Shapes that others published or an earlier look was at:\n\n" + table(head, rows, words=2)


def _prices(profile: Profile) -> str:
    """Errors of the prices of fused kernels on shapes that no fit saw."""
    errors = profile.about.get("errors") or {}
    rows = []
    for variant in VARIANTS:
        held = (errors.get("fused_attention") or {}).get(variant) or {}
        for name, what in (
            ("grid", "the grid's other shapes"),
            ("between", "other shapes between its sizes"),
        ):
            rows += _error_row(NAMES[variant], what, held.get(name))
        for run, found in (errors.get("random_shapes") or {}).items():
            operators, mine = found.get("operators") or {}, f"fused_attention/{variant}"
            for name, one in operators.items():
                if name == mine or name.startswith((f"{mine} ", f"{mine},")):
                    rest = name.removeprefix(mine).strip(" ,()").replace("), ", ", ")
                    rows += _error_row(NAMES[variant], f"{run}, random{f', {rest}' if rest else ''}", one)
    if not rows:
        return ""
    head = ("kernel", "shapes", "n", "median", "p95", "max", "bias")
    return (
        "POD and BatchPOD are priced by FlashInfer's own plan (tiles, KV splits, CTAs), a schedule of those CTAs and "
        "a dozen terms fitted to 120 shapes. Errors of seconds on shapes that no fit saw (aim: 5 % median, 12 % p95; "
        "*mean context*: a ragged batch taken as contexts alike, as a simulation does):\n\n"
        + table(head, rows, words=2)
    )


def _error_row(kernel: str, what: str, one: Any) -> list[tuple[object, ...]]:
    if not one:
        return []
    return [
        (kernel, what, one["points"], *(percent(one[key], 1) for key in ("median", "p95", "max", "bias")))
    ]


def _picture(shapes: pd.DataFrame) -> dict[str, str]:
    share = prefill_share(shapes)
    made = {}
    for base in SERIAL:
        series = [
            Series(NAMES[name], _medians(share, _against(shapes, name, base)))
            for name in ("pod", "batch_pod", "streams_fa3", "batched")
        ]
        title = f"Speed-up over {base[-3:].upper()}-serial, medians"
        axes = (Axis("prefill's share of the serial time", low=0), Axis("speed-up"))
        made[f"fused-{base[-3:]}"] = chart(title, *axes, series)
    return made


def _medians(share: pd.Series, speed: pd.Series) -> list[tuple[float, float]]:
    """Medians over twentieths of the share."""
    bins = (share.loc[speed.index] * 20).astype(int)
    return [
        ((float(b) + 0.5) / 20, float(part.median())) for b, part in speed.groupby(bins) if len(part) >= 5
    ]


def others(profile: Profile) -> Section | None:
    """The same for other heads, float16 and head dimension 64: medians, and how prices of fused kernels meet them."""
    parts = [
        (name, part)
        for sweep, name in (("fused_shapes", "published"), ("fused_heads", "scattered"))
        if len(part := profile.timed(sweep)) and "dtype" in part
    ]
    rows = []
    for name, found in parts:
        for (model, dtype), part in found.groupby(["model", found.dtype.fillna("bfloat16")], sort=True):
            if row := _of_heads(profile, str(model), str(dtype), name, part):
                rows.append(row)
    if not rows:
        return None
    head = ["heads of", "query / KV / dim", "type", "shapes", "n"]
    for name in ("POD", "BatchPOD", "FA3 on streams"):
        head += [f"{name} over {base}-serial" for base in ("FA2", "FA3")]
    head += [f"{NAMES[name]}: error of its price" for name in VARIANTS]
    gains = [float(row[6]) for row in rows if row[6] != "–"]
    lead = (
        f"With {len({(row[1], row[2]) for row in rows})} other sets of heads and types POD is {min(gains):.2f} to "
        f"{max(gains):.2f} times as fast as FA3 and then decode (medians)."
    )
    note = (
        "The terms of fused kernels (`sim.cost.fused_ctas`) were fitted to 32 query and 8 KV heads of 128 in bfloat16; "
        "errors (median / 95th percentile) of other heads of 128 and of float16 are of shapes that no fit saw, so "
        "their prices are transferred and hold as they are. Policy `pod` for Llama-2-7B is priced by them on a grid of "
        "its own heads, labelled as measured. Head dimension 64 has terms of its own, fitted to every other of its "
        "shapes; the errors are of the rest."
    )
    return Section("Fused attention with other heads and types", lead, [table(head, rows, words=4), note])


def _of_heads(profile: Profile, model: str, dtype: str, name: str, part: pd.DataFrame) -> tuple[object, ...]:
    times = part.drop_duplicates(["point", "attention"]).pivot(
        index="point", columns="attention", values="time_s"
    )
    if not set(SERIAL) <= set(times.columns):
        return ()
    cells = []
    for variant in ("pod", "batch_pod", "streams_fa3"):
        for base in SERIAL:
            speed = _against(times, variant, base)
            cells.append(ratio(speed.median()) if len(speed) else "–")
    errors = (profile.about.get("errors") or {}).get("fused_attention") or {}
    held = model if dtype == "bfloat16" else f"{model} {dtype}"
    for variant in VARIANTS:
        one = (errors.get(variant) or {}).get("heads", {}).get(held) if name == "scattered" else None
        cells.append(f"{percent(one['median'], 1)} / {percent(one['p95'], 1)}" if one else "–")
    heads = " / ".join(map(str, heads_of(model)))
    return (model, heads, dtype, name, len(times), *cells)


def limits(profile: Profile) -> Section | None:
    """What the fused wrappers do with what they may not support."""
    found = profile.tables.get("fused_limits", pd.DataFrame())
    if found.empty:
        return None
    rows, refused = [], 0
    for one in found.sort_values(["label", "attention"]).itertuples():
        reason = getattr(one, "skip", None)
        if isinstance(reason, str) and reason.startswith("MissingJITCacheError"):
            continue  # not built for this run: says nothing of the library
        wrong = not isinstance(reason, str) and not one.error < WRONG
        refused += isinstance(reason, str) or wrong
        said = reason if isinstance(reason, str) else f"error {number(one.error * 100, 2)} %"
        rows.append((one.label, NAMES[str(one.attention)], said))
    lead = f"{refused} of {len(rows)} requests were refused or answered wrongly, the rest agree with float32."
    note = (
        "By FlashInfer's documentation and sources, not tried here: no logits soft cap, no fp8 queries, equal heads "
        "and head dimension on both sides, head dimension 64, 128 or 256, no log-sum-exp from POD's own wrapper."
    )
    return Section(
        "What the fused wrappers refuse", lead, [table(("asked", "of", "answer"), rows, words=3), note]
    )


def share(profile: Profile) -> Section | None:
    """Attention's share of a mixed layer's time by context, and what POD in its place would make of the layer."""
    found = profile.timed("attention_share")
    if found.empty:
        return None
    surface = _surface(profile)
    rows, shares, gains = [], [], []
    layers, parts = found[found.kind == "mixed_layer"], found[found.kind == "fused_attention"]
    for one in layers.sort_values(["attention", "decode_batch", "context_mean"]).itertuples():
        same = parts[
            (parts.label == f"serial_{one.attention}")
            & (parts.decode_batch == one.decode_batch)
            & (parts.context_mean == one.context_mean)
        ]
        if len(same):
            part = float(same.time_s.iloc[0])
            shares.append((one.context_mean, part / one.time_s))
            context = f"{tokens(one.decode_batch)} × {tokens(one.context_mean)}"
            cells = [us(one.time_s), us(part), percent(part / one.time_s)]
            if surface is not None:
                fused_s = _pod_s(profile, surface, one)
                gain = one.time_s / (one.time_s - part + fused_s)
                gains.append((str(one.attention), one.context_mean, gain))
                cells += [us(fused_s), ratio(gain)]
            rows.append((str(one.attention).upper(), context, *cells))
    if not rows:
        return None
    lengths = sorted({c for c, _ in shares})
    ends = [[s for c, s in shares if c == length] for length in (lengths[0], lengths[-1])]
    lead = (
        f"Attention is {percent(min(ends[0]))} to {percent(max(ends[0]))} of a mixed layer at contexts of "
        f"{tokens(lengths[0])} and {percent(min(ends[1]))} to {percent(max(ends[1]))} at {tokens(lengths[-1])} (a "
        "chunk of 1024 at the end of its prompt beside 16 or 60 decodes)"
    )
    head = ["prefill by", "decode batch × context", "layer µs", "attention µs", "share"]
    if gains:
        head += ["POD instead, µs", "layer's gain"]
        told = []
        for backend in ("fa2", "fa3"):
            held = [(c, g) for name, c, g in gains if name == backend]
            if held:
                text = " and ".join(
                    f"{ratio(min(g for c, g in held if c == length))} to "
                    f"{ratio(max(g for c, g in held if c == length))}× at {tokens(length)}"
                    for length in (lengths[0], lengths[-1])
                )
                told.append(f"in place of {backend.upper()} and decode {text}")
        lead += f"; the layer with POD, by its price, is faster or slower by a factor: {', '.join(told)}"
    return Section("Attention's share of a mixed layer", f"{lead}.", [table(head, rows, words=2)])


def _surface(profile: Profile) -> FusedSurface | None:
    path = profile.folder / "fused.json" if profile.folder else None
    held = load_fused(path, "measured") if path is not None and path.is_file() else None
    return held if held is not None and held.of_ctas("pod") else None


def _pod_s(profile: Profile, surface: FusedSurface, one: Any) -> float:
    """POD's price of the attention of a mixed layer's row."""
    contexts = (int(one.context_mean),) * int(one.decode_batch)
    shape = FusedShape(int(one.q_tokens), int(one.history_tokens), contexts)
    return float(surface.seconds("pod", heads_of(str(profile.run["model"])), (shape,))[0])
