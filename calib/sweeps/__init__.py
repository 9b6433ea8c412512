"""All sweeps by name; `--operator NAME` picks among them."""

from __future__ import annotations

from collections.abc import Sequence

from calib.collectives.sweeps import GROUP, CrewSweep, crew_sweeps
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
    """The sweeps called `names`, or all that one GPU is enough for; raises SimctlError on a name that is none, and
    where sweeps of one GPU and of several are asked for at once."""
    sweeps, group = all_sweeps(random, seed), crew_sweeps(random, seed)
    known = {sweep.name: sweep for sweep in (*sweeps, *group)}
    for name in names:
        if name not in known and name != GROUP:
            raise SimctlError(
                f"There is no operator '{name}' to calibrate; there are {', '.join(known)}.{nearest(name, known)}"
            )
    if not names:
        return sweeps
    chosen = {sweep.name for sweep in group} if GROUP in names else set()
    found = [known[name] for name in known if name in chosen or name in names]
    several = [sweep.name for sweep in found if isinstance(sweep, CrewSweep)]
    if several and len(several) < len(found):
        other = next(sweep.name for sweep in found if sweep.name not in several)
        raise SimctlError(
            f"'{several[0]}' is measured on several GPUs and '{other}' on one: calibrate them one after the other, "
            "the second with --resume."
        )
    return found


def needs_crew(sweeps: Sequence[Sweep]) -> bool:
    """Are these measured on several GPUs?"""
    return any(isinstance(sweep, CrewSweep) for sweep in sweeps)
