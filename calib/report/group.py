"""GPUs of one host together: rates of collectives, SMs that they hold, what runs beside them, KV on its way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from calib.collectives.factors import ctas, slowed
from calib.collectives.knots import ABOVE, EVERY_OTHER, RANDOM
from calib.collectives.sizes import COLLECTIVES, bus_factor
from calib.report.data import Profile
from calib.report.svg import Axis, Level, Series, chart
from calib.report.text import Section, number, percent, ratio, size, table, us

SHOWN = (1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
LARGE = 64 << 20
BESIDE = "beside"
WAYS = ("copy/contiguous", "sendrecv/contiguous", "copy/blocks", "kernel/blocks", "sendrecv/blocks")


def collectives(profile: Profile) -> Section | None:
    """Time and bus bandwidth of every collective against size, graph and eager."""
    tables = {name: found for name in COLLECTIVES if not (found := _timed(profile, name)).empty}
    if not tables:
        return None
    gpus = int(next(iter(tables.values())).gpus.max())
    lead, levels = _reached(profile, tables, gpus)
    rate = Axis("bus bandwidth, GB/s", 0, low=0.0)
    series = [
        Series(name, [(s, s * bus_factor(name, gpus) / t / 1e9) for s, t in _medians(found, "graph").items()])
        for name, found in tables.items()
    ]
    picture = chart(f"NCCL between {gpus} GPUs, in CUDA graphs", Axis("bytes", 2), rate, series, levels)
    body = [f"![bus bandwidth](IMG/collectives.svg)\n\n{_counted(profile)}"]
    rows = []
    for name, found in tables.items():
        graph, eager = _medians(found, "graph"), _medians(found, "eager")
        for at in SHOWN:
            if at in graph.index:
                busy = at * bus_factor(name, gpus) / graph[at] / 1e9
                cells = (us(graph[at]), us(eager.get(at, np.nan)), number(busy))
                rows.append((name, size(at), *cells, us(_host(found, at))))
    body.append(
        table(("collective", "message", "graph µs", "eager µs", "bus GB/s", "host µs a call"), rows, 2)
    )
    body.append(_errors(profile))
    return Section("Collectives of several GPUs", lead, [b for b in body if b], {"collectives": picture})


def _timed(profile: Profile, sweep: str) -> pd.DataFrame:
    found = profile.timed(sweep)
    for column in ("gpus", "message_bytes", "max_ctas", "piece_bytes", "host_s", "alone_s", "allreduces"):
        if column not in found:
            found[column] = np.nan
    return found


def _medians(found: pd.DataFrame, launch: str) -> pd.Series:
    """Median seconds by message size."""
    return found[found.launch == launch].groupby("message_bytes").time_s.median()


def _host(found: pd.DataFrame, at: int) -> float:
    rows = found[(found.launch == "eager") & (found.message_bytes == at)]
    return float(rows.host_s.median()) if len(rows) else float("nan")


def _reached(profile: Profile, tables: Mapping[str, pd.DataFrame], gpus: int) -> tuple[str, list[Level]]:
    link = (profile.run.get("group") or {}).get("link") or {}
    one_way = float(link.get("gb_s_one_way") or 0.0)
    name = "allreduce" if "allreduce" in tables else next(iter(tables))
    graph, eager = _medians(tables[name], "graph"), _medians(tables[name], "eager")
    large = graph[graph.index >= LARGE]
    best = max((s * bus_factor(name, gpus) / t / 1e9 for s, t in large.items()), default=float("nan"))
    share = f", {percent(best / one_way)} of {number(one_way)} GB/s in one direction" if one_way else ""
    small = graph.index.min()
    text = (
        f"An {name} of {gpus} GPUs reaches {number(best)} GB/s{share}; one of {size(small)} takes "
        f"{us(graph[small])} µs in a CUDA graph and {us(eager.get(small, np.nan))} µs launched eagerly."
    )
    return text, [Level(one_way, "NVLink, one direction")] if one_way else []


def _counted(profile: Profile) -> str:
    group = profile.run.get("group") or {}
    link = group.get("link") or {}
    said = [f"{group.get('gpus', '?')} × {group.get('name', 'GPU')}", f"driver {group.get('driver', '?')}"]
    said += [f"NCCL {group.get('nccl', '?')}", f"seed {group.get('seed', '?')}", str(group.get("date", ""))]
    if link.get("links"):
        said.append(f"{link['links']} NVLinks of {link.get('gb_s_per_link') or '?'} GB/s each way by NVML")
    settings = (group.get("environment") or {}).items()
    said += [f"{name}={value}" for name, value in settings]
    return (
        f"{', '.join(s for s in said if s)}. Bytes are counted as nccl-tests counts them (all-reduce: the buffer of "
        "one GPU; all-gather: the whole result; reduce-scatter: the whole input; all-to-all: the send buffer; "
        "sendrecv and exchange: one way and both ways at once, bytes sent by a GPU). A sample is up to 40 calls in a "
        "row between two CUDA events, the first behind a barrier on the GPUs; its time is the longest of the ranks', "
        "a row the median of samples. Random bf16 numbers; every size's result was compared with float32 first. "
        "NVLink multicast was off."
    )


def _errors(profile: Profile) -> str:
    """A row a curve: median and 95th percentile on what it does not hold."""
    found = (profile.about.get("errors") or {}).get("collectives") or {}
    curves = {name: of for name, of in found.items() if not name.startswith(BESIDE)}
    folds = list(dict.fromkeys(f for of in curves.values() for f in of if f != EVERY_OTHER or len(of) == 1))
    if all(of.get(ABOVE) == of.get(RANDOM) for of in curves.values()):
        folds = [fold for fold in folds if fold != ABOVE]  # every random size is
    rows = [(name, *(_scored(of.get(fold)) for fold in folds)) for name, of in curves.items()]
    if not rows:
        return ""
    text = (
        "Errors of the curves on sizes that they do not hold, median / 95th percentile (n); random sizes that are in "
        "no table lie above 64 KiB. Eager calls of most sizes wait for the host, whose time a call differs between "
        "machines and from minute to minute; captured ones do not:\n\n"
    )
    return text + table(("curve", *folds), rows)


def _scored(one: Mapping[str, Any] | None) -> str:
    if not one:
        return "–"
    return f"{percent(one['median'], 1)} / {percent(one['p95'], 1)} ({one['points']})"


def holds(profile: Profile) -> Section | None:
    """CTAs of NCCL's kernels by message, and what fewer of them or fewer SMs cost."""
    kernels = profile.tables.get("collective_kernels", pd.DataFrame())
    if "grid" not in kernels:
        return None
    kernels = kernels[kernels.grid.notna() & kernels.kernel.str.contains("nccl", case=False, na=False)].copy()
    if kernels.empty:
        return None
    kernels["ctas"] = kernels.grid.map(ctas)
    limited = kernels.max_ctas.notna() if "max_ctas" in kernels else pd.Series(False, index=kernels.index)
    free = kernels[~limited]
    sizes = sorted(free.message_bytes.dropna().unique())
    rows = []
    for kind, of in free.groupby("kind", sort=False):
        most = of.groupby("message_bytes").ctas.max()
        rows.append((kind, *(str(int(most[s])) if s in most.index else "–" for s in sizes)))
    most = free[free.kind == "allreduce"].groupby("message_bytes").ctas.max()
    lead = (
        f"NCCL's all-reduce holds {int(most.min())} SMs for the smallest messages and {int(most.max())} for the "
        "largest (one CTA an SM, read from the kernel's grid by the profiler)."
        if len(most)
        else "CTAs of NCCL's kernels, read by the profiler."
    )
    body = [table(("CTAs of", *(size(s) for s in sizes)), rows)]
    return Section("SMs that a collective holds", lead, [*body, *_fewer(profile)])


