"""semi-PD: prefill and decode as two processes under MPS percentages (x, y) that are set anew while they run.

arXiv:2504.19867 sections 4.3 and 5. x + y may exceed 100: of two overlapping sets a side has x' = x / max(100, x + y).
TTFT = a1 / (x' - lambda) + b1 with lambda = rate x prefill time on all SMs (M/M/1), TPOT = a2 / y' + b2; a and b are
refitted from what is observed. Every `window_size` launches the percentiles are held against the targets: if only
TTFT fails x rises step by step until its estimate holds or `max_step` is reached, if only TPOT fails y does; if both or
neither fail nothing changes (the text; the printed algorithm takes the TTFT branch when both fail). New processes
take `switch_s` to come up while the old split serves; each side then moves with its next launch.

Left open there and chosen here: window, step, percentile, what is forgotten between windows, TPOT observed as the time
from step to step, a side that has 100 % rises by taking a step from the other, targets of
400 and 200 ms (the loose ones of the 8B model) where the experiment sets none. Prompts go first come first served, in
chunks, with blocks for their whole length. The rule cannot tell a TTFT that fails for want of blocks: in overload it
gives prefill what decode can spare of its target. The released code is static: preset `semi-pd-oss`; {dynamic: false,
prefill_pct: 100} is uncontrolled sharing. MPS gives per cent: `mechanism: mps`; under others a set is the nearest that
they make.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.engine.deployment import Deployment
from sim.engine.lanes import begin_lanes, execute_lanes, last_launch
from sim.engine.layout import (
    COHORT,
    D_LAUNCH,
    D_PART,
    DECODE_LANE,
    FREE,
    LANE_PART,
    LAST_END,
    MODEL_LAYERS,
    N_CHUNKS,
    NOW,
    P_LAYERS,
    P_PART,
    PREFILL_LANE,
)
from sim.jit import jit
from sim.policies.base import CompiledPolicy, Knob
from sim.policies.parts.chunks import fill_chunks
from sim.policies.parts.observe import edges
from sim.policies.parts.predict import next_batch
from sim.policies.parts.semi_pd_feedback import (
    DYNAMIC,
    PART_OF,
    SEQS,
    SPARE,
    STEP_S,
    TOKENS,
    X,
    Y,
    adjust,
    note_prefill,
)
from sim.policies.parts.targets import target_s
from sim.policies.parts.two_lanes import clear_lanes, decodable, make_room, may_decode, may_prefill
from sim.workload.workload import Workload


@jit
def plan(q: Any, r: Any, a: Any, b: Any, y: Any, ki: Any, kf: Any) -> None:
    """Launch whatever is idle on its own set. While a split changes a side waits rather than leave SMs to nobody."""
    clear_lanes(a)
    adjust(q, r, ki, kf)
    sets, p_idle, d_idle = len(y.sms), may_prefill(r), may_decode(r)
    p_part, d_part = ki[PART_OF + r.policy_i[X]], ki[PART_OF + r.policy_i[Y]]
    beside_p = p_part if p_idle else last_launch(r, PREFILL_LANE, LANE_PART)
    beside_d = d_part if d_idle else last_launch(r, DECODE_LANE, LANE_PART)
    free = r.iv[FREE]
    if d_idle and decodable(r) > 0 and y.config[beside_p * sets + d_part] >= 0:
        free = make_room(q, r, a)
        a.iv[D_LAUNCH] = min(1, next_batch(r, a))
        a.iv[D_PART] = d_part
        # members go on from their last token; a step of newcomers alone starts now
        r.policy_f[STEP_S] = r.fv[LAST_END] if r.iv[COHORT] > 0 else r.fv[NOW]
    if p_idle and y.config[p_part * sets + beside_d] >= 0:
        fill_chunks(q, r, a, ki[TOKENS], ki[SEQS], ki[SPARE], free)
        if a.iv[N_CHUNKS] > 0:
            a.iv[P_LAYERS] = r.iv[MODEL_LAYERS]
            a.iv[P_PART] = p_part
            if ki[DYNAMIC] == 1:
                note_prefill(q, r, a, b)


@jit
def advance(q: Any, r: Any, a: Any, p: Any, x: Any, b: Any, y: Any, ki: Any, kf: Any, limit: float) -> None:
    """Run the replica until `limit`."""
    while begin_lanes(q, r, x, limit):
        plan(q, r, a, b, y, ki, kf)
        if not execute_lanes(q, r, a, p, x):
            return


class SemiPdPolicy(CompiledPolicy):
    """Two processes under MPS percentages that follow the observed latencies."""

    name = "semi-pd"
    source = "semi-PD, arXiv:2504.19867"
    mirrors = "the paper's description; infinigence/Semi-PD 2565f9f for the static preset"
    lanes = 2
    predicts = True
    knobs = {  # noqa: RUF012
        "prefill_pct": Knob(
            80,
            "x at the start, per cent of the SMs",
            "semi_pd/utils.py, SEMI_PD_PREFILL_SM_PERCENTILE",
            1,
            100,
        ),
        "decode_pct": Knob(
            100,
            "y at the start, per cent of the SMs",
            "semi_pd/utils.py, SEMI_PD_DECODE_SM_PERCENTILE",
            1,
            100,
        ),
        "dynamic": Knob(
            True, "the feedback loop runs", "arXiv:2504.19867 section 5; the released code is static"
        ),
        "window_size": Knob(200, "launches of a window", "choice; not given", minimum=1),
        "step": Knob(
            10, "per cent by which a side rises at a time", "choice; not given", minimum=1, maximum=50
        ),
        "max_step": Knob(3, "most steps of one change", "choice; not given", minimum=1),
        "percentile": Knob(
            0.9, "share of the requests that a target is for", "choice", minimum=0.01, maximum=0.999
        ),
        "ttft_slo_ms": Knob(
            None, "TTFT target; default: the experiment's, else 400", "arXiv:2504.19867", minimum=1
        ),
        "tpot_slo_ms": Knob(
            None,
            "TPOT target; default: the experiment's tpot_ms, else itl_ms, else 200",
            "arXiv:2504.19867",
            minimum=1,
        ),
        "switch_s": Knob(
            5.0, "seconds until new processes serve", "choice; 'seconds' in the paper", minimum=0
        ),
        "keep": Knob(0.8, "weight that earlier windows keep in the fits", "choice", minimum=0, maximum=1),
        "token_budget": Knob(8192, "prompt tokens of a prefill batch", "choice; SGLang's chunk", minimum=1),
        "max_num_seqs": Knob(256, "most running requests", "choice; vLLM's default", minimum=1),
        "watermark": Knob(
            0.01, "share of the blocks kept free at admission", "choice; vLLM v0's", minimum=0, maximum=1
        ),
    }
    advance = advance

    @property
    def heeds_estimator(self) -> bool:
        """The load that the feedback's fits subtract is believed; a static split asks for nothing."""
        return bool(self["dynamic"])

    def max_tokens(self, deployment: Deployment) -> int:
        """A prefill batch or a decode step."""
        return max(int(self["token_budget"]), self.max_seqs(deployment))

    def percentages(self) -> list[tuple[int, int]]:
        """Pairs (x, y) that the loop can reach."""
        x0, y0, step = int(self["prefill_pct"]), int(self["decode_pct"]), int(self["step"])
        if not self["dynamic"]:
            return [(x0, y0)]
        xs, ys = _levels(x0, step), _levels(y0, step)
        rising = [(x, y) for x in xs for y in ys if x >= x0 and y >= y0]
        return list(dict.fromkeys([*rising, *((100, y) for y in ys), *((x, 100) for x in xs)]))

    def sms(self, percentage: int, deployment: Deployment) -> int:
        """The set of SMs nearest to a percentage that the mechanism can make."""
        total = deployment.sms
        sizes = [*deployment.mechanism.sizes(total, deployment.compute_capability), total]
        return min(sizes, key=lambda size: (abs(size - percentage * total / 100), size))

    def sm_sets(self, deployment: Deployment) -> list[tuple[int, int]]:
        """The sets of every pair of percentages."""
        pairs = [(self.sms(x, deployment), self.sms(y, deployment)) for x, y in self.percentages()]
        return list(dict.fromkeys(pairs))

    def parameters(self, deployment: Deployment) -> tuple[list[int], list[float]]:
        """Limits, the loop's settings, the price partition of each percentage; targets and edges of the histograms."""
        sizes = self.price_partitions(deployment)
        ttft = target_s(self["ttft_slo_ms"], deployment, ("ttft_s",), 0.4)
        tpot = target_s(self["tpot_slo_ms"], deployment, ("tpot_s", "itl_s"), 0.2)
        used = {pct for pair in self.percentages() for pct in pair}
        return [
            int(self["token_budget"]),
            self.max_seqs(deployment),
            self._spare(deployment),
            *(
                int(self[name])
                for name in ("dynamic", "window_size", "step", "max_step", "prefill_pct", "decode_pct")
            ),
            *(sizes.index(self.sms(pct, deployment)) if pct in used else -1 for pct in range(101)),
        ], [
            ttft,
            tpot,
            *(float(self[name]) for name in ("percentile", "switch_s", "keep")),
            *edges(ttft),
            *edges(tpot),
        ]

    def _spare(self, deployment: Deployment) -> int:
        return int(self["watermark"] * deployment.num_blocks)

    def required_blocks(self, workload: Workload, deployment: Deployment) -> NDArray[np.int64]:
        """The watermark comes on top at admission."""
        return super().required_blocks(workload, deployment) + self._spare(deployment)


def _levels(start: int, step: int) -> list[int]:
    """Percentages that steps of `one_up` can reach."""
    return sorted(
        {*range(start, 101, step), *range(start, step - 1, -step), *range(100, step - 1, -step), step}
    )
