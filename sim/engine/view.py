"""What a policy written in plain Python sees: one replica at a decision, read-only, without the true output lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost import shapes
from sim.cost.pairs import pair_factor
from sim.cost.step import (
    decode_attention_s,
    decode_pass_s,
    dense_s,
    head_s,
    overhang_s,
    prefill_attention_s,
)
from sim.cost.traits import TraitModel, Traits
from sim.engine.cohort import computed_now, decode_need
from sim.engine.decisions import Decode, Launch, Mixed, Plan, Prefill
from sim.engine.deployment import Deployment, Target
from sim.engine.layout import (
    DECODE,
    FREE,
    IN_CHUNKS,
    LANE_BATCH,
    LANE_BUSY,
    LANE_CONTEXT,
    LANE_FLOATS,
    LANE_INTEGERS,
    LANE_KIND,
    LANE_LAYERS,
    LANE_PART,
    LANE_START,
    LANES,
    LANES_F,
    LAYERS_DONE,
    NOW,
    OVERHANG,
    PREFILL,
    READY,
    STEP,
)
from sim.lazy import lazy

__all__ = ["Batch", "Decode", "Lane", "Mixed", "OpenPrefill", "Plan", "Prefill", "View"]

KINDS = ("", "prefill", "decode", "mixed")


class Batch:
    """Columns over some requests, in the order of their list, each of shape (n,); made when first looked at."""

    def __init__(self, q: Any, r: Any, fixed: Fixed, rows: list[int]) -> None:
        self._q, self._r, self._fixed, self._rows = q, r, fixed, rows

    def __len__(self) -> int:
        return len(self._rows)

    def _of(self, column: Any) -> NDArray[np.int64]:
        """Its entries of these requests: of the memory of machine code at once, of a list one by one."""
        if isinstance(column, memoryview):
            return np.asarray(column)[self.id]
        return np.fromiter(map(column.__getitem__, self._rows), np.int64, len(self._rows))

    def _now(self, column: Any) -> NDArray[np.int64]:
        """A column that is kept up to date by the steps of the cohort, see `sim.engine.cohort`."""
        phase, joined, step = self._q.phase, self._q.joined, self._r.iv[STEP]
        if isinstance(column, memoryview):
            return self._of(column) + (self._phase == DECODE) * (step - self._of(joined))
        made = [column[i] + step - joined[i] if phase[i] == DECODE else column[i] for i in self._rows]
        return np.array(made, np.int64)

    @lazy
    def _phase(self) -> NDArray[np.int64]:
        return self._of(self._q.phase)

    @lazy
    def id(self) -> NDArray[np.int64]:
        """Row numbers of the workload, which name requests in a plan."""
        return np.array(self._rows, np.int64)

    @lazy
    def arrival_s(self) -> NDArray[np.float64]:
        """When they came."""
        times = self._q.arrival_s  # a closed loop sets it when it sends the request
        return np.fromiter(map(times.__getitem__, self._rows), np.float64, len(self._rows))

    @lazy
    def prompt_tokens(self) -> NDArray[np.int64]:
        """Prompt lengths."""
        return self._fixed.prompt[self.id]

    @lazy
    def max_new_tokens(self) -> NDArray[np.int64]:
        """What their clients asked for; the true output is at most as long."""
        return self._fixed.max_new[self.id]

    @lazy
    def slo_class(self) -> NDArray[np.int64]:
        """Class numbers, indices into `View.targets`."""
        return self._fixed.slo_class[self.id]

    @lazy
    def priority(self) -> NDArray[np.int64]:
        """Lower is more urgent."""
        return self._fixed.priority[self.id]

    @lazy
    def computed_tokens(self) -> NDArray[np.int64]:
        """Tokens whose KV is in the pool."""
        return self._now(self._q.computed)

    @lazy
    def target_tokens(self) -> NDArray[np.int64]:
        """Tokens to compute before decoding: the prompt, more after a preemption."""
        return self._of(self._q.target)

    @lazy
    def left_tokens(self) -> NDArray[np.int64]:
        """Prompt tokens yet to be computed; 0 for those that decode."""
        return (self.target_tokens - self._of(self._q.computed)) * (self._phase <= PREFILL)

    @lazy
    def generated_tokens(self) -> NDArray[np.int64]:
        """Output tokens so far."""
        return self._now(self._q.generated)

    @lazy
    def decoding(self) -> NDArray[np.bool_]:
        """Can they take part in a decode step?"""
        return self._phase > PREFILL


@dataclass(frozen=True)
class Lane:
    """What a lane is doing or did last: `kind` is prefill, decode, mixed, or "" before the first launch; `sms` its SM
    set; `layers`, `batch` and `context` (summed over the decodes) of that launch, which began at `started_s`."""

    busy: bool
    kind: str
    sms: int
    layers: int
    batch: int
    context: int
    started_s: float


@dataclass(frozen=True)
class OpenPrefill:
    """The prefill pass that has begun on a prefill lane: its chunks, and the layers that it has run."""

    chunks: tuple[tuple[int, int], ...]
    layers_done: int


@dataclass(frozen=True, eq=False)
class Fixed:
    """What never changes during a run: columns of the workload, the deployment, SM sets, what is believed of prices.

    `sms`: SMs of each price partition, the whole GPU first; `believer.belief`: prices, and on two lanes slowdowns.
    """

    prompt: NDArray[np.int64]
    max_new: NDArray[np.int64]
    slo_class: NDArray[np.int64]
    priority: NDArray[np.int64]
    deployment: Deployment
    sm_sets: tuple[tuple[int, int], ...]
    sms: tuple[int, ...]
    believer: Any
    traits: TraitModel

    @property
    def two_lanes(self) -> bool:
        """Are there two?"""
        return bool(self.sm_sets)

    def part(self, sms: int | None) -> int:
        """Price partition of an SM set, -1 if there is none such."""
        return 0 if sms is None else self.sms.index(sms) if sms in self.sms else -1


class View:
    """One replica at a decision: `waiting` in queue order, `running` in the policy's running order, its KV pool.

    `now_s`: the time; `free_blocks`: KV blocks that nobody holds.
    """

    def __init__(self, q: Any, r: Any, fixed: Fixed, waiting: list[int], running: list[int]) -> None:
        self._q, self._r, self._fixed = q, r, fixed
        self.now_s = float(r.fv[NOW])
        self.free_blocks = int(r.iv[FREE])
        self.waiting = Batch(q, r, fixed, waiting)
        self.running = Batch(q, r, fixed, running)

    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""
        return self._fixed.deployment.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._fixed.deployment.block_size

    @property
    def sms(self) -> int:
        """SMs of the GPU."""
        return self._fixed.deployment.sms

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self._fixed.deployment.layers

    @property
    def targets(self) -> tuple[Target, ...]:
        """What each SLO class asks, by the numbers of `Batch.slo_class`."""
        return self._fixed.deployment.targets

    @property
    def partition_sizes(self) -> list[int]:
        """SM counts that the mechanism can give to the side that is asked for."""
        d = self._fixed.deployment
        return d.mechanism.sizes(d.sms, d.compute_capability)

    @property
    def sm_sets(self) -> tuple[tuple[int, int], ...]:
        """(prefill SMs, decode SMs) that may run side by side."""
        return self._fixed.sm_sets

    @lazy
    def lanes(self) -> tuple[Lane, ...]:
        """The prefill lane and the decode lane, with what each is doing; none if the policy has one lane only, which
        is idle whenever it is asked."""
        if not self._fixed.two_lanes:
            return ()
        return self._lane(0), self._lane(1)

    @lazy
    def open_prefill(self) -> OpenPrefill | None:
        """The pass that the prefill lane has begun, if there is one."""
        iv, r = self._r.iv, self._r
        if not self._fixed.two_lanes or iv[IN_CHUNKS] == 0:
            return None
        chunks = tuple((int(r.chunk_id[c]), int(r.chunk_tokens[c])) for c in range(iv[IN_CHUNKS]))
        return OpenPrefill(chunks, int(iv[LAYERS_DONE]))

    @property
    def decode_blocks(self) -> int:
        """New KV blocks that a step of all that can decode takes."""
        return int(decode_need(self._q, self._r))

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def traits(self, launch: Launch) -> Traits:
        """What a candidate launch would ask of the GPU: CTAs, shared memory, FLOPs, bytes."""
        return self._fixed.traits(self.shape(launch))

    def seconds(self, launch: Launch) -> float:
        """Believed GPU seconds of a candidate launch alone on its SM set; KeyError for a set that was not declared."""
        shape, (b, _) = self.shape(launch), self._fixed.believer.belief
        sms = None if isinstance(launch, Mixed) else launch.sms
        part = self._fixed.part(sms)
        if part < 0:
            raise KeyError(f"no SM set of {sms}; there are {self._fixed.sms}")
        batch, context = shape.decode_batch, shape.decode_context_sum
        if not shape.chunks:
            over_s = overhang_s(b, part, batch, self._r.iv[OVERHANG])
            return float(decode_pass_s(b, part, batch, context) + over_s) if batch else 0.0
        seconds = dense_s(b, part, shape.tokens, False) - (len(shape.chunks) - 1) * b.pre_fixed_s[part]
        for q, h in shape.chunks:
            seconds += prefill_attention_s(b, part, q, h)
        seconds += decode_attention_s(b, part, batch, context)
        seconds += overhang_s(b, part, batch, self._r.iv[OVERHANG])
        if shape.layers is not None:
            seconds *= (shape.layers[1] - shape.layers[0]) / self.layers
        if shape.layers is None or shape.layers[1] == self.layers:
            seconds += head_s(b, part, shape.sequences)
        return float(seconds)

    def slowdown(self, prefill: Prefill, decode: Decode) -> tuple[float, float]:
        """Believed factors on the times of a prefill and a decode step side by side; (1, 1) for one lane."""
        fixed = self._fixed
        if not fixed.two_lanes:
            return 1.0, 1.0
        y = fixed.believer.belief[1]
        at = y.config[fixed.part(prefill.sms) * len(y.sms) + fixed.part(decode.sms)]
        if at < 0:
            raise KeyError(f"({prefill.sms}, {decode.sms}) is none of the declared SM sets {fixed.sm_sets}")
        a, b = self.shape(prefill), self.shape(decode)
        history = sum(h for _, h in a.chunks) // max(1, len(a.chunks))
        mean = b.decode_context_sum // max(1, b.decode_batch)
        return (
            float(pair_factor(y, y.factor_prefill, at, a.tokens, history, b.decode_batch, mean)),
            float(pair_factor(y, y.factor_decode, at, a.tokens, history, b.decode_batch, mean)),
        )

    def shape(self, launch: Launch) -> shapes.Launch:
        """A candidate launch as the cost model sees it; each context includes the token being computed."""
        chunks: tuple[tuple[int, int], ...] = ()
        layers = launch.layers if isinstance(launch, Prefill) else None
        if isinstance(launch, Prefill | Mixed):
            named = launch.chunks or (self.open_prefill.chunks if self.open_prefill else ())
            chunks = tuple((int(n), int(computed_now(self._q, self._r, i))) for i, n in named)
        batch, context = 0, 0
        if isinstance(launch, Decode | Mixed):
            rows = self._decodable() if launch.requests is None else launch.requests
            contexts = [int(computed_now(self._q, self._r, i)) + 1 for i in rows]
            batch, context = len(contexts), sum(contexts)
        graph = isinstance(launch, Decode)
        return shapes.Launch(chunks, batch, context, layers=layers, graph=graph)

    def _decodable(self) -> list[int]:
        phase = self._q.phase
        return [i for i in self.running._rows if phase[i] == READY or phase[i] == DECODE]

    def _lane(self, lane: int) -> Lane:
        iv, at = self._r.iv, LANES + lane * LANE_INTEGERS
        part = iv[at + LANE_PART]
        return Lane(
            busy=bool(iv[at + LANE_BUSY]),
            kind=KINDS[iv[at + LANE_KIND]],
            sms=self._fixed.sms[part] if part >= 0 else 0,
            layers=int(iv[at + LANE_LAYERS]),
            batch=int(iv[at + LANE_BATCH]),
            context=int(iv[at + LANE_CONTEXT]) if iv[at + LANE_BATCH] > 0 else 0,
            started_s=float(self._r.fv[LANES_F + lane * LANE_FLOATS + LANE_START]),
        )