def _fewer(profile: Profile) -> list[str]:
    """All-reduce under a limit of CTAs, and on a stream that owns few SMs, over without either."""
    found, free = _timed(profile, "collective_limits"), _medians(_timed(profile, "allreduce"), "graph")
    if found.empty:
        return []
    sizes, rows = sorted(found.message_bytes.unique()), []
    for column, word in (("max_ctas", "at most {} CTAs"), ("sms", "stream of {} SMs")):
        for limit, of in found[found[column].notna()].groupby(column):
            times = of.groupby("message_bytes").time_s.median()
            cells = [ratio(times.get(s, np.nan) / free.get(s, np.nan)) for s in sizes]
            rows.append((word.format(int(limit)), *cells))
    text = "All-reduce with less than it would take, time over its time without a limit:\n\n"
    return [text + table(("", *(size(s) for s in sizes)), rows)]


def beside(profile: Profile) -> Section | None:
    """Compute and all-reduces at once."""
    found = _timed(profile, "collective_corun")
    if found.empty or "neighbour_kind" not in found:
        return None
    both = _both_sides(found)
    if both.empty:
        return None
    both["what"] = [_compute(of) for _, of in both.iterrows()]
    free = both[both.limit.isna()]
    splits = sorted(free.sms.unique(), reverse=True)
    rows = []
    for (what, message), of in free.groupby(["what", "neighbour_message_bytes"]):
        cells = []
        for sms in splits:
            one = of[of.sms == sms]
            cells.append(
                f"{ratio(one.slow.median())} / {ratio(one.slow_other.median())}" if len(one) else "–"
            )
        rows.append((what, size(message), *cells))
    of_layers = free[free.kind.str.endswith("_layer")]
    layers, apart = of_layers[of_layers.sms == profile.sms], of_layers[of_layers.sms == profile.sms - 8]
    lead = (
        f"On the same SMs, layers beside all-reduces that never pause take {ratio(layers.slow.median())} times as long "
        f"({ratio(layers.slow.min())} to {ratio(layers.slow.max())}) and the all-reduces "
        f"{ratio(layers.slow_other.median())}: together {ratio(_gain(layers))} times what gets done one after the "
        "other, since grids made for all SMs and NCCL's wait for each other. On a partition that leaves NCCL 8 SMs "
        f"layers take {ratio(apart.slow.median())} times as long as alone there."
        if len(layers) and len(apart)
        else "Compute beside all-reduces that never pause."
    )
    heads = ["shared" if s == profile.sms else f"{int(s)} + {profile.sms - int(s)}" for s in splits]
    body = [table(("compute", "all-reduce", *heads), rows, 2), *_limited(both)]
    body.append(
        "Slowdown of the compute / of the all-reduce: mean over alone on the same SMs, measured in the same block. "
        "`a + b`: compute on a partition of a SMs, the collective's stream on the other b. Only iterations that lie "
        "wholly in the time when both ran count; both GPUs run both sides, the slower GPU is shown. All-reduces here "
        "divide by the number of GPUs, so that numbers stay in range however often they go round."
    )
    body += _second(profile)
    return Section("Collectives beside compute", lead, body)


