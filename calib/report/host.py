"""What the host pays around a step."""

from __future__ import annotations

from calib.report.data import Profile
from calib.report.text import Section, number, table, us

MEANING = {
    "launch": "one small kernel, eager",
    "graph_replay": "a whole decode step's graph",
    "graph_capture": "capturing and instantiating it",
    "plan_decode": "FlashInfer plan() of the decode batch",
    "plan_prefill": "FlashInfer plan() of min(batch, 16) chunks of 512 on 512",
    "partition_hop": "from a kernel on one partition to a dependent one on another (device time)",
    "read_tokens": "copy the sampled tokens to the host and wait",
    "event_sync": "record an event on an idle stream and wait",
}


def costs(profile: Profile) -> Section | None:
    """Median and quartiles of each host cost by batch."""
    found = profile.timed("host")
    if found.empty:
        return None
    cells = {(str(r.label), int(r.decode_batch)): r for r in found.itertuples()}
    batches = sorted({batch for _, batch in cells})
    labels = [label for label in MEANING if any((label, b) in cells for b in batches)]
    rows = []
    for label in labels:
        shown = [cells.get((label, b)) for b in batches]
        texts = [f"{us(r.time_s)} ({us(r.p25_s)}–{us(r.p75_s)})" if r is not None else "–" for r in shown]
        rows.append((f"{label}: {MEANING[label]}", *texts))
    facts = []
    for label, said in (
        ("launch", "an eager launch costs {} µs"),
        ("graph_replay", "a graph replay {} µs"),
        ("partition_hop", "a hop between partitions {} µs"),
        ("plan_decode", "plan() of a decode batch {} µs"),
    ):
        values = [float(cells[(label, b)].time_s) * 1e6 for b in batches if (label, b) in cells]
        if values:
            facts.append(said.format(f"{number(min(values), 2)} to {number(max(values), 2)}"))
    lead = f"Host times by batch (1 to {batches[-1]} sequences of 1024 tokens): {', '.join(facts)}."
    n = found["count"].median()
    note = (
        f"Median (quartiles) in µs of {n:.0f} calls each, from Python. A graph replay's time grows and scatters "
        "with what the launch queue holds; the hop is device time, the second kernel's own time taken off."
    )
    head = ("cost, µs", *(f"batch {b}" for b in batches))
    return Section("Host costs", lead[0].upper() + lead[1:], [table(head, rows), note])
