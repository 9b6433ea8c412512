"""What may be done to a trace before it is served: each returns a new trace with a note on what it did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sim.errors import SimctlError
from sim.workload.arrivals import spread_in_bins
from sim.workload.trace import Trace

ON_OVERLENGTH = ("reject", "truncate")
MOST_TOKENS = 2**31 - 1


def window(trace: Trace, start_s: float, end_s: float) -> Trace:
    """Requests that arrive in [start_s, end_s); the clock then starts at `start_s`."""
    if trace.arrival_s is None:
        raise SimctlError(
            f"workload.window_s: trace '{trace.name}' has no arrivals to choose by; use max_requests"
        )
    inside = np.flatnonzero((trace.arrival_s >= start_s) & (trace.arrival_s < end_s))
    if len(inside) == 0:
        raise SimctlError(
            f"workload.window_s: no request of trace '{trace.name}' arrives in [{start_s:g}, {end_s:g}) s; "
            f"it spans 0 to {trace.arrival_s[-1]:.6g} s"
        )
    part = trace.take(
        inside, f"window [{start_s:g}, {end_s:g}) s: {len(inside):,} of {len(trace):,} requests"
    )
    assert part.arrival_s is not None
    return replace(part, arrival_s=part.arrival_s - start_s)


def first(trace: Trace, count: int) -> Trace:
    """The first `count` requests, or all if there are fewer."""
    kept = np.arange(min(count, len(trace)))
    return trace.take(kept, f"first {len(kept):,} of {len(trace):,} requests")


def subsample(trace: Trace, amount: float, rng: np.random.Generator) -> Trace:
    """A random subset in the order of the trace: a share if `amount` is below 1, else a number of requests.

    Arrivals are kept, so the rate falls with the share.
    """
    if amount > 1 and not float(amount).is_integer():
        raise SimctlError(
            f"workload.subsample: {amount:g} is neither a share below 1 nor a whole number of requests"
        )
    count = max(1, round(amount * len(trace))) if amount < 1 else min(int(amount), len(trace))
    kept = np.sort(rng.choice(len(trace), size=count, replace=False))
    return trace.take(kept, f"random {count:,} of {len(trace):,} requests, arrivals kept")


def shuffle(trace: Trace, rng: np.random.Generator) -> Trace:
    """Requests in random order over the same arrivals, which breaks the file's serial correlation."""
    mixed = trace.take(rng.permutation(len(trace)), "requests in random order over the same arrivals")
    return replace(mixed, arrival_s=trace.arrival_s)


def spread(trace: Trace, bin_s: float, rng: np.random.Generator) -> Trace:
    """Stamps logged on a grid of `bin_s` seconds moved to a random place within their bin."""
    if trace.arrival_s is None:
        raise SimctlError(f"workload.spread_s: trace '{trace.name}' has no arrivals to spread")
    moved = spread_in_bins(trace.arrival_s, bin_s, rng)
    return replace(
        trace, arrival_s=moved, notes=(*trace.notes, f"arrivals spread within bins of {bin_s:g} s")
    )


def stretch(trace: Trace, request_rate: float) -> Trace:
    """Scale the stamps to a mean rate; bursts keep their shape, their seconds do not."""
    arrival = trace.arrival_s
    if arrival is None or len(trace) < 2 or arrival[-1] == arrival[0]:
        raise SimctlError(
            f"workload.rescale: trace '{trace.name}' has no time between its requests to stretch to "
            f"{request_rate:g} requests/s; use rescale: redraw"
        )
    own = (len(trace) - 1) / float(arrival[-1] - arrival[0])
    factor = own / request_rate
    note = f"rescaled by stretch from {own:.4g} to {request_rate:g} requests/s: stamps times {factor:.6g}"
    return replace(trace, arrival_s=arrival * factor, notes=(*trace.notes, note))


def limit_length(trace: Trace, context_limit: int, on_overlength: str) -> tuple[Trace, int]:
    """Deal with requests whose prompt and output together exceed `context_limit` tokens.

    `reject` leaves them out and returns their count; `truncate` shortens the prompt to what leaves room for
    the output (at least one token), and the output only if that is not enough.
    """
    over = trace.prompt_tokens + trace.output_tokens > context_limit
    count = int(over.sum())
    if count == 0:
        return trace, 0
    what = f"{count:,} of {len(trace):,} requests over the context limit of {context_limit:,} tokens"
    if on_overlength == "truncate":
        prompt = np.where(over, np.maximum(1, context_limit - trace.output_tokens), trace.prompt_tokens)
        output = np.where(over, np.minimum(trace.output_tokens, context_limit - prompt), trace.output_tokens)
        note = f"{what} truncated (prompt first)"
        return replace(trace, prompt_tokens=prompt, output_tokens=output, notes=(*trace.notes, note)), 0
    if count == len(trace):
        raise SimctlError(
            f"workload '{trace.name}': all {count:,} requests exceed the context limit of {context_limit:,} "
            f"tokens (shortest {int((trace.prompt_tokens + trace.output_tokens).min()):,}); choose a model "
            "with a longer context or on_overlength: truncate"
        )
    return trace.take(np.flatnonzero(~over), f"{what} rejected"), count


def ask_for(trace: Trace, wish: int | float | None, context_limit: int | None) -> Trace:
    """Set what clients ask for (`max_new_tokens`).

    `wish` is None (the file's own column, else the true length), a float factor of the true length, rounded
    up, or a whole number for all. Nobody can ask for more than the context limit
    leaves, nor receive more than was asked: longer outputs are cut and counted.
    """
    output, notes = trace.output_tokens, list(trace.notes)
    if wish is None:
        asked = output if trace.max_new_tokens is None else trace.max_new_tokens
    elif isinstance(wish, float):
        asked = np.minimum(np.ceil(output * wish - 1e-9), MOST_TOKENS).astype(np.int64)
        notes.append(f"clients ask for {wish:g} times the output they get")
    else:
        asked = np.full(len(trace), min(int(wish), MOST_TOKENS), np.int64)
        notes.append(f"clients ask for {int(wish):,} output tokens")
    cut = int(np.sum(output > asked))
    if cut:
        notes.append(f"{cut:,} outputs cut to the max_new_tokens asked for")
        output = np.minimum(output, asked)
    if context_limit is not None:
        asked = np.maximum(output, np.minimum(asked, context_limit - trace.prompt_tokens))
    return replace(trace, output_tokens=output, max_new_tokens=asked, notes=tuple(notes))