def _gain(both: pd.DataFrame) -> float:
    """What two sides get done at once over one after the other: the sum of their rates."""
    return float((1.0 / both.slow + 1.0 / both.slow_other).median())


def _second(profile: Profile) -> list[str]:
    """How far off the factors are from those of another run."""
    found = (profile.about.get("errors") or {}).get("collectives") or {}
    return [
        f"Factors of operators on those of {name.removeprefix(BESIDE + ', ')}, median / 95th percentile (n): compute "
        f"{_scored(of.get('compute'))}, all-reduces {_scored(of.get('collective'))}."
        for name, of in found.items()
        if name.startswith(BESIDE)
    ]


def _both_sides(found: pd.DataFrame) -> pd.DataFrame:
    """Rows of the compute with the slowdown and the limit of CTAs of the collective beside them."""
    found["slow"] = slowed(found).factor
    mine = found[found.neighbour_kind.notna() & (found.kind != "allreduce")].set_index("point")
    other = found[found.kind == "allreduce"].set_index("point")
    other = other[["slow", "max_ctas"]].rename(columns={"slow": "slow_other", "max_ctas": "limit"})
    return mine.join(other, how="inner").reset_index()


def _compute(of: pd.Series) -> str:
    """A shape in words."""
    text = str(of.kind).replace("_", " ")
    if of.decode_batch == of.decode_batch:
        return f"{text}, {int(of.decode_batch)} × {int(of.context_max)}"
    return f"{text}, {int(of.m)} tokens" if of.m == of.m else text


def _limited(both: pd.DataFrame) -> list[str]:
    """The same with communicators of few CTAs."""
    rows = []
    few = both[both.limit.notna()]
    for (what, message, limit), of in few.groupby(["what", "neighbour_message_bytes", "limit"]):
        cells = (ratio(of.slow.median()), ratio(of.slow_other.median()))
        rows.append((what, size(message), f"at most {int(limit)}", *cells))
    if not rows:
        return []
    head = ("compute, all SMs", "all-reduce", "CTAs", "compute slowdown", "all-reduce slowdown")
    return ["With communicators that may use few CTAs:", table(head, rows, 3)]


