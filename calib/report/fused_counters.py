"""Hardware counters and joules of mixed attention by variant."""

from __future__ import annotations

import pandas as pd

from calib.report.data import Profile
from calib.report.fused import NAMES
from calib.report.text import Section, number, percent, ratio, table, tokens, us

MERGES = "MergeStates"  # kernels that merge KV splits


def counted(profile: Profile) -> Section | None:
    """Waves, occupancy, tensor pipe, HBM, L2 and shared memory of every kernel of a variant."""
    found = profile.timed("fused_counters")
    if found.empty:
        return None
    rows = []
    for one in found.itertuples():
        shape = (
            f"{one.q_tokens} on {one.history_tokens}, {tokens(one.decode_batch)} × {tokens(one.context_mean)}"
        )
        rows.append(
            (
                shape,
                NAMES[str(one.label)],
                _kernel(str(one.kernel)),
                us(one.time_s),
                tokens(one.grid),
                ratio(one.waves),
                percent(one.occupancy, 1),
                percent(one.sm_active),
                percent(one.tensor_active),
                percent(one.dram_active),
                number(one.l2_bytes / 1e9),
                number(one.smem_bytes / 1024),
                tokens(one.registers),
            )
        )
    fused = found[found.kernel.str.contains("POD")]
    merges = found[found.kernel.str.contains(MERGES)]
    slow = merges[merges.kernel.str.contains("Variable") & (merges.grid == merges.grid.max())]
    single = merges[~merges.kernel.str.contains("Variable")]
    lead = (
        f"Fused kernels keep two CTAs on an SM ({percent(fused.occupancy.median(), 1)} of its warps), and use "
        f"{percent(fused.tensor_active.min())} to {percent(fused.tensor_active.max())} of the tensor pipe and "
        f"{percent(fused.dram_active.min())} to {percent(fused.dram_active.max())} of HBM at a time"
    )
    if len(slow) and len(single):
        lead += (
            f"; where a paged chunk is split, merging it takes {us(slow.time_s.min())} to {us(slow.time_s.max())} µs, "
            f"and {us(single.time_s.min())} to {us(single.time_s.max())} µs in POD's own wrapper, whose merge is "
            "another kernel: what BatchPOD loses on short chunks"
        )
    head = (
        "chunk on history, decodes × context",
        "how",
        "kernel",
        "µs",
        "CTAs",
        "waves",
        "warps",
        "SMs active",
    )
    head += ("tensor", "HBM", "L2, GB", "shared memory, KiB", "registers")
    note = (
        "Nsight Compute, each kernel once and alone, clocks as they are; warps: of an SM's 64, waves of two CTAs an SM "
        "(one for FA3). Decode's kernel is the same in every serial variant. The plans that prices are made of "
        "(`sim.cost.flashinfer_plan`) give these numbers of CTAs."
    )
    return Section("Counters of fused and separate attention", f"{lead}.", [table(head, rows, words=3), note])


def _kernel(name: str) -> str:
    return name.removeprefix("void ").removeprefix("flashinfer::").removesuffix("Kernel")


def joules(profile: Profile) -> Section | None:
    """Watts and joules of variants that a graph holds, each held for a second or two."""
    found = profile.timed("fused_power")
    if found.empty or "energy_j" not in found:
        return None
    hot = found[found.energy_j.notna()]
    rows, saved = [], []
    for point, part in hot.groupby(
        ["q_tokens", "history_tokens", "decode_batch", "context_mean"], sort=False
    ):
        held = part.drop_duplicates("label").set_index("label")
        for label, one in held.iterrows():
            base = held.energy_j.get("serial_fa2", float("nan"))
            cells = (us(one.time_s), tokens(one.power_w), tokens(one.sm_mhz), number(one.energy_j * 1e3))
            rows.append((_shape(point), NAMES[str(label)], *cells, ratio(one.energy_j / base)))
            if label == "batch_pod":
                saved.append((one.energy_j / base, one.time_s / held.time_s.get("serial_fa2", float("nan"))))
    if not rows:
        return None
    energy, time = (sum(values) / len(saved) for values in zip(*saved, strict=True)) if saved else (0.0, 0.0)
    lead = (
        f"BatchPOD takes {ratio(energy)} of the joules of separate FA2 kernels in {ratio(time)} of their time (n = "
        f"{len(saved)}) "
        "(POD-Attention, section 5: 0.80 of the joules on average on an A100)."
    )
    head = ("chunk on history, decodes × context", "how", "µs, hot", "W", "MHz", "mJ", "of FA2-serial")
    return Section("Joules of fused and separate attention", lead, [table(head, rows, words=2)])


def _shape(point: tuple[object, ...]) -> str:
    q, h, batch, context = (pd.to_numeric(value) for value in point)
    return f"{tokens(q)} on {tokens(h)}, {tokens(batch)} × {tokens(context)}"
