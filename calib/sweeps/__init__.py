"""All sweeps by name; `--operator NAME` picks among them."""

from __future__ import annotations

from collections.abc import Sequence

from calib.sweep import Sweep
from calib.sweeps.corun import CorunSweep, OperatorPairSweep, StaggerSweep
from calib.sweeps.fused import (
    AttentionShareSweep,
    FusedRandomSweep,
    FusedShapesSweep,
    FusedSweep,
    LimitsSweep,
)
from calib.sweeps.fused_power import FusedPowerSweep
from calib.sweeps.fused_scatter import HeadsRandomSweep, HeadsSweep, ScatterSweep
from calib.sweeps.operators import operator_sweeps
from calib.sweeps.others import ErrorSweep, HostSweep, KernelSweep, RandomSweep
from calib.sweeps.power import PowerSweep, TicketSweep
from calib.sweeps.served import DecodeSizesSweep, LayerSizesSweep, WarmSweep
from calib.sweeps.shapes import ExpertSweep, Fp8Sweep, ShapesSweep
from calib.sweeps.shards import ExpertShardsSweep, Fp8ShardsSweep, RoutingSweep, ShardsSweep
from calib.sweeps.steps import DecodeStepSweep, HotSweep, PrefillLayerSweep, StepSweep
from calib.sweeps.watts import ClockStepSweep, PowerDutySweep, PowerMixSweep
from sim.errors import SimctlError
from sim.suggest import nearest


def all_sweeps(random: int, seed: int) -> list[Sweep]:
    """Every sweep in the order in which they run; `random` held-out shapes of each kind are drawn from `seed`."""
    sweeps: list[Sweep] = [
        ErrorSweep(),
        HostSweep(),
        *operator_sweeps(),
        PrefillLayerSweep(),
        DecodeStepSweep(),
        StepSweep(),
        DecodeSizesSweep(),
        LayerSizesSweep(),
        WarmSweep(),
        CorunSweep(),
        OperatorPairSweep(),
        StaggerSweep(),
        LimitsSweep(),
        FusedSweep(),
        AttentionShareSweep(),
        TicketSweep(),
        FusedShapesSweep(),
        ScatterSweep(),
        HeadsSweep(),
        ShapesSweep(),
        ExpertSweep(),
        Fp8Sweep(),
        ShardsSweep(),
        ExpertShardsSweep(),
        RoutingSweep(),
        Fp8ShardsSweep(),
        HotSweep(),
        PowerSweep(),
        FusedPowerSweep(),
        PowerDutySweep(),
        ClockStepSweep(),
        PowerMixSweep(seed),
    ]
    if random:
        sweeps += [RandomSweep(random, seed), FusedRandomSweep(5 * random, seed), HeadsRandomSweep(seed)]
    return [*sweeps, KernelSweep()]  # last, so that no timing runs in a process that was profiled


def chosen_sweeps(names: Sequence[str], random: int, seed: int) -> list[Sweep]:
    """The sweeps called `names`, or all; raises SimctlError on a name that is none."""
    sweeps = all_sweeps(random, seed)
    known = {sweep.name: sweep for sweep in sweeps}
    for name in names:
        if name not in known:
            raise SimctlError(
                f"There is no operator '{name}' to calibrate; there are {', '.join(known)}.{nearest(name, known)}"
            )
    return [sweep for sweep in sweeps if not names or sweep.name in names]
