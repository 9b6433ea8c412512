"""Bullet: prefill and decode side by side on SM sets that are chosen anew at every step of either.

arXiv:2504.19516 (ASPLOS 2026), Algorithm 1: prefill decides after every `layer_step` layers, decode at every step. A
decision predicts TTFT and TPOT under the present split (`bullet_prices`, `bullet_queue`, `bullet_track`). Decode gets
the fewest SMs that meet TPOT, more if it misses it; if TTFT is missed as well, the split that balances both
(`bullet_split`). A burst may pause decode altogether while the slack of TPOT lasts, and decode takes all SMs beside the
last layers of a prefill that nothing follows (`bullet_plan`). Sets overlap while a change is under way.

An estimator's error costs what differs between SM sets: alpha takes out what all of them share, and at light loads no
set is scarce. `{noisy: {sigma: 0.3}}` multiplies mean TTFT by 1.02 to 6, by the draw, where decode holds a tight TPOT
beside a full prefill queue: judge noise by several seeds.

Left open there and chosen here: layer_step 1; percentiles are over the requests at hand, of the queue its first
`look_ahead`; a set is changed by a whole search, not by one step; decode pauses while the step after it still meets
TPOT; who is late already may be passed by shorter prompts; decode's set moves at most three splits while prefill runs;
blocks for whole prompts at admission, above a watermark; alpha follows observations with a weight of 0.1. A prediction
prices one split, or the queue. `bullet-oss` is what the released code does (zejia-lin/BulletServe 47c77da): no
partition, first come first served, a whole prefill in one launch, 1664 tokens a batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.cost.gpu import load_gpu
from sim.engine.deployment import Deployment
from sim.engine.lanes import begin_lanes, execute_lanes
from sim.errors import SimctlError
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.policies.parts.bullet_plan import REACH, plan
from sim.policies.parts.bullet_state import BALANCES, MOST_PARTITIONS, REUSES, SCRATCH_SIZE, SEARCHES, SLOTS
from sim.policies.parts.splits import decode_sizes, split_parts
from sim.workload.workload import Workload

PAPER = "arXiv:2504.19516"
TTFT_PER_TOKEN_S, TPOT_S = 3.0e-3, 0.150  # of ShareGPT, Table 4


@jit
def advance(q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float) -> None:
    """Run the replica until `limit`."""
    while begin_lanes(q, r, x, limit):
        plan(q, r, a, b, y, ki, kf)
        if not execute_lanes(q, r, a, p, x):
            return


class BulletPolicy(CompiledPolicy):
    """SM sets by predicted TTFT and TPOT, at every layer group and decode step."""

    name = "bullet"
    source = "Bullet, arXiv:2504.19516 (ASPLOS 2026)"
    mirrors = "the paper's system on SGLang 0.4.6; its scheduler and estimator are not public"
    lanes = 2
    predicts = True
    state_slots = SLOTS
    split_reasons = (
        "one phase alone",
        "fewest decode SMs within TPOT",
        "more decode SMs for TPOT",
        "balanced, both limits missed",
        "decode paused",
        "decode on all SMs beside the last layers",
        "kept, the other phase is in flight",
    )
    knobs = {  # noqa: RUF012
        "partition": Knob(True, "SM sets of their own for prefill and decode; off: both on all SMs", PAPER),
        "scheduler": Knob(
            True, "reorder the queue and pause decode in bursts; off: first come first served", PAPER
        ),
        "contention_belief": Knob(
            True, "predictions know what the neighbour costs", f"{PAPER} section 3.2.3"
        ),
        "online_alpha": Knob(True, "predictions are corrected by what launches took", f"{PAPER} section 3.2"),
        "alpha_weight": Knob(0.1, "weight of one launch in that correction", "choice", minimum=0, maximum=1),
        "layer_step": Knob(
            1, "layers per prefill launch; 0: all at once", "choice; the value is not given", minimum=0
        ),
        "split": Knob("greedy", "how the split is found", f"{PAPER}; others: choice", choices=SEARCHES),
        "balance": Knob(
            "slowdown",
            "what is equal where both limits are missed: slowdown against all SMs, or latency over limit",
            "choice; not defined there",
            choices=BALANCES,
        ),
        "temporal_reuse": Knob(
            "layer",
            "SMs that the other phase leaves idle: none; a phase alone takes all at its next launch; decode's mask "
            "includes prefill's; and an upper bound, tails of prefill's waves work for decode",
            PAPER,
            choices=REUSES,
        ),
        "splits": Knob(
            16, "most splits that are tried, evenly over what the mechanism makes", "choice", minimum=1
        ),
        "min_decode_sms": Knob(8, "fewest SMs of either phase", "choice", minimum=1),
        "mask_overlap": Knob(
            True, "sets may overlap while a change is under way; off: wait", f"{PAPER} section 3.3"
        ),
        "handover_layers": Knob(
            1, "last layers of a prefill beside which decode has all SMs", "choice", minimum=0
        ),
        "percentile": Knob(90.0, "share of the requests whose limits decide", PAPER, minimum=1, maximum=100),
        "look_ahead": Knob(
            32, "waiting requests that are predicted and reordered", "choice", minimum=1, maximum=SCRATCH_SIZE
        ),
        "max_prefill_tokens": Knob(
            None,
            "prompt tokens that close a batch; default: the ridge of the roofline",
            f"{PAPER} section 3.3",
            minimum=1,
        ),
        "longest_pass": Knob(
            8192, "longer prompts run in pieces", "SGLang's chunked_prefill_size", minimum=16
        ),
        "max_num_seqs": Knob(
            512, "most running requests", "choice; the most that CUDA graphs are captured for", minimum=1
        ),
        "watermark": Knob(
            0.01, "share of the blocks kept free at admission", "vLLM v0's", minimum=0, maximum=1
        ),
        "decode_stream": Knob(
            "normal",
            "priority of decode's stream on shared SMs, where the profile has measured it",
            "choice; BulletServe 47c77da gives decode the higher one",
            choices=("normal", "high"),
        ),
        "ttft_ms_per_token": Knob(
            0.0, "TTFT limit a prompt token; 0: the experiment's, else 3", f"{PAPER} Table 4", minimum=0
        ),
        "tpot_ms": Knob(0.0, "TPOT limit; 0: the experiment's, else 150", f"{PAPER} Table 4", minimum=0),
        "prediction_us": Knob(10.2, "time of one prediction", f"{PAPER} Table 5", minimum=0),
        "sync_us": Knob(30.0, "host waits for each prefill launch", "choice", minimum=0),
        "handoff_us": Knob(210.0, "from prefill's to decode's process", f"{PAPER} Table 5", minimum=0),
    }
    advance = advance

    @property
    def decode_priority(self) -> str:
        """Priority of decode's stream, which the contention surface goes by."""
        return str(self["decode_stream"])

    @property
    def heeds_estimator(self) -> bool:
        """Without scheduler and partition there is nothing to decide."""
        return bool(self["partition"] or self["scheduler"])

    def max_tokens(self, deployment: Deployment) -> int:
        """The longest pass."""
        return min(int(self["longest_pass"]), deployment.max_context)

    def splits(self, deployment: Deployment) -> list[int]:
        """SMs of decode in every split, ascending; prefill has the rest."""
        total, least = deployment.sms, int(self["min_decode_sms"])
        made = decode_sizes(deployment, total, self.label)
        sizes = [size for size in made if least <= size <= total - least]
        if not sizes:
            raise SimctlError(
                f"policy '{self.label}': min_decode_sms = {least} leaves no split of the {total} SMs of "
                f"{deployment.gpu}"
            )
        most = min(int(self["splits"]), MOST_PARTITIONS // 2 - 1)
        picked = {round(n * (len(sizes) - 1) / max(1, most - 1)) for n in range(most)}
        return [sizes[n] for n in sorted(picked) if n < len(sizes)]

    def sm_sets(self, deployment: Deployment) -> list[tuple[int, int]]:
        """Splits, those that meet while decode moves from one to another, and either side beside all SMs."""
        total = deployment.sms
        if not self["partition"]:
            return [(total, total)]
        if self["temporal_reuse"] == "overlap" and not self._overlaps(deployment):
            raise SimctlError(
                f"policy '{self.label}': temporal_reuse: overlap needs sets that may overlap (mask_overlap, mechanism)"
            )
        decode = self.splits(deployment)
        near = [(i, j) for i in range(len(decode)) for j in range(len(decode)) if abs(i - j) <= REACH]
        pairs = [(total - decode[i], decode[j]) for i, j in near]
        if self._overlaps(deployment):
            pairs += [*((total, size) for size in decode), *((total - size, total) for size in decode)]
        return [pair for pair in pairs if sum(pair) <= total or self._overlaps(deployment)]

    def _overlaps(self, deployment: Deployment) -> bool:
        return bool(self["mask_overlap"]) and deployment.mechanism.overlap

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """As `sim.policies.parts.bullet_state` names them."""
        ns = [round(1e3 * self[key]) for key in ("prediction_us", "sync_us", "handoff_us")]
        decode = self.splits(deployment)
        parts = (
            split_parts(deployment, decode, self.price_partitions(deployment)) if self["partition"] else []
        )
        return [
            self.max_tokens(deployment),
            self.max_seqs(deployment),
            self._spare(deployment),
            int(self["layer_step"]),
            self._cap(deployment),
            int(self["look_ahead"]),
            *(int(self[key]) for key in ("partition", "scheduler", "contention_belief", "online_alpha")),
            SEARCHES.index(self["split"]),
            REUSES.index(self["temporal_reuse"]),
            int(self._overlaps(deployment)),
            int(self["handover_layers"]),
            *ns,
            round(1e9 * deployment.mechanism.switch_s),
            BALANCES.index(self["balance"]),
            max(1, len(decode)),
            *parts,
        ], [1.0 - float(self["percentile"]) / 100.0, float(self["alpha_weight"]), *self._limits(deployment)]

    def _limits(self, deployment: Deployment) -> list[float]:
        """TTFT, TTFT a token and TPOT of each class, in seconds."""
        limits: list[float] = []
        for target in deployment.targets:
            ttft, token, tpot = target.ttft_s, target.ttft_per_token_s, target.tpot_s
            if self["ttft_ms_per_token"] > 0:
                ttft, token = math.inf, self["ttft_ms_per_token"] / 1e3
            elif math.isinf(min(ttft, token)):
                token = TTFT_PER_TOKEN_S
            if self["tpot_ms"] > 0:
                tpot = self["tpot_ms"] / 1e3
            elif math.isinf(tpot):
                tpot = TPOT_S
            limits += [ttft, token, tpot]
        return limits

    def _cap(self, deployment: Deployment) -> int:
        """Tokens at which linear layers of 16-bit weights become bound by compute: so many FLOP a byte as tokens."""
        if self["max_prefill_tokens"] is not None:
            return int(self["max_prefill_tokens"])
        gpu = load_gpu(deployment.gpu)
        return math.ceil(gpu.peak_flops / gpu.hbm_bytes_per_s)

    def _spare(self, deployment: Deployment) -> int:
        return int(self["watermark"] * deployment.num_blocks)

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The watermark comes on top at admission."""
        return super().required_blocks(workload, deployment) + self._spare(deployment)
