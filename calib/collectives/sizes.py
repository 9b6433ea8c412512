"""Message sizes to measure, and what a message's size is said to be.

As nccl-tests counts: `message_bytes` is the buffer of one GPU for an all-reduce, the whole result of an all-gather,
the whole input of a reduce-scatter, the send buffer of an all-to-all (its own part included), and the bytes sent one
way by sendrecv and exchange. Bus bandwidth is bytes over time times `bus_factor` (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import numpy as np

COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "alltoall", "sendrecv", "exchange")
KIB, GIB = 1 << 10, 1 << 30
MOST_TOKENS = 8192
HIDDEN = (4096, 8192)


def bus_factor(collective: str, gpus: int) -> float:
    """Bytes that a link carries per byte of the message."""
    if collective == "allreduce":
        return 2.0 * (gpus - 1) / gpus
    if collective in ("allgather", "reduce_scatter", "alltoall"):
        return (gpus - 1) / gpus
    return 1.0


def grid_sizes() -> list[tuple[int, int]]:
    """(bytes, refinement level): every doubling from 1 KiB to 1 GiB, then the sizes half-way between.

    The doublings hold what a model of 4096 or 8192 hidden makes of 1 to 8192 tokens in two-byte numbers.
    """
    powers = [KIB << i for i in range(21)]
    found = [(size, 0 if i % 4 == 0 else 1 if i % 2 == 0 else 2) for i, size in enumerate(powers)]
    return found + [(3 * size // 2, 3) for size in powers[:-1]]


def random_sizes(count: int, seed: int) -> list[int]:
    """Held-out sizes: tokens, even in their logarithm, of a random hidden size, in two-byte numbers."""
    rng = np.random.default_rng([seed, 7])
    tokens = np.exp(rng.uniform(0.0, np.log(MOST_TOKENS), count)).astype(int)
    return [int(2 * t * rng.choice(HIDDEN)) for t in tokens]
