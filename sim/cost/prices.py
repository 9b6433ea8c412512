"""Dense price tables of one (GPU, model, parallelism, profile): what the engine's loop looks up.

All tables are flat and one-dimensional, so that the same source runs on numpy arrays under numba and on
plain lists under CPython. The leading axis of each is the SM partition (index 0: the whole GPU). A price at
run time is look-ups, multiplications and additions in one fixed order; everything else happens when the
tables are made (`sim.cost.compile`).
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np

from sim.columns import Columns, columns

UNBOUNDED = 1 << 40


@columns
class Prices(Columns):
    """Seconds and SM-seconds of one whole forward pass (all layers), by component.

    With P partitions, M = max_tokens + 1, N = max_seqs + 1, S decode segments, Q and H prefill knots:

    - `dense_graph_s[p*M + m]`, `dense_eager_s[p*M + m]`: linear layers, norms, rope, activation, KV write and
      embedding for m tokens, launched as a CUDA graph (decode-only steps; padding to captured sizes included)
      or eagerly (steps with a prefill chunk). `dense_graph_sm`, `dense_eager_sm`: SM-seconds with a resident warp.
    - `head_s[p*N + n]`, `head_sm`: LM head and sampling for n sequences.
    - decode attention of a batch of b sequences whose context sum is c tokens (each context includes the token
      being computed): segment s = `dec_seg[min(c // b >> dec_shift, len(dec_seg) - 1)]`, then
      `dec_a[(p*N + b)*S + s] + dec_b[(p*N + b)*S + s] * c` seconds; `dec_sm_a`, `dec_sm_b` SM-seconds.
    - a ragged decode batch, whose longest context exceeds the mean by `overhang` tokens (`sim.engine.ragged`), takes
      `over_s[p*N + b] * overhang` seconds more, `over_sm` SM-seconds; `over_on` 0 where no batch does. The sequences of
      b decodes are split into `spare_graph[b]` (of a graph) or `spare_eager[b]` pieces more than there are of them;
      -1: into so many that they are even.
    - prefill attention of one chunk of q new tokens on h tokens of history: bilinear between the knots
      i = `pre_qi[q]`, j = `pre_hi[min(h >> pre_shift, len(pre_hi) - 1)]` of `pre_s[(p*Q + i)*H + j]`
      with knot positions `pre_q`, `pre_h` (as float) and inverse widths `pre_dq`, `pre_dh`
      (width index i lies between knots i and i+1); `pre_sm` likewise. Several chunks in one pass add up,
      less `pre_fixed_s[p]` (the kernels' fixed cost) for each chunk after the first.
    - host: `host_graph_s[n]`, `host_eager_s[n]`: host time for a step of n sequences that the GPU can overlap;
      `gap_graph_s[n]`, `gap_eager_s[n]`: time per step that cannot be hidden; `gap_group_s`: per group of its layers.
      step = max(host, gpu) + gap.
    - `cover_*`: the largest tokens of a pass, chunk, history, decode batch and mean context that the profile's curves
      cover; steps beyond are counted as flagged.
    - attention of a step with chunks and decodes in another mode than separate kernels (`mix_on` 1, else 0): seconds of
      `mix_ratio` over those of separate ones, at q chunk tokens (the next knot up: `mix_q_at[(q + 127) >> 7]`), mean
      keys k of the chunk's queries, b decodes and mean context c, linear between the knots `mix_k_knot`, `mix_b_knot`,
      `mix_c_knot` (inverse widths `_inv`; knot below by `_at` of k >> 6, b and c >> 6), flat in that order.
      `mix_chunks`: chunks that the kernel takes at once; `mix_reason`: why it never runs (`sim.cost.fallbacks`), or 0.
    - the clock under the power cap (`sim.engine.heat`), if `heat_on` is 1: `heat_room_s` seconds of full passes at the
      top clock; a pass of m tokens draws `heat_draw[m]` of that a second and takes `heat_gain[m]` of its price less; b
      decodes win `heat_rest[b]` back a second and take up to `heat_decode` more; an idle GPU wins back `heat_idle`,
      in `heat_gap` of the time that a step is not on the GPU.
    - `noise`: multiplicative jitter factors around 1, looked up by (step counter mod length).
    """

    partitions: int
    max_tokens: int
    max_seqs: int
    segments: int
    q_knots: int
    h_knots: int
    dec_shift: int
    pre_shift: int
    dense_graph_s: Any
    dense_eager_s: Any
    dense_graph_sm: Any
    dense_eager_sm: Any
    head_s: Any
    head_sm: Any
    dec_seg: Any
    dec_a: Any
    dec_b: Any
    dec_sm_a: Any
    dec_sm_b: Any
    over_on: int
    over_s: Any
    over_sm: Any
    spare_graph: Any
    spare_eager: Any
    pre_qi: Any
    pre_hi: Any
    pre_q: Any
    pre_h: Any
    pre_dq: Any
    pre_dh: Any
    pre_s: Any
    pre_sm: Any
    pre_fixed_s: Any
    host_graph_s: Any
    host_eager_s: Any
    gap_graph_s: Any
    gap_eager_s: Any
    gap_group_s: float
    mix_on: int
    mix_chunks: int
    mix_reason: int
    mix_q_at: Any
    mix_k_at: Any
    mix_k_knot: Any
    mix_k_inv: Any
    mix_b_at: Any
    mix_b_knot: Any
    mix_b_inv: Any
    mix_c_at: Any
    mix_c_knot: Any
    mix_c_inv: Any
    mix_ratio: Any
    noise: Any
    cover_tokens: int = UNBOUNDED
    cover_chunk: int = UNBOUNDED
    cover_history: int = UNBOUNDED
    cover_batch: int = UNBOUNDED
    cover_context: int = UNBOUNDED
    heat_on: int = 0
    heat_room_s: float = 0.0
    heat_idle: float = 0.0
    heat_gap: float = 1.0
    heat_decode: float = 0.0
    heat_draw: Any = field(default_factory=lambda: np.zeros(1))
    heat_gain: Any = field(default_factory=lambda: np.zeros(1))
    heat_rest: Any = field(default_factory=lambda: np.zeros(1))
