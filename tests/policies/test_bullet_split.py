"""Bullet's searches for a split: greedy, direct and exhaustive answers on random states of a GPU's profile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bullet_states import World, world

from sim.policies.parts.bullet_prices import decode_s
from sim.policies.parts.bullet_split import (
    balanced,
    decode_ratio,
    decode_sms,
    find_knee,
    least_decode,
    prefill_ratio,
)
from sim.policies.parts.bullet_state import ASKED, BALANCES, KNEE, SEARCHES, SPLITS
from sim.policies.parts.bullet_track import allowed_s, tpot_ratio


def worlds(gpu: str, estimator: str, **knobs: Any) -> dict[str, World]:
    return {search: world(gpu, estimator, split=search, **knobs) for search in SEARCHES}


def random_state(rng: np.random.Generator, splits: int) -> dict[str, Any]:
    return {
        "tokens": int(2 ** rng.uniform(6, 13)),
        "history": 0,
        "batch": int(2 ** rng.uniform(0, 8)),
        "context": int(2 ** rng.uniform(7, 13)),
        "split": int(rng.integers(splits)),
    }


def prices(w: World) -> list[float]:
    return [decode_s(w.r, w.b, w.y, w.ki, s) for s in range(w.ki[SPLITS])]


def asked(w: World, search: Any, *more: Any) -> tuple[int, int]:
    """(answer, predictions) of a search."""
    w.r.policy_i[ASKED] = 0
    return search(w.r, w.b, w.y, w.ki, *more), int(w.r.policy_i[ASKED])


@pytest.mark.parametrize("estimator", ["oracle", "analytic"])
@pytest.mark.parametrize("gpu", ["h200-sxm", "a100-80gb-sxm"])
def test_the_least_decode_set_is_found_directly(gpu: str, estimator: str) -> None:
    """Within one granule of the best of all sets, with a few prices; greedily it is the best itself."""
    by = worlds(gpu, estimator)
    rng = np.random.default_rng(1)
    spent = dict.fromkeys(by, 0)
    for _ in range(200):
        state = random_state(rng, by["greedy"].ki[SPLITS])
        for w in by.values():
            w.put(**state)
        t = prices(by["greedy"])
        allowed = min(t) + (max(t) - min(t)) * rng.uniform() ** 2
        found = {}
        for name, w in by.items():
            found[name], n = asked(w, least_decode, allowed)
            spent[name] += n
        assert t[found["exhaustive"]] <= allowed
        assert all(price > allowed for price in t[: found["exhaustive"]])
        assert abs(found["closed_form"] - found["exhaustive"]) <= 1, (state, allowed)
        # from above it stops at the first set that is too small; a belief may have a bump there
        assert found["greedy"] == found["exhaustive"] or estimator == "analytic"
    assert spent["exhaustive"] == 200 * len(t)
    assert spent["closed_form"] < spent["exhaustive"] / 4
    assert spent["closed_form"] < spent["greedy"]


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("estimator", ["oracle", "analytic"])
def test_the_balanced_split_is_found_directly(estimator: str, balance: str) -> None:
    by = worlds("h200-sxm", estimator, balance=balance)
    rng, spent = np.random.default_rng(2), 0
    for _ in range(200):
        state = random_state(rng, by["greedy"].ki[SPLITS])
        since = 10 - rng.uniform(0, 1)
        limits = {
            "ttft": (since, since + rng.uniform(0.05, 1.5)),
            "tpot": (10 - rng.uniform(0, 3), int(rng.integers(0, 60)), rng.uniform(0.02, 0.2)),
        }
        found = {}
        for name, w in by.items():
            w.put(**state)
            w.limits(**limits)
            w.r.policy_i[ASKED] = 0
            found[name] = balanced(w.q, w.r, w.a, w.b, w.y, w.ki)
            spent += w.r.policy_i[ASKED] if name == "closed_form" else 0
        w = by["exhaustive"]
        ratios = [
            max(prefill_ratio(w.q, w.r, w.a, w.b, w.y, w.ki, s), decode_ratio(w.r, w.b, w.y, w.ki, s))
            for s in range(w.ki[SPLITS])
        ]
        assert ratios[found["exhaustive"]] == min(ratios)
        # some splits apart only where these do not differ
        near = 1.1 if abs(found["closed_form"] - found["exhaustive"]) <= 1 else 1.002
        assert ratios[found["closed_form"]] <= near * min(ratios), (state, limits)
    assert spent <= 200 * 5


@pytest.mark.parametrize("search", SEARCHES)
def test_limits_that_nothing_or_everything_meets(search: str) -> None:
    w = world(split=search, balance="limit")
    w.put(tokens=2000, history=0, batch=30, context=1000, split=5)
    assert least_decode(w.r, w.b, w.y, w.ki, 1e-6) == w.ki[SPLITS] - 1
    assert least_decode(w.r, w.b, w.y, w.ki, 10.0) == 0
    # TTFT out of reach, TPOT with all the slack of the world, and the other way round
    w.limits(ttft=(9.0, 9.1), tpot=(9.0, 1000, 0.2))
    assert balanced(w.q, w.r, w.a, w.b, w.y, w.ki) == 0
    w.limits(ttft=(9.9, 50.0), tpot=(9.0, 1, 0.02))
    assert balanced(w.q, w.r, w.a, w.b, w.y, w.ki) == w.ki[SPLITS] - 1


def test_slowdowns_are_balanced_where_both_phases_lose_alike() -> None:
    w = world("h200-sxm", "oracle", split="exhaustive", balance="slowdown")
    w.put(tokens=2000, history=0, batch=30, context=1000, split=5)
    s = balanced(w.q, w.r, w.a, w.b, w.y, w.ki)
    gaps = [
        prefill_ratio(w.q, w.r, w.a, w.b, w.y, w.ki, n) - decode_ratio(w.r, w.b, w.y, w.ki, n)
        for n in (s - 1, s, s + 1)
    ]
    assert gaps[0] < 0 < gaps[2]
    assert 1.2 < decode_ratio(w.r, w.b, w.y, w.ki, s) < 3


def test_the_knee_belongs_to_the_profile_and_is_no_prediction() -> None:
    w = world(split="closed_form", splits=15)
    w.put(tokens=2000, history=0, batch=7, context=300, split=5)
    w.r.policy_i[KNEE] = -1
    knee, n = asked(w, find_knee)
    w.put(tokens=2000, history=0, batch=200, context=8000, split=5)
    w.r.policy_i[KNEE] = -1
    again, _ = asked(w, find_knee)
    assert (knee, n) == (again, 0)
    assert decode_sms(w.r, w.ki, knee) < w.sms / 2


def test_slack_is_what_tpot_leaves() -> None:
    """First token 2 s ago and 30 tokens since, of 100 ms each: the next may be there after 1.1 s."""
    w = world()
    w.put(tokens=2000, history=0, batch=30, context=1000, split=5)
    w.limits(ttft=(9.0, 11.0), tpot=(8.0, 30, 0.1))
    assert allowed_s(w.r) == pytest.approx(0.1 * 31 - 2.0)
    assert tpot_ratio(w.r, allowed_s(w.r)) == pytest.approx(1.0)
    assert tpot_ratio(w.r, 0.0) == pytest.approx(2.0 / 3.1)
