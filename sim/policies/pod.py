"""POD-Attention: Sarathi batches whose prefill and decode attention run in one kernel (arXiv:2410.18038).

The scheduler is that of the artefact's host (vattention:sarathi-lean at ef3fff2): Sarathi-Serve with one prefill chunk
a batch, since its kernel takes no more. `shape_aware: false` packs batches as Sarathi-Serve does, and steps with
several chunks fall back on separate kernels where the kernel cannot take them. The bounds on what a step may carry are
not the paper's: a fast kernel helps nobody's token latency if the freed time goes into larger chunks, so a chunk can be
cut to `max_chunk`, or until the step is believed to end within a latency limit. Every step keeps to the limit, so the
slowest does; means do not enter. A limit never cuts a chunk below `least_chunk`, or prompts would starve.
"""

from __future__ import annotations

import math
from typing import Any

from sim.cost.attention import AttentionMode
from sim.cost.step import chunked_pass_s, prefill_attention_s
from sim.engine.deployment import Deployment
from sim.engine.lane import begin, execute
from sim.engine.layout import N_CHUNKS, OVERHANG, REPEAT, WHOLE_GPU
from sim.errors import SimctlError
from sim.jit import jit
from sim.policies.base import Knob
from sim.policies.parts.predict import next_batch, next_context
from sim.policies.parts.targets import target_s
from sim.policies.sarathi import SarathiPolicy
from sim.policies.sarathi import plan as sarathi_plan

MAX_CHUNK, LEAST_CHUNK = 4, 5  # behind Sarathi's integers
STEP_LIMIT_S = 0
NO_LIMIT_S = 1e9  # limits beyond are none
ROW_TILE = 64  # a chunk is cut to whole rows of the kernel's smaller tile
KERNEL = "POD-Attention, arXiv:2410.18038"


@jit
def planned_tokens(a: Any) -> int:
    """Prompt tokens in the plan."""
    tokens = 0
    for c in range(a.iv[N_CHUNKS]):
        tokens += a.chunk_tokens[c]
    return tokens


@jit
def step_with_s(q: Any, r: Any, b: Any, a: Any, tokens: int, batch: int, context: int) -> float:
    """Seconds that a step of the first `tokens` of the plan's prompt tokens beside the decodes is believed to take."""
    left, chunks, pairs, attention_s = tokens, 0, 0, 0.0
    for c in range(a.iv[N_CHUNKS]):
        size, history = min(a.chunk_tokens[c], left), q.computed[a.chunk_id[c]]
        if size > 0:
            attention_s += prefill_attention_s(b, WHOLE_GPU, size, history)
            pairs += size * history + size * (size + 1) // 2
            chunks += 1
            left -= size
    over, rows = r.iv[OVERHANG], chunks + batch
    gpu_s = chunked_pass_s(b, WHOLE_GPU, chunks, tokens, pairs, attention_s, batch, context, over)
    return float(max(gpu_s, b.host_eager_s[rows]) + b.gap_eager_s[rows])


@jit
def cut_chunks(a: Any, tokens: int) -> None:
    """Keep the first `tokens` of the plan's prompt tokens."""
    kept = 0
    for c in range(a.iv[N_CHUNKS]):
        size = min(a.chunk_tokens[c], tokens)
        if size > 0:
            a.chunk_tokens[c] = size
            tokens -= size
            kept = c + 1
    a.iv[N_CHUNKS] = kept


@jit
def _bounded(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any, tokens: int) -> int:
    """How many of the plan's prompt tokens the step may carry."""
    batch = next_batch(r, a)
    if ki[MAX_CHUNK] > 0:
        tokens = min(tokens, ki[MAX_CHUNK])
    if batch <= 0 or tokens <= ki[LEAST_CHUNK]:
        return tokens
    limit_s, context = kf[STEP_LIMIT_S], next_context(q, r, a)
    if limit_s > NO_LIMIT_S or step_with_s(q, r, b, a, tokens, batch, context) <= limit_s:
        return tokens
    # the longest whole number of row tiles within the limit
    low, high = 0, (tokens - 1) // ROW_TILE
    while low < high:
        middle = (low + high + 1) // 2
        if step_with_s(q, r, b, a, middle * ROW_TILE, batch, context) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return max(low * ROW_TILE, ki[LEAST_CHUNK])