def moved(profile: Profile) -> Section | None:
    """KV caches from one GPU to the next: rates by method and layout, alone and beside compute."""
    found = _timed(profile, "kv_transfer")
    if found.empty:
        return None
    found["piece_bytes"] = found.piece_bytes.fillna(0)
    full = found.piece_bytes.max()
    one = found[(found.layers == 1) & found.piece_bytes.isin((0, full))]
    series, rows, best = [], [], {}
    for label in WAYS:
        of = one[one.label == label]
        graph = _medians(of, "graph")
        if graph.empty:
            continue
        series.append(Series(label.replace("/", ", "), [(s, s / t / 1e9) for s, t in graph.items()]))
        best[label] = max(s / t / 1e9 for s, t in graph.items())
        eager = _medians(of, "eager")
        for at in (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 1 << 30):
            if at in graph.index:
                cells = (us(graph[at]), us(eager.get(at, np.nan)), number(at / graph[at] / 1e9))
                rows.append((label.replace("/", ", "), size(at), *cells))
    if not rows:
        return None
    rates = ", ".join(f"{label.replace('/', ' ')} {number(rate)}" for label, rate in best.items())
    lead = f"Best rates of moving KV from one GPU to the next, GB/s, enqueued by a CUDA graph: {rates}."
    picture = chart(
        "KV from one GPU to the next", Axis("bytes of a message", 2), Axis("GB/s", low=0.0), series
    )
    body = [
        "![KV transfers](IMG/kv-transfer.svg)",
        table(("way", "message", "graph µs", "eager µs", "GB/s"), rows, 2),
    ]
    body += [_layered(found), _besides(profile)]
    body.append(
        f"Blocks: pieces of {size(full)} (16 tokens' keys and values of one layer of 8 KV heads of 128 in bf16), "
        "scattered at random on both sides. copy: one asynchronous copy a piece through the copy engines; kernel: our "
        "own, 32 CTAs that read pages and write the other GPU's memory; sendrecv: NCCL, scattered pages gathered into "
        "a buffer before and scattered behind. Times are the sender's where the receiver takes no part. What arrived "
        "was compared with what was sent."
    )
    return Section("KV transfer between GPUs", lead, [b for b in body if b], {"kv-transfer": picture})


def _layered(found: pd.DataFrame) -> str:
    """Layer after layer over as many single messages."""
    rows = []
    for (label, piece, launch, message), of in found[found.layers > 1].groupby(
        ["label", "piece_bytes", "launch", "message_bytes"]
    ):
        one = found[
            (found.layers == 1)
            & (found.label == label)
            & (found.piece_bytes == piece)
            & (found.launch == launch)
            & (found.message_bytes == message)
        ]
        if len(one):
            layers, seconds = int(of.layers.iloc[0]), float(of.time_s.median())
            pieces = size(piece) if piece else "whole"
            factor = seconds / (layers * float(one.time_s.median()))
            cells = (f"{layers} × {size(message)}", us(seconds), ratio(factor))
            rows.append((str(label).replace("/", ", "), pieces, launch, *cells))
    if not rows:
        return ""
    head = ("way", "pieces", "launch", "messages", "µs", "over as many single ones")
    return "A layer's message behind the other, as layer-wise transfers send them:\n\n" + table(head, rows, 4)


def _besides(profile: Profile) -> str:
    found = _timed(profile, "kv_corun")
    if found.empty or "neighbour_kind" not in found:
        return ""
    found["slow"] = slowed(found).factor
    for name in ("neighbour_m", "neighbour_decode_batch", "neighbour_context_max"):
        if name not in found:
            found[name] = np.nan
    rows = []
    for _, of in found[found.kind == "kv_transfer"].groupby(
        ["label", "neighbour_kind", "neighbour_m", "neighbour_decode_batch", "neighbour_context_max"],
        dropna=False,
    ):
        compute = found[found.point.isin(of.point) & (found.kind != "kv_transfer")]
        if compute.empty:
            continue
        first, kind = compute.iloc[0], str(of.neighbour_kind.iloc[0])
        side = "prefill on the sender" if kind == "prefill_layer" else "decode on the receiver"
        what = f"{int(first.m)} tokens" if kind == "prefill_layer" else f"batch {int(first.decode_batch)}"
        cells = (ratio(of.slow.median()), ratio(compute.slow.median()))
        rows.append((str(of.label.iloc[0]).replace("/", ", "), f"{side}, {what}", *cells))
    if not rows:
        return ""
    head = ("way", "beside", "transfer slowdown", "compute slowdown")
    return "Beside compute of an 8B model, 8 MiB messages without a pause:\n\n" + table(head, rows, 2)
