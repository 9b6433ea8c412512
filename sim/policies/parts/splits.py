"""The splits of a GPU's SMs that a policy chooses among: decode gets a set, prefill the remainder."""

from __future__ import annotations

from collections.abc import Sequence

from sim.engine.deployment import Deployment
from sim.errors import SimctlError


def check_ready(deployment: Deployment, policy: str) -> None:
    """For a policy that moves SMs from launch to launch: raise SimctlError where a set has to be prepared first."""
    mechanism = deployment.mechanism
    if mechanism.prepare_s > 0:
        raise SimctlError(
            f"policy '{policy}' moves SMs from launch to launch, but a new set takes {mechanism.prepare_s:g} s under "
            f"mechanism '{mechanism.name}'; use green or libsmctrl"
        )


def decode_sizes(deployment: Deployment, most: int, policy: str) -> list[int]:
    """SMs that decode can have, ascending: at most `most` of the sizes that the mechanism makes, spread evenly."""
    check_ready(deployment, policy)
    sizes = deployment.mechanism.sizes(deployment.sms, deployment.compute_capability)
    if len(sizes) <= most:
        return sizes
    picked = {round(n * (len(sizes) - 1) / max(1, most - 1)) for n in range(most)}
    return [sizes[n] for n in sorted(picked)]


def split_parts(deployment: Deployment, decode: Sequence[int], partitions: Sequence[int]) -> list[int]:
    """Price partitions of prefill in every split, then those of decode, in the order of `decode`."""
    prefill = [partitions.index(deployment.sms - size) for size in decode]
    return [*prefill, *(partitions.index(size) for size in decode)]
