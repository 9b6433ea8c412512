"""Tables of what a mode of attention costs against separate kernels, over the shape of a mixed step.

As measured where the profile has a curve (`CurveProfile.fused`), else by the CTA-level model (`sim.cost.fused_modes`).
That model has no length scale of its own: twice the keys on both sides take twice the time. So it is run over (chunk
tokens, decode batch, keys of prefill over keys of decode), and fixed times are added for each length.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.cost.attention import AttentionMode
from sim.cost.cta_grid import MixedShape
from sim.cost.cta_terms import CtaTerms, cta_terms
from sim.cost.fallbacks import fallback_of, most_chunks
from sim.cost.fused_modes import FusedRun, fused_run, serial_s
from sim.cost.fused_table import shape_of
from sim.cost.operators import causal_pairs, decode_shape, prefill_shape
from sim.cost.shapes import Floats, Launch

if TYPE_CHECKING:
    from sim.cost.profiled import ProfiledCost

# chunks are priced at the next of these up, longer ones as the last: whole rows of tiles to 2048
Q_KNOTS = (*range(128, 2049, 128), 2560, 3072, 4096, 6144, 8192)
KEY_KNOTS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
BATCH_KNOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512, 1024)
Q_SHIFT, KEY_SHIFT = 7, 6  # positions that the index arrays tell apart
REFERENCE = 4096  # context at which the CTA-level model is run
DOUBLINGS = 5  # of prefill's keys over decode's, either way; beyond, one side is all
# name of a mode in a profile's measured surface
MEASURED = {
    "flashinfer": ("pod",),
    "flashinfer-batch": ("batch_pod",),
    "batched": ("batched",),
    "streams": ("streams", "streams_fa3"),
}
RULE = "a list schedule of CTAs"


def fused_label(cost: ProfiledCost, mode: AttentionMode) -> str:
    """Where the prices of a mode come from, as profiles label their curves."""
    if mode.mode == "serial":
        return ""
    if mode.speedup > 0:
        return f"extrapolated from separate attention by a given speed-up of {mode.speedup:g}"
    if name := measured_name(cost, mode):
        return str(cost.profile.fused.label_of(name, _heads(cost)))  # type: ignore[union-attr]
    return f"extrapolated from attention kernels alone by {RULE}"


def measured_name(cost: ProfiledCost, mode: AttentionMode) -> str:
    """The mode's name in the profile's measured surface; empty if there is none."""
    surface, model = cost.profile.fused, cost.model
    if surface is None:
        return ""
    kind = mode.kernel(cost.gpu.compute_capability) if mode.mode == "pod" else mode.mode
    names = [name for name in MEASURED.get(kind, ()) if surface.answers(name, _heads(cost))]
    # of streams of different prefill kernels, those of the one that runs
    one = prefill_shape(model, np.array([1024]), np.array([4096]))

    def apart(kernel: str) -> float:
        return float(cost.profile.curve(kernel).timing(one, cost.gpu.sms).seconds[0])

    own = apart("prefill_attention")
    return min(
        names, key=lambda name: abs(apart(f"prefill_attention/{surface.base(name)}") - own), default=""
    )


def fused_tables(
    cost: ProfiledCost, mode: AttentionMode, max_tokens: int, max_seqs: int, max_context: int, page_size: int
) -> dict[str, Any]:
    """The `mix_*` fields of `sim.cost.prices.Prices`."""
    if mode.mode == "serial":
        return _tables(
            (128, 256), (64, 128), (1, 2), np.ones((2, 2, 2, 2)), mix_on=0, mix_reason=0, mix_chunks=0
        )
    q, batch = _knots(Q_KNOTS, max_tokens), _knots(BATCH_KNOTS, max_seqs)
    keys = _knots(KEY_KNOTS, max_context)
    scale = cost.factor("fused_attention")
    if mode.speedup > 0:
        ratio = np.full((len(q), len(keys), len(batch), len(keys)), 1.0 / mode.speedup)
    else:
        ratio = _ratios(cost, mode, q, keys, batch)
    return _tables(
        q,
        keys,
        batch,
        ratio * scale,
        mix_on=1,
        mix_reason=fallback_of(mode, cost.model, cost.gpu, page_size),
        mix_chunks=most_chunks(mode, cost.gpu),
    )


def _knots(known: tuple[int, ...], most: int) -> tuple[int, ...]:
    """The knots up to the first one at or beyond `most`, at least two."""
    last = max(1, next((at for at, knot in enumerate(known) if knot >= most), len(known) - 1))
    return known[: last + 1]


def _tables(
    q: tuple[int, ...], keys: tuple[int, ...], batch: tuple[int, ...], ratio: Floats, **more: int
) -> dict[str, Any]:
    rows = np.arange(0, q[-1] + 1, 1 << Q_SHIFT)
    made: dict[str, Any] = {
        **more,
        "mix_ratio": np.ascontiguousarray(ratio.ravel()),
        "mix_q_at": np.searchsorted(np.array(q), rows),
    }
    for name, knots, shift in (("k", keys, KEY_SHIFT), ("b", batch, 0), ("c", keys, KEY_SHIFT)):
        at = np.array(knots, dtype=np.int64)
        positions = np.arange(0, at[-1] + 1, 1 << shift)
        made[f"mix_{name}_at"] = np.clip(np.searchsorted(at, positions, side="right") - 1, 0, len(at) - 2)
        made[f"mix_{name}_knot"] = at.astype(np.float64)
        made[f"mix_{name}_inv"] = 1.0 / np.diff(at)
    return made


def _heads(cost: ProfiledCost) -> tuple[int, int, int]:
    return cost.model.q_heads, cost.model.kv_heads, cost.model.head_dim


def _ratios(
    cost: ProfiledCost, mode: AttentionMode, q: tuple[int, ...], keys: tuple[int, ...], batch: tuple[int, ...]
) -> Floats:
    """Seconds over separate kernels', shape (q, keys, batch, context)."""
    modelled = modelled_ratios(cta_terms(cost.gpu), mode, _heads(cost), q, keys, batch)
    name = measured_name(cost, mode)
    if not name:
        return modelled
    surface: Any = cost.profile.fused
    chunk, mean_keys = np.meshgrid(np.array(q), np.array(keys), indexing="ij")
    decodes, context = np.meshgrid(np.array(batch), np.array(keys), indexing="ij")
    history = np.maximum(mean_keys - (chunk + 1) // 2, 0)
    own, decode_s = apart_s(cost, chunk, history, decodes, context)
    wide = (axis[:, :, None, None] for axis in (chunk, history))
    covered = surface.covered(name, *wide, decodes, context)
    if surface.of_ctas(name):
        seconds = surface.table_s(name, _heads(cost), q, keys, batch, keys)
        return modelled if seconds is None else np.where(covered, seconds / (own + decode_s), modelled)
    base, _ = apart_s(cost, chunk, history, decodes, context, f"/{surface.base(name)}")
    # the surface is of separate kernels with the back end that it was measured beside, the tables of those that run
    measured = surface.table(name, chunk, history, decodes, context) * (base + decode_s) / (own + decode_s)
    return np.where(covered, measured, modelled)


def apart_s(
    cost: ProfiledCost, chunk: Any, history: Any, decodes: Any, context: Any, backend: str = ""
) -> tuple[Floats, Floats]:
    """Seconds of prefill attention (of a named `/backend` or the one that runs) and of decode attention, one layer: of
    chunks with two axes more behind, for arrays of two axes each."""
    steps = decode_shape(cost.model, decodes, (decodes * context).astype(np.float64))
    decode_s = cost.profile.curve("decode_attention").timing(steps, cost.gpu.sms).seconds
    shapes = prefill_shape(cost.model, chunk, history)
    own = cost.profile.curve(f"prefill_attention{backend}").timing(shapes, cost.gpu.sms).seconds
    return np.asarray(own[:, :, None, None]), np.asarray(decode_s)


def solo_ratio(cost: ProfiledCost, mode: AttentionMode, launch: Launch) -> float:
    """What one mixed step's attention takes in a mode of the seconds of separate kernels: what the tables sample."""
    tokens = sum(q for q, _ in launch.chunks)
    scale = cost.factor("fused_attention")
    if mode.speedup > 0:
        return scale / mode.speedup
    keys = int(sum(causal_pairs(np.array(q), np.array(h)) for q, h in launch.chunks)) // tokens
    context = max(1, launch.decode_context_sum // launch.decode_batch)
    name, surface = measured_name(cost, mode), cost.profile.fused
    if name and surface is not None and surface.of_ctas(name):
        one = shape_of(tokens, keys, launch.decode_batch, context)
        if surface.covered(name, one.q, one.h, launch.decode_batch, context).item():
            sizes = [np.array([[value]]) for value in (one.q, one.h, launch.decode_batch, context)]
            own, decode_s = apart_s(cost, sizes[0], sizes[1], sizes[2], sizes[3])
            seconds = float(surface.seconds(name, _heads(cost), (one,))[0])
            return seconds / (float(own.item()) + float(decode_s.item())) * scale
    found = _ratios(cost, mode, (tokens,), (keys, context), (launch.decode_batch,))
    return float(found[0, 0, 0, 1]) * scale


@lru_cache(maxsize=32)
def modelled_ratios(
    terms: CtaTerms,
    mode: AttentionMode,
    heads: tuple[int, int, int],
    q: tuple[int, ...],
    keys: tuple[int, ...],
    batch: tuple[int, ...],
) -> Floats:
    """The CTA-level model over knots, shape (q, keys, batch, keys); `heads`: query heads, KV heads, head dimension."""
    doublings = np.arange(-DOUBLINGS, DOUBLINGS + 1)
    shape = (len(q), len(batch), len(doublings))
    # per length of context, and fixed: of the mode, and of separate kernels
    fused, serial = np.zeros((2, *shape)), np.zeros((2, *shape))
    for i, tokens in enumerate(q):
        for n, power in enumerate(doublings):
            history = max(0, int(REFERENCE * 2.0**power) - (tokens + 1) // 2)
            for j, decodes in enumerate(batch):
                one = MixedShape(tokens, history, decodes, REFERENCE, *heads)
                run, apart = fused_run(terms, mode, one), serial_s(terms, one)
                fixed = fixed_s(terms, mode, run)
                fused[:, i, j, n] = run.seconds - fixed, fixed
                serial[:, i, j, n] = sum(apart) - 2 * terms.launch_s, 2 * terms.launch_s
    at = np.array(keys, dtype=np.float64)
    # (keys, context)
    apart_by = np.clip(np.log2(at[:, None] / at[None, :]), -DOUBLINGS, DOUBLINGS) + DOUBLINGS
    low = np.minimum(apart_by.astype(np.int64), len(doublings) - 2)
    part = (apart_by - low)[None, :, None, :]

    def seconds(table: Floats) -> Floats:
        body, fixed = (
            picked + (beyond - picked) * part
            for picked, beyond in (
                (one[:, :, low].transpose(0, 2, 1, 3), one[:, :, low + 1].transpose(0, 2, 1, 3))
                for one in table
            )
        )
        return np.asarray(body * (at / REFERENCE)[None, None, None, :] + fixed)

    return seconds(fused) / seconds(serial)


def fixed_s(terms: CtaTerms, mode: AttentionMode, run: FusedRun) -> float:
    """Seconds of a run that do not grow with its lengths."""
    kernels = 2 if mode.mode == "streams" else 1
    merges = int(run.prefill_splits > 1) + int(run.decode_splits > 1)
    return kernels * terms.launch_s + merges * terms.merge_s
