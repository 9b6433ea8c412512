"""The fluid model of two lanes against closed forms: items with solo seconds, slowed while both lanes are busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lane_cost import LaneCost, lane_cost, lane_tables
from stub_cost import TICK
from workloads import workload

from sim.cost import load_cost
from sim.cost.pairs import compile_pairs
from sim.cost.shapes import Floats, Launch
from sim.engine import simulate
from sim.engine.lanes import _move_to, _set_rates, lane_end
from sim.engine.launches import start_item
from sim.engine.layout import (
    LANE_BATCH,
    LANE_BUSY,
    LANE_CONTEXT,
    LANE_INTEGERS,
    LANE_PART,
    LANES,
    NOW,
    make_replica,
)
from sim.policies import make_policy

SETS = (64, 68)
COST = lane_cost(lane_tables(TICK, TICK))
SECONDS = st.floats(0.01, 10)
FACTORS = st.tuples(st.floats(1, 3), st.floats(1, 3))


@dataclass(frozen=True)
class Item:
    """So many solo seconds on a lane, from `start` on or from when the lane is free."""

    lane: int
    start: float
    solo: float


def ends(items: Sequence[Item], factors: tuple[float, float]) -> list[float]:
    """When each item ends in the engine's lanes; those of a lane are given in order."""
    x = compile_pairs(lane_cost(lane_tables(TICK, TICK), factors), SETS, [SETS])
    r = make_replica(10, 16, 4, 0, False, [], [COST.gpu.sms, *SETS], COST.model.layers)
    for lane in range(2):
        r.iv[LANES + lane * LANE_INTEGERS + LANE_PART] = 1 + lane
        r.iv[LANES + lane * LANE_INTEGERS + LANE_BATCH] = 1
        r.iv[LANES + lane * LANE_INTEGERS + LANE_CONTEXT] = 100
    found = [0.0] * len(items)
    waiting = [[n for n, item in enumerate(items) if item.lane == lane] for lane in range(2)]
    running: list[int | None] = [None, None]
    while any(waiting) or running != [None, None]:
        begins = [
            max(items[queue[0]].start, r.fv[NOW]) if queue and running[lane] is None else np.inf
            for lane, queue in enumerate(waiting)
        ]
        stops = [lane_end(r, lane) for lane in range(2)]
        now = float(min(*begins, *stops))
        _move_to(r, now)
        for lane in range(2):
            at = running[lane]
            if at is not None and stops[lane] <= now:
                found[at], running[lane] = now, None
                r.iv[LANES + lane * LANE_INTEGERS + LANE_BUSY] = 0
        for lane, queue in enumerate(waiting):
            if queue and running[lane] is None and items[queue[0]].start <= now:
                running[lane] = queue.pop(0)
                solo = items[running[lane]].solo  # type: ignore[index]
                start_item(r, lane, solo, solo, 0.0, 0.0, 0.0)
        _set_rates(r, x)
    return found


def close(values: Any) -> Any:
    return pytest.approx(values, rel=1e-9)


@given(a=SECONDS, b=SECONDS, later=st.floats(0, 12), factors=FACTORS)
def test_two_items_with_a_staggered_start(
    a: float, b: float, later: float, factors: tuple[float, float]
) -> None:
    f, g = factors
    found = ends([Item(0, 0.0, a), Item(1, later, b)], factors)
    if later >= a:
        assert found == close([a, later + b])
        return
    # both run from `later` on until one ends; the other goes on alone with what it has left
    of_a, of_b = (a - later) * f, b * g
    if of_a <= of_b:
        assert found == close([later + of_a, later + of_a + b - of_a / g])
    else:
        assert found == close([later + of_b + a - later - of_b / f, later + of_b])


items = st.lists(st.tuples(st.integers(0, 1), st.floats(0, 20), SECONDS), min_size=1, max_size=9).map(
    lambda rows: [Item(*row) for row in sorted(rows, key=lambda row: row[1])]
)


@given(items=items, factors=FACTORS)
def test_the_names_of_the_lanes_change_nothing(items: list[Item], factors: tuple[float, float]) -> None:
    swapped = [Item(1 - one.lane, one.start, one.solo) for one in items]
    assert ends(swapped, factors[::-1]) == close(ends(items, factors))


