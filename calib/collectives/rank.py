"""A process of one rank: joins the group, then measures the points that the parent sends, until it sends None.

Every message back is (state, value): "ready" with facts, "ok" with the pieces of a point, "error" with a reason.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import parent_process
from typing import Any

from calib.collectives.team import POOL_BYTES, Team
from calib.measure import Protocol

TINY_POOL = 1 << 22  # on the CPU


@dataclass(frozen=True)
class Place:
    """Where a rank belongs. `visible`: the GPUs of the group by NVML index, this rank's first."""

    rank: int
    size: int
    rendezvous: str
    visible: list[int]
    seed: int
    protocol: Protocol
    model: str
    cpu: bool = False


@dataclass
class Here:
    """What a point is measured with: the rank's group, meter, and its benches by model."""

    place: Place
    team: Team
    meter: Any
    labs: dict[str, Any] = field(default_factory=dict)


def main(connection: Any, place: Place) -> None:
    """Body of the process; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        here = join(place)
        connection.send(("ready", facts(here)))
    except Exception as error:
        connection.send(("error", reason_of(error)))
        os._exit(1)
    from calib.collectives.points import measure

    while True:
        try:
            point = connection.recv()
        except EOFError:
            break
        if point is None:
            break
        try:
            connection.send(("ok", measure(here, point)))
        except Exception as error:  # whatever a library raises becomes a row that says so
            connection.send(("error", reason_of(error)))
    # graphs hold the communicator, and destroying either first can wait for ever: let the driver clean up
    os._exit(0)


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def reason_of(error: Exception) -> str:
    """One line for a row."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


def join(place: Place) -> Here:
    """Set the environment up before CUDA starts, and join the group over the loopback."""
    if not place.cpu:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as NVML counts
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, place.visible))
        # multicast over NVLink can leave a shared machine's GPUs unusable when a program dies with it
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    import torch
    import torch.distributed as dist

    from calib.collectives.stage import CpuStage, CudaStage

    meter = None
    if not place.cpu:
        from calib.device import Meter, require_idle

        meter = Meter(place.visible[0])
        require_idle(meter, f"GPU {place.visible[0]}")
        torch.cuda.set_device(0)
    stage: Any = CpuStage(torch) if place.cpu else CudaStage(torch)
    dist.init_process_group(
        stage.backend,
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=120),
    )
    team = Team(place.rank, place.size, stage, place.seed, TINY_POOL if place.cpu else POOL_BYTES)
    team.agree(0.0)  # the communicator is made before anything is captured
    return Here(place, team, meter)


def facts(here: Here) -> dict[str, Any]:
    """What the parent says of the group: the device, the libraries, the links."""
    if here.place.cpu:
        return {}
    from calib.collectives.link import link_facts, nccl_facts
    from calib.device import gpu_facts

    torch = here.team.torch
    return {
        "gpu": gpu_facts(here.meter),
        "group": {**nccl_facts(torch), "link": link_facts(sorted(here.place.visible))},
    }