@jit
def plan(q: Any, r: Any, a: Any, b: Any, ki: Any, kf: Any) -> None:
    """Sarathi's step, with its chunks cut to the bounds."""
    sarathi_plan(q, r, a, ki, kf)
    limited = kf[STEP_LIMIT_S] <= NO_LIMIT_S
    if a.iv[N_CHUNKS] == 0 or not (limited or ki[MAX_CHUNK] > 0):
        return
    planned = planned_tokens(a)
    allowed = _bounded(q, r, a, b, ki, kf, planned)
    if limited:
        a.iv[REPEAT] = 1  # the next chunk has more history, and may have to be shorter
    if allowed < planned:
        cut_chunks(a, allowed)


@jit
def advance(
    q: Any, r: Any, a: Any, p: Any, b: Any, ki: Any, kf: Any, limit: float, look_ahead: float
) -> None:
    """Run the replica until `limit`."""
    while begin(q, r, p, limit):
        plan(q, r, a, b, ki, kf)
        if not execute(q, r, a, p, look_ahead):
            return


class PodPolicy(SarathiPolicy):
    """Fused attention over Sarathi batches."""

    name = "pod"
    source = f"{KERNEL} sections 4 and 5"
    mirrors = "vattention ef3fff2 (ASPLOS'25 artefact), FlashInfer 0.6.8 for its variants"
    predicts = True
    knobs = {  # noqa: RUF012
        **{name: knob for name, knob in SarathiPolicy.knobs.items() if name != "one_prefill"},
        "token_budget": Knob(1024, "tokens of a step", f"{KERNEL} section 5.2 (Llama)", minimum=1),
        "variant": Knob(
            "auto",
            "the fused kernel; auto: the paper's on an A100, else FlashInfer's BatchPOD",
            f"{KERNEL}; flashinfer:flashinfer/pod.py",
            choices=("auto", "artefact", "flashinfer", "flashinfer-batch"),
        ),
        "tickets": Knob(
            "proportional",
            "which kind of CTA an SM's next one is (artefact)",
            f"{KERNEL} section 4.2.1",
            choices=("proportional", "50:50"),
        ),
        "split": Knob(
            "limited",
            "splits of the prefill's keys: held down, or FlashDecoding's (artefact)",
            f"{KERNEL} section 4.2.4",
            choices=("limited", "vanilla"),
        ),
        "ctas_per_sm": Knob(0, "2 or 4; 0: by the kernel's rule (artefact)", f"{KERNEL} section 4.2.2", 0, 4),
        "contiguous_kv": Knob(True, "KV cache not paged (artefact)", f"{KERNEL} section 5.1 (vAttention)"),
        "speedup": Knob(
            0.0,
            "separate kernels' seconds over the fused one's; 0: as measured or modelled",
            "own choice",
            minimum=0,
        ),
        "shape_aware": Knob(True, "keep to batches that the kernel takes", "vattention:sarathi-lean"),
        "max_chunk": Knob(0, "most prompt tokens of a step; 0: the budget alone", "own choice", minimum=0),
        "least_chunk": Knob(64, "prompt tokens that a limit leaves", "own choice", minimum=1),
        "step_limit_ms": Knob(
            None, "most that a mixed step may be believed to take", "own choice", minimum=1
        ),
        "limit_from_slo": Knob(
            False, "take the limit from the experiment's ITL target, or its TPOT", "own choice"
        ),
    }
    advance = advance  # type: ignore[assignment]  # it takes believed prices, too

    def __init__(self, label: str | None = None, **settings: Any) -> None:
        super().__init__(label, **settings)
        try:
            self._mode = AttentionMode(
                "pod",
                variant=self["variant"],
                tickets=self["tickets"],
                split=self["split"],
                ctas_per_sm=int(self["ctas_per_sm"]),
                contiguous=self["contiguous_kv"],
                speedup=float(self["speedup"]),
            )
        except SimctlError as error:
            raise SimctlError(f"policy '{self.label}': {error}") from None

    @property
    def heeds_estimator(self) -> bool:
        """Only a limit on what a step may take is kept by belief."""
        return bool(self["limit_from_slo"] or self["step_limit_ms"] is not None)

    def attention(self, deployment: Deployment) -> AttentionMode:
        """The fused kernel that the knobs name."""
        return self._mode

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Sarathi's integers, the bounds in tokens; the limit in seconds."""
        limit_s = math.inf if self["step_limit_ms"] is None else self["step_limit_ms"] / 1e3
        if self["limit_from_slo"]:
            limit_s = min(limit_s, target_s(None, deployment, ("itl_s", "tpot_s"), math.inf))
        return [
            int(self["token_budget"]),
            self.max_seqs(deployment),
            self._watermark_blocks(deployment),
            int(self["shape_aware"]),
            int(self["max_chunk"]),
            int(self["least_chunk"]),
        ], [limit_s]