@given(items=items, factors=FACTORS, part=st.floats(0.05, 0.95), which=st.integers(0, 8))
def test_an_item_in_two_parts_ends_when_the_whole_does(
    items: list[Item], factors: tuple[float, float], part: float, which: int
) -> None:
    at = which % len(items)
    one = items[at]
    parts = [Item(one.lane, one.start, one.solo * part), Item(one.lane, one.start, one.solo * (1 - part))]
    found = ends([*items[:at], *parts, *items[at + 1 :]], factors)
    assert [*found[:at], *found[at + 1 :]] == close(ends(items, factors))


@given(items=items, own=st.floats(1, 3))
def test_a_neighbour_of_no_demand_changes_nothing(items: list[Item], own: float) -> None:
    """It may be slowed itself, but costs the other lane nothing."""
    mine = [one for one in items if one.lane == 0]
    found = ends(items, (1.0, own))
    assert [end for end, one in zip(found, items, strict=True) if one.lane == 0] == close(
        ends(mine, (1.0, 1.0))
    )


class Shared(LaneCost):
    """Common SMs are shared half and half while both run."""

    def slowdowns(
        self, a: Sequence[Launch], b: Sequence[Launch], split: tuple[int, int], overlap: int = 0
    ) -> tuple[Floats, Floats]:
        of_a, of_b = (np.full((len(a), len(b)), sms / (sms - overlap / 2)) for sms in split)
        return of_a, of_b

    @property
    def profile_hash(self) -> str:
        return "shared"


@pytest.mark.parametrize(("prefill_sms", "decode_sms"), [(132, 132), (88, 88), (64, 132), (64, 68)])
def test_common_sms_are_shared_while_both_lanes_run(prefill_sms: int, decode_sms: int) -> None:
    plain = lane_cost(lane_tables(4 * TICK, 64 * TICK))
    cost = Shared(plain.model, plain.profile, plain.launching, plain.scale)
    object.__setattr__(cost, "tables", plain.tables)
    object.__setattr__(cost, "factors", (0.0, 0.0))
    entry = {"name": "static-split", "prefill_sms": prefill_sms, "decode_sms": decode_sms}
    load = workload([0.0, 32 * TICK], [8, 200], [40, 1])
    records = simulate(load, make_policy(entry), cost, num_gpu_blocks=99, jitter=False, record_steps=True)
    common = max(0, prefill_sms + decode_sms - 132)
    of_prefill, of_decode = (sms / (sms - common / 2) for sms in (prefill_sms, decode_sms))
    assert records.requests["first_token_s"][1] == close((32 + 800 * of_prefill) * TICK)
    first = records.steps[records.steps["lane"] == 1].iloc[0]  # type: ignore[index]
    assert first["end_s"] - first["start_s"] == close(64 * of_decode * TICK)


@pytest.mark.parametrize("profile", ["spec", "h200-sxm"])
@pytest.mark.parametrize("split", [(112, 20), (64, 68), (16, 116), (132, 132), (132, 68)])
def test_two_launches_together_draw_no_more_than_the_bandwidth(profile: str, split: tuple[int, int]) -> None:
    cost = load_cost("llama-3.1-8b", "h200-sxm", profile)
    sizes = product((64, 512, 4096), (0, 8192))
    prefills = [Launch(chunks=((q, h),)) for q, h in sizes]
    decodes = [
        Launch(decode_batch=b, decode_context_sum=b * c, decode_context_max=c, graph=True)
        for b, c in product((1, 16, 128), (256, 4096))
    ]
    of_a, of_b = cost.slowdowns(prefills, decodes, split, max(0, sum(split) - 132))
    for i, a in enumerate(prefills):
        for j, b in enumerate(decodes):
            alone = cost.solo(a, split[0]), cost.solo(b, split[1])
            drawn = sum(
                one.hbm_bytes / (one.gpu_s * slow)
                for one, slow in zip(alone, (of_a[i, j], of_b[i, j]), strict=True)
            )
            assert drawn <= cost.gpu.hbm_bytes_per_s
