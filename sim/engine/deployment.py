"""What a policy is given to work with: a KV pool, a GPU's SMs, and the mechanism that shares them out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.cost.attention_facts import TYPICAL, AttentionFacts
from sim.errors import SimctlError


@dataclass(frozen=True)
class Mechanism:
    """How SMs are given to a lane. `granules`: (least, step) of a set by compute capability; `overlap`: may the two
    sets share SMs; `switch_s`: what a launch on another set than the lane's last one takes longer; `prepare_s`: time
    until a set that was not made beforehand exists, while the old ones go on (a policy waits for it)."""

    name: str
    granules: Mapping[int, tuple[int, int]]
    overlap: bool
    switch_s: float
    source: str
    prepare_s: float = 0.0

    def sizes(self, sms: int, compute_capability: float) -> list[int]:
        """SM counts that the side asked for can have; the other side gets the remainder."""
        least, step = self.granules.get(int(compute_capability), (2, 2))
        return list(range(least, sms, step))


GREEN = Mechanism(
    "green",
    {8: (4, 2), 9: (8, 8), 10: (8, 8)},
    True,
    5e-6,
    "CUDA driver API cuDevSmResourceSplitByCount; contexts are made beforehand and chosen by stream",
)
LIBSMCTRL = Mechanism(
    "libsmctrl", {}, True, 4.1e-6, "Bullet Table 5: rewriting a stream's mask takes 4.1 us; TPCs of 2 SMs"
)
MPS = Mechanism(
    "mps",
    {7: (1, 1), 8: (1, 1), 9: (1, 1), 10: (1, 1)},
    True,
    0.0,
    "per cent of SMs, fixed when a process starts; semi-PD (arXiv:2504.19867) hides the start behind the old process",
    prepare_s=5.0,
)
MECHANISMS = {mechanism.name: mechanism for mechanism in (GREEN, LIBSMCTRL, MPS)}


@dataclass(frozen=True)
class Target:
    """What one SLO class asks of each of its requests; infinite where it asks nothing. Lower priority goes first."""

    ttft_s: float = math.inf
    ttft_per_token_s: float = math.inf
    tpot_s: float = math.inf
    itl_s: float = math.inf
    e2el_s: float = math.inf
    priority: int = 0


@dataclass(frozen=True)
class Deployment:
    """What a replica offers its policy: KV pool, context limit, the GPU's name and its SMs, and what is asked of it.

    `targets`: one per SLO class, in the order of the requests' class numbers. `pool`: prefill, decode or mixed, empty
    where replicas do everything. `tp`: GPUs of the replica; SMs and blocks are one's.
    `block_bytes`: of a KV block on one GPU.
    """

    num_blocks: int
    block_size: int
    max_context: int
    gpu: str
    sms: int = 1
    layers: int = 1
    mechanism: Mechanism = GREEN
    compute_capability: float = 9.0
    targets: tuple[Target, ...] = (Target(),)
    pool: str = ""
    tp: int = 1
    block_bytes: int = 0
    attention: AttentionFacts = TYPICAL


def check_sets(pairs: Sequence[tuple[int, int]], deployment: Deployment, policy: str) -> None:
    """Raise SimctlError for (prefill SMs, decode SMs) that share SMs where the mechanism keeps its sets apart."""
    for prefill, decode in pairs:
        if prefill + decode > deployment.sms and not deployment.mechanism.overlap:
            raise SimctlError(
                f"policy '{policy}': prefill on {prefill} and decode on {decode} SMs share some of the "
                f"{deployment.sms}, which '{deployment.mechanism.name}' does not allow"
            )
